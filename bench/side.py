"""One of the sides that bench/peers.py compares, in a process of its own: runs its work each time it is told to.

    python bench/side.py PEER VARIANT      # work as a line of JSON on stdin, then a line for each run
"""

import importlib
import json
import os
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)


class Gate:
    """Called between two runs by the side that is measured: tells the time of the last, waits for word of the next."""

    def __init__(self, out):
        self.out, self.start, self.cpu = out, None, 0.0

    def say(self, **what) -> None:
        print(json.dumps(what), file=self.out, flush=True)

    def __call__(self, tokens: int = 0, **more) -> bool:
        if self.start is not None:
            seconds, cpu = time.perf_counter() - self.start, time.process_time() - self.cpu
            self.say(seconds=seconds, cpu_seconds=cpu, tokens=int(tokens), **more)
        if not sys.stdin.readline():
            os._exit(0)  # threads of some libraries would keep the process
        self.start, self.cpu = time.perf_counter(), time.process_time()
        return True


def main(peer: str, variant: str) -> None:
    """What libraries print goes to stderr: stdout is for the one who measures."""
    gate = Gate(os.fdopen(os.dup(1), "w"))
    os.dup2(2, 1)
    work = json.loads(sys.stdin.readline())
    try:
        importlib.import_module(f"bench.side_{peer}").run(work, variant, gate)
    except ImportError as error:
        gate.say(absent=str(error))


if __name__ == "__main__":
    main(*sys.argv[1:])
