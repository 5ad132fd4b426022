"""Threads that launch programs: those in which small models are computed on a CPU, and those beside a sampler.

`Layout.num_chains` is the number of the first: a product is too small for several cores.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Event, Lock, RLock, local
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")
# Held while a sampler, or a thread beside it, launches programs: they begin in the same order on all devices. Programs
# whose collectives begin in another order on each device would wait for one another forever.
LAUNCHING = RLock()
THREAD = local()  # .turn: the lock that this thread holds while it works on the host; see `take_turns`


def side_by_side(function: Callable[[T], R], parts: Sequence[T]) -> list[R]:
    """Returns the function of each part, all computed at the same time, the first one's in this thread."""
    first, *others = parts
    with ThreadPoolExecutor(len(parts)) as pool:
        futures = [pool.submit(function, part) for part in others]
        return [function(first), *(future.result() for future in futures)]


def take_turns(function: Callable[[T], R], parts: Sequence[T], cancelled: Event) -> list[R]:
    """Returns the function of each part. Host work of one thread runs beside the device's work of the others.

    Without the lock threads would share the interpreter, and a rollout of the demo takes 10% longer on two cores. An
    error, or a signal in this thread, sets `cancelled`, at which functions return early.
    """
    if len(parts) == 1:
        return [function(parts[0])]
    turn = Lock()

    def work(part: T) -> R:
        with turn:
            THREAD.turn = turn
            return function(part)

    with ThreadPoolExecutor(len(parts)) as pool:
        try:
            return list(pool.map(work, parts))
        except BaseException:
            cancelled.set()
            raise


@contextmanager
def between_turns() -> Iterator[None]:
    """Lets other threads of `take_turns` work on the host while this one waits in the block."""
    turn = getattr(THREAD, "turn", None)
    if turn is None:
        yield
        return
    turn.release()
    try:
        yield
    finally:
        turn.acquire()
