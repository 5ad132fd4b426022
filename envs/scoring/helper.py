"""The helper process of envs/scoring/scorer.py: it starts workers, hands replies out to them, and enforces limits.

    run -- Connection --> helper: a loop over connections, one thread, never jax
                            |-- keeper --> worker: makes the environment, scores chunks of replies
                            |-- keeper --> worker

A worker tells when it takes a chunk, and the outcome of each reply before it begins the next one. So the helper counts
which reply a worker is at, and only a reply that exceeds its time limit or ends its worker is lost; the others of its
chunk go back into the queue. The helper trusts a worker only as far as its messages are possible. A keeper is the
parent of one worker. It adopts processes that rewards start in sessions of their own, and ends them with the worker.
"""

import contextlib
import functools
import importlib
import io
import json
import math
import os
import secrets
import signal
import socket
import struct
import sys
import time
import traceback
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, Pipe, wait
from typing import NamedTuple

from envs import make_env
from envs.base import NOT_APPLICABLE, Env, Episode, Problem, Reply, Step, limited
from envs.own_code import ROOT, wrong_return
from envs.scoring.processes import (
    MAX_MEMORY,
    adopt_orphans,
    end_with_parent,
    kill_descendants,
    kill_tree,
    limit_memory,
    tree_memory,
)
from utils.settings.errors import UserError, on_one_line

MAX_CHUNK = 32  # replies that share one message to a worker
QUICK = 0.01  # seconds of a worker's share of the queue below which it is one chunk
MAX_CHUNKS = 1000  # chunks after which a worker is replaced: parsers of LaTeX cache without limit
MAX_EPISODES = 2048  # episodes that a worker keeps
MAX_HOMES = 100_000  # episodes whose workers are known
MAX_IDLE_ENDS = 100  # workers that may end in a request while they score nothing, by a signal from elsewhere
MAX_IDLE = 5.0  # seconds in which a worker begins a new chunk
CHECK_INTERVAL = 0.05  # seconds between two looks at time limits and at workers that have ended
MEMORY_INTERVAL = 0.25  # seconds between two looks at the memory of workers
ALIVE_INTERVAL = 1.0  # seconds between two signs of life to the run
MAX_UNMADE = 8  # workers in a row that cannot make an environment which others have made
MAKING = 600  # seconds that the making of an environment may take
MAX_MESSAGE = 2**26  # bytes of a message of a worker
MAX_REWARD = 1e35  # largest reward of a reply or turn: sums of many fit into float32 (3e38)
MAX_PRINTED = 1000  # characters of a line; a pipe takes 4,096 bytes in one piece
STEP_FORM = "Step(messages, reward, done), of messages with role and content"
MAX_NAME = 200  # characters of the name of a reward
TAKEN = ("length", "finished", "return_spread", "groups_without_signal")  # under env/ the log has others of its own
CLOSING = 1.0  # seconds that environments have to close what they hold
STALL = 60  # seconds without a sign of life after which the helper, or the run, counts as stuck
WORKER_STALL = 5  # seconds after which a worker that takes no message counts as stuck


class Turns(NamedTuple):
    """Replies of the policy in an episode so far. The job returns the response to the last one, or the opening."""

    seed: int
    replies: tuple[Reply, ...]
    is_truncated: bool = False  # by a limit: the response to the last reply is known already
    game: int = 0  # seeds what is generated before the first turn
    said: int = 0  # digest of the environment's messages so far; 0: not to be compared


class Group(NamedTuple):
    """Replies to a problem that are graded together."""

    replies: tuple[str, ...]


Job = tuple[int, str | Turns | Group]  # number of the problem, and its reply, replies, or those of an episode
Rewards = dict[str, float]  # by name; "return" is what training maximizes


EpisodeKey = tuple[int, int]  # problem and seed


def episode_key(job: Job) -> EpisodeKey | None:
    """Returns the episode that a job belongs to; None for a single reply."""
    index, reply = job
    return (index, reply.seed) if isinstance(reply, Turns) else None


