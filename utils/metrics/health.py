"""Health checks of a run's metrics: a warning in words, with settings to try."""

import math
from collections.abc import Callable, Mapping
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
    Symptom("update_norm", lambda now, *_: now > 0.25,
            "the updates of the step changed the weights by {now:.0%} of their norm: lower --lr"),
)  # fmt: skip
JUMPS = ("update_norm", "approx_kl")  # once a policy has jumped, advice on problems and lengths does not help
MISLEADING = ("env/groups_without_signal", "env/finished")


class HealthChecks:
    """Looks for symptoms in the metrics of each step; the steps come in order."""

    def __init__(self):
        self.history: dict[str, list[float]] = {symptom.metric: [] for symptom in SYMPTOMS}
        self.last_seen: dict[str, int] = {}

    def find_warnings(self, step: int, metrics: Mapping[str, JSON]) -> dict[str, str]:
        """Returns a sentence for each symptom that is new, or back after QUIET steps, by its metric."""
        present = self.find_symptoms(metrics)
        num_failed = (metrics.get("env/reward_errors") or 0) + (metrics.get("env/reward_timeouts") or 0)
        if num_failed > metrics.get("rollout/num_rollouts", math.inf) / 2:
            present.pop("env/groups_without_signal", None)  # their rewards are equal for want of any
        if any(name in self.last_seen or name in present for name in JUMPS):
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
            now, past = float(metrics[metric]), self.history[metric]
            if metric == "update_norm":
                now /= metrics.get("param_norm") or math.inf
            start, recent = (median(values or [now]) for values in (past[:START], past[-2 * QUIET :]))
            if is_present(now, start, recent):
                present[metric] = words.format(now=now, start=start, recent=recent, same=same, advice=advice)
            past.append(now)
        return present


def describe_same(reward: float | None, spread: float | None) -> str:
    """Returns in brackets the reward of all rollouts, by their mean and spread; empty if they differ."""
    return f" ({format_value('env/return', reward)} everywhere)" if spread == 0 and reward is not None else ""


def advise_equal(metrics: Mapping[str, JSON]) -> str:
    """Returns what to try if the rewards of groups are equal, by the cause that the step's metrics show."""
    names = ("correct_answer", "finished", "format")
    correct, finished, has_format = (
        math.nan if metrics.get(f"env/{name}") is None else float(metrics[f"env/{name}"]) for name in names
    )
    if correct > 0.9:
        return f"{correct:.0%} of the replies are right: take harder problems; {TRY} shows what is paid"
    if metrics.get("env/return_spread") == 0 and metrics.get("env/return"):
        return f"the reward seems to be the same for every reply: {TRY} shows what it gives to other replies"
    if correct > 0.1:
        return "all fail in some and all succeed in others: a larger --group_size, or problems of middle difficulty"
    if finished < 0.5:
        return f"only {finished:.0%} of the replies end before the limit: raise --num_generation_tokens"
    if has_format < 0.1:
        return (
            f"{1 - has_format:.0%} of replies have no answer in the required format: {TRY} shows both; ask for it in "
            "the prompt, teach it by core/sft.py, or set another --env_options form=..."
        )
    if has_format >= 0.1:
        return (
            f"{has_format:.0%} of replies have an answer in the right format and hardly one is right: {HARD}, unless "
            f"the grader rejects correct ones, which {TRY} shows"
        )
    return f"{TRY} shows what the reward gives; where the replies are wrong, {HARD}"
