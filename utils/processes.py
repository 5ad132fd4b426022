"""Runs code that may hang, grow or die in processes of its own, and ends all that such code starts.

    lane = Lane("module:function", setup)
    lane.send(request)
    answer = lane.answer(seconds=10)  # or Dead, with the reason
    lane.close()

    this process -- socket --> keeper --> worker: function(setup, requests), a generator that yields the answers

A process that runs JAX must not fork, and multiprocessing imports the main script anew. So a lane starts Python, and
imports the function's module only. The keeper limits the memory of its worker's tree of processes (read from /proc),
and ends all of it with the worker or with this process. Code that attacks these processes is not covered.
"""

import contextlib
import ctypes
import importlib
import json
import os
import pickle
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, NoReturn

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = "import sys; sys.path[0] = sys.argv[1]; from utils.processes import serve; serve(*sys.argv[2:])"
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
MAX_MEMORY = 4 * 2**30  # bytes of a worker and all that it started, so that a reward cannot starve the run
MEMORY_INTERVAL = 0.25  # seconds between two looks at the memory: a process fills about 1 GiB in this time
OVER_MEMORY = 119  # exit code of a keeper whose worker exceeded the limit; programs hardly use it
CLOSING = 1.0  # seconds in which a worker may end by itself, to close what its environment holds
SENDING = 5.0  # seconds in which a worker must take a request: it is idle, so it reads at once unless it is stuck
MAX_ROUNDS = 100  # searches for processes that are started while others are stopped, so that a fork bomb ends them
# A scheduler sends these to each process of a job. They are for the run, which ends its lanes when it has saved.
SCHEDULED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)

Answers = Callable[[Any, Iterator[Any]], Iterable[object]]


class Dead(NamedTuple):
    """The end of a lane: returned instead of an answer."""

    reason: str
    is_late: bool = False


class Lane:
    """A process that answers one request after the other: it gets pickles, and answers in JSON, which runs nothing."""

    def __init__(self, target: str, setup: object, max_memory: int = MAX_MEMORY):
        self.max_memory = max_memory
        self.socket, theirs = socket.socketpair()
        self.lines = self.socket.makefile("rb")
        with theirs:
            command = [sys.executable, "-c", PROGRAM, str(ROOT), str(theirs.fileno()), target, str(max_memory)]
            # Its own session, since Ctrl-C is for the run, which then closes its lanes.
            self.process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True
            )
        self.send(setup)

    def send(self, request: object) -> None:
        """Sends a request. If the process does not take it, `answer` returns the reason."""
        self.socket.settimeout(SENDING)
        with contextlib.suppress(OSError):
            self.socket.sendall(pickle.dumps(request))

    def answer(self, seconds: float) -> Any:
        """Returns the next answer, or Dead if there is none within these seconds; then the process has ended."""
        self.socket.settimeout(seconds)
        try:
            (answer,) = json.loads(self.lines.readline())
            return answer
        except TimeoutError:
            self.kill()
            return Dead(f"it took longer than {seconds:g} seconds", is_late=True)
        except (OSError, TypeError, ValueError):  # it has ended, or what it runs has written here
            return Dead(self.wait())

    def wait(self) -> str:
        """Returns how a process ended that has closed its socket."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self.process.wait(CLOSING)
            if code == OVER_MEMORY:
                return f"its processes took more than {self.max_memory >> 20} MiB of memory"
            return f"it ended its process with exit code {128 - code if 128 < code < 192 else code}"
        self.kill()
        return "it wrote into the connection of its process, or closed it"

    def hang_up(self) -> None:
        """Tells the worker that there are no more requests; an answer that another thread waits for is Dead."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Ends the process, which has CLOSING seconds to end by itself."""
        self.hang_up()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(2 * CLOSING)
        self.kill()
        self.lines.close()
        self.socket.close()

    def kill(self) -> None:
        """Ends the process and all that it started, at once."""
        if self.process.poll() is None:  # otherwise another process may have the number
            kill_tree(self.process.pid)
            self.process.wait()


# in the lane's process


