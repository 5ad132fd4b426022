"""How long each command takes to refuse a wrong option, beside an empty Python program and one that imports JAX.

    python bench/startup.py [--repeats 9]

The programs take turns, so that another load of the machine meets all of them: seconds grow by it, CPU time less.
Python keeps the bytecode of our files, as it does unless PYTHONDONTWRITEBYTECODE is set: without, core/grpo.py takes
0.1 seconds more.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
EMPTY = "python -c pass"
COMMANDS = ("core/grpo.py", "core/eval.py", "core/sampling.py", "extras/population.py", "core/minimal.py")
PROGRAMS = {EMPTY: ["-c", "pass"], "python -c 'import jax'": ["-c", "import jax"]}
PROGRAMS |= {f"python {command} --learning_rat 1": [command, "--learning_rat", "1"] for command in COMMANDS}


ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


class Times(NamedTuple):
    """Seconds that a program takes, and seconds of a CPU."""

    wall: float
    cpu: float


def measure(arguments: list[str]) -> Times:
    start, cpu = time.perf_counter(), cpu_seconds()
    subprocess.run([sys.executable, *arguments], cwd=ROOT, env=ENVIRONMENT, capture_output=True)
    return Times(time.perf_counter() - start, cpu_seconds() - cpu)


def cpu_seconds() -> float:
    """Returns the CPU time of all programs that were started and have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main(repeats: int) -> None:
    times: dict[str, list[Times]] = {name: [] for name in PROGRAMS}
    for turn in range(repeats + 1):  # the first one fills the caches of the file system, and that of bytecode
        for name, arguments in PROGRAMS.items():
            measured = measure(arguments)
            if turn:
                times[name].append(measured)
    empty = statistics.median(x.cpu for x in times[EMPTY])
    for name, values in times.items():
        wall = [x.wall for x in values]
        cpu = statistics.median(x.cpu for x in values)
        seconds = f"{statistics.median(wall):.2f} s ({min(wall):.2f}-{max(wall):.2f})"
        print(f"{name:50} {seconds}, CPU {cpu:.2f} s: {cpu / empty:5.1f} x {EMPTY}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    main(parser.parse_args().repeats)
