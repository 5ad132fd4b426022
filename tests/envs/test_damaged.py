"""Damaged files of a run: each of 200 is read, left out, or refused by a sentence that names it: no traceback."""

import resource
import time
import traceback
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from envs.data.messages import read_reference
from tests.damaged import KINDS, damaged, make_run
from utils.metrics.curves import intervals
from utils.settings.errors import UserError

FIRST, OTHERS = range(5), range(5, 50)
MOST_SECONDS, MOST_MEMORY = 10, 2 << 20  # the latter in KiB


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    make_run(folder / "run")
    return folder


def try_all(files: Path, kind: str, numbers: range) -> Counter:
    """Reads the damaged files of a kind; returns how many were read and how many refused."""
    outcomes, broken = Counter(), []
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in numbers:
        start = time.monotonic()
        with damaged(files, kind, number) as file:
            try:
                KINDS[kind].read(file)
                outcomes["read"] += 1
            except UserError as error:
                outcomes["refused"] += 1
                if file.name not in str(error) or len(str(error)) < len(str(file)) + 10:
                    broken.append(f"{kind} {number}: the sentence does not name {file.name}: {error}")
            except BaseException:
                broken.append(f"{kind} {number}: {traceback.format_exc()}")
        if (seconds := time.monotonic() - start) > MOST_SECONDS:
            broken.append(f"{kind} {number} takes {seconds:.0f} s")
    assert not broken, "\n\n".join(broken)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MOST_MEMORY
    return outcomes


@pytest.mark.parametrize("kind", KINDS)
def test_whole_files_are_read(files, kind):
    KINDS[kind].read(files / KINDS[kind].file)


@pytest.mark.parametrize("numbers", [FIRST, pytest.param(OTHERS, marks=pytest.mark.slow)], ids=["5", "45"])
@pytest.mark.parametrize("kind", KINDS)
def test_damaged_files_are_read_or_refused_by_name(files, kind, numbers):
    outcomes = try_all(files, kind, numbers)
    assert outcomes.total() == len(numbers)
    print(kind, dict(outcomes))  # -s shows how many were read, and how many refused


BEHIND = {
    "npz": "numpy.bincount",
    "metrics": "utils.reporting.page.curve_data",
    "config": "core.eval.as_held_out",
    "replay": "extras.replay.make_config",
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_of_our_own_behind_a_reader_stays_one(files, kind, monkeypatch):
    def fault(*_, **__):
        raise AttributeError("a fault of our own")

    # The library behind the reader fails.
    monkeypatch.setattr(BEHIND[kind], fault)
    with pytest.raises(AttributeError, match="a fault of our own"):
        KINDS[kind].read(files / KINDS[kind].file)


def test_halves_of_intervals_and_large_answers_are_read(files):
    """Found by other seeds: a width without its value, an end without the other, an answer beyond any float."""
    steps = np.array([0.0]), np.array([0.5])
    assert intervals({"x_ci": steps, "x_low": steps}, "x") == {}
    assert read_reference(10**400) == str(10**400)
    with damaged(files, "config", 0) as file:
        file.write_text('{"env_name": "countdown", "test_env_name": "countdown(x)", "run": {"seconds": 1}}')
        with pytest.raises(UserError, match=r"is not name=value, .*\(.*config.json sets --test_env_name"):
            KINDS["config"].read(file)
