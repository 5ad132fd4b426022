"""What a run saves: training states to resume from, and models to use elsewhere."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, replace

import jax

from core.records import Progress
from core.run.card import ModelCard, generation_settings
from core.run.folder import RunFolder
from envs.settings import RolloutSettings
from models.architecture import Decoder
from models.checkpoint import find_adapters, find_local, find_model, model_steps, save_model
from models.memory import gigabytes
from models.names import CRITIC, LAYERS, Adapters, Params
from models.state import TrainState
from models.tokenizer import Tokenizer, with_generation, with_training_prompts
from utils.metrics.curves import read_metrics
from utils.runs.checkpoints import CheckpointManager
from utils.settings.errors import UserError


class States:
    """The states and models of a run; all processes call every method, the main one writes.

    `newest` is the state after the last step, lost if it is not saved. Raises: OSError if the disk takes no more.
    """

    def __init__(self, folder: RunFolder, card: ModelCard):
        self.folder, self.layout, self.keep, self.card = folder, folder.layout, folder.config.keep, card
        place = folder.bucket.path if folder.bucket else folder.path
        self.checkpoints = CheckpointManager(place / "state", folder.layout)
        self.newest: tuple[TrainState, Progress] | None = None

    def restore(self, state: TrainState) -> tuple[TrainState, Progress | None]:
        """Returns the newest whole state and its progress; `state` and None if there is none.

        Raises: UserError if the disk has no room for one save.
        """
        self.check_disk(state)
        state, saved = self.checkpoints.restore(state)
        return state, Progress(**saved) if saved else None

    def check_disk(self, state: TrainState) -> None:
        """Raises UserError, in every process, if the disk has no room for one save."""
        model = sum(x.nbytes for x in jax.tree.leaves({**state.params, CRITIC: None}))
        whole = 0 if self.folder.bucket else sum(x.nbytes for x in jax.tree.leaves(state))
        free, problem = shutil.disk_usage(self.folder.path).free, ""
        if self.layout.is_main and model + whole > free:
            what = f"a model of {gigabytes(model)} GB and a state of {gigabytes(whole)} GB"
            problem = f"the disk of {self.folder.path} has {gigabytes(free)} GB free, and each save writes {what}"
        if problem := self.layout.broadcast(problem):
            raise UserError(f"{problem}: free space, or name a --save_dir on another disk")

    def begin(self, model: Decoder, tokenizer: Tokenizer) -> None:
        """Sets the model, and the tokenizer that is saved with it."""
        self.model, self.tokenizer = model, tokenizer
        adapters = find_adapters(find_model(self.folder.model_dir))
        base = adapters.base if adapters else self.folder.model_dir
        local = find_local(base)
        self.base = str(local.absolute()) if local else base  # PEFT looks in the working directory only

    def end_step(self, state: TrainState, progress: Progress) -> None:
        """Remembers the state after a step. Raises: OSError when an earlier save has failed."""
        memory = json.loads(json.dumps(progress.memory))  # a copy, which the loop cannot change before it is saved
        assert memory == progress.memory, "Progress.memory must be as JSON returns it: names are text, values finite"
        self.newest = state, replace(progress, memory=memory)
        self.checkpoints.check_errors()

    def save_newest(self) -> tuple[TrainState, Progress] | None:
        """Writes the newest state in the background, if there is one, and returns it.

        A run never resumes from half of a state.
        """
        newest, self.newest = self.newest, None
        # An update that did not end has deleted the arrays that were donated to it.
        if newest is None or any(x.is_deleted() for x in jax.tree.leaves(newest[0])):
            return None
        state, progress = newest
        self.folder.upload()
        saved = asdict(progress)
        if not progress.memory:
            del saved["memory"]  # as states of before have it
        self.checkpoints.save(progress.step, state, saved)
        return newest

    def save_model(self, name: str, params: Params | Adapters, progress: Progress) -> None:
        """Writes a Hugging Face folder of this name: its template has the prompts of training, its card the scores.

        For adapters it is a PEFT folder, which names their base.
        """
        layout, card = self.layout, ""
        if layout.is_main:
            card = self.card.render(progress, read_metrics(self.folder.path / "metrics.jsonl"))
        save, base = save_model, ()
        if LAYERS not in params:
            from models.peft import save_adapters

            save, base = save_adapters, (self.base,)
        folder = self.folder.path / name
        save(folder, self.model, params, self.tokenizer, *base, layout.fetch, layout.is_main, card)

    def save_step(self, state: TrainState, progress: Progress) -> None:
        """Writes the model of a step to stepN/; --keep sets how many models of earlier steps stay."""
        self.save_model(f"step{progress.step}", state.params, progress)
        if not self.layout.is_main or not self.keep:
            return
        steps = [step for step in model_steps(self.folder.path) if step <= progress.step]
        for step in steps[: -self.keep]:
            shutil.rmtree(self.folder.path / f"step{step}")
            if self.folder.bucket:
                self.folder.bucket.remove(f"step{step}")


def saved_tokenizer(tokenizer: Tokenizer, played: RolloutSettings, settings: Mapping[str, object]) -> Tokenizer:
    """Returns the tokenizer of saved models, with the prompts and sampling settings of training."""
    problem, sampling = played.env.problem(0), generation_settings(settings, played.max_new_tokens)
    tokenizer = with_generation(tokenizer, sampling, settings["stop_strings"])
    return tokenizer if problem.plain else with_training_prompts(tokenizer, problem.thinking, problem.prefix)
