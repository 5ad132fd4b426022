"""Grades replies in processes of their own, in which a reward may hang, crash or raise without harming the run.

    with Scorer("countdown", timeout=10) as scorer:
        rewards, counts = scorer.score_replies([0, 0, 1], ["<answer>1+2</answer>", "hm", "..."])

Each process is a lane (utils/processes.py) that runs `work` of envs/scoring/worker.py. A thread here hands it calls of
the grader. A process sends the outcome of each call before it begins the next one, so only the reply that exceeds its
time limit or ends the process is lost; the other calls that it was given are queued again.
"""

import json
import math
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import AbstractContextManager, ExitStack
from itertools import groupby
from pathlib import Path
from typing import NamedTuple, Self, TypeVar

from envs.scoring.worker import Failure, Outcome, Rewards, ScorerSettings, Turns, outcome_from_json
from utils.processes import MAX_MEMORY, Dead, Lane
from utils.settings.errors import UserError

MAX_CALLS = 32  # calls of a request: with a message for each reply, messages would take longer than quick graders
MAX_REPLIES = 32_000  # replies after which a process is replaced, since parsers of LaTeX cache without limit
MAX_LOST = 8  # processes of a lane in a row that end outside of a reply: the machine or the environment is at fault
MAX_WRITTEN = 100  # failures that are written to a file: enough to find the cause
MAKING = 600  # seconds in which an environment must be made; some read large data sets
BEGINNING = 30  # seconds in which an idle process must begin a request, even on a machine that swaps

Held = TypeVar("Held")
Job = tuple[int, str | Turns]  # number of a problem, and a reply to it, or the turns of an episode
Scored = tuple[int, str | list[dict[str, str]]]  # number of a problem, and the reply to it or the conversation
GradedReplies = tuple[list[Rewards | None], dict[str, int]]  # rewards of each, None: a failure; failures by kind


class GraderCall(NamedTuple):
    """A call of the grader: for one job, or for all replies to a problem if it takes groups."""

    stream: "ScoringStream"
    rows: tuple[int, ...]
    index: int  # number of the problem
    replies: tuple[str | Turns, ...]  # one for each row


class WaitForMore(NamedTuple):
    """How long rows that can be sampled wait for rows whose environment still computes.

    They wait for one more row while it comes sooner than their share of a computation's time.
    """

    seconds: float = 0.0  # that a computation takes
    num_there: int = 0  # rows that can be computed, without those that come

    def wait(self, has_changed: threading.Condition, num_come: Callable[[], int], is_all: Callable[[], bool]) -> None:
        """Waits, holding the lock of `has_changed`, for rows that come until `is_all`."""
        num_before = -1
        while not is_all() and num_come() > num_before:
            num_before = num_come()
            share = self.seconds / max(1, self.num_there + num_before)
            has_changed.wait_for(lambda: is_all() or num_come() > num_before, share)  # noqa: B023 (called at once)


NO_WAIT = WaitForMore()


