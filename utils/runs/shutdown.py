"""Signals that ask a run to end: the first one at the next safe moment, the second one at once."""

import contextlib
import math
import os
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Self

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # a second one ends the process at once
WARNING = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)  # of a scheduler, and of the kernel, which repeats its own
REPEATS = 1.0  # seconds in which signals are one: `timeout` sends its own to the process and to its group


class Stop(BaseException):
    """Raised if a signal ends a run; not an Exception, so that `except Exception` does not catch it."""


class Signals:
    """Remembers the first signal that asks the run to end (`received`); a second of ENDING ends the process at once.

    Signals within REPEATS seconds are one.

    Python runs its handlers between two steps of the main thread, which may be in XLA for minutes. A thread therefore
    reads the numbers of signals as they come: it prints at once, and it ends the process. Ignored signals (nohup) stay
    ignored; in another thread than the main one this does nothing.
    """

    def __init__(self):
        self.received: signal.Signals | None = None
        self.may_raise = False

    def __enter__(self) -> Self:
        self.handlers = {}
        if threading.current_thread() is not threading.main_thread():
            return self
        self.read_end, self.write_end = os.pipe()
        os.set_blocking(self.write_end, False)
        self.wakeup = signal.set_wakeup_fd(self.write_end, warn_on_full_buffer=False)
        for number in (*ENDING, *WARNING):
            if signal.getsignal(number) is not signal.SIG_IGN:
                self.handlers[number] = signal.signal(number, self.handle)
        threading.Thread(target=self.read_signals, daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        if self.handlers:
            signal.set_wakeup_fd(self.wakeup)
            os.close(self.write_end)  # which ends the thread

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Remembers a signal, and raises Stop within `raising`."""
        self.received = self.received or signal.Signals(number)
        if self.may_raise:
            self.hold()
            raise Stop

    def hold(self) -> None:
        """Keeps signals from raising Stop in the rest of the block of `raising`."""
        self.may_raise = False

    def read_signals(self) -> None:
        """Reads the numbers of signals until the pipe is closed; runs in a thread."""
        first_time, is_announced = math.inf, False
        while number := os.read(self.read_end, 1):
            if time.monotonic() - first_time > REPEATS and number[0] in ENDING:
                os._exit(128 + number[0])
            if number[0] in ENDING:
                first_time = min(first_time, time.monotonic())
            if number[0] not in self.handlers or is_announced:
                continue
            is_announced = True
            self.received = self.received or signal.Signals(number[0])
            advice = "; once more ends it at once" if number[0] in ENDING else ""
            with contextlib.suppress(OSError):
                print(f"{self.received.name}: the run will be saved and end{advice}", flush=True)
        os.close(self.read_end)

    @contextlib.contextmanager
    def raising(self) -> Iterator[None]:
        """Makes a signal raise Stop at once, in a block that may be left at any moment."""
        self.may_raise = True
        try:
            if self.received:
                raise Stop
            yield
        finally:
            self.may_raise = False
