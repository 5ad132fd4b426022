"""Scores of several checkpoints on several environments: where the checkpoints are, tables, differences, files."""

import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from utils.evaluation.estimates import FEW_TASKS, RESAMPLES, paired_bootstrap
from utils.metrics.logger import writable
from utils.settings.errors import UserError

ENDINGS = ("_ci", "_low", "_high")  # of the names of intervals
WIDTH = 120  # characters; environments that do not fit next to each other stand below


@dataclass(frozen=True)
class Result:
    """What one checkpoint reached on one environment."""

    model_dir: str
    env_name: str
    metrics: dict[str, float]
    ids: Int[np.ndarray, "N"]  # tasks
    by_task: dict[str, Float[np.ndarray, "N"]]  # estimates whose means are the metrics

    def describe(self, temperature: float) -> str:
        """All metrics, with their 95% intervals."""
        metrics, how = self.metrics, f"temperature {temperature:g}" if temperature else "greedy"
        lines = [f"{self.model_dir} on {self.env_name}: {metrics['num_tasks']} tasks x {metrics['num_samples']}, {how}"]
        for name in (name for name in metrics if not name.endswith(ENDINGS) and not name.startswith("num_")):
            lines.append(f"{name:>20} {metrics[name]:.4f}{interval(metrics, name, digits=4)}")
        return "\n".join(lines)


# before: what to play, and where to write it


def find_checkpoints(name: str, find_folder: Callable[[str], Path]) -> list[tuple[str, Path]]:
    """The checkpoints under a name, and what to call each: one model, or step20/, step40/, ... of a run folder.

    Raises: UserError for a run folder without any, and whatever `find_folder` raises.
    """
    name = name.strip().rstrip("/")
    folder = find_folder(name)
    steps = {int(path.name[4:]): path for path in folder.iterdir() if re.fullmatch(r"step\d+", path.name)}
    if any(folder.glob("*.safetensors")):
        return [(name, folder)]
    if steps:
        return [(f"{name}/{steps[step].name}", steps[step]) for step in sorted(steps)]
    if (folder / "metrics.jsonl").is_file() or (folder / "state").is_dir():
        raise UserError(f"{name} is a run folder without checkpoints: there is no step20/ or the like in it")
    return [(name, folder)]  # which the loader will say what it lacks of


def open_files(scores: str, samples: str) -> None:
    """Makes sure that both files, where they are named, can be written, and empties that of samples.

    Raises: OSError when not: now, not after hours.
    """
    for path, mode in ((scores, "a"), (samples, "w")):
        if path:
            Path(path).expanduser().open(mode).close()


# after: files and tables


def write_samples(path: str, result: Result, player: Any, episodes: Any) -> None:
    """Appends one JSON object for each problem: its number, the prompt as the model saw it, reference, completions."""
    rollouts, scores = episodes.rollouts, episodes.scores
    per_task = len(episodes.ids) // len(result.ids)
    with Path(path).expanduser().open("a") as file:
        for start, task in zip(range(0, len(episodes.ids), per_task), result.ids.tolist(), strict=True):
            prompt = player.tokenizer.hf.decode(rollouts.tokens[start, : rollouts.prompt_lengths[start]].tolist())
            record = {"model_dir": result.model_dir, "env_name": result.env_name, "task": task, "prompt": prompt}
            record["reference"] = as_json(player.env.problem(task).answer)
            record["completions"] = [
                {
                    "text": episodes.texts[i],
                    "answer": player.env.answer(episodes.texts[i]),
                    "return": round(float(scores["return"][i]), 6),
                    "correct": bool(scores["correct_answer"][i] > 0),
                    "length": int(rollouts.lengths[i] - rollouts.prompt_lengths[i]),
                    "finished": bool(rollouts.finished[i]),
                }
                for i in range(start, start + per_task)
            ]
            file.write(json.dumps(record) + "\n")


def as_json(value: Any) -> Any:
    """A value as it is where JSON can hold it, else its text."""
    try:
        json.dumps(value, allow_nan=False)
        return value
    except (TypeError, ValueError):
        return str(value)


def finish(results: Sequence[Result], seed: int, path: str) -> None:
    """Prints the tables of several results, and writes the JSON file: one object for one result, else a list."""
    objects = compare(results, seed) if len(results) > 1 else results[0].metrics
    if len(results) > 1:
        print(writable("\n" + report(objects), sys.stdout))
    if path:
        Path(path).expanduser().write_text(json.dumps(objects, indent=2) + "\n")


