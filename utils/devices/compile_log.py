"""Lists the programs that XLA compiles, and those that the compilation cache returns."""

import contextlib
import json
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax

from utils.metrics.terminal import COMPILED, program_name
from utils.settings.errors import counted

CACHE_HIT = "/jax/compilation_cache/cache_hits"
MOST_NAMED = 5  # programs in a warning


class Compilations:
    """Lists the programs that are compiled within the block, in any thread, and those that the cache returns.

    Each is a JSON object, also a line of `file`: the program's name, its seconds, whether the cache had it, and how
    many steps the process had made by then.
    """

    def __init__(self, file: Path | None = None):
        self.file = file
        self.thread = threading.local()  # .is_from_cache: the program that it reports next
        self.lock = threading.Lock()
        self.num_steps = 0
        self.are_all_known = False  # all programs were compiled ahead, so that a step compiles none
        self.programs: list[dict] = []  # since the last `take_programs`
        self.late: list[str] = []  # names of programs that were compiled after the first step

    def __enter__(self) -> "Compilations":
        jax.monitoring.register_event_duration_secs_listener(self.on_compiled)
        jax.monitoring.register_event_listener(self.on_cache_hit)
        return self

    def __exit__(self, *_) -> None:
        jax.monitoring.unregister_event_duration_listener(self.on_compiled)
        jax.monitoring.unregister_event_listener(self.on_cache_hit)

    def on_cache_hit(self, event: str, **_) -> None:
        """Marks a program from the cache; JAX calls it before `on_compiled`, in the same thread."""
        if event == CACHE_HIT:
            self.thread.is_from_cache = True

    def on_compiled(self, event: str, seconds: float, fun_name: str = "", **_) -> None:
        """Lists a program that was compiled or taken from the cache."""
        if event != COMPILED:
            return
        is_from_cache = vars(self.thread).pop("is_from_cache", False)
        row = {"program": fun_name, "seconds": round(seconds, 3), "from_cache": is_from_cache}
        row["num_steps"] = self.num_steps
        with self.lock:
            if self.num_steps and self.are_all_known and not is_from_cache:
                self.late.append(program_name(fun_name))
            self.programs.append(row)
            if self.file:
                with contextlib.suppress(OSError), self.file.open("a") as file:
                    file.write(json.dumps(row) + "\n")

    def take_programs(self) -> list[dict]:
        """Returns the programs since the last call."""
        with self.lock:
            programs, self.programs = self.programs, []
        return programs

    def take_late(self) -> list[str]:
        """Returns a warning that names the programs since the last call that a later step than the first compiled."""
        with self.lock:
            late, self.late = self.late, []
        if not late:
            return []
        names = "; ".join(late[:MOST_NAMED]) + "; ..." * (len(late) > MOST_NAMED)
        cure = "all should be before its end, as core/extensions/programs.py lists them"
        return [f"warning: {counted(len(late), 'program')} compiled after the first step: {names} ({cure})"]


def compile_metrics(programs: Sequence[Mapping], ahead: Sequence[Mapping] = ()) -> dict[str, float]:
    """Returns the metrics of these programs; programs compiled before the steps count without their seconds."""
    is_from_cache = [row["from_cache"] for row in (*ahead, *programs)]
    return {
        "compile/num_programs": is_from_cache.count(False),
        "compile/num_from_cache": is_from_cache.count(True),
        "times/compile": sum((row["seconds"] for row in programs), 0.0),
    }


def describe_programs(programs: Sequence[Mapping], seconds: float) -> str:
    """Returns how many programs were compiled, or taken from the cache, in so many seconds."""
    num_compiled = compile_metrics(programs)["compile/num_programs"]
    how = "compiled" if num_compiled else "from the cache"
    if 0 < num_compiled < len(programs):
        how = f"({num_compiled:,} compiled, the others from the cache)"
    return f"{counted(len(programs), 'program')} {how} in {seconds:.0f} s"
