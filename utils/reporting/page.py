"""Writes report.html of a run, or of several runs side by side: curves, configuration, rollouts, in one file.

The page is template.html with curves.js and page.js, which draw; this file adds the data, thinned to what a browser
opens at once. Models write hostile text. So the data is JSON in which nothing can end its element, and the scripts show
text as text only. The page's own policy lets no other script run, and nothing be loaded from anywhere.
"""

import base64
import hashlib
import json
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, Self

import numpy as np
from jaxtyping import Float, Int

from utils.files import read_arrays, replacing, skipping_damage
from utils.metrics.curves import COLORS, Curves, Interval, intervals, read_metrics, running_mean
from utils.metrics.jsonl import JSON, JSONRow, parse_json, read_lines
from utils.reporting.verdict import TaskMeans, TaskScores, judge, judge_seeds
from utils.runs.origin import read_settings
from utils.runs.segments import RunSegment, describe_segment, last_break, since
from utils.settings.errors import UserError, counted

POINTS = 1000  # of a curve
ROLLOUT_BYTES = 1_500_000  # of rollouts in one report, as JSON lines
ROLLOUT_STEPS = (10, 1000)  # steps whose rollouts are shown: at least, at most
PAIRS = 3  # rollouts of the first step that are shown beside those of the last, of each of CHANGES
CHANGES = ("gained", "lost", "solved both times", "solved neither time")
FOLDER = Path(__file__).resolve().parent

Values = Float[np.ndarray, "N"]  # of a metric, by step
Label = str | int | None  # of a group or of a task


class SizedRow(NamedTuple):
    """A rollout as it is written, and what chooses it."""

    line: bytes
    group: Label
    task: Label
    value: float  # its return
    score: float  # its correct answer, or else its return

    @classmethod
    def of(cls, line: bytes, row: JSONRow) -> Self:
        """Returns the row of a line."""
        value = row.get("return") or 0.0
        correct = row.get("correct_answer")
        return cls(line, row.get("group"), row.get("task"), value, value if correct is None else correct)

    def parse(self) -> JSONRow:
        """Returns the rollout."""
        return parse_json(self.line)


class Panel(NamedTuple):
    """Curves on common axes; those that were never logged stay out."""

    title: str
    note: str  # how to read it
    metrics: dict[str, str]  # name of the metric -> its name here
    unit: str = ""  # "%": shares


