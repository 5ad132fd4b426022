"""Signals that ask a run to end: the first one at the next safe moment, the second one at once."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Self

ASKING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
REPEATS = 1.0  # seconds in which signals are one: `timeout` sends its own to the process and to its group


class Stop(BaseException):
    """Raised if a signal ends a run; not an Exception, so that `except Exception` does not catch it."""


class Signals:
    """Remembers the first signal that asks the run to end (`received`); one after REPEATS seconds ends the process.

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
        for number in ASKING:
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
            self.may_raise = False
            raise Stop

    def read_signals(self) -> None:
        """Reads the numbers of signals until the pipe is closed; runs in a thread."""
        first_time = 0.0
        while number := os.read(self.read_end, 1):
            if number[0] not in self.handlers:
                continue
            if first_time:
                if time.monotonic() - first_time > REPEATS:
                    os._exit(128 + number[0])
                continue
            first_time = time.monotonic()
            self.received = signal.Signals(number[0])
            with contextlib.suppress(OSError):
                print(f"{self.received.name}: the run will be saved and end; once more ends it at once", flush=True)
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
