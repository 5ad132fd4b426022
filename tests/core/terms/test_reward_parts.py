"""--advantage gdpo against loops in float64, and as a run: names, filters, checkpoints.

N prompts, G rollouts of each, B = N G rows.
"""

import math

import numpy as np
import pytest

from core.advantages import ObjectiveConfig, compute_advantages
from core.records import Batch
from tests.helpers import ROOT, read_jsonl, train_here
from tests.kill_runs import checksum, records
from tests.oracles.advantages import TINY, deviation, mean, standardized
from utils.batching import select_rows
from utils.settings.config import make_config
from utils.settings.errors import UserError

G, T = 4, 6
WEIGHTS = {"right": 1.0, "form": 0.5, "length": -0.25}
PARTS = ",".join(f"{name}={weight}" for name, weight in WEIGHTS.items())
GDPO = {"advantage": "gdpo", "reward_parts": PARTS}
REWARDS = {  # of five groups: all parts, one part, two that cancel in the sum, none, and a grader that fails
    "right": [0, 1, 1, 0] + [1, 1, 1, 1] + [1, 0, 1, 0] + [0, 0, 0, 0] + [1, 0, 0, 1],
    "form": [1, 1, 0, 1] + [0.1, 0.3, 0.3, 0.7] + [0, 2, 0, 2] + [0.1, 0.1, 0.1, 0.1] + [0, 0, 1, 1],
    "length": [3, 5, 9, 1] + [0, 0, 0, 0] + [7, 7, 7, 7] + [2, 2, 2, 2] + [5, 4, 3, 1],
}


def batch_of(rewards: dict[str, list[float]], failed: tuple[int, ...] = (), seed: int = 0) -> Batch:
    """Returns ragged rows with the weighted sum as their reward; NaN for those of `failed`."""
    rng = np.random.default_rng(seed)
    num_rows = len(rewards["right"])
    sums = sum(np.float32(WEIGHTS[name]) * np.float32(x) for name, x in rewards.items())
    sums[list(failed)] = np.nan
    lengths = 2 + rng.integers(1, T - 1, num_rows)
    columns = np.arange(T)
    return Batch(
        tokens=np.zeros((num_rows, T), int),
        mask=(columns >= 2) & (columns < lengths[:, None]),
        sample_logprobs=np.zeros((num_rows, T), np.float32),
        rewards=sums,
        reward_parts={name: np.float32(x) for name, x in rewards.items()} | {"unread": sums},
        lengths=lengths,
        prompt_lengths=np.full(num_rows, 2),
        finished=np.arange(num_rows) % 5 > 0,
        rollout=np.arange(num_rows),
        group_size=G,
    )


def gdpo(**flags) -> ObjectiveConfig:
    return make_config(ObjectiveConfig, advantage="gdpo", **{"reward_parts": PARTS} | flags)


def oracle(rewards: dict[str, list[float]], failed: tuple[int, ...], leaves) -> tuple[dict[int, float], list[int]]:
    """Returns the advantage of each row that stays, and the rows of groups without signal, one number at a time."""
    num_rows = len(rewards["right"])
    summed, silent = {}, []
    for first in range(0, num_rows, G):
        group = [i for i in range(first, first + G) if i not in failed]
        spread = {name: max(x[i] for i in group) - min(x[i] for i in group) for name, x in rewards.items()}
        silent += group if max(spread.values()) <= TINY else []
        for i in group:
            terms = []
            for name, x in rewards.items():
                values = [float(np.float32(x[j])) for j in group]
                z = (float(np.float32(x[i])) - mean(values)) / deviation(values) if spread[name] > TINY else 0.0
                terms.append(WEIGHTS[name] * z)
            summed[i] = math.fsum(terms)
    kept = [i for i in summed if not leaves(i, i in silent)]
    table = standardized([[summed[i]] for i in kept], [summed[i] for i in kept])
    return {i: 0.0 if i in silent else row[0] for i, row in zip(kept, table, strict=True)}, silent


@pytest.mark.parametrize("do_group_filter", [True, False])
@pytest.mark.parametrize("do_truncation_filter", [True, False])
@pytest.mark.parametrize("failed", [(), (17,), (1, 16, 18)])
def test_gdpo_equals_a_loop_over_parts_groups_and_rows(do_group_filter, do_truncation_filter, failed):
    batch = batch_of(REWARDS, failed)
    filters = {"do_group_filter": do_group_filter, "do_truncation_filter": do_truncation_filter}
    found = compute_advantages(batch, gdpo(**filters))

    def leaves(i: int, is_silent: bool) -> bool:
        return is_silent and do_group_filter or do_truncation_filter and not batch.finished[i]

    expected, silent = oracle(REWARDS, failed, leaves)
    assert silent == [12, 13, 14, 15]
    assert found.rollout.tolist() == [*expected]
    assert found.reward_parts == {}, "the loss reads none"
    wanted = np.array([*expected.values()])[:, None] * found.mask
    np.testing.assert_allclose(found.advantages, wanted, rtol=1e-5, atol=1e-6)
    assert not found.advantages[np.isin(found.rollout, silent)].any(), "exactly 0"


