"""Rules that end a run before its last step: --stop_at "test_env/correct_answer>=0.9, 12: approx_kl>0.1"."""

import operator
import re
from collections.abc import Collection, Mapping
from typing import NamedTuple

import numpy as np

from utils.evaluation.estimates import task_estimates
from utils.metrics.curves import is_share
from utils.settings.errors import UserError, most_similar

STOPPED = "stopped_by"  # in Progress.memory: the rule that ended the run
RULE = re.compile(r"\s*(?:(\d+)\s*:)?\s*([^<>]*[^<>\s])\s*(>=|<=|>|<)\s*([-+.\deE]+)\s*(?:,|$)")
COMPARISONS = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt}
METRICS = {  # names of single numbers, by the setting without which they are not logged; scores: see `metric_names`
    "": (
        "lr grad_norm update_norm param_norm num_rows speed/padding memory/peak_gb compile/num_programs "
        "compile/num_from_cache times/compile times/run times/step times/test times/update"
    ),
    "batch_size": (
        "data/loss data/entropy data/epochs test_data/loss test_data/loss_ci speed/tokens_per_second times/data"
    ),
    "beta": (
        "rewards/chosen rewards/rejected rewards/accuracies rewards/margins test_data/rewards/chosen times/logprobs "
        "test_data/rewards/rejected test_data/rewards/accuracies test_data/rewards/margins"
    ),
    "groups_per_batch": (
        "loss policy_loss entropy_loss entropy logprob approx_kl clip_fraction masked_fraction num_updates "
        "skipped_in_a_row tokens_per_rollout importance_ratio importance_ratio_magnitude importance_ratio_max "
        "importance_ratio_min importance_ratio_q99 inference_recompute/effective_sample_share inference_recompute/kl "
        "inference_recompute/logprob_diff inference_recompute/logprob_diff_max inference_recompute/prob_diff "
        "inference_recompute/ratio advantage/mean advantage/magnitude advantage/max advantage/min env/length "
        "env/finished env/groups_without_signal env/return_spread env/epochs env/reward_errors env/reward_timeouts "
        "rollout/num_rollouts rollout/total_rollouts rollout/tokens_per_second rollout/recomputed speed/occupancy "
        "speed/flops speed/update_tflops speed/mfu speed/pages_in_use "
        "speed/rows_running speed/rows_waiting times/rollout times/score times/logprobs"
    ),
    "ahead": "rollout/staleness times/rollout_ahead",
    "kl_coef": "kl",
    "kl_every": "kl",
    "length_reward": "env/length_reward",
    "has_critic": "value/loss value/explained_variance value/explained_variance_of_reward",
    "teacher": "distill/loss distill/divergence distill/teacher_logprob distill/rows_not_taught distill/cut_off",
}


class StopRule(NamedTuple):
    """Ends a run at the first step, from `first_step` on, whose metric compares so with the limit."""

    first_step: int
    metric: str
    comparison: str  # one of COMPARISONS
    limit: float

    def __str__(self) -> str:
        start = f"{self.first_step}: " if self.first_step else ""
        return f"{start}{self.metric}{self.comparison}{self.limit:.12g}"

    def is_met(self, step: int, metrics: Mapping[str, object]) -> bool:
        """True if the rule ends the run at this step; a step without the metric does not."""
        value = metrics.get(self.metric)
        return step >= self.first_step and value is not None and COMPARISONS[self.comparison](value, self.limit)


def parse_rules(text: str) -> list[StopRule]:
    """Returns the rules of --stop_at, which commas separate. Raises: UserError for anything else."""
    rules, place = [], 0
    while text[place:].strip():
        match = RULE.match(text, place)
        try:
            first_step, metric, comparison, limit = match.groups()
            rules.append(StopRule(int(first_step or 0), metric, comparison, float(limit)))
        except (AttributeError, ValueError) as error:
            raise UserError(
                f"--stop_at: {text[place:].strip()!r} is no rule: give METRIC>=NUMBER, with one of >= <= > <, or "
                "STEP: METRIC<NUMBER, and commas between rules"
            ) from error
        place = match.end()
    return rules


def metric_names(settings: Mapping[str, object], parts: Mapping[str, Collection[str]]) -> set[str]:
    """Returns the names of the numbers that a run with these settings logs.

    `parts`: names of the rewards of each environment, by its role: "env", "test_env", "test_env.LABEL".
    """
    known = {**settings, "": True, "has_critic": settings.get("advantage") == "gae"}
    names = {name for setting, listed in METRICS.items() if known.get(setting) for name in listed.split()}
    num_samples = int(settings.get("num_eval_samples", 1))
    for role, found in parts.items():
        if role == "env":
            names |= {f"env/{part}" for part in found}
            continue
        nothing = {part: np.zeros((1, num_samples)) for part in found}
        estimates = [
            f"{name}{end}"
            for name in task_estimates(nothing, ["0"] * num_samples)
            for end in ("", "_ci", *(("_low", "_high") if is_share(name) else ()))
        ]
        others = "num_tasks", "num_samples", "length", "finished", "reward_failures"
        # A reply that is graded again has scores of its own names: LABEL/return.
        names |= {f"{role}{'.' if '/' in name else '/'}{name}" for name in (*estimates, *others)}
    return names


def check_rules(rules: Collection[StopRule], names: Collection[str], open_roles: Collection[str] = ()) -> None:
    """Raises UserError for a rule on a metric that the run does not log.

    `open_roles`: roles of environments whose episodes may have rewards of other names.
    """
    for rule in rules:
        if rule.metric not in names and rule.metric.rpartition("/")[0] not in open_roles:
            close = most_similar(rule.metric, names)
            remedy = f"give {close}, or another name" if close else "give a name"
            raise UserError(
                f"--stop_at {rule}: the run logs no metric {rule.metric}: {remedy} of the table in docs/metrics.md"
            )