def compare(results: Sequence[Result], seed: int) -> list[dict[str, Any]]:
    """The results ready for JSON, each but the first of an environment with its "difference" to that one.

    A difference is that of the "num_tasks" tasks which both have played, for every metric of both.
    """
    objects, first = [], {}
    for result in results:
        row = {"model_dir": result.model_dir, "env_name": result.env_name} | result.metrics
        base = first.setdefault(result.env_name, result)
        if base is not result:
            tasks, i, j = np.intersect1d(base.ids, result.ids, return_indices=True)
            names = [name for name in result.by_task if name in base.by_task] if tasks.size else []
            pairs = {name: (base.by_task[name][i], result.by_task[name][j]) for name in names}
            differences = {name: paired_bootstrap(*pair, seed) for name, pair in pairs.items()}
            row["difference"] = {"to": base.model_dir, "num_tasks": int(tasks.size)} | differences
        objects.append(row)
    return objects


def report(objects: Sequence[dict[str, Any]]) -> str:
    """Two tables, a row for each checkpoint: scores with 95% intervals, and differences to the first checkpoint.

    `objects`: as `compare` makes them, all checkpoints on all environments. Of metrics for several k, those of all
    samples are shown.
    """
    names = [row["model_dir"] for row in objects if row["env_name"] == objects[0]["env_name"]]
    scores, differences = {}, {}
    for env_name in dict.fromkeys(row["env_name"] for row in objects):
        rows = [row for row in objects if row["env_name"] == env_name]
        n = rows[0]["num_samples"]
        main = {"return": "return", "correct_answer": f"mean@{n}" if n > 1 else "correct"}
        others = {name: name for name in (f"pass@{n}", f"maj@{n}", f"best_of_{n}", "length")}
        shown = {name: title for name, title in (main | others).items() if any(name in row for row in rows)}
        scores[env_name] = {title: [score(row, name) for row in rows] for name, title in shown.items()}
        found = [row["difference"] for row in rows if "difference" in row]
        differences[env_name] = {title: [difference(row.get(name)) for row in found] for name, title in main.items()}
    if len(names) == 1:
        return table(names, scores)
    how = f"paired bootstrap over problems, {RESAMPLES:,} resamples: 95% interval, p of 0 or less"
    few = {row["env_name"] for row in objects if row.get("difference", {}).get("num_tasks", FEW_TASKS) < FEW_TASKS}
    note = f"\n{', '.join(sorted(few))}: fewer than {FEW_TASKS} problems, so intervals are too narrow" if few else ""
    return f"{table(names, scores)}\n\ndifference to {names[0]} ({how})\n{table(names[1:], differences)}{note}"


def score(metrics: Mapping[str, float], name: str) -> str:
    if name == "length":
        return f"{metrics[name]:.1f}"
    return f"{metrics[name]:.3f}{interval(metrics, name, digits=3)}" if name in metrics else "-"


def interval(metrics: Mapping[str, float], name: str, digits: int) -> str:
    """The 95% interval of a metric behind its value: its ends, half its width where it is symmetric, or nothing."""
    if name + "_low" in metrics:
        return f" [{metrics[name + '_low']:.{digits}f}, {metrics[name + '_high']:.{digits}f}]"
    return f" ± {metrics[name + '_ci']:.{digits}f}" if name + "_ci" in metrics else ""


def difference(found: Mapping[str, float | None] | None) -> str:
    if found is None:
        return "-"
    ends = "unknown" if found["low"] is None else "{low:+.3f}, {high:+.3f}".format(**found)
    return f"{found['mean']:+.3f} [{ends}] p {found['p']:.4f}"


def table(names: Sequence[str], groups: Mapping[str, Mapping[str, Sequence[str]]]) -> str:
    """Aligned text: a row for each name, and for each group its columns, next to each other as far as WIDTH allows.

    What the folders of all names have in common stands in the corner.
    """
    corner = "".join(os.path.commonprefix(list(names)).rpartition("/")[:2]) if len(names) > 1 else ""
    left = aligned(["", corner, *(name[len(corner) :] for name in names)])
    lines, block = [], []
    for group, columns in groups.items():
        parts = [aligned([title, *cells]) for title, cells in columns.items()]
        right = aligned([group, *map("  ".join, zip(*parts, strict=True))])
        if block and len(block[0]) + 2 + len(right[0]) > WIDTH:
            lines, block = [*lines, *block, ""], []
        block = [f"{a}  {b}" for a, b in zip(block or left, right, strict=True)]
    return "\n".join(line.rstrip() for line in [*lines, *block])


def aligned(cells: Sequence[str]) -> list[str]:
    """The cells of a column, all as wide as the widest."""
    width = max(map(len, cells))
    return [cell.ljust(width) for cell in cells]
