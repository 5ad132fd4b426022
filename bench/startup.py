"""How long each command takes to refuse a wrong option, beside an empty Python program and one that imports JAX.

    python bench/startup.py [--repeats 9]

The programs take turns, so that another load of the machine meets all of them.
"""

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EMPTY = "python -c pass"
COMMANDS = ("core/grpo.py", "core/eval.py", "core/sampling.py", "core/population.py", "core/minimal.py")
PROGRAMS = {EMPTY: ["-c", "pass"], "python -c 'import jax'": ["-c", "import jax"]}
PROGRAMS |= {f"python {command} --learning_rat 1": [command, "--learning_rat", "1"] for command in COMMANDS}


def measure(arguments: list[str]) -> float:
    """Returns the seconds that a program takes."""
    start = time.perf_counter()
    subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True)
    return time.perf_counter() - start


def main(repeats: int) -> None:
    times: dict[str, list[float]] = {name: [] for name in PROGRAMS}
    for turn in range(repeats + 1):  # the first one fills the caches of the file system
        for name, arguments in PROGRAMS.items():
            seconds = measure(arguments)
            if turn:
                times[name].append(seconds)
    empty = statistics.median(times[EMPTY])
    for name, values in times.items():
        median = statistics.median(values)
        spread = f"{min(values):.2f}-{max(values):.2f}"
        print(f"{name:50} {median:.2f} s ({spread})  {median / empty:5.1f} x {EMPTY}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    main(parser.parse_args().repeats)
