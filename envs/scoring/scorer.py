"""Grades replies in processes of their own, in which a reward may hang, crash or raise without harming the run.

    with Scorer("countdown", timeout=10) as scorer:
        rewards, counts = scorer.score_replies([0, 0, 1], ["<answer>1+2</answer>", "hm", "..."])

Each process is a lane (utils/processes.py) that runs `work` of envs/scoring/worker.py. A thread here hands it jobs. A
process sends the outcome of each job before it begins the next one, so only the reply that exceeds its time limit or
ends the process is lost; the others that it was given are queued again.
"""

import contextlib
import json
import math
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence, Set
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self, TypeVar

from envs.scoring.patience import HURRY, Patience
from envs.scoring.worker import (
    Failure,
    Group,
    Job,
    Outcome,
    Outcomes,
    Rewards,
    ScorerSettings,
    Turns,
    outcome_from_json,
)
from utils.files import open_log
from utils.processes import MAX_MEMORY, Dead, Lane
from utils.settings.errors import UserError

MAX_JOBS = 32  # jobs of a request: with a message for each reply, messages would take longer than quick graders
MAX_REPLIES = 32_000  # replies after which a process is replaced, since parsers of LaTeX cache without limit
MAX_LOST = 8  # processes of a lane in a row that end outside of a reply: the machine or the environment is at fault
MAX_WRITTEN = 100  # failures that are written to a file: enough to find the cause
MAKING = 600  # seconds in which an environment must be made; some read large data sets
BEGINNING = 30  # seconds in which an idle process must begin a request, even on a machine that swaps

Held = TypeVar("Held", bound=contextlib.AbstractContextManager)
Scored = tuple[int, str | list[dict[str, str]]]  # number of a problem, and the reply to it or the conversation
GradedReplies = tuple[list[Rewards | None], dict[str, int]]  # rewards of each, None: a failure; failures by kind


class Queued(NamedTuple):
    """A job of a stream."""

    stream: "ScoringStream"
    row: int
    job: Job


