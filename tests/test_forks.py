"""The diffs of docs/forks have the size that docs/forks.md states, and do what it says.

    python tests/test_forks.py    # brings the diffs and the table to the last commit

Run it after a commit: it applies the diffs to the files of HEAD.
"""

import json
import math
import os
import re
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

if __name__ == "__main__":  # this repository, wherever the command is given
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import numpy as np
import pytest

from tests.kill_runs import FLAGS, QUICK, ROOT, arguments, checksum, kill_at, records
from tests.oracles.stored import stored_logits, stored_logprobs
from tests.readme import clone

PAGE = ROOT / "docs" / "forks.md"
FORKS = sorted((ROOT / "docs" / "forks").glob("*.diff"))
ROW = re.compile(r"^(\| \[(.*?)\]\(forks/.*?\.diff\) \| .*?) \| (\d+) \| (\d+) \|", re.MULTILINE)
TINY, TEACHER = ROOT / "models/tiny", ROOT / "models/player"
STEPS = 4
SMALL = {
    "max_steps": STEPS, "groups_per_batch": 4, "group_size": 4, "ppo_minibatch": 0, "do_group_filter": 0,
    "save_interval": 2, "test_interval": 2, "num_eval_tasks": 4, "save_rollouts": "all", "num_score_workers": 1,
}  # fmt: skip
DEMO = {"config": "configs/demo.py", "num_generation_tokens": 64} | SMALL
POEM = FLAGS | SMALL | {"env_options": "subjects_file=subjects.txt"}


def size(diff: str) -> tuple[int, int]:
    """Returns the files of a diff, and the lines that it adds and removes."""
    lines = re.findall(r"^[+-](?!\+\+ |-- )", diff, re.MULTILINE)
    return diff.count("diff --git"), len(lines)


def test_the_table_has_the_size_of_each_fork():
    """At most two files and 15 lines for an idea, three files for one of the sampler, the distribution and the loop."""
    page = PAGE.read_text(encoding="utf-8")
    table = {name: (int(files), int(lines)) for _, name, files, lines in ROW.findall(page)}
    assert table == {fork.stem: size(fork.read_text()) for fork in FORKS}, "python tests/test_forks.py counts anew"
    assert table.keys() == CASES.keys()
    assert all(files <= 2 + (name == "temperatures") and lines <= 15 for name, (files, lines) in table.items())
    all_files, all_lines = map(sum, zip(*table.values(), strict=True))
    assert all_files <= 24
    assert all_lines <= 170


@pytest.mark.parametrize("fork", FORKS, ids=lambda fork: fork.stem)
def test_a_fork_applies(fork: Path):
    done = subprocess.run(["git", "apply", "--check", fork], cwd=ROOT, capture_output=True, text=True)
    assert not done.returncode, f"{done.stderr} (after a commit, python tests/test_forks.py refreshes it)"


