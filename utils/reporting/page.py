"""Writes report.html of a run, or of several runs side by side: curves, configuration, rollouts, in one file.

    python utils/reporting/page.py runs/countdown-1 runs/countdown-2 --html compare.html    # open it with any browser
    python utils/reporting/page.py runs/countdown-1 runs/countdown-2 --out compare.png      # the picture of plots.py

The page is template.html with page.js, which draws; here it gets its data, thinned to what a browser opens at
once. Models write hostile text: the data is JSON in which nothing can end its element, the script shows text as text
only, and the page's own policy lets no other script run and nothing be loaded from anywhere.
"""

import argparse
import base64
import hashlib
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import numpy as np

from utils.metrics.jsonl import parse_json, read_lines
from utils.reporting.plots import COLOURS, draw, read, running_mean

POINTS = 1000  # of a curve
ROLLOUT_BYTES = 20_000_000  # of rollouts in one report, as JSON lines
ROLLOUT_STEPS = (10, 1000)  # steps whose rollouts are shown: at least, at most
FOLDER = Path(__file__).resolve().parent


class Panel(NamedTuple):
    """Curves on common axes; those that were never logged stay out."""

    title: str
    note: str  # how to read it
    metrics: dict[str, str]  # name of the metric -> its name here
    unit: str = ""  # "%": shares


PANELS = (
    Panel(
        "Correct answers",
        "Dots are held-out problems with 95% intervals, lines are training: a gain is real when intervals part.",
        {"test_env/correct_answer": "held out", "env/correct_answer": "training"}, "%",
    ),
    Panel(
        "Return",
        "The mean reward is what training raises, so watch it first; where it rises and the correct answers do not, "
        "the model has learnt to please the reward.",
        {"test_env/return": "held out", "env/return": "training"},
    ),
    Panel(
        "Length",
        "Tokens of a completion: growth may be longer thought or padding, which the rollouts below tell apart.",
        {"env/length": "training", "test_env/length": "held out"},
    ),
    Panel(
        "Finished",
        "Share of completions that end by themselves; the others hit the limit of tokens, mostly before an answer.",
        {"env/finished": "training", "test_env/finished": "held out"}, "%",
    ),
    Panel(
        "Entropy",
        "How open the choice of a token is, in nats: near 0 the policy has stopped exploring, a steep rise means "
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
        "Share of tokens whose gradient is clipped away: 0 is right with one update a step, more than a fifth says "
        "that updates are too large.",
        {"clip_fraction": "training"}, "%",
    ),
    Panel(
        "Gradient norm",
        "Before it is cut to --max_grad_norm: single spikes are odd batches, a steady rise asks for a lower --lr.",
        {"grad_norm": "training"},
    ),
    Panel(
        "Loss",
        "On-policy it only tells whether good or bad completions are longer, so near 0 or drifting is as expected: "
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
        "KL between the probabilities that sampling and training give the same tokens: rounding keeps it tiny, so "
        "growth points to a defect.",
        {"inference_recompute/kl": "training"},
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
        "Most that was in use so far, in GB, on the fullest device (on CPU, by the process): a level just below the "
        "limit is fine, a rise without end is a leak.",
        {"memory/peak_gb": "peak"},
    ),
)  # fmt: skip


def write_report(runs: Sequence[str | Path], out_html: str | Path) -> None:
    """Write the report of runs (folders, or their metrics.jsonl); a browser never finds half of one.

    Raises: FileNotFoundError when a run has no metrics.jsonl; without configuration or rollouts their part says so.
    """
    budget = ROLLOUT_BYTES // len(runs)
    parts = [describe_run(label, file, budget) for label, file in labelled(runs).items()]
    page, draft = render(parts), Path(f"{out_html}.new")
    try:
        draft.write_text(page, encoding="utf-8", newline="\n")
        os.replace(draft, out_html)
    except OSError:
        draft.unlink(missing_ok=True)  # what is left of a disk that is full is for metrics and states
        raise


def labelled(runs: Sequence[str | Path]) -> dict[str, Path]:
    """metrics.jsonl of each run by the run's name, or by its path where two runs share a name."""
    files = {str(run): path / "metrics.jsonl" if (path := Path(run)).is_dir() else path for run in runs}
    names = [file.resolve().parent.name for file in files.values()]
    return dict(zip(names, files.values(), strict=True)) if len(set(names)) == len(names) else files


def describe_run(label: str, metrics_jsonl: Path, budget: int) -> dict[str, Any]:
    """What the page knows of a run."""
    logged = read(metrics_jsonl)
    logged.pop("global_step", None)
    config = metrics_jsonl.parent / "config.json"
    return {
        "name": label,
        "metrics": {name: curve(*logged[name], *logged.get(f"{name}_ci", ())) for name in logged},
        "config": read_settings(config),
        "rollouts": read_rollouts(metrics_jsonl.parent / "rollouts", budget),
    }


def read_settings(config_json: Path) -> dict[str, Any] | None:
    """The settings of a run, None where the file is not there or damaged."""
    try:
        settings = parse_json(config_json.read_bytes())
    except (OSError, ValueError):
        return None
    return settings if isinstance(settings, dict) else None