def serve(fd: str, target: str, max_memory: str) -> NoReturn:
    """Runs the keeper: forks the worker, kills what it leaves behind, exits with its code (128 + n for signal n)."""
    handle_signals(signal.SIG_IGN)
    adopt_orphans()
    keeper, end = os.getpid(), socket.socket(fileno=int(fd))
    worker = os.fork()
    if not worker:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != keeper:  # it ended before the call above
            os._exit(1)
        run_worker(end, target, int(max_memory))
    is_over = threading.Event()
    threading.Thread(target=guard, args=(end, int(max_memory), is_over), daemon=True).start()
    pid = status = 0
    while pid != worker:  # what the worker started and left is adopted, and ends here, too
        pid, status = os.wait()
    kill_descendants(keeper)
    code = os.waitstatus_to_exitcode(status)
    os._exit(OVER_MEMORY if is_over.is_set() else code if code >= 0 else 128 - code)


def guard(end: socket.socket, max_memory: int, is_over: threading.Event) -> None:
    """Kills the descendants of this process when they take too much memory, or soon after the run hangs up."""
    hangup = select.poll()
    hangup.register(end, 0)
    while not hangup.poll(1000 * MEMORY_INTERVAL):
        if tree_memory() > max_memory:
            is_over.set()
            break
    else:
        time.sleep(CLOSING)
    kill_descendants(os.getpid())


def run_worker(end: socket.socket, target: str, max_memory: int) -> NoReturn:
    """Runs the worker: sends what the target yields."""
    try:
        # No SIG_IGN, which programs inherit that are started from here: they must end by SIGTERM.
        handle_signals(lambda *_: None)
        os.register_at_fork(after_in_child=lambda: handle_signals(signal.SIG_DFL))
        limit_memory(max_memory)
        module, name = target.split(":")
        function: Answers = getattr(importlib.import_module(module), name)
        file = end.makefile("rb")
        for answer in function(pickle.load(file), read_requests(file)):
            end.sendall(json.dumps([answer]).encode() + b"\n")
        os._exit(0)
    except (EOFError, OSError):
        pass  # the run has ended
    except BaseException:  # noqa: BLE001 (an error of this repository: targets handle those of others)
        traceback.print_exc()
    finally:
        os._exit(1)


def read_requests(file: BinaryIO) -> Iterator[Any]:
    """Yields requests until the run hangs up."""
    with contextlib.suppress(EOFError):
        while True:
            yield pickle.load(file)


def handle_signals(handler: Callable[..., object] | signal.Handlers) -> None:
    """Sets what happens when a scheduler sends a signal."""
    for number in SCHEDULED:
        signal.signal(number, handler)


# trees of processes


def adopt_orphans() -> None:
    """Makes this process the parent of orphans among its descendants, so that `descendant_pids` finds them."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)


def prctl(option: int, value: int) -> None:
    """Calls prctl(2) on Linux, and does nothing elsewhere."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def limit_memory(num_bytes: int) -> None:
    """Limits the memory that this process may allocate."""
    with contextlib.suppress(ValueError, OSError):  # a system may allow less, or lack this limit
        resource.setrlimit(resource.RLIMIT_DATA, (num_bytes, num_bytes))


def descendant_pids(pid: int) -> list[int]:
    """Returns the children of a process, started or adopted, their children and so on; none if there is no /proc."""
    pids = [pid]
    for parent in pids:  # which grows
        for file in Path(f"/proc/{parent}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                pids += map(int, file.read_text().split())
    return pids[1:]


def kill_tree(pid: int) -> None:
    """Kills a process, its group and all its descendants."""
    send_signal(pid, signal.SIGSTOP)  # a stopped process starts no other
    kill_descendants(pid)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    send_signal(pid, signal.SIGKILL)


def kill_descendants(pid: int) -> None:
    """Kills all descendants of a process. They are stopped first, until no new ones are found."""
    stopped: set[int] = set()
    for _ in range(MAX_ROUNDS):
        new = set(descendant_pids(pid)) - stopped
        if not new:
            break
        for child in new:
            send_signal(child, signal.SIGSTOP)
        stopped |= new
    for child in stopped:
        send_signal(child, signal.SIGKILL)


def send_signal(pid: int, number: int) -> None:
    """Sends a signal to a process that may have ended."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def tree_memory() -> int:
    """Returns the bytes in memory of this process and its descendants, shared pages by parts; 0 without /proc."""
    total = 0
    for each in (os.getpid(), *descendant_pids(os.getpid())):
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{each}/smaps_rollup").read_text().splitlines()
            total += sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total
