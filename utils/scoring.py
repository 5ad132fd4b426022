"""Scores replies in worker processes, where a reward may hang, crash or raise without harming the run.

    with Scorer("countdown", timeout=10) as scorer:
        rewards, counts = scorer.score([0, 0, 1], ["<answer>1+2</answer>", "hm", "..."])

The workers belong to one helper process that this file starts as a program of its own, since a process that runs JAX
must not fork, and since multiprocessing's other ways import the main script in every worker, and jax with it: 165 MB
each, and 3.2 s until two of them are ready, against 18 MB and 0.5 s here. The helper never imports jax, so its workers
can fork from a small clean server. Its pipe is the lifeline: when the run ends, however it ends, the pipe closes, and
the helper stops its workers and itself.
"""

import contextlib
import functools
import importlib
import json
import math
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple, Self

from pebble import ProcessExpired, ProcessPool

from envs import make_env
from envs.base import Env

ROOT = Path(__file__).resolve().parent.parent
HELPER = "import sys; sys.path[0] = sys.argv[1]; from utils.scoring import serve; serve(int(sys.argv[2]))"
MAX_CHUNK = 32  # replies that share one message to a worker, and, when one of them hangs, one second chance
MAX_CHUNKS = 1000  # chunks after which a worker makes room for a new one: parsers of LaTeX cache without limit
MAX_MEMORY = 4 * 2**30  # bytes of its own for a worker: a reply that makes a reward eat more fails alone
MAX_WRITTEN = 100  # failures that are kept to be looked at
STALL = 120  # seconds without any result, beyond the time limit, after which the pool itself must be broken

Job = tuple[int, str]  # number of the problem, reply
Options = tuple[tuple[str, Any], ...]  # of the environment; hashable, unlike a dict


class Failure(NamedTuple):
    """Why a reply has no score."""

    kind: str  # "reward_timeouts" or "reward_errors"
    reason: str  # may quote the reply: print its repr, lest it speaks to the terminal


Rewards = dict[str, float]  # by name; "return" is what training maximises
Outcome = Rewards | Failure


class Scorer:
    """Scores replies to the problems of one environment; use it as a context manager, from one thread at a time.

    `env_name` is a name that `make_env` knows, or "module:function" of something else that makes an Env.
    `num_workers` 0 is one for each core, at most 16. `timeout` is the limit for one reply, in seconds.
    `failures_dir` receives reward_failures.jsonl: the first replies that could not be scored, and why.

    Raises: ValueError when the environment cannot be made.
    """

    def __init__(
        self,
        env_name: str,
        env_options: Mapping[str, Any] | None = None,
        *,
        num_workers: int = 0,
        timeout: float = 10.0,
        failures_dir: str | Path | None = None,
        max_error_share: float = 0.5,
    ):
        num_workers = num_workers or min(os.cpu_count() or 1, 16)
        self.settings = (env_name, tuple((env_options or {}).items()), num_workers, timeout, max_error_share)
        self.failures_file = Path(failures_dir) / "reward_failures.jsonl" if failures_dir else None
        self.num_failures, self.is_closed = 0, False
        self.start()

    def score(self, indices: Sequence[int], texts: Sequence[str]) -> tuple[list[Rewards | None], dict[str, int]]:
        """Returns the rewards of each reply, and counts of failures: "reward_timeouts" and "reward_errors".

        A reply that exceeded its time limit, killed its worker or made the reward raise has None in place of rewards.

        Raises: RuntimeError when more than `max_error_share` of the replies (and more than 8) got none: then the reward
        is wrong, not the replies.
        """
        jobs = [(int(index), text) for index, text in zip(indices, texts, strict=True)]
        return self.judge(jobs, self.ask(jobs))

    def judge(self, jobs: Sequence[Job], outcomes: Sequence[Outcome]) -> tuple[list[Rewards | None], dict[str, int]]:
        """Returns (and raises) what `score` does, from the outcome of each job."""
        failures = [(job, outcome) for job, outcome in zip(jobs, outcomes, strict=True) if isinstance(outcome, Failure)]
        counts = {kind: sum(f.kind == kind for _, f in failures) for kind in ("reward_timeouts", "reward_errors")}
        self.report(failures)
        if len(failures) > max_failures(len(jobs), self.settings[-1]):
            reason = failures[0][1].reason
            raise RuntimeError(f"The reward failed for {len(failures)} of {len(jobs)} replies: {reason!r}")
        return [None if isinstance(outcome, Failure) else outcome for outcome in outcomes], counts

    def report(self, failures: Sequence[tuple[Job, Failure]]) -> None:
        """Warn about the first failure of the run, and keep the first ones in a file."""
        if failures and not self.num_failures:
            where = f"; see {self.failures_file}" if self.failures_file else ""
            print(f"warning: a reply got no score: {failures[0][1].reason!r}{where}.", file=sys.stderr)
        keep = failures[: max(0, MAX_WRITTEN - self.num_failures)]
        self.num_failures += len(failures)
        if keep and self.failures_file:
            self.failures_file.parent.mkdir(parents=True, exist_ok=True)
            with self.failures_file.open("a") as file:
                for (index, text), failure in keep:
                    record = {"env": self.settings[0], "problem": index, "reason": failure.reason, "text": text}
                    file.write(json.dumps(record) + "\n")

    def ask(self, jobs: list[Job]) -> list[Outcome]:
        """Have the helper score these; a helper that is lost or broken is replaced once. Empty when all is to end."""
        for _ in range(2):
            reply = "the helper process was lost; is there enough memory?"
            with contextlib.suppress(EOFError, OSError):
                self.connection.send(jobs)
                while not self.connection.poll(0.1):
                    if self.is_closed:
                        return []
                reply = self.connection.recv()
            if isinstance(reply, list):
                return reply
            if self.is_closed:
                return []
            self.kill()
            self.start()
        raise RuntimeError(f"Scoring failed twice in a row: {reply}")

    def start(self) -> None:
        """Start the helper and wait until its workers have made the environment."""
        self.connection, theirs = Pipe()
        command = [sys.executable, "-c", HELPER, str(ROOT), str(theirs.fileno())]
        # Its own session: Ctrl-C is for the run, which then closes the pipe; and `kill` reaches all that it started.
        self.process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True
        )
        theirs.close()
        try:
            self.connection.send(self.settings)
            self.connection.send([])
            reply = self.connection.recv()
        except (EOFError, OSError) as error:
            self.kill()
            raise RuntimeError("The helper process for scoring did not start; it says above why.") from error
        if isinstance(reply, str):
            self.close()
            raise ValueError(f"{self.settings[0]}: {reply}")

    def close(self) -> None:
        """Stop the workers; takes a second at most, and cannot hang."""
        self.is_closed = True
        self.connection.close()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """End the helper and everything it started, at once."""
        self.connection.close()
        if self.process.returncode is None:  # else the number may be another's by now
            # SIGTERM ends them all but multiprocessing's resource tracker, which then frees the pool's semaphores.
            os.killpg(self.process.pid, signal.SIGTERM)
            self.process.kill()
            self.process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        self.close()