class Outcome(NamedTuple):
    """A run of a fork."""

    root: Path  # its code
    folder: Path
    flags: dict[str, object]

    @property
    def metrics(self) -> list[dict]:
        """Returns the metrics of each step, those of step 0 first."""
        return records(self.folder)

    def rows(self, step: int) -> list[dict]:
        text = (self.folder / "rollouts" / f"step_{step}.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines()]

    def arrays(self, step: int) -> dict[str, np.ndarray]:
        return dict(np.load(self.folder / "rollouts" / f"step_{step}.npz"))


def play(root: Path, folder: Path, flags: dict[str, object], is_killed: bool = False) -> Outcome:
    """Runs the code in `root`, once more where it was killed behind its second step."""
    flags = dict(flags)
    command = [sys.executable, flags.pop("program", "core/grpo.py"), *arguments(**flags, save_dir=folder)]
    for is_first in (True, False)[not is_killed :]:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(command, cwd=root, env=QUICK | os.environ, **pipes)
        if is_first:
            assert kill_at(process, folder, "step", 3, 0) != "finished"
        else:
            said, _ = process.communicate(timeout=600)
            assert process.returncode == 0, said.decode()
    return Outcome(root, folder, flags)


def baseline(run: Outcome) -> None:
    baselines = {}
    for step in range(1, STEPS + 1):
        rows = run.rows(step)
        before = dict(baselines)
        assert {row["task"] for row in rows} == {0, 1, 2, 3}
        for row in rows:
            task = str(row["task"])
            baselines[task] = 0.9 * baselines.get(task, 0) + 0.1 * row["return"]
            expected = row["return"] - before.get(task, 0)
            assert row.get("advantage", expected) == pytest.approx(expected, abs=1e-3)
    progress = json.loads((run.folder / "state" / str(STEPS) / "progress" / "metadata").read_text())
    assert progress["memory"]["baselines"] == pytest.approx(baselines)


def bonus(run: Outcome) -> None:
    for step in range(1, STEPS + 1):
        for row in run.rows(step):
            assert row["bonus"] == pytest.approx(row["finished"] * (0.5 - 0.01 * step))
            reward = 1.0 if row["correct_answer"] else 0.1 * row["valid"]
            assert row["return"] == pytest.approx(reward + row["bonus"])
    assert run.metrics[STEPS]["env/bonus"] > 0
    assert "test_env/bonus" not in run.metrics[STEPS]


def margin(run: Outcome) -> None:
    arrays = run.arrays(1)
    second, first = np.moveaxis(np.sort(stored_logits(arrays, TINY), axis=-1)[..., -2:], -1, 0)
    assert run.metrics[1]["margin"] == pytest.approx((first - second)[arrays["mask"]].mean(), rel=1e-4)
    for terms in run.metrics[1:]:
        expected = terms["policy_loss"] + terms["entropy_loss"] + 0.01 * terms["margin"]
        assert terms["loss"] == pytest.approx(expected, rel=1e-4)


def temperatures(run: Outcome) -> None:
    """Sampler, trainer and a softmax in float64 agree on each row, and no row has the temperature of its neighbors."""
    arrays = run.arrays(1)
    mask = arrays["mask"]
    drawn = arrays["logprobs"]
    own = np.resize([1.0, 1.3], len(mask))[:, None, None]
    right, others = (np.abs(stored_logprobs(arrays, TINY, x) - drawn) for x in (own, 2.3 - own))
    assert right[mask].max() < 1e-4
    assert (others.max(axis=1, where=mask, initial=0) > 1e-2).all()
    assert all(metrics["inference_recompute/logprob_diff_max"] < 1e-4 for metrics in run.metrics[1:])


def mixture(run: Outcome) -> None:
    rows = [row for step in range(1, STEPS + 1) for row in run.rows(step)]
    poems = [row["return"] == row.get("characters") == len(row["text"]) for row in rows]
    assert poems == [row["task"] % 4 == 3 for row in rows]
    assert 0 < sum(poems) < len(poems)
    assert all(row["return"] <= 1 for row in rows if row["task"] % 4 < 3)


def supervised(run: Outcome) -> None:
    """Its rate is so small that the log-probabilities of earlier rollouts are nearly those they were drawn with."""
    found = [metrics.get("supervised/logprob") for metrics in run.metrics]
    expected = [None, None]
    for step in range(2, STEPS + 1):
        arrays = run.arrays(np.random.default_rng((0, step)).integers(1, step))
        is_correct = arrays["mask"] & (arrays["returns"] == 1)[:, None]
        expected.append(arrays["logprobs"][is_correct].mean() if is_correct.any() else None)
    assert any(expected)
    assert found == [x and pytest.approx(x, abs=1e-2) for x in expected]


def controller(run: Outcome) -> None:
    """The coefficient follows the rule, is applied below the target alone, and the update is not compiled for it."""
    coefficient, entropy = 0.0, np.inf
    for metrics in run.metrics[1:]:
        applied = coefficient if entropy <= 0.2 else 0.0
        assert metrics["entropy_coef"] == pytest.approx(applied)
        assert metrics["entropy_loss"] == pytest.approx(-max(applied, 1e-9) * metrics["entropy"], rel=1e-4)
        entropy = metrics["entropy"]
        coefficient = min(max(coefficient + (0.005 if entropy <= 0.2 else -0.005), 0.0), 1.0)
    assert len({metrics["entropy_coef"] for metrics in run.metrics[1:]}) > 1
    programs = map(json.loads, (run.folder / "programs.jsonl").read_text().splitlines())
    assert {program["num_steps"] for program in programs if "accumulate" in program["program"]} == {0}


def ratios(run: Outcome) -> None:
    for metrics in run.metrics[1:]:
        shares = metrics["inference_recompute/ratio_histogram"]
        assert sum(shares) == pytest.approx(1)
        assert np.argmax(shares) == len(shares) // 2


def average(run: Outcome) -> None:
    """Scores are of the average: one that keeps the initial weights scores as these do, where training ruins others."""
    file = run.root / "core" / "grpo.py"
    file.write_text(file.read_text().replace("0.99 * x + 0.01 * new", "1.0 * x + 0.0 * new"))
    start, first, second = play(run.root, run.folder.with_name("kept"), run.flags | {"max_steps": 2, "lr": 0.1}).metrics
    scores = {name for name in start if name.startswith("test_env/")}
    assert {name: start[name] for name in scores} == {name: second[name] for name in scores}
    assert second["env/arithmetic"] < first["env/arithmetic"] / 2


def distillation(run: Outcome) -> None:
    arrays = run.arrays(1)
    gain = stored_logprobs(arrays, TEACHER) - arrays["logprobs"]
    assert run.metrics[1]["advantage/mean"] == pytest.approx(gain[arrays["mask"]].mean(), rel=1e-4)
    for i, row in enumerate(run.rows(1)[:8]):
        np.testing.assert_allclose(row["advantage"], gain[i][arrays["mask"][i]], atol=1e-3)


def vespo(new: np.ndarray, old: np.ndarray, A: np.ndarray) -> np.ndarray:
    log_w = np.clip(np.clip(new - old, -20, 20).sum(axis=1, keepdims=True), math.log(1e-8), 20)
    k, c = np.where(A >= 0, 2, 3), np.where(A >= 0, 3, 2)
    return -np.exp(c + k * log_w - c * np.exp(log_w)) * A


def dppo_squared(new: np.ndarray, old: np.ndarray, A: np.ndarray) -> np.ndarray:
    moved = np.exp(new) - np.exp(old)
    is_inside = np.where(A > 0, moved <= 0.2, moved >= -0.2)
    return np.where(is_inside, -np.exp(new - old) * A, 0) + 2e-3 * (new - old)


def gmpo(new: np.ndarray, old: np.ndarray, A: np.ndarray) -> np.ndarray:
    log_ratio = new - old
    is_free = np.where(A > 0, log_ratio <= 0.2, log_ratio >= -0.2)
    clipped = np.where(is_free, log_ratio, 0.2 * np.sign(A))
    return -A * np.exp(clipped.mean(axis=1, keepdims=True)) * is_free


def dft(new: np.ndarray, old: np.ndarray, A: np.ndarray) -> np.ndarray:
    return -np.exp(new) * A


def loss(gradient: Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray], run: Outcome) -> None:
    """The fork's own function has this gradient, computed in float64, for ratios near 1 and far from it."""
    import jax  # not on the path of this file's own command

    function = runpy.run_path(str(run.root / "core" / "objectives.py"))[gradient.__name__]
    config = SimpleNamespace(clip_epsilon=0.2, clip_epsilon_high=0.2)
    rng = np.random.default_rng(0)
    for size in (0.1, 1.0, 30.0):
        old = np.float32(rng.normal(-2, 0.5, (6, 5)))
        new = np.float32(np.minimum(old + rng.normal(0, size, old.shape), 0))
        A = np.float32(np.tile([[1.0], [-1.0]], (3, 5)) * rng.uniform(0.5, 2, (6, 1)))
        batch = {"advantages": A, "old_logprobs": old, "sample_logprobs": old, "mask": np.ones(old.shape, bool)}
        found = jax.grad(lambda x: function(x, SimpleNamespace(**batch), config)[0].sum())(new)  # noqa: B023
        expected = gradient(*map(np.float64, (new, old, A)))
        np.testing.assert_allclose(found, expected, rtol=1e-3 * max(1, size), atol=1e-6)


