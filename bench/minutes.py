"""Minutes of runs to a held-out score, as rows of a table.

python bench/minutes.py runs/demo-1 --score 0.6
"""

import argparse
import math
import re
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from utils.metrics.curves import Curves, by_steps, format_point, read_metrics
from utils.runs.origin import read_settings

METRIC = "test_env/correct_answer"
HEAD = """\
| commit | machine | minutes to {score:g} | at step | of the whole run | last score |
|---|---|---|---|---|---|"""


def board_row(run: Curves, origin: dict[str, str | float], score: float) -> str:
    """Returns the row of a run: the first evaluation with at least this score, and the last one."""
    seconds = by_steps(run, "times/run")
    steps = [step for step, value in by_steps(run, METRIC).items() if value >= score and step in seconds]
    minutes, step = (f"{seconds[steps[0]] / 60:.1f}", f"{steps[0]:.0f}") if steps else ("never", "")
    commit = re.search(r"commit (\w{7})\w*(-dirty)?", str(origin.get("lmpo")))
    name = "".join(filter(None, commit.groups())) if commit else "?"
    total = max(seconds.values(), default=math.nan) / 60
    cells = [name, origin.get("cpu", "?"), minutes, step, f"{total:.1f}", format_point(run, METRIC, -1)]
    return f"| {' | '.join(map(str, cells))} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folders")
    parser.add_argument("--score", type=float, default=0.6, help="held-out share of correct answers")
    options = parser.parse_args()
    print(HEAD.format(score=options.score))
    for folder in options.runs:
        _, origin = read_settings(folder / "config.json")
        print(board_row(read_metrics(folder / "metrics.jsonl"), origin, options.score))


if __name__ == "__main__":
    main()
