"""Health checks of a run's metrics: a warning in words, with settings to try."""

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import NamedTuple

from utils.metrics.curves import format_value
from utils.metrics.jsonl import JSON

START = 3  # steps whose median is the run's beginning
TRY = "core/eval.py --show 5"
HARD = "try easier problems, a larger --group_size or a partial reward"
QUIET = 10  # steps without a symptom after which it is reported again


class Symptom(NamedTuple):
    """`is_present(now, start, recent)` of a metric: its value, its median at the start and in recent steps."""

    metric: str
    is_present: Callable[[float, float, float], bool]
    words: str  # filled with now, start, recent, same (`describe_same`) and advice (`advise_equal`)


SYMPTOMS = (
    Symptom("env/reward_errors", lambda now, *_: now > 0,
            "the reward failed for {now:.0f} replies of the step, which are dropped: see "
            "reward_failures.jsonl, and try the reward by core/eval.py --show 5"),
    Symptom("env/reward_timeouts", lambda now, *_: now > 0,
            "the reward took too long for {now:.0f} replies of the step: raise --score_timeout"),
    Symptom("env/groups_without_signal", lambda now, *_: now > 0.9,
            "{now:.0%} of the groups have equal rewards{same} and teach nothing: {advice}"),
    Symptom("entropy", lambda now, start, _: now < 0.2 * start,
            "entropy has fallen from {start:.2g} to {now:.2g} nats, so completions are nearly all alike: raise "
            "--entropy_coef or --clip_epsilon_high, or lower --lr"),
    Symptom("env/finished", lambda now, *_: now < 0.5,
            "only {now:.0%} of the completions end before the limit: raise --num_generation_tokens, or set "
            "--length_reward overlong or --do_truncation_filter 1"),
    Symptom("distill/cut_off", lambda now, *_: now > 0,
            "{now:.0%} of the completions are truncated at the limit, and a policy taught on these writes ever "
            "longer ones: keep it near the reference model by --kl_coef, raise --num_generation_tokens, or set "
            "--do_truncation_filter 1"),
    Symptom("inference_recompute/logprob_diff", lambda now, start, _: now > max(0.02, 3 * start),
            "log-probabilities of sampler and trainer differ by {now:.2g} nats a token: set --importance_correction "
            "truncate, or --dtype float32"),
    Symptom("approx_kl", lambda now, *_: now > 0.1,
            "the policy moves by a KL of {now:.2g} within a step: lower --lr or --ppo_epochs"),
    Symptom("kl", lambda now, start, recent: now > max(1.0, 3 * recent),
            "the KL to the initial model has risen to {now:.2g} nats a token from {recent:.2g}: raise --kl_coef or "
            "lower --lr"),
    Symptom("grad_norm", lambda now, start, recent: now > 10 * max(start, recent) > 0,
            "the gradient norm is {now:.2g}, usually {recent:.2g}: lower --lr or --max_grad_norm if it stays"),
)  # fmt: skip
MISLEADING = ("env/groups_without_signal", "env/finished")  # what they advise does not help after a collapse


class HealthChecks:
    """Looks for symptoms in the metrics of each step; the steps come in order."""

    def __init__(self):
        self.history: dict[str, list[float]] = {symptom.metric: [] for symptom in SYMPTOMS}
        self.last_seen: dict[str, int] = {}
        self.collapse = Collapse()

    def find_warnings(self, step: int, metrics: Mapping[str, JSON]) -> dict[str, str]:
        """Returns a sentence for each symptom that is new, or back after QUIET steps, by its metric."""
        present = self.find_symptoms(metrics)
        num_failed = sum(metrics.get(f"env/reward_{kind}") or 0 for kind in ("errors", "timeouts"))
        if num_failed > metrics.get("rollout/num_rollouts", math.inf) / 2:
            present.pop("env/groups_without_signal", None)  # their rewards are equal for want of any
        present = self.collapse.find(step, metrics) | present
        if self.collapse.has_come:
            present = {metric: words for metric, words in present.items() if metric not in MISLEADING}
        is_new = {metric: step - self.last_seen.get(metric, -QUIET - 1) > QUIET for metric in present}
        self.last_seen |= dict.fromkeys(present, step)
        return {metric: words for metric, words in present.items() if is_new[metric]}

    def find_symptoms(self, metrics: Mapping[str, JSON]) -> dict[str, str]:
        """Returns a sentence for each symptom of a step, by its metric."""
        present = {}
        advice = advise_equal(metrics)
        same = describe_same(metrics.get("env/return"), metrics.get("env/return_spread"))
        for metric, is_present, words in SYMPTOMS:
            if metrics.get(metric) is None:
                continue
            now = float(metrics[metric])
            past = self.history[metric]
            start = median(past[:START] or [now])
            recent = median(past[-2 * QUIET :] or [now])
            if is_present(now, start, recent):
                present[metric] = words.format(now=now, start=start, recent=recent, same=same, advice=advice)
            past.append(now)
        return present


