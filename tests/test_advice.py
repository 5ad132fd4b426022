"""Each warning is provoked once; a run in order gets none."""

import pytest

from utils.metrics.health import QUIET, SYMPTOMS, HealthChecks
from utils.metrics.logger import Logger

WELL = {
    "env/groups_without_signal": 0.3, "entropy": 0.5, "env/finished": 0.9, "inference_recompute/logprob_diff": 1e-3,
    "approx_kl": 1e-3, "kl": 0.01, "grad_norm": 0.1,
}  # fmt: skip
ILL = {
    "env/groups_without_signal": (0.95, "95% of the groups have equal rewards"),
    "entropy": (0.04, "entropy has fallen from 0.5 to 0.04"),
    "env/finished": (0.4, "only 40% of the completions end"),
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
    assert words in sentence and "--" in sentence, "and what to try"


def test_a_reward_that_is_the_same_everywhere_is_named():
    metrics = {"env/groups_without_signal": 1.0, "env/return": 0.1, "env/return_spread": 0.0}
    (sentence,) = HealthChecks().find_warnings(1, metrics).values()
    assert sentence.startswith("100% of the groups have equal rewards (0.1 everywhere) and teach nothing")


@pytest.mark.parametrize(("cut_off", "is_told"), [({}, False), ({"stop/max_tokens": 0.6}, True)])
def test_only_episodes_that_reach_the_limit_of_tokens_are_cut_off(cut_off, is_told):
    metrics = {"env/finished": 0.4, "stop/done": 0.4, "stop/max_turns": 0.6} | cut_off
    assert bool(HealthChecks().find_warnings(1, metrics)) == is_told


def test_what_was_not_logged_is_no_symptom():
    assert HealthChecks().find_warnings(1, {"env/finished": 0.9}) == {} == HealthChecks().find_warnings(1, {})


def test_the_terminal_says_it(tmp_path, capsys):
    with Logger(tmp_path) as logger:
        logger.line(1, {"env/finished": 0.1})
        logger.line(2, {"env/finished": 0.1})
    assert capsys.readouterr().out.count("warning: only 10% of the completions end before the limit") == 1
