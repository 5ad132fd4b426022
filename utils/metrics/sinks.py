"""Sinks of metrics besides metrics.jsonl: wandb, TensorBoard. Their errors never stop a run.

A sink is a class with `log(step, metrics)` and `close()`, and a line in `open_sinks`. Metrics have the same names
everywhere; only TensorBoard has no "@" in names, so pass@2 is pass_at_2 there.
"""

import math
import netrc
import os
import secrets
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
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
        self.name, self.sink = name, None
        self.sink = self.attempt(make)

    def log(self, step: int, metrics: Mapping[str, JSON]) -> None:
        """Records the metrics of a step: JSON values, None if a number is not finite."""
        if self.sink:
            self.attempt(self.sink.log, step, metrics)

    def log_rollouts(self, step: int, rows: Sequence[Mapping[str, JSON]]) -> None:
        """Records example rollouts of a step, rows of rollouts/step_N.jsonl."""
        if self.sink:
            self.attempt(self.sink.log_rollouts, step, rows)

    def close(self) -> None:
        """Finishes what is still being written."""
        if self.sink:
            self.attempt(self.sink.close)

    def attempt(self, call: Callable[..., Any], *args: int | Mapping | Sequence) -> Any:
        """Calls a function of the sink, and drops the sink if that raises."""
        try:
            return call(*args)
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
    sinks = []
    is_asked = asks_for_wandb(config)
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
        if mode == "online" and not has_wandb_login(wandb):
            print("wandb: no login found (`wandb login`), so this run is recorded offline.")
            mode = "offline"
        # Seconds. Without finish_timeout, the end of a run waits forever if the network is gone.
        # quiet: no table of all metrics below the summary of the run.
        settings_of_wandb = wandb.Settings(init_timeout=30, login_timeout=10, finish_timeout=60, quiet=True)
        file = directory / "wandb_id"
        if not file.exists():
            file.write_text(secrets.token_hex(4))
        self.wandb = wandb
        self.run = wandb.init(
            config=dict(settings),
            mode=mode,
            settings=settings_of_wandb,
            resume="allow",
            dir=str(directory),
            id=file.read_text(),
            project=config.wandb_project or "lmpo",
            name=config.wandb_name or directory.name,
            group=config.wandb_group or None,  # WANDB_RUN_GROUP, if that is set
        )

    def log(self, step: int, metrics: Mapping[str, JSON]) -> None:
        """Records metrics; those that end in _histogram are drawn over the numbers of their bins."""
        histograms = {}
        for name in metrics:
            if name.endswith("_histogram"):
                counts = [count or 0.0 for count in metrics[name]]  # None: it was not finite
                edges = np.arange(len(counts) + 1)
                histograms[name] = self.wandb.Histogram(np_histogram=(counts, edges))
        self.run.log({**metrics, **histograms}, step=step)

    def log_rollouts(self, step: int, rows: Sequence[Mapping[str, JSON]]) -> None:
        columns = [name for name in ROLLOUT_COLUMNS if all(name in row for row in rows)]
        data = [[json_value(row[name]) for name in columns] for row in rows]
        table = self.wandb.Table(columns=columns, data=data)
        self.run.log({"rollouts": table}, step=step)

    def close(self) -> None:
        self.run.finish()


class TensorBoard:
    """Event files in <save_dir>/tensorboard; steps that a resumed run does again are marked as void."""

    def __init__(self, directory: Path, resume_step: int):
        from tensorboardX import SummaryWriter

        first_step = resume_step + 1
        folder = str(directory / "tensorboard")
        suffix = f".{first_step}"  # without it, a restart within a second would overwrite the file
        self.writer = SummaryWriter(folder, purge_step=first_step, filename_suffix=suffix)

    def log(self, step: int, metrics: Mapping[str, JSON]) -> None:
        for name, value in metrics.items():
            if isinstance(value, int | float) and math.isfinite(value):
                self.writer.add_scalar(name.replace("@", "_at_"), value, step)
        self.writer.flush()

    def log_rollouts(self, step: int, rows: Sequence[Mapping[str, JSON]]) -> None:
        texts = []
        for row in rows:
            block = textwrap.indent(row["prompt"] + row["text"], "    ")  # literal text in Markdown
            texts.append(f"return {row['return']:g}\n\n{block}")
        self.writer.add_text("rollouts", "\n\n".join(texts), step)
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


def has_wandb_login(wandb: ModuleType | None = None) -> bool:
    """True if wandb can log in without a prompt: it prompts on any terminal, and a run must not wait for an answer.

    The module reads its server's address from its own settings too; importing it takes half a second.
    """
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    address = wandb.setup().settings.base_url if wandb else os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")
    try:
        logins = netrc.netrc(os.environ.get("NETRC"))
    except (OSError, netrc.NetrcParseError):
        return False
    return urlparse(address).netloc in logins.hosts