def heard(said: int, step: Step) -> int:
    """Returns the digest of an environment's observations, this step included."""
    return zlib.crc32(json.dumps(step.messages).encode(), said) if step.messages else said


FAILURES = ("reward_timeouts", "reward_errors")


class Failure(NamedTuple):
    """The reason why a reply has no rewards."""

    kind: str  # one of FAILURES
    reason: str  # may quote the reply: only its repr may reach a terminal
    remedy: str = ""  # what to do; empty: that of its kind


Outcome = Rewards | Step | Failure
Outcomes = list[Rewards | Failure]  # outcomes of a group
JSONOutcome = list[object]  # kind and fields of an outcome


def outcome_to_json(outcome: Outcome | Outcomes) -> JSONOutcome:
    """Returns an outcome as numbers, texts and lists: reading a worker's message must not execute anything."""
    if isinstance(outcome, list):
        return ["list", *map(outcome_to_json, outcome)]
    fields = [outcome] if isinstance(outcome, dict) else outcome
    return [type(outcome).__name__, *fields]


def outcome_from_json(values: JSONOutcome) -> Outcome | Outcomes:
    """Returns an outcome. Raises: KeyError, TypeError or ValueError for anything else."""
    kind, *fields = values
    if kind == "list":
        return [outcome_from_json(each) for each in fields]
    if kind == "Failure":
        name, *texts = fields
        return Failure(FAILURES[FAILURES.index(name)], *map(str, texts))  # ValueError for another name
    return {"dict": checked_return, "Step": lambda *x: checked_step(Step(*x))}[kind](*fields)


def job_size(job: Job) -> int:
    """Returns how many replies a job grades."""
    return len(job[1].replies) if isinstance(job[1], Group) else 1


class ScorerSettings(NamedTuple):
    """Settings of the helper, the first message. `tokens`: variables for the making of the environment only."""

    env_name: str
    env_options: Mapping[str, str | int | float | bool]
    num_workers: int
    timeout: float
    max_error_share: float
    tokens: Mapping[str, str] = {}
    max_memory: int = MAX_MEMORY


class BrokenEnvironment(RuntimeError):
    """No worker can make the environment."""


def serve(fd: int) -> None:
    """Starts workers, then does the jobs of a run until the other end of the pipe is closed, and ends all it started.

    The run sends jobs by number, at any time. The helper sends outcomes by number as they come. An empty message means
    that the environment is made, and None is a sign of life. Before it ends by an error, it sends the error.
    """
    run = Connection(fd)
    adopt_orphans()
    pool = WorkerPool(run, run.recv())
    try:
        try:
            pool.work()
        except (BrokenEnvironment, OSError) as error:  # OSError: no process or pipe can be made
            run.send(str(error))
    except (EOFError, OSError):
        pass  # the run has ended
    finally:
        pool.stop()


def max_failures(num_jobs: int, max_error_share: float) -> int:
    """Returns how many replies may have no rewards before the reward itself must be wrong."""
    return max(int(max_error_share * num_jobs), 8)


def limit_waits(connection: Connection, seconds: int) -> None:
    """Makes a send or a receive raise BlockingIOError after so many seconds without progress."""
    seconds = struct.pack("ll", seconds, 0)
    with socket.socket(fileno=os.dup(connection.fileno())) as end:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, seconds)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, seconds)


# the helper


