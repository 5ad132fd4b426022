"""The collection of a step's batch, and evaluation. Letters: G rollouts of each prompt."""

import json
import zlib
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest

from core.grpo import groups_with_signal, num_groups_to_sample, task_numbers
from core.records import Batch
from core.rollout import RolloutWorker, evaluate
from core.run.metrics import rollout_metrics
from envs.scoring.scorer import Failure
from tests.helpers import random_params
from tests.learning import G, first_state, make_learner, teacher_forced, train_step
from tests.playing import COLLECT, Digest, HereScorer, collect_batch, make_worker
from utils.batching import group_counts
from utils.devices.sharding import Layout
from utils.settings.config import with_options


def rows_of(batch: Batch) -> list[tuple]:
    """What is in a batch, comparable."""
    parts = zip(batch.tokens, batch.mask, batch.rewards, batch.lengths, strict=True)
    return [(*t[:end], *m[:end], r) for t, m, r, end in parts]


def test_the_order_of_tasks_is_a_function_of_seed_and_epoch():
    epochs = task_numbers(5, 10, np.arange(30)).reshape(3, 10)
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs.tolist())
    found = len({tuple(epoch) for epoch in [*epochs.tolist(), task_numbers(6, 10, np.arange(10)).tolist()]})
    assert found == 4
    assert task_numbers(5, 10, 7 + np.arange(16)).tolist() == epochs.ravel()[7:23].tolist()


def test_a_batch_is_filled_with_groups_that_have_signal():
    batch, episodes, cursor = collect_batch(make_worker(12), COLLECT, cursor=3)
    ids = episodes.task_ids[::G]
    assert ids.tolist() == task_numbers(COLLECT.seed, 12, 3 + np.arange(len(ids))).tolist()
    assert (batch.rewards == episodes.scores["return"][batch.rollout]).all()
    returns = episodes.scores["return"].reshape(-1, G)
    has_signal = np.ptp(returns, axis=1) > 1e-6
    with_signal = returns[has_signal]
    assert not has_signal[:4].all()
    assert (batch.rewards.reshape(4, G) == with_signal[:4]).all()
    assert cursor == 3 + np.flatnonzero(has_signal)[3] + 1, "the next step goes on behind the last task that was needed"


def test_a_step_without_signal_has_no_batch():
    batch, episodes, cursor = collect_batch(make_worker(1), COLLECT)
    assert len(batch) == 0
    assert len(episodes) == 3 * 4 * G == cursor * G


def test_refilling_draws_about_what_is_missing():
    """Simulated: a draw at a time, groups with signal by chance; a whole second draw would throw half of it away."""
    rng = np.random.default_rng(0)
    for probability, most in ((0.95, 1.2), (0.9, 1.3), (0.5, 2.4), (0.1, 12)):
        for largest in (256, 64, 7):
            num_played, missing, share = 0, 256, 1.0
            while missing > 0:
                size = num_groups_to_sample(missing, share, largest)
                assert size in group_counts(largest)
                num_played += size
                missing -= int(rng.binomial(size, probability))
                share = (256 - missing) / num_played
            assert num_played <= most * 256, (probability, largest)


@pytest.mark.parametrize("max_resampling", [1.0, 3.0])
def test_batch_does_not_depend_on_the_rows_of_a_call(max_resampling):
    config = with_options(COLLECT, max_resampling=max_resampling)
    found = [collect_batch(make_worker(12, rows), config) for rows in (64, 2 * G, 3 * G)]
    for batch, _, cursor in found[1:]:
        assert rows_of(batch) == rows_of(found[0][0])
        assert cursor == found[0][2]


def test_a_task_that_comes_twice_in_a_step_is_played_anew():
    batch, *_ = collect_batch(make_worker(3), with_options(COLLECT, do_group_filter=False))
    rows = rows_of(batch)
    assert len({tuple(rows[i : i + G]) for i in range(0, len(rows), G)}) == 4


def test_scores_are_those_of_the_completions():
    metrics, episodes, _ = evaluate(make_worker(7), random_params(), 4, 4, seed=3)
    env, r = Digest(7), episodes.completions
    returns = np.zeros((4, 4))
    for row in range(16):
        text = "".join(map(chr, r.tokens[row, r.prompt_lengths[row] : r.lengths[row]]))
        returns[row // 4, row % 4] = env.score(env.problem(row // 4), text)["return"]
    expected = {
        "return": returns.mean(),
        "correct_answer": (returns > 0.5).mean(),
        "best_of_4": returns.max(1).mean(),
    }
    pairs = [(row[i] > 0.5) | (row[j] > 0.5) for row in returns for i, j in combinations(range(4), 2)]
    expected |= {"pass@2": np.mean(pairs), "pass@4": (returns.max(1) > 0.5).mean()}
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)
    assert metrics["correct_answer_low"] < metrics["correct_answer"] < metrics["correct_answer_high"]
    assert metrics["return_ci"] > 0 and "return_low" not in metrics, "a return is no share"
    assert (metrics["num_tasks"], metrics["num_samples"]) == (4, 4)


