"""The metrics of a run as curves: values by step, intervals of held-out scores, running means, numbers as text."""

from array import array
from pathlib import Path

import numpy as np
from jaxtyping import Float

from utils.metrics.jsonl import read_lines
from utils.settings.errors import UserError

MAIN = (  # (held out, training)
    ("test_env/correct_answer", "env/correct_answer"),
    ("test_env/return", "env/return"),
)
LOSS = ("test_data/loss", "data/loss")  # the same of written replies: lower is better
Series = tuple[Float[np.ndarray, "N"], Float[np.ndarray, "N"]]  # steps, values
Column = tuple["array[float]", "array[float]"]  # the same as they are read
Curves = dict[str, Series]  # of a run, by the name of the metric
Interval = tuple[float, float]  # its ends
COLORS = ("#2563eb", "#ea580c", "#059669", "#9333ea", "#dc2626", "#0891b2", "#ca8a04", "#64748b")  # of runs
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
    end = np.arange(len(values)) + 1
    start = np.maximum(end - WINDOW, 0)
    is_finite = np.isfinite(values)
    finite_values = np.where(is_finite, values, 0)
    sums = np.append(0, np.cumsum(finite_values))
    counts = np.append(0, np.cumsum(is_finite))
    window_sums = sums[end] - sums[start]
    window_counts = counts[end] - counts[start]
    return np.where(is_finite, window_sums / np.maximum(window_counts, 1), np.nan)
