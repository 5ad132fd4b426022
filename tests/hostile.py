"""An environment whose reward does what the reply says; for tests/test_scoring.py."""

import asyncio
import itertools
import os
import re
import signal
import sys
import time

from envs.base import Env, Problem


class Mute(Exception):
    """An error that cannot be printed."""

    def __str__(self):
        raise self


class Hostile(Env):
    """Grades "ok"; anything else is a way to go wrong."""

    num_tasks = 1000

    def problem(self, index: int) -> Problem:
        return Problem(messages=[], answer=index)

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
        if text == "slow":
            time.sleep(0.3)
        return {"return": 1.0, "index": problem.answer, "jax": "jax" in sys.modules, "pid": os.getpid()}


def make() -> Env:
    return Hostile()


def make_missing() -> Env:
    raise FileNotFoundError("no such data set")