def test_episodes_mark_the_rows_whose_scoring_failed(monkeypatch):
    def has_no_score(text: str) -> bool:
        return zlib.crc32(text.encode()) % 3 == 0

    def request_outcomes(self, jobs):
        failure = Failure("reward_errors", "of a test")
        return [failure if has_no_score(text) else {"return": 0.5} for _, text in jobs]

    # Some replies get no grade; outcomes travel as between hosts, through JSON.
    monkeypatch.setattr(HereScorer, "request_outcomes", request_outcomes)
    monkeypatch.setattr(Layout, "share", lambda self, work, n, group=1: json.loads(json.dumps(work(range(n)))))
    _, episodes, _ = evaluate(make_worker(7), random_params(), 4, 4, seed=3)
    expected = np.array([has_no_score(text) for text in episodes.texts])
    assert 0 < expected.sum() < 16
    assert episodes.failed.tolist() == expected.tolist()
    assert episodes.scores["return"].tolist() == np.where(expected, 0, 0.5).tolist()
    assert episodes.failures == {"reward_timeouts": 0, "reward_errors": expected.sum()}


def test_a_failed_grader_is_no_reward_of_zero():
    """The sample is not learned from, and a group with fewer than two graded samples is replaced by another one."""

    def request_outcomes(self, jobs):
        scores = HereScorer.request_outcomes(self, jobs)
        failure = Failure("reward_timeouts", "of a test")
        is_failing = [i % 4 == 1 or zlib.crc32(text.encode()) % 4 == 0 for i, text in jobs]
        return [failure if fails else score for fails, score in zip(is_failing, scores, strict=True)]

    worker = make_worker(12)
    worker = replace(worker, scorer=type("Failing", (HereScorer,), {"request_outcomes": request_outcomes})(worker.env))
    worker.scorer.settings = worker.scorer.settings._replace(max_error_share=1.0)
    batch, episodes, _ = collect_batch(worker, COLLECT)
    failed = episodes.failed
    returns = episodes.scores["return"]
    metrics = rollout_metrics(replace(episodes, has_signal=groups_with_signal(episodes, COLLECT)))
    assert metrics["env/reward_timeouts"] == failed.sum() > 0
    assert metrics["env/return"] == pytest.approx(returns[~failed].mean(), rel=1e-5)
    graded = np.isfinite(batch.rewards).reshape(-1, G)
    assert not graded.all()
    assert (graded.sum(axis=1) >= 2).all()
    learner = make_learner(ppo_minibatch=0, ppo_epochs=1)
    _, metrics, updates = train_step(learner, first_state(learner), batch)
    assert np.isfinite(metrics["loss"])
    assert np.isfinite(updates[0].minibatch.rewards).all()
    assert metrics["num_rows"] == graded.sum()


class PairWorker(RolloutWorker):
    """An environment whose rollouts have two rows each, which earn the reward of the first one."""

    def play(self, weights, tasks, num_samples, key, positions=None):
        episodes = super().play(weights, tasks, 2 * num_samples, key, positions)
        whole = slice(None, None, 2)
        return replace(
            episodes,
            rollout=np.arange(len(episodes)) // 2,
            task_ids=episodes.task_ids[whole],
            texts=episodes.texts[whole],
            problems=episodes.problems[whole],
            scores={name: x[whole] for name, x in episodes.scores.items()},
            failed=episodes.failed[whole],
            positions=episodes.positions[whole],
        )


@pytest.mark.parametrize("minibatch", [0, 8])
def test_rollouts_of_two_rows_are_trained_on_as_rollouts(minibatch):
    """Optimizer steps, old log-probabilities, baseline and mean over tokens, against loops over rollouts."""
    config = with_options(COLLECT, ppo_minibatch=minibatch, ppo_epochs=1)
    batch, episodes, _ = collect_batch(PairWorker(**vars(make_worker(12))), config)
    returns = episodes.scores["return"].reshape(-1, G)
    returns = returns[np.ptp(returns, axis=1) > 1e-6][:4].ravel()
    assert len(batch) == 2 * len(returns) == 2 * 4 * G
    learner = make_learner(config)
    _, metrics, updates = train_step(learner, first_state(learner), batch)
    assert metrics["num_updates"] == config.updates_per_step == (1 if minibatch == 0 else 2)
    rollouts = [number for update in updates for number in sorted({*update.minibatch.rollout.tolist()})]
    assert sorted(rollouts) == sorted({*batch.rollout.tolist()}), "each in one update"
    assert metrics["tokens_per_rollout"] == pytest.approx(batch.mask.sum() / len(returns))

    numbers = {number: place for place, number in enumerate(sorted(rollouts))}
    losses = []
    for update in updates:
        minibatch = update.minibatch
        total = 0.0
        for row, number in enumerate(minibatch.rollout.tolist()):
            place = numbers[number]
            group = returns[place // G * G : place // G * G + G]
            total -= (returns[place] - group.mean()) * minibatch.mask[row].sum()
        losses.append(total / minibatch.mask.sum())
        if len(updates) > 1:
            true = teacher_forced(learner.model, random_params(), minibatch.tokens, config.sampling.distribution)[0]
            np.testing.assert_allclose(minibatch.old_logprobs[minibatch.mask], true[minibatch.mask], atol=1e-4)
    first = learner.read(updates[0])["policy_loss"]
    assert first == pytest.approx(losses[0], abs=1e-5)
    assert len(updates) > 1 or updates[0].minibatch.old_logprobs is None
