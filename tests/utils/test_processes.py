"""A lane answers in order, or tells how it ended; more in tests/envs/test_scoring.py."""

import sys

import pytest

from tests.hostile import MEMORY
from tests.processes import wait_until_gone
from utils.processes import Dead, Lane, descendant_pids

TARGET = "tests.hostile:obey"


def test_requests_are_answered_in_order():
    lane = Lane(TARGET, {"setup": (1, 2)})
    assert lane.answer(60) == {"setup": [1, 2]}
    lane.send("ok")
    assert lane.answer(60) == "ok"
    lane.send("ok")
    lane.send("raise")
    assert [lane.answer(60), lane.answer(60)] == ["ok", "of the reward"]
    pids = descendant_pids(lane.process.pid)
    lane.close()
    assert lane.process.returncode == 0
    wait_until_gone(lane.process.pid, *pids)


@pytest.mark.parametrize(
    ("way", "seconds", "dead"),
    [
        ("sleep", 0.5, Dead("it took longer than 0.5 seconds", is_late=True)),
        ("regex", 0.5, Dead("it took longer than 0.5 seconds", is_late=True)),
        ("exit 0", 60, Dead("it ended its process with exit code 0")),
        ("exit", 60, Dead("it ended its process with exit code 1")),
        ("kill", 60, Dead("it ended its process with exit code -9")),
        ("memory of children", 60, Dead("its processes took more than 300 MiB of memory")),
        ("shared memory", 60, Dead("its processes took more than 300 MiB of memory")),
    ],
)
@pytest.mark.skipif(sys.platform != "linux", reason="memory of processes is read from /proc")
def test_a_lane_tells_how_it_ended(way, seconds, dead):
    lane = Lane(TARGET, None, max_memory=3 * MEMORY)
    assert lane.answer(60) is None
    pids = descendant_pids(lane.process.pid)
    lane.send(way)
    assert lane.answer(seconds) == dead
    wait_until_gone(lane.process.pid, *pids)
    lane.close()
