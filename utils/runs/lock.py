"""Locks a run folder, so that two runs never write to one at the same time."""

import contextlib
import os
from pathlib import Path

from filelock import SoftFileLease, Timeout

from utils.settings.errors import UserError

NAME = ".lock"
HEARTBEAT = 5  # seconds between two touches of the lock file by the process that holds it
SILENCE = 45  # seconds without one after which a holder on another machine counts as gone


class FolderLock:
    """The lock of a folder, held by this process until `release`: a lease of filelock on the file .lock.

    A file of a process that has ended on this machine is taken over at once. Other files are watched for SILENCE
    seconds: a touch means that the folder is in use, none that its holder is gone, or stopped.

    Raises: UserError naming the process that holds the lock, OSError if the file cannot be written.
    """

    def __init__(self, folder: Path, is_new: bool = False):
        self.path = folder / NAME
        self.is_new = is_new  # this process has made the folder
        settings = {"lease_duration": SILENCE, "heartbeat_interval": HEARTBEAT}
        self.lease = SoftFileLease(self.path, **settings, thread_local=False, blocking=False)
        with contextlib.suppress(Timeout):
            self.lease.acquire()
        if not self.lease.is_locked:
            self.wait()
        if not self.lease.is_locked:
            raise UserError(
                f"{folder} is in use by {self.holder}: name another --save_dir, or stop that process first (if it is "
                f"known to be gone, remove {self.path})"
            )

    @property
    def holder(self) -> str:
        """The process that holds the lock, in words."""
        owner = self.lease.owner
        return f"process {owner.pid} on {owner.hostname}" if owner else "another process"

    def wait(self) -> None:
        """Takes the lock over if its holder sends no heartbeat."""
        first = last_heartbeat(self.path)
        print(f"{self.path} is of {self.holder}: waiting up to {SILENCE} s for a sign of life", flush=True)

        def is_alive() -> bool:
            return last_heartbeat(self.path) not in (first, 0)

        with contextlib.suppress(Timeout):
            self.lease.acquire(blocking=True, timeout=SILENCE * 1.1, poll_interval=SILENCE / 100, cancel_check=is_alive)
        if not self.lease.is_locked and not is_alive():
            self.lease.force_break()  # on NFS, which cannot exchange two names, filelock takes no file over
            with contextlib.suppress(Timeout):
                self.lease.acquire()

    @property
    def is_lost(self) -> bool:
        """True if another process has taken the lock, as it may if this one was frozen, or removed its file."""
        return self.lease.compromise is not None

    def release(self) -> None:
        """Removes the lock file, and a new folder that nothing was written to."""
        if not self.lease.is_locked:  # released before, or in a child process
            return
        with contextlib.suppress(OSError):
            self.lease.release()
        for folder in (self.path.parent / "state", self.path.parent) if self.is_new else ():
            with contextlib.suppress(OSError):
                folder.rmdir()


def last_heartbeat(path: Path) -> float:
    """Returns the time of the last touch, 0 for a file that is gone; opening it makes NFS ask the server."""
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        return os.fstat(file.fileno()).st_mtime
    return 0.0