def test_a_part_without_spread_adds_exactly_nothing():
    """The advantages have the same bits as without it, also if the float32 mean of equal numbers is another number."""
    for number in (0.1, 0.95, 7.0, 1e6):
        constant = REWARDS | {"length": [number] * len(REWARDS["right"])}
        found = compute_advantages(batch_of(constant), gdpo())
        without = compute_advantages(batch_of(constant), gdpo(reward_parts="right=1,form=0.5"))
        assert found.rollout.tolist() == without.rollout.tolist()
        np.testing.assert_array_equal(found.advantages, without.advantages)


def test_a_part_that_no_row_has_is_0_for_all():
    batch = batch_of(REWARDS)
    found, expected = (compute_advantages(batch, gdpo(reward_parts=f"right=1{more}")) for more in (",x=3", ""))
    np.testing.assert_array_equal(found.advantages, expected.advantages)


def test_rows_share_the_advantage_of_their_rollout():
    batch, expected = batch_of(REWARDS), compute_advantages(batch_of(REWARDS), gdpo())
    twice = np.repeat(np.arange(len(batch)), 2)
    found = compute_advantages(select_rows(batch, twice), gdpo())
    np.testing.assert_array_equal(found.advantages, np.repeat(expected.advantages, 2, axis=0))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"advantage": "gdpo"}, "--reward_parts names none: name them"),
        ({"advantage": "gdpo", "reward_parts": "right=0"}, "--reward_parts names none"),
        ({"reward_parts": "right=1"}, "--reward_parts has no effect with --advantage group_zscore"),
        ({"advantage": "gdpo", "reward_parts": "right"}, "'right' is not a new name with a number"),
        ({"advantage": "gdpo", "reward_parts": "right=1,right=2"}, "'right=2' is not a new name"),
        ({"advantage": "gdpo", "reward_parts": "right=nan"}, "'right=nan' is not"),
        (GDPO | {"kl_coef": 0.1, "kl_in": "reward"}, "works without --kl_in reward"),
        (GDPO | {"do_global_normalization": True}, "--do_global_normalization only"),
    ],
)
def test_bad_parts_are_refused_by_name(flags, said):
    with pytest.raises(UserError) as error:
        make_config(ObjectiveConfig, **flags)
    assert said in str(error.value)


SCORES = {"return", "correct_answer", "arithmetic", "steps"}
RUN = {
    "config": ROOT / "configs" / "demo.py",
    "advantage": "gdpo",
    "reward_parts": "correct_answer=1,arithmetic=0.5,steps=-0.1",
    "lr_schedule": "constant",
    "groups_per_batch": 12,
    "group_size": 4,
    "ppo_minibatch": 0,
    "num_generation_tokens": 48,
    "test_env_name": "",
    "save_interval": 1,
    "save_rollouts": "all",
    "num_score_workers": 1,
}


def test_a_run_compares_parts_and_resumes_to_the_bit(tmp_path, capsys):
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    assert train_here(whole, **RUN, max_steps=2) == 0
    assert "A = gdpo (reward_parts correct_answer=1,arithmetic=0.5,steps=-0.1" in capsys.readouterr().out
    for steps in (1, 2):
        assert train_here(stopped, **RUN, max_steps=steps) == 0
    metrics = records(whole)
    assert records(stopped) == metrics
    assert checksum(stopped, 2) == checksum(whole, 2)
    rows = read_jsonl(whole / "rollouts" / "step_1.jsonl")
    by_group = [rows[first : first + 4] for first in range(0, len(rows), 4)]
    differ = [{name for name in SCORES if len({str(row[name]) for row in group}) > 1} for group in by_group]
    signal = [bool(names - {"return"}) for names in differ]
    assert metrics[0]["env/groups_without_signal"] == pytest.approx(1 - np.mean(signal))
    assert any(is_on and "return" not in names for is_on, names in zip(signal, differ, strict=True))


def test_a_part_that_no_reward_has_ends_the_run_before_its_first_step(tmp_path, capsys):
    assert train_here(tmp_path / "run", **RUN | {"reward_parts": "correct_answer=1,style=1"}, max_steps=1) == 2
    said = capsys.readouterr().err
    assert "--reward_parts style=1: no reward of countdown" in said
    assert "arithmetic, correct_answer, return, steps, valid" in said
    assert not (tmp_path / "run" / "metrics.jsonl").exists() or not records(tmp_path / "run")
