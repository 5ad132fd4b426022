"""Each warning is provoked once; a run in order gets none."""

import numpy as np
import pytest

from utils.metrics.health import QUIET, SYMPTOMS, HealthChecks
from utils.metrics.logger import Logger
from utils.reporting.verdict import judge

WELL = {
    "env/reward_errors": 0,
    "env/reward_timeouts": 0,
    "env/groups_without_signal": 0.3,
    "entropy": 0.5,
    "env/finished": 0.9,
    "distill/cut_off": 0.0,
    "inference_recompute/logprob_diff": 1e-3,
    "approx_kl": 1e-3,
    "kl": 0.01,
    "grad_norm": 0.1,
}
ILL = {
    "env/reward_errors": (6, "the reward failed for 6 replies of the step"),
    "env/reward_timeouts": (2, "the reward took too long for 2 replies"),
    "env/groups_without_signal": (0.95, "95% of the groups have equal rewards"),
    "entropy": (0.04, "entropy has fallen from 0.5 to 0.04"),
    "env/finished": (0.4, "only 40% of the completions end"),
    "distill/cut_off": (0.4, "40% of the completions are truncated at the limit"),
    "inference_recompute/logprob_diff": (0.05, "sampler and trainer differ by 0.05"),
    "approx_kl": (0.3, "a KL of 0.3 within a step"),
    "kl": (2.0, "the KL to the initial model has risen to 2"),
    "grad_norm": (1.5, "the gradient norm is 1.5, usually 0.1"),
}


def test_every_symptom_is_provoked_here():
    assert [symptom.metric for symptom in SYMPTOMS] == list(WELL) == list(ILL)


@pytest.mark.parametrize("metric", ILL)
def test_a_warning_comes_once_and_again_after_a_quiet_while(metric):
    value, words = ILL[metric]
    health_checks, told = HealthChecks(), {}
    for step in range(40):
        changed = {metric: value} if step in (5, 6, 6 + QUIET + 1) else {}
        told[step] = health_checks.find_warnings(step, WELL | changed)
    assert [step for step, found in told.items() if found] == [5, 6 + QUIET + 1]
    (sentence,) = told[5].values()
    assert words in sentence
    assert "--" in sentence, "and what to try"


def test_a_reward_that_is_the_same_everywhere_is_named():
    metrics = {
        "env/groups_without_signal": 1.0,
        "env/return": 0.1,
        "env/return_spread": 0.0,
    }
    (sentence,) = HealthChecks().find_warnings(1, metrics).values()
    assert sentence.startswith("100% of the groups have equal rewards (0.1 everywhere) and teach nothing")


HEALTHY = {
    "env/return": 0.34,
    "env/return_spread": 1.0,
    "rollout/num_rollouts": 64,
    "env/length": 40.0,
    "entropy": 0.13,
    "approx_kl": 0.0,
    "update_norm": 0.5,
    "param_norm": 181.0,
    "env/finished": 1.0,
    "env/groups_without_signal": 0.0,
}
FALLEN = HEALTHY | {
    "env/return": 0.0,
    "entropy": None,
    "env/finished": 0.0,
    "env/groups_without_signal": 1.0,
}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, {"env/length": 192.0}),
        ({}, {"entropy": 0.5}),
        ({"approx_kl": 0.4}, {}),
        ({"update_norm": 82.0}, {}),
    ],
)
def test_a_collapse_is_named_in_place_of_what_follows_from_it(before, after):
    health_checks = HealthChecks()
    told = [health_checks.find_warnings(step, HEALTHY) for step in (1, 2)]
    told += [health_checks.find_warnings(3, HEALTHY | before).get("env/return", {})]
    told += [health_checks.find_warnings(step, FALLEN | after) for step in range(4, 40)]
    assert told[3] == {"env/return": "the return fell from 0.34 to 0 after the update of step 3: lower --lr"}
    assert not any(told[:3] + told[4:])
    assert health_checks.find_warnings(40, HEALTHY) == {}
    found = set(HealthChecks().find_warnings(1, FALLEN))
    assert found == {"env/groups_without_signal", "env/finished"}, "no fall"


@pytest.mark.parametrize(
    ("num_rollouts", "chance"),
    [
        (4, 0.5),
        (16, 0.1),
        (64, 0.05),
        (64, 0.3),
        (256, 0.9),
    ],
)
def test_noise_is_no_collapse(num_rollouts, chance):
    rng = np.random.default_rng(num_rollouts)
    health_checks = HealthChecks()
    for step in range(1, 1000):
        rewards = rng.random(num_rollouts) < chance
        noisy = {"env/return": rewards.mean(), "env/return_spread": float(np.ptp(rewards * 1.0))}
        noisy |= {"env/length": 40 * np.exp(rng.normal(0, 3 / num_rollouts**0.5)), "rollout/num_rollouts": num_rollouts}
        assert health_checks.find_warnings(step, HEALTHY | noisy | {"env/finished": 1.0}) == {}


