"""--task_sampling bins: weights and tasks equal a loop over a written history, and resume to the bit."""

import json
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest

from core.extensions.bins import TaskBins
from core.records import Progress
from envs import make_env
from tests.helpers import read_jsonl, slow, train_here
from tests.kill_runs import FLAGS, checksum, records

STEPS, GROUPS, SIZE = 6, 3, 4
SHARES = {"easy": 0.9, "some": 0.5, "never": 0.0}  # of the replies that the reward calls right
REWARD = """
import zlib

def reward(completion, share, **row):
    right = zlib.crc32(completion.encode()) % 1000 < 1000 * float(share)
    return {"return": float(right) + 0.5 * (zlib.crc32(completion.encode()) % 2), "correct_answer": float(right)}
"""
FLAGS = FLAGS | {
    "env_name": "dataset", "test_env_name": "", "groups_per_batch": GROUPS, "group_size": SIZE, "max_resampling": 3,
    "do_group_filter": 1, "max_steps": STEPS, "save_interval": 2, "save_rollouts": "all", "task_sampling": "bins",
    "num_generation_tokens": 8,
}  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """A reward, and rows of three bins of different sizes."""
    folder = tmp_path_factory.mktemp("data")
    rows = [
        {"prompt": f"{level} {i}", "level": level, "share": share, "seen": i or None}
        for level, share in SHARES.items()
        for i in range(20 if level == "some" else 40)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(REWARD)
    return folder


def train(folder: Path, data: Path, **flags) -> int:
    options = f"path={data}/rows.jsonl,bin=level"
    return train_here(folder, **FLAGS | {"env_options": options, "reward": f"{data}/reward.py:reward"} | flags)


def loop(folder: Path, data: Path, num_steps: int) -> None:
    """Compares weights and tasks of each step with those that the written rollouts give."""
    env = make_env("dataset", path=str(data / "rows.jsonl"), bin="level", reward=f"{data}/reward.py:reward")
    of_bin = defaultdict(list)
    for task in range(env.num_tasks):
        of_bin[env.problem(task).answer["level"]].append(task)
    names = sorted(of_bin)
    solved, rollouts, taken = np.zeros(3), np.zeros(3), Counter()
    metrics = {row["global_step"]: row for row in read_jsonl(folder / "metrics.jsonl")}
    last_cursor = 0
    for step in range(1, num_steps + 1):
        rng = np.random.default_rng((0, step, 60))
        p = np.array([rng.beta(1 + s, 1 + n - s) for s, n in zip(solved, rollouts, strict=True)])
        w = 1 - p**SIZE - (1 - p) ** SIZE
        w = np.maximum(w / w.sum(), 0.05 / 3)
        w /= w.sum()
        logged = metrics[step]
        np.testing.assert_allclose([logged[f"bins/{name}/weight"] for name in names], w, rtol=1e-12)

        bins = rng.choice(3, size=3 * GROUPS, p=w)
        cursor = round(logged["env/epochs"] * env.num_tasks)
        groups = defaultdict(list)
        for row in read_jsonl(folder / f"rollouts/step_{step}.jsonl"):
            groups[row["group"]].append(row)
        solved, rollouts = 0.95 * solved + 1, 0.95 * rollouts + 2
        drawn = []
        for group in range(cursor - last_cursor):
            name, rows = names[bins[group]], groups[group]
            (task,) = {row["task"] for row in rows}
            assert task in of_bin[name]
            drawn.append(task)
            solved[names.index(name)] += sum(row["correct_answer"] for row in rows)
            rollouts[names.index(name)] += len(rows)
        assert len(set(drawn)) == len(drawn), "no task twice in a step"
        taken.update(drawn)
        for tasks in of_bin.values():
            counts = [taken[task] for task in tasks]
            assert max(counts) - min(counts) <= 1, "each once before any comes again"
        last_cursor = cursor


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert train(folder, data) == 0
    return folder


def test_weights_and_tasks_equal_a_loop_over_the_history(whole, data):
    loop(whole, data, STEPS)
    weights = records(whole)[-1]
    assert weights["bins/some/pass_rate"] > 0, "the test has a bin between the others"


@pytest.mark.parametrize("ahead", [0, *slow(1)])
def test_resumed_run_equals_one_that_never_stopped(ahead, whole, data, tmp_path):
    folders = [tmp_path / "whole", tmp_path / "resumed"]
    assert train(folders[0], data, ahead=ahead) == 0
    assert train(folders[1], data, ahead=ahead, max_steps=3) == 0
    assert train(folders[1], data, ahead=ahead) == 0
    assert records(folders[0]) == records(folders[1])
    assert checksum(folders[0], STEPS) == checksum(folders[1], STEPS)
    loop(folders[1], data, STEPS)


def test_tasks_do_not_depend_on_the_rows_of_a_call(whole, data, tmp_path):
    assert train(tmp_path / "run", data, inference_batch_per_device=4) == 0
    names = [f"bins/{name}/{what}" for name in SHARES for what in ("weight", "pass_rate", "informative")]
    found = [[[record.get(name) for name in names] for record in records(run)] for run in (whole, tmp_path / "run")]
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"env_options": "path={data}/rows.jsonl,bin=levle"}, "bin=levle"),
        ({"env_options": "path={data}/rows.jsonl"}, "has no bins"),
        ({"env_options": "path={data}/rows.jsonl,bin=seen"}, "no such column, or no value in it"),
        ({"groups_per_batch": 9}, "bin some of dataset has"),
    ],
)
def test_bins_that_are_not_there_fail_before_the_run(options, words, data, tmp_path, capsys):
    assert train(tmp_path / "run", data, **{name: str(x).format(data=data) for name, x in options.items()}) == 2
    assert words in capsys.readouterr().err
    assert not records(tmp_path / "run")