BIN_WEIGHT = re.compile("bins/(.*)/weight")  # metric of --task_sampling bins
PANELS = (
    Panel(
        "Correct answers",
        "Dots are held-out scores with 95% intervals of each, lines are training: the verdict compares problem by "
        "problem, which shows smaller gains.",
        {"test_env/correct_answer": "held out", "env/correct_answer": "training"}, "%",
    ),
    Panel(
        "Loss of written replies",
        "Nats per token of supervised fine-tuning, or the loss of a pair: if the held-out loss rises while that of "
        "training falls, the replies are learned by heart, and fewer --num_epochs are better.",
        {"test_data/loss": "held out", "data/loss": "training"},
    ),
    Panel(
        "Preferred replies",
        "Share of pairs whose chosen reply has gained more than the rejected one, against the reference model: near "
        "100% on the training pairs alone, they are learned by heart.",
        {"test_data/rewards/accuracies": "held out", "rewards/accuracies": "training"}, "%",
    ),
    Panel(
        "Rewards of pairs",
        "How far both replies have moved from the reference model, times --beta: often both fall, so watch that the "
        "chosen ones do not fall far.",
        {"rewards/chosen": "chosen", "rewards/rejected": "rejected"},
    ),
    Panel(
        "Return",
        "The mean reward is what training raises, so watch it first; if it rises and the correct answers do not, "
        "the model has learned to please the reward.",
        {"test_env/return": "held out", "env/return": "training"},
    ),
    Panel(
        "Length",
        "Tokens of a completion: growth may be longer thought or padding: read the rollouts below.",
        {"test_env/length": "held out", "env/length": "training"},
    ),
    Panel(
        "Finished",
        "Share of completions and episodes that end before the limit of tokens; the others are truncated, mostly "
        "before an answer.",
        {"test_env/finished": "held out", "env/finished": "training"}, "%",
    ),
    Panel(
        "Entropy",
        "How uncertain the next token is, in nats: near 0 the policy has stopped exploring, a steep rise means "
        "that it falls apart.",
        {"entropy": "training"},
    ),
    Panel(
        "KL",
        "How far a step moves the policy from the one that sampled, and from the reference model if there is one: "
        "jumps come before collapse.",
        {"approx_kl": "to the sampling policy", "kl": "to the reference"},
    ),
    Panel(
        "Clip fraction",
        "Share of tokens whose gradient is clipped away: 0 is right with one update a step, more than a fifth means "
        "that updates are too large.",
        {"clip_fraction": "training"}, "%",
    ),
    Panel(
        "Gradient norm",
        "Before clipping to --max_grad_norm: single spikes are odd batches; if the rise is steady, lower --lr.",
        {"grad_norm": "training"},
    ),
    Panel(
        "Loss",
        "On-policy it only shows whether good or bad completions are longer, so near 0 or drifting is as expected: "
        "watch the return.",
        {"loss": "training"},
    ),
    Panel(
        "Groups without signal",
        "Share of groups whose rewards are all equal and teach nothing: near 100% the problems are too hard or too "
        "easy.",
        {"env/groups_without_signal": "training"}, "%",
    ),
    Panel(
        "Sampler against trainer",
        "Mean difference of the log-probabilities that sampling and training give the same tokens, nats: rounding "
        "keeps it tiny, so growth points to a defect.",
        {"inference_recompute/logprob_diff": "training"},
    ),
    Panel(
        "Critic",
        "Share of the returns' variance that the critic explains: 0 is a guess of the mean, 1 is perfect.",
        {"value/explained_variance": "training"},
    ),
    Panel(
        "Speed",
        "Tokens sampled per second: a few long completions at the end of a batch bring it down.",
        {"rollout/tokens_per_second": "sampling"},
    ),
    Panel(
        "Time of a step",
        "Seconds spent in each part of a step: the largest is the one worth making faster.",
        {f"times/{name}": name for name in ("rollout", "score", "logprobs", "update")},
    ),
    Panel(
        "Memory",
        "Most in use since the process began, in GB, on the fullest device (on CPU, by the process), so a resumed run "
        "begins anew: a level just below the limit is fine, a rise without end is a leak.",
        {"memory/peak_gb": "peak"},
    ),
)  # fmt: skip


def write_report(
    runs: Sequence[str | Path], out_html: str | Path, groups: Mapping[str, Sequence[str]] = MappingProxyType({})
) -> None:
    """Writes the report of runs (folders, or their metrics.jsonl), whole or not at all.

    `groups`: names of folders, of runs that differ in the seed only.
    Raises: FileNotFoundError when a run has no metrics.jsonl. Configuration and rollouts may be missing.
    """
    budget = ROLLOUT_BYTES // len(runs)
    files = label_runs(runs)
    seeds = {name: judge_seeds([read_metrics(files[label]) for label in labels]) for name, labels in groups.items()}
    verdicts = [{"name": name} | verdict for name, verdict in seeds.items() if verdict]
    page = render_page([run_data(label, file, budget) for label, file in files.items()], verdicts)
    with replacing(out_html) as file:
        file.write(page.encode())


def label_runs(runs: Sequence[str | Path]) -> dict[str, Path]:
    """Returns metrics.jsonl of each run by the run's name, or by its path if two runs share a name."""
    files = {}
    for run in runs:
        path = Path(run)
        files[str(run)] = path / "metrics.jsonl" if path.is_dir() else path
    names = [file.resolve().parent.name for file in files.values()]
    if len(set(names)) < len(names):
        return files
    return dict(zip(names, files.values(), strict=True))


