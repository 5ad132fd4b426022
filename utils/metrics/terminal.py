"""What is waited for, in the last line of the terminal; nothing is drawn where standard error is no terminal.

A thread draws, so that seconds go on while XLA compiles or a device works, and the work itself pays nothing for it.
"""

import contextlib
import functools
import shutil
import sys
import threading
import time
from collections.abc import Iterator, Sequence

import jax
import numpy as np
from jaxtyping import Int

from utils.devices.runtime import COMPILED
from utils.devices.sharding import is_main_process

LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"  # told just before XLA begins with a program
DELAY, PERIOD = 0.7, 0.2  # seconds until a wait is worth a line, and between two drawings of it
WIDTH = 24  # characters of a bar


class Wait:
    """Something that is waited for, and how much of it is done."""

    def __init__(self, name: str, total: int = 0, unit: str = ""):
        self.name, self.total, self.unit = name, total, unit
        self.done, self.num_tokens, self.compiling = 0, 0, 0.0  # compiling: seconds
        self.start, self.parts = time.perf_counter(), {}  # finished rows and tokens, by the first row of a part

    def watch(
        self, call: int, first: int, tokens: Int[np.ndarray, "B A"], t: int, lengths: Int[np.ndarray, "B"]
    ) -> None:
        """Counts finished rows and their tokens: `watch` of a sampler, for its call that begins with row `call`."""
        self.parts[call + first] = int((lengths <= t).sum()), int(np.minimum(lengths, t).sum())
        self.done, self.num_tokens = map(sum, zip(*self.parts.values(), strict=True))

    def __str__(self) -> str:
        seconds, parts = time.perf_counter() - self.start, [self.name]
        if self.total:
            filled = WIDTH * self.done // self.total
            parts += [f"[{'#' * filled:.<{WIDTH}}]", f"{self.done / self.total:4.0%} of {self.total:,} {self.unit}"]
        if self.num_tokens:
            parts.append(f"{self.num_tokens / max(seconds - self.compiling, 1e-3):,.0f} tokens/s")
        return "  ".join([*parts, f"{int(seconds) // 60}:{int(seconds) % 60:02d}"])


class Terminal:
    """Draws the innermost wait, or what is being compiled for it."""

    def __init__(self):
        self.waits: list[Wait] = []
        self.compiling: Wait | None = None
        self.lock, self.is_drawn = threading.Lock(), False
        jax.monitoring.register_event_duration_secs_listener(self.hear)
        threading.Thread(target=self.run, daemon=True).start()

    def hear(self, event: str, seconds: float, fun_name: str = "", **_) -> None:
        if event == LOWERED:
            self.compiling = Wait(f"compiling {fun_name.removeprefix('jit(').removesuffix(')')}")
        elif event == COMPILED:
            self.compiling = None
            for wait in self.waits:
                wait.compiling += seconds

    def run(self) -> None:
        while True:
            time.sleep(PERIOD)
            with self.lock:
                wait = self.waits and (self.compiling or self.waits[-1])
                if wait and time.perf_counter() - wait.start > DELAY:
                    self.write(str(wait)[: shutil.get_terminal_size().columns - 1])

    def write(self, text: str) -> None:
        """Replaces the line; what is printed next begins where it does."""
        if text or self.is_drawn:
            sys.stderr.write(f"\r\x1b[K{text}\r")
            sys.stderr.flush()
        self.is_drawn = bool(text)


@functools.cache
def terminal() -> Terminal | None:
    """That of the main process, if it has one."""
    return Terminal() if sys.stderr.isatty() and is_main_process() else None


@contextlib.contextmanager
def waiting(name: str, total: int = 0, unit: str = "") -> Iterator[Wait]:
    """Says what is waited for inside, also as a decorator: `with waiting("sampling", 256, "rows") as wait`."""
    wait, screen = Wait(name, total, unit), terminal()
    if screen:
        screen.compiling = None  # what was lowered before was perhaps never compiled
        screen.waits.append(wait)
    try:
        yield wait
    finally:
        if screen:
            with screen.lock:
                screen.waits.remove(wait)
                screen.write("")


def track(items: Sequence, unit: str) -> Iterator:
    """Yields the items, counted by the innermost wait."""
    screen = terminal()
    wait = screen.waits[-1] if screen and screen.waits else Wait("")
    wait.done, wait.total, wait.unit = 0, len(items), unit
    for item in items:
        yield item
        wait.done += 1
