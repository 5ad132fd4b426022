"""What a run says: metrics.jsonl always, one line a step and sample completions on the terminal, sinks when asked.

Only the main process speaks. The file belongs to the run, so a full disk stops it; a sink is a guest, and never may.
"""

import contextlib
import io
import json
import math
import os
import re
import select
import stat
import sys
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TextIO

from utils.metrics.health import Adviser
from utils.metrics.jsonl import read_lines
from utils.metrics.sinks import Sink

SUMMARY = (  # (metric, its name in the line of a step, its format)
    ("env/return", "return", "{:.3f}"),
    ("env/correct_answer", "correct", "{:.1%}"),
    ("env/length", "length", "{:.0f}"),
    ("entropy", "entropy", "{:.3f}"),
    ("approx_kl", "kl", "{:.2g}"),
    ("value/explained_variance", "critic", "{:.2f}"),
    ("grad_norm", "grad", "{:.2g}"),
    ("rollout/tokens_per_second", "tokens/s", "{:,.0f}"),
    ("times/rollout", "rollout", "{:.1f}s"),
    ("times/score", "score", "{:.1f}s"),
    ("times/logprobs", "logprobs", "{:.1f}s"),
    ("times/update", "update", "{:.1f}s"),
    ("test_env/return", "test return", "{:.3f}"),
    ("test_env/correct_answer", "test correct", "{:.1%}"),
)
PATIENCE = 10  # seconds that a full pipe is waited for
ESCAPE_SEQUENCE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")  # removed whole; the rest of others stays as harmless text


class Logger:
    """Records the metrics of a run in `directory`, and in the `sinks`.

    `resume_step` is the step that a resumed run continues from: later lines of metrics.jsonl are dropped, since those
    steps will be run again. With `enabled` false (every process but the main one) all methods do nothing.

    Raises: OSError when metrics.jsonl cannot be written.
    """

    def __init__(
        self, directory: str | Path, *, enabled: bool = True, resume_step: int | None = None, sinks: Sequence[Sink] = ()
    ):
        self.enabled, self.file, self.sinks, self.adviser = enabled, None, sinks, Adviser()
        if not enabled:
            return
        self.path = Path(directory) / "metrics.jsonl"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        truncate(self.path, resume_step)
        self.file = self.path.open("a")

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Append the metrics of a step (numbers, text, numpy or jax arrays); what is not finite is written as null."""
        if not self.enabled:
            return
        record = {"global_step": int(step)} | {name: plain(value) for name, value in metrics.items()}
        try:
            self.file.write(json.dumps(record, allow_nan=False) + "\n")
            self.file.flush()
        except OSError as error:
            raise OSError(f"Cannot write {self.path} ({error.strerror}).") from error
        for sink in self.sinks:
            sink.log(int(step), record)

    def say(self, *lines: str) -> None:
        """Print plain lines."""
        if self.enabled and lines:
            print(*lines, sep="\n", flush=True)

    def line(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Print the metrics of a step that tell most, in one line, and what looks wrong in them."""
        if self.enabled:
            parts = [f"{label} {form.format(float(metrics[key]))}" for key, label, form in SUMMARY if key in metrics]
            print(f"step {step:<5d} " + "  ".join(parts), flush=True)
            for advice in self.adviser.look(step, metrics):
                print(paint(f"warning: {advice}", "33"), flush=True)

    def sample(self, step: int, prompt: str, completion: str, reward: float) -> None:
        """Print an example: the prompt, the completion, and what it earned."""
        if self.enabled:
            print(
                paint(f"--- step {step}: prompt", "2"), printable(prompt), paint("--- completion", "2"),
                printable(completion), paint(f"--- reward {float(reward):g}", "32" if reward > 0 else "31"),
                sep="\n", flush=True,
            )  # fmt: skip

    def rollouts(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Send example rollouts to the sinks."""
        for sink in self.sinks if self.enabled else ():
            sink.log_rollouts(step, rows)

    def close(self) -> None:
        """Finish the file and the sinks; a slow network delays this by a minute at most."""
        if self.file:
            with contextlib.suppress(OSError):  # every line was flushed: what is left is one that `log` raised for
                self.file.close()
        for sink in self.sinks:
            sink.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        self.close()


def truncate(path: Path, last_step: int | None) -> None:
    """Drops lines of steps after `last_step` (None: of none), damaged ones, and the half line that a kill may leave."""
    if not path.exists():
        return
    rows = read_lines(path, key="global_step")
    kept = [line for line, row in rows if last_step is None or row["global_step"] <= last_step]
    text = b"".join(kept)
    if text != path.read_bytes():
        draft = path.with_name(path.name + ".new")
        draft.write_bytes(text)
        os.replace(draft, path)  # at every moment there is a whole file


def plain(value: Any) -> Any:
    """The same value in types that JSON knows; JSON has no NaN and no infinity."""
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def printable(text: str, max_chars: int = 1600) -> str:
    """Text of a model, made harmless for a terminal: no escape sequences, control or direction characters, no flood."""
    text = ESCAPE_SEQUENCE.sub("", text)
    text = "".join(c for c in text if c in "\n\t" or unicodedata.category(c) not in ("Cc", "Cf", "Cs", "Co", "Cn"))
    if len(text) > max_chars:
        text = f"{text[: max_chars // 2]}\n[... {len(text) - max_chars} characters ...]\n{text[-max_chars // 2 :]}"
    return writable(text, sys.stdout)


def writable(text: str, stream: TextIO) -> str:
    """Text with a "?" for each character that the stream's encoding lacks, where print would raise."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return text.encode(encoding, "replace").decode(encoding)


def paint(text: str, colour: str) -> str:
    """Text in an ANSI colour, where that will be seen as one."""
    return f"\x1b[{colour}m{text}\x1b[0m" if sys.stdout.isatty() and "NO_COLOR" not in os.environ else text


class Forgiving(io.RawIOBase):
    """Writes to a descriptor, or drops what it does not take: its reader is gone, its disk full, its pipe stuck."""

    def __init__(self, fd: int):
        self.fd, self.poll, self.is_stuck = fd, select.poll(), False
        self.poll.register(fd, select.POLLOUT)
        self.is_pipe = stat.S_ISFIFO(os.fstat(fd).st_mode)

    def write(self, data: memoryview) -> int:
        try:
            if self.is_pipe:
                self.is_stuck = not self.poll.poll(0 if self.is_stuck else 1000 * PATIENCE)
                data = data[: select.PIPE_BUF]  # so much never blocks once the pipe is ready
            return len(data) if self.is_stuck else os.write(self.fd, data)
        except OSError:
            return len(data)

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self.fd

    def isatty(self) -> bool:
        return os.isatty(self.fd)


@contextlib.contextmanager
def forgiving_output() -> Iterator[None]:
    """What is printed inside never stops or delays the run for long: metrics.jsonl holds what counts."""
    with contextlib.ExitStack() as stack:
        for stream, redirect in ((sys.stdout, contextlib.redirect_stdout), (sys.stderr, contextlib.redirect_stderr)):
            with contextlib.suppress(OSError, ValueError, AttributeError):  # a test's stream, or none at all
                raw = Forgiving(stream.fileno())
                with contextlib.suppress(OSError):
                    stream.flush()
                text = io.TextIOWrapper(io.BufferedWriter(raw), stream.encoding, "replace", line_buffering=True)
                stack.enter_context(redirect(text))
        yield