class Collapse:
    """Looks for updates that change the policy too much, and for a return that falls within a step or two of one.

    A collapse differs from noise in two ways. The fall is large against the last steps and the standard error of a
    batch. And the policy's jump left a trace: a large update or KL in the steps before, or another length or entropy
    since.
    """

    def __init__(self):
        self.steps: list[tuple[int, Mapping[str, JSON]]] = []  # the last ones before the collapse
        self.has_come = False  # and rewards are not back yet

    def find(self, step: int, metrics: Mapping[str, JSON]) -> dict[str, str]:
        """Returns a sentence for a large update of this step, and for a return that has fallen, by metric."""
        now = metrics.get("env/return")
        if now is None:
            return {}
        found = {}
        if is_large_update(metrics):
            share = metrics["update_norm"] / metrics["param_norm"]
            found["update_norm"] = (
                f"the update of step {step} changed the weights by {share:.0%} of their norm: lower --lr"
            )
        before = [metrics for _, metrics in self.steps]
        level = median([past["env/return"] for past in before[-START:]] or [now])
        fall = level - now
        is_large = fall > 0.7 * abs(level) and fall > 3 * largest_error(metrics, *before[-START:])
        is_lowest = all(now < past["env/return"] for past in before)
        has_fallen = is_large and is_lowest and has_jumped(metrics, before[-START:])
        follows_large = bool(before) and is_large_update(before[-1])
        is_back = fall <= 0.5 * abs(level) and (metrics.get("env/groups_without_signal") or 0.0) <= 0.9
        self.has_come = not is_back and (self.has_come or has_fallen or follows_large)
        if not self.has_come:
            self.steps = [*self.steps, (step, metrics)][-2 * QUIET :]
        elif is_large:
            level, now = (format_value("env/return", value) for value in (level, now))
            last = self.steps[-1][0]
            found["env/return"] = f"the return fell from {level} to {now} after the update of step {last}: lower --lr"
        return found


def is_large_update(metrics: Mapping[str, JSON]) -> bool:
    """True if the updates of a step changed the weights by more than a quarter of their norm."""
    return (metrics.get("update_norm") or 0.0) > 0.25 * (metrics.get("param_norm") or math.inf)


def largest_error(*steps: Mapping[str, JSON]) -> float:
    """Returns the largest standard error that the mean reward of one of these steps can have: half the spread / √n."""
    return max(0.5 * (x.get("env/return_spread") or 0.0) / x.get("rollout/num_rollouts", 1) ** 0.5 for x in steps)


def has_jumped(metrics: Mapping[str, JSON], before: Sequence[Mapping[str, JSON]]) -> bool:
    """True if the policy of a step is far from that of the steps before."""
    for past in before:
        if is_large_update(past) or (past.get("approx_kl") or 0.0) > 0.1:
            return True
    for name in ("env/length", "entropy"):
        values = [past[name] for past in before if past.get(name)]
        if values and metrics.get(name) and not 0.5 < metrics[name] / median(values) < 2:
            return True
    return False


def describe_same(reward: float | None, spread: float | None) -> str:
    """Returns in brackets the reward of all rollouts, by their mean and spread; empty if they differ."""
    return f" ({format_value('env/return', reward)} everywhere)" if spread == 0 and reward is not None else ""


def advise_equal(metrics: Mapping[str, JSON]) -> str:
    """Returns what to try if the rewards of groups are equal, by the cause that the step's metrics show."""

    def mean(name: str) -> float:
        value = metrics.get(f"env/{name}")
        return math.nan if value is None else float(value)

    number = metrics.get("rollout/num_rollouts") or math.nan
    failed = (metrics.get("env/reward_errors") or 0) + (metrics.get("env/reward_timeouts") or 0)
    if failed > number / 10:
        return f"the reward failed for {failed:.0f} of {number:.0f} replies: see reward_failures.jsonl"
    if mean("correct_answer") > 0.9:
        return f"{mean('correct_answer'):.0%} of the replies are right: take harder problems; {TRY} shows what is paid"
    if metrics.get("env/return_spread") == 0 and mean("return") != 0:
        return f"the reward is the same whatever the reply, or so it seems: {TRY} shows what it gives to other replies"
    if mean("correct_answer") > 0.1:
        return "all fail in some and all succeed in others: a larger --group_size, or problems of middle difficulty"
    if mean("finished") < 0.5:
        return f"only {mean('finished'):.0%} of the replies end before the limit: raise --num_generation_tokens"
    if mean("format") < 0.1:
        return (
            f"{1 - mean('format'):.0%} of the replies give no answer in the asked form: {TRY} shows both; ask for it "
            "in the prompt, teach it by core/sft.py, or set another --env_options form=..."
        )
    if mean("format") >= 0.1:
        few = "hardly one" if mean("correct_answer") > 0 else "none"
        return (
            f"{mean('format'):.0%} of the replies give an answer in the asked form and {few} is right: "
            f"{HARD}, unless the grader refuses right ones, which {TRY} shows"
        )
    return f"{TRY} shows what the reward gives; where the replies are wrong, {HARD}"
