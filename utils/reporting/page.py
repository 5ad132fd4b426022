"""Writes report.html of a run, or of several runs side by side: curves, configuration, rollouts, in one file.

The page is template.html with curves.js and page.js, which draw; this file adds the data, thinned to what a browser
opens at once. Replies may be adversarial, so data is JSON in which nothing can end its element, and the scripts show
text as text only. The page's own policy lets no other script run, and nothing be loaded from anywhere.
"""

import base64
import hashlib
import json
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from utils.files import read_arrays, replacing, skipping_damage
from utils.metrics.curves import COLORS, Curves, Interval, intervals, read_metrics, running_mean
from utils.metrics.jsonl import JSON, JSONRow, read_lines
from utils.reporting.verdict import TaskMeans, TaskScores, judge
from utils.runs.origin import RunSegment, describe_segment, last_break, read_settings, since
from utils.settings.errors import UserError, counted

POINTS = 1000  # of a curve
ROLLOUT_BYTES = 1_500_000  # of rollouts in one report, as JSON lines
ROLLOUT_STEPS = (10, 1000)  # steps whose rollouts are shown: at least, at most
PAIRS = 3  # rollouts of the first step that are shown beside those of the last, of each of CHANGES
CHANGES = ("gained", "lost", "solved as often", "never solved")
FOLDER = Path(__file__).resolve().parent

Values = Float[np.ndarray, "N"]  # of a metric, by step


class Panel(NamedTuple):
    """Curves on common axes; those that were never logged stay out."""

    title: str
    note: str  # how to read it
    metrics: dict[str, str]  # name of the metric -> its name here
    unit: str = ""  # "%": shares


BIN_WEIGHT = re.compile("bins/(.*)/weight")  # metric of --task_sampling bins
BINS = Panel("Problems by bins", "Share of the groups that each bin of problems is likely to get.", {}, "%")
PANELS = (
    Panel("Correct answers", "Dots are held-out scores with 95% intervals of each, lines are training: the verdict "
          "compares problem by problem, which shows smaller gains.",
          {"test_env/correct_answer": "held out", "env/correct_answer": "training"}, "%"),
    Panel("Loss of demonstrations", "Nats per token, or the loss of a pair: if it rises on held-out rows and falls in "
          "training, the replies are memorized: fewer --num_epochs are better.",
          {"test_data/loss": "held out", "data/loss": "training"}),
    Panel("Preferred replies", "Share of pairs whose chosen reply has gained more than the rejected one: near 100% on "
          "training pairs alone, they are learned by heart.",
          {"test_data/rewards/accuracies": "held out", "rewards/accuracies": "training"}, "%"),
    Panel("Rewards of pairs", "How far replies have moved from the reference model, times --beta: often both fall.",
          {"rewards/chosen": "chosen", "rewards/rejected": "rejected"}),
    Panel("Return", "The mean reward is what training raises; if it rises and the correct answers do not, the model "
          "has learned to please the reward.", {"test_env/return": "held out", "env/return": "training"}),
    Panel("Length", "Tokens of a completion: growth may be longer thought or padding: read the rollouts below.",
          {"test_env/length": "held out", "env/length": "training"}),
    Panel("Finished", "Share of completions and episodes that end before the limit of tokens.",
          {"test_env/finished": "held out", "env/finished": "training"}, "%"),
    Panel("Entropy", "How uncertain the next token is, in nats: near 0 the policy has stopped exploring, a steep rise "
          "means that it falls apart.", {"entropy": "training"}),
    Panel("KL", "How far a step moves the policy from the one that sampled, and from the reference model if there is "
          "one: jumps come before collapse.", {"approx_kl": "to the sampling policy", "kl": "to the reference"}),
    Panel("Clip fraction", "Share of tokens whose gradient is clipped away: 0 is right with one update a step, more "
          "than a fifth means that updates are too large.", {"clip_fraction": "training"}, "%"),
    Panel("Gradient norm", "Before clipping to --max_grad_norm: single spikes are odd batches; if the rise is steady, "
          "lower --lr.", {"grad_norm": "training"}),
    Panel("Loss", "On-policy it only shows whether good or bad completions are longer: watch the return.",
          {"loss": "training"}),
    Panel("Groups without signal", "Share of groups whose rewards are all equal and teach nothing: near 100% the "
          "problems are too hard or too easy.", {"env/groups_without_signal": "training"}, "%"),
    Panel("Sampler against trainer", "Mean difference of the log-probabilities that both give the same tokens, nats: "
          "growth points to a defect.", {"inference_recompute/logprob_diff": "training"}),
    Panel("Critic", "Share of the returns' variance that the critic explains: 0 is a guess of the mean, 1 is perfect.",
          {"value/explained_variance": "training"}),
    Panel("Speed", "Tokens sampled per second: a few long completions at the end of a batch bring it down.",
          {"rollout/tokens_per_second": "sampling"}),
    Panel("Time of a step", "Seconds spent in each part of a step: the largest is the one worth making faster.",
          {f"times/{name}": name for name in ("rollout", "score", "logprobs", "update")}),
    Panel("Memory", "Most in use since the process began, in GB, on the fullest device (on CPU, by the process): a "
          "rise without end is a leak.", {"memory/peak_gb": "peak"}),
)  # fmt: skip