class Stream:
    """Scores replies of one rollout in the background, while others are sampled: a context manager.

    A request takes all that have come since the one before it: however long a reply keeps it, the end waits for two.
    """

    def __init__(self, scorer: Scorer):
        self.scorer, self.queue = scorer, SimpleQueue()
        self.outcomes: dict[int, tuple[Job, Outcome]] = {}
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self.run, daemon=True)

    def add(self, jobs: dict[int, Job]) -> None:
        """Replies to score, by the number of their row."""
        self.queue.put(jobs)

    def run(self) -> None:
        try:
            is_open = True
            while is_open:
                parts = [self.queue.get()]
                while not self.queue.empty():
                    parts.append(self.queue.get())
                is_open = None not in parts
                jobs = {row: job for part in parts if part for row, job in part.items()}
                if jobs:
                    outcomes = self.scorer.ask([*jobs.values()])
                    self.outcomes |= zip(jobs, zip(jobs.values(), outcomes, strict=False), strict=False)
        except BaseException as error:  # noqa: BLE001 (raised again by `finish`)
            self.error = error

    def finish(self) -> dict[int, tuple[Job, Outcome]]:
        """The job and the outcome of each row, once all are there; raises what went wrong."""
        self.queue.put(None)
        self.thread.join()
        if self.error:
            raise self.error
        return self.outcomes

    def __enter__(self) -> Self:
        self.thread.start()
        return self

    def __exit__(self, *_) -> None:
        self.queue.put(None)


def serve(fd: int) -> None:
    """Life of the helper: make the pool, answer requests until the other end of the pipe is gone, take all along."""
    connection = Connection(fd)
    name, options, num_workers, timeout, max_error_share = connection.recv()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["utils.scoring"])
    pool = ProcessPool(
        num_workers, max_tasks=MAX_CHUNKS, initializer=start_worker, initargs=(name, options), context=context
    )
    score = functools.partial(score_chunk, name, options)
    try:
        while True:
            jobs = connection.recv()
            size = min(math.ceil(len(jobs) / (4 * num_workers)), MAX_CHUNK)  # 4: the last worker is not waited for long
            try:
                reply = score_all(pool, score, jobs, size, timeout, connection)
                lost = [i for i, outcome in enumerate(reply) if outcome is None]
                limit = max_failures(len(jobs), max_error_share)
                singly = score_singly(pool, score, [jobs[i] for i in lost], timeout, connection, limit)
                for i, outcome in zip(lost, singly, strict=True):
                    reply[i] = outcome
            except Exception as error:  # noqa: BLE001 (a broken pool, or whatever making the environment raises)
                reply = f"{type(error).__name__}: {error}"
            connection.send(reply)
    except (EOFError, OSError):
        pass  # the run has ended
    finally:
        pool.stop()
        pool.join()
        os.killpg(0, signal.SIGTERM)  # what rewards may have started


