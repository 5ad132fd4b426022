"""The page of bench/first_hour.sh: what its parts found, beside what is aimed at.

    python bench/first_hour.py page FOLDER       # writes page.md and page.json there
    python bench/first_hour.py target            # prints this device's name in bench/compiled.py, if it has one
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    import utils.settings.packages  # noqa: F401 (says what to install)

import jax

from bench import compiled
from bench.common import Figure, markdown_table

PARTS = (
    "checks", "decode_and_update", "lengths_100_to_1024", "update_1.7B", "step", "step_int8", "step_1.7B",
    "step_1.7B_int8", "transformers", "predicted",
)  # fmt: skip


class Aim(NamedTuple):
    """A figure that is aimed at: its place in the table of a part, and what it should be on an H200.

    `row` is a part of the row's first cell.
    """

    text: str
    part: str
    row: str
    column: str


IN_BFLOAT16 = "sampler with a cache in bfloat16"
AIMS = (
    Aim("sampler against trainer in bfloat16, nats: mean below 0.01", "checks", IN_BFLOAT16, "mean"),
    Aim("decode of 256 rows, 1k tokens: 60% of read bandwidth", "decode_and_update", "rollout", "of read bandwidth"),
    Aim("update of 0.6B: 45% of the matmul rate", "decode_and_update", "update", "of matmul rate"),
    Aim("update of 1.7B: 45% of the matmul rate", "update_1.7B", "update", "of matmul rate"),
    Aim("256 completions of 100 to 1,024 tokens: 20,000 tokens/s", "lengths_100_to_1024", ", compaction", "tokens/s"),
)


def find_figure(rows: Sequence[Mapping[str, Figure]], aim: Aim) -> Figure:
    """Returns the figure of a part that is compared with an aim."""
    row = next(row for row in rows if aim.row in next(iter(row.values())))
    return row[aim.column]


def find_target() -> str:
    """Returns this device's name in bench/compiled.py; empty: it has none, or its compiler is not installed."""
    kind = jax.devices()[0].device_kind
    names = (name for name, target in compiled.TARGETS.items() if target.kind == kind and compiled.has_compiler(name))
    return next(names, "")


def write_page(folder: Path) -> None:
    """Writes page.md and page.json from the files of the parts."""
    found = {}
    for name in PARTS:
        file = folder / f"{name}.json"
        if file.exists():
            found[name] = json.loads(file.read_text())
    aims = [(aim.text, find_figure(found[aim.part]["rows"], aim)) for aim in AIMS if aim.part in found]
    lines = ["# The first hour", "", *markdown_table(("aimed at, on an H200", "found"), aims)]
    for name, part in found.items():
        facts = ", ".join(f"{key} {value}" for key, value in part["environment"].items())
        rows = [list(row.values()) for row in part["rows"]]
        lines += ["", f"## {name}", "", f"{part['title']}; {facts}", "", *markdown_table(list(part["rows"][0]), rows)]
    for file in sorted(folder.glob("*.failed")):
        lines += ["", f"## {file.stem} failed", "", "```", *file.read_text().splitlines()[-15:], "```"]
    (folder / "page.md").write_text("\n".join(lines) + "\n")
    (folder / "page.json").write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    if sys.argv[1:] == ["target"]:
        print(find_target())
    elif sys.argv[1:2] == ["page"] and len(sys.argv) == 3:
        write_page(Path(sys.argv[2]))
    else:
        sys.exit(print(__doc__) if "--help" in sys.argv else __doc__)
