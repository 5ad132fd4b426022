"""Counts and lists the programs that XLA compiles, and those that the compilation cache returns."""

import contextlib
import json
import logging
from pathlib import Path

import jax

from utils.files import open_log
from utils.metrics.terminal import COMPILED

COMPILER = "jax._src.interpreters.pxla"  # logs the shapes of a program that is lowered
CACHE_HIT = "/jax/compilation_cache/cache_hits"


class Compilations:
    """Counts the programs that are compiled within the block, and those that the cache returns.

    All are listed in `file`, one JSON object a line: name, shapes of arguments, seconds, and whether the cache had it.
    """

    def __init__(self, file: Path | None = None):
        self.file = file
        self.shapes: dict[str, list[str]] = {}  # of the program that is about to be compiled, by name
        self.num_programs = 0
        self.num_from_cache = 0
        self.seconds = 0.0
        self.is_from_cache = False  # the program that is reported next

    def __enter__(self) -> "Compilations":
        jax.monitoring.register_event_duration_secs_listener(self.on_compiled)
        jax.monitoring.register_event_listener(self.on_cache_hit)
        if self.file:
            logging.getLogger(COMPILER).setLevel(logging.DEBUG)
            logging.getLogger(COMPILER).addFilter(self.on_lowered)
        return self

    def __exit__(self, *_) -> None:
        jax.monitoring.unregister_event_duration_listener(self.on_compiled)
        jax.monitoring.unregister_event_listener(self.on_cache_hit)
        logging.getLogger(COMPILER).removeFilter(self.on_lowered)

    def on_lowered(self, record: logging.LogRecord) -> bool:
        """Reads the shapes from the compiler's log, and hides the debug records switched on for that."""
        with contextlib.suppress(IndexError, TypeError, AttributeError):  # of another version of JAX
            name, shapes = record.args[:2]
            self.shapes[name] = list(dict.fromkeys(shape.str_short() for shape in shapes))
        return record.levelno > logging.DEBUG

    def on_cache_hit(self, event: str, **_) -> None:
        """Counts a program from the cache; JAX calls it before `on_compiled`."""
        if event == CACHE_HIT:
            self.num_from_cache += 1
            self.is_from_cache = True

    def on_compiled(self, event: str, seconds: float, fun_name: str = "", **_) -> None:
        """Counts and lists a program that was compiled or taken from the cache."""
        if event != COMPILED:
            return
        if self.file:
            row = {
                "program": fun_name,
                "shapes": self.shapes.pop(fun_name, []),
                "seconds": round(seconds, 3),
                "from_cache": self.is_from_cache,
            }
            with contextlib.suppress(OSError), open_log(self.file) as file:
                file.write(json.dumps(row) + "\n")
        self.num_programs += 1
        self.seconds += seconds
        self.is_from_cache = False

    def take_metrics(self) -> dict[str, float]:
        """Returns the metrics since the last call, and starts to count anew."""
        metrics = {
            "compile/num_programs": self.num_programs - self.num_from_cache,
            "compile/num_from_cache": self.num_from_cache,
            "times/compile": self.seconds,
        }
        self.num_programs = 0
        self.num_from_cache = 0
        self.seconds = 0.0
        return metrics
