"""Sinks of metrics besides metrics.jsonl: wandb, TensorBoard (trackers.py). Their errors never stop a run.

A sink is a class with `log(step, metrics)` (JSON values, None if not finite), `log_rollouts(step, rows)` and `close()`,
and a line in `open_sinks`.
"""

import netrc
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlparse

from utils.metrics.jsonl import JSON
from utils.settings.checks import hide_passwords
from utils.settings.errors import is_installed, on_one_line
from utils.settings.groups import SinkConfig


class GuardedSink:
    """A sink that is dropped after its first exception, with a warning; `make` makes the one inside."""

    def __init__(self, name: str, make: Callable[[], Any]):
        self.name, self.sink = name, SimpleNamespace(make=make)
        self.sink = self.attempt("make")

    def attempt(self, method: str, *args: int | Mapping | Sequence) -> Any:
        """Calls a method of the sink, and drops the sink if that raises."""
        try:
            return getattr(self.sink, method)(*args) if self.sink else None
        except (Exception, SystemExit) as error:  # of packages whose exceptions are not documented
            self.sink = None
            is_missing = isinstance(error, ModuleNotFoundError)
            reason = f"`pip install {error.name}`" if is_missing else hide_passwords(on_one_line(str(error)))
            message = f"{self.name} is switched off for this run ({type(error).__name__}: {reason})."
            print(f"warning: {message}", file=sys.stderr)


def open_sinks(
    config: SinkConfig, directory: Path, settings: Mapping[str, JSON], resume_step: int
) -> list[GuardedSink]:
    """Returns the sinks that are switched on; `settings` is the run's configuration, which they show."""
    sinks, is_asked = [], asks_for_wandb(config)
    if os.environ.get("WANDB_MODE") != "disabled" and (is_asked or has_wandb_login()):
        if not is_installed("wandb"):
            print("wandb: the package is not installed, so this run is not logged there: `pip install wandb`.")
        else:
            if not is_asked:
                print("wandb: there is a login, so this run is logged; WANDB_MODE=disabled leaves it off.")
            mode = os.environ.get("WANDB_MODE", "online")
            if mode == "online" and not has_wandb_login():
                print("wandb: no login found (`wandb login`), so this run is recorded offline.")
                mode = "offline"
            from utils.metrics.trackers import Wandb

            sinks.append(GuardedSink("wandb", lambda: Wandb(config, directory, settings, mode)))
    if config.tensorboard:
        from utils.metrics.trackers import TensorBoard

        sinks.append(GuardedSink("TensorBoard", lambda: TensorBoard(directory, resume_step)))
    return sinks


def asks_for_wandb(config: SinkConfig) -> bool:
    """True if an option names a run, a group or a project at wandb."""
    return bool(config.wandb_name or config.wandb_group or config.wandb_project)


def has_wandb_login() -> bool:
    """True if wandb can log in without a prompt: it prompts on any terminal, and a run must not wait for an answer."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    address = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")
    try:
        logins = netrc.netrc(os.environ.get("NETRC"))
    except (OSError, netrc.NetrcParseError):
        return False
    return urlparse(address).netloc in logins.hosts