class Scorer:
    """Scores replies to the problems of one environment; use it as a context manager.

    `env_name` is a name of `make_env`'s table, or "module:function" of a function that makes an Env. `num_workers` 0 is
    one process for each core, at most 16. `timeout` is the limit for one reply, in seconds. `failures_dir` receives
    reward_failures.jsonl: the first replies that could not be scored, and why.

    Raises: UserError when the environment cannot be made.
    """

    max_memory = MAX_MEMORY  # of a process and all that it starts
    takes_groups = False  # all replies to a problem are graded by one call
    has_scored = False  # a reply of the run
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
        self.settings = ScorerSettings(env_name, dict(env_options or {}), timeout, max_error_share)
        self.failures_file = Path(failures_dir) / "reward_failures.jsonl" if failures_dir else None
        self.num_failures = 0
        self.held: contextlib.AbstractContextManager | None = None
        num_lanes = num_workers or min(os.cpu_count() or 1, 16)
        self.streams: set[ScoringStream] = set()  # that are open
        self.queues = [deque[Queued]() for _ in range(num_lanes + 1)]  # turns of each lane's episodes; all others
        self.lanes: dict[int, Lane] = {}
        self.num_lost = 0  # processes since the last outcome that ended outside of a reply
        self.is_ready = False  # one of them has made the environment
        self.is_closed = False
        self.error: BaseException | None = None
        self.has_changed = threading.Condition()  # what the threads wait for
        self.threads = [threading.Thread(target=self.run_lane, args=(i,), daemon=True) for i in range(num_lanes)]
        for thread in self.threads:
            thread.start()
        with self.has_changed:
            self.has_changed.wait_for(lambda: self.is_ready or self.error)
        if self.error:
            self.close()
            raise self.error

    def request_outcomes(self, jobs: Sequence[Job]) -> list[Outcome | Outcomes]:
        """Returns the outcome of each job. Raises: UserError when processes are lost without end."""
        with ScoringStream(self, group_size=0) as stream:
            stream.add(dict(enumerate(jobs)))
            done = stream.finish()
        return [done[number][1] for number in range(len(jobs))]

    def put(self, stream: "ScoringStream", jobs: Mapping[int, Job]) -> None:
        """Queues jobs of a stream."""
        with self.has_changed:
            if self.error:
                raise self.error
            for row, job in jobs.items():
                queued = Queued(stream, row, job)
                self.queues[self.place_of(queued)].append(queued)
            self.has_changed.notify_all()

    def place_of(self, queued: Queued) -> int:
        """Returns the lane of a row's episode, which has played it so far; -1 for replies, which any lane takes."""
        return queued.row % len(self.threads) if isinstance(queued.job[1], Turns) else -1

    def withdraw(self, stream: "ScoringStream") -> list[Queued]:
        """Removes the jobs of a stream that no lane has taken, and returns them."""
        with self.has_changed:
            found = [queued for queue in self.queues for queued in queue if queued.stream is stream]
            for queue in self.queues:
                others = [queued for queued in queue if queued.stream is not stream]
                queue.clear()
                queue.extend(others)
        return found

    def run_lane(self, place: int) -> None:
        """Does jobs in a lane, and in another one when it ends, until the scorer is closed; runs in a thread."""
        try:
            while not (self.is_closed or self.error):
                lane = self.open_lane(place)
                num_replies = 0
                while num_replies < MAX_REPLIES:
                    jobs = self.take_jobs(place)
                    if not jobs or not self.grade(lane, jobs):
                        break
                    num_replies += sum(not isinstance(queued.job[1], Turns) for queued in jobs)  # episodes must stay
                lane.close()
        except BaseException as error:  # noqa: BLE001 (raised again where outcomes are waited for)
            self.fail(error)

    def open_lane(self, place: int) -> Lane:
        """Starts a process and waits until it has made the environment. Raises: UserError if it cannot."""
        while True:
            lane = self.lanes[place] = Lane("envs.scoring.worker:work", self.settings, self.max_memory)
            traits = None if self.is_closed else lane.answer(MAKING)
            if isinstance(traits, dict):
                with self.has_changed:
                    self.takes_groups, self.is_ready = traits["takes_groups"], True
                    self.has_changed.notify_all()
            if self.is_closed or isinstance(traits, dict):
                return lane
            lane.close()
            reason = traits if isinstance(traits, str) else f"the environment could not be made: {traits.reason}"
            if not self.is_ready:
                raise UserError(f"{self.settings.env_name}: {reason}")
            self.count_lost(reason)

    def take_jobs(self, place: int) -> list[Queued]:
        """Returns jobs for a lane, and waits for some; none if the scorer is closed."""
        with self.has_changed:
            own, shared = self.queues[place], self.queues[-1]
            self.has_changed.wait_for(lambda: own or shared or self.is_closed or self.error)
            if self.is_closed or self.error:
                return []
            size = len(own) or math.ceil(len(shared) / (4 * len(self.threads)))  # so that the last ones are small
            return [(own or shared).popleft() for _ in range(min(size, MAX_JOBS))]

    def grade(self, lane: Lane, jobs: Sequence[Queued]) -> bool:
        """Does jobs in a lane. False: it has ended; the job that it was at failed, and the rest is queued again."""
        left = deque(jobs)
        lane.send([queued.job for queued in jobs])
        begun = answer = lane.answer(BEGINNING)
        while left and not isinstance(answer, Dead):
            answer = lane.answer(self.settings.timeout * job_size(left[0].job))
            if not isinstance(answer, Dead):
                self.num_lost = 0
                queued = left.popleft()
                queued.stream.publish({queued.row: outcome_from_json(answer)})
        if not left or self.is_closed:
            return not left
        lost = None if begun is answer else left.popleft()
        with self.has_changed:
            for queued in reversed(left):
                if queued.stream in self.streams:
                    self.queues[self.place_of(queued)].appendleft(queued)
        if lost is None:
            self.count_lost(answer.reason)
        else:
            self.lose(lost, Failure("reward_timeouts" if answer.is_late else "reward_errors", answer.reason))
        return False

    def lose(self, queued: Queued, failure: Failure) -> None:
        """Gives up a reply. If a reward always hangs, trying the rest would take hours: then they all fail."""
        stream = queued.stream
        stream.num_lost += job_size(queued.job)
        self.num_lost = 0
        stream.publish({queued.row: failure})
        if stream.num_lost > max_failures(stream.num_replies, self.settings.max_error_share):
            failure = Failure("reward_timeouts", "too many other replies had failed to try it")
            stream.publish(dict.fromkeys([other.row for other in self.withdraw(stream)], failure))

    def count_lost(self, reason: str) -> None:
        """Counts a process that has ended outside of a reply. Raises: UserError for too many in a row."""
        self.num_lost += 1
        if self.num_lost > MAX_LOST * len(self.threads):
            raise UserError(
                f"grading failed {self.num_lost} times in a row ({reason}): correct the reward or the environment"
            )
        print(f"warning: a process that scores is started again: {reason}", file=sys.stderr)

    def fail(self, error: BaseException) -> None:
        """Raises an error wherever outcomes are waited for."""
        with self.has_changed:
            self.error = self.error or error
            self.has_changed.notify_all()
        for stream in [*self.streams]:
            stream.publish({}, error)

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
        self.parts = {name for x in outcomes for name in (x if isinstance(x, dict) else getattr(x, "info", ()))}
        failures = [outcome for outcome in outcomes if isinstance(outcome, Failure)]
        if len(failures) == len(outcomes) and self.settings.max_error_share < 1:
            raise UserError(
                f"{self.settings.env_name}: the {blamed(jobs)} fails for each of {len(outcomes)} replies that were "
                f"tried, {failures[0].reason}: correct it"
            )

    def repeats(self, jobs: list[Job]) -> bool:
        """True if episodes return the same messages when these jobs are done again."""
        first, again = self.request_outcomes(jobs), self.request_outcomes(jobs)
        pairs = [pair for pair in zip(first, again, strict=True) if not any(isinstance(x, Failure) for x in pair)]
        return all(a.messages == b.messages for a, b in pairs)

    def check_failures(self, jobs: Sequence[Scored], outcomes: Sequence[Outcome]) -> GradedReplies:
        """Returns the rewards and counts of `score_replies` from the outcome of each job; raises the same errors."""
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
        num_writable = max(0, MAX_WRITTEN - self.num_failures)
        self.num_failures += len(failures)
        if failures[:num_writable] and self.failures_file:
            self.failures_file.parent.mkdir(parents=True, exist_ok=True)
            with open_log(self.failures_file) as file:
                for (index, reply), failure in failures[:num_writable]:
                    record = {"env": self.settings.env_name, "problem": index, "reason": failure.reason}
                    record["text" if isinstance(reply, str) else "messages"] = reply
                    file.write(json.dumps(record) + "\n")

    def hold(self, make: Callable[[], Held]) -> Held:
        """Returns what `make` makes when it is first asked for; it is closed with the scorer."""
        if self.held is None:
            held = make()
            self.held = held.__enter__()
        return self.held

    def close(self) -> None:
        """Ends the processes, and what is held."""
        if self.held is not None:
            self.held.__exit__(None, None, None)
        self.is_closed = True
        self.fail(EOFError("the scorer was closed"))
        for lane in [*self.lanes.values()]:
            lane.hang_up()
        for thread in self.threads:
            thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        self.close()


