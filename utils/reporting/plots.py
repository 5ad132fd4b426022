"""Draws plot.png of a run, or of several runs in one picture, from what metrics.jsonl holds.

Dots with bars are held-out scores and their 95% intervals. Pale lines are the values of training batches, and strong
lines their trailing mean; steps without a value are gaps. report.html shows the same curves.
"""

import itertools
import logging
import os
from array import array
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float

from utils.files import replacing
from utils.metrics.jsonl import read_lines
from utils.settings.errors import UserError

if TYPE_CHECKING:
    import matplotlib.axes
    import matplotlib.figure

MAIN = (  # (held out, training)
    ("test_env/correct_answer", "env/correct_answer"),
    ("test_env/return", "env/return"),
)
LOSS = ("test_data/loss", "data/loss")  # the same of written replies: lower is better
TITLES = {
    "test_data/loss": "Loss of replies (nats per token)",
    "data/loss": "Loss of replies (nats per token)",
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
COLORS = ("#2563eb", "#ea580c", "#059669", "#9333ea", "#dc2626", "#0891b2", "#ca8a04", "#64748b")

Series = tuple[Float[np.ndarray, "N"], Float[np.ndarray, "N"]]  # steps, values
Column = tuple["array[float]", "array[float]"]  # the same as they are read
Curves = dict[str, Series]  # of a run, by the name of the metric
Interval = tuple[float, float]  # its ends
MAX_METRICS = 2000  # others are left out
MAX_NUMBERS = 5 * 10**7
WINDOW = 5  # last steps of a running mean: fixed, so that runs of different lengths are smoothed alike


def read_metrics(metrics_jsonl: str | Path) -> Curves:
    """Returns the steps and values of each metric; null is NaN, and damaged lines are skipped.

    A step of training without a value, as one without an update, is NaN too; held-out scores are of some steps only.
    Raises: UserError naming the file if it holds more than MAX_NUMBERS, OSError.
    """
    columns: dict[str, Column] = {}
    for _, record in read_lines(metrics_jsonl, key="global_step"):
        for name, value in record.items():
            if (value is None or isinstance(value, int | float)) and (name in columns or len(columns) < MAX_METRICS):
                steps, values = columns.setdefault(name, (array("d"), array("d")))
                steps.append(record["global_step"])
                values.append(np.nan if value is None else value)
    run = {name: last_values(*column) for name, column in columns.items()}
    all_steps = run["global_step"][0] if run else np.zeros(0)
    if len(run) * len(all_steps) > MAX_NUMBERS:
        raise UserError(f"{metrics_jsonl} has {len(all_steps):,} steps of {len(run):,} metrics: plot a file with fewer")
    for name, (steps, values) in run.items():
        if not is_held_out(name):
            own_steps = all_steps[np.searchsorted(all_steps, steps[0]) :]
            run[name] = own_steps, np.full(len(own_steps), np.nan)
            run[name][1][np.searchsorted(own_steps, steps)] = values
    return run


def last_values(steps: "array[float]", values: "array[float]") -> Series:
    """Returns the steps of a metric in order, and the value that was logged last for each."""
    unique, places = np.unique(np.frombuffer(steps)[::-1], return_index=True)
    return unique, np.frombuffer(values)[::-1][places]


def is_held_out(name: str) -> bool:
    return name.startswith(("test_", "valid_"))


def intervals(run: Curves, name: str) -> dict[float, Interval]:
    """Returns the ends of a metric's 95% interval by step: as logged, else from half its width; empty without both."""
    by_step = by_steps(run, name)
    halves, lows, highs = (by_steps(run, f"{name}_{end}") for end in ("ci", "low", "high"))
    ends = {step: (by_step[step] - half, by_step[step] + half) for step, half in halves.items() if step in by_step}
    return ends | {step: (low, highs[step]) for step, low in lows.items() if step in highs}


def by_steps(run: Curves, name: str) -> dict[float, float]:
    """Returns the values of a metric by step; none if it was never logged."""
    steps, values = run.get(name, ((), ()))
    return dict(zip(steps, values, strict=True))


def format_point(run: Curves, name: str, index: int) -> str:
    """Returns one value of a metric as text, with its 95% interval if there is one; "-" if the step has none."""
    steps, values = run[name]
    text = "-" if np.isnan(values[index]) else format_value(name, values[index])
    ends = intervals(run, name).get(steps[index])
    return text if ends is None else f"{text} [{', '.join(format_value(name, end) for end in ends)}]"


def format_value(name: str, value: float) -> str:
    """Returns a value as text, with the precision that suits its metric."""
    if is_share(name):
        return f"{value:.1%}"
    if abs(value) < 100:
        return f"{value:.3g}"
    return f"{value:.0f}"


def is_share(name: str) -> bool:
    """True for metrics that are read in percent."""
    return name.endswith("correct_answer")


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
        metric = held_out if name == "main" else name
        format_axis(axis, TITLES[metric])
    format_main_axis(axes["main"], is_share(held_out))
    with replacing(out_png) as file:
        figure.savefig(file, facecolor="white", format=Path(out_png).suffix.removeprefix(".") or None)


def make_figure(**options: object) -> "matplotlib.figure.Figure":
    """Returns an empty figure, which is written to files and never shown: not pyplot's, which has a global state.

    MPLBACKEND is not read: a notebook hands it on to the commands that it starts, where it may name no backend.
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


def format_axis(axis: "matplotlib.axes.Axes", title: str) -> None:
    """Sets the title, the grid and the ticks of a panel."""
    axis.set_title(title, loc="left", fontsize=11, fontweight="bold")
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(color="#e5e7eb", lw=0.8)
    axis.tick_params(labelsize=9, color="#9ca3af")
    axis.set_axisbelow(True)


def format_main_axis(axis: "matplotlib.axes.Axes", has_percents: bool) -> None:
    """Sets the labels and the legend of the large panel, which has none with more runs than colors."""
    axis.set_xlabel("step")
    if has_percents:
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    handles, _ = axis.get_legend_handles_labels()
    most_entries = 2 * len(COLORS)
    if 0 < len(handles) <= most_entries:
        axis.legend(loc="best", frameon=False, fontsize=9)


def plot_curve(axis: "matplotlib.axes.Axes", series: Series | None, color: str, label: str) -> None:
    """Draws a metric of each step: pale as it is, and strong as a running mean."""
    if series is None:
        return
    steps, values = series
    axis.plot(steps, values, color=color, alpha=0.25, lw=1)
    axis.plot(steps, running_mean(values), color=color, lw=1.6, label=label)


def running_mean(values: Float[np.ndarray, "N"]) -> Float[np.ndarray, "N"]:
    """Returns the mean of the finite ones of each value and the WINDOW - 1 before it; NaN if the value is."""
    end = np.arange(len(values)) + 1
    start = np.maximum(end - WINDOW, 0)
    is_finite = np.isfinite(values)
    finite_values = np.where(is_finite, values, 0)
    sums = np.append(0, np.cumsum(finite_values))
    counts = np.append(0, np.cumsum(is_finite))
    window_sums = sums[end] - sums[start]
    window_counts = counts[end] - counts[start]
    return np.where(is_finite, window_sums / np.maximum(window_counts, 1), np.nan)
