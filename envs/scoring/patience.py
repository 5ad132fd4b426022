"""How long rows that can be sampled wait for rows whose environment still computes."""

from collections.abc import Callable
from threading import Condition
from typing import NamedTuple


class Patience(NamedTuple):
    """How long rows that can be computed wait for late ones.

    They wait for one more row while it comes sooner than their share of a computation's time. So they wait while more
    rows come in the time of a computation than are there.
    """

    seconds: float = 0.0  # that a computation takes
    num_there: int = 0  # rows that can be computed, without those that come

    def wait(self, has_changed: Condition, num_come: Callable[[], int], is_all: Callable[[], bool]) -> None:
        """Waits, holding the lock of `has_changed`, for rows that come until `is_all`."""
        num_before = -1
        while not is_all() and num_come() > num_before:
            num_before = num_come()
            share = self.seconds / max(1, self.num_there + num_before)
            has_changed.wait_for(lambda: is_all() or num_come() > num_before, share)  # noqa: B023 (called at once)


HURRY = Patience()
