"""Pictures of runs."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from extras.compare import plot_runs
from utils.metrics.curves import read_metrics
from utils.metrics.logger import Logger

SCORED = {"env/return": 1.0, "test_env/correct_answer": 0.5, "test_env/correct_answer_ci": 0.1}


@pytest.mark.parametrize("metrics", [{}, {"env/return": float("nan")}, SCORED])
def test_what_was_logged_can_be_drawn(tmp_path, metrics):
    with Logger(tmp_path) as logger:
        for step in range(3):
            logger.log(step, metrics)
    plot_runs({"run": read_metrics(tmp_path / "metrics.jsonl")}, tmp_path / "plot.png")
    header = (tmp_path / "plot.png").read_bytes()[:24]
    assert header[1:4] == b"PNG"
    assert [int.from_bytes(header[i : i + 4], "big") for i in (16, 20)] == [1200, 600]


def test_picture_does_not_depend_on_the_backend_of_a_notebook(tmp_path):
    """Jupyter hands MPLBACKEND on to the commands of a cell, in whose environment its backend may be missing."""
    code = "import sys; from extras.compare import plot_runs; plot_runs({'a': {}}, sys.argv[1])"
    environment = os.environ | {"MPLBACKEND": "module://nowhere.backend_inline"}
    command = [sys.executable, "-c", code, str(tmp_path / "plot.png")]
    subprocess.run(command, cwd=Path(__file__).parents[1], env=environment, check=True)
    assert (tmp_path / "plot.png").read_bytes()[1:4] == b"PNG"


def test_single_run_is_titled_and_held_out_scores_are_dotted(tmp_path, monkeypatch):
    figures = []
    # Keeps the figures.
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, *_, **__: figures.append(figure))
    steps = np.arange(3.0)
    run = {"test_env/return": (steps, steps), "env/return": (steps, steps)}
    plot_runs({"a": run}, tmp_path / "one.png")
    plot_runs({"a": run, "b": run}, tmp_path / "two.png")
    legends = [[text.get_text() for text in figure.axes[0].get_legend().get_texts()] for figure in figures]
    assert legends[0] == ["training", "held out"]
    assert [figure.get_suptitle() for figure in figures] == ["a", ""]
    assert legends[1] == ["a (training)", "b (training)", "a (held out)", "b (held out)"]
    styles = {line.get_linestyle() for line in figures[0].axes[0].lines if line.get_marker() == "o"}
    assert styles == {":"}
