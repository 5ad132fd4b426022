"""Trains a language model by reinforcement learning: the whole loop of GRPO.

    python core/grpo.py                                              # the demo: models/tiny learns Countdown on a CPU
    python core/grpo.py --env_name countdown --model_dir ~/checkpoints/Qwen3-1.7B/

To change the loss: core/objectives.py, the advantage: core/advantages.py, how tokens are sampled: core/sampler.py.
To change which groups are trained on: `collect`. To add a metric: a new name under "Log, evaluate, save" in `train`.
To add an option: core/config.py, or the group of the file that reads it. The same in one file: core/minimal.py.

A prompt's way to its gradient: Rollouts.take -> collect -> RolloutWorker.play (core/rollout.py) -> Sampler.draw
(core/sampler.py) -> make_batch -> Learner.add_logprobs (core/learner.py) -> compute_advantages (core/advantages.py) ->
Learner.update -> accumulate -> policy_loss (core/objectives.py), which sums token losses, their terms and metrics.

N prompts, G rollouts of each (a group), B rows: one of each rollout, or several.
"""

import gc
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    gc.disable()  # while modules are imported: `ending_together` enables it
    import utils.settings.packages  # noqa: F401 (says what to install)

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Bool, Int

from core.advantages import compared_rewards, compute_advantages, has_signal
from core.config import Config
from core.extensions.notes import training_notes
from core.extensions.programs import run_programs
from core.learner import Learner, make_learner, split_minibatches
from core.records import Batch, Episodes, Progress, join_episodes
from core.rollout import RolloutWorker, evaluate_held_out, make_worker
from core.run.folder import settings_of_model
from core.run.metrics import batch_metrics, rollout_metrics, speed_metrics
from core.run.report import describe_steps
from core.run.run import STOPPED, Run
from envs.settings import RolloutSettings, resolve_environments
from models.architecture import Decoder
from models.checkpoint import load_policy
from models.names import Weights
from models.state import TrainState
from models.tokenizer import Tokenizer
from utils.batching import group_counts, select_rows
from utils.devices.sharding import Layout
from utils.devices.startup import ending_together, make_layouts
from utils.settings.config import parse
from utils.settings.errors import user_errors
from utils.settings.lmpo import LMPO
from utils.threefry import make_key

if TYPE_CHECKING:
    from core.extensions.bins import TaskBins

Workers = Mapping[str, RolloutWorker]  # by role: "env", "test_env", "test_env.LABEL"


def main(config: Config, run_class: type[Run] = Run, rollouts_class: "type[Rollouts] | None" = None) -> None:
    layout, rollout_layout = make_layouts(config.devices, config.ahead > 0, config.model_dir)
    environments = resolve_environments(config.env, config.held_out, config.sampling)
    run = run_class(config, layout, environments)  # locks its folder, and checks what it resumes, before models
    # With --lora_rank, `base` is the frozen model, `params` are adapters (models/lora.py): updates change these, and
    # `learner.policy` puts both together. Without a rank all is trained, and `base` is empty.
    source = run.folder.model_dir, config.lora, config.seed, layout
    model, base, params, tokenizer = load_policy(*source, **config.compute.arguments)
    workers = make_workers(config, environments, model, tokenizer, rollout_layout, run.folder.path)
    num_tokens = workers["env"].max_new_tokens
    learner, state = make_learner(config, model, params, layout, num_tokens, run.log.write_bad_batch, base)
    del params  # the state holds them, and each update replaces them
    config, workers, learner, state = with_extensions(config, workers, learner, state)
    state, progress = run.restore(state)
    with run.start(model, tokenizer, workers.values()):  # however the run ends, what it has reached is saved
        rollouts = (rollouts_class or make_rollouts)(config, workers["env"], learner, run)
        prepare(config, run, workers, learner, state)
        train(config, run, workers, rollouts, learner, state, progress)


def train(
    config: Config, run: Run, workers: Workers, rollouts: "Rollouts", learner: Learner,
    state: TrainState, progress: Progress) -> None:  # fmt: skip
    """The loop: rollouts, old log-probabilities, advantages, updates, until the steps or the problems are done."""
    worker, evaluate = workers["env"], partial(evaluate_policy, config, run, workers, learner)
    progress = run.begin(progress, state, evaluate)
    while (fraction := fraction_done(config, worker, progress)) < 1:
        step = progress.step + 1

        # Rollouts: groups of completions and their rewards, until the batch is full of groups to learn from.
        with run.phase("rollout"):
            state, episodes, progress = rollouts.take(state, progress)  # by `collect`

        # Old log-probabilities, recomputed if several updates divide by them: those of the sampler differ by rounding.
        # A single update divides by its own. Also those of the reference (--kl_coef), and the critic's values.
        with run.phase("logprobs"):
            state, batch = learner.add_logprobs(state, make_batch(episodes, config), episodes)

        # Advantages, by default (reward - group mean) / group deviation for each token of a completion. Rows without a
        # reward are dropped and, by the filters, truncated completions and groups without signal.
        batch = compute_advantages(batch, config.objective)

        # Updates: one optimizer step per minibatch, `ppo_epochs` times over the batch.
        with run.phase("update"):
            updates = []
            for epoch in range(config.update.ppo_epochs):
                for minibatch in split_minibatches(batch, config, step, epoch):
                    state, update = learner.update(state, minibatch, fraction)
                    updates.append(update)
            update_metrics = learner.metrics(updates)  # blocks until the updates are done

        # Log, evaluate, save.
        metrics = run.log.times | rollout_metrics(episodes) | batch_metrics(batch) | update_metrics
        metrics |= speed_metrics(learner.layout, episodes, metrics)
        metrics["env/epochs"] = progress.cursor / worker.num_tasks
        is_last = fraction_done(config, worker, progress) >= 1
        progress = run.end_step(progress, state, metrics, evaluate, is_last, (episodes, batch))
    run.finish(progress, state)


