"""Rollouts become traces, which openenv checks where it is installed."""

import json

import numpy as np
import pytest

from extras.traces import main, traces
from utils.settings.errors import UserError


def arrays() -> dict[str, np.ndarray]:
    """Three rows: of two turns, of one, and without a turn."""
    mask = np.zeros((3, 9), bool)
    mask[0, [2, 3, 6, 7]] = mask[1, 3:5] = True
    lengths = np.int32([8, 5, 4])
    tokens = np.where(np.arange(9) < lengths[:, None], np.arange(27).reshape(3, 9), 0).astype(np.int32)
    logprobs = np.where(mask, -np.float32(0.5) * tokens, 0).astype(np.float32)
    more = {"returns": np.float32([1, 0, 0.5]), "finished": np.array([True, False, True])}
    rows = {"tokens": tokens, "mask": mask, "logprobs": logprobs, "lengths": lengths}
    return rows | {"prompt_lengths": np.int32([2, 3, 4])} | more


def test_a_trace_has_the_turns_of_its_rollout_in_order(tmp_path):
    np.savez(tmp_path / "rows.npz", **arrays())
    main(tmp_path / "rows.npz", tmp_path / "traces.jsonl")
    first, second, third = map(json.loads, (tmp_path / "traces.jsonl").read_text().splitlines())
    assert [turn["node_id"] for turn in first["turns"]] == ["0.0", "0.1"]
    assert first["turns"][1]["prompt_token_ids"] == [0, 1, 2, 3, 4, 5]
    assert first["turns"][1]["completion_token_ids"] == [6, 7]
    assert first["turns"][1]["loss_mask"] == [0] * 6 + [1] * 2
    assert first["turns"][1]["metadata"] == {"returns": 1.0, "finished": True}
    assert second["turns"][0]["per_token_logps"] == [-6.0, -6.5]
    assert third == {"schema_version": 1, "turns": []}


def test_all_rows_of_a_rollout_stand_in_one_trace():
    rows = {name: x[:2] for name, x in arrays().items()} | {"rollout": np.int32([0, 0]), "returns": np.float32([0.5])}
    (found,) = traces(rows)
    assert [turn["node_id"] for turn in found["turns"]] == ["0.0", "0.1", "1.0"]
    told = [{}, {"returns": 0.5, "finished": True}, {"returns": 0.5, "finished": False}]
    assert [turn["metadata"] for turn in found["turns"]] == told


def test_openenv_takes_the_traces():
    training = pytest.importorskip("openenv.core.harness.training")
    for trace in traces(arrays()):
        training.TrainingTrace.model_validate(trace)


def test_files_without_rollouts_are_named(tmp_path):
    np.savez(tmp_path / "rows.npz", tokens=np.zeros((1, 1), np.int32))
    for name in ("rows.npz", "absent.npz"):
        with pytest.raises(UserError, match=name):
            main(tmp_path / name, tmp_path / "traces.jsonl")
