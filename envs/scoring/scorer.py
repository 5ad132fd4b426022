"""Grades replies in worker processes, in which a reward may hang, crash or raise without harming the run.

    with Scorer("countdown", timeout=10) as scorer:
        rewards, counts = scorer.score_replies([0, 0, 1], ["<answer>1+2</answer>", "hm", "..."])

The workers belong to one helper process, a program of its own (envs/scoring/helper.py), because a process that runs JAX
must not fork. Multiprocessing's other ways import the main script in every worker, and jax with it: 165 MB each, and
3.2 s until two of them are ready. The helper never imports jax, so its workers can fork from it. Its pipe is the
lifeline: when the run ends, however it ends, the pipe closes, and the helper ends its workers and itself.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from itertools import groupby, islice
from multiprocessing.connection import Connection, Pipe, wait
from operator import itemgetter
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Self, TypeVar

from envs.own_code import ROOT, passed_variables, variable_note
from envs.scoring.helper import (
    ALIVE_INTERVAL,
    STALL,
    Failure,
    Group,
    Job,
    Outcome,
    Outcomes,
    Rewards,
    ScorerSettings,
    job_size,
    limit_waits,
    max_failures,
)
from envs.scoring.patience import HURRY, Patience
from envs.scoring.processes import kill_tree, send_signal
from utils.files import open_log
from utils.settings.errors import UserError

HELPER = "import sys; sys.path[0] = sys.argv[1]; from envs.scoring.helper import serve; serve(int(sys.argv[2]))"
MAX_WRITTEN = 100  # failures that are written to a file
MAX_LOST = 16  # helpers in a row that are lost without an outcome

TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HUGGINGFACE_HUB_TOKEN")  # for private data sets
Held = TypeVar("Held", bound=contextlib.AbstractContextManager)
Scored = tuple[int, str | list[dict[str, str]]]  # number of a problem, and the reply to it or the conversation
GradedReplies = tuple[list[Rewards | None], dict[str, int]]  # rewards of each, None: a failure; failures by kind


class Scorer:
    """Scores replies to the problems of one environment; use it as a context manager, from one thread at a time.

    `env_name` is a name of `make_env`'s table, or "module:function" of a function that makes an Env.
    `num_workers` 0 is one for each core, at most 16. `timeout` is the limit for one reply, in seconds.
    `failures_dir` receives reward_failures.jsonl: the first replies that could not be scored, and why.

    Raises: UserError when the environment cannot be made.
    """

    has_scored = False  # a reply of the run
    takes_groups = False  # all replies to a problem are graded by one call
    parts: Set[str] = frozenset()  # names of the rewards, as far as the replies that were tried show them

    def __init__(
        self,
        env_name: str,
        env_options: Mapping[str, str | int | float | bool] | None = None,
        *,
        num_workers: int = 0,
        timeout: float = 10.0,
        failures_dir: str | Path | None = None,
        max_error_share: float = 0.5,
    ):
        num_workers = num_workers or min(os.cpu_count() or 1, 16)
        tokens = {name: os.environ[name] for name in TOKENS if name in os.environ}
        self.settings = ScorerSettings(
            env_name=env_name,
            env_options=dict(env_options or {}),
            num_workers=num_workers,
            timeout=timeout,
            max_error_share=max_error_share,
            tokens=tokens,
        )
        self.failures_file = Path(failures_dir) / "reward_failures.jsonl" if failures_dir else None
        self.num_failures = 0
        self.unfinished: dict[int, Job] = {}
        self.in_flight: set[int] = set()  # of these, jobs that the helper has
        self.window = sys.maxsize  # how many jobs it may have: few after it was lost, to find the one at fault
        self.suspected: set[int] = set()  # jobs that the last lost helper had
        self.num_replaced = 0  # helpers since the last outcome
        self.is_closed = False
        self.held: contextlib.AbstractContextManager | None = None
        self.start()

    def score_replies(self, indices: Sequence[int], texts: Sequence[str]) -> GradedReplies:
        """Returns the rewards of each reply, and counts of failures: "reward_timeouts" and "reward_errors".

        A reply that exceeded its time limit, killed its worker or made the reward raise has None instead of rewards.

        Raises: UserError when more than `max_error_share` of the replies (and more than 8) got none: then the reward
        is wrong, not the replies.
        """
        jobs = [(int(index), text) for index, text in zip(indices, texts, strict=True)]
        asked = grouped(jobs) if self.takes_groups else jobs
        return self.check_failures(jobs, ungrouped(asked, self.request_outcomes(asked)))

    def check_reward(self, jobs: list[Job]) -> None:
        """Raises UserError if all of these jobs fail, unless `max_error_share` allows it: the reward is wrong."""
        outcomes = ungrouped(jobs, self.request_outcomes(jobs))
        self.parts = {name for outcome in outcomes for name in parts_of(outcome)}
        failures = [outcome for outcome in outcomes if isinstance(outcome, Failure)]
        if len(failures) == len(outcomes) and self.settings.max_error_share < 1:
            reason = failures[0].reason
            raise UserError(
                f"{self.settings.env_name}: the {blamed(jobs)} fails for each of {len(outcomes)} replies that were "
                f"tried, {reason}: correct it{variable_note(reason)}"
            )

    def repeats(self, jobs: list[Job]) -> bool:
        """True if episodes return the same messages when these jobs are done again."""
        first, again = self.request_outcomes(jobs), self.request_outcomes(jobs)
        pairs = [pair for pair in zip(first, again, strict=True) if not any(isinstance(x, Failure) for x in pair)]
        return all(a.messages == b.messages for a, b in pairs)

    def check_failures(self, jobs: Sequence[Scored], outcomes: Sequence[Outcome]) -> GradedReplies:
        """Returns the rewards and counts of `score_replies` from the outcome of each job; raises the same errors."""
        failures = []
        counts = {"reward_timeouts": 0, "reward_errors": 0}
        for job, outcome in zip(jobs, outcomes, strict=True):
            if isinstance(outcome, Failure):
                failures.append((job, outcome))
                counts[outcome.kind] += 1
        self.report_failures(failures)
        self.has_scored |= len(failures) < len(jobs)
        fails_always = bool(jobs) and not self.has_scored and self.settings.max_error_share < 1
        if fails_always or len(failures) > max_failures(len(jobs), self.settings.max_error_share):
            kind, reason, remedy = failures[0][1]
            written = f" (see {self.failures_file})" if self.failures_file else ""
            remedy = remedy or ("raise --score_timeout" if kind == "reward_timeouts" else "correct it")
            what = blamed(jobs)
            raise UserError(
                f"the {what} failed for {len(failures)} of {len(jobs)} replies, first by {reason!r}{written}: "
                f"{remedy}, or handle the failure within the {what}{variable_note(reason)}"
            )
        return [None if isinstance(outcome, Failure) else outcome for outcome in outcomes], counts

    def report_failures(self, failures: Sequence[tuple[Scored, Failure]]) -> None:
        """Warns about the first failure of the run, and writes the first MAX_WRITTEN ones to a file."""
        if failures and not self.num_failures:
            where = f"; see {self.failures_file}" if self.failures_file else ""
            print(f"warning: a reply got no score: {failures[0][1].reason!r}{where}.", file=sys.stderr)
        num_writable = max(0, MAX_WRITTEN - self.num_failures)
        self.num_failures += len(failures)
        if failures[:num_writable] and self.failures_file:
            self.failures_file.parent.mkdir(parents=True, exist_ok=True)
            with open_log(self.failures_file) as file:
                for (index, reply), failure in failures[:num_writable]:
                    record = {"env": self.settings.env_name, "problem": index, "reason": failure.reason}
                    record["text" if isinstance(reply, str) else "messages"] = reply
                    file.write(json.dumps(record) + "\n")

    def request_outcomes(self, jobs: list[Job]) -> list[Outcome | Outcomes]:
        """Returns the outcome of each job; empty when the scorer closes. Raises: RuntimeError, see `receive`."""
        outcomes: dict[int, Outcome] = {}
        self.send(dict(enumerate(jobs)))
        while self.unfinished:
            outcomes |= self.receive()
            if self.is_closed:
                return []
        return [outcomes[number] for number in range(len(jobs))]

    def send(self, jobs: dict[int, Job]) -> None:
        """Starts jobs, by numbers that no unfinished job has."""
        self.unfinished |= jobs
        self.hand_out()

    def hand_out(self) -> None:
        """Gives the helper jobs that it has not, as many as the window has room for."""
        room = min(self.window, len(self.unfinished)) - len(self.in_flight)
        if room <= 0:
            return
        waiting = (number for number in self.unfinished if number not in self.in_flight)
        jobs = {number: self.unfinished[number] for number in islice(waiting, room)}
        self.in_flight |= jobs.keys()
        try:
            self.connection.send(jobs)
        except OSError:
            pass  # the helper is lost, which `receive` notices

    def receive(self, wakeup: Connection | None = None) -> dict[int, Outcome | Outcomes]:
        """Returns outcomes of jobs as they come, by number; none when `wakeup` can be read, or when the scorer closes.

        A helper that is lost or stuck is replaced. The new one gets the unfinished jobs again, ever fewer at a time,
        until the job that ends it is found; this job fails.
        Raises: UserError when helpers are lost without end, or cannot make the environment.
        """
        try:
            reply = self.receive_reply(wakeup)
        except TimeoutError as error:
            reply = str(error)
        except (EOFError, OSError):
            reply = "the helper process was lost; is there enough memory?"
        if self.is_closed:
            return {}
        if isinstance(reply, str):
            reply = self.replace_helper(reply)
        elif reply:
            self.num_replaced = 0
        for number in reply:
            del self.unfinished[number]
            self.in_flight.discard(number)
        if reply and not self.in_flight:
            self.window = min(4 * self.window, sys.maxsize)
        self.hand_out()
        return reply

    def replace_helper(self, reason: str) -> dict[int, Failure]:
        """Starts another helper; returns the failure of a job that was alone with two lost ones in a row.

        Raises: UserError for the last of MAX_LOST in a row.
        """
        self.num_replaced += 1
        if self.num_replaced > MAX_LOST:
            raise UserError(
                f"grading failed {MAX_LOST} times in a row ({reason}): correct the reward or the environment"
            )
        print(f"warning: the process that scores is started again: {reason}", file=sys.stderr)
        suspected, before = self.in_flight, self.suspected
        self.in_flight, self.suspected = set(), suspected
        self.window = max(1, len(suspected) // 4)
        self.kill()
        self.start()
        if len(suspected) == 1 and suspected == before:
            return dict.fromkeys(suspected, Failure("reward_errors", "it ended or stopped the process that scores"))
        return {}

    def receive_reply(self, wakeup: Connection | None = None) -> dict[int, Outcome] | str:
        """Returns the helper's reply: outcomes, or an error; no outcomes when `wakeup` can be read.

        Raises: EOFError or OSError when the helper is lost or the scorer closes; TimeoutError when it gives no sign of
        life for STALL seconds.
        """
        last_alive = time.monotonic()
        connections = [self.connection, *filter(None, [wakeup])]
        while time.monotonic() - last_alive < STALL:
            if self.is_closed:
                raise EOFError
            if time.monotonic() - last_alive > 2 * ALIVE_INTERVAL and self.process.poll() is None:
                send_signal(self.process.pid, signal.SIGCONT)  # a reward may have stopped it
            ready = wait(connections, timeout=0.1)
            if self.connection in ready:
                reply = self.connection.recv()
                if reply is not None:
                    return reply
                last_alive = time.monotonic()
            elif ready:
                return {}
        raise TimeoutError(f"the helper process gave no sign of life for {STALL} seconds")

    def start(self) -> None:
        """Starts the helper and waits until its workers have made the environment."""
        self.connection, theirs = Pipe()
        limit_waits(self.connection, STALL)
        command = [sys.executable, "-c", HELPER, str(ROOT), str(theirs.fileno())]
        # Its own session, since Ctrl-C is for the run, which then closes the pipe.
        self.process = subprocess.Popen(
            command,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env=passed_variables(os.environ),
        )
        theirs.close()
        try:
            self.connection.send(self.settings)
            reply = self.receive_reply()
        except (EOFError, OSError) as error:
            self.kill()
            raise RuntimeError("The helper process for scoring did not start; it says above why.") from error
        if isinstance(reply, str):
            self.close()
            raise UserError(f"{self.settings.env_name}: {reply}{variable_note(reply)}")
        self.takes_groups = reply["takes_groups"]

    def hold(self, make: Callable[[], Held]) -> Held:
        """Returns what `make` makes when it is first asked for; it is closed with the scorer."""
        if self.held is None:
            held = make()
            self.held = held.__enter__()
        return self.held

    def close(self) -> None:
        """Stops the workers; waits for 5 seconds at most, then kills them."""
        self.is_closed = True
        if self.held is not None:
            self.held.__exit__(None, None, None)
        self.connection.close()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """Ends the helper and everything it started, at once."""
        self.connection.close()
        if self.process.returncode is None:  # otherwise another process may have the number
            kill_tree(self.process.pid)
            self.process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        self.close()


def grouped(jobs: Sequence[Job]) -> list[Job]:
    """Returns replies to a problem that follow one another as a job."""
    return [(index, Group(tuple(reply for _, reply in group))) for index, group in groupby(jobs, key=itemgetter(0))]


def ungrouped(jobs: Sequence[Job], outcomes: Sequence[Outcome | Outcomes]) -> list[Outcome]:
    """Returns an outcome for each reply: a group that failed did so for all of its own."""
    pairs = zip(jobs, outcomes, strict=True)
    return [each for job, outcome in pairs for each in of_replies(outcome, job_size(job))]


def of_replies(outcome: Outcome | Outcomes, num_replies: int) -> Outcomes:
    """Returns the outcomes of the replies of a group: one for all is that of each."""
    return outcome if isinstance(outcome, list) else [outcome] * num_replies


def parts_of(outcome: Outcome) -> Iterable[str]:
    """Returns the names of the rewards of a reply, or of what a turn adds to them; none if it failed."""
    return outcome if isinstance(outcome, dict) else getattr(outcome, "info", ())


def blamed(jobs: Sequence[Job | Scored]) -> str:
    """Returns what grades these jobs, in a word."""
    are_episodes = any(not isinstance(reply, str | Group) for _, reply in jobs)
    return "environment" if are_episodes else "reward"


class ScoringStream:
    """Does jobs of one rollout in a thread, while others are sampled: a context manager.

    If rewards compare the replies to a problem, `group_size` replies wait for one another.
    """

    def __init__(self, scorer: Scorer, group_size: int = 1):
        self.scorer, self.group_size = scorer, group_size
        self.queue: SimpleQueue[dict[int, Job] | None] = SimpleQueue()  # None: no more
        self.wakeup, self.bell = Pipe(duplex=False)  # a byte for each item of the queue
        self.jobs: dict[int, Job] = {}  # the last of each row
        self.outcomes: dict[int, Outcome] = {}  # by row
        self.has_changed = threading.Condition()  # outcomes, or error
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self.work_until_closed, daemon=True)

    def add(self, jobs: dict[int, Job]) -> None:
        """Adds a job for each row; a row has one unfinished job at most."""
        self.jobs |= jobs
        self.put(self.whole_groups(jobs) if self.scorer.takes_groups else jobs)

    def whole_groups(self, jobs: Mapping[int, Job]) -> dict[int, Job]:
        """Returns the groups of these rows whose replies are all there, by their first rows."""
        groups = {}
        for first in {row - row % self.group_size for row in jobs}:
            replies = [self.jobs[row] for row in range(first, first + self.group_size) if row in self.jobs]
            if len(replies) == self.group_size:
                (groups[first],) = grouped(replies)
        return groups

    def put(self, jobs: dict[int, Job] | None) -> None:
        """Puts jobs into the queue, and wakes the thread."""
        self.queue.put(jobs)
        self.bell.send_bytes(b".")

    def work_until_closed(self) -> None:
        """Sends jobs and receives outcomes until None is in the queue and all are there; runs in the thread."""
        try:
            is_open = True
            while is_open or self.scorer.unfinished:
                additions = self.take_additions(is_blocking=not self.scorer.unfinished)
                if self.error:
                    break  # the block was left: the scorer may be at other jobs already
                is_open &= None not in additions
                self.scorer.send({row: job for jobs in additions if jobs for row, job in jobs.items()})
                if self.scorer.unfinished:
                    self.publish(self.scorer.receive(self.wakeup))
                if self.scorer.is_closed:
                    raise EOFError("the scorer was closed")
        except BaseException as error:  # noqa: BLE001 (raised again by `finish` and `take`)
            self.publish({}, error)

    def take_additions(self, is_blocking: bool) -> list[dict[int, Job] | None]:
        """Returns the queue's items; waits for one if it `is_blocking`."""
        additions = []
        while self.wakeup.poll(None if is_blocking and not additions else 0):
            self.wakeup.recv_bytes()
            additions.append(self.queue.get())
        return additions

    def publish(self, outcomes: Mapping[int, Outcome | Outcomes], error: BaseException | None = None) -> None:
        """Gives outcomes, or an error, to waiting threads."""
        if outcomes and self.scorer.takes_groups:
            groups = {first: of_replies(outcome, self.group_size) for first, outcome in outcomes.items()}
            outcomes = {first + i: outcome for first, group in groups.items() for i, outcome in enumerate(group)}
        with self.has_changed:
            self.outcomes |= outcomes
            self.error = self.error or error
            self.has_changed.notify_all()

    def take(self, rows: Set[int], num_needed: int = 0, patience: Patience = HURRY) -> dict[int, Outcome]:
        """Removes and returns the outcomes of these rows that are there, by row.

        It waits until there are `num_needed`, then for the others while it has `patience`.
        """

        def num_come() -> int:
            return len(rows & self.outcomes.keys())

        with self.has_changed:
            self.has_changed.wait_for(lambda: self.error or num_come() >= num_needed)
            patience.wait(self.has_changed, num_come, lambda: self.error or rows <= self.outcomes.keys())
            if self.error:
                raise self.error
            return {row: self.outcomes.pop(row) for row in sorted(rows & self.outcomes.keys())}

    def finish(self) -> dict[int, tuple[Job, Outcome]]:
        """Returns the job and the outcome of each row, once all are there; raises the error of the thread."""
        self.put(None)
        self.thread.join()
        if self.error:
            raise self.error
        return {row: (self.jobs[row], outcome) for row, outcome in self.outcomes.items()}

    def __enter__(self) -> Self:
        self.thread.start()
        return self

    def __exit__(self, _, error: BaseException | None, traceback: TracebackType | None) -> None:
        if error is not None:  # a signal may have left a chain behind, unknown to its pool, that waits for outcomes
            self.publish({}, error)
        self.put(None)
        if error is None:  # after an error, jobs may still run, which `Scorer.close` ends
            self.thread.join()