def evaluate_policy(
    config: Config, run: Run, workers: Workers, learner: Learner, state: TrainState, step: int
) -> dict[str, float]:
    """Returns the scores on held-out problems, and writes their rollouts; empty if no problems are held out."""
    if "test_env" not in workers:
        return {}
    scores, examples = evaluate_held_out(workers, learner.policy(state.params), config.eval, config.seed)
    run.log.write_held_out(step, examples)
    return scores


class Rollouts:
    """Samples the rollouts of each step with the current policy, when the step begins."""

    def __init__(self, config: Config, worker: RolloutWorker, learner: Learner, bins: "TaskBins | None" = None):
        self.config, self.worker, self.learner, self.bins = config, worker, learner, bins

    def take(self, state: TrainState, progress: Progress) -> tuple[TrainState, Episodes, Progress]:
        """Returns the state, the rollouts of the step after `progress`, and the progress after that step."""
        weights = self.worker.load_weights(self.learner.policy(state.params))  # cast and laid out for decoding
        episodes, cursor = collect(self.worker, weights, self.config, progress, self.bins)
        return state, episodes, progress.after_step(cursor, len(episodes), episodes.memory)


def make_rollouts(config: Config, worker: RolloutWorker, learner: Learner, run: Run) -> Rollouts:
    """Returns what samples the rollouts of each step."""
    bins = None
    if config.update.task_sampling == "bins":
        from core.extensions.bins import make_bins

        bins = make_bins(config, worker)
    if not config.ahead:
        return Rollouts(config, worker, learner, bins)
    from core.extensions.ahead import AheadRollouts

    how = {"collect": partial(collect, bins=bins), "fraction_done": fraction_done}
    return AheadRollouts(config, worker, learner, **how, stack=run.stack, signals=run.stop.signals)


def task_numbers(seed: int, num_tasks: int, positions: Int[np.ndarray, "N"]) -> Int[np.ndarray, "N"]:
    """Returns the tasks at these positions of the run; every epoch (pass over the environment) has a new order."""
    epochs, offsets = np.divmod(positions, num_tasks)
    tasks = np.empty_like(positions)
    for epoch in np.unique(epochs).tolist():
        order = np.random.default_rng((seed, epoch)).permutation(num_tasks)
        is_in_epoch = epochs == epoch
        tasks[is_in_epoch] = order[offsets[is_in_epoch]]
    return tasks


def collect(
    worker: RolloutWorker, weights: Weights, config: Config, progress: Progress, bins: "TaskBins | None" = None
) -> tuple[Episodes, int]:
    """Samples groups until the batch is full of groups that the filter lets through, or --max_resampling is reached.

    Returns all episodes, with the rollouts to train on in `batch_rollouts`, and the number of the next task.
    """
    step, cursor = progress.step + 1, progress.cursor
    key = make_key(config.seed, step)
    tasks_of_step, *_ = bins.choose(progress) if bins else (None,)
    group_size = config.update.group_size
    missing, max_groups = config.update.groups_per_batch, config.update.max_groups
    share = 1.0  # fraction of the sampled groups that has signal
    parts, batch_rollouts, num_sampled_groups = [], [], 0
    while missing and num_sampled_groups < max_groups:
        num_groups = num_groups_to_sample(missing, share, config.update.groups_per_batch)
        num_groups = min(num_groups, max_groups - num_sampled_groups)
        positions = cursor + np.arange(num_groups)
        tasks = task_numbers(config.seed, worker.num_tasks, positions)
        if bins:  # --task_sampling bins
            tasks = tasks_of_step[positions - progress.cursor]
        # Keys depend on the position in the run, since a task may occur twice in a step that begins a new epoch.
        episodes = worker.play(weights, tasks, group_size, key, positions)
        # In training only: held-out returns have no length reward.
        if config.rewards.length_reward:
            from core.terms.lengths import with_length_reward

            episodes = with_length_reward(episodes, worker.max_new_tokens, config.rewards.length_reward)
        episodes = replace(episodes, has_signal=groups_with_signal(episodes, config))
        parts.append(episodes)
        groups = np.flatnonzero(episodes.has_signal | (not config.objective.do_group_filter))[:missing]
        firsts = (num_sampled_groups + groups) * group_size
        batch_rollouts.append((firsts[:, None] + np.arange(group_size)).ravel())
        missing -= len(groups)
        num_sampled_groups += num_groups
        share = (config.update.groups_per_batch - missing) / num_sampled_groups
        # Tasks of groups that are not needed come again in the next step: a batch must not depend on the size of calls.
        cursor += num_groups if missing else int(groups[-1]) + 1
    episodes = replace(join_episodes(parts), batch_rollouts=np.concatenate(batch_rollouts))
    return bins.count(episodes, progress, cursor) if bins else episodes, cursor


