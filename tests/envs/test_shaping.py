"""Settings of rewards, the penalty of truncated replies, and the look at an environment."""

import numpy as np

import envs
from core.eval import show
from envs.prompts import tasks_that_fit
from envs.scoring.shaping import add_truncation_penalty


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
