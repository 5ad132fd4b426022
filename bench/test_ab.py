"""Comparisons of two settings: intervals against R's, seeds against power.t.test, and what is run again."""

import subprocess
from pathlib import Path

import numpy as np
import pytest

from bench import ab
from core.config import Config
from models.checkpoint import resolve_model_dir
from utils.files import write_json
from utils.metrics.logger import Logger
from utils.settings.config import make_config, to_dict
from utils.settings.errors import UserError

SLEEP = (  # Student's data of extra hours of sleep, as in R's `sleep`
    np.array([0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]),
    np.array([1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]),
)
METRIC = "test_env/correct_answer"


def store_run(folder: Path, seed: int, score: float, steps: int = 2) -> None:
    """Writes a run as core/grpo.py does: its settings, and a score at the first and the last step."""
    with Logger(folder) as logger:
        for step in (0, steps):
            logger.log(step, {METRIC: score if step else 0.2})
    settings = to_dict(make_config(Config, max_steps=2, seed=seed, env_name="countdown"))
    model_dir = resolve_model_dir(settings["model_dir"])
    write_json(folder / "config.json", settings | {"model_dir": model_dir, "run": {"lmpo": "1", "cpu": "2"}})


@pytest.mark.parametrize(
    ("is_paired", "ends"), [(True, (0.7001142, 2.4598858)), (False, (-0.2054832, 3.3654832))], ids=str
)
def test_intervals_are_those_of_r(is_paired, ends):
    found = ab.compare(*SLEEP, is_paired)
    assert found.mean == pytest.approx(1.58)
    assert found[1:3] == pytest.approx(ends)
    assert found.verdict == ("b is higher" if is_paired else "no difference")


def test_runs_that_are_equal_have_no_difference():
    scores = np.array([0.5, 0.6, 0.7])
    assert ab.compare(scores, scores, is_paired=True) == (0, 0, 0, 0)
    assert ab.compare(scores, scores - 0.1, is_paired=True).verdict == "b is lower"
    assert ab.compare(np.full(3, 0.5), np.full(3, 0.6), is_paired=False).verdict == "b is higher"


@pytest.mark.parametrize(("size", "paired", "unpaired"), [(0.5, 34, 64), (0.8, 15, 26), (1.0, 10, 17)])
def test_seeds_are_those_of_power_t_test(size, paired, unpaired):
    assert ab.seeds_needed(size, 1.0, is_paired=True) == paired
    assert ab.seeds_needed(-size, 2**0.5, is_paired=False) == unpaired


def test_seeds_have_bounds():
    assert ab.seeds_needed(1000.0, 1.0, is_paired=True) == ab.FEWEST_SEEDS
    assert ab.seeds_needed(0.001, 1.0, is_paired=False) is None
    assert ab.seeds_needed(0.0, 1.0, is_paired=True) is None


def test_stored_runs_are_compared(tmp_path, capsys):
    for seed in range(4):
        store_run(tmp_path / f"a{seed}", seed, 0.5 + 0.02 * seed)
        store_run(tmp_path / f"b{seed}", seed, 0.6 + 0.021 * seed)
    sides = [[str(tmp_path / f"{side}{seed}") for seed in range(4)] for side in "ab"]
    ab.main(["--runs_a", *sides[0], "--runs_b", *sides[1], "--json", str(tmp_path / "out.json")])
    out = capsys.readouterr().out
    assert "+0.10" in out.split("paired, 4")[1] and out.count("b is higher") == 2
    assert '"scores": {' in (tmp_path / "out.json").read_text()
    ab.main(["--runs_a", *sides[0], "--runs_b", *sides[1][2:], str(tmp_path / "a1")])
    assert "unpaired, 4 and 3" in capsys.readouterr().out
    ab.main(["--runs_a", *sides[0], "--runs_b", *sides[0][:3]])
    out = capsys.readouterr().out
    assert out.count("no difference") == 2, "the pairs are equal"


def test_setting_is_compared_with_itself(tmp_path, capsys):
    for seed in range(6):
        store_run(tmp_path / f"{seed}", seed, 0.5 + 0.01 * seed)
    runs = [str(tmp_path / f"{seed}") for seed in range(6)]
    ab.main(["--runs_a", *runs, "--runs_b", *runs])
    assert "of 10" in capsys.readouterr().out
    with pytest.raises(UserError, match="needs 6 runs, not 5: raise --seeds"):
        ab.main(["--runs_a", *runs[1:], "--runs_b", *runs[1:]])


def test_finished_run_is_read_and_a_stopped_one_is_resumed(tmp_path, monkeypatch):
    commands = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess:
        commands.append(command)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", run)  # a run takes a minute
    store_run(tmp_path / "seed0", 0, 0.5)
    store_run(tmp_path / "seed1", 1, 0.5, steps=1)
    side = ab.Side(["--env_name", "countdown", "--max_steps", "2"], tmp_path)
    assert side.run(0, METRIC) == tmp_path / "seed0" and not commands
    assert side.run(1, METRIC) == tmp_path / "seed1" and commands[0][-4:-2] == ["--seed", "1"]
    side.run(2, METRIC)
    assert len(commands) == 2
    with pytest.raises(UserError, match="--lr is 0.5 now and was"):
        ab.Side([*side.options, "--lr", "0.5"], tmp_path).run(0, METRIC)


@pytest.mark.parametrize(("b", "seeds", "fewest"), [("--lr 1", 2, 3), ("", 5, 6)])
def test_too_few_seeds_are_refused_before_a_run(b, seeds, fewest, tmp_path):
    argv = ["--a", "", "--b", b, "--seeds", str(seeds), "--dir", str(tmp_path), "--env_name", "countdown"]
    with pytest.raises(UserError, match=f"--seeds {seeds} is too few for an interval: give {fewest} or more"):
        ab.main(argv)
    assert not any(tmp_path.iterdir())


def test_bad_input_is_refused(tmp_path):
    store_run(tmp_path / "a", 0, 0.5)
    for argv, words in (
        (["--runs_a", "a"], "give --runs_a and --runs_b"),
        (["--runs_a", "a", "--runs_b", "b", "--lr", "1"], "leave out others"),
        (["--runs_a", str(tmp_path / "a"), "--runs_b", str(tmp_path / "a"), "--metric", "x"], "has no value of x"),
    ):
        with pytest.raises(UserError, match=words):
            ab.main(argv)
    with pytest.raises(SystemExit):
        ab.main(["--a", "--no_such_option 1", "--dir", str(tmp_path)])
