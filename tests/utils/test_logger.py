"""metrics.jsonl stays readable, and the terminal stays safe."""

import io
import json
import re
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from utils.metrics.curves import read_metrics
from utils.metrics.logger import Logger, printable
from utils.reporting.page import write_report
from utils.settings.errors import user_errors


def lines(folder) -> list[dict]:
    def refuse(constant):
        raise ValueError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_numbers_of_all_kinds_become_valid_json(tmp_path):
    with Logger(tmp_path) as logger:
        logger.log(np.int64(3), {"a": float("nan"), "b": np.float32("inf"), "c": jnp.float32(0.5), "d": np.arange(2.0)})
        assert lines(tmp_path) == [{"global_step": 3, "a": None, "b": None, "c": 0.5, "d": [0.0, 1.0]}], "flushed"


DAMAGE = {  # of the line of step 1
    "a byte that is not UTF-8": lambda line: b"\xff" + line,
    "no step": lambda line: b'{"x": 1}',
    "a newline within": lambda line: line[:8] + b"\n" + line[8:],
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_lines_are_dropped_with_a_warning(kind, tmp_path, capsys):
    file = tmp_path / "metrics.jsonl"
    with Logger(tmp_path) as logger:
        for step in range(3):
            logger.log(step, {"env/return": step})
    intact = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(intact[0] + DAMAGE[kind](intact[1][:-1]) + b"\n" + intact[2])
    readers = (
        lambda: write_report([tmp_path], tmp_path / "report.html"),
        lambda: read_metrics(file),
        lambda: Logger(tmp_path, resume_step=2).__exit__(),
    )
    for read in readers:
        capsys.readouterr()
        read()
        assert re.search(r"warning: .*metrics.jsonl: . damaged lines skipped \(line 2\)", capsys.readouterr().err)
    assert file.read_bytes() == intact[0] + intact[2]


def test_the_line_of_a_step_says_how_much_is_left(tmp_path, capsys):
    with Logger(tmp_path, num_steps=40) as logger:
        logger.line(1, {"approx_kl": 0.0, "times/step": 500.0})
        for step in (2, 3):
            logger.line(step, {"approx_kl": 1e-5, "times/step": 60.0})
        logger.line(40, {"times/step": 60.0})
    with Logger(tmp_path, num_steps=40, test_interval=15) as logger:  # after steps 15, 30 and 40
        logger.line(0, {"test_env/return": 0.5, "times/test": 700.0})
        for step in (13, 14):
            logger.line(step, {"times/step": 60.0})
        tested = {"test_env/return": 0.5, "times/test": 600.0}
        logger.line(15, {"env/return": 0.5, "times/step": 60.0} | tested)
    first, second, third, last, *others = capsys.readouterr().out.splitlines()
    assert first == "step  1/40  500.0s", "the first one compiles"
    assert second.endswith(" 60.0s   38m left")
    assert third == "step  3/40  approx_kl    1e-05   60.0s   37m left"
    assert last == "step 40/40   60.0s"
    found = [line.split("  ")[-1].strip() for line in others]
    assert found == ["700.0s", "60.0s", "61m left", "45m left", "600.0s"]


TRAINING = {"env/return": -0.1, "env/correct_answer": 0.25, "env/length": 0.25, "entropy": 0.25, "grad_norm": 0.25}
WIDE = {"env/return": -0.125, "env/correct_answer": 1.0, "env/length": 1234.0, "grad_norm": 0.0123, "times/step": 123.4}
WIDE = TRAINING | WIDE
WIDEST = WIDE | {"approx_kl": -1.234e-5, "value/explained_variance": -0.123}


def test_lines_are_aligned_and_fit_into_120_columns(tmp_path, capsys, monkeypatch):
    # A wide terminal.
    monkeypatch.setenv("COLUMNS", "200")
    with Logger(tmp_path, num_steps=10_000) as logger:
        logger.line(0, {"test_env/return": 0.5, "test_env/correct_answer": 0.5})
        logger.line(8, {"times/step": 1.0})
        logger.line(9, TRAINING | {"times/step": 1.0, "test_env/return": 0.5})
        logger.line(10, WIDE)
        logger.line(12, WIDEST)
    first, _, ninth, held_out, tenth, last = capsys.readouterr().out.splitlines()
    assert first == "test     0/10000  return    0.5  correct  50.0%"
    assert held_out == "test     9/10000  return    0.5"
    for word in ("correct", "length", "entropy", "grad", "s  ", " left"):
        assert ninth.index(word) == tenth.index(word), word
    assert max(map(len, (ninth, tenth, last.rstrip()))) <= 120
    assert "approx_kl -1.23e-05" in last


def test_lines_fit_into_a_narrow_terminal(tmp_path, capsys, monkeypatch):
    # A narrow terminal.
    monkeypatch.setenv("COLUMNS", "60")
    with Logger(tmp_path, num_steps=10_000) as logger:
        for step in (10, 11):
            logger.line(step, WIDE)
    line = capsys.readouterr().out.splitlines()[-1].rstrip()
    assert len(line) <= 60
    assert "return" in line
    assert line.endswith("left")


def test_model_text_cannot_speak_to_the_terminal(tmp_path, monkeypatch):
    hostile = "a\x1b[31mb\x1b]0;title\x07c\x9b2Jd\r\x08e\u202ef\ud800g\x00\n" + "x" * 10_000
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    terminal.isatty = lambda: False
    # What a terminal gets.
    monkeypatch.setattr(sys, "stdout", terminal)
    assert printable("5 × 3 = 15 ✓\n\t你好") == "5 × 3 = 15 ✓\n\t你好"
    with user_errors(), Logger(tmp_path) as logger:  # it makes a "?" of what the terminal lacks
        logger.sample("step 1", "prompt é", hostile, 1.0)
    terminal.seek(0)
    shown = terminal.read()
    assert "ab]0;titlec2Jdefg\n" in shown
    assert "prompt ?" in shown
    assert "reward 1" in shown
    assert all(c == "\n" or c.isprintable() for c in shown)
    assert len(shown) < 2000


def test_resumed_run_keeps_warnings_of_steps_before(tmp_path):
    steps = {step: {"entropy": 1.0 if step < 5 else 0.1} for step in range(1, 9)}
    for resume_step, first in ((None, 1), (3, 4), (6, 7)):
        with Logger(tmp_path, resume_step=resume_step) as logger:
            for step in range(first, 9):
                logger.log(step, steps[step])
                logger.line(step, steps[step])
        (event,) = map(json.loads, (tmp_path / "events.jsonl").read_text().splitlines())
        assert (event["global_step"], event["metric"]) == (5, "entropy")
        assert event["warning"].startswith("entropy has fallen from 1 to 0.1 nats")
    with Logger(tmp_path, resume_step=4) as logger:
        logger.note(logger.step + 1, "loss", "not finite")
    found = json.loads((tmp_path / "events.jsonl").read_text())["global_step"]
    assert found == 5, "later ones will come again"
