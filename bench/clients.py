"""Tries files and classes of other projects: a table for each subject, with the versions that it was made with.

    python bench/clients.py peft      # adapters that peft makes of each kind
    python bench/clients.py gyms      # environments of GEM, TextArena, Gymnasium, SkyRL-gym and OpenEnv
    python bench/clients.py trl       # classes and rewards of TRL's examples, docs and tests
    python bench/clients.py rewards   # rewards that TRL publishes

Each subject is a file bench/clients_NAME.py, which says what to install beside requirements.txt: a function `rows` that
yields what was tried, and PACKAGES, whose versions are printed. Exit status 1: something runs and is silently wrong.
"""

import importlib
import importlib.metadata
import os
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    os.environ.update(HF_HUB_OFFLINE="1", CUDA_VISIBLE_DEVICES="", JAX_PLATFORMS="cpu")

SUBJECTS = ("peft", "gyms", "trl", "rewards")
EQUAL, RUNS, REFUSED, WRONG = "equal", "runs", "refused by name", "WRONG"


class Row(NamedTuple):
    """Subject of a trial, what became of it (a constant above), and its figure or sentence."""

    what: str
    outcome: str
    detail: str = ""


def main(subjects: list[str]) -> int:
    """Prints the table of each subject; returns the exit status."""
    outcomes: Counter[str] = Counter()
    if unknown := set(subjects) - {*SUBJECTS}:
        print(__doc__, f"\nerror: there is no {', '.join(unknown)}; the subjects are {', '.join(SUBJECTS)}", sep="")
        return 2
    for subject in subjects or SUBJECTS:
        module = importlib.import_module(f"bench.clients_{subject}")
        versions = [f"{name} {importlib.metadata.version(name)}" for name in module.PACKAGES]
        print(f"\n{subject}: {', '.join(versions)}\n\n| {subject} | here | |\n|---|---|---|", flush=True)
        for row in module.rows():
            outcomes[row.outcome] += 1
            print(f"| {' | '.join(row).replace(chr(10), ' ')} |", flush=True)
    print("\n" + ", ".join(f"{number} {outcome}" for outcome, number in outcomes.items()))
    return int(outcomes[WRONG] > 0)


if __name__ == "__main__":
    sys.exit(print(__doc__) if "--help" in sys.argv else main(sys.argv[1:]))
