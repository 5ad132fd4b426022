"""Scores of several checkpoints on several environments: tables, differences, files."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float, Int

from utils.evaluation.estimates import FEW_TASKS, RESAMPLES, paired_difference
from utils.metrics.jsonl import JSON
from utils.settings.errors import counted

TableRow = dict[str, JSON]  # of a table: a checkpoint on an environment, its metrics, and perhaps their "difference"

ENDINGS = ("_ci", "_low", "_high")  # of the names of intervals
FIRST = ("correct_answer", "return")  # of the metrics


@dataclass(frozen=True)
class Result:
    """Scores of one checkpoint on one environment."""

    model_dir: str
    env_name: str
    metrics: dict[str, float]
    ids: Int[np.ndarray, "N"]  # tasks
    by_task: dict[str, Float[np.ndarray, "N"]]  # estimates whose means are the metrics

    def format_metrics(self, temperature: float) -> str:
        """Returns all metrics as lines of text, with their 95% intervals."""
        tasks = f"{counted(self.metrics['num_tasks'], 'task')} x {self.metrics['num_samples']}"
        sampling = f"temperature {temperature:g}" if temperature else "greedy"
        lines = [f"{self.model_dir} on {self.env_name}: {tasks}, {sampling}"]
        for name in dict.fromkeys((*FIRST, *self.metrics)):
            if name in self.metrics and not name.endswith(ENDINGS) and not name.startswith("num_"):
                lines.append(f"{name:>20} {self.metrics[name]:.4f}{format_interval(self.metrics, name, digits=4)}")
        return "\n".join(lines)


def check_writable(scores: str, samples: str) -> None:
    """Opens both files, if they are named, before hours of work; empties the one of samples.

    Raises: OSError when one cannot be written.
    """
    for name, mode in ((scores, "a"), (samples, "w")):
        if name:
            Path(os.path.expanduser(name)).open(mode).close()


def write_results(results: Sequence[Result], seed: int, path: str) -> None:
    """Prints the tables of several results, and writes the JSON file: an object for one result, a list for several."""
    objects = compare_results(results, seed) if len(results) > 1 else results[0].metrics
    if len(results) > 1:
        print(f"\n{format_report(objects)}")
    if path:
        Path(os.path.expanduser(path)).write_text(json.dumps(objects, indent=2) + "\n")


def compare_results(results: Sequence[Result], seed: int) -> list[TableRow]:
    """Returns the results ready for JSON, each but the first of an environment with its "difference" to that one.

    A difference is over the "num_tasks" tasks that both have in common, for every metric of both.
    """
    objects, first_results = [], {}
    for result in results:
        objects.append({"model_dir": result.model_dir, "env_name": result.env_name} | result.metrics)
        base = first_results.setdefault(result.env_name, result)
        if base is not result:
            tasks, base_rows, rows = np.intersect1d(base.ids, result.ids, return_indices=True)
            objects[-1]["difference"] = {"to": base.model_dir, "num_tasks": int(tasks.size)} | {
                name: paired_difference(base.by_task[name][base_rows], values[rows], seed)
                for name, values in result.by_task.items()
                if name in base.by_task and tasks.size
            }
    return objects


def format_report(objects: Sequence[TableRow]) -> str:
    """Returns a table of scores with 95% intervals for each environment, and of differences to the first checkpoint.

    `objects`: from `compare_results`, all checkpoints on all environments. Of metrics for several k, only the one of
    all samples is printed.
    """
    rows_by_env: dict[str, list[TableRow]] = {}
    for row in objects:
        rows_by_env.setdefault(row["env_name"], []).append(row)
    method = f"paired bootstrap over problems, {RESAMPLES:,} resamples, or Student's t for fewer than {FEW_TASKS}"
    tables = []
    for env_name, rows in rows_by_env.items():
        num_samples = rows[0]["num_samples"]
        titles = {"correct_answer": f"mean@{num_samples}" if num_samples > 1 else "correct", "return": "return"}
        compared = [name for name in titles if name in rows[0]]
        titles |= {name: name for name in (f"pass@{num_samples}", f"maj@{num_samples}", f"best_of_{num_samples}")}
        shown = [name for name in (*titles, "length") if any(name in row for row in rows)]
        head = [titles.get(name, name) for name in shown]
        tables.append(align([[env_name, *head], *([row["model_dir"], *scores_of(row, shown)] for row in rows)]))
        if others := [row for row in rows if "difference" in row]:
            cells = [[format_difference(row["difference"].get(name)) for name in compared] for row in others]
            title = f"difference to {rows[0]['model_dir']}, 95% interval, p of 0 or less ({method})"
            lines = [["", *map(titles.get, compared)]]
            lines += [[row["model_dir"], *own] for row, own in zip(others, cells, strict=True)]
            tables.append(f"{title}\n{align(lines)}")
    return "\n\n".join(tables)


def scores_of(metrics: Mapping[str, float], names: Sequence[str]) -> list[str]:
    """Returns metrics with their intervals; "-" for one that is not there."""
    digits = {name: 1 if name == "length" else 3 for name in names}
    return [
        f"{metrics[name]:.{digits[name]}f}{format_interval(metrics, name, digits[name])}" if name in metrics else "-"
        for name in names
    ]


def format_interval(metrics: Mapping[str, float], name: str, digits: int) -> str:
    """Returns the 95% interval of a metric: its ends, half its width if it is symmetric, or nothing."""
    if f"{name}_low" in metrics:
        return f" [{metrics[f'{name}_low']:.{digits}f}, {metrics[f'{name}_high']:.{digits}f}]"
    return f" ± {metrics[f'{name}_ci']:.{digits}f}" if f"{name}_ci" in metrics else ""


def format_difference(difference: Mapping[str, float | None] | None) -> str:
    """Returns a mean difference with its interval and p; "-" if there is none."""
    if difference is None:
        return "-"
    interval = "unknown"
    if difference["low"] is not None:
        interval = f"{difference['low']:+.3f}, {difference['high']:+.3f}"
    return f"{difference['mean']:+.3f} [{interval}] p {difference['p']:.4f}"


def align(rows: Sequence[Sequence[str]]) -> str:
    """Returns rows of cells as lines, each column as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