def run_data(label: str, metrics_jsonl: Path, budget: int) -> dict[str, JSON]:
    """Returns the data of a run for the page: metrics, configuration and about `budget` bytes of rollouts."""
    folder = metrics_jsonl.parent
    logged = read_metrics(metrics_jsonl)
    logged.pop("global_step", None)
    config, origin = {}, {}
    with skipping_damage():
        config, origin = read_settings(folder / "config.json")
    changed, segments = origin.pop("changed", []), origin.pop("segments", [])
    events = read_events(folder / "events.jsonl")
    steps = [event["step"] for event in events]
    scores = held_out_scores(folder / "rollouts")
    return {
        "name": label,
        "verdict": judge_segment(logged, scores, segments),
        "problems": count_changes(scores),
        "events": events,
        "metrics": {name: curve_data(*series, intervals(logged, name)) for name, series in logged.items()},
        "origin": origin | ({"segments": "\n".join(map(describe_segment, segments))} if segments else {}),
        "news": metrics_jsonl.stat().st_mtime,
        "config": config or None,
        "changed": changed,
        "pairs": first_and_last(folder / "rollouts"),
        "rollouts": read_rollouts(folder / "rollouts", budget, steps),
    }


def judge_segment(run: Curves, scores: TaskScores, segments: Sequence[RunSegment]) -> dict[str, JSON]:
    """Returns the verdict on the steps since the last change of what the scores are of: see `judge`."""
    step = last_break(segments)
    verdict = judge(since(run, step), scores)
    if step < 0:
        return verdict
    note = f"Scores up to step {step} are of other data or settings (--resume force)."
    return verdict | {"text": f"{verdict['text']} {note}"}


def read_events(events_jsonl: Path) -> list[dict[str, JSON]]:
    """Returns the warnings of a run: their step, the metric that they are about, and the sentence."""
    lines = []
    if events_jsonl.exists():
        with skipping_damage():
            lines += [line for _, line in read_lines(events_jsonl, key="global_step")]
    return [{"step": line["global_step"], "metric": line.get("metric"), "text": line.get("warning")} for line in lines]


def curve_data(steps: Values, values: Values, ends: Mapping[float, Interval]) -> dict[str, list[float | None]]:
    """Returns a metric as it is drawn: `x`, `y`, its running `mean`, the ends of its intervals, `low` and `high`."""
    chosen = thin(values, POINTS)
    columns = {"x": steps[chosen], "y": values[chosen], "mean": running_mean(values)[chosen]}
    if ends:
        pairs = [ends.get(step, (np.nan, np.nan)) for step in steps[chosen]]
        columns["low"], columns["high"] = np.array(pairs).T
    return {name: [rounded(x) for x in column] for name, column in columns.items()}


def rounded(x: float) -> float | None:
    """Returns a number with five digits; None if it is not finite."""
    return float(f"{x:.5g}") if np.isfinite(x) else None