def num_groups_to_sample(missing: int, share: float, max_groups: int) -> int:
    """Returns the smallest of `group_counts` that is expected to hold `missing` groups with signal.

    `share` of the groups have signal. The batch does not depend on this number, only the sampling that is wasted does.
    """
    counts = [count for count in group_counts(max_groups) if count * share >= missing]
    return min(counts, default=max_groups)


def groups_with_signal(episodes: Episodes, config: Config) -> Bool[np.ndarray, "N"]:
    """True for groups that can teach, by what --advantage compares: rewards [K, N, G], of K turns or parts if K > 1."""
    rewards = compared_rewards(rollout_batch(episodes, config), config.objective)
    return has_signal(rewards, config.objective).any(axis=0)


def make_batch(episodes: Episodes, config: Config) -> Batch:
    """Returns the rows to train on."""
    rows = np.flatnonzero(np.isin(episodes.rollout, episodes.batch_rollouts))
    return select_rows(rollout_batch(episodes, config), rows)


def rollout_batch(episodes: Episodes, config: Config) -> Batch:
    """Returns all rows. The reward is the environment's "return", which --reward replaces; NaN: there is none."""
    completions = episodes.completions
    rewards = np.where(episodes.failed, np.float32(np.nan), episodes.scores["return"])[episodes.rollout]
    parts = episodes.scores if config.objective.parts.reward_parts else {}
    by_token = None
    if episodes.turn_rewards:
        from core.terms.turn_rewards import token_rewards

        by_token = token_rewards(episodes, rewards)
    return Batch(
        tokens=completions.tokens,
        mask=completions.mask,
        sample_logprobs=completions.logprobs,
        rewards=rewards,
        lengths=completions.lengths,
        prompt_lengths=completions.prompt_lengths,
        finished=completions.finished,
        support=completions.support,
        routes=completions.routes,
        rollout=episodes.rollout,
        token_rewards=by_token,
        reward_parts={name: scores[episodes.rollout] for name, scores in parts.items()},
        extras=episodes.extras,
        group_size=config.update.group_size,
    )


def fraction_done(config: Config, worker: RolloutWorker, progress: Progress) -> float:
    """Returns the fraction of the run that is done, of its steps or of its problems under --num_epochs; 1: done."""
    if STOPPED in progress.memory:  # by a rule of --stop_at
        return 1.0
    num_problems = config.num_epochs * worker.num_tasks
    by_problems = progress.cursor / num_problems if num_problems else 0.0
    return max(progress.step / config.max_steps, by_problems)


def make_workers(
    config: Config,
    environments: Mapping[str, RolloutSettings],
    model: Decoder,
    tokenizer: Tokenizer,
    layout: Layout,
    failures_dir: Path,
) -> dict[str, RolloutWorker]:
    """Returns a worker for each environment, by role."""
    model = replace(model, mesh=layout.mesh)
    return {
        role: make_worker(settings, config.sampling, config.rewards, model, tokenizer, layout, failures_dir)
        for role, settings in environments.items()
    }


def with_extensions(
    config: Config, workers: Workers, learner: Learner, state: TrainState
) -> tuple[Config, Workers, Learner, TrainState]:
    """Returns the same with what the options switch on: a teacher, rollouts a step ahead; workers know their room."""
    if config.distill.teacher:
        from core.extensions.teacher import attach_teacher

        config, learner, state = attach_teacher(config, learner, state, workers["env"])
    if config.ahead:
        from core.extensions.ahead import prepare_ahead

        workers, state = prepare_ahead(workers, learner, state)
    else:
        workers = {role: worker.with_room(learner.sampling_room, config.batch_size) for role, worker in workers.items()}
    return config, workers, learner, state


def prepare(config: Config, run: Run, workers: Workers, learner: Learner, state: TrainState) -> None:
    """Prints what the run will do, and compiles its programs."""
    model, worker = learner.model, workers["env"]
    parameters = f"{model.num_parameters:,} parameters on {learner.layout.describe_devices(state.params)}"
    notes = [*describe_steps(run.folder, worker.max_new_tokens), *run.notes, *worker.notes]
    notes += training_notes(config, learner, state.params, worker)
    run.folder.print(f"{run.folder.model_dir}: {parameters}", *notes)
    programs = run_programs(config, workers, learner, state)
    if config.distill.teacher:
        from core.extensions.teacher import teacher_programs

        programs.append(teacher_programs(learner, state))
    run.log.compile(programs)


if __name__ == "__main__":
    with ending_together(), user_errors():
        main(parse(Config, sys.argv[1:], __doc__, spellings=LMPO, implied=settings_of_model))
