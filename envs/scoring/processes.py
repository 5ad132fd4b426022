"""Trees of processes on Linux: the descendants of a process, their memory, and how to kill them all.

Elsewhere there is no /proc and no prctl: there a tree is a process group, and its memory is not known.
"""

import contextlib
import ctypes
import os
import resource
import signal
import sys
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
MAX_MEMORY = 4 * 2**30  # bytes of a worker and of all that it started
MAX_ROUNDS = 100  # searches for processes that are started while others are stopped


def adopt_orphans() -> None:
    """Makes this process the parent of orphans among its descendants, so that `descendant_pids` finds them."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)


def end_with_parent(parent: int) -> None:
    """Has the kernel kill this process when its parent, with this id, ends."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the call above
        os._exit(1)


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


def tree_memory(pid: int, enough: int) -> int:
    """Returns the bytes in memory of a process and its descendants, shared memory included; 0 if there is no /proc.

    Pages that several of them share are counted for each, and once only (which is slower) if that exceeds `enough`.
    """
    pids = [pid, *descendant_pids(pid)]
    total = sum(map(resident_memory, pids))
    return total if total <= enough else sum(map(proportional_memory, pids))


def resident_memory(pid: int) -> int:
    """Returns the bytes of a process in memory."""
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def proportional_memory(pid: int) -> int:
    """Returns the bytes of a process in memory, each page divided by the number of processes that share it."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0