def thin(values: Values, limit: int) -> Int[np.ndarray, "K"]:
    """Returns the places of at most `limit` (4 or more) values that keep a curve's shape.

    They are the ends, and the extremes of equal sections.
    """
    count = len(values)
    if count <= limit:
        return np.arange(count)
    chosen = {0, count - 1}
    for section in np.array_split(np.arange(count), (limit - 2) // 2):
        finite = section[np.isfinite(values[section])]
        if len(finite):
            chosen.add(finite[values[finite].argmin()])
            chosen.add(finite[values[finite].argmax()])
        else:
            chosen.add(section[0])
    return np.array(sorted(chosen))


def first_and_last(folder: Path) -> dict[str, JSON]:
    """Returns rollouts of the first and of the last step in turn, of the same problems if both have some.

    Those of held-out problems come first: each evaluation has the same ones.
    """
    for prefix in ("held_out", "step"):
        files = rollout_files(folder, prefix)
        if len(files) < 2:
            continue
        first, last = (read_rows(file) for _, file in (files[0], files[-1]))
        pairs = [{"step": files[place][0]} | row for place, row in pair_rows(first, last)]
        if pairs:
            kind = "held-out problems" if prefix == "held_out" else "problems"
            return {"rows": pairs, "note": f"the same {kind} at steps {files[0][0]} and {files[-1][0]}, side by side."}
    return {"rows": [], "note": ""}


def count_changes(scores: Mapping[int, Mapping[str, TaskMeans]]) -> dict[str, JSON]:
    """Returns the first and the last step of `scores`, and how many problems had which two shares solved at them."""
    first, last = min(scores, default=0), max(scores, default=0)
    before, after = (scores.get(step, {}).get("correct_answer", {}) for step in (first, last))
    if first == last or before.keys() != after.keys():
        return {"counts": []}
    counts = Counter((round(before[task], 2), round(after[task], 2)) for task in before)
    rows = [(change_of(*pair), *pair, count) for pair, count in counts.items()]
    rows.sort(key=lambda row: (CHANGES.index(row[0]), -row[1], -row[2]))
    return {"counts": rows, "steps": [first, last]}


def change_of(before: float, after: float) -> str:
    """Returns the one of CHANGES that two scores make."""
    solved = CHANGES[2] if after > 0 else CHANGES[3]
    return solved if before == after else CHANGES[0] if after > before else CHANGES[1]


def held_out_scores(folder: Path) -> dict[int, dict[str, TaskMeans]]:
    """Returns the scores of held-out problems and rows by step; damaged files are left out, with a warning."""
    scores = {}
    for prefix, read in (("held_out", task_means), ("held_out_rows", row_means)):
        for step, file in rollout_files(folder, prefix, "npz"):
            with skipping_damage():
                scores[step] = scores.get(step, {}) | read(file)
    return scores


def task_means(file: Path) -> dict[str, TaskMeans]:
    """Returns the mean of each score over the rollouts of a task: of arrays of rollouts.score_arrays, in a file.

    Rollouts whose score is NaN are left out. Raises: UserError if they are not such arrays.
    """
    arrays = read_arrays(file, ("tasks", "returns"))
    scores = {name.removeprefix("scores/"): x for name, x in arrays.items()}
    tasks = scores.pop("tasks")
    scores["return"] = scores.pop("returns")
    if wrong := [name for name, x in scores.items() if x.shape != tasks.shape]:
        raise UserError(f"{file}: {wrong[0]} has no number for each rollout: copy it again")
    tasks, places = np.unique(tasks, return_inverse=True)
    means = {}
    for name, x in scores.items():
        counts, sums = np.bincount(places, ~np.isnan(x)), np.bincount(places, np.nan_to_num(x))
        means[name] = {int(task): float(s / n) for task, s, n in zip(tasks, sums, counts, strict=True) if n}
    return means


def row_means(file: Path) -> dict[str, TaskMeans]:
    """Returns a value for each held-out row whose mean is the loss of a token, from arrays of metrics.row_losses.

    The values of long and short rows differ like the terms of a ratio of two sums. So differences between steps have
    the spread of that ratio (Cochran 1977, section 6.4).
    """
    names = "losses", "num_tokens"
    arrays = read_arrays(file, names)
    losses, num_tokens = (np.asarray(arrays[name], np.float64) for name in names)
    loss = losses @ num_tokens / num_tokens.sum()
    values = loss + (losses - loss) * num_tokens * len(losses) / num_tokens.sum()
    return {"test_data/loss": dict(enumerate(values.tolist()))}


def read_rows(file: Path) -> list[SizedRow]:
    """Returns the rollouts of a file, in as little memory as their text; none if it cannot be read."""
    rows = []
    with skipping_damage():
        rows += [SizedRow.of(line, row) for line, row in read_lines(file)]
    return rows


def pair_rows(first: Sequence[SizedRow], last: Sequence[SizedRow]) -> list[tuple[int, JSONRow]]:
    """Returns the first rows of the same tasks in turn, of `first` (0) and of `last` (-1): PAIRS of each of CHANGES.

    It adds their change, by the correct answers if these are known; if not, by the return.
    """
    before, after = ({row.task: row for row in reversed(rows)} for rows in (first, last))
    pairs: dict[str, list[tuple[SizedRow, SizedRow]]] = {change: [] for change in CHANGES}
    places = {task: place for place, task in enumerate(before)}
    for task in sorted(before.keys() & after.keys(), key=places.__getitem__, reverse=True):
        pair = before[task], after[task]
        pairs[change_of(*(row.score for row in pair))].append(pair)
    return [
        (place, row.parse() | {"change": change})
        for change, rows in pairs.items()
        for pair in rows[:PAIRS]
        for place, row in zip((0, -1), pair, strict=True)
    ]


def read_rollouts(folder: Path, budget: int, steps: Sequence[int] = ()) -> dict[str, JSON]:
    """Returns rollouts of steps evenly spread over the run and of these `steps`, and a note on those left out.

    A row has `text`, `return` and other rewards, `group`, `task`, `length` and `finished`. If they were written, it has
    `prompt`, `advantage` (one, or one for each token) and these lists: `tokens` (text), `logprobs` (of the sampler),
    `old_logprobs` (before the update) or `ratios` of the two, and `entropies`.
    """
    files = rollout_files(folder, "step")
    if not files:
        return {"rows": [], "note": ""}
    mean_size = sum(file.stat().st_size for _, file in files) / len(files)
    num_steps = int(np.clip(budget // max(mean_size, 1), *ROLLOUT_STEPS))
    num_steps = min(num_steps, len(files))
    spread = np.linspace(0, len(files) - 1, num_steps).round().astype(int)
    places = sorted({*spread.tolist(), *(place for place, (step, _) in enumerate(files) if step in steps)})
    num_steps = len(places)
    rows = []
    num_written = 0
    for place in places:
        step, file = files[place]
        sized_rows = read_rows(file)
        num_written += len(sized_rows)
        rows += [{"step": step} | row for row in whole_groups(sized_rows, budget // num_steps)]
    note = counted(num_written, "rollout")
    if len(rows) < num_written:
        note = f"{len(rows):,} of {note}"
    some = f"{num_steps:,} of " if num_steps < len(files) else ""
    return {"rows": rows, "note": f"{note} of {some}{counted(len(files), 'step')}"}


def rollout_files(folder: Path, prefix: str, suffix: str = "jsonl") -> list[tuple[int, Path]]:
    """Returns the files of a folder that are named by this prefix and a step, with their steps, in order."""
    files = []
    for path in folder.glob(f"*.{suffix}"):
        match = re.fullmatch(rf"{prefix}_(\d+)", path.stem)
        if match:
            files.append((int(match[1]), path))
    return sorted(files)


def whole_groups(sized_rows: Sequence[SizedRow], budget: int) -> list[JSONRow]:
    """Returns rows within `budget` bytes, group by group: the first, the last, and those with extreme returns first."""
    total = sum(len(row.line) for row in sized_rows)
    if total <= budget:
        return [row.parse() for row in sized_rows]
    by_number: dict[Label, list[SizedRow]] = {}
    for row in sized_rows:
        by_number.setdefault(row.group, []).append(row)
    groups = list(by_number.values())
    returns = [np.mean([row.value for row in group]) for group in groups]
    num_groups = max(4, len(groups) * budget // total)
    rows = []
    for place in thin(np.array(returns), num_groups):
        for row in groups[place]:
            if len(row.line) <= budget or not rows:
                rows.append(row.parse())
                budget -= len(row.line)
    return rows


def render_page(runs: Sequence[Mapping[str, JSON]], groups: Sequence[Mapping[str, JSON]]) -> str:
    """Returns the page: template, data and scripts, and a policy that names the two scripts by their hashes.

    `groups`: verdicts on runs together, each with a name.
    """
    panels = [panel._asdict() for panel in (*PANELS, bin_panel(runs))]
    curves, script = ((FOLDER / name).read_text(encoding="utf-8") for name in ("curves.js", "page.js"))
    digests = [hashlib.sha256(text.encode()).digest() for text in (curves, script)]
    hashes = [f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests]
    sections = {
        "curves": curves,
        "script": script,
        "hashes": " ".join(hashes),
        "data": embed_json(
            {"runs": runs, "groups": groups, "panels": panels, "colors": COLORS, "drawn": time.time()}
        ),
    }
    template = (FOLDER / "template.html").read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda match: sections[match[1]], template)  # inserted text is not searched


def bin_panel(runs: Sequence[Mapping[str, JSON]]) -> Panel:
    """Returns the panel of the bins' weights, by the metrics of the runs."""
    found = filter(None, (BIN_WEIGHT.fullmatch(name) for run in runs for name in run["metrics"]))
    names = {match[0]: match[1] for match in found}
    note = "Share of the groups that each bin of problems is likely to get: bins without signal keep a small share."
    return Panel("Problems by bins", note, names, "%")


def embed_json(data: JSON) -> str:
    """Returns JSON that is safe inside <script>, in UTF-8: no character that opens an element, no lone surrogate."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return re.sub("[<>&\u2028\u2029\ud800-\udfff]", lambda character: f"\\u{ord(character[0]):04x}", text)
