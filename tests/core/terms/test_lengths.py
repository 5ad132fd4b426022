"""Rewards for lengths in tokens, which become a part of the return."""

from dataclasses import replace

import numpy as np

from core.records import Completions, Episodes
from core.run.metrics import rollout_metrics
from core.terms.lengths import cosine_reward, overlong_penalty, with_length_reward


def episodes_of(lengths: list[int], scores: dict[str, np.ndarray], failed: np.ndarray) -> Episodes:
    """Returns episodes of completions without a prompt; the limit is 100 tokens."""
    zeros = np.zeros((len(lengths), 100), np.float32)
    completions = Completions(
        tokens=zeros,
        mask=zeros > 0,
        logprobs=zeros,
        lengths=np.array(lengths),
        prompt_lengths=np.zeros(len(lengths), int),
        finished=np.array(lengths) < 100,
        slot_steps=np.array(lengths),
        num_observed=np.zeros(len(lengths), int),
    )
    return Episodes(
        completions=completions,
        rollout=np.arange(len(lengths)),
        task_ids=np.arange(len(lengths)),
        texts=["a"] * len(lengths),
        scores=scores,
        failed=failed,
        failures={"reward_errors": int(failed.sum())},
        times={"rollout": 1.0, "score": 1.0},
    )


def test_overlong_penalty_is_that_of_dapo():
    lengths = np.array([0, 80, 81, 90, 100, 120])
    assert np.allclose(overlong_penalty(lengths, 100, 20), [0, 0, -0.05, -0.5, -1, -1])


def test_cosine_reward_prefers_short_right_and_long_wrong():
    right, wrong = (cosine_reward(np.full(3, x), np.array([0, 50, 100]), 100) for x in (1.0, 0.0))
    assert np.allclose(right, [1, 0.75, 0.5])
    assert np.allclose(wrong, [-1, -0.75, -0.5])


def test_a_length_reward_is_a_part_of_the_return():
    scores = {"return": np.array([1.0, 0.1], np.float32), "correct_answer": np.array([1.0, 0.0], np.float32)}
    played = episodes_of([10, 100], scores, np.zeros(2, bool))
    shaped = with_length_reward(played, 100, "overlong").scores
    assert np.allclose(shaped["length_reward"], [0, -1.0])
    assert np.allclose(shaped["return"], [1.0, -0.9])
    assert shaped["return"].dtype == np.float32
    assert scores["return"][1] == np.float32(0.1)
    shaped = with_length_reward(played, 100, "cosine").scores
    assert np.allclose(shaped["length_reward"], [0.5 + 0.25 * (1 + np.cos(np.pi / 10)), -0.5])


def test_failed_reward_stays_zero_and_length_reward_is_logged():
    scores = {"return": np.array([1.0, 0.0, 0.0, 1.0]), "correct_answer": np.array([1.0, 0.0, 0.0, 1.0])}
    played = episodes_of([80, 90, 40, 100], scores, np.array([False, True, False, False]))
    shaped = with_length_reward(played, 100, "overlong")
    np.testing.assert_allclose(shaped.scores["return"], [1.0, 0.0, 0.0, 0.0])  # the last one loses 1, at the limit
    metrics = rollout_metrics(replace(shaped, has_signal=np.array([True, False])))
    assert np.isclose(metrics["env/length_reward"], -1 / 3)
    assert metrics["env/length"] == 77.5
    assert np.isclose(metrics["env/return"], 1 / 3)
    assert metrics["env/reward_errors"] == 1
