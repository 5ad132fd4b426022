"""Log of a run: metrics.jsonl and events.jsonl, one line a step and completions on the terminal, sinks when asked.

The files belong to the run, so a full disk stops it; a sink never stops it.
"""

import contextlib
import io
import json
import os
import re
import shutil
import statistics
import sys
import unicodedata
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TextIO

from utils.files import replacing
from utils.metrics.curves import format_value
from utils.metrics.health import HealthChecks
from utils.metrics.jsonl import JSON, Loggable, json_value, read_lines
from utils.metrics.sinks import GuardedSink

TRAINING = {  # metrics in the line of a step, as many as there is room for: name and width of the number
    "data/loss": ("loss", 6),
    "rewards/accuracies": ("accuracy", 6),
    "env/return": ("return", 6),
    "env/correct_answer": ("correct", 6),
    "env/length": ("length", 4),
    "entropy": ("entropy", 6),
    "approx_kl": ("approx_kl", 8),
    "value/explained_variance": ("critic", 6),
    "grad_norm": ("grad_norm", 6),
}
HELD_OUT = {  # in a line of their own
    "test_data/loss": ("loss", 6),
    "test_env/return": ("return", 6),
    "test_env/correct_answer": ("correct", 6),
}
LINE_WIDTH = 120
TIME_WIDTH = 19  # seconds of the step, and how long the run takes yet
UNITS = ((1, "s"), (60, "m"), (3600, "h"))  # of the time that is left
FILES = ("metrics.jsonl", "events.jsonl")  # a line for each step, and for each warning
NUM_TIMES = 20  # last steps, by whose median time the time that is left is estimated
HIDDEN = ("Cc", "Cf", "Cs", "Co", "Cn")  # control, format and unassigned codes
ESCAPE_SEQUENCE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")  # removed whole; of other sequences, harmless text is left


class Logger(contextlib.AbstractContextManager):
    """Records the metrics of a run in `directory`, and in the `sinks`.

    `resume_step` is the step that a resumed run continues from: later lines of both files are dropped, since those
    steps will be run again. `num_steps`: of the run, 0 if it may end before. `test_interval`: steps from one
    evaluation to the next.

    Raises: OSError when a file cannot be written.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        resume_step: int | None = None,
        num_steps: int = 0,
        test_interval: int = 0,
        sinks: Sequence[GuardedSink] = (),
    ):
        self.num_steps, self.test_interval, self.sinks = num_steps, test_interval, sinks
        self.step_times: deque[float] = deque(maxlen=NUM_TIMES)
        self.test_time = 0.0  # seconds of the last evaluation
        self.health_checks = HealthChecks()
        self.step = 0  # last one that was logged
        self.files: dict[str, TextIO] = {}
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        for name in FILES:
            truncate(directory / name, resume_step)
            self.files[name] = (directory / name).open("a")  # to append to
        for _, record in read_lines(directory / FILES[0], key="global_step"):
            self.step = record["global_step"]
            self.health_checks.find_warnings(self.step, record)

    def log(self, step: int, metrics: Mapping[str, Loggable]) -> None:
        """Appends the metrics of a step (numbers, text, arrays), with null for what is not finite; prints some of them.

        These are a line of the step, one of the held-out problems if they were evaluated, and warnings.
        """
        self.step = int(step)
        record = {"global_step": self.step} | {name: json_value(value) for name, value in metrics.items()}
        self.write("metrics.jsonl", record)
        for sink in self.sinks:
            sink.attempt("log", self.step, record)
        place = f"{step:>{len(str(self.num_steps))}d}/{self.num_steps}" if self.num_steps else f"{step:<5d}"
        training = summary(f"step {place}", TRAINING, metrics)
        held_out = summary(f"test {place}", HELD_OUT, metrics)
        self.test_time = metrics.get("times/test", self.test_time)
        if training or not held_out:
            print("  ".join([training or f"step {place}", *self.time_cells(step, metrics)]).rstrip(), flush=True)
        if held_out:
            cells = [f"{self.test_time:>5.1f}s"] if "times/test" in metrics else []
            print("  ".join([held_out, *cells]).rstrip(), flush=True)
        for metric, warning in self.health_checks.find_warnings(step, metrics).items():
            self.note(step, metric, warning, is_warning=True)

    def write(self, name: str, record: Mapping[str, JSON]) -> None:
        """Appends a line to a file of the run. Raises: OSError."""
        file = self.files[name]
        try:
            file.write(json.dumps(record, allow_nan=False) + "\n")
            file.flush()
        except OSError as error:
            raise OSError(f"Cannot write {file.name} ({error.strerror}).") from error

    def note(self, step: int, metric: str, text: str, is_warning: bool = False) -> None:
        """Keeps a sentence in events.jsonl, which the report marks on the metric's curve; prints a warning, too."""
        if is_warning:
            print(paint(f"warning: {text}", "33"), flush=True)
        self.write("events.jsonl", {"global_step": int(step), "metric": metric, "warning": text})

    def time_cells(self, step: int, metrics: Mapping[str, float]) -> list[str]:
        """Returns the seconds of a step and, after the first one, which compiles, those until the end if known."""
        if "times/step" not in metrics:
            return []
        cells = [f"{metrics['times/step']:>5.1f}s"]
        self.step_times.append(metrics["times/step"])
        if step < self.num_steps and len(self.step_times) > 1:
            interval, last = self.test_interval, self.num_steps - 1
            num_tests = last // interval - step // interval + 1 if interval else 1  # and after the last step
            seconds = (self.num_steps - step) * statistics.median_low(self.step_times) + num_tests * self.test_time
            size, unit = next((size, unit) for size, unit in UNITS if seconds < 100 * size or unit == "h")
            cells.append(f"{seconds / size:>3.0f}{unit} left")
        return cells

    def sample(self, where: str, prompt: str, completion: str, reward: float) -> None:
        """Prints a rollout: its step and environment, the prompt, the completion, and its reward."""
        lines = [
            paint(f"--- {where}: prompt", "2"),
            printable(prompt),
            paint("--- completion", "2"),
            printable(completion),
            paint(f"--- reward {float(reward):g}", "32" if reward > 0 else "31"),
        ]
        print(*lines, sep="\n", flush=True)

    def __exit__(self, *_) -> None:
        """Closes the files and the sinks; a slow network delays this by the limits of the sinks."""
        for file in self.files.values():
            with contextlib.suppress(OSError):  # every line was flushed: what is left is one that `write` raised for
                file.close()
        for sink in self.sinks:
            sink.attempt("close")