def max_failures(num_jobs: int, max_error_share: float) -> int:
    """Returns how many replies may have no rewards before the reward itself must be wrong."""
    return max(int(max_error_share * num_jobs), 8)


def job_size(job: Job) -> int:
    """Returns how many replies a job grades."""
    return len(job[1].replies) if isinstance(job[1], Group) else 1


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


def blamed(jobs: Sequence[Job | Scored]) -> str:
    """Returns what grades these jobs, in a word."""
    are_episodes = any(not isinstance(reply, str | Group) for _, reply in jobs)
    return "environment" if are_episodes else "reward"


class ScoringStream:
    """Jobs that are done in the background, by row, for example while other rows are sampled; a context manager.

    If rewards compare the replies to a problem, `group_size` replies wait for one another; 0: jobs are groups already.
    """

    def __init__(self, scorer: Scorer, group_size: int = 1):
        self.scorer, self.group_size = scorer, group_size
        self.jobs: dict[int, Job] = {}  # the last of each row
        self.outcomes: dict[int, Outcome | Outcomes] = {}  # by row
        self.num_replies = 0
        self.num_lost = 0  # replies that exceeded their time or ended their process
        self.num_left = 0  # jobs without an outcome
        self.num_takers = 0  # threads that wait for some outcomes
        self.has_changed = threading.Condition()  # outcomes, or error
        self.error: BaseException | None = None

    def add(self, jobs: dict[int, Job]) -> None:
        """Adds a job for each row; a row has one unfinished job at most."""
        self.jobs |= jobs
        if self.scorer.takes_groups and self.group_size:
            jobs = self.whole_groups(jobs)
        with self.has_changed:
            self.num_left += len(jobs)
            self.num_replies += sum(map(job_size, jobs.values()))
        self.scorer.put(self, jobs)

    def whole_groups(self, jobs: Mapping[int, Job]) -> dict[int, Job]:
        """Returns the groups of these rows whose replies are all there, by their first rows."""
        groups = {}
        for first in {row - row % self.group_size for row in jobs}:
            replies = [self.jobs[row] for row in range(first, first + self.group_size) if row in self.jobs]
            if len(replies) == self.group_size:
                (groups[first],) = grouped(replies)
        return groups

    def publish(self, outcomes: Mapping[int, Outcome | Outcomes], error: BaseException | None = None) -> None:
        """Gives outcomes, or an error, to waiting threads."""
        with self.has_changed:
            for row, outcome in outcomes.items():
                are_groups = self.scorer.takes_groups and self.group_size
                each = of_replies(outcome, self.group_size) if are_groups else [outcome]
                self.outcomes |= dict(enumerate(each, row))
            self.num_left -= len(outcomes)
            self.error = self.error or error
            if self.num_takers or not self.num_left or error:  # a thread that needs all of them is not woken by each
                self.has_changed.notify_all()

    def take(self, rows: Set[int], num_needed: int = 0, patience: Patience = HURRY) -> dict[int, Outcome]:
        """Removes and returns the outcomes of these rows that are there, by row.

        It waits until there are `num_needed`, then for the others while it has `patience`.
        """

        def num_come() -> int:
            return len(rows & self.outcomes.keys())

        with self.has_changed:
            self.num_takers += 1
            self.has_changed.wait_for(lambda: self.error or num_come() >= num_needed)
            patience.wait(self.has_changed, num_come, lambda: self.error or rows <= self.outcomes.keys())
            self.num_takers -= 1
            if self.error:
                raise self.error
            return {row: self.outcomes.pop(row) for row in sorted(rows & self.outcomes.keys())}

    def finish(self) -> dict[int, tuple[Job, Outcome | Outcomes]]:
        """Returns the job and the outcome of each row, once all are there."""
        with self.has_changed:
            self.has_changed.wait_for(lambda: self.error or not self.num_left)
        if self.error:
            raise self.error
        return {row: (self.jobs[row], outcome) for row, outcome in self.outcomes.items()}

    def __enter__(self) -> Self:
        self.scorer.streams.add(self)
        return self

    def __exit__(self, _, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.scorer.streams.discard(self)
        if error is not None:  # a signal may have left a thread that waits for outcomes
            self.publish({}, error)
        self.scorer.withdraw(self)