def score_all(
    pool: ProcessPool, score: Callable, jobs: list[Job], size: int, timeout: float, connection: Connection
) -> list[Outcome | None]:
    """Score jobs in chunks of `size`; None for each of a larger chunk that was lost.

    No jobs only make sure of the environment.
    """
    chunks = [jobs[i : i + size] for i in range(0, len(jobs), size or 1)] or [[]]
    futures = [pool.schedule(score, args=[chunk], timeout=timeout if chunk else None) for chunk in chunks]
    wait_for(futures, connection, STALL + timeout if jobs else math.inf)
    outcomes = []
    for chunk, future in zip(chunks, futures, strict=True):
        try:
            outcomes += future.result()
        except TimeoutError:
            failure = Failure("reward_timeouts", f"it took longer than {timeout:g} seconds")
            outcomes += [failure if size == 1 else None] * len(chunk)
        except ProcessExpired as error:
            failure = Failure("reward_errors", f"it ended its process with exit code {error.exitcode}")
            outcomes += [failure if size == 1 else None] * len(chunk)
    return outcomes


def score_singly(
    pool: ProcessPool, score: Callable, jobs: list[Job], timeout: float, connection: Connection, limit: int
) -> list[Outcome]:
    """Score jobs one by one, each with its own time limit, until more than `limit` of them have failed."""
    outcomes = []
    for start in range(0, len(jobs), 16):
        if sum(isinstance(outcome, Failure) for outcome in outcomes) > limit:  # hours, where a reward always hangs
            failure = Failure("reward_timeouts", "its neighbours had failed, too many to try it alone")
            return outcomes + [failure] * (len(jobs) - start)
        outcomes += score_all(pool, score, jobs[start : start + 16], 1, timeout, connection)
    return outcomes


def max_failures(num_jobs: int, max_error_share: float) -> int:
    """How many replies may go without a score before the reward itself must be wrong."""
    return max(int(max_error_share * num_jobs), 8)


def wait_for(futures: Sequence[Future], connection: Connection, patience: float) -> None:
    """Wait until all are done. Raises EOFError when the run has ended, BrokenProcessPool after no result for long."""
    pending, last_result = set(futures), time.monotonic()
    while pending:
        num_pending = len(pending)
        pending = wait(pending, timeout=0.5).not_done
        if connection.poll():  # nothing is sent meanwhile: this is the end of the pipe
            raise EOFError
        if len(pending) < num_pending:
            last_result = time.monotonic()
        elif time.monotonic() - last_result > patience:
            raise BrokenProcessPool(f"no reply was scored within {patience:.0f} seconds")


def start_worker(name: str, options: Options) -> None:
    """Begin of a worker: make the environment before any clock runs."""
    # pebble's handler runs when Python next gets its turn, which a regular expression or a large power may never give.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with contextlib.suppress(ValueError, OSError):  # a system may allow less, or not know this limit
        resource.setrlimit(resource.RLIMIT_DATA, (MAX_MEMORY, MAX_MEMORY))
    with contextlib.suppress(Exception):  # raised again where it can be reported, by the first chunk
        environment(name, options)


def score_chunk(name: str, options: Options, jobs: list[Job]) -> list[Outcome]:
    """In a worker: score some replies; a reward that raises fails that reply only."""
    env, outcomes = environment(name, options), []
    problem = functools.cache(env.problem)  # the replies of a group share theirs
    for index, text in jobs:
        try:
            scores = {str(key): float(value) for key, value in env.score(problem(index), text).items()}
            if not math.isfinite(scores["return"]):
                raise ValueError(f"the return is {scores['return']}")
            outcomes.append(scores)
        except BaseException as error:  # noqa: BLE001 (rewards are other people's code)
            outcomes.append(Failure("reward_errors", describe(error)))
    return outcomes


def describe(error: BaseException) -> str:
    """An error in a few words, even one that cannot speak for itself."""
    try:
        return f"{type(error).__name__}: {error}"[:500]
    except Exception:
        return type(error).__name__


@functools.cache
def environment(name: str, options: Options) -> Env:
    """The environment of this process."""
    if ":" not in name:
        return make_env(name, **dict(options))
    module, function = name.split(":")
    return getattr(importlib.import_module(module), function)(**dict(options))
