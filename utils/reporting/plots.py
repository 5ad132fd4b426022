"""Draws plot.png of a run, or of several runs in one picture, from what metrics.jsonl holds.

Dots with bars are held-out scores and their 95 % intervals; lines are of the training batches, pale as they are and
strong as a running mean.
"""

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from utils.metrics.jsonl import read_lines

MAIN = (("test_env/correct_answer", "env/correct_answer"), ("test_env/return", "env/return"))  # (held out, training)
TITLES = {
    "test_env/correct_answer": "Correct answers",
    "test_env/return": "Return",
    "env/return": "Return of the training batch",
    "env/length": "Completion length (tokens)",
    "entropy": "Entropy (nats per token)",
    "grad_norm": "Gradient norm",
    "rollout/tokens_per_second": "Sampled tokens per second",
    "memory/peak_gb": "Peak memory (GB)",
}
SIDE = ("env/return", "env/length", "entropy", "grad_norm", "rollout/tokens_per_second", "memory/peak_gb")
COLOURS = ("#2563eb", "#ea580c", "#059669", "#9333ea", "#dc2626", "#0891b2", "#ca8a04", "#64748b")


def plot(metrics_jsonl: str | Path, out_png: str | Path) -> None:
    """Draw one run (1200 x 600 pixels); panels of metrics that were never logged stay out."""
    draw({Path(metrics_jsonl).resolve().parent.name: read(metrics_jsonl)}, out_png)


def read(metrics_jsonl: str | Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Steps and values of each metric; null is NaN, and damaged lines are skipped."""
    columns: dict[str, list[tuple[int, float]]] = {}
    for _, record in read_lines(metrics_jsonl, key="global_step"):
        for name, value in record.items():
            if value is None or isinstance(value, int | float):
                columns.setdefault(name, []).append((record["global_step"], np.nan if value is None else value))
    return {name: tuple(np.array(column, float).T) for name, column in columns.items()}


def before_and_after(metrics_jsonl: str | Path) -> str:
    """What training changed, as a table: the first and the last value of the metrics that tell."""
    logged = read(metrics_jsonl)
    lines = [f"{'':<30}{'first':>16}{'last':>16}"]
    for name in (*(held_out for held_out, _ in MAIN), *SIDE[:3]):
        if name in logged:
            bars = dict(zip(*logged.get(f"{name}_ci", ((), ())), strict=True))
            cells = []
            for i in (0, -1):
                bar = bars.get(logged[name][0][i])
                text = form(name, logged[name][1][i]) + (f" ± {form(name, bar)}" if bar is not None else "")
                cells.append(f"{text:>16}")
            lines.append(f"{('held out: ' if name.startswith('test_') else '') + TITLES[name]:<30}{''.join(cells)}")
    return "\n".join(lines) if len(lines) > 1 else ""


def form(name: str, value: float) -> str:
    """A value as text, with the precision that suits its metric."""
    return f"{value:.1%}" if name.endswith("correct_answer") else f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"


def draw(runs: dict[str, dict[str, tuple[np.ndarray, np.ndarray]]], out_png: str | Path) -> None:
    """One large panel for the score, small ones for what explains it; a colour for each run."""
    logged = set().union(*runs.values())
    held_out, training = next((pair for pair in MAIN if logged & set(pair)), MAIN[-1])
    side = [name for name in SIDE if name in logged and name != training]
    cells = [[name, *side[i + 1 : i + 2]] for i, name in list(enumerate(side))[::2]]
    mosaic = [["main"] * 2 + (cell * 2)[:2] for cell in cells] or [["main"]]
    figure = Figure(figsize=(12, 6), dpi=100, layout="constrained")  # not pyplot: no global state, no display
    axes = figure.subplot_mosaic(mosaic)
    for colour, (label, run) in zip(COLOURS * len(runs), runs.items(), strict=False):
        draw_line(axes["main"], run.get(training), colour, f"{label} (training)", "--")
        if held_out in run:
            steps, values = run[held_out]
            bars = dict(zip(*run.get(f"{held_out}_ci", ((), ())), strict=True))
            heights = [bars.get(step, np.nan) for step in steps]
            axes["main"].errorbar(
                steps, values, heights, color=colour, fmt="o-", ms=5, lw=1.5, capsize=3, label=f"{label} (held out)"
            )  # fmt: skip
        for name in side:
            draw_line(axes[name], run.get(name), colour, label)
    for name, axis in axes.items():
        axis.set_title(TITLES[held_out if name == "main" else name], loc="left", fontsize=11, fontweight="bold")
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(color="#e5e7eb", lw=0.8)
        axis.tick_params(labelsize=9, color="#9ca3af")
        axis.set_axisbelow(True)
    axes["main"].set_xlabel("step")
    if held_out == MAIN[0][0]:
        axes["main"].yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    if axes["main"].get_legend_handles_labels()[0]:
        axes["main"].legend(loc="best", frameon=False, fontsize=9)
    figure.savefig(out_png, facecolor="white")


def draw_line(axis: Axes, series: tuple[np.ndarray, np.ndarray] | None, colour: str, label: str, style="-") -> None:
    """A metric of each step: pale as it is, and strong as the mean of its neighbours."""
    if series is not None:
        steps, values = series
        axis.plot(steps, values, color=colour, alpha=0.25, lw=1)
        axis.plot(steps, running_mean(values), color=colour, lw=1.6, ls=style, label=label)


def running_mean(values: np.ndarray) -> np.ndarray:
    """The mean of each value and its neighbours, a twentieth of all on either side; NaN where none is finite."""
    width, places, finite = len(values) // 20, np.arange(len(values)), np.isfinite(values)
    first, end = np.maximum(places - width, 0), np.minimum(places + width + 1, len(values))
    total, count = (np.append(0, np.cumsum(x)) for x in (np.where(finite, values, 0), finite))
    with np.errstate(invalid="ignore"):
        return (total[end] - total[first]) / (count[end] - count[first])
