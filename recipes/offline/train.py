"""Trains on the stored rollouts of an earlier run instead of new ones, with the options of core/grpo.py.

    python recipes/offline/train.py --config configs/demo.py --config configs/cispo.py --rollouts_from runs/first

Their weights are older: old log-probabilities are the sampler's, or tokens are weighted by --importance_correction.
"""

import gc
import os
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])
    gc.disable()  # while modules are imported: `ending_together` enables it
    import utils.settings.packages  # noqa: F401 (says what to install)

import time
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from core.config import Config
from core.grpo import Rollouts, groups_with_signal, main
from core.records import Episodes, Progress
from core.run.folder import settings_of_model
from core.run.run import Run
from core.run.stored import read_episodes
from models.state import TrainState
from utils.devices.startup import ending_together
from utils.metrics.jsonl import read_json
from utils.runs.origin import read_settings
from utils.runs.resume import changed_settings
from utils.settings.config import options_of, parse
from utils.settings.errors import UserError, refuse, user_errors
from utils.settings.options import option

# What may differ from the run that sampled: how it learns, and what it is tested on. Everything else must be equal.
LEARNING = ("update", "objective", "distill", "optimizer", "lora", "memory", "compute", "devices", "held_out", "eval")
FREE = ("seed", "max_steps", "num_epochs", "test_interval", "ahead", "rollouts_from")


@dataclass(frozen=True)
class OfflineConfig(Config):
    """Stored rollouts."""

    rollouts_from: str = option("", "Run whose rollouts (--save_rollouts all) are read; after its last step, the first")
    samples, older_by = False, "--rollouts_from"

    def __post_init__(self):
        super().__post_init__()
        refuse([
            (not self.files,
             f"--rollouts_from {self.rollouts_from!r} has no rollouts/step_N.npz: name a run with --save_rollouts all"),
            (self.ahead > 0 or self.update.task_sampling == "bins",
             "--rollouts_from reads what an earlier run sampled: leave out --ahead and --task_sampling"),
            (not self.sampling.distribution.is_whole,
             "--rollouts_from: the ids that --top_k, --top_p and --min_p leave are not stored: leave these three out"),
        ])  # fmt: skip

    @property
    def files(self) -> dict[int, Path]:
        """Returns the files of the stored steps by their numbers, in order."""
        found = Path(os.path.expanduser(self.rollouts_from)).glob("rollouts/step_*.npz")
        files = {file.stem.removeprefix("step_"): file for file in found}
        return {int(number): files[number] for number in sorted(filter(str.isdecimal, files), key=int)}


class OfflineRun(Run):
    """A run on stored rollouts."""

    def __init__(self, *arguments: object):
        super().__init__(*arguments, command="recipes/offline/train.py")

    def start(self, *arguments: object) -> Self:
        """Begins the run: see `Run.start`. Raises: UserError for rollouts of other settings, problems or code."""
        name, options = self.folder.settings["rollouts_from"], options_of(OfflineConfig)
        stored = Path(os.path.expanduser(name))
        if stored.resolve() == self.folder.path.resolve():
            raise UserError(f"--rollouts_from {name} is the --save_dir of this run: name another one of the two")
        run = super().start(*arguments)
        free = {x.name for x in options.values() if x.group.split(".")[0] in LEARNING} - {"group_size"} | {*FREE}
        settings, origin = read_settings(stored / "config.json")
        if not settings:
            raise UserError(f"--rollouts_from {name} has no config.json: name a whole run folder")
        if origin.get("segments"):
            raise UserError(f"--rollouts_from {name} was changed on the way by --resume force: name another run")
        changes = changed_settings(settings, self.folder.settings, options, free)
        data = read_json(stored / "data.json")
        changes |= {x: [data[x], value] for x, value in self.folder.fingerprints.items() if data.get(x, value) != value}
        for what, (old, new) in changes.items():
            was, now = f"--rollouts_from {name} was sampled with another {what}", f"{old!r}, and {new!r} now"
            raise UserError(f"{was} ({now}): give the same")
        self.folder.print(f"rollouts are read from {name}")
        return run


class StoredRollouts(Rollouts):
    """The rollouts of each step, from files; a batch has the first --groups_per_batch groups that the filter passes."""

    def take(self, state: TrainState, progress: Progress) -> tuple[TrainState, Episodes, Progress]:
        """Returns the state, the rollouts of the step after `progress`, and the progress after that step."""
        clock, update, files = time.perf_counter(), self.config.update, self.config.files
        number = [*files][progress.step % len(files)]
        episodes, model = read_episodes(files[number]), self.worker.sampler.model
        if model.num_experts:  # 0: the experts that computed the sample are not recorded
            routes = np.zeros((*episodes.completions.tokens.shape, *model.route_shape), np.int16)
            episodes = replace(episodes, completions=replace(episodes.completions, routes=routes))
        problems = [self.worker.env.problem(int(i)) for i in episodes.task_ids] if self.config.distill.teacher else []
        has_signal = groups_with_signal(episodes, self.config)
        groups = np.flatnonzero(has_signal | (not self.config.objective.do_group_filter))[: update.groups_per_batch]
        cursor = progress.cursor + int(groups[-1] + 1 if len(groups) == update.groups_per_batch else len(has_signal))
        chosen = (groups[:, None] * update.group_size + np.arange(update.group_size)).ravel()
        times, metrics = {"rollout": time.perf_counter() - clock, "score": 0.0}, {"rollout/stored_step": number}
        episodes = replace(episodes, has_signal=has_signal, batch_rollouts=chosen, problems=problems)
        return state, replace(episodes, times=times, metrics=metrics), progress.after_step(cursor, len(episodes))


if __name__ == "__main__":
    with ending_together(), user_errors():
        main(parse(OfflineConfig, sys.argv[1:], __doc__, implied=settings_of_model), OfflineRun, StoredRollouts)
