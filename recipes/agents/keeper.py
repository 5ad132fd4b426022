"""The keeper of programs: a process that starts them, limits them, and leaves none of their processes behind.

    run -- jobs, a line of JSON each --> keeper: has loaded the file of a function; never jax
                                           |-- warden --> program: a command of the shell, or the function
                                           |-- warden --> program

A process that runs JAX must not fork. This one may, so the start of a function costs no import. A warden adopts what
its program starts, in sessions of their own too, and ends all of it with the program. When the run ends, however it
ends, the pipe closes, and the keeper ends them all.
"""

import asyncio
import contextlib
import encodings.idna  # noqa: F401 (the first connection of each program would import it)
import gc
import inspect
import json
import os
import select
import signal
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from envs.own_code import load_object, read_names
from envs.scoring.worker import describe_failure
from utils.processes import (
    adopt_orphans,
    descendant_pids,
    kill_descendants,
    kill_tree,
    limit_memory,
    send_signal,
    tree_memory,
)
from utils.settings.errors import UserError

KEEPER = "import sys; sys.path[0] = sys.argv[1]; from recipes.agents.keeper import keep; keep(sys.argv[2])"
MAX_OUTPUT = 2**16  # last bytes that a program prints, which are kept
MAX_REPORT = 4000  # bytes: a pipe takes 4,096 in one piece
INTERVAL = 0.25  # seconds between two looks at time and memory
SHORTEST = 0.001  # the same, when a program has just closed its output and probably ends
OVER_TIME, OVER_MEMORY = "time", "memory"
Function = Callable[..., object]


class Task(NamedTuple):
    """A program to run."""

    number: int
    variables: Mapping[str, str]  # of its environment
    seconds: float  # that it may run
    num_bytes: int  # of memory of all its processes


class Report(NamedTuple):
    """How a program ended."""

    number: int
    status: int  # of its exit; negative: a signal
    over: str  # the limit that it exceeded
    line: str  # the last one that it printed; if it failed, the last of its errors


def keep(agent: str) -> None:
    """Runs a warden for each task of stdin, until that is closed. It first reports what is wrong with a function."""
    adopt_orphans()
    tasks, reports = os.dup(0), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # what the user's file prints
    program, error = agent, ""
    if is_function(agent):
        try:
            (named,) = read_names(agent, "--agent", "function")
            program = load_object(named, "--agent", "function")
        except (UserError, ValueError) as problem:
            error = str(problem)
    os.write(reports, json.dumps({"error": error}).encode()[:MAX_REPORT] + b"\n")
    gc.freeze()  # else a collection in a child would copy all pages
    wardens: dict[int, int] = {}  # process of each task
    with os.fdopen(tasks, "rb", buffering=0) as lines:
        for line in iter(lines.readline, b""):
            reap(wardens)
            match json.loads(line):
                case {"stop": number}:
                    if number in wardens:
                        kill_tree(wardens.pop(number))
                case fields:
                    task = Task(**fields)
                    wardens[task.number] = fork(ward, task, program, reports, os.getpid())
    kill_descendants(os.getpid())
    os._exit(0)


def is_function(agent: str) -> bool:
    """True for FILE.py:FUNCTION; anything else is a command of the shell."""
    file, colon, name = agent.rpartition(":")
    return bool(colon) and file.endswith(".py") and name.isidentifier() and " " not in agent


def reap(wardens: dict[int, int]) -> None:
    """Forgets wardens that have ended."""
    with contextlib.suppress(ChildProcessError):
        while ended := os.waitpid(-1, os.WNOHANG)[0]:
            for number in [number for number, process in wardens.items() if process == ended]:
                del wardens[number]


