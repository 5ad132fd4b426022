"""Progress in the last line of the terminal; nothing is drawn where standard error is no terminal.

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

from utils.devices.sharding import is_main_process

COMPILED = "/jax/core/compile/backend_compile_duration"  # of a program, also one from the cache
LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"  # reported just before XLA compiles a program
DELAY = 0.7  # seconds until a wait is drawn
PERIOD = 0.2  # seconds between two drawings
WIDTH = 24  # characters of a bar
Item = TypeVar("Item")


class Wait:
    """A wait, with its progress."""

    def __init__(self, name: str, total: int = 0, unit: str = ""):
        self.name = name
        self.thread = threading.get_ident()
        self.total = total
        self.unit = unit
        self.done = 0
        self.num_tokens = 0
        self.compile_seconds = 0.0
        self.start = time.perf_counter()
        self.segments: dict[int, tuple[int, int]] = {}  # finished rows and tokens, by the first row of a chain

    def on_segment(
        self,
        call_offset: int,
        row_offset: int,
        tokens: Int[np.ndarray, "B A"],
        num_columns: int,
        lengths: Int[np.ndarray, "B"],
    ) -> None:
        """Counts finished rows and tokens after a segment of a sampler's call, whose first row is `call_offset`."""
        is_finished = lengths <= num_columns
        num_tokens = np.minimum(lengths, num_columns).sum()
        self.segments[call_offset + row_offset] = int(is_finished.sum()), int(num_tokens)
        self.done = sum(rows for rows, _ in self.segments.values())
        self.num_tokens = sum(tokens for _, tokens in self.segments.values())

    def __str__(self) -> str:
        seconds = time.perf_counter() - self.start
        cells = [self.name]
        if self.total:
            bar = "#" * (WIDTH * self.done // self.total)
            cells.append(f"[{bar:.<{WIDTH}}]")
            cells.append(f"{self.done / self.total:4.0%} of {self.total:,} {self.unit}")
        if self.num_tokens:
            sampling_seconds = max(seconds - self.compile_seconds, 1e-3)
            cells.append(f"{self.num_tokens / sampling_seconds:,.0f} tokens/s")
        cells.append(f"{int(seconds) // 60}:{int(seconds) % 60:02d}")
        return "  ".join(cells)


class Terminal:
    """Draws the innermost wait, or what is being compiled for it."""

    def __init__(self):
        self.waits: list[Wait] = []
        self.compiling: Wait | None = None
        self.lock = threading.Lock()
        self.is_drawn = False
        jax.monitoring.register_event_duration_secs_listener(self.on_compilation)
        threading.Thread(target=self.draw_forever, daemon=True).start()

    def on_compilation(self, event: str, seconds: float, fun_name: str = "", **_) -> None:
        """Records the start and the end of a compilation; JAX calls it in the thread that compiles."""
        if event == LOWERED:
            name = fun_name.removeprefix("jit(").removesuffix(")")
            self.compiling = Wait(f"compiling {name}")
        elif event == COMPILED:
            self.compiling = None
            for wait in self.waits:
                wait.compile_seconds += seconds

    def draw_forever(self) -> None:
        """Draws the current wait every PERIOD seconds; runs in a daemon thread."""
        while True:
            time.sleep(PERIOD)
            with self.lock:
                if not self.waits:
                    continue
                # The innermost wait, or of several threads' the last one whose progress is known.
                innermost = next((wait for wait in reversed(self.waits) if wait.total), self.waits[-1])
                wait = self.compiling or innermost
                if time.perf_counter() - wait.start > DELAY:
                    width = shutil.get_terminal_size().columns - 1
                    self.replace_line(str(wait)[:width])

    def replace_line(self, text: str) -> None:
        """Replaces the line; the next text that is printed overwrites it."""
        if text or self.is_drawn:
            sys.stderr.write(f"\r\x1b[K{text}\r")
            sys.stderr.flush()
        self.is_drawn = bool(text)


@functools.cache
def main_terminal() -> Terminal | None:
    """Returns the terminal of the main process; None where there is none."""
    has_terminal = sys.stderr.isatty() and is_main_process()
    return Terminal() if has_terminal else None


@contextlib.contextmanager
def waiting(name: str, total: int = 0, unit: str = "") -> Iterator[Wait]:
    """Draws a wait while the block runs, also as a decorator: `with waiting("sampling", 256, "rows") as wait`."""
    wait = Wait(name, total, unit)
    screen = main_terminal()
    if screen:
        screen.compiling = None  # what was lowered before was perhaps never compiled
        screen.waits.append(wait)
    try:
        yield wait
    finally:
        if screen:
            with screen.lock:
                screen.waits.remove(wait)
                screen.replace_line("")


def track(items: Sequence[Item], unit: str) -> Iterator[Item]:
    """Yields the items, counted by the innermost wait of this thread."""
    screen = main_terminal()
    own = [wait for wait in screen.waits if wait.thread == threading.get_ident()] if screen else []
    wait = own[-1] if own else Wait("")
    wait.done = 0
    wait.total = len(items)
    wait.unit = unit
    for item in items:
        yield item
        wait.done += 1
