"""Sinks of metrics besides metrics.jsonl: wandb, TensorBoard. Their errors never stop a run.

A sink is a class with `log(step, metrics)` (JSON values, None if not finite), `log_rollouts(step, rows)` and `close()`,
and a line in `open_sinks`. Only TensorBoard has other names of metrics: pass@2 is pass_at_2 there.
"""

import math
import netrc
import os
import secrets
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlparse

import numpy as np

from utils.metrics.jsonl import JSON, json_value
from utils.settings.checks import hide_passwords
from utils.settings.errors import is_installed, on_one_line
from utils.settings.groups import SinkConfig

ROLLOUT_COLUMNS = ("group", "task", "prompt", "text", "return", "correct_answer", "length", "finished")


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
            sinks.append(GuardedSink("wandb", lambda: Wandb(config, directory, settings)))
    if config.tensorboard:
        sinks.append(GuardedSink("TensorBoard", lambda: TensorBoard(directory, resume_step)))
    return sinks


def asks_for_wandb(config: SinkConfig) -> bool:
    """True if an option names a run, a group or a project at wandb."""
    return bool(config.wandb_name or config.wandb_group or config.wandb_project)


class Wandb:
    """A run at wandb, continued after a restart; without a login it is recorded offline."""

    def __init__(self, config: SinkConfig, directory: Path, settings: Mapping[str, JSON]):
        import wandb

        mode = os.environ.get("WANDB_MODE", "online")
        if mode == "online" and not has_wandb_login():
            print("wandb: no login found (`wandb login`), so this run is recorded offline.")
            mode = "offline"
        # Without finish_timeout (seconds), the end of a run waits forever if the network is gone.
        limits = {"init_timeout": 30, "login_timeout": 10, "finish_timeout": 60}
        file = directory / "wandb_id"
        if not file.exists():
            file.write_text(secrets.token_hex(4))
        self.wandb = wandb
        self.run = wandb.init(
            config=dict(settings),
            mode=mode,
            settings=wandb.Settings(**limits, quiet=True),  # without a table of all metrics at the end
            resume="allow",
            dir=str(directory),
            id=file.read_text(),
            project=config.wandb_project or "lmpo",
            name=config.wandb_name or directory.name,
            group=config.wandb_group or None,  # WANDB_RUN_GROUP, if that is set
        )

    def log(self, step: int, metrics: Mapping[str, JSON]) -> None:
        """Records metrics; those that end in _histogram are drawn over the numbers of their bins."""
        counts = {name: [x or 0.0 for x in metrics[name]] for name in metrics if name.endswith("_histogram")}
        histograms = {
            name: self.wandb.Histogram(np_histogram=(x, np.arange(len(x) + 1))) for name, x in counts.items()
        }
        self.run.log({**metrics, **histograms}, step=step)

    def log_rollouts(self, step: int, rows: Sequence[Mapping[str, JSON]]) -> None:
        columns = [name for name in ROLLOUT_COLUMNS if all(name in row for row in rows)]
        data = [[json_value(row[name]) for name in columns] for row in rows]
        self.run.log({"rollouts": self.wandb.Table(columns=columns, data=data)}, step=step)

    def close(self) -> None:
        self.run.finish()


class TensorBoard:
    """Event files in <save_dir>/tensorboard; steps that a resumed run does again are marked as void."""

    def __init__(self, directory: Path, resume_step: int):
        from tensorboardX import SummaryWriter

        first = resume_step + 1
        suffix = f".{first}"  # without it, a restart within a second would overwrite the file
        self.writer = SummaryWriter(str(directory / "tensorboard"), purge_step=first, filename_suffix=suffix)

    def log(self, step: int, metrics: Mapping[str, JSON]) -> None:
        for name, value in metrics.items():
            if isinstance(value, int | float) and math.isfinite(value):
                self.writer.add_scalar(name.replace("@", "_at_"), value, step)
        self.writer.flush()

    def log_rollouts(self, step: int, rows: Sequence[Mapping[str, JSON]]) -> None:
        indented = [textwrap.indent(row["prompt"] + row["text"], "    ") for row in rows]  # literal text in Markdown
        texts = [f"return {row['return']:g}\n\n{text}" for row, text in zip(rows, indented, strict=True)]
        self.writer.add_text("rollouts", "\n\n".join(texts), step)
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


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
