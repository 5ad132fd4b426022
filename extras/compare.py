"""Compares runs side by side, in a page or a picture.

python extras/compare.py runs/countdown-1 runs/countdown-2 --html compare.html   # open it in any browser
python extras/compare.py runs/countdown-1 runs/countdown-2 --out compare.png
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    import utils.settings.packages  # noqa: F401 (says what to install)

from extras.plots import plot_runs
from utils.metrics.curves import read_metrics
from utils.reporting.page import label_runs, write_report
from utils.settings.errors import user_errors


def main(argv: Sequence[str] | None = None) -> None:
    """Writes the report, or draws the picture, of the runs named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run folder, or its metrics.jsonl")
    parser.add_argument("--html", help="the report to write")
    parser.add_argument("--out", help="the picture to write; plot.png when neither is named")
    options = parser.parse_args(argv)
    files = label_runs(options.runs)
    if missing := [str(file) for file in files.values() if not file.is_file()]:
        parser.error(f"there is no {', '.join(missing)}")
    if options.html:
        write_report(options.runs, options.html)
    if options.out or not options.html:
        options.out = options.out or "plot.png"
        plot_runs({label: read_metrics(file) for label, file in files.items()}, options.out)
    print(f"wrote {' and '.join(filter(None, (options.html, options.out)))}")


if __name__ == "__main__":
    with user_errors():
        main()
