"""Rewards for lengths in tokens, which become a part of the return."""


import numpy as np

from core.terms.lengths import cosine_reward, overlong_penalty


def test_overlong_penalty_is_that_of_dapo():
    lengths = np.array([0, 80, 81, 90, 100, 120])
    assert np.allclose(overlong_penalty(lengths, 100, 20), [0, 0, -0.05, -0.5, -1, -1])


def test_cosine_reward_prefers_short_right_and_long_wrong():
    right, wrong = (cosine_reward(np.full(3, x), np.array([0, 50, 100]), 100) for x in (1.0, 0.0))
    assert np.allclose(right, [1, 0.75, 0.5])
    assert np.allclose(wrong, [-1, -0.75, -0.5])