def observations(run: Outcome) -> None:
    """The term of the first update, against log-probabilities by the model itself; the loss has a tenth of it."""
    arrays, metrics = run.arrays(1), run.metrics[1]
    column = np.arange(arrays["mask"].shape[1])
    is_reply = (arrays["prompt_lengths"][:, None] <= column) & (column < arrays["lengths"][:, None])
    is_observed = is_reply & ~arrays["mask"]
    assert is_observed.any(axis=1).mean() > 0.5
    expected = -stored_logprobs(arrays, TEACHER)[is_observed].sum() / arrays["mask"].sum()
    assert metrics["echo/loss"] == pytest.approx(expected, rel=1e-4)
    total = metrics["policy_loss"] + metrics["entropy_loss"] + 0.1 * metrics["echo/loss"]
    assert metrics["loss"] == pytest.approx(total, rel=1e-4)
    assert run.metrics[STEPS]["echo/loss"] < metrics["echo/loss"]


GAME = {"config": "recipes/games/preset.py"} | SMALL
ROWS = {"program": "core/sft.py", "data": "rows.jsonl", "max_steps": STEPS, "save_interval": 2, "batch_size": 2}
CASES = {  # check, flags, whether it has state, which is killed and resumed
    "baseline": (baseline, POEM | {"advantage": "reinforce"}, True),
    "bonus": (bonus, DEMO, False),
    "margin": (margin, DEMO, False),
    "temperatures": (temperatures, DEMO, False),
    "mixture": (mixture, DEMO | {"env_name": "mixture", "test_env_name": "mixture-test", "prompt_length": 128}, False),
    "replay": (supervised, DEMO | {"lr": 1e-6}, True),
    "entropy": (controller, DEMO, True),
    "histogram": (ratios, DEMO, False),
    "average": (average, DEMO, True),
    "teacher": (distillation, DEMO, False),
    "vespo": (partial(loss, vespo), DEMO | {"objective": "vespo", "ppo_epochs": 2}, False),
    "squared": (partial(loss, dppo_squared), DEMO | {"objective": "dppo_squared", "ppo_epochs": 2}, False),
    "gmpo": (partial(loss, gmpo), DEMO | {"objective": "gmpo", "loss_normalization": "sequence_mean"}, False),
    "echo": (observations, GAME, False),
    "dft": (partial(loss, dft), ROWS, False),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_fork_does_what_it_says_and_resumes_to_the_bit(name, tmp_path):
    check, flags, has_state = CASES[name]
    root = tmp_path / "lmpo"
    clone(root)
    diff = (ROOT / f"docs/forks/{name}.diff").read_text().replace("Qwen/Qwen3-8B", "models/player")
    subprocess.run(["git", "apply"], cwd=root, input=diff, text=True, check=True)
    (root / "subjects.txt").write_text("rain\nsnow\nwind\nfog\nhail\n")  # the first is held out
    rows = [{"prompt": f"Use {i} 4 to make {i + 4}.", "completion": f"{i}+4"} for i in range(20)]
    (root / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    run = play(root, tmp_path / "run", flags)
    if has_state:
        resumed = play(root, tmp_path / "resumed", flags, is_killed=True)
        assert resumed.metrics == run.metrics
        assert checksum(resumed.folder, STEPS) == checksum(run.folder, STEPS)
    check(run)


def refresh() -> None:
    """Writes the diffs as they apply to the last commit, and their sizes."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"

        def git(*words: str, cwd: Path = tree, **options: str) -> str:
            pipe = subprocess.PIPE
            return subprocess.run(["git", *words], cwd=cwd, check=True, stdout=pipe, text=True, **options).stdout

        git("worktree", "add", "-q", "--detach", str(tree), cwd=ROOT)
        try:
            for fork in FORKS:
                git("apply", "--3way", input=fork.read_text())
                fork.write_text(git("diff", "-U1", "--cached"))
                git("reset", "-q", "--hard")
        finally:
            git("worktree", "remove", "--force", str(tree), cwd=ROOT)
    sizes = {fork.stem: size(fork.read_text()) for fork in FORKS}
    page = ROW.sub(lambda row: "{} | {} | {} |".format(row[1], *sizes[row[2]]), PAGE.read_text(encoding="utf-8"))
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    refresh()
