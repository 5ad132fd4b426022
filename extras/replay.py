"""Replays an episode of a training run from its stored rollouts.

    python extras/replay.py --rollouts runs/guess/rollouts/step_3 --row 5

Random numbers are addressed by seed, step, position in the run, sample and token. So with the weights before the step,
the sampler samples the same tokens again.
"""

import gc
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    gc.disable()  # while modules are imported: `ending_together` enables it
    import utils.settings.packages  # noqa: F401 (says what to install)

import os
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from jaxtyping import Int

from core.config import Config
from core.records import Completions, first_rows
from core.rollout import make_worker
from core.run.card import training_command
from core.run.rollouts import transcript
from core.run.stored import read_rollouts
from envs.settings import EnvConfig, check_code, resolve_settings
from models.checkpoint import find_model, load_policy
from models.memory import sampling_room
from models.names import make_policy
from utils.devices.sharding import Layout
from utils.devices.startup import DeviceConfig, ending_together, make_layout
from utils.metrics.logger import printable
from utils.runs.origin import read_settings
from utils.settings.arguments import Value
from utils.settings.config import make_config, options_of, parse, to_dict
from utils.settings.errors import UserError, user_errors
from utils.settings.groups import SinkConfig
from utils.settings.options import group, option
from utils.threefry import make_key

EMPTY: Mapping[str, Value] = MappingProxyType({})


@dataclass(frozen=True)
class ReplayCommand:
    """Replay of an episode. The settings come from its run; those that run code are named here."""

    rollouts: str = option("", "Rollouts of a run, RUN/rollouts/step_N, as --save_rollouts writes them", essential=True)
    row: int = option(0, "Row of --rollouts, counted from 0", essential=True)
    env: EnvConfig = group(EnvConfig)
    devices: DeviceConfig = group(DeviceConfig)

    def __post_init__(self):
        if not self.rollouts:
            raise UserError("--rollouts is empty: name a file of a run, RUN/rollouts/step_N")


@dataclass(frozen=True)
class Stored:
    """A rollout of a run, with its addresses: step, sample, task and position."""

    run: Path
    step: int
    sample: int  # number in its group
    task: int
    position: int  # of its group in the run
    prompt_length: int
    tokens: Int[np.ndarray, "T"]  # prompt and what follows


def read_stored(path: str, row: int) -> tuple[Stored, Config]:
    """Returns row number `row` of a file of rollouts (RUN/rollouts/step_N), and the settings of its run.

    Raises: UserError if there is no such row.
    """
    file = Path(os.path.expanduser(path)).with_suffix(".npz")
    if not file.is_file():
        raise UserError(
            f"--rollouts {path}: there is no {file}, which --save_rollouts all writes: name a file of such a run"
        )
    run = file.parent.parent
    rows = read_rollouts(file)
    if not file.stem.removeprefix("step_").isdecimal():
        raise UserError(f"--rollouts {path} is not a file of a step: name RUN/rollouts/step_N.npz")
    options, _ = read_settings(run / "config.json")
    options = {name: value for name, value in options.items() if name in options_of(Config)}  # some may be gone
    try:
        config = make_config(Config, **options | vars(SinkConfig()))  # it logs nowhere
    except (TypeError, ValueError) as error:
        raise UserError(f"--rollouts {path}: {run / 'config.json'}: {error}") from error
    if not 0 <= row < len(rows["tasks"]):
        raise UserError(f"--row {row} is not in {file}: give 0 to {len(rows['tasks']) - 1}")
    first = first_rows(rows["rollout"])[row]
    length = rows["lengths"][first]
    stored = Stored(
        run,
        int(file.stem.removeprefix("step_")),
        row % config.update.group_size,
        int(rows["tasks"][row]),
        int(rows["positions"][row]),
        int(rows["prompt_lengths"][first]),
        rows["tokens"][first, :length],
    )
    return stored, config


def weights_before(stored: Stored, config: Config) -> Path:
    """Returns the folder of the model that sampled a rollout. Raises: UserError if it was not saved."""
    step = stored.step - 1 - config.ahead
    if step <= 0:
        return find_model(config.model_dir)
    folder = stored.run / f"step{step}"
    if not folder.is_dir():
        raise UserError(
            f"--rollouts needs the model that sampled step {stored.step}, and there is no {folder}: choose the first "
            "step, or one after a saved step (--save_interval)"
        )
    return folder


def replay(path: str, row: int, layout: Layout, named: Mapping[str, Value] = EMPTY) -> None:
    """Draws a stored episode again, prints it, and says how it differs.

    Raises: UserError if it cannot be sampled again, or would run code that is not `named`.
    """
    stored, config = read_stored(path, row)
    own = to_dict(config.env)
    check_code(f"{stored.run}/config.json", {name: x for name, x in own.items() if named.get(name) != x})
    print(f"as in {stored.run}: {printable(training_command(Config, to_dict(config)))}")
    folder = weights_before(stored, config)
    model, base, params, tokenizer = load_policy(folder, config.lora, config.seed, layout, **config.compute.arguments)
    limits = config.sampling.num_generation_tokens, config.sampling.force_answer_at
    settings = resolve_settings(config.env, config.env.env_name, *limits)
    key = make_key(config.seed, stored.step)
    with make_worker(settings, config.sampling, config.rewards, model, tokenizer, layout) as worker:
        room = sampling_room(model, layout, (base, params), worker.row_length)
        worker = worker.with_room(room, config.update.group_size)  # noqa: PLW2901
        weights = worker.load_weights(make_policy(base, params))
        problem = tokenizer.decode(stored.tokens[: stored.prompt_length]).strip()
        print(f"step {stored.step}, row {row}, sample {stored.sample} of problem {stored.task}: {printable(problem)}")
        ids = worker.fitting_ids  # of the problems that it plays; None: all
        tasks = np.array([stored.task]) if ids is None else np.flatnonzero(ids == stored.task)
        episodes = worker.play(weights, tasks, config.update.group_size, key, np.array([stored.position]))
    outcome = compare(episodes.completions, stored)
    text = f"{'#' * 8} drawn again\n{transcript(episodes, stored.sample)}\n{'-' * 8} {outcome}"
    print(printable(text, max_chars=10**6))


def compare(completions: Completions, stored: Stored) -> str:
    """Returns a sentence on the first difference between the stored row and the row sampled again, and why."""
    length = completions.lengths[stored.sample]
    tokens = completions.tokens[stored.sample, :length]
    if np.array_equal(tokens, stored.tokens):
        return f"all {len(tokens) - stored.prompt_length} tokens are those of the run"
    length = min(len(tokens), len(stored.tokens))
    differs = np.flatnonzero(tokens[:length] != stored.tokens[:length])
    first = (differs[0] if differs.size else length) - stored.prompt_length
    return f"token {first} is another than in the run: its weights, devices or this code differ from the run's"


def main(config: ReplayCommand) -> None:
    replay(config.rollouts, config.row, make_layout(config.devices), to_dict(config.env))


if __name__ == "__main__":
    with ending_together(), user_errors():
        main(parse(ReplayCommand, sys.argv[1:], __doc__))