def fork(function: Callable[..., NoReturn], *arguments: object) -> int:
    """Calls a function in a child, which ends with it; returns the child's id."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    try:
        function(*arguments)
    finally:
        os._exit(1)


def ward(task: Task, program: str | Function, reports: int, keeper: int) -> NoReturn:
    """Runs a program to its end or its limits, and reports how it ended."""
    os.setsid()
    adopt_orphans()
    pipes = os.pipe(), os.pipe()
    child = fork(run, task, program, [its for _, its in pipes])
    outputs = {output: Tail() for output, _ in pipes}  # of stdout, whose last line is the reward, and of stderr
    for output, its in pipes:
        os.close(its)
        os.set_blocking(output, False)
    deadline, over, status = time.monotonic() + task.seconds, "", None
    pause = SHORTEST
    while status is None and not over and os.getppid() == keeper:
        ready = select.select([*outputs], [], [], INTERVAL)[0]
        if ready and not any([outputs[output].read(output) for output in ready]):
            time.sleep(pause)  # it has closed its outputs, and ends or goes on
            pause = min(2 * pause, INTERVAL)
        ended, code = os.waitpid(child, os.WNOHANG)
        status = os.waitstatus_to_exitcode(code) if ended else None
        if time.monotonic() > deadline:
            over = OVER_TIME
        elif takes_more(task.num_bytes):
            over = OVER_MEMORY
    if status is None:
        send_signal(child, signal.SIGKILL)
    kill_descendants(os.getpid())
    for output, tail in outputs.items():
        while tail.read(output):
            pass
    printed, logged = (tail.last_line() for tail in outputs.values())
    line = logged or printed if status else printed
    report = json.dumps(Report(task.number, -9 if status is None else status, over, line)._asdict())
    os.write(reports, report.encode() + b"\n")
    os._exit(0)


def takes_more(num_bytes: int) -> bool:
    """True if this process and its descendants take more memory. `tree_memory`, which divides shared pages, is slow."""
    pages = 0
    for each in (os.getpid(), *descendant_pids(os.getpid())):
        with contextlib.suppress(OSError):
            pages += int(Path(f"/proc/{each}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") > num_bytes and tree_memory() > num_bytes


class Tail:
    """The last bytes that a program has printed."""

    def __init__(self):
        self.parts: deque[bytes] = deque()
        self.size = 0

    def read(self, pipe: int) -> bool:
        """Reads what is there; False: nothing."""
        try:
            data = os.read(pipe, MAX_OUTPUT)
        except BlockingIOError:
            return False
        self.parts.append(data)
        self.size += len(data)
        while self.size - len(self.parts[0]) > MAX_OUTPUT:
            self.size -= len(self.parts.popleft())
        return bool(data)

    def last_line(self) -> str:
        """Returns the last line that is not empty, cut to what a report has room for."""
        text = b"".join(self.parts).decode(errors="replace").rstrip()
        line = text[text.rfind("\n") + 1 :].strip()
        while len(json.dumps(line)) > MAX_REPORT - 200:
            line = line[: len(line) // 2]
        return line


def run(task: Task, program: str | Function, outputs: Sequence[int]) -> NoReturn:
    """Becomes the program."""
    os.setsid()
    limit_memory(task.num_bytes)
    os.dup2(outputs[0], 1)
    os.dup2(outputs[1], 2)
    os.environ.clear()
    os.environ.update(task.variables)
    if isinstance(program, str):
        os.execve("/bin/sh", ["sh", "-c", program], dict(task.variables))
    try:
        result = call(program, task.variables)
        if not (result is None or isinstance(result, Mapping) or hasattr(result, "__float__")):
            raise TypeError(f"it returned {result!r}: return a number, or a dict of numbers")
        print(json.dumps(result if result is None or isinstance(result, Mapping) else float(result)), flush=True)
        os._exit(0)
    except BaseException as error:  # noqa: BLE001 (the user's function)
        traceback.clear_frames(error.__traceback__)  # else a MemoryError leaves no room to say so
        traceback.print_exc()
        print(describe_failure(error), file=sys.stderr, flush=True)
        os._exit(1)


def call(function: Function, variables: Mapping[str, str]) -> object:
    """Calls a function with what it names: `row`, `base_url`, `api_key`, `seed`, or columns; all as `**row`."""
    row = json.loads(variables["ROW"])
    own: dict[str, Any] = {"base_url": variables["OPENAI_BASE_URL"], "api_key": variables["OPENAI_API_KEY"]}
    known = {**row, "row": row, "seed": int(variables["SEED"]), "sampling": {}, **own}
    parameters = inspect.signature(function).parameters.values()
    named = {parameter.name: known[parameter.name] for parameter in parameters if parameter.name in known}
    needed = [x for x in parameters if x.default is x.empty and x.kind not in (x.VAR_POSITIONAL, x.VAR_KEYWORD)]
    if missing := [x.name for x in needed if x.name not in known]:
        raise TypeError(f"it needs {missing[0]!r}, which is not a column: there are {', '.join(map(repr, row))}")
    takes_all = any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters)
    result = function(**({**row, **named} if takes_all else named))
    result = asyncio.run(result) if isinstance(result, Coroutine) else result
    return play(result, row, known["seed"]) if hasattr(result, "create") else result


def play(factory: Any, row: Mapping[str, Any], seed: int) -> float | None:
    """Returns the reward of a session of OpenEnv's ResourceSessionFactory, as TRL's harness worker plays it."""
    session = factory.create(row.get("prompt", row), seed=seed, episode_id=f"{seed}")
    try:
        session.wait_for_completion()
        turns = session.fetch_training_trace().turns
        said = [*turns[-1].request.get("messages", []), turns[-1].response] if turns else []
        return session.verify(said).env_reward
    finally:
        session.close()
