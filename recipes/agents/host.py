"""Programs as episodes: each row of a rollout is a process that talks to this server as to a model's endpoint.

A program gets OPENAI_BASE_URL and OPENAI_API_KEY, and its row of the data as JSON in ROW. Its requests are turns of the
policy; its last line of JSON is its reward. A program that dies, hangs or floods costs its own episode.
"""

import asyncio
import contextlib
import json
import os
import re
import secrets
import sys
from collections import deque
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple, Self, TypeVar

from envs.data.rows import JSON
from envs.own_code import ROOT
from envs.scoring.worker import MAX_REWARD, Failure, checked_rewards
from recipes.agents.agent import AgentSettings
from recipes.agents.endpoint import FULL, Asked, Dialogue, Endpoint, Rewards, Session
from recipes.agents.keeper import KEEPER, OVER_MEMORY, OVER_TIME, Report, Task, is_function
from recipes.agents.protocol import BadRequest, Sampled
from utils.settings.errors import UserError, on_one_line

SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS|CREDENTIAL", re.IGNORECASE)  # in names of environment variables
NAMED = "REWARD_"
MODEL = "policy"  # its name at the endpoint
START = 120  # seconds that the import of the user's file may take
T = TypeVar("T")
LATE = 30  # seconds behind a program's time limit, in which its report must have come


def passed_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment variables of programs that may run what a model writes: none with the name of a secret.

    REWARD_NAME is passed, also as NAME.
    """
    named = {name.removeprefix(NAMED): x for name, x in variables.items() if name.startswith(NAMED)}
    return named | {name: x for name, x in variables.items() if name.startswith(NAMED) or not SECRET.search(name)}


class AgentJob(NamedTuple):
    """A program to run: its row in the rollout, and what it gets."""

    row: int
    data: Mapping[str, JSON]
    seed: int


@dataclass(eq=False, kw_only=True)
class AgentRun(Session):
    """A program that waits for a place, or runs."""

    job: AgentJob
    spare: deque[int]  # rows for forks, which several programs share


class AgentHost(Endpoint):
    """Runs programs, and hands their requests over as outcomes of rows; use it as a context manager.

    `begin` and `reset` are called by the thread that samples, too.
    Raises: UserError if the user's file fails.
    """

    def __init__(self, settings: AgentSettings):
        super().__init__(MODEL, settings.dialect, settings.max_calls)
        self.settings = settings
        self.runs: dict[str, AgentRun] = {}  # by key
        self.parents: dict[int, tuple[int, int]] = {}  # rows of forks: those of their programs, and numbers from 1 on
        self.auxiliary: set[int] = set()  # rows that are not trained
        per_core = 32 if is_function(settings.command) else 4  # the start of a function costs no import
        self.places = asyncio.Semaphore(settings.num_processes or per_core * (os.cpu_count() or 1))
        self.plays: set[asyncio.Task] = set()
        self.numbers = count()
        self.reports: dict[int, asyncio.Future[Report]] = {}  # of programs that run

    # In the thread that samples

    def begin(self, jobs: list[AgentJob], spare: deque[int]) -> None:
        """Starts programs; `spare`: rows for conversations that do not continue, which they share."""
        with self.has_changed:
            self.computing |= {job.row for job in jobs}
        self.call(self.start, jobs, spare)

    def answer(self, row: int, asked: Asked, outcome: Sampled | BadRequest) -> None:
        """Gives a row its reply; its program owes what follows."""
        with self.has_changed:
            self.computing.add(row)
        super().answer(row, asked, outcome)

    def reset(self) -> None:
        """Ends all programs, and forgets all rows."""
        self.wait_for(self.end_all())
        for known in self.parents, self.auxiliary, self.closed, self.outcomes, self.computing:
            known.clear()
        self.dialogues.clear()

    def wait_for(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine in the server's thread, and returns its result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result()

    # In the server's thread

    def start(self, jobs: Sequence[AgentJob], spare: deque[int]) -> None:
        for job in jobs:
            run = AgentRun(key=secrets.token_urlsafe(16), job=job, spare=spare)
            self.runs[run.key] = run
            play = self.loop.create_task(self.play(run))
            self.plays.add(play)
            play.add_done_callback(self.plays.discard)

    def take_row(self, run: AgentRun) -> int:
        if run.job.row not in self.dialogues:
            return run.job.row
        if not run.spare:
            run.num_refused += 1
            raise BadRequest("this conversation continues no earlier one, and no row is left for another")
        row = run.spare.popleft()
        self.parents[row] = run.job.row, len(self.dialogues_of(run))
        return row

    def session_of(self, key: str) -> AgentRun:
        if key not in self.runs:
            raise BadRequest("the key is not that of a program that runs", status=401)
        return self.runs[key]

    async def play(self, run: AgentRun) -> None:
        """Runs a program to its end, and publishes its reward."""
        outcome = Failure("reward_errors", "its program was not run")
        try:
            async with self.places:
                report = await self.report_of(run)
                outcome = outcome_of(run, self.dialogues_of(run), report, self.settings)
        except TimeoutError:
            outcome = Failure("reward_errors", "the process that runs its program was lost")
        finally:
            del self.runs[run.key]
            dialogues = self.dialogues_of(run)
            self.refuse([each.row for each in dialogues], "the session has ended")
            self.auxiliary |= {each.row for each in dialogues if each.is_auxiliary}
            rest = () if self.runs else run.spare  # rows that no program needs
            for row in {each.row for each in dialogues} - {run.job.row} | {*rest}:
                self.publish(row, {})
            self.publish(run.job.row, outcome)

    def dialogues_of(self, run: AgentRun) -> list[Dialogue]:
        return [dialogue for dialogue in self.dialogues.values() if dialogue.session is run]

    async def report_of(self, run: AgentRun) -> Report:
        """Has a program run, and returns how it ended. Raises: TimeoutError if the keeper does not say."""
        settings, number = self.settings, next(self.numbers)
        variables = passed_variables(os.environ) | {
            "OPENAI_BASE_URL": f"{self.url}/v1",
            "OPENAI_API_KEY": run.key,
            "OPENAI_MODEL": MODEL,
            "ROW": json.dumps(run.job.data, default=str),
            "SEED": str(run.job.seed),
        }
        task = Task(number, variables, settings.timeout, int(settings.memory_gb * 2**30))
        report = self.reports[number] = self.loop.create_future()
        self.write(task._asdict())
        try:
            return await asyncio.wait_for(report, settings.timeout + LATE)
        finally:
            del self.reports[number]
            self.write({"stop": number})

    def write(self, message: Mapping[str, JSON]) -> None:
        self.keeper.stdin.write(json.dumps(message).encode() + b"\n")

    async def start_keeper(self) -> str:
        """Starts the keeper; returns what is wrong with the user's file, if anything."""
        command = [sys.executable, "-c", KEEPER, str(ROOT), self.settings.command]
        self.keeper = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, start_new_session=True,
            env=passed_variables(os.environ),
        )  # fmt: skip
        first = await asyncio.wait_for(self.keeper.stdout.readline(), START)
        self.reading = asyncio.create_task(self.read_reports())
        return json.loads(first)["error"] if first else "the process that runs programs did not start"

    async def read_reports(self) -> None:
        async for line in self.keeper.stdout:
            report = Report(**json.loads(line))
            future = self.reports.get(report.number)
            if future and not future.done():
                future.set_result(report)

    async def end_all(self) -> None:
        plays = list(self.plays)
        for play in plays:
            play.cancel()
        await asyncio.gather(*plays, return_exceptions=True)

    async def end_keeper(self) -> None:
        await self.end_all()
        self.keeper.stdin.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.keeper.wait(), 5)
        if self.keeper.returncode is None:
            self.keeper.kill()
        await self.reading
        self.keeper._transport.close()  # else it is closed when the loop no longer runs

    def __enter__(self) -> Self:
        super().__enter__()
        if error := self.wait_for(self.start_keeper()):
            self.__exit__()
            raise UserError(error)
        return self

    def __exit__(self, *_) -> None:
        self.wait_for(self.end_keeper())
        super().__exit__()


