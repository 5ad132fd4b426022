"""Rewards for lengths in tokens, their settings, and the look at an environment."""

from dataclasses import replace

import numpy as np

import envs
from core.eval import show
from core.records import Completions, Episodes
from core.run.metrics import rollout_metrics
from core.terms.lengths import with_length_reward
from envs.prompts import tasks_that_fit
from envs.scoring.shaping import (
    RewardConfig,
    add_length_reward,
    add_truncation_penalty,
    cosine_reward,
    overlong_penalty,
)
from envs.settings import EnvConfig


def test_overlong_penalty_is_that_of_dapo():
    lengths = np.array([0, 80, 81, 90, 100, 120])
    assert np.allclose(overlong_penalty(lengths, 100, 20), [0, 0, -0.05, -0.5, -1, -1])


def test_cosine_reward_prefers_short_right_and_long_wrong():
    right, wrong = (cosine_reward(np.full(3, x), np.array([0, 50, 100]), 100) for x in (1.0, 0.0))
    assert np.allclose(right, [1, 0.75, 0.5])
    assert np.allclose(wrong, [-1, -0.75, -0.5])


def test_a_length_reward_is_a_part_of_the_return():
    scores = {"return": np.array([1.0, 0.1], np.float32), "correct_answer": np.array([1.0, 0.0], np.float32)}
    lengths = np.array([10, 100])
    assert add_length_reward(scores, lengths, 100, RewardConfig()) is scores
    config = RewardConfig(length_reward="overlong")
    shaped = add_length_reward(scores, lengths, 100, config)
    assert np.allclose(shaped["length_reward"], [0, -1.0])
    assert np.allclose(shaped["return"], [1.0, -0.9])
    assert shaped["return"].dtype == np.float32
    assert scores["return"][1] == np.float32(0.1)


def test_settings_become_options_of_the_environment():
    assert EnvConfig().flags == {}
    flags = EnvConfig(data_dir="d", reward="f.py:r").flags
    assert flags == {"data_dir": "d", "reward": "f.py:r"}


def test_truncated_replies_pay_what_the_environment_says():
    scores = {"return": np.float32([1.0, 0.1, 0.0]), "correct_answer": np.float32([1.0, 0.0, 0.0])}
    found = add_truncation_penalty(scores, np.array([False, True, True]), 0.05)
    assert np.allclose(found["return"], [1.0, 0.05, 0.0])
    assert np.allclose(found["truncation"], [0, -0.05, 0])
    assert found["return"].dtype == np.float32
    assert found["correct_answer"] is scores["correct_answer"]


def encode(problem) -> list[int]:
    return [ord(c) for message in problem.messages for c in message["content"]]


def test_show():
    text = show(envs.make_env("countdown3"), encode, lambda ids: "".join(map(chr, ids)), 2)
    assert text.count("reference") == 2
    assert "Using the numbers" in text
    assert "return 1, correct_answer 1" in text
    assert "prompts: 100,000; tokens: 5%" in text.splitlines()[-1]


def test_prompts_that_are_too_long_are_left_out():
    env = envs.make_env("poem-test")
    lengths = np.array([len(encode(env.problem(i))) for i in range(env.num_tasks)])
    for limit in (20, 24, 200):
        assert (tasks_that_fit(env, encode, limit) == np.flatnonzero(lengths <= limit)).all()


def test_failed_reward_stays_zero_and_length_reward_is_logged():
    lengths = np.array([80, 90, 40, 100])
    zeros = np.zeros((4, 100), np.float32)
    completions = Completions(
        tokens=zeros,
        mask=zeros > 0,
        logprobs=zeros,
        lengths=lengths,
        prompt_lengths=np.zeros(4, int),
        finished=lengths < 100,
        slot_steps=lengths,
        num_observed=0 * lengths,
    )
    scores = {"return": np.array([1.0, 0.0, 0.0, 1.0]), "correct_answer": np.array([1.0, 0.0, 0.0, 1.0])}
    failed = np.array([False, True, False, False])
    times = {"rollout": 1.0, "score": 1.0}
    episodes = Episodes(
        completions=completions,
        task_ids=np.arange(4),
        texts=["a", "b", "c", "d"],
        scores=scores,
        failed=failed,
        failures={"reward_errors": 1},
        times=times,
    )
    shaped = with_length_reward(episodes, 100, RewardConfig(length_reward="overlong"))
    np.testing.assert_allclose(shaped.scores["return"], [1.0, 0.0, 0.0, 0.0])  # the last one loses 1, at the limit
    metrics = rollout_metrics(replace(shaped, has_signal=np.array([True, False])))
    assert np.isclose(metrics["env/length_reward"], -1 / 3)
    assert metrics["env/length"] == 77.5
    assert np.isclose(metrics["env/return"], 1 / 3)
    assert metrics["env/reward_errors"] == 1
