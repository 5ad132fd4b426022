"""wandb and TensorBoard, which has other names of metrics: pass@2 is pass_at_2 there."""

import math
import secrets
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from utils.metrics.jsonl import JSON, json_value
from utils.settings.groups import SinkConfig

ROLLOUT_COLUMNS = ("group", "task", "prompt", "text", "return", "correct_answer", "length", "finished")


class Wandb:
    """A run at wandb, continued after a restart."""

    def __init__(self, config: SinkConfig, directory: Path, settings: Mapping[str, JSON], mode: str):
        import wandb

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
        histograms = {}
        for name in (name for name in metrics if name.endswith("_histogram")):
            counts = [x or 0.0 for x in metrics[name]]
            histograms[name] = self.wandb.Histogram(np_histogram=(counts, np.arange(len(counts) + 1)))
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