EQUAL = {
    "env/groups_without_signal": 1.0,
    "env/return": 0.0,
    "env/return_spread": 0.0,
    "rollout/num_rollouts": 64,
}


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        (
            {"env/format": 0.0, "env/correct_answer": 0.0, "env/finished": 1.0},
            "100% of the replies give no answer in the",
        ),
        ({"env/format": 1.0, "env/correct_answer": 0.0, "env/finished": 1.0}, "none is right: try easier problems"),
        ({"env/format": 1.0, "env/correct_answer": 0.0, "env/finished": 1.0}, "unless the grader refuses right ones"),
        (
            {"env/format": 0.1, "env/correct_answer": 0.0, "env/finished": 0.1},
            "10% of the replies end before the limit",
        ),
        (
            {"env/correct_answer": 1.0, "env/return": 1.0, "env/finished": 1.0},
            "100% of the replies are right: take harder",
        ),
        (
            {"env/correct_answer": 0.0, "env/return": 0.3, "env/finished": 1.0},
            "the reward is the same whatever the reply",
        ),
        ({"env/correct_answer": 0.27, "env/return": 1.0}, "the reward is the same whatever the reply"),
        ({"env/correct_answer": 0.0, "env/finished": 1.0}, "where the replies are wrong, try easier problems"),
        ({"env/correct_answer": 0.5, "env/return_spread": 1.0}, "all fail in some and all succeed in others"),
        ({"env/correct_answer": 0.0, "env/reward_errors": 16}, "the reward failed for 16 of 64 replies"),
        ({}, "where the replies are wrong, try easier problems"),
    ],
)
def test_advice_on_equal_rewards_fits_its_cause(metrics, words):
    warnings = HealthChecks().find_warnings(1, EQUAL | metrics)
    assert words in warnings["env/groups_without_signal"]


@pytest.mark.parametrize(
    ("first", "later", "num_rollouts"),
    [
        (0.0, 0.0, 8),
        (0.1, 0.0, 8),
        (0.4, 0.1, 64),
    ],
)
def test_after_a_ruinous_update_no_other_advice_is_given(first, later, num_rollouts):
    """As with --lr 30 (the weights are nearly all update), whatever the return was before."""
    health_checks, told = HealthChecks(), []
    ruined = {
        "env/groups_without_signal": 1.0,
        "env/finished": 0.1,
        "env/return_spread": 0.0,
        "entropy": None,
    }
    for step, reward in enumerate([first] + [later] * 39, start=1):
        metrics = HEALTHY | {"env/return": reward, "rollout/num_rollouts": num_rollouts}
        metrics |= {"update_norm": 24718.9, "param_norm": 24720.1} if step == 1 else {"update_norm": None, **ruined}
        told.append(health_checks.find_warnings(step, metrics))
    assert told[0] == {"update_norm": "the update of step 1 changed the weights by 100% of their norm: lower --lr"}
    assert all("lower --lr" in words for found in told for words in found.values())


def test_what_was_not_logged_is_no_symptom():
    assert HealthChecks().find_warnings(1, {"env/finished": 0.9}) == {} == HealthChecks().find_warnings(1, {})


def test_the_terminal_says_it(tmp_path, capsys):
    with Logger(tmp_path) as logger:
        logger.line(1, {"env/finished": 0.1})
        logger.line(2, {"env/finished": 0.1})
    found = capsys.readouterr().out.count("warning: only 10% of the completions end before the limit")
    assert found == 1


@pytest.mark.parametrize(
    ("num_failed", "names_it"),
    [
        (8, True),
        (5, True),
        (4, False),
    ],
)
def test_a_failed_reward_alone_is_named(num_failed, names_it):
    """Where more than half of the replies have no reward, equal rewards are no fault of the problems."""
    metrics = {
        "env/groups_without_signal": 1.0,
        "env/return": 0.0,
        "env/return_spread": 0.0,
        "num_updates": 0.0,
    }
    metrics |= {
        "env/reward_errors": float(num_failed),
        "env/reward_timeouts": 0.0,
        "rollout/num_rollouts": 8.0,
    }
    assert ("env/groups_without_signal" not in HealthChecks().find_warnings(1, metrics)) == names_it
    verdict = judge({name: (np.ones(1), np.array([value])) for name, value in metrics.items()})["text"]
    expected = f"Nothing could be learned: the reward failed for {num_failed} replies, see reward_failures.jsonl."
    assert (verdict == expected) == names_it
