"""Runs code of the policy, each piece in a process of its own, confined by sandbox.py beside this file."""

import contextlib
import math
import os
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from dataclasses import dataclass
from typing import BinaryIO

from recipes.python_tool import sandbox
from utils.settings.errors import UserError

MAX_OUTPUT = 20_000  # bytes that are read of the output of code
MAX_FOLDER = 1 << 24  # bytes of the files that code writes
MAX_FILES = 1000
PREFIX = "lmpo-python-"  # of temporary folders
POLL = 0.01  # seconds between two looks at these files
FOLDER = os.path.dirname(sandbox.__file__)
START = f"import sys; sys.path.append({FOLDER!r}); import sandbox; sandbox.main(*sys.argv[1:])"
COMMAND = (os.path.realpath(sys.executable), "-SPsB", "-X", "utf8", "-c", START)
VARIABLES = {"PYTHONHASHSEED": "0", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
Process = subprocess.Popen[bytes]
PATHS = sysconfig.get_paths()
PACKAGES = [PATHS["purelib"], PATHS["platlib"]]  # folders of installed packages, numpy and sympy among them
LIBRARIES = [PATHS["stdlib"], PATHS["platstdlib"], sysconfig.get_config_var("LIBDIR") or "/usr/lib"]
SYSTEM_PATHS = ["/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/etc/ld.so.cache"]
READABLE = [*LIBRARIES, *PACKAGES, *SYSTEM_PATHS]  # nothing of the user or the project


class CodeError(RuntimeError):
    """Raised for code that fails, or that exceeds a limit."""


@dataclass
class Interpreter:
    """Runs code, each piece in a process of its own; all pieces of a turn share a time limit."""

    seconds: float
    memory: int  # bytes of address space
    is_confined: bool
    seconds_left: float = 0.0

    def check(self) -> None:
        """Raises UserError if code is to be confined and cannot be, or does not run."""
        missing = sandbox.missing_protection() if self.is_confined else ""
        if missing:
            raise UserError(
                f"the tool python cannot confine code here, since there is no {missing}: give --env_options "
                "sandbox=off, which runs code of the model with limits of time, memory and files only"
            )
        self.renew()
        try:
            self.python("None")
        except CodeError as error:
            raise UserError(f"the tool python does not run here: {error}") from error

    def renew(self) -> None:
        """Begins a turn."""
        self.seconds_left = self.seconds

    def python(self, code: str) -> str:
        """
        Runs Python code, and returns what it prints. The value of a last line that is an expression is printed, too.
        Each call starts anew: names of earlier calls are gone.

        Args:
            code: The code, for example "import math\\nmath.comb(10, 3)".
        """
        with tempfile.TemporaryFile() as source, tempfile.TemporaryFile() as output:
            source.write(str(code).encode(errors="replace"))
            source.seek(0)
            exit_code = self.run(source, output)
            num_bytes = output.seek(0, os.SEEK_END)
            output.seek(0)
            text = output.read(MAX_OUTPUT).decode(errors="replace").strip("\n")
        if num_bytes >= sandbox.MAX_FILE:
            raise CodeError(f"the code printed more than {sandbox.MAX_FILE >> 20} MiB")
        if exit_code < 0:
            raise CodeError(f"the process was ended by signal {-exit_code} ({signal.strsignal(-exit_code)})")
        if exit_code:
            *_, error = ["", *text.splitlines()]
            raise CodeError(error or f"the process ended with exit code {exit_code}")
        return text

    def run(self, source: BinaryIO, output: BinaryIO) -> int:
        """Returns the exit code of a process that runs code. Raises: CodeError if it exceeds a limit."""
        limits = [str(math.ceil(self.seconds_left) + 1), str(self.memory), str(os.getpid())]
        confinement = "on" if self.is_confined else "off"
        folders = [os.pathsep.join(READABLE), os.pathsep.join(PACKAGES)]
        start = time.monotonic()
        with tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True) as folder:
            process = subprocess.Popen(
                [*COMMAND, *limits, confinement, *folders],
                stdin=source,
                stdout=output,
                stderr=output,
                cwd=folder,
                env=VARIABLES,
                start_new_session=True,
            )
            try:
                return self.wait(process, folder, start + self.seconds_left)
            finally:
                end(process)
                self.seconds_left -= time.monotonic() - start

    def wait(self, process: Process, folder: str, deadline: float) -> int:
        """Returns the exit code of a process. Raises: CodeError if it exceeds the time limit, or writes too much."""
        while time.monotonic() < deadline:
            try:
                return process.wait(POLL)
            except subprocess.TimeoutExpired:
                check_folder(folder)
        raise CodeError(f"the code of this turn took longer than {self.seconds:g} seconds")


def check_folder(folder: str) -> None:
    """Raises CodeError for too many files in a folder, or too many bytes."""
    num_files = num_bytes = 0
    for file in os.scandir(folder):
        num_files += 1
        with contextlib.suppress(FileNotFoundError):  # removed by now
            status = file.stat(follow_symlinks=False)
            num_bytes += max(status.st_size, 512 * status.st_blocks)  # blocks may lie behind the end
        if num_files > MAX_FILES or num_bytes > MAX_FOLDER:
            raise CodeError(f"the code wrote more than {MAX_FILES} files or {MAX_FOLDER >> 20} MiB")


def end(process: Process) -> None:
    """Kills a process and its group, which unconfined code may have enlarged."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
