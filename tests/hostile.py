"""An environment whose reward does what the reply says; for tests/envs/test_scoring.py."""

import asyncio
import itertools
import mmap
import os
import pickle
import re
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from envs.base import Env, Episode, Problem, Step

MEMORY = 100 * 2**20  # bytes
OUTCOMES = b"[0]\n" + b"".join(b'[%d, ["dict", {"return": 1}]]\n' % i for i in range(40))  # as a worker sends them


class Mute(Exception):
    """An error that cannot be printed."""

    def __str__(self):
        raise self


class Hostile(Env):
    """Grades "ok"; anything else is a way to go wrong."""

    num_tasks = 1000

    def problem(self, index: int) -> Problem:
        return Problem(messages=[], answer=index)

    def episode(self, problem: Problem, seed: int) -> Episode:
        return Counting(self, problem)

    def score(self, problem: Problem, text: str) -> dict[str, float]:
        name, _, rest = text.partition(" ")
        if name == "pickle":
            pretend(pickle.dumps(Payload(rest)) + b"\n")
        if text == "print":
            speak(problem.answer)
        found = WAYS[text]() if text in WAYS else None
        scores = {
            "return": 1.0,
            "index": problem.answer,
            "jax": "jax" in sys.modules,
            "pid": os.getpid(),
        }
        return scores if found is None else found


# Rewards that end their process, or do not end


def raise_error() -> NoReturn:
    raise ZeroDivisionError("of the reward")


def kill_parent() -> None:
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(1000)  # the kernel ends this process too, a moment later


def signal_helper(number: int) -> None:
    keeper = Path(f"/proc/{os.getppid()}/stat").read_text()
    helper = int(keeper.rpartition(")")[2].split()[1])
    os.kill(helper, number)
    time.sleep(1000)


def start_daemon() -> dict[str, float]:
    daemon = subprocess.Popen(["sleep", "1000"], start_new_session=True, stdout=subprocess.DEVNULL)
    return {"return": 1.0, "daemon": daemon.pid, "pid": os.getpid()}


def fork() -> None:
    os.fork()  # the child, too, returns from here


def fill_memory_of_children() -> None:
    children = [os.fork() for _ in range(4)]
    if 0 in children:
        fill(MEMORY)
    time.sleep(1000)


def cancel() -> NoReturn:
    raise asyncio.CancelledError  # no Exception, but a BaseException


def mute() -> NoReturn:
    raise Mute


def send_without_end() -> None:
    for _ in range(200):
        write_to_sockets(b"[0]\n")
        time.sleep(0.01)
    time.sleep(1000)


def speak(answer: int) -> None:
    print("\x1b[31mone", end=" ", flush=True)
    time.sleep(0.001)  # another worker prints
    print(f"and\ttwo\r {answer}\n\u202ethree \ud800", answer, end="\n" + "x" * 5000 + "\n")
    print("four", answer, file=sys.stderr)


class Payload:
    """What makes a folder when it is unpickled."""

    def __init__(self, path: str):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def write_to_sockets(message: bytes) -> None:
    """Writes a message into each pipe of this process, as if it came from the worker."""
    for fd in range(3, 100):
        try:
            if stat.S_ISSOCK(os.fstat(fd).st_mode):
                os.write(fd, message)
        except OSError:
            pass


def pretend(message: bytes) -> None:
    """Writes a message, and does not return."""
    write_to_sockets(message)
    time.sleep(1000)


def fill(size: int) -> None:
    """Holds so many bytes of shared memory, which no limit of the kernel on a process counts."""
    memory = mmap.mmap(-1, size)
    memory.write(bytes(size))
    time.sleep(1000)


WAYS: dict[str, Callable[[], dict[str, object] | None]] = {
    "sleep": lambda: time.sleep(1000),
    # Holds the interpreter: no Python signal handler and no thread runs until it ends.
    "regex": lambda: re.match(r"(a+)+$", "a" * 60 + "b") and None,
    "raise": raise_error,
    "exit": lambda: sys.exit(3),
    "exit 0": lambda: os._exit(0),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "kill group": lambda: os.killpg(0, signal.SIGTERM),
    "kill group 9": lambda: os.killpg(0, signal.SIGKILL),
    "kill parent": kill_parent,
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "stop helper": lambda: signal_helper(signal.SIGSTOP),
    "kill helper": lambda: signal_helper(signal.SIGKILL),
    "close files": lambda: os.closerange(3, 1000),
    "daemon": start_daemon,
    "fork": fork,
    "environment": lambda: {"return": 1.0, **{name: 1.0 for name in os.environ}},
    "shared memory": lambda: fill(4 * MEMORY),
    "memory of children": fill_memory_of_children,
    "cancel": cancel,
    "mute": mute,
    "memory": lambda: {"return": float(len(bytearray(2**40)))},
    "generator": lambda: {"return": (i for i in itertools.count())},
    "endless": lambda: {"return": sum(itertools.count())},
    "nan": lambda: {"return": float("nan")},
    "huge": lambda: {"return": 1e300},
    "half a pair": lambda: {"return": 1.0, "\ud800": 1.0},
    "name of the log": lambda: {"return": 1.0, "length": 2.0},
    "long name": lambda: {"return": 1.0, "x" * 10**6: 1.0},
    "no outcomes": lambda: pretend(b"[[0], 1]\n"),
    "too many outcomes": lambda: pretend(b"[0, " + b",".join([b'["dict", {"return": 1}]'] * 100) + b"]\n"),
    "an outcome": lambda: write_to_sockets(OUTCOMES),
    "an outcome and exit": lambda: write_to_sockets(OUTCOMES) or os._exit(0),
    "an outcome and hang": lambda: pretend(OUTCOMES),
    "half a message": lambda: write_to_sockets(b"[0, "),
    "half a message and hang": lambda: pretend(b"[0, "),
    "messages without end": send_without_end,
    "slow": lambda: time.sleep(0.3),
}


class Counting(Episode):
    """Counts its turns, each of which does what the reply says."""

    def __init__(self, env: Hostile, problem: Problem):
        self.env, self.problem, self.num_turns = env, problem, 0

    def step(self, reply: str) -> Step:
        self.num_turns += 1
        scores = self.env.score(self.problem, reply)
        info = {
            "turn": self.num_turns,
            "pid": scores["pid"],
            "object": id(self),
        }
        size = 10**7 if reply == "much" else 1
        return Step([{"role": "user", "content": "more" * size}] * size, scores["return"], self.num_turns == 4, info)

    def truncate(self) -> Step:
        return Step([], self.num_turns / 10, done=True)


def make() -> Env:
    return Hostile()


def make_with_token() -> Env:
    """Fails where the token for private data sets is not there while the environment is made."""
    if os.environ["HF_TOKEN"] != "secret":
        raise KeyError
    return Hostile()


def make_missing() -> Env:
    raise FileNotFoundError("no such data set")
