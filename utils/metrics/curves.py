"""The metrics of a run as curves: values by step, intervals of held-out scores, running means, numbers as text."""

from pathlib import Path

import numpy as np
from jaxtyping import Float

from utils.metrics.jsonl import read_lines

MAIN = (  # (held out, training)
    ("test_env/correct_answer", "env/correct_answer"),
    ("test_env/return", "env/return"),
)
LOSS = ("test_data/loss", "data/loss")  # the same of written replies: lower is better
Series = tuple[Float[np.ndarray, "N"], Float[np.ndarray, "N"]]  # steps, values
Curves = dict[str, Series]  # of a run, by the name of the metric
Interval = tuple[float, float]  # its ends
COLORS = ("#2563eb", "#ea580c", "#059669", "#9333ea", "#dc2626", "#0891b2", "#ca8a04", "#64748b")  # of runs
WINDOW = 5  # last steps of a running mean: fixed, so that runs of different lengths are smoothed alike


def read_metrics(metrics_jsonl: str | Path) -> Curves:
    """Returns the steps and values of each metric; null is NaN, and damaged lines are skipped.

    A step of training without a value, as one without an update, is NaN too; held-out scores are of some steps only.
    """
    columns: dict[str, dict[int, float]] = {}
    records = [record for _, record in read_lines(metrics_jsonl, key="global_step")]
    for record in sorted(records, key=lambda record: record["global_step"]):  # of equal steps the last one counts
        step = record["global_step"]
        for name, value in record.items():
            if value is None or isinstance(value, int | float):
                columns.setdefault(name, {})[step] = np.nan if value is None else value
    run = {}
    for name, values in columns.items():
        start = min(values)
        steps = values if is_held_out(name) else [step for step in columns["global_step"] if step >= start]
        run[name] = np.array([*steps], float), np.array([values.get(step, np.nan) for step in steps])
    return run


def is_held_out(name: str) -> bool:
    return name.startswith(("test_", "valid_"))


def intervals(run: Curves, name: str) -> dict[float, Interval]:
    """Returns the ends of a metric's 95% interval by step, as logged or from half its width; empty without both."""
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
    """True for metrics that are shares of problems or samples by their definition, and are read in percent."""
    return name.endswith("correct_answer") or "pass@" in name or "maj@" in name


def running_mean(values: Float[np.ndarray, "N"]) -> Float[np.ndarray, "N"]:
    """Returns the mean of the finite ones of each value and the WINDOW - 1 before it; NaN if the value is."""
    windows = np.lib.stride_tricks.sliding_window_view(np.append([np.nan] * (WINDOW - 1), values), WINDOW)
    is_finite = np.isfinite(windows)
    means = np.where(is_finite, windows, 0).sum(axis=1) / np.maximum(is_finite.sum(axis=1), 1)
    return np.where(np.isfinite(values), means, np.nan)
