"""Health checks of a run's metrics: a warning in words, with settings to try."""

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import NamedTuple

from utils.metrics.jsonl import JSON
from utils.reporting.plots import format_value

START = 3  # steps whose median is the run's beginning
QUIET = 10  # steps without a symptom after which it is reported again


class Symptom(NamedTuple):
    """`is_present(now, start, recent)` of a metric: its value, its median at the start and in recent steps."""

    metric: str
    is_present: Callable[[float, float, float], bool]
    words: str  # filled with now, start, recent and same: see `describe_same`


SYMPTOMS = (
    Symptom("env/groups_without_signal", lambda now, *_: now > 0.9,
            "{now:.0%} of the groups have equal rewards{same} and teach nothing: where all fail, try easier problems, "
            "a larger --group_size or a partial reward; where all succeed, harder problems"),
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


class HealthChecks:
    """Looks for symptoms in the metrics of each step; the steps come in order."""

    def __init__(self, symptoms: Sequence[Symptom] = SYMPTOMS):
        self.symptoms = symptoms
        self.history: dict[str, list[float]] = {symptom.metric: [] for symptom in symptoms}
        self.last_seen: dict[str, int] = {}

    def find_warnings(self, step: int, metrics: Mapping[str, JSON]) -> dict[str, str]:
        """Returns a sentence for each symptom that is new, or back after QUIET steps, by its metric."""
        warnings = {}
        if "env/finished" in metrics:
            metrics = {**metrics, "env/finished": share_within_limit(metrics)}
        same = describe_same(metrics.get("env/return"), metrics.get("env/return_spread"))
        for metric, is_present, words in self.symptoms:
            if metrics.get(metric) is None:
                continue
            now = float(metrics[metric])
            past = self.history[metric]
            start = median(past[:START] or [now])
            recent = median(past[-2 * QUIET :] or [now])
            if is_present(now, start, recent):
                last_seen = self.last_seen.get(metric, -QUIET - 1)
                if step - last_seen > QUIET:
                    warnings[metric] = words.format(now=now, start=start, recent=recent, same=same)
                self.last_seen[metric] = step
            past.append(now)
        return warnings


def describe_same(reward: float | None, spread: float | None) -> str:
    """Returns in brackets the reward of all rollouts, by their mean and spread; empty where they differ."""
    return f" ({format_value('env/return', reward)} everywhere)" if spread == 0 and reward is not None else ""


def share_within_limit(metrics: Mapping[str, JSON]) -> float:
    """Returns the share of completions that end before the limit of tokens; episodes may also use up their turns."""
    is_episode = any(name.startswith("stop/") for name in metrics)
    return 1 - metrics.get("stop/max_tokens", 0.0) if is_episode else metrics["env/finished"]