def curve(steps: np.ndarray, values: np.ndarray, bar_steps=(), bars=()) -> dict[str, list[float | None]]:
    """A metric as it is drawn: `x`, `y`, their running `mean`, and half the height of the `bars` if it has such."""
    kept = thin(values, POINTS)
    half = dict(zip(bar_steps, bars, strict=True))
    columns = {"x": steps[kept], "y": values[kept], "mean": running_mean(values)[kept]}
    columns |= {"bars": np.array([half.get(step, np.nan) for step in steps[kept]])} if half else {}
    return {name: [float(f"{x:.5g}") if np.isfinite(x) else None for x in column] for name, column in columns.items()}


def thin(values: np.ndarray, limit: int) -> np.ndarray:
    """Places of at most `limit` (4 or more) values that look like all: the ends, and the extremes of equal parts."""
    if len(values) <= limit:
        return np.arange(len(values))
    kept = {0, len(values) - 1}
    for part in np.array_split(np.arange(len(values)), (limit - 2) // 2):
        finite = part[np.isfinite(values[part])]
        kept |= {finite[values[finite].argmin()], finite[values[finite].argmax()]} if len(finite) else {part[0]}
    return np.array(sorted(kept))


def read_rollouts(folder: Path, budget: int) -> dict[str, Any]:
    """Rollouts of steps evenly spread over the run, about `budget` bytes of them, and how many that leaves out.

    A row has `text`, `return` and what else was scored, `group`, `task`, `length`, `finished`; and, where they were
    written, `prompt`, `advantage` (one, or one for each token) and the lists `tokens` (text), `logprobs` (of the
    sampler), `old_logprobs` (before the update) or `ratios` of the two, and `entropies`.
    """
    names = ((re.fullmatch(r"step_(\d+)", path.stem), path) for path in folder.glob("*.jsonl"))
    found = sorted((int(name[1]), path) for name, path in names if name)
    if not found:
        return {"rows": [], "note": ""}
    mean_size = sum(path.stat().st_size for _, path in found) / len(found)
    count = min(int(np.clip(budget // max(mean_size, 1), *ROLLOUT_STEPS)), len(found))
    rows, num_written = [], 0
    for place in np.linspace(0, len(found) - 1, count).round().astype(int):
        step, path = found[place]
        written = [(len(line), row) for line, row in read_lines(path)]
        rows += [{"step": step} | row for row in whole_groups(written, budget // count)]
        num_written += len(written)
    note = f"{len(rows):,} of {num_written:,} rollouts" if len(rows) < num_written else f"{num_written:,} rollouts"
    return {"rows": rows, "note": f"{note} of {count:,}" + f" of {len(found):,}" * (count < len(found)) + " steps"}


def whole_groups(sized_rows: list[tuple[int, dict]], budget: int) -> list[dict]:
    """Rows within `budget` bytes, group by group: the first, the last, and those with extreme returns come first."""
    total = sum(size for size, _ in sized_rows)
    if total <= budget:
        return [row for _, row in sized_rows]
    groups: dict[Any, list[tuple[int, dict]]] = {}
    for size, row in sized_rows:
        groups.setdefault(row.get("group"), []).append((size, row))
    groups = list(groups.values())
    returns = np.array([np.mean([row.get("return") or 0.0 for _, row in group]) for group in groups])
    rows = []
    for place in thin(returns, max(4, len(groups) * budget // total)):
        for size, row in groups[place]:
            if size <= budget or not rows:
                rows.append(row)
                budget -= size
    return rows


def render(runs: list[dict[str, Any]]) -> str:
    """The page: template, library, data and script, and a policy that names the two scripts by their hashes."""
    from plotly.offline import get_plotlyjs  # only here: nothing else of a run needs it

    panels = [panel._asdict() for panel in PANELS]
    library, script = get_plotlyjs(), (FOLDER / "page.js").read_text(encoding="utf-8")
    parts = {
        "library": library,
        "script": script,
        "hashes": " ".join(f"'sha256-{sha256(text)}'" for text in (library, script)),
        "data": embed({"runs": runs, "panels": panels, "colours": COLOURS}),
    }
    template = (FOLDER / "template.html").read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda place: parts[place[1]], template)  # one pass: no part is searched again


def sha256(text: str) -> str:
    """The hash of a script as a browser's content security policy spells it."""
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def embed(data: Any) -> str:
    """JSON that may stand inside <script> and in UTF-8: nothing in it opens or closes an element, or is half a pair."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return re.sub("[<>&\u2028\u2029\ud800-\udfff]", lambda character: f"\\u{ord(character[0]):04x}", text)


def main(argv: Sequence[str] | None = None) -> None:
    """Write the report, or draw the picture, of the runs named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run folder, or its metrics.jsonl")
    parser.add_argument("--html", help="the report to write")
    parser.add_argument("--out", help="the picture to write; plot.png when neither is named")
    options = parser.parse_args(argv)
    files = labelled(options.runs)
    if missing := [str(file) for file in files.values() if not file.is_file()]:
        parser.error(f"there is no {', '.join(missing)}")
    if options.html:
        write_report(options.runs, options.html)
    if options.out or not options.html:
        options.out = options.out or "plot.png"
        draw({label: read(file) for label, file in files.items()}, options.out)
    print(f"wrote {' and '.join(filter(None, (options.html, options.out)))}")


if __name__ == "__main__":
    main()
