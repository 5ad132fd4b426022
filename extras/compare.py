"""Compares runs side by side, in a page or a picture.

python extras/compare.py runs/countdown-1 runs/countdown-2 --html compare.html   # open it in any browser
python extras/compare.py runs/countdown-1 runs/countdown-2 --out compare.png

In the picture, dots with bars are held-out scores and their 95% intervals. Pale lines are the values of training
batches, and strong lines their trailing mean; steps without a value are gaps. report.html shows the same curves.
"""

import argparse
import itertools
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    import utils.settings.packages  # noqa: F401 (says what to install)

import numpy as np

from utils.files import replacing
from utils.metrics.curves import COLORS, LOSS, MAIN, Curves, Series, intervals, is_share, read_metrics, running_mean
from utils.reporting.page import label_runs, write_report
from utils.settings.errors import user_errors

if TYPE_CHECKING:
    import matplotlib.axes
    import matplotlib.figure

TITLES = {
    "test_data/loss": "Loss of replies (nats per token) or pairs",
    "data/loss": "Loss of replies (nats per token) or pairs",
    "test_env/correct_answer": "Correct answers",
    "test_env/return": "Return",
    "env/return": "Return of the training batch",
    "env/length": "Completion length (tokens)",
    "entropy": "Entropy (nats per token)",
    "grad_norm": "Gradient norm",
    "rollout/tokens_per_second": "Sampled tokens per second",
    "env/finished": "Finished completions (share)",
}
SIDE = ("data/loss", "env/return", "env/length", "entropy", "grad_norm", "rollout/tokens_per_second", "env/finished")


def plot_runs(runs: dict[str, Curves], out_png: str | Path) -> None:
    """Plots one large panel for the score and small ones for other metrics; runs have colors, one alone a title.

    1200 x 600 pixels; panels of metrics that were never logged are left out.
    """
    logged = set().union(*runs.values())
    held_out, training = next((pair for pair in (*MAIN, LOSS) if logged.intersection(pair)), MAIN[-1])
    side = [name for name in SIDE if name in logged and name != training]
    figure = make_figure(figsize=(12, 6), dpi=100)
    pairs = [(side[i], side[min(i + 1, len(side) - 1)]) for i in range(0, len(side), 2)]
    axes = figure.subplot_mosaic([["main", "main", *pair] for pair in pairs] or [["main"]])  # a row each
    colors = itertools.cycle(COLORS)
    if len(runs) == 1:
        figure.suptitle(*runs, x=0.01, ha="left", fontsize=11, color="#6b7280")
    for label, run in runs.items():
        color = next(colors)
        names = {kind: f"{label} ({kind})" if len(runs) > 1 else kind for kind in ("training", "held out")}
        plot_curve(axes["main"], run.get(training), color, names["training"])
        if held_out in run:
            plot_held_out(axes["main"], run, held_out, color, names["held out"])
        for name in side:
            plot_curve(axes[name], run.get(name), color, label)
    for name, axis in axes.items():
        axis.set_title(TITLES[held_out if name == "main" else name], loc="left", fontsize=11, fontweight="bold")
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(color="#e5e7eb", lw=0.8)
        axis.tick_params(labelsize=9, color="#9ca3af")
        axis.set_axisbelow(True)
    axes["main"].set_xlabel("step")
    if is_share(held_out):
        axes["main"].yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    handles, _ = axes["main"].get_legend_handles_labels()
    if 0 < len(handles) <= 2 * len(COLORS):
        axes["main"].legend(loc="best", frameon=False, fontsize=9)
    with replacing(out_png) as file:
        figure.savefig(file, facecolor="white", format=Path(out_png).suffix.removeprefix(".") or None)


def make_figure(**options: object) -> "matplotlib.figure.Figure":
    """Returns an empty figure, which is written to files and never shown: not pyplot's, which has a global state.

    MPLBACKEND is not read: a notebook hands it on to the commands that it starts, which may lack that backend.
    """
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it warns if HOME cannot be written
    backend = os.environ.pop("MPLBACKEND", None)
    try:
        from matplotlib.figure import Figure
    finally:
        os.environ |= {"MPLBACKEND": backend} if backend else {}
    return Figure(layout="constrained", **options)


def plot_held_out(axis: "matplotlib.axes.Axes", run: Curves, name: str, color: str, label: str) -> None:
    """Draws a held-out score as dots with bars, its 95% intervals."""
    steps, values = run[name]
    ends = intervals(run, name)
    lows, highs = np.array([ends.get(step, (np.nan, np.nan)) for step in steps]).T
    heights = np.maximum([values - lows, highs - values], 0.0)  # below 0 by rounding
    axis.errorbar(steps, values, heights, color=color, label=label, fmt="o:", ms=5, lw=1.5, capsize=3)


def plot_curve(axis: "matplotlib.axes.Axes", series: Series | None, color: str, label: str) -> None:
    """Draws a metric of each step: pale as it is, and strong as a running mean."""
    if series is None:
        return
    steps, values = series
    axis.plot(steps, values, color=color, alpha=0.25, lw=1)
    axis.plot(steps, running_mean(values), color=color, lw=1.6, label=label)


def main(argv: Sequence[str] | None = None) -> None:
    """Writes the report, or draws the picture, of the runs named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run folder, or its metrics.jsonl")
    parser.add_argument("--html", help="the report to write")
    parser.add_argument("--out", help="the picture to write; plot.png when neither is named")
    options = parser.parse_args(argv)
    files = label_runs(options.runs)
    if missing := [str(file) for file in files.values() if not file.is_file()]:
        parser.error(f"there is no {', '.join(missing)}")
    if options.html:
        write_report(options.runs, options.html)
    if options.out or not options.html:
        options.out = options.out or "plot.png"
        plot_runs({label: read_metrics(file) for label, file in files.items()}, options.out)
    print(f"wrote {' and '.join(filter(None, (options.html, options.out)))}")


if __name__ == "__main__":
    with user_errors():
        main()
