"""Where metrics go besides metrics.jsonl: wandb, TensorBoard, MLflow, guests that never stop a run.

A sink is a class with `log(step, metrics)` and `close()`, and a line in `open_sinks`. Metrics have the same names
everywhere (but that TensorBoard and MLflow know no "@": there pass@2 is pass_at_2).
"""

import math
import netrc
import os
import secrets
import sys
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol
from urllib.parse import urlparse

import numpy as np

from utils.settings.config import option

ROLLOUT_COLUMNS = ("group", "task", "prompt", "text", "return", "correct_answer", "length", "finished")


@dataclass(frozen=True)
class SinkConfig:
    """Where metrics go besides metrics.jsonl."""

    wandb_project: str = option("", "wandb is on when this, a name or a key is given")
    wandb_name: str = option("", "name of the run at wandb (and MLflow)")
    wandb_group: str = option("", "group of the run at wandb")
    wandb_mode: str = option("", "empty: online with a login, else offline", ["", "online", "offline", "disabled"])
    tensorboard: bool = option(False, "write TensorBoard's event files to <save_dir>/tensorboard")
    mlflow: str = option("", "address of an MLflow store to log to, as sqlite:///mlflow.db or http://host:5000")


class Sink(Protocol):
    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Records the metrics of a step: JSON values, None where a number is not finite."""

    def log_rollouts(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Records example rollouts of a step, as they stand in rollouts/step_N.jsonl."""

    def close(self) -> None:
        """Finishes what is still being written."""


class Guarded:
    """A sink whose first exception is told and its last: it is dropped."""

    def __init__(self, name: str, make: Callable[[], Sink]):
        self.name, self.sink = name, None
        self.sink = self.attempt(make)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        if self.sink:
            self.attempt(self.sink.log, step, metrics)

    def log_rollouts(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        if self.sink:
            self.attempt(self.sink.log_rollouts, step, rows)

    def close(self) -> None:
        if self.sink:
            self.attempt(self.sink.close)

    def attempt(self, call: Callable, *args: Any) -> Any:
        try:
            return call(*args)
        except Exception as error:  # noqa: BLE001 (what it may raise is not written anywhere)
            self.sink = None
            reason = f"`pip install {error.name}`" if isinstance(error, ModuleNotFoundError) else str(error)
            print(
                f"warning: {self.name} is switched off for this run ({type(error).__name__}: {reason}).",
                file=sys.stderr,
            )


def open_sinks(config: SinkConfig, directory: Path, settings: Mapping[str, Any], resume_step: int) -> list[Guarded]:
    """The sinks that are asked for; `settings` is what they show of the run's configuration."""
    named = config.wandb_name or config.wandb_project or config.wandb_mode in ("online", "offline")
    wanted = {
        "wandb": (named or os.environ.get("WANDB_API_KEY")) and config.wandb_mode != "disabled",
        "TensorBoard": config.tensorboard,
        "MLflow": config.mlflow,
    }
    make = {
        "wandb": lambda: Wandb(config, directory, settings),
        "TensorBoard": lambda: TensorBoard(directory, resume_step),
        "MLflow": lambda: Mlflow(config, directory, settings),
    }
    return [Guarded(name, make[name]) for name, is_wanted in wanted.items() if is_wanted]


class Wandb:
    """A run at wandb, continued after a restart; without a login it is recorded offline."""

    def __init__(self, config: SinkConfig, directory: Path, settings: Mapping[str, Any]):
        import wandb

        mode = config.wandb_mode or os.environ.get("WANDB_MODE", "online")
        if mode == "online" and not has_wandb_login(wandb):
            print("wandb: no login found (`wandb login`), so this run is recorded offline.")
            mode = "offline"
        names = {"project": config.wandb_project or "lmpo", "name": config.wandb_name or None}
        place = {"dir": str(directory), "id": remembered(directory / "wandb_id", lambda: secrets.token_hex(4))}
        # Seconds. Without finish_timeout, the end of a run waits for ever where the network is gone.
        limits = wandb.Settings(init_timeout=30, login_timeout=10, finish_timeout=60)
        self.table = wandb.Table
        self.run = wandb.init(
            config=dict(settings), mode=mode, settings=limits, resume="allow", group=config.wandb_group or None,
            **place, **names,
        )  # fmt: skip

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self.run.log(dict(metrics), step=step)

    def log_rollouts(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        columns = [name for name in ROLLOUT_COLUMNS if all(name in row for row in rows)]
        table = self.table(columns=columns, data=[[plain(row[name]) for name in columns] for row in rows])
        self.run.log({"rollouts": table}, step=step)

    def close(self) -> None:
        self.run.finish()


class TensorBoard:
    """Event files in <save_dir>/tensorboard; steps that a resumed run does again are marked as void."""

    def __init__(self, directory: Path, resume_step: int):
        from tensorboardX import SummaryWriter

        first = resume_step + 1  # in the name, lest a quick restart writes over the file of the same second
        self.writer = SummaryWriter(str(directory / "tensorboard"), purge_step=first, filename_suffix=f".{first}")

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        for name, value in numbers(metrics).items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def log_rollouts(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        texts = [f"return {row['return']:g}\n\n{indented(row['prompt'] + row['text'])}" for row in rows]
        self.writer.add_text("rollouts", "\n\n".join(texts), step)
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


class Mlflow:
    """A run in an MLflow store, continued after a restart."""

    def __init__(self, config: SinkConfig, directory: Path, settings: Mapping[str, Any]):
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self.client, self.metric = MlflowClient(config.mlflow), Metric
        name = config.wandb_project or "lmpo"
        experiment = self.client.get_experiment_by_name(name)
        experiment_id = experiment.experiment_id if experiment else self.client.create_experiment(name)
        file = directory / "mlflow_run_id"
        is_new = not file.exists()
        title = config.wandb_name or directory.name
        self.id = remembered(file, lambda: self.client.create_run(experiment_id, run_name=title).info.run_id)
        if is_new:
            params = [Param(key, str(value)[:500]) for key, value in settings.items()]
            for start in range(0, len(params), 100):  # the most that one call takes
                self.client.log_batch(self.id, params=params[start : start + 100])

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        now, found = int(1000 * time.time()), numbers(metrics).items()
        self.client.log_batch(self.id, [self.metric(name, x, now, step) for name, x in found])

    def log_rollouts(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Records nothing: a store without a server would put files into the current folder."""

    def close(self) -> None:
        self.client.set_terminated(self.id)


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The metrics that are one finite number, by names without "@"."""
    found = {name: x for name, x in metrics.items() if isinstance(x, int | float) and math.isfinite(x)}
    return {name.replace("@", "_at_"): x for name, x in found.items()}


def plain(value: Any) -> Any:
    """Returns NumPy values as Python's."""
    return value.tolist() if isinstance(value, np.generic) else value


def indented(text: str) -> str:
    """Returns text as a literal block of Markdown, which TensorBoard renders."""
    return textwrap.indent(text, "    ")


def remembered(file: Path, make: Callable[[], str]) -> str:
    """The text in a file, made and written when it is not there."""
    if not file.exists():
        file.write_text(make())
    return file.read_text()


def has_wandb_login(wandb: ModuleType) -> bool:
    """Whether wandb can log in without asking: it asks on any terminal, and a run must not wait for an answer."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    hosts = (urlparse(wandb.setup().settings.base_url).netloc, "api.wandb.ai")
    try:
        logins = netrc.netrc(os.environ.get("NETRC"))
    except (OSError, netrc.NetrcParseError):
        return False
    return any(logins.authenticators(host) for host in hosts)
