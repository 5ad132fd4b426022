"""Rollouts become traces and rollouts again; openenv checks the traces where it is installed."""

import json

import numpy as np
import pytest

from extras.traces import arrays_of, main, traces
from utils.settings.errors import UserError


def arrays() -> dict[str, np.ndarray]:
    """Three rows: of two turns, of one, and without a turn."""
    mask = np.zeros((3, 9), bool)
    mask[0, [2, 3, 6, 7]] = mask[1, 3:5] = True
    lengths = np.int32([8, 5, 4])
    tokens = np.where(np.arange(9) < lengths[:, None], np.arange(27).reshape(3, 9), 0).astype(np.int32)
    logprobs = np.where(mask, -np.float32(0.1) * tokens, 0).astype(np.float32)
    prompts = np.int32([2, 3, 4])
    more = {"returns": np.float32([1, 0, 0.5]), "finished": np.array([True, False, True])}
    return {"tokens": tokens, "mask": mask, "logprobs": logprobs, "lengths": lengths, "prompt_lengths": prompts} | more


def test_rows_come_back_as_they_were(tmp_path):
    np.savez(tmp_path / "rows.npz", **arrays())
    main(tmp_path / "rows.npz", tmp_path / "traces.jsonl")
    main(tmp_path / "traces.jsonl", tmp_path / "back.npz")
    back, before = np.load(tmp_path / "back.npz"), arrays()
    for name in before:  # the last row has no turn, so it is in no trace
        expected = before[name][:2, :8] if before[name].ndim > 1 else before[name][:2]
        np.testing.assert_array_equal(back[name], expected, name)


def test_turns_that_do_not_continue_are_rows_of_their_own():
    first, second = [trace for trace in traces(arrays()) if trace["turns"]]
    assert [turn["node_id"] for turn in first["turns"]] == ["0.0", "0.1"]
    assert first["turns"][1]["prompt_token_ids"] == [0, 1, 2, 3, 4, 5]
    joined = {"schema_version": 1, "turns": first["turns"] + second["turns"]}
    assert arrays_of([joined])["rollout"].tolist() == [0, 0]
    assert arrays_of([first, second])["rollout"].tolist() == [0, 1]
    assert arrays_of([])["tokens"].shape == (0, 0)


def test_all_rows_of_a_rollout_stand_in_one_trace():
    before = {name: x[:2] for name, x in arrays().items()}
    before |= {"rollout": np.int32([0, 0]), "returns": np.float32([0.5])}
    (found,) = traces(before)
    assert [turn["node_id"] for turn in found["turns"]] == ["0.0", "0.1", "1.0"]
    back = arrays_of([found])
    for name in ("rollout", "returns", "finished", "lengths", "prompt_lengths"):
        np.testing.assert_array_equal(back[name], before[name], name)


def test_openenv_takes_the_traces():
    training = pytest.importorskip("openenv.core.harness.training")
    for trace in traces(arrays()):
        training.TrainingTrace.model_validate(trace)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "no JSON"),
        ("5", "no TrainingTrace"),
        ('{"schema_version": 2, "turns": []}', "schema_version is 2"),
        ('{"schema_version": 1, "turns": [{}]}', "no TrainingTrace"),
    ],
)
def test_a_line_that_is_no_trace_is_named(tmp_path, line, reason):
    (tmp_path / "traces.jsonl").write_text(f"{json.dumps({'schema_version': 1, 'turns': []})}\n{line}\n")
    with pytest.raises(UserError, match=f"traces.jsonl:2 .*{reason}"):
        main(tmp_path / "traces.jsonl", tmp_path / "rows.npz")
    assert not (tmp_path / "rows.npz").exists()


def test_files_without_rollouts_are_named(tmp_path):
    np.savez(tmp_path / "rows.npz", tokens=np.zeros((1, 1), np.int32))
    for name in ("rows.npz", "absent.npz"):
        with pytest.raises(UserError, match=name):
            main(tmp_path / name, tmp_path / "traces.jsonl")