def outcome_of(
    run: AgentRun, dialogues: Sequence[Dialogue], report: Report, settings: AgentSettings
) -> Rewards | Failure:
    """Returns the reward that a program has printed, or why there is none."""
    if report.over == OVER_TIME:
        return Failure("reward_timeouts", f"its program ran for {settings.timeout:g} seconds", "raise timeout")
    if report.over == OVER_MEMORY:
        return Failure("reward_errors", f"its program took more than {settings.memory_gb:g} GB of memory")
    if report.status:
        line = on_one_line(report.line)[:300]
        return Failure("reward_errors", f"its program ended with status {report.status}: {line}")
    if not dialogues:
        return Failure("reward_errors", "its program asked for no reply")
    if not any(dialogue.has_replied for dialogue in dialogues):
        remedy = "raise --prompt_length or --num_generation_tokens" if run.refused == FULL else ""
        return Failure("reward_errors", f"its program got no reply: {run.refused}", remedy)
    rewards = read_rewards(report.line)
    if isinstance(rewards, str):
        return Failure("reward_errors", rewards)
    left_out = [each for each in dialogues if each.is_auxiliary or not each.has_replied]
    counts = {"forks": len(dialogues) - 1.0, "auxiliary": float(run.num_refused + len(left_out))}
    return {"calls": float(run.num_calls)} | counts | rewards


def read_rewards(line: str) -> dict[str, float] | str:
    """Returns the rewards in a program's last line; "return" is absent if it prints none. A text: why there is none."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    if value is None:
        return "its program printed null: it has no score"
    if not isinstance(value, dict | int | float):
        return {}
    parts = value if isinstance(value, dict) else {"return": value}
    if "reward" in parts:
        parts = {"return": parts.pop("reward"), **parts}
    if not parts or not all(isinstance(x, int | float) and abs(x) <= MAX_REWARD for x in parts.values()):
        return f"its program's last line is {line[:200]!r}: it must hold numbers"
    try:
        rewards = checked_rewards(parts)
    except ValueError as error:
        return str(error)
    rewards.setdefault("return", sum(rewards.values()))
    return {"correct_answer": float(rewards["return"] >= 1)} | rewards
