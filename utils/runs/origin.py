"""Origin of a run: commit, command, machine, versions and times, kept in config.json beside the settings.

Its segments are what --resume force changed: {"step": the last one before, "text": the new and the old values}.
"""

import contextlib
import importlib.metadata
import os
import platform
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from utils.metrics.curves import Curves
from utils.metrics.jsonl import JSON, read_json
from utils.settings.checks import hide_passwords
from utils.settings.presets import split_origin

TIME_FORMAT = "%Y-%m-%d %H:%M:%S %z"
PACKAGES = ("jax", "jaxlib", "numpy", "optax", "transformers")
RunSegment = Mapping[str, JSON]


class Origin:
    """Facts about a run, and the time that it takes; `before` holds the facts of the run that is resumed."""

    def __init__(self, version: str, devices: str, before: Mapping[str, JSON]):
        self.clock = time.monotonic()
        self.seconds_before = float(before.get("seconds") or 0.0)
        versions = [f"{name} {importlib.metadata.version(name)}" for name in PACKAGES]
        self.facts = {
            "lmpo": version,
            "command": hide_passwords(shlex.join(["python", *sys.argv])),
            "host": platform.node(),
            "cpu": f"{find_cpu()}, {os.cpu_count()} cores",
            "devices": devices,
            "versions": ", ".join([f"python {platform.python_version()}", *versions]),
            "start": before.get("start") or now(),
        }
        if before.get("segments"):
            self.facts["segments"] = before["segments"]

    def record(self, is_ended: bool) -> dict[str, JSON]:
        """Returns the facts as they are now; "end" is None while the run goes on, and after a process was killed."""
        return self.facts | {"end": now() if is_ended else None, "seconds": round(self.seconds, 1)}

    @property
    def seconds(self) -> float:
        """Time that the run has taken, of all its processes one after the other."""
        return self.seconds_before + time.monotonic() - self.clock


def find_cpu() -> str:
    """Returns the name of the CPU with family and model, since many CPUs are named "AMD EPYC"."""
    lines: list[str] = []
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    facts = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    name = facts.get("model name") or platform.processor() or platform.machine()
    return f"{name} family {facts['cpu family']} model {facts['model']}" if "cpu family" in facts else name


def now() -> str:
    """Returns the time of day with its distance from UTC."""
    return time.strftime(TIME_FORMAT)


def read_settings(config_json: Path) -> tuple[dict[str, JSON], dict[str, JSON]]:
    """Returns the settings and the origin of a run; both empty if there is no file.

    Raises: UserError for a file that is not JSON.
    """
    return split_origin(read_json(config_json)) if config_json.exists() else ({}, {})


def describe_segment(segment: RunSegment) -> str:
    """Returns a segment in words; those of runs of before 2026-11-28 have no text."""
    return f"from step {segment['step'] + 1} on: {segment.get('text') or segment['changed'] | segment['data']}"


def last_break(segments: Sequence[RunSegment]) -> int:
    """Returns the last step before --resume force changed settings or data; -1: none."""
    return max((segment["step"] for segment in segments), default=-1)


def since(run: Curves, step: int) -> Curves:
    """Returns the metrics of later steps than this one, those that there are."""
    later = {name: (steps[steps > step], values[steps > step]) for name, (steps, values) in run.items()}
    return {name: series for name, series in later.items() if len(series[0])}
