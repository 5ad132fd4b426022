"""Locks a run folder, so that two runs never write to one at the same time."""

import contextlib
import fcntl
import json
import os
import socket
import threading
import time
import uuid
from pathlib import Path
from typing import BinaryIO

from utils.metrics.jsonl import parse_line
from utils.settings.errors import UserError

NAME = ".lock"
HEARTBEAT = 10  # seconds between two touches of the lock file by the process that holds it
SILENCE = 45  # seconds without one after which a holder on another machine counts as gone


class FolderLock:
    """The lock of a folder, held by this process until `release`.

    On one machine, the kernel's advisory lock on the file .lock decides: it ends with the process, however that ends,
    and child processes do not inherit it. Other machines see that lock on some network file systems only, so the holder
    also touches the file every HEARTBEAT seconds. A file that another machine has written is watched for SILENCE
    seconds: a touch means that the folder is in use, none that its holder is gone.

    A holder that was itself frozen for so long finds another process's name in the file, and `is_lost` becomes true.

    Raises: UserError naming the process that holds the lock, OSError where the file cannot be written.
    """

    def __init__(self, folder: Path, is_new: bool = False):
        self.path = folder / NAME
        self.is_new = is_new  # this process has made the folder
        self.pid = os.getpid()
        self.is_lost = False
        self.released = threading.Event()
        holder = {"host": socket.gethostname(), "pid": self.pid, "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        holder |= {"machine": machine_id(), "id": uuid.uuid4().hex}
        self.holder = json.dumps(holder).encode() + b"\n"
        self.file = self.acquire()
        threading.Thread(target=self.send_heartbeats, daemon=True).start()

    def acquire(self) -> BinaryIO:
        """Returns the lock file, open, locked and with this process's name in it."""
        abandoned = None
        while True:
            file = self.path.open("a+b")
            is_exclusive = try_lock(file)
            holder = read_holder(file)
            is_here = is_exclusive and holder.get("machine") == machine_id()
            is_stale = not holder or is_here or holder == abandoned
            if is_stale and is_exclusive is not False and is_same_file(file, self.path):
                replace_content(file, self.holder)
                return file
            file.close()
            if is_exclusive is False or not (is_stale or is_abandoned(self.path, holder)):
                raise UserError(in_use_message(self.path, holder))
            abandoned = holder

    def send_heartbeats(self) -> None:
        """Touches the file every HEARTBEAT seconds until the lock is released or lost; runs in a thread."""
        while not self.released.wait(HEARTBEAT):
            with contextlib.suppress(OSError, ValueError):  # ValueError: it has just been closed
                self.is_lost = self.is_taken()
                if self.is_lost:
                    return
                os.utime(self.file.fileno())

    def is_taken(self) -> bool:
        """True if another process has written its name into the file, or put a file of its own into its place."""
        is_replaced = self.path.exists() and not is_same_file(self.file, self.path)
        return is_replaced or os.pread(self.file.fileno(), 4096, 0) != self.holder

    def release(self) -> None:
        """Removes the lock file, and a new folder that nothing was written to."""
        is_child = os.getpid() != self.pid
        if is_child or self.released.is_set():
            return
        self.released.set()
        with self.file, contextlib.suppress(OSError):
            if self.is_taken():
                return
            self.path.unlink()
        for folder in (self.path.parent / "state", self.path.parent) if self.is_new else ():
            with contextlib.suppress(OSError):
                folder.rmdir()


def machine_id() -> str:
    """Returns an id of the running kernel: host names are not unique among containers."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return f"{uuid.getnode():x}"


def try_lock(file: BinaryIO) -> bool | None:
    """Takes the advisory lock of a file; False where another process has it, None where there are no such locks.

    The lock goes with the first descriptor of the file that this process closes: it must not be opened a second time.
    """
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:
        return None
    return True


def read_holder(file: BinaryIO) -> dict[str, str]:
    """Returns the holder that a lock file names, without control characters; empty where the file is or is damaged."""
    holder = parse_line(os.pread(file.fileno(), 4096, 0), key="pid") or {}
    return {name: "".join(filter(str.isprintable, str(value))) for name, value in holder.items()}


def replace_content(file: BinaryIO, content: bytes) -> None:
    """Replaces the content of an open file, on the disk too. Raises OSError, with the file closed."""
    try:
        os.ftruncate(file.fileno(), 0)
        os.write(file.fileno(), content)
        os.fsync(file.fileno())
    except OSError:
        file.close()
        raise


def in_use_message(path: Path, holder: dict[str, str]) -> str:
    """Returns the sentence for a folder that another process holds."""
    process = "another process"
    if holder:
        process = f"process {holder['pid']} on {holder.get('host')} (since {holder.get('since')})"
    return (
        f"{path.parent} is in use by {process}: name another --save_dir, or stop that process first (if it is known to "
        f"be gone, remove {path})"
    )


def is_abandoned(path: Path, holder: dict[str, str]) -> bool:
    """True if the holder of a lock file, on another machine whose clock may differ, sends no heartbeat."""
    last = last_heartbeat(path)
    print(f"{path.parent} was in use on {holder.get('host')}: waiting up to {SILENCE} s for a sign of life", flush=True)
    deadline = time.monotonic() + SILENCE
    while time.monotonic() < deadline:
        time.sleep(min(1, SILENCE / 10))
        now = last_heartbeat(path)
        if now != last or now == 0:
            return now == 0
    return True


def last_heartbeat(path: Path) -> float:
    """Returns the time of the last touch, 0 for a file that is gone; opening it makes NFS ask the server."""
    try:
        with path.open("rb") as file:
            return os.fstat(file.fileno()).st_mtime
    except FileNotFoundError:
        return 0.0


def is_same_file(file: BinaryIO, path: Path) -> bool:
    """True if an open file still goes by this path."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
