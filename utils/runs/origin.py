"""Origin of a run: commit, command, machine, versions and times, kept in config.json beside the settings."""

import importlib.metadata
import platform
import shlex
import sys
import time
from collections.abc import Mapping

from utils.metrics.jsonl import JSON

PACKAGES = ("jax", "jaxlib", "numpy", "flax", "optax", "transformers")


class Origin:
    """Facts about a run, and the time that it takes; `before` holds those of the run that is resumed."""

    def __init__(self, version: str, devices: str, before: Mapping[str, JSON]):
        self.clock = time.monotonic()
        self.seconds_before = float(before.get("seconds") or 0.0)
        self.facts = {
            "lmpo": version,
            "command": shlex.join(["python", *sys.argv]),
            "host": platform.node(),
            "devices": devices,
            "versions": find_versions(),
            "start": before.get("start") or now(),
        }

    def record(self, is_ended: bool) -> dict[str, JSON]:
        """Returns the facts as they are now; "end" is None while the run goes on, and after a process was killed."""
        seconds = self.seconds_before + time.monotonic() - self.clock
        return self.facts | {"end": now() if is_ended else None, "seconds": round(seconds, 1)}


def find_versions() -> str:
    """Returns the versions of Python and of the packages that a result depends on."""
    versions = [f"{name} {importlib.metadata.version(name)}" for name in PACKAGES]
    return ", ".join([f"python {platform.python_version()}", *versions])


def now() -> str:
    """Returns the time of day with its distance from UTC."""
    return time.strftime("%Y-%m-%d %H:%M:%S %z")
