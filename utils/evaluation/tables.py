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
Cells = Mapping[str, Sequence[str]]  # cells by title

ENDINGS = ("_ci", "_low", "_high")  # of the names of intervals
WIDTH = 100  # characters; columns that do not fit next to each other stand below
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
        num_tasks = self.metrics["num_tasks"]
        num_samples = self.metrics["num_samples"]
        sampling = f"temperature {temperature:g}" if temperature else "greedy"
        lines = [f"{self.model_dir} on {self.env_name}: {counted(num_tasks, 'task')} x {num_samples}, {sampling}"]
        for name in dict.fromkeys((*FIRST, *self.metrics)):
            if name not in self.metrics or name.endswith(ENDINGS) or name.startswith("num_"):
                continue
            interval = format_interval(self.metrics, name, digits=4)
            lines.append(f"{name:>20} {self.metrics[name]:.4f}{interval}")
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
    if len(results) > 1:
        objects = compare_results(results, seed)
        report = format_report(objects)
        print("\n" + report)
    else:
        objects = results[0].metrics
    if path:
        text = json.dumps(objects, indent=2) + "\n"
        Path(os.path.expanduser(path)).write_text(text)


def compare_results(results: Sequence[Result], seed: int) -> list[TableRow]:
    """Returns the results ready for JSON, each but the first of an environment with its "difference" to that one.

    A difference is over the "num_tasks" tasks that both have in common, for every metric of both.
    """
    rows = []
    first_results: dict[str, Result] = {}
    for result in results:
        row = {"model_dir": result.model_dir, "env_name": result.env_name} | result.metrics
        base = first_results.setdefault(result.env_name, result)
        if base is not result:
            row["difference"] = compare_pair(base, result, seed)
        rows.append(row)
    return rows


def compare_pair(base: Result, result: Result, seed: int) -> dict[str, JSON]:
    """Returns the differences of a result to `base`, by metric, on the tasks of both."""
    tasks, base_rows, rows = np.intersect1d(base.ids, result.ids, return_indices=True)
    differences = {"to": base.model_dir, "num_tasks": int(tasks.size)}
    if not tasks.size:
        return differences
    for name, values in result.by_task.items():
        if name in base.by_task:
            base_values = base.by_task[name][base_rows]
            differences[name] = paired_difference(base_values, values[rows], seed)
    return differences


def format_report(objects: Sequence[TableRow]) -> str:
    """Returns two tables, a row for each checkpoint: scores with 95% intervals, differences to the first checkpoint.

    `objects`: from `compare_results`, all checkpoints on all environments. Of metrics for several k, only the one of
    all samples is printed.
    """
    rows_by_env: dict[str, list[TableRow]] = {}
    for row in objects:
        rows_by_env.setdefault(row["env_name"], []).append(row)
    names = [row["model_dir"] for row in rows_by_env[objects[0]["env_name"]]]
    scores = {env_name: score_columns(rows) for env_name, rows in rows_by_env.items()}
    score_table = format_table(names, scores)
    if len(names) == 1:
        return score_table
    differences = {env_name: difference_columns(rows) for env_name, rows in rows_by_env.items()}
    difference_table = format_table(names[1:], differences)
    method = f"paired bootstrap over problems, {RESAMPLES:,} resamples, or Student's t for fewer than {FEW_TASKS}"
    title = f"difference to {names[0]}, 95% interval, p of 0 or less ({method})"
    return f"{score_table}\n\n{title}\n{difference_table}"


def main_columns(rows: Sequence[TableRow]) -> dict[str, str]:
    """Returns the titles of the two main metrics, return and correctness."""
    num_samples = rows[0]["num_samples"]
    correct = f"mean@{num_samples}" if num_samples > 1 else "correct"
    return {"correct_answer": correct, "return": "return"}


def score_columns(rows: Sequence[TableRow]) -> dict[str, list[str]]:
    """Returns the cells of the metrics that one of these rows has, by title."""
    num_samples = rows[0]["num_samples"]
    titles = main_columns(rows)
    for name in (f"pass@{num_samples}", f"maj@{num_samples}", f"best_of_{num_samples}", "length"):
        titles[name] = name
    logged = {name: title for name, title in titles.items() if any(name in row for row in rows)}
    return {title: [format_score(row, name) for row in rows] for name, title in logged.items()}


def difference_columns(rows: Sequence[TableRow]) -> dict[str, list[str]]:
    """Returns the cells of the differences in the main metrics, by title."""
    differences = [row["difference"] for row in rows if "difference" in row]
    titles = main_columns(rows)
    return {title: [format_difference(x.get(name)) for x in differences] for name, title in titles.items()}


def format_score(metrics: Mapping[str, float], name: str) -> str:
    """Returns a metric and its interval; "-" if it is not there."""
    if name == "length":
        return f"{metrics[name]:.1f}"
    if name not in metrics:
        return "-"
    interval = format_interval(metrics, name, digits=3)
    return f"{metrics[name]:.3f}{interval}"


def format_interval(metrics: Mapping[str, float], name: str, digits: int) -> str:
    """Returns the 95% interval of a metric: its ends, half its width if it is symmetric, or nothing."""
    if f"{name}_low" in metrics:
        low = metrics[f"{name}_low"]
        high = metrics[f"{name}_high"]
        return f" [{low:.{digits}f}, {high:.{digits}f}]"
    if f"{name}_ci" in metrics:
        half_width = metrics[f"{name}_ci"]
        return f" ± {half_width:.{digits}f}"
    return ""


def format_difference(difference: Mapping[str, float | None] | None) -> str:
    """Returns a mean difference with its interval and p; "-" if there is none."""
    if difference is None:
        return "-"
    interval = "unknown"
    if difference["low"] is not None:
        interval = f"{difference['low']:+.3f}, {difference['high']:+.3f}"
    return f"{difference['mean']:+.3f} [{interval}] p {difference['p']:.4f}"


def format_table(names: Sequence[str], groups: Mapping[str, Cells]) -> str:
    """Returns aligned text: a row for each name, and the columns of each group, side by side as far as WIDTH allows.

    The folders that all names share are the corner.
    """
    shared = os.path.commonprefix(list(names)) if len(names) > 1 else ""
    corner = shared[: shared.rfind("/") + 1]
    shortened = [name.removeprefix(corner) for name in names]
    left = align_cells(["", corner, *shortened])
    lines = []
    block = left
    for group, columns in groups.items():
        for aligned in fold([align_cells([title, *cells]) for title, cells in columns.items()], WIDTH - len(left[0])):
            right = align_cells([group, *map("  ".join, zip(*aligned, strict=True))])
            is_too_wide = len(block[0]) + 2 + len(right[0]) > WIDTH
            if is_too_wide and block is not left:
                lines += [*block, ""]
                block = left
            block = [f"{cell}  {addition}" for cell, addition in zip(block, right, strict=True)]
    lines += block
    return "\n".join(line.rstrip() for line in lines)


def fold(columns: Sequence[Sequence[str]], room: int) -> list[list[Sequence[str]]]:
    """Returns columns in parts that fit into `room` characters, with two blanks before each; one at least in a part."""
    parts, used = [], room
    for column in columns:
        used += 2 + len(column[0])
        if used > room:
            parts.append([])
            used = 2 + len(column[0])
        parts[-1].append(column)
    return parts


def align_cells(cells: Sequence[str]) -> list[str]:
    """Returns the cells of a column, all as wide as the widest."""
    width = max(map(len, cells))
    return [cell.ljust(width) for cell in cells]
