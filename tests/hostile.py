"""An environment whose reward does what the reply says; for tests/envs/test_scoring.py."""

import asyncio
import itertools
import mmap
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import NoReturn

from envs.base import Env, Episode, Problem, Step

MEMORY = 100 * 2**20  # bytes


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
        if text == "print":
            speak(problem.answer)
        found = WAYS[text]() if text in WAYS else None
        scores = {"return": 1.0, "index": problem.answer, "jax": "jax" in sys.modules, "pid": os.getpid()}
        return scores if found is None else found


# Rewards that end their process, or do not end


def raise_error() -> NoReturn:
    raise ZeroDivisionError("of the reward")


def kill_parent() -> None:
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(1000)  # the kernel ends this process too, a moment later


def end_group() -> dict[str, float]:
    child = subprocess.Popen(["sleep", "1000"], stdout=subprocess.DEVNULL)
    os.killpg(0, signal.SIGTERM)
    return {"return": 1.0, "child": child.wait() and child.pid}


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


def speak(answer: int) -> None:
    print("\x1b[31mone", end=" ", flush=True)
    time.sleep(0.001)  # another worker prints
    print(f"and\ttwo\r {answer}\n\u202ethree \ud800", answer, end="\n" + "x" * 5000 + "\n")
    print("four", answer, file=sys.stderr)


def fill(size: int) -> None:
    """Holds so many bytes of shared memory, which no limit of the kernel on a process counts."""
    memory = mmap.mmap(-1, size)
    for _ in range(size >> 20):
        memory.write(bytes(2**20))
    time.sleep(1000)


WAYS: dict[str, Callable[[], dict[str, object] | None]] = {
    "sleep": lambda: time.sleep(1000),
    # Holds the interpreter: no Python signal handler and no thread runs until it ends.
    "regex": lambda: re.match(r"(a+)+$", "a" * 60 + "b") and None,
    "raise": raise_error,
    "exit": lambda: sys.exit(3),
    "exit 0": lambda: os._exit(0),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "child and kill group": end_group,
    "kill group 9": lambda: os.killpg(0, signal.SIGKILL),
    "kill parent": kill_parent,
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "close files": lambda: os.closerange(3, 1000),
    "daemon": start_daemon,
    "fork": fork,
    "shared memory": lambda: fill(4 * MEMORY),
    "memory of children": fill_memory_of_children,
    "cancel": cancel,
    "mute": mute,
    "memory": lambda: {"return": float(len(bytearray(2**40)))},
    "endless": lambda: {"return": sum(itertools.count())},
    "nan": lambda: {"return": float("nan")},
    "huge": lambda: {"return": 1e300},
    "name of the log": lambda: {"return": 1.0, "length": 2.0},
    "slow": lambda: time.sleep(0.3),
}


class Counting(Episode):
    """Counts its turns, each of which does what the reply says."""

    def __init__(self, env: Hostile, problem: Problem):
        self.env, self.problem, self.num_turns = env, problem, 0

    def step(self, reply: str) -> Step:
        self.num_turns += 1
        scores = self.env.score(self.problem, reply)
        info = {"turn": self.num_turns, "pid": scores["pid"], "object": id(self)}
        size = 10**7 if reply == "much" else 1
        return Step([{"role": "user", "content": "more" * size}] * size, scores["return"], self.num_turns == 4, info)

    def truncate(self) -> Step:
        return Step([], self.num_turns / 10, done=True)


def make() -> Env:
    return Hostile()


def make_once(folder: str) -> Env:
    """Fails where a process has made the environment before."""
    os.mkdir(folder)
    return Hostile()


def make_missing() -> Env:
    raise FileNotFoundError("no such data set")


def obey(setup: object, requests: Iterator[str]) -> Iterator[object]:
    """What a lane runs: answers with the setup, then does what the requests say."""
    yield setup
    for way in requests:
        try:
            WAYS.get(way, lambda: None)()
            yield way
        except ZeroDivisionError as error:
            yield str(error)