class Scorer:
    """Scores replies to the problems of one environment; use it as a context manager.

    `env_name` is a name of `make_env`'s table, or "module:function" of a function that makes an Env. `num_workers` 0 is
    one process for each core, at most 16. `timeout` is the limit for one reply, in seconds. `failures_dir` receives
    reward_failures.jsonl: the first replies that could not be scored, and why. Raises: UserError without environment.
    """

    max_memory = MAX_MEMORY  # of a process and all that it starts
    takes_groups = False  # all replies to a problem are graded by one call
    has_scored = False  # a reply of the run
    parts: Set[str] = frozenset()  # names of the rewards, as far as the replies that were tried show them
    held: object = None  # see `hold`

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
        self.settings = ScorerSettings(env_name, dict(env_options or {}), timeout, max_error_share)
        self.failures_file = Path(failures_dir) / "reward_failures.jsonl" if failures_dir else None
        self.num_failures = 0
        self.resources = ExitStack()
        num_lanes = num_workers or min(os.cpu_count() or 1, 16)
        self.queues = [deque[GraderCall]() for _ in range(num_lanes + 1)]  # turns of each lane's episodes; all others
        self.lanes: dict[int, Lane] = {}
        self.num_lost = 0  # processes since the last outcome that ended outside of a reply
        self.is_ready = False  # one of them has made the environment
        self.error: BaseException | None = None  # ends the threads, and is raised wherever outcomes are waited for
        lock = threading.RLock()
        self.has_calls, self.has_outcomes = threading.Condition(lock), threading.Condition(lock)
        self.threads = [threading.Thread(target=self.run_lane, args=(i,), daemon=True) for i in range(num_lanes)]
        for thread in self.threads:
            thread.start()
        with self.has_outcomes:
            self.has_outcomes.wait_for(lambda: self.is_ready or self.error)
        if error := self.error:
            self.close()
            raise error

    # queues

    def put(self, calls: Iterable[GraderCall]) -> None:
        """Queues calls for the lanes. Raises: the error that has ended them."""
        with self.has_calls:
            if self.error:
                raise self.error
            for call in calls:
                self.queue_of(call).append(call)
            self.has_calls.notify_all()

    def queue_of(self, call: GraderCall) -> deque[GraderCall]:
        """Returns the queue of the lane that has played a row's episode so far; for replies, the one of all lanes."""
        return self.queues[call.rows[0] % len(self.threads) if isinstance(call.replies[0], Turns) else -1]

    def withdraw(self, stream: "ScoringStream") -> list[GraderCall]:
        """Removes the calls of a stream that no lane has taken, and returns them."""
        found = []
        with self.has_calls:
            for queue in self.queues:
                calls = [*queue]
                found += [call for call in calls if call.stream is stream]
                queue.clear()
                queue.extend(call for call in calls if call.stream is not stream)
        return found

    def take_calls(self, place: int) -> list[GraderCall]:
        """Returns calls for a lane, and waits for some; none if the scorer is closed."""
        own, shared = self.queues[place], self.queues[-1]
        with self.has_calls:
            self.has_calls.wait_for(lambda: own or shared or self.error)
            if self.error:
                return []
            size = len(own) or math.ceil(len(shared) / (4 * len(self.threads)))  # so that the last ones are small
            return [(own or shared).popleft() for _ in range(min(size, MAX_CALLS))]

    # lanes

    def run_lane(self, place: int) -> None:
        """Grades in a lane, and in another one when it ends, until the scorer is closed; runs in a thread."""
        try:
            while not self.error:
                lane, num_replies = self.open_lane(place), 0
                while num_replies < MAX_REPLIES:
                    calls = self.take_calls(place)
                    if not calls or not self.grade(lane, calls):
                        break
                    # Not turns: episodes must stay.
                    num_replies += sum(isinstance(reply, str) for call in calls for reply in call.replies)
                lane.close()
        except BaseException as error:  # noqa: BLE001 (raised again where outcomes are waited for)
            self.fail(error)

    def open_lane(self, place: int) -> Lane:
        """Starts a process and waits until it has made the environment. Raises: UserError if it cannot."""
        while True:
            lane = self.lanes[place] = Lane("envs.scoring.worker:work", self.settings, self.max_memory)
            traits = None if self.error else lane.answer(MAKING)
            if isinstance(traits, dict):
                with self.has_outcomes:
                    self.takes_groups, self.is_ready = traits["takes_groups"], True
                    self.has_outcomes.notify_all()
            if self.error or isinstance(traits, dict):
                return lane
            lane.close()
            reason = traits if isinstance(traits, str) else f"the environment could not be made: {traits.reason}"
            if not self.is_ready:
                raise UserError(f"{self.settings.env_name}: {reason}")
            self.count_lost(reason)

    def grade(self, lane: Lane, calls: Sequence[GraderCall]) -> bool:
        """Does calls in a lane. False: it has ended; the call that it was at failed, and the rest is queued again."""
        left = deque(calls)
        lane.send([(call.index, call.replies) for call in calls])
        begun = answer = lane.answer(BEGINNING)
        while left and not isinstance(answer, Dead):
            answer = lane.answer(self.settings.timeout * len(left[0].rows))
            if not isinstance(answer, Dead):
                self.num_lost = 0
                call = left.popleft()
                call.stream.publish(call.rows, map(outcome_from_json, answer))
        if not left or self.error:
            return not left
        lost = None if begun is answer else left.popleft()
        with self.has_calls:
            for call in reversed(left):
                if call.stream.is_open:
                    self.queue_of(call).appendleft(call)
            self.has_calls.notify_all()
        if lost is None:
            self.count_lost(answer.reason)
        else:
            self.lose(lost, Failure("reward_timeouts" if answer.is_late else "reward_errors", answer.reason))
        return False

    def lose(self, call: GraderCall, failure: Failure) -> None:
        """Gives up a call. If a reward always hangs, trying the rest would take hours: then they all fail."""
        stream = call.stream
        stream.num_lost += len(call.rows)
        self.num_lost = 0
        stream.publish(call.rows, [failure] * len(call.rows))
        if stream.num_lost > max_failures(stream.num_replies, self.settings.max_error_share):
            failure = Failure("reward_timeouts", "too many other replies had failed to try it")
            for other in self.withdraw(stream):
                stream.publish(other.rows, [failure] * len(other.rows))

    def count_lost(self, reason: str) -> None:
        """Counts a process that has ended outside of a reply. Raises: UserError for too many in a row."""
        self.num_lost += 1
        if self.num_lost > MAX_LOST * len(self.threads):
            raise UserError(
                f"grading failed {self.num_lost} times in a row ({reason}): correct the reward or the environment"
            )
        print(f"warning: a process that scores is started again: {reason}", file=sys.stderr)

    def fail(self, error: BaseException) -> None:
        """Raises an error wherever outcomes are waited for, and ends the threads."""
        with self.has_outcomes:
            self.error = self.error or error
            self.has_calls.notify_all()
            self.has_outcomes.notify_all()

    # outcomes

    def request_outcomes(self, jobs: Sequence[Job]) -> list[Outcome]:
        """Returns the outcome of each job; adjacent replies to a problem are a group, if the reward takes groups."""
        with ScoringStream(self, group_size=0) as stream:
            stream.add(dict(enumerate(jobs)))
            done = stream.finish()
        return [done[row][1] for row in range(len(jobs))]

    def score_replies(self, indices: Sequence[int], texts: Sequence[str]) -> GradedReplies:
        """Returns the rewards of each reply and counts of failures, as `check_failures` does, which may raise."""
        jobs = [(int(index), text) for index, text in zip(indices, texts, strict=True)]
        return self.check_failures(jobs, self.request_outcomes(jobs))

    def check_failures(self, jobs: Sequence[Scored], outcomes: Sequence[Outcome]) -> GradedReplies:
        """Returns the rewards of jobs, None for a failure, and counts of failures by kind, from their outcomes.

        Raises: UserError when more than `max_error_share` of the replies (and more than 8) failed, or all so far: then
        the reward is wrong, not the replies.
        """
        pairs = zip(jobs, outcomes, strict=True)
        failures = [(job, outcome) for job, outcome in pairs if isinstance(outcome, Failure)]
        kinds = [failure.kind for _, failure in failures]
        counts = {kind: kinds.count(kind) for kind in ("reward_timeouts", "reward_errors")}
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
                f"{remedy}, or handle the failure within the {what}"
            )
        return [None if isinstance(outcome, Failure) else outcome for outcome in outcomes], counts

    def report_failures(self, failures: Sequence[tuple[Scored, Failure]]) -> None:
        """Warns about the first failure of the run, and writes the first MAX_WRITTEN ones to a file."""
        if failures and not self.num_failures:
            where = f"; see {self.failures_file}" if self.failures_file else ""
            print(f"warning: a reply got no score: {failures[0][1].reason!r}{where}.", file=sys.stderr)
        written = failures[: max(0, MAX_WRITTEN - self.num_failures)]
        self.num_failures += len(failures)
        if written and self.failures_file:
            self.failures_file.parent.mkdir(parents=True, exist_ok=True)
            with self.failures_file.open("a") as file:
                for (index, reply), failure in written:
                    record = {"env": self.settings.env_name, "problem": index, "reason": failure.reason}
                    record["text" if isinstance(reply, str) else "messages"] = reply
                    file.write(json.dumps(record) + "\n")

    def hold(self, make: Callable[[], AbstractContextManager[Held]]) -> Held:
        """Returns what `make` makes when it is first asked for; it is closed with the scorer."""
        if self.held is None:
            self.held = self.resources.enter_context(make())
        return self.held

    def close(self) -> None:
        """Ends the processes, and what is held."""
        self.resources.close()
        self.fail(EOFError("the scorer was closed"))
        for lane in [*self.lanes.values()]:
            lane.hang_up()
        for thread in self.threads:
            thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        self.close()


