"""The last line of the terminal says what is waited for, and there is none where nobody looks."""

import os
import re
import subprocess
import sys

import numpy as np
import pytest

from tests.helpers import ROOT
from utils.metrics.terminal import Wait

WAITS = """
import sys, time
sys.path[0] = {root!r}
import jax, numpy as np
from utils.metrics import terminal
from utils.metrics.terminal import main_terminal, track, waiting
terminal.INTERVAL = float(sys.argv[1])
with waiting("held-out problems"), waiting("sampling", 4, "rows") as wait:
    wait.count_rows(0, 32, np.array([10, 20, 64, 64]))
    time.sleep(1.1)
    main_terminal().on_compilation("/jax/core/compile/jaxpr_to_mlir_module_duration", 0.1, fun_name="decode")
    time.sleep(1.1)
    jax.jit(lambda x: x + 1)(np.ones(3))
    time.sleep(0.3)
with waiting("updating"):
    for _ in track(range(3), "micro-batches"):
        time.sleep(0.3)
print("end")
"""


def test_rows_and_tokens_are_counted_over_calls_and_chains():
    wait = Wait("sampling", 6, "rows")
    counted = []
    first_call = ((0, 32, [10]), (1, 32, [64]), (1, 64, [64]))
    for first, t, lengths in (*first_call, (2, 32, [5, 6]), (4, 32, [64, 20]), (4, 64, [64, 20])):
        wait.count_rows(first, t, np.array(lengths))
        counted.append((wait.done, wait.num_tokens))
    assert counted == [(1, 10), (1, 42), (2, 74), (4, 85), (5, 137), (6, 169)]


def read_until_closed(terminal: int) -> str:
    """Returns what is written to the other end of a pseudo-terminal."""
    said = b""
    while True:
        try:
            said += os.read(terminal, 4096)
        except OSError:  # the other end is closed
            return said.decode()


def start_waiting(seconds: str, **options: object) -> subprocess.Popen:
    """Starts the script above, which tells what it waits for at this interval where there is no terminal."""
    command = [sys.executable, "-c", WAITS.format(root=str(ROOT)), seconds]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, **pipes | options)


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="needs a pseudo-terminal")
def test_a_terminal_shows_what_is_waited_for_and_then_nothing():
    ours, theirs = os.openpty()
    silent = start_waiting("60")
    talking = start_waiting("0.8")
    process = start_waiting("60", stderr=theirs, text=False, env=os.environ | {"COLUMNS": "100"})
    os.close(theirs)
    said = read_until_closed(ours)
    assert process.wait(120) == 0
    assert process.stdout.read() == b"end\n"
    lines = [line.strip() for line in said.split("\r") if line]
    sampling = next(i for i, line in enumerate(lines) if "rows" in line)
    assert "held-out problems  [############............]  2 of 4 rows  0:0" in lines[sampling]
    assert "tokens/s" in lines[sampling]
    compiling = next(i for i, line in enumerate(lines) if "held-out problems: compiling decode, program 1" in line)
    assert sampling < compiling < next(i for i, line in enumerate(lines) if "of 3 micro-batches" in line)
    assert all(line.startswith("\x1b[K") for line in lines), "each replaces the one before"
    assert lines[-1] == "\x1b[K"
    seconds = [int(line.partition(" so far")[0][-1]) for line in lines if "held-out" in line]
    assert seconds == sorted(seconds)
    assert seconds[-1] >= 2 > seconds[0], "the clock goes on while programs are compiled"
    assert silent.communicate() == ("end\n", ""), "a line a minute"
    assert_lines(*talking.communicate())


def assert_lines(out: str, written: str) -> None:
    """Asserts that what is waited for is told by lines where there is no terminal."""
    first, *others = written.splitlines()
    assert out == "end\n"
    assert re.match(r"held-out problems  2 of 4 rows  0:0\d so far  \d+ tokens/s$", first)
    assert others
    assert "\x1b" not in written