@dataclass
class Worker:
    """A worker as the helper sees it: its keeper's process id, and the jobs of the chunk that it is at."""

    pid: int
    connection: Connection
    heard: float = field(default_factory=time.monotonic)  # when it began, got the chunk, or sent a message
    chunk: Sequence[int] = ()
    first: int = 0  # number of the first message on the chunk: random, so that a reward cannot guess it
    is_begun: bool = False  # the worker has told that it takes the chunk
    num_done: int = 0  # jobs of the chunk whose outcome has come; the worker is at the next one
    num_chunks: int = 0
    started: float = 0.0  # when it got the chunk
    is_ready: bool = False  # has made the environment
    exit_code: int | None = None
    closed: float = math.inf  # when its connection was found to be closed
    memory_checked: float = 0.0
    received: bytes = b""  # part of a message that is not complete

    def read(self) -> list[bytes]:
        """Returns the whole messages that have come. Raises: EOFError or OSError when there will be no more."""
        data = os.read(self.connection.fileno(), 2**20)
        if not data:
            raise EOFError
        *messages, self.received = (self.received + data).split(b"\n")
        return messages


@dataclass
class WorkerPool:
    """Workers, and the request that they are at."""

    run: Connection
    settings: ScorerSettings
    workers: list[Worker] = field(default_factory=list)
    jobs: dict[int, Job] = field(default_factory=dict)  # jobs without an outcome yet, by number
    queue: deque[int] = field(default_factory=deque)  # numbers of the jobs that no worker has
    outcomes: dict[int, Outcome] = field(default_factory=dict)  # outcomes that the run has not received
    homes: dict[EpisodeKey, int] = field(default_factory=dict)  # process that has played an episode so far
    num_jobs: int = 0  # jobs since the pool was last empty
    num_lost: int = 0  # replies among them that exceeded their time or ended their worker
    num_idle_ends: int = 0
    alone: set[int] = field(default_factory=set)  # jobs one of which has spoiled a message: each becomes a chunk
    num_unmade: int = 0  # workers in a row that could not make the environment
    traits: dict[str, bool] = field(default_factory=dict)  # properties of the environment
    job_seconds: float = math.inf  # time of a job in the last chunk
    last_alive: float = 0.0

    def work(self) -> None:
        """Does jobs until the run ends.

        Raises: EOFError when the run has ended, BrokenEnvironment when a worker cannot make the environment.
        """
        is_ready = False
        next_check = 0.0
        while True:
            if is_ready and not self.jobs:
                self.num_jobs = self.num_lost = self.num_idle_ends = 0
                self.alone.clear()
                self.take_jobs()
            self.hand_out()
            self.listen()
            if time.monotonic() >= next_check:
                self.enforce_limits()
                next_check = time.monotonic() + CHECK_INTERVAL
            is_new = not is_ready and any(worker.is_ready for worker in self.workers)
            is_ready |= is_new
            if is_new:
                self.run.send(self.traits)
            if self.outcomes:
                self.run.send(self.outcomes)
                self.outcomes = {}

    def take_jobs(self) -> None:
        """Receives jobs, or waits for some. Raises: EOFError when the run has ended."""
        jobs = self.run.recv()
        self.jobs |= jobs
        self.queue += jobs
        self.num_jobs += sum(map(job_size, jobs.values()))

    def hand_out(self) -> None:
        """Starts workers that are missing, and gives a chunk of the queue to each that has none."""
        while len(self.workers) < self.settings.num_workers:
            inherited = [self.run, *(worker.connection for worker in self.workers)]
            self.workers.append(start_worker(self.settings, inherited))
        for worker in self.workers:
            if self.queue and worker.is_ready and not worker.chunk and worker.closed == math.inf:
                worker.chunk = self.take_chunk(worker)
                if not worker.chunk:
                    continue
                worker.first, worker.is_begun, worker.num_done = secrets.randbits(60), False, 0
                worker.started = worker.heard = time.monotonic()
                try:
                    worker.connection.send((worker.first, [self.jobs[number] for number in worker.chunk]))
                except OSError:
                    worker.closed = time.monotonic()

    def take_chunk(self, worker: Worker) -> list[int]:
        """Takes jobs out of the queue: first of episodes that the worker plays, then of episodes without a worker."""
        size = math.ceil(len(self.queue) / len(self.workers))
        if size * self.job_seconds > QUICK:  # in smaller chunks, a message would take longer than its jobs
            size = math.ceil(size / 4)  # so that the last chunks are small
        size = min(size, MAX_CHUNK) if not self.alone else 1
        if not self.homes:
            chunk = [self.queue.popleft() for _ in range(size)]
        else:
            homes = {number: self.homes.get(episode_key(self.jobs[number])) for number in self.queue}
            possible = [number for number in self.queue if homes[number] in (worker.pid, None)]
            chunk = sorted(possible, key=lambda number: homes[number] is None)[:size]
            self.queue = deque(number for number in self.queue if number not in chunk)
        if len(self.homes) > MAX_HOMES:
            self.homes.clear()
        keys = [episode_key(self.jobs[number]) for number in chunk]
        self.homes |= {key: worker.pid for key in keys if key}
        return chunk

    def listen(self) -> None:
        """Receives messages of the run and the workers, after a short wait. Raises EOFError when the run has ended."""
        workers = {worker.connection: worker for worker in self.workers if worker.closed == math.inf}
        for connection in wait([self.run, *workers], timeout=CHECK_INTERVAL):
            if connection is self.run:
                self.take_jobs()
            else:
                self.receive(workers[connection])
        if time.monotonic() - self.last_alive > ALIVE_INTERVAL:
            self.run.send(None)
            self.last_alive = time.monotonic()

    def receive(self, worker: Worker) -> None:
        """Takes messages of a worker: traits of the environment or an error once it is made, outcomes from then on."""
        try:
            messages = worker.read()
        except (EOFError, OSError):
            worker.closed = time.monotonic()
            return
        try:
            if len(worker.received) > MAX_MESSAGE:
                raise ValueError("too long")
            for message in messages:
                self.take_message(worker, message)
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
            worker.closed = time.monotonic()
            left = worker.chunk[worker.num_done :]
            if len(left) > 1:  # any of them may have spoilt the message
                self.alone |= set(left)
                worker.is_begun = False
            self.replace_worker(worker, Failure("reward_errors", "it wrote into the connection of its process"))

    def take_message(self, worker: Worker, message: bytes) -> None:
        """Takes a message of a worker. Raises: KeyError, TypeError, ValueError and others for a malformed one."""
        if not worker.is_ready:
            values = json.loads(message)
            if isinstance(values, str):
                self.end_unmade(worker, values)
                return
            self.traits = dict(values)
            worker.is_ready = True
            self.num_unmade = 0
            return
        number, *values = json.loads(message)
        expected = worker.first + worker.is_begun + worker.num_done
        if not worker.chunk or number != expected or len(values) != worker.is_begun:
            raise ValueError("it is no message of what the worker is at")
        if worker.is_begun:
            job, outcome = worker.chunk[worker.num_done], outcome_from_json(*values)
            if not fits(self.jobs[job], outcome):
                raise ValueError("it is no outcome of what the worker is at")
            self.set_outcome(job, outcome)
            worker.num_done += 1
        worker.is_begun, worker.heard = True, time.monotonic()
        if worker.num_done == len(worker.chunk):
            self.job_seconds = (worker.heard - worker.started) / len(worker.chunk)
            worker.chunk = ()
            worker.num_chunks += 1
            if worker.num_chunks >= MAX_CHUNKS and worker.pid not in self.homes.values():
                self.remove(worker)

    def set_outcome(self, number: int, outcome: Outcome | Outcomes) -> None:
        """Sets the outcome of a job."""
        self.outcomes[number] = outcome
        self.alone.discard(number)
        key = episode_key(self.jobs.pop(number))
        if isinstance(outcome, Failure) or getattr(outcome, "done", False):
            self.homes.pop(key, None)

    def enforce_limits(self) -> None:
        """Replaces workers that have ended or exceed a limit."""
        self.reap_processes()
        for worker in list(self.workers):
            failure = self.find_failure(worker)
            if failure:
                self.replace_worker(worker, failure)

    def reap_processes(self) -> None:
        """Collects the exit codes of keepers that have ended, and of adopted orphans."""
        workers = {worker.pid: worker for worker in self.workers}
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    break
                if pid in workers:
                    workers[pid].exit_code = os.waitstatus_to_exitcode(status)

    def find_failure(self, worker: Worker) -> Failure | None:
        """Returns the reason why a worker must be replaced; None if there is none."""
        now = time.monotonic()
        if worker.exit_code is not None:
            return Failure("reward_errors", f"it ended its process with exit code {worker.exit_code}")
        if now - worker.closed > 1:  # a worker that ends closes its connection, a moment before its exit code is known
            return Failure("reward_errors", "it closed the connection of its process")
        if not worker.is_ready and now - worker.heard > MAKING:
            return Failure("reward_timeouts", f"it took longer than {MAKING} seconds")
        if worker.chunk:
            limit = self.settings.timeout * job_size(self.jobs[worker.chunk[worker.num_done]])
            if now - worker.heard > limit + (0 if worker.is_begun else MAX_IDLE):
                return Failure("reward_timeouts", f"it took longer than {limit:g} seconds")
        if worker.chunk and now - worker.memory_checked > MEMORY_INTERVAL:
            worker.memory_checked = now
            limit = self.settings.max_memory
            if tree_memory(worker.pid, limit) > limit:
                return Failure("reward_errors", f"its processes took more than {limit >> 20} MiB of memory")
        return None

    def replace_worker(self, worker: Worker, failure: Failure) -> None:
        """Replaces a worker: the reply that it was at fails, those not begun or not reported are queued again."""
        if not worker.is_ready:
            self.end_unmade(worker, f"the environment could not be made: {failure.reason}")
            return
        kill_tree(worker.pid)
        while worker.closed == math.inf and worker.connection.poll():
            self.receive(worker)
        if worker not in self.workers:  # it had just reported its last chunk
            return
        left = worker.chunk[worker.num_done :]
        lost = left[0] if left and worker.is_begun else None
        self.queue.extendleft(number for number in reversed(left) if number != lost)
        self.remove(worker)
        if lost is None:
            self.num_idle_ends += 1
            if self.num_idle_ends > MAX_IDLE_ENDS:
                raise BrokenEnvironment(f"processes end while they score nothing: {failure.reason}")
            return
        self.num_lost += job_size(self.jobs[lost])
        self.set_outcome(lost, failure)
        is_hopeless = self.num_lost > max_failures(self.num_jobs, self.settings.max_error_share)
        while is_hopeless and self.queue:  # if a reward always hangs, trying the rest would take hours
            failure = Failure("reward_timeouts", "too many other replies had failed to try it")
            self.set_outcome(self.queue.popleft(), failure)

    def end_unmade(self, worker: Worker, reason: str) -> None:
        """Ends a worker without an environment; raises BrokenEnvironment if none had one, or none gets one again."""
        self.num_unmade += 1
        if not self.traits or self.num_unmade > MAX_UNMADE:
            raise BrokenEnvironment(reason)
        self.remove(worker)

    def remove(self, worker: Worker) -> None:
        """Ends a worker and all that it started."""
        kill_tree(worker.pid)
        worker.connection.close()
        self.workers.remove(worker)
        self.homes = {key: pid for key, pid in self.homes.items() if pid != worker.pid}

    def stop(self) -> None:
        """Ends all workers (they close their environments first), and what rewards started in other sessions."""
        deadline = time.monotonic() + CLOSING
        for worker in self.workers:
            worker.connection.close()
        while any(worker.exit_code is None for worker in self.workers) and time.monotonic() < deadline:
            time.sleep(0.005)
            self.reap_processes()
        for worker in list(self.workers):
            self.remove(worker)
        kill_descendants(os.getpid())


