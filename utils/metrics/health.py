"""What looks wrong in the metrics of a run, in words, with what to try."""

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import NamedTuple

START = 3  # steps whose median is the run's beginning
QUIET = 10  # steps without a symptom after which it is told again


class Symptom(NamedTuple):
    """`is_there(now, start, recent)` of one metric: its value, its median at the start, and that of the steps since."""

    metric: str
    is_there: Callable[[float, float, float], bool]
    words: str  # filled with now, start and recent


SYMPTOMS = (
    Symptom("env/groups_without_signal", lambda now, *_: now > 0.9,
            "{now:.0%} of the groups have equal rewards and teach nothing: where all fail, try easier problems, a "
            "larger --group_size or a partial reward; where all succeed, harder problems"),
    Symptom("entropy", lambda now, start, _: now < 0.2 * start,
            "entropy has fallen from {start:.2g} to {now:.2g} nats, so completions are nearly all alike: raise "
            "--entropy_coef or --clip_epsilon_high, or lower --lr"),
    Symptom("env/finished", lambda now, *_: now < 0.5,
            "only {now:.0%} of the completions end before the limit: raise --num_generation_tokens, or set "
            "--length_reward overlong or --do_truncation_filter 1"),
    Symptom("inference_recompute/logprob_diff", lambda now, start, _: now > max(0.02, 3 * start),
            "log-probabilities of sampler and trainer differ by {now:.2g} nats a token: set --importance_correction "
            "truncate, or --dtype float32"),
    Symptom("approx_kl", lambda now, *_: now > 0.1,
            "the policy moves by a KL of {now:.2g} within a step: lower --lr or --ppo_epochs, or set --target_kl"),
    Symptom("kl", lambda now, start, recent: now > max(1.0, 3 * recent),
            "the KL to the initial model has risen to {now:.2g} nats a token from {recent:.2g}: raise --kl_coef or "
            "lower --lr"),
    Symptom("grad_norm", lambda now, start, recent: now > 10 * max(start, recent) > 0,
            "the gradient norm is {now:.2g}, usually {recent:.2g}: lower --lr or --max_grad_norm if it stays"),
)  # fmt: skip


class Adviser:
    """Looks at the metrics of each step, in order."""

    def __init__(self, symptoms: Sequence[Symptom] = SYMPTOMS):
        self.symptoms = symptoms
        self.history: dict[str, list[float]] = {symptom.metric: [] for symptom in symptoms}
        self.last_seen: dict[str, int] = {}

    def look(self, step: int, metrics: Mapping[str, float]) -> list[str]:
        """A sentence for each symptom that is new, or back after QUIET steps."""
        told = []
        for metric, is_there, words in self.symptoms:
            if metric not in metrics:
                continue
            now, past = float(metrics[metric]), self.history[metric]
            start, recent = (median(some) if some else now for some in (past[:START], past[-2 * QUIET :]))
            if is_there(now, start, recent):
                if step - self.last_seen.get(metric, -QUIET - 1) > QUIET:
                    told.append(words.format(now=now, start=start, recent=recent))
                self.last_seen[metric] = step
            past.append(now)
        return told