def summary(start: str, labels: Mapping[str, tuple[str, int]], metrics: Mapping[str, float]) -> str:
    """Returns as many metrics as one line has room for, with numbers as in the report; empty if there are none.

    A KL of exactly 0 is that of the only update of a step, and is left out.
    """
    room = min(LINE_WIDTH, shutil.get_terminal_size((LINE_WIDTH, 0)).columns) - TIME_WIDTH
    line = start
    for name, (label, width) in labels.items():
        cell = f"  {label} {format_value(name, float(metrics[name])):>{width}}" if name in metrics else ""
        if len(line + cell) <= room and (name != "approx_kl" or metrics.get(name)):
            line += cell
    return line if line != start else ""


def truncate(path: Path, last_step: int | None) -> None:
    """Drops lines of steps after `last_step` (None: of none), damaged ones, and the half line that a kill may leave."""
    if not path.exists():
        return
    rows = read_lines(path, key="global_step")
    text = b"".join(line for line, row in rows if last_step is None or row["global_step"] <= last_step)
    if text != path.read_bytes():
        with replacing(path) as file:
            file.write(text)


def printable(text: str, max_chars: int = 1600) -> str:
    """Returns text of a model, made harmless for a terminal: no control or direction characters, cut in length."""
    text = ESCAPE_SEQUENCE.sub("", text)
    text = "".join(c for c in text if c in "\n\t" or unicodedata.category(c) not in HIDDEN)
    num_dropped = len(text) - max_chars
    if num_dropped > 0:
        text = f"{text[: max_chars // 2]}\n[... {num_dropped} characters ...]\n{text[-max_chars // 2 :]}"
    return text


def paint(text: str, color: str) -> str:
    """Returns text in an ANSI color, if standard output is a terminal and NO_COLOR is not set."""
    has_colors = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    return f"\x1b[{color}m{text}\x1b[0m" if has_colors else text


class LossyWriter(io.FileIO):
    """Writes to a descriptor, and drops output that it does not take: reader gone, terminal closed, disk full."""

    def write(self, data: memoryview) -> int:
        with contextlib.suppress(OSError):
            return super().write(data)
        return len(data)


@contextlib.contextmanager
def lossy_output() -> Iterator[None]:
    """Drops output inside that would stop the run, as after Ctrl-C in `... | tee`; metrics.jsonl has it anyway."""
    with contextlib.ExitStack() as stack:
        for name, redirect in (("stdout", contextlib.redirect_stdout), ("stderr", contextlib.redirect_stderr)):
            stream = getattr(sys, name)
            with contextlib.suppress(OSError, ValueError, AttributeError):  # a test's stream, or none at all
                writer = io.BufferedWriter(LossyWriter(stream.fileno(), "w", closefd=False))
                with contextlib.suppress(OSError):
                    stream.flush()
                stack.enter_context(redirect(io.TextIOWrapper(writer, stream.encoding, "replace", line_buffering=True)))
        yield
