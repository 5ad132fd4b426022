"""Replies without a score (TRL's None): they leave baselines, losses and means, against loops over the others."""

import numpy as np
import pytest

from core.advantages import ObjectiveConfig, compute_advantages
from core.records import Batch
from core.rollout import collect_scores
from envs.own.adapters import Played
from envs.own.functions import RewardFunctions
from envs.scoring.scorer import Scorer
from tests.learning import make_config
from utils.evaluation.estimates import mean_and_ci, paired_difference, task_estimates
from utils.reporting.page import task_means

REWARDS = """
def judge(completions, **columns): return [None if c == "?" else float(c) for c in completions]
def short(completions, **columns): return [float(len(c) < 2) for c in completions]
"""
G = 4


@pytest.fixture
def rewards(tmp_path):
    (tmp_path / "r.py").write_text(REWARDS)
    return f"{tmp_path / 'r.py'}:"


def batch_of(names: str, replies: list[str]) -> Batch:
    """The batch of single tokens of these replies, graded by functions of TRL."""
    row = {"prompt": "p", "answer": "a"}
    groups = [replies[start : start + G] for start in range(0, len(replies), G)]
    graded = [RewardFunctions(names).grade([*map(Played, group)], row) for group in groups]
    parts, B = collect_scores(sum(graded, []), ()), len(replies)
    return Batch(
        tokens=np.zeros((B, 2), np.int32),
        mask=np.tile([False, True], (B, 1)),
        sample_logprobs=np.zeros((B, 2), np.float32),
        rewards=parts["return"],
        lengths=np.full(B, 2),
        prompt_lengths=np.ones(B, int),
        finished=np.ones(B, bool),
        rollout=np.arange(B),
        reward_parts=parts,
        values=np.zeros((B, 2), np.float32),
        group_size=G,
    )


def z(x: list[float]) -> list[float]:
    return [(r - np.mean(x)) / np.std(x) for r in x]


def test_a_part_without_a_score_is_left_out_of_gdpo(rewards):
    names = f"{rewards}judge,short"
    config = make_config(ObjectiveConfig, advantage="gdpo", reward_parts="judge=1,short=0.5")
    found = compute_advantages(batch_of(names, ["1", "12", "0", "?"]), config)
    judge, short = [*z([1, 12, 0]), 0.0], z([1, 0, 1, 1])
    np.testing.assert_allclose(found.advantages[:, 1], z(np.array(judge) + 0.5 * np.array(short)), rtol=1e-5)
    assert found.rollout.tolist() == [0, 1, 2, 3], "the other function has scored it"


def test_a_reply_without_a_score_comes_through_the_workers(rewards, tmp_path):
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"prompt": "{i}?"}}\n' for i in range(30)))
    options = {"path": str(tmp_path / "rows.jsonl"), "reward": f"{rewards}judge"}
    with Scorer("dataset", options, num_workers=1) as scorer:
        (one, none), failures = scorer.score_replies([0, 0], ["1", "?"])
    assert (one["return"], one["correct_answer"], failures["reward_errors"]) == (1, 1, 0)
    assert np.isnan([none["return"], none["correct_answer"]]).all() and none["not_applicable"] == 1


def test_evaluations_leave_replies_without_a_score_out(tmp_path):
    scores = np.float32([[1, 0, np.nan, 1], [np.nan] * 4, [0, np.nan, 0, 0]])
    found = task_estimates({"return": scores, "correct_answer": scores}, list("abcabbbbcccc"))
    expected = {"correct_answer": [2 / 3, 0], "pass@2": [1, 0], "best_of_3": [1, 0], "maj@4": [1, 0]}
    for name, values in expected.items():
        np.testing.assert_allclose(found[name][[0, 2]], values, rtol=1e-6)
    assert np.isnan(found["pass@4"]).all(), "no task has four scores"
    assert mean_and_ci("x", found["pass@2"])["x"] == 0.5
    assert paired_difference(found["return"], found["return"] + 1)["mean"] == 1
    np.savez(tmp_path / "held_out_0.npz", tasks=np.repeat([3, 5, 9], 4), returns=scores.ravel())
    assert task_means(tmp_path / "held_out_0.npz")["return"] == {3: pytest.approx(2 / 3), 9: 0}