def max_failures(num_replies: int, max_error_share: float) -> int:
    """Returns how many replies may have no rewards before the reward itself must be wrong."""
    return max(int(max_error_share * num_replies), 8)


def blamed(jobs: Sequence[Job | Scored]) -> str:
    """Returns what grades these jobs, in a word."""
    return "reward" if all(isinstance(reply, str) for _, reply in jobs) else "environment"


class ScoringStream:
    """Jobs that are done in the background, by row, for example while other rows are sampled; a context manager.

    If rewards compare replies, `group_size` rows wait for one another; 0: adjacent ones are a group.
    """

    def __init__(self, scorer: Scorer, group_size: int = 1):
        self.scorer, self.group_size = scorer, group_size
        self.jobs: dict[int, Job] = {}  # the last of each row
        self.outcomes: dict[int, Outcome] = {}  # by row
        self.num_replies = 0
        self.num_lost = 0  # replies that exceeded their time or ended their process
        self.num_left = 0  # rows without an outcome
        self.num_takers = 0  # threads that wait for some outcomes
        self.is_open = True
        self.error: BaseException | None = None  # that has left the block

    def add(self, jobs: Mapping[int, Job]) -> None:
        """Adds a job for each row; a row has one unfinished job at most."""
        self.jobs |= jobs
        size = self.group_size
        if not self.scorer.takes_groups:
            groups = [(row,) for row in jobs]
        elif size:
            whole = [range(first, first + size) for first in sorted({row - row % size for row in jobs})]
            groups = [tuple(rows) for rows in whole if all(row in self.jobs for row in rows)]
        else:
            groups = [tuple(rows) for _, rows in groupby(jobs, key=lambda row: jobs[row][0])]
        calls = []
        for rows in groups:
            (index, *_), replies = zip(*(self.jobs[row] for row in rows), strict=True)
            calls.append(GraderCall(self, rows, index, replies))
        with self.scorer.has_outcomes:
            self.num_left += sum(map(len, groups))
            self.num_replies += sum(map(len, groups))
        self.scorer.put(calls)

    def publish(self, rows: Sequence[int], outcomes: Iterable[Outcome]) -> None:
        """Gives the outcomes of rows to waiting threads."""
        with self.scorer.has_outcomes:
            self.outcomes |= zip(rows, outcomes, strict=True)
            self.num_left -= len(rows)
            if self.num_takers or not self.num_left:  # a thread that needs all of them is not woken by each
                self.scorer.has_outcomes.notify_all()

    def take(self, rows: Set[int], num_needed: int = 0, more: WaitForMore = NO_WAIT) -> dict[int, Outcome]:
        """Removes and returns the outcomes of these rows that are there; waits for `num_needed`, then for `more`."""

        def num_come() -> int:
            return len(rows & self.outcomes.keys())

        with self.scorer.has_outcomes:
            self.num_takers += 1
            self.scorer.has_outcomes.wait_for(lambda: self.failure() or num_come() >= num_needed)
            more.wait(self.scorer.has_outcomes, num_come, lambda: self.failure() or rows <= self.outcomes.keys())
            self.num_takers -= 1
            if error := self.failure():
                raise error
            return {row: self.outcomes.pop(row) for row in sorted(rows & self.outcomes.keys())}

    def failure(self) -> BaseException | None:
        """Returns the error for which nobody should wait any longer."""
        return self.error or self.scorer.error

    def finish(self) -> dict[int, tuple[Job, Outcome]]:
        """Returns the job and the outcome of each row, once all are there."""
        with self.scorer.has_outcomes:
            self.scorer.has_outcomes.wait_for(lambda: self.failure() or not self.num_left)
        if error := self.failure():
            raise error
        return {row: (self.jobs[row], outcome) for row, outcome in self.outcomes.items()}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _, error: BaseException | None, __) -> None:
        with self.scorer.has_outcomes:
            self.is_open, self.error = False, error
            self.scorer.has_outcomes.notify_all()  # a signal may have left a thread that waits for outcomes
        self.scorer.withdraw(self)
