"""What JAX and the C library are told before the first array: where compiled programs stay, and that memory does."""

import contextlib
import ctypes
import importlib.util
import json
import logging
import os
import resource
import signal
import sys
import threading
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax

from utils.settings.errors import UserError

COMPILER = "jax._src.interpreters.pxla"  # whose log tells the shapes of a program that is lowered
COMPILED = "/jax/core/compile/backend_compile_duration"  # of a program, also when the cache had it
FOUND = "/jax/compilation_cache/cache_hits"
FEW_FILES, MANY_FILES = 64, 1024  # open at a time: needed by a small run with a few workers, and plenty
M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8  # of glibc's malloc.h


def prepare() -> None:
    """Keeps compiled programs in the user's cache, and, where there is no accelerator, freed memory in the process.

    JAX_COMPILATION_CACHE_DIR names another folder, JAX_ENABLE_COMPILATION_CACHE=0 keeps nothing.

    Raises: UserError where the process may open too few files.
    """
    open_closed_streams()
    raise_file_limit()
    if not jax.config.jax_compilation_cache_dir:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "lmpo"
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    if sys.platform == "linux" and not any(map(importlib.util.find_spec, ("jax_plugins", "libtpu"))):
        keep_memory()


def open_closed_streams() -> None:
    """Opens the null device for standard streams that were closed (`>&-`).

    Otherwise the next file that is opened takes the stream's number, and what libraries print is written into it.
    """
    for name, number, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # it gets the lowest number that is free, which is this one
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 (for as long as the process lives)


def raise_file_limit() -> None:
    """Raises the soft limit of open files to MANY_FILES where the hard limit allows that.

    Raises: UserError where even FEW_FILES are too many.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    is_low = soft != resource.RLIM_INFINITY and soft < MANY_FILES
    if is_low:
        soft = MANY_FILES if hard == resource.RLIM_INFINITY else min(hard, MANY_FILES)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if is_low and soft < FEW_FILES:
        raise UserError(f"this process may open only {soft} files: raise that limit, as by `ulimit -n {MANY_FILES}`")


def keep_memory() -> None:
    """Leaves the temporaries of a program to the next one: zeroing fresh pages took 40% of an update on two cores."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # not in every C library
        for option, value in ((M_ARENA_MAX, 1), (M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, -1)):
            libc.mallopt(option, value)


@contextlib.contextmanager
def limited(seconds: float, num_bytes: int) -> Iterator[None]:
    """Around a program that is not trusted: a limit on CPU seconds (TimeoutError), and on new memory (MemoryError).

    In the main thread of a POSIX system; elsewhere without limits. It stops loops of Python, and allocations: so also
    single operations, which no signal interrupts, are as short as their memory is small.
    """

    def stop(*_) -> None:
        raise TimeoutError(f"it takes more than {seconds} seconds")

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    if not Path("/proc/self/statm").exists() or threading.current_thread() is not threading.main_thread():
        yield
        return
    num_pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = num_pages * resource.getpagesize() + num_bytes
    most = most if soft == resource.RLIM_INFINITY else min(soft, most)
    before = signal.signal(signal.SIGVTALRM, stop)
    try:
        resource.setrlimit(resource.RLIMIT_AS, (most, hard))
        signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.signal(signal.SIGVTALRM, before)


def take_turns(jobs: Sequence[Generator[Any, None, Any]]) -> list[Any]:
    """What generators return: run in threads, one at a time but while the device works on the arrays they yield.

    A CPU computes what one thread asks for in order, and what several ask for at once.
    """
    lock = threading.Lock()

    def run(job: Generator[Any, None, Any]) -> Any:
        while True:
            with lock:
                try:
                    arrays = next(job)
                except StopIteration as end:
                    return end.value
            jax.block_until_ready(arrays)

    if len(jobs) == 1:
        return [run(jobs[0])]
    with ThreadPoolExecutor(len(jobs)) as pool:
        try:
            return list(pool.map(run, jobs))
        finally:  # an error or a signal: the others end with their next turn
            with lock:
                for job in jobs:
                    job.close()


class Compilations:
    """Counts the programs that are compiled while it is entered; those that the cache has are not.

    All are listed in `file`, one JSON object a line: name, shapes of arguments, seconds, and whether the cache had it.
    """

    def __init__(self, file: Path | None = None):
        self.file, self.shapes = file, {}  # shapes of what is about to be compiled, by name
        self.num_programs, self.num_found, self.seconds, self.is_found = 0, 0, 0.0, False

    def __enter__(self) -> "Compilations":
        jax.monitoring.register_event_duration_secs_listener(self.compiled)
        jax.monitoring.register_event_listener(self.found)
        if self.file:
            logging.getLogger(COMPILER).setLevel(logging.DEBUG)
            logging.getLogger(COMPILER).addFilter(self.lowered)
        return self

    def __exit__(self, *_) -> None:
        jax.monitoring.unregister_event_duration_listener(self.compiled)
        jax.monitoring.unregister_event_listener(self.found)
        logging.getLogger(COMPILER).removeFilter(self.lowered)

    def lowered(self, record: logging.LogRecord) -> bool:
        """Reads the compiler's log, which is not written anywhere else for that."""
        with contextlib.suppress(IndexError, TypeError, AttributeError):  # of another version of JAX
            name, shapes = record.args[:2]
            self.shapes[name] = list(dict.fromkeys(shape.str_short() for shape in shapes))
        return record.levelno > logging.DEBUG

    def found(self, event: str, **_) -> None:
        if event == FOUND:
            self.num_found += 1
            self.is_found = True

    def compiled(self, event: str, seconds: float, fun_name: str = "", **_) -> None:
        if event != COMPILED:
            return
        if self.file:
            row = {"program": fun_name, "shapes": self.shapes.pop(fun_name, []), "seconds": round(seconds, 3)}
            with contextlib.suppress(OSError), self.file.open("a") as file:
                file.write(json.dumps(row | {"from_cache": self.is_found}) + "\n")
        self.num_programs, self.seconds, self.is_found = self.num_programs + 1, self.seconds + seconds, False

    def take(self) -> dict[str, float]:
        """Metrics since the last call."""
        metrics = {
            "compile/num_programs": self.num_programs - self.num_found,
            "compile/num_from_cache": self.num_found,
            "times/compile": self.seconds,
        }
        self.num_programs, self.num_found, self.seconds = 0, 0, 0.0
        return metrics
