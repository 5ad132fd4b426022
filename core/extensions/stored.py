"""Rollouts of an earlier run instead of new ones: --rollouts_from RUN reads what --save_rollouts all wrote.

Their weights are older than the policy's, so the loss reads the sampler's log-probabilities as the old ones, or weighs
tokens by --importance_correction: as for --ahead, see `trusts_sampler` of core/config.py.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from jaxtyping import Bool

from core.config import Config
from core.records import Episodes, Progress
from core.rollout import RolloutWorker
from core.run.rollouts import read_episodes, token_texts
from envs import parse_options
from models.state import TrainState
from models.tokenizer import Tokenizer
from utils.metrics.jsonl import read_lines
from utils.runs.origin import read_settings
from utils.settings.config import to_dict
from utils.settings.errors import UserError

MUST_EQUAL = ("group_size", "env_name", "env_options", "length_reward", "top_k", "top_p", "min_p")


@dataclass(frozen=True)
class StoredRollouts:
    """The rollouts of each step, read from the folder of an earlier run; see `Rollouts` of core/grpo.py.

    Step t reads the t-th stored step; behind the last one it begins with the first again. As in the run that sampled
    them, the batch is the first --groups_per_batch groups that the filter lets through.
    """

    config: Config
    worker: RolloutWorker
    groups_with_signal: Callable[[Episodes, Config], Bool[np.ndarray, "N"]]

    def take(self, state: TrainState, progress: Progress) -> tuple[TrainState, Episodes, Progress]:
        """Returns the state, the rollouts of the step after `progress`, and the progress after that step."""
        clock = time.perf_counter()
        steps, update = stored_steps(self.config), self.config.update
        number = [*steps][progress.step % len(steps)]
        episodes = read_episodes(steps[number])
        tokens, model = episodes.completions.tokens, self.worker.sampler.model
        if model.num_experts:  # 0: the experts that computed the sample are not recorded
            routes = np.zeros((*tokens.shape, *model.route_shape), np.int16)
            episodes = replace(episodes, completions=replace(episodes.completions, routes=routes))
        if self.config.distill.teacher:
            episodes = replace(episodes, problems=[self.worker.env.problem(int(i)) for i in episodes.task_ids])
        has_signal = self.groups_with_signal(episodes, self.config)
        groups = np.flatnonzero(has_signal | (not self.config.objective.do_group_filter))[: update.groups_per_batch]
        rows = groups[:, None] * update.group_size + np.arange(update.group_size)
        is_full = len(groups) == update.groups_per_batch
        progress = progress.after_step(
            progress.cursor + (int(groups[-1]) + 1 if is_full else len(has_signal)), len(episodes)
        )
        episodes = replace(
            episodes,
            has_signal=has_signal,
            batch_rollouts=rows.ravel(),
            times={"rollout": time.perf_counter() - clock, "score": 0.0},
            metrics={"rollout/stored_step": number},
        )
        return state, episodes, progress


def stored_steps(config: Config) -> dict[int, Path]:
    """Returns the files of the stored steps of --rollouts_from by their numbers, in order."""
    folder = Path(os.path.expanduser(config.update.rollouts_from)) / "rollouts"
    files = {file.stem.removeprefix("step_"): file for file in folder.glob("step_*.npz")}
    return {int(number): files[number] for number in sorted(filter(str.isdecimal, files), key=int)}


def describe_stored(config: Config, tokenizer: Tokenizer) -> str:
    """Returns in one line which rollouts are read; empty without --rollouts_from.

    Raises: UserError for rollouts that this run cannot train on: none, of another tokenizer, of other settings.
    """
    name = config.update.rollouts_from
    if not name:
        return ""
    run, steps = Path(os.path.expanduser(name)), stored_steps(config)
    if not steps:
        raise UserError(
            f"--rollouts_from {name}: this folder has no rollouts/step_N.npz: name a run with --save_rollouts all"
        )
    if config.run.save_dir and Path(os.path.expanduser(config.run.save_dir)).resolve() == run.resolve():
        raise UserError(f"--rollouts_from {name} is the --save_dir of this run: name another one of the two")
    if config.ahead:
        raise UserError("--ahead 1 samples rollouts, and --rollouts_from reads them: leave out one of the two")
    if not config.sampling.distribution.is_whole:
        raise UserError(
            "--rollouts_from: the ids that --top_k, --top_p and --min_p leave are not stored: leave these three out"
        )
    file = next(iter(steps.values()))
    episodes = read_episodes(file)
    check_tokens(name, file, episodes, tokenizer)
    check_settings(name, run, episodes, config)
    how = "p_old is the sampler's" if config.trusts_sampler else "the weight w is for the difference"
    return f"rollouts are read from {name}, of {len(steps)} steps; {how}"


def check_settings(name: str, run: Path, episodes: Episodes, config: Config) -> None:
    """Raises UserError if the run has another group size, environment, reward or truncation of sampling."""
    theirs, _ = read_settings(run / "config.json")
    theirs["group_size"] = int(np.unique(episodes.positions, return_counts=True)[1].max())
    ours = to_dict(config)
    for option in MUST_EQUAL:
        mine, stored = ours[option], theirs.get(option, ours[option])
        is_equal = mine == stored
        if option == "env_options":
            is_equal = parse_options(str(mine)) == parse_options(str(stored))
        if not is_equal:
            raise UserError(
                f"--rollouts_from {name} was sampled with --{option} {stored or repr('')}, and this run has "
                f"{mine or repr('')}: give the same"
            )


def check_tokens(name: str, file: Path, episodes: Episodes, tokenizer: Tokenizer) -> None:
    """Raises UserError if the first stored rollouts are not the texts that this tokenizer reads in their ids."""
    completions = episodes.completions
    rows = [row for _, row in read_lines(file.with_suffix(".jsonl"), most=0)]
    for ids, start, end, row in zip(
        completions.tokens.tolist(), completions.prompt_lengths, completions.lengths, rows, strict=True
    ):
        if "tokens" not in row:  # those of the first groups have them
            continue
        try:
            is_same = tokenizer.hf.decode(ids[:start]) == row["prompt"]
            is_same &= token_texts(tokenizer, ids[start:end]) == row["tokens"]
        except (OverflowError, TypeError):  # of ids that it has not
            is_same = False
        if not is_same:
            raise UserError(
                f"--rollouts_from {name}: its token ids are other texts for the tokenizer of this run: train a model "
                "with the tokenizer of the stored run"
            )
