"""Progress in the last line of the terminal; a line a minute if standard error is not a terminal.

A thread draws, so that the seconds advance while XLA compiles or a device works, at no cost to that work.
"""

import contextlib
import functools
import shutil
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import TypeVar

import jax
import numpy as np
from jaxtyping import Int

COMPILED = "/jax/core/compile/backend_compile_duration"  # of a program, also one from the cache
LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"  # reported just before XLA compiles a program
DELAY = 0.7  # seconds until a wait is drawn
PERIOD = 0.2  # seconds between two drawings
INTERVAL = 60  # seconds between two lines if nothing can be drawn
WIDTH = 24  # characters of a bar
T = TypeVar("T")


class Wait:
    """A wait, with its progress."""

    def __init__(self, name: str, total: int = 0, unit: str = ""):
        self.name, self.total, self.unit = name, total, unit
        self.done = self.num_tokens = 0
        self.compile_seconds = 0.0
        self.thread, self.start = threading.get_ident(), time.perf_counter()
        self.segments: dict[int, tuple[int, int]] = {}  # finished rows and tokens, by the first row of a chain

    def count_rows(self, first_row: int, num_columns: int, lengths: Int[np.ndarray, "B"]) -> None:
        """Counts the finished rows and the tokens of a chain after a segment; `first_row`: number of its first row."""
        is_finished, num_tokens = lengths <= num_columns, np.minimum(lengths, num_columns)
        self.segments[first_row] = int(is_finished.sum()), int(num_tokens.sum())
        self.done, self.num_tokens = map(sum, zip(*self.segments.values(), strict=True))

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.start

    def describe(self, outer: "Wait", width: int) -> str:
        """Returns a line about this wait, which is for the `outer` one, with a bar if that fits into `width`."""
        seconds = int(outer.seconds)
        cells = [outer.name if self.total or self is outer else f"{outer.name}: {self.name}"]
        if self.total:
            cells.append(f"{self.done:,} of {self.total:,} {self.unit}")
        cells.append(f"{seconds // 60}:{seconds % 60:02d} so far")
        if self.num_tokens:
            sampling_seconds = max(self.seconds - self.compile_seconds, 1e-3)
            cells.append(f"{self.num_tokens / sampling_seconds:,.0f} tokens/s")
        if self.total and len("  ".join(cells)) + WIDTH + 4 <= width:
            bar = "#" * (WIDTH * self.done // self.total)
            cells.insert(1, f"[{bar:.<{WIDTH}}]")
        return "  ".join(cells)[:width]


class Terminal:
    """Draws the innermost wait, or what is being compiled for it, and how long the outermost one has taken so far.

    Where it cannot draw (`is_screen` false), it writes a line each INTERVAL seconds of a wait.
    """

    def __init__(self, is_screen: bool):
        self.is_screen = is_screen
        self.waits: list[Wait] = []
        self.compiling: Wait | None = None
        self.num_programs = 0  # compiled so far, or read from the cache
        self.last_line = 0.0  # by the clock
        self.lock = threading.Lock()
        self.is_drawn = False
        jax.monitoring.register_event_duration_secs_listener(self.on_compilation)
        threading.Thread(target=self.draw_forever, daemon=True).start()

    def on_compilation(self, event: str, seconds: float, fun_name: str = "", **_) -> None:
        """Records the start and the end of a compilation; JAX calls it in the thread that compiles."""
        if event == LOWERED:
            self.num_programs += 1
            self.compiling = Wait(f"compiling {program_name(fun_name)}, program {self.num_programs}")
        elif event == COMPILED:
            self.compiling = None
            for wait in self.waits:
                wait.compile_seconds += seconds

    def draw_forever(self) -> None:
        """Shows the current wait every PERIOD seconds; runs in a daemon thread."""
        while True:
            time.sleep(PERIOD)
            with self.lock:
                if self.waits:
                    self.show()

    def show(self) -> None:
        """Draws the wait behind the name of the outermost one of its thread, or writes it if that is due."""
        # The innermost wait, or of several threads' the last one whose progress is known.
        innermost = next((wait for wait in reversed(self.waits) if wait.total), self.waits[-1])
        wait = self.compiling or innermost
        outer = next((other for other in self.waits if other.thread == wait.thread), self.waits[0])
        if wait.seconds <= DELAY:
            return
        text = wait.describe(outer, shutil.get_terminal_size().columns - 1)
        if self.is_screen:
            self.replace_line(text)
        elif min(time.perf_counter() - self.last_line, outer.seconds) > INTERVAL:
            self.last_line = time.perf_counter()
            with contextlib.suppress(OSError, ValueError):  # nobody reads any more
                print(text, file=sys.stderr, flush=True)

    def replace_line(self, text: str) -> None:
        """Replaces the line; the next text that is printed overwrites it."""
        if text or self.is_drawn:
            sys.stderr.write(f"\r\x1b[K{text}\r")
            sys.stderr.flush()
        self.is_drawn = bool(text)


def program_name(fun_name: str) -> str:
    """Returns the name of a program without that of JAX around it."""
    return fun_name.removeprefix("jit(").removesuffix(")")


@functools.cache
def main_terminal() -> Terminal | None:
    """Returns the terminal of the main process, or what writes lines in its place; None in the other processes."""
    return Terminal(sys.stderr.isatty()) if jax.process_index() == 0 else None


@contextlib.contextmanager
def waiting(name: str, total: int = 0, unit: str = "") -> Iterator[Wait]:
    """Draws a wait while the block runs, also as a decorator: `with waiting("sampling", 256, "rows") as wait`."""
    wait, screen = Wait(name, total, unit), main_terminal()
    if not screen:
        yield wait
        return
    screen.compiling = None  # what was lowered before was perhaps never compiled
    screen.waits.append(wait)
    try:
        yield wait
    finally:
        with screen.lock:
            screen.waits.remove(wait)
            screen.replace_line("")


def track(items: Sequence[T], unit: str) -> Iterator[T]:
    """Yields the items, counted by the innermost wait of this thread."""
    waits = main_terminal().waits if main_terminal() else []
    wait = next((wait for wait in reversed(waits) if wait.thread == threading.get_ident()), Wait(""))
    wait.done, wait.total, wait.unit = 0, len(items), unit
    for item in items:
        yield item
        wait.done += 1