@pytest.mark.parametrize(("size", "max_groups"), [(10, 4), (12, 5), (40, 16), (6, 6)])
def test_tasks_of_a_bin_come_once_before_any_again(size, max_groups):
    """Whatever part of a step's groups is needed; the order differs between epochs."""
    bins = TaskBins({"a": np.arange(size), "b": np.arange(size, 2 * size)}, 0, group_size=8, max_groups=max_groups)
    drawn, counts = {"a": [], "b": []}, {name: [4.0, 8.0, 0] for name in "ab"}
    for step in range(100):
        chosen, *_ = bins.choose(Progress(step=step, memory={"bins": counts}))
        assert len(set(chosen.tolist())) == max_groups
        for task in chosen[: step % max_groups + 1].tolist():
            drawn["ab"[task // size]].append(task)
        counts = {name: [4.0, 8.0, len(tasks)] for name, tasks in drawn.items()}
    for number, tasks in enumerate(drawn.values()):
        epochs = [tasks[i : i + size] for i in range(0, len(tasks), size)]
        assert all(sorted(epoch) == [*range(number * size, (number + 1) * size)] for epoch in epochs[:-1])
        assert (epochs[0] == epochs[1]) == (size == max_groups)


def test_bins_are_named_by_values(tmp_path):
    rows = [{"prompt": f"P{i}", "answer": "1", "level": level} for i, level in enumerate([1, 1.0, 2, "2", 2.5, "low"])]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    names = ["dataset", "dataset-valid", "dataset-test"]
    found = [make_env(name, path=str(tmp_path / "rows.jsonl"), bin="level").bins() for name in names]
    assert sorted(sum(found, [])) == ["1", "1", "2", "2", "2.5", "low"]


@pytest.mark.parametrize(("name", "options", "found"), [("countdown", {"mixture": "2+3", "num_tasks": 6}, "232323")])
def test_environments_state_their_bins(name, options, found):
    env = make_env(name, **options)
    assert "".join(env.bins()) == found
    assert [len(env.problem(i).answer[0]) for i in range(env.num_tasks)] == list(map(int, found))
    styled = make_env(name, **options, thinking="off")
    assert styled.bins() == env.bins()