def write_report(runs: Sequence[str | Path], out_html: str | Path) -> None:
    """Writes the report of runs (folders, or their metrics.jsonl), whole or not at all.

    Raises: FileNotFoundError when a run has no metrics.jsonl. Configuration and rollouts may be missing.
    """
    data = [run_data(label, file, ROLLOUT_BYTES // len(runs)) for label, file in label_runs(runs).items()]
    with replacing(out_html) as file:
        file.write(render_page(data).encode())


def label_runs(runs: Sequence[str | Path]) -> dict[str, Path]:
    """Returns metrics.jsonl of each run by the run's name, or by its path if two runs share a name."""
    files = {str(run): Path(run) / "metrics.jsonl" if Path(run).is_dir() else Path(run) for run in runs}
    names = [file.resolve().parent.name for file in files.values()]
    return files if len(set(names)) < len(names) else dict(zip(names, files.values(), strict=True))


def run_data(label: str, metrics_jsonl: Path, budget: int) -> dict[str, JSON]:
    """Returns the data of a run for the page: metrics, configuration and about `budget` bytes of rollouts."""
    folder, rollouts = metrics_jsonl.parent, metrics_jsonl.parent / "rollouts"
    logged = read_metrics(metrics_jsonl)
    logged.pop("global_step", None)
    config, origin = {}, {}
    with skipping_damage():
        config, origin = read_settings(folder / "config.json")
    changed, segments = origin.pop("changed", []), origin.pop("segments", [])
    lines = [*read_lines(folder / "events.jsonl", key="global_step")] if (folder / "events.jsonl").exists() else []
    events = [{"step": x["global_step"], "metric": x.get("metric"), "text": x.get("warning")} for _, x in lines]
    scores = held_out_scores(rollouts)
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
        "pairs": first_and_last(rollouts),
        "rollouts": read_rollouts(rollouts, budget, [event["step"] for event in events]),
    }


def judge_segment(run: Curves, scores: TaskScores, segments: Sequence[RunSegment]) -> dict[str, JSON]:
    """Returns the verdict on the steps since the last change of what the scores are of: see `judge`."""
    step = last_break(segments)
    verdict = judge(since(run, step), scores)
    note = f" Scores up to step {step} are of other data or settings (--resume force)." * (step >= 0)
    return verdict | {"text": verdict["text"] + note}


def curve_data(steps: Values, values: Values, ends: Mapping[float, Interval]) -> dict[str, list[float | None]]:
    """Returns a metric as it is drawn: `x`, `y`, its running `mean`, the ends of its intervals, `low` and `high`."""
    chosen = thin(values, POINTS)
    columns = {"x": steps[chosen], "y": values[chosen], "mean": running_mean(values)[chosen]}
    if ends:
        columns["low"], columns["high"] = np.array([ends.get(step, (np.nan, np.nan)) for step in steps[chosen]]).T
    return {name: [float(f"{x:.5g}") if np.isfinite(x) else None for x in column] for name, column in columns.items()}


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
        chosen |= {finite[values[finite].argmin()], finite[values[finite].argmax()]} if len(finite) else {section[0]}
    return np.array(sorted(chosen))


def first_and_last(folder: Path) -> dict[str, JSON]:
    """Returns rollouts of the first and of the last step in turn, of the same problems if both have some.

    Those of held-out problems come first: each evaluation has the same ones.
    """
    for prefix, kind in (("held_out", "held-out problems"), ("step", "problems")):
        files = rollout_files(folder, prefix)
        if len(files) < 2:
            continue
        (first_step, first), (last_step, last) = files[0], files[-1]
        if pairs := pair_rows({first_step: read_rows(first), last_step: read_rows(last)}):
            return {"rows": pairs, "note": f"the same {kind} at steps {first_step} and {last_step}, side by side."}
    return {"rows": [], "note": ""}


def pair_rows(rows: Mapping[int, Sequence[JSONRow]]) -> list[JSONRow]:
    """Returns the first rows of the same tasks in turn, of the first and of the last step: PAIRS of each of CHANGES.

    It adds their step and change, by the correct answers if these are known; if not, by the return.
    """
    first, last = ({row.get("task"): row for row in reversed(each)} for each in rows.values())
    pairs: dict[str, list[JSONRow]] = {change: [] for change in CHANGES}
    for task in [task for task in reversed(first) if task in last]:
        both = first[task], last[task]
        score = "correct_answer" if all(row.get("correct_answer") is not None for row in both) else "return"
        change = change_of(*(row.get(score) or 0.0 for row in both))
        pairs[change] += [{"step": step, **row, "change": change} for step, row in zip(rows, both, strict=True)]
    return [row for each in pairs.values() for row in each[: 2 * PAIRS]]


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


def read_rows(file: Path) -> list[JSONRow]:
    """Returns the rollouts of a file; damaged lines are left out."""
    return [row for _, row in read_lines(file)]


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
    num_steps = min(int(np.clip(budget // max(mean_size, 1), *ROLLOUT_STEPS)), len(files))
    spread = np.linspace(0, len(files) - 1, num_steps).round().astype(int)
    places = sorted({*spread.tolist(), *(place for place, (step, _) in enumerate(files) if step in steps)})
    rows = []
    for step, file in (files[place] for place in places):
        share = budget / len(places) / max(file.stat().st_size, 1)
        rows += [{"step": step} | row for row in whole_groups(read_rows(file), share)]
    some = f"{len(places):,} of " if len(places) < len(files) else ""
    return {"rows": rows, "note": f"{counted(len(rows), 'rollout')} from {some}{counted(len(files), 'step')}"}


def rollout_files(folder: Path, prefix: str, suffix: str = "jsonl") -> list[tuple[int, Path]]:
    """Returns the files of a folder that are named by this prefix and a step, with their steps, in order."""
    matches = [(re.fullmatch(rf"{prefix}_(\d+)", path.stem), path) for path in folder.glob(f"*.{suffix}")]
    return sorted((int(match[1]), path) for match, path in matches if match)


def whole_groups(rows: Sequence[JSONRow], share: float) -> list[JSONRow]:
    """Returns about this share of the rows, by groups: the first, the last, and those with extreme returns."""
    groups = [list(group) for _, group in groupby(rows, lambda row: row.get("group"))]
    returns = np.array([np.mean([row.get("return") or 0.0 for row in group]) for group in groups])
    return [row for place in thin(returns, max(4, int(len(groups) * share))) for row in groups[place]]


def render_page(runs: Sequence[Mapping[str, JSON]]) -> str:
    """Returns the page: template, data and scripts, and a policy that names the two scripts by their hashes."""
    bins = filter(None, (BIN_WEIGHT.fullmatch(name) for run in runs for name in run["metrics"]))
    panels = [panel._asdict() for panel in (*PANELS, BINS._replace(metrics={match[0]: match[1] for match in bins}))]
    template, curves, script = (
        (FOLDER / name).read_text(encoding="utf-8") for name in ("template.html", "curves.js", "page.js")
    )
    digests = [hashlib.sha256(text.encode()).digest() for text in (curves, script)]
    data = {"runs": runs, "panels": panels, "colors": COLORS, "drawn": time.time()}
    sections = {
        "curves": curves,
        "script": script,
        "hashes": " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests),
        "data": embed_json(data),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: sections[match[1]], template)  # inserted text is not searched


def embed_json(data: JSON) -> str:
    """Returns JSON that is safe inside <script>, in UTF-8: no character that opens an element, no lone surrogate."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return re.sub("[<>&\u2028\u2029\ud800-\udfff]", lambda character: f"\\u{ord(character[0]):04x}", text)
