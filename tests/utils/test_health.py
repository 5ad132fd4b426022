"""Each warning is provoked once; a run in order gets none."""

import numpy as np
import pytest

from utils.metrics.health import QUIET, SYMPTOMS, HealthChecks
from utils.reporting.verdict import judge

CASES = {  # metric: its value in a run in order, in one that is not, and words of the warning
    "env/reward_errors": (0, 6, "the reward failed for 6 replies of the step"),
    "env/reward_timeouts": (0, 2, "the reward took too long for 2 replies"),
    "env/groups_without_signal": (0.3, 0.95, "95% of the groups have equal rewards"),
    "entropy": (0.5, 0.04, "entropy has fallen from 0.5 to 0.04"),
    "env/finished": (0.9, 0.4, "only 40% of the completions end"),
    "distill/cut_off": (0.0, 0.4, "40% of the completions are truncated at the limit"),
    "inference_recompute/logprob_diff": (1e-3, 0.05, "sampler and trainer differ by 0.05"),
    "approx_kl": (1e-3, 0.3, "a KL of 0.3 within a step"),
    "kl": (0.01, 2.0, "the KL to the initial model has risen to 2"),
    "grad_norm": (0.1, 1.5, "the gradient norm is 1.5, usually 0.1"),
    "update_norm": (0.5, 60.0, "changed the weights by 30% of their norm"),
}
WELL = {metric: good for metric, (good, _, _) in CASES.items()} | {"param_norm": 200.0}


@pytest.mark.parametrize("metric", CASES)
def test_a_warning_comes_once_and_again_after_a_quiet_while(metric):
    assert [symptom.metric for symptom in SYMPTOMS] == list(CASES)
    _, value, words = CASES[metric]
    health_checks, told = HealthChecks(), {}
    for step in range(40):
        changed = {metric: value} if step in (5, 6, 6 + QUIET + 1) else {}
        told[step] = health_checks.find_warnings(step, WELL | changed)
    assert [step for step, found in told.items() if found] == [5, 6 + QUIET + 1]
    (sentence,) = told[5].values()
    assert words in sentence
    assert "--" in sentence, "and what to try"


EQUAL = {
    "env/groups_without_signal": 1.0,
    "env/return": 0.0,
    "env/return_spread": 0.0,
    "rollout/num_rollouts": 64,
}


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        ({"env/return": 0.1}, "100% of the groups have equal rewards (0.1 everywhere) and teach nothing"),
        ({"env/format": 0.0, "env/correct_answer": 0.0, "env/finished": 1.0}, "100% of replies have no answer in"),
        ({"env/format": 1.0, "env/correct_answer": 0.0, "env/finished": 1.0}, "one is right: try easier problems"),
        ({"env/format": 0.1, "env/correct_answer": 0.0, "env/finished": 0.1}, "10% of the replies end before the"),
        ({"env/correct_answer": 1.0, "env/return": 1.0, "env/finished": 1.0}, "100% of the replies are right: take"),
        ({"env/correct_answer": 0.0, "env/return": 0.3}, "the reward seems to be the same for every reply"),
        ({"env/correct_answer": 0.5, "env/return_spread": 1.0}, "all fail in some and all succeed in others"),
        ({"env/correct_answer": 0.0, "env/reward_errors": 16}, "the reward failed for 16 of 64 replies"),
        ({"env/correct_answer": 0.0, "env/finished": 1.0}, "where the replies are wrong, try easier problems"),
    ],
)
def test_advice_on_equal_rewards_fits_its_cause(metrics, words):
    warnings = HealthChecks().find_warnings(1, EQUAL | metrics)
    assert words in warnings["env/groups_without_signal"]


@pytest.mark.parametrize("jump", [{"update_norm": 120.0}, {"approx_kl": 0.4}])
def test_after_a_ruinous_update_no_other_advice_is_given(jump):
    """As with --lr 30, after which the weights are nearly all update."""
    health_checks = HealthChecks()
    told = [health_checks.find_warnings(1, WELL), health_checks.find_warnings(2, WELL | jump)]
    told += [health_checks.find_warnings(step, EQUAL | {"env/finished": 0.1}) for step in range(3, 40)]
    assert [list(found) for found in told] == [[], list(jump), *[[]] * 37]
    assert HealthChecks().find_warnings(1, EQUAL | {"env/finished": 0.1}).keys() == {*EQUAL, "env/finished"} - {
        "env/return", "env/return_spread", "rollout/num_rollouts"
    }  # fmt: skip


@pytest.mark.parametrize(("num_failed", "names_it"), [(8, True), (5, True), (4, False)])
def test_a_failed_reward_alone_is_named(num_failed, names_it):
    """If more than half of the replies have no reward, equal rewards are no fault of the problems."""
    failures = {"env/reward_errors": float(num_failed), "env/reward_timeouts": 0.0, "rollout/num_rollouts": 8.0}
    metrics = EQUAL | {"num_updates": 0.0} | failures
    assert ("env/groups_without_signal" not in HealthChecks().find_warnings(1, metrics)) == names_it
    verdict = judge({name: (np.ones(1), np.array([value])) for name, value in metrics.items()})["text"]
    expected = f"Nothing could be learned: the reward failed for {num_failed} replies, see reward_failures.jsonl."
    assert (verdict == expected) == names_it
