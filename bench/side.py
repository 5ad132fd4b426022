"""A side of bench/peers.py, in a process of its own: runs its work for each line of stdin.

    python bench/side.py PEER VARIANT      # work as a line of JSON on stdin, then a line for each run
"""

import importlib
import json
import os
import sys
import time
from pathlib import Path
from typing import TextIO, TypedDict

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)


Figure = float | str | list[int]
TAILS = {"long_tail": (32, 32, 256), "longer_tail": (256, 64, 1024)}  # prompts, mean and limit of lengths
ROLLOUTS = ("rollout", *TAILS)  # works that sample and nothing else
TURNS = ("turns", "turns_step")  # works with episodes of several turns


class Work(TypedDict, total=False):
    """Work of a side."""

    name: str
    model_dir: str
    prompts: list[list[int]]
    group_size: int
    limit: int  # tokens of a completion, with observations
    batch_rows: int  # rows that are sampled at once
    lengths: list[int]  # of the completions
    stop_ids: list[int]
    rows: list[list[int]]  # prompts with completions, for an update
    old: bool  # the update computes old log-probabilities
    turn_tokens: int  # tokens of each turn, and more of episodes
    num_turns: int
    observation: list[int]  # tokens between two turns
    env_options: dict[str, int]  # of FixedEpisodes


class Gate:
    """Called between two runs by the side that is measured: prints the time of the last, waits to start the next."""

    def __init__(self, out: TextIO):
        self.out = out
        self.start: float | None = None  # by the clock; None: nothing has run
        self.cpu_start = 0.0

    def write(self, **figures: Figure) -> None:
        print(json.dumps(figures), file=self.out, flush=True)

    def __call__(self, tokens: int = 0, **more: Figure) -> bool:
        if self.start is not None:
            seconds = time.perf_counter() - self.start
            cpu_seconds = time.process_time() - self.cpu_start
            self.write(seconds=seconds, cpu_seconds=cpu_seconds, tokens=int(tokens), **more)
        if not sys.stdin.readline():
            os._exit(0)  # threads of some libraries would keep the process
        self.cpu_start = time.process_time()
        self.start = time.perf_counter()
        return True


def main(peer: str, variant: str) -> None:
    """Runs the work of stdin; what libraries print goes to stderr, since bench/peers.py reads stdout."""
    gate = Gate(os.fdopen(os.dup(1), "w"))
    os.dup2(2, 1)
    work = json.loads(sys.stdin.readline())
    try:
        importlib.import_module(f"bench.side_{peer}").run(work, variant, gate)
    except ImportError as error:
        gate.write(absent=str(error))


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(print(__doc__) if "--help" in sys.argv else __doc__)
    main(*sys.argv[1:])