# keepers and workers


def start_worker(settings: ScorerSettings, inherited: Sequence[Connection]) -> Worker:
    """Forks a keeper, which forks a worker; both close `inherited`, the connections of the helper."""
    ours, theirs = Pipe()
    limit_waits(ours, WORKER_STALL)
    helper = os.getpid()
    pid = os.fork()
    if pid:
        theirs.close()
        return Worker(pid, ours)
    try:
        end_with_parent(helper)
        for connection in (ours, *inherited):
            connection.close()
        run_keeper(theirs, settings)
    finally:
        os._exit(1)


def run_keeper(connection: Connection, settings: ScorerSettings) -> None:
    """Runs a keeper: forks a worker, waits for its end, kills the processes that it leaves, and exits with its code.

    An exit code of 128 + n means signal n, as in shells.
    """
    os.setsid()  # rewards that signal their process group reach this one, and no other worker
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    adopt_orphans()
    keeper = os.getpid()
    worker = os.fork()
    if not worker:
        try:
            end_with_parent(keeper)
            run_worker(connection, settings)
        finally:
            os._exit(1)
    connection.close()
    pid = status = 0
    while pid != worker:
        pid, status = os.wait()
    kill_descendants(keeper)
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)


def run_worker(connection: Connection, settings: ScorerSettings) -> None:
    """Runs a worker: makes the environment, then scores chunks until the connection is closed."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    sys.stdout, sys.stderr = (io.TextIOWrapper(Printed(fd), "utf-8", "replace", write_through=True) for fd in (1, 2))
    limit_memory(settings.max_memory)
    try:
        os.environ.update(settings.tokens)
        env = make_environment(settings.env_name, settings.env_options)
        for name in settings.tokens:
            os.environ.pop(name, None)
    except BaseException as error:  # noqa: BLE001 (environments are other people's code)
        send_json(connection, str(error) if isinstance(error, UserError) else describe_failure(error))
        return
    send_json(connection, {"takes_groups": env.takes_groups})
    episodes = EpisodeCache()
    with contextlib.suppress(EOFError, OSError):
        while True:
            score_chunk(env, episodes, *connection.recv(), connection)
    episodes.close()
    env.close()


class Printed(io.RawIOBase):
    """Writes what a reward prints by whole lines, which may quote a reply, over the progress of a terminal."""

    def __init__(self, fd: int):
        self.fd, self.pending = fd, ""
        self.start = "\r\x1b[Kreward: " if os.isatty(fd) else "reward: "

    def write(self, data: memoryview) -> int:
        *lines, self.pending = (self.pending + bytes(data).decode(errors="replace")).split("\n")
        self.pending = self.pending[:MAX_PRINTED]
        with contextlib.suppress(OSError):  # nobody reads any longer
            for line in lines:
                os.write(self.fd, f"{self.start}{on_one_line(line.expandtabs()[:MAX_PRINTED])}\n".encode())
        return len(data)

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self.fd


def send_json(connection: Connection, message: object) -> None:
    """Sends a message of a worker, a line: what a reward writes into the connection spoils one of them at most."""
    data = json.dumps(message).encode() + b"\n"
    while data:
        data = data[os.write(connection.fileno(), data) :]


def score_chunk(env: Env, episodes: "EpisodeCache", first: int, jobs: Sequence[Job], connection: Connection) -> None:
    """Scores replies: sends `first` before them, and the outcome of each before it begins the next one."""
    problem = functools.cache(env.problem)  # the replies of a group share theirs
    send_json(connection, [first])
    for number, (index, reply) in enumerate(jobs, first + 1):
        send_json(connection, [number, outcome_to_json(score_reply(env, episodes, problem, index, reply))])


def score_reply(
    env: Env, episodes: "EpisodeCache", problem: Callable[[int], Problem], index: int, reply: str | Turns | Group
) -> Outcome | Outcomes:
    """Returns the rewards of a reply or of a group, the response to a turn, or the reason why there is none."""
    worker = os.getpid()
    try:
        if isinstance(reply, Turns):
            outcome = episodes.play(env, problem, index, reply)
        elif isinstance(reply, Group):
            outcome = score_group(env, problem(index), reply.replies)
        else:
            outcome = checked_return(env.score(problem(index), reply))
    except BaseException as error:  # noqa: BLE001 (rewards are other people's code)
        outcome = Failure("reward_errors", describe_failure(error))
    if os.getpid() != worker:  # a child that the reward has forked, and that came back out of it
        os._exit(0)
    return outcome


def score_group(env: Env, problem: Problem, texts: Sequence[str]) -> Outcomes:
    """Returns the rewards of replies that are graded together; of those that raise alone, the reason.

    Raises: what the reward raises for the others together.
    """
    try:
        return list(map(checked_return, env.score_group(problem, texts)))
    except Exception as error:
        failures = {place: score_alone(env, problem, text) for place, text in enumerate(texts)}
        failures = {place: outcome for place, outcome in failures.items() if isinstance(outcome, Failure)}
        if not failures or len(failures) == len(texts):
            raise error from None
        left = [text for place, text in enumerate(texts) if place not in failures]
        scores = iter(list(map(checked_return, env.score_group(problem, left))))
        return [failures.get(place) or next(scores) for place in range(len(texts))]


def score_alone(env: Env, problem: Problem, text: str) -> Rewards | Failure:
    """Returns the rewards of one reply of a group, or the reason why there are none."""
    try:
        return checked_return(env.score(problem, text))
    except Exception as error:  # of the reward
        return Failure("reward_errors", describe_failure(error))


class EpisodeCache:
    """Episodes that a worker has played so far, by problem, seed and replies; other episodes are played again."""

    def __init__(self):
        self.episodes: dict[tuple[int, int, tuple[Reply, ...]], Episode] = {}

    def play(self, env: Env, problem: Callable[[int], Problem], index: int, turns: Turns) -> Step:
        """Returns the response to the last turn; without a turn it begins anew, and returns the opening."""
        replies, is_opening = turns.replies, not (turns.replies or turns.is_truncated)
        before = replies if turns.is_truncated else replies[:-1]
        episode = self.episodes.pop((index, turns.seed, before), None)
        if episode and is_opening:
            episode.close()
        is_new = not episode or is_opening
        if is_new:
            episode = env.episode(replace(problem(index), seed=turns.game), turns.seed)
        try:
            if is_new:
                catch_up(episode, before, turns.said)
            step = opening(episode) if is_opening else answer(episode, None if turns.is_truncated else replies[-1])
        except BaseException:
            episode.close()
            raise
        if step.done:
            episode.close()
            return step
        self.episodes[index, turns.seed, replies] = episode
        if len(self.episodes) > MAX_EPISODES:
            self.episodes.pop(next(iter(self.episodes))).close()
        return step

    def close(self) -> None:
        """Ends all episodes."""
        for episode in self.episodes.values():
            episode.close()


def catch_up(episode: Episode, replies: Sequence[Reply], said: int) -> None:
    """Plays turns again. Raises: ValueError if the environment responds differently than before."""
    digest = heard(0, opening(episode)) if episode.opening else 0
    for reply in replies:
        digest = heard(digest, answer(episode, reply))
    if said not in (0, digest):
        raise ValueError(
            "its process was lost, and when the episode was played again, the environment returned other messages"
        )


def opening(episode: Episode) -> Step:
    """Returns the opening of an episode: its prompt. Raises: TypeError if it is no list of messages."""
    try:
        return checked_step(Step(list(episode.opening)))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        said = f"{type(episode).__name__}.opening is {episode.opening!r:.200}"
        raise TypeError(f"{said}: it must be a list of messages with role and content") from error


def answer(episode: Episode, reply: Reply | None) -> Step:
    """Returns the response to a turn; without a turn, the reward that is left at a limit.

    Raises: TypeError that names the method, its line and its file, if the method returned no Step.
    """
    step = episode.truncate() if reply is None else episode.act(reply)
    own = episode.truncate if reply is None else episode.act if type(episode).act is not Episode.act else episode.step
    if not isinstance(step, Step):
        raise wrong_return(own, step, STEP_FORM)
    try:
        return checked_step(limited(step))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise wrong_return(own, tuple(step), f"{STEP_FORM} ({error})") from error


def checked_rewards(rewards: Mapping[str, float]) -> Rewards:
    """Returns rewards as plain numbers. Raises: ValueError for a name that a file of them cannot hold."""
    for name in rewards:
        if len(str(name)) > MAX_NAME or valid_text(name) != str(name):
            raise ValueError(f"{name!r:.100} is no name of a reward: take at most {MAX_NAME} characters of text")
        if name in TAKEN:
            raise ValueError(f"the log has an env/{name} of its own: give this part of the reward another name")
    return {str(name): float(value) for name, value in rewards.items()}


def checked_return(rewards: Mapping[str, float]) -> Rewards:
    """Returns rewards as plain numbers. Raises: ValueError as `checked_rewards`, and for a return out of bounds."""
    numbers = checked_rewards(rewards)
    checked_number("return", numbers["return"], may_lack=NOT_APPLICABLE in numbers)
    return numbers


def checked_number(name: str, value: float, may_lack: bool = False) -> float:
    """Returns a number, NaN for none if it `may_lack`.

    Raises: ValueError for one that is not finite, or too large for sums in float32.
    """
    number = float(value)
    if not (abs(number) <= MAX_REWARD or (may_lack and math.isnan(number))):
        raise ValueError(f"the {name} is {number}, not from {-MAX_REWARD:g} to {MAX_REWARD:g}")
    return number


def checked_step(step: Step) -> Step:
    """Returns a step with numbers and texts of plain types.

    Raises: ValueError for a reward that is not finite, and for a step without messages that does not end the episode.
    """
    messages = [{"role": str(message["role"]), "content": valid_text(message["content"])} for message in step.messages]
    info = checked_rewards(step.info)
    may_lack = NOT_APPLICABLE in info
    for name, value in info.items():
        checked_number(name, value, may_lack)
    if not messages and not step.done:
        raise ValueError("the environment returns no message, and does not end the episode")
    return Step(messages, checked_number("reward of a turn", step.reward, may_lack), bool(step.done), info)


def fits(job: Job, outcome: Outcome | Outcomes) -> bool:
    """True if an outcome may be that of a job."""
    if isinstance(outcome, list):
        return len(outcome) == job_size(job) and isinstance(job[1], Group)
    return isinstance(outcome, Failure) or isinstance(outcome, Step) == isinstance(job[1], Turns)


def valid_text(content: object) -> str:
    """Returns a text with "?" for halves of surrogate pairs, which no tokenizer takes."""
    return str(content).encode(errors="replace").decode()


def describe_failure(error: BaseException) -> str:
    """Returns an error in 500 characters at most, even one that cannot be printed, and its line in code of the user."""
    try:
        return f"{type(error).__name__}: {error}"[:500] + user_line(error)
    except Exception:
        return type(error).__name__


def user_line(error: BaseException) -> str:
    """Returns the last line outside of this repository's packages and of installed ones that an error came through."""
    own = [str(ROOT / package) for package in ("core", "envs", "utils")]
    # Not by extract_tb, which reads the files: a reward may raise for many replies.
    lines = [(frame.f_code.co_filename, number) for frame, number in traceback.walk_tb(error.__traceback__)]
    lines = [line for line in lines if not line[0].startswith((*own, sys.prefix, sys.base_prefix, "<"))]
    return " (line {1} of {0})".format(*lines[-1]) if lines else ""


def make_environment(name: str, options: Mapping[str, str | int | float | bool]) -> Env:
    """Returns the environment of this name, or the one that a function "module:function" returns."""
    if ":" not in name:
        return make_env(name, **options)
    module, function = name.split(":")
    return getattr(importlib.import_module(module), function)(**options)
