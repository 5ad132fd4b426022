"""An environment whose reward does what the reply says; for tests/envs/test_scoring.py."""

import asyncio
import gc
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
from pathlib import Path

from envs.base import Env, Episode, Problem, Step
from envs.scoring.helper import PROGRESS

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
        if text == "sleep":
            time.sleep(1000)
        if text == "regex":  # holds the interpreter: no Python signal handler, no thread runs until it ends
            re.match(r"(a+)+$", "a" * 60 + "b")
        if text == "raise":
            raise ZeroDivisionError("of the reward")
        if text == "exit":
            sys.exit(3)
        if text == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if text == "exit 0":
            os._exit(0)
        if text == "kill group":
            os.killpg(0, signal.SIGTERM)
        if text == "kill group 9":
            os.killpg(0, signal.SIGKILL)
        if text == "kill parent":
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(1000)  # the kernel ends this process too, a moment later
        if text == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if text in ("stop helper", "kill helper"):
            keeper = Path(f"/proc/{os.getppid()}/stat").read_text()
            helper = int(keeper.rpartition(")")[2].split()[1])
            os.kill(helper, signal.SIGSTOP if text == "stop helper" else signal.SIGKILL)
            time.sleep(1000)
        if text == "close files":
            os.closerange(3, 1000)
        if text == "daemon":
            daemon = subprocess.Popen(["sleep", "1000"], start_new_session=True, stdout=subprocess.DEVNULL)
            return {"return": 1.0, "daemon": daemon.pid, "pid": os.getpid()}
        if text == "fork":
            os.fork()  # the child, too, returns from here
        if text == "environment":
            return {"return": 1.0, **{name: 1.0 for name in os.environ}}
        if text == "shared memory":
            fill(4 * MEMORY)
        if text == "memory of children":
            children = [os.fork() for _ in range(4)]
            if 0 in children:
                fill(MEMORY)
            time.sleep(1000)
        if text == "cancel":
            raise asyncio.CancelledError  # no Exception, but a BaseException
        if text == "mute":
            raise Mute
        if text == "memory":
            return {"return": float(len(bytearray(2**40)))}
        if text == "generator":
            return {"return": (i for i in itertools.count())}
        if text == "endless":
            return {"return": sum(itertools.count())}
        if text == "nan":
            return {"return": float("nan")}
        if text == "huge":
            return {"return": 1e300}
        if text == "half a pair":
            return {"return": 1.0, "\ud800": 1.0}
        if text == "name of the log":
            return {"return": 1.0, "length": 2.0}
        if text == "long name":
            return {"return": 1.0, "x" * 10**6: 1.0}
        if text.startswith("pickle "):
            pretend(pickle.dumps(Payload(text.removeprefix("pickle "))) + b"\n")
        if text == "no outcomes":
            pretend(b"[[0], 1]\n")
        if text == "too many outcomes":
            pretend(b"[0, " + b",".join([b'["dict", {"return": 1}]'] * 100) + b"]\n")
        if text == "half a message":
            write_to_sockets(b"[0, ")
        if text == "half a message and hang":
            pretend(b"[0, ")
        if text == "messages without end":
            for _ in range(200):
                write_to_sockets(b"[0]\n")
                time.sleep(0.01)
            time.sleep(1000)
        if text.startswith("place "):
            lie_about_progress(*map(float, text.removeprefix("place ").split()))
        if text == "print":
            print("\x1b[31mone", end=" ", flush=True)
            time.sleep(0.001)  # another worker prints
            print(f"and\ttwo\r {problem.answer}\n\u202ethree \ud800", problem.answer, end="\n" + "x" * 5000 + "\n")
            print("four", problem.answer, file=sys.stderr)
        if text == "slow":
            time.sleep(0.3)
        return {"return": 1.0, "index": problem.answer, "jax": "jax" in sys.modules, "pid": os.getpid()}


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


def lie_about_progress(seconds: float, place: float) -> None:
    """Writes another time and place into the memory that tells what the worker is at, and does not return."""
    for found in gc.get_objects():
        if isinstance(found, mmap.mmap) and len(found) == PROGRESS.size:
            PROGRESS.pack_into(found, 0, seconds, int(place))
    time.sleep(1000)


def fill(size: int) -> None:
    """Holds so many bytes of shared memory, which no limit of the kernel on a process counts."""
    memory = mmap.mmap(-1, size)
    memory.write(bytes(size))
    time.sleep(1000)


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


def make_with_token() -> Env:
    """Fails where the token for private data sets is not there while the environment is made."""
    if os.environ["HF_TOKEN"] != "secret":
        raise KeyError
    return Hostile()


def make_missing() -> Env:
    raise FileNotFoundError("no such data set")
