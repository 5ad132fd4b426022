"""Trains a language model by reinforcement learning: the whole loop of GRPO.

    python core/grpo.py                                              # the demo: models/tiny learns Countdown on a CPU
    python core/grpo.py --env_name countdown --model_dir ~/checkpoints/Qwen3-1.7B/

Letters: N prompts, G rollouts of a prompt (a group), B = N G rows, T row length.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Bool, Float, Int

from core import objectives
from core.eval import (
    Episodes,
    EvalConfig,
    Player,
    RolloutSettings,
    check_files,
    evaluate,
    make_player,
    resolve_settings,
)
from core.objectives import Batch, ObjectiveConfig, advantages, has_signal, normalize, policy_loss, value_loss
from core.sampling import SamplingConfig
from envs import parse_options, test_name
from models.checkpoint import find_local, find_model, load_model, save_model
from models.qwen3 import CRITIC, LAYERS, Qwen, TokenScores, make_critic, score_tokens
from utils.devices.compilation import precompile
from utils.devices.memory import MemoryConfig, fit_memory, out_of_memory
from utils.devices.runtime import Compilations
from utils.devices.sharding import Layout, LayoutConfig, ending_together, make_layout
from utils.evaluation.estimates import explained_variance
from utils.evaluation.tables import find_checkpoints
from utils.metrics.speed import describe_speed, training_flops
from utils.metrics.terminal import track, waiting
from utils.rewards.shaping import add_length_reward
from utils.runs.folder import Run, RunConfig, describe_play, example, is_due, rollout_rows
from utils.settings.config import option, parse
from utils.settings.errors import UserError, user_errors
from utils.settings.lmpo import LmpoConfig
from utils.training.batching import Array, bucket, concatenate, draw_sizes, fit, pieces, power_below, take
from utils.training.state import (
    OptimizerConfig,
    TrainState,
    describe_optimizer,
    init_state,
    lr_multiplier,
    make_optimizer,
)


@dataclass(frozen=True)
class Config(
    ObjectiveConfig, SamplingConfig, EvalConfig, OptimizerConfig, MemoryConfig, RunConfig, LayoutConfig, LmpoConfig
):  # fmt: skip
    """The loop."""

    model_dir: str = option("models/tiny", "Hugging Face folder, hub id or run folder (its last step) to train")
    seed: int = option(0, "of the tasks' order and of the draws")
    max_steps: int = option(10000, "steps: each collects a batch and learns from it")
    num_epochs: int = option(0, "passes over the environment's problems after which the run ends too; 0: no limit")
    groups_per_batch: int = option(256, "groups to learn from in a step")
    group_size: int = option(8, "rollouts of one prompt")
    max_resampling: float = option(4.0, "groups played in a step at most, as a multiple of --groups_per_batch")
    ppo_minibatch: int = option(64, "rollouts per optimiser step; 0: the whole batch")
    ppo_epochs: int = option(1, "times that each rollout is learnt from")
    target_kl: float = option(0.0, "no further epoch of a step once approx_kl of one is above this; 0: all epochs")
    max_skipped_updates: int = option(3, "updates in a row without a finite loss and gradient after which a run stops")
    do_inference_logprobs: bool = option(False, "take the sampler's log-probabilities for the old ones")
    recompute_logprobs: bool = option(False, "recompute old log-probabilities even where one update makes them equal")
    unroll_layers: bool = option(False, "straight code for the layers of the update: for small models")
    attention: str = option(
        "auto", "of the update: cudnn on NVIDIA, splash on TPU, else plain", ["auto", "plain", "cudnn", "splash"]
    )  # fmt: skip
    dtype: str = option("", "of the matmuls; empty: bfloat16, float32 on CPU", ["", "bfloat16", "float32"])
    test_env_name: str = option("", "played before, during and after: held-out problems of X; empty: nothing")
    test_env_options: str = option(
        "", "its options where they differ from training's, and num_generation_tokens and force_answer_at"
    )
    valid_env_name: str = option(
        "", "environment played whenever the test environment is, by whose return --save_best chooses, for example "
        "X-valid; empty: --save_best chooses by the test environment"
    )  # fmt: skip
    test_interval: int = option(10, "steps between held-out evaluations; 0: only before and after")
    test_greedy: bool = option(False, "evaluate greedily too, before and after")
    precompile: bool = option(False, "compile for all shapes of rows before the first step, instead of as they come")
    profile: bool = option(False, "write a jax.profiler trace of the third step to <save_dir>/profile")

    def __post_init__(self):
        for room in reversed(Config.__bases__):  # first lmpo's spellings, which set others' fields
            getattr(room, "__post_init__", lambda self: None)(self)
        for name in (
            "groups_per_batch", "group_size", "max_resampling", "ppo_epochs", "max_steps", "max_skipped_updates",
        ):  # fmt: skip
            if getattr(self, name) < 1:
                raise UserError(f"--{name} must be at least 1")
        if self.is_group_relative and self.group_size < 2:
            raise UserError(f"--advantage {self.advantage} compares rollouts of a group: raise --group_size above 1")
        if self.advantage == "best_k" and self.best_k > self.group_size:
            raise UserError(f"--best_k {self.best_k} is more than the --group_size of {self.group_size}")
        if self.ppo_minibatch < 0 or self.ppo_minibatch and self.batch_size % self.ppo_minibatch:
            raise UserError(
                f"--ppo_minibatch {self.ppo_minibatch} does not divide the {self.batch_size} rollouts of a step: "
                "--groups_per_batch x --group_size (--best_k with that advantage)"
            )
        if self.temperature == 0:
            raise UserError("--temperature 0 always draws the same completion: training needs one above 0")
        if self.do_inference_logprobs and self.importance_correction != "none":
            raise UserError("--do_inference_logprobs leaves --importance_correction nothing to correct: drop one")
        if self.do_inference_logprobs and self.do_mask_inference_ratio:
            raise UserError("--do_inference_logprobs leaves --do_mask_inference_ratio nothing to mask: drop one")
        if self.kv_dtype and self.importance_correction == "none" and self.objective != "dppo":
            raise UserError(
                f"--kv_dtype {self.kv_dtype} draws from probabilities that differ from those that are trained: correct "
                "for it by --importance_correction truncate, or take --objective dppo"
            )
        if self.test_env_options and not (self.test_env_name or self.valid_env_name):
            raise UserError("--test_env_options are those of --test_env_name: name one")
        if self.save_best and not (self.test_env_name or self.valid_env_name):
            raise UserError("--save_best needs held-out scores: give --valid_env_name or --test_env_name")
        if min(self.num_epochs, self.target_kl, self.seed) < 0:
            raise UserError("--num_epochs, --target_kl and --seed must not be negative")

    @property
    def num_rollouts(self) -> int:
        """Rollouts of a full batch."""
        return self.groups_per_batch * self.group_size

    @property
    def batch_size(self) -> int:
        """Rollouts to learn from in a step."""
        return self.groups_per_batch * self.best_k if self.advantage == "best_k" else self.num_rollouts

    @property
    def most_groups(self) -> int:
        """Groups to play in a step at most."""
        return int(self.groups_per_batch * self.max_resampling)

    @property
    def minibatch_size(self) -> int:
        return self.ppo_minibatch or self.batch_size

    @property
    def updates_per_step(self) -> int:
        return self.ppo_epochs * (self.batch_size // self.minibatch_size)


def task_numbers(seed: int, num_tasks: int, places: Int[np.ndarray, "N"]) -> Int[np.ndarray, "N"]:
    """The tasks at these places of the run; every pass over the environment has a new order."""
    epochs, offsets = np.divmod(places, num_tasks)
    orders = {epoch: np.random.default_rng((seed, epoch)).permutation(num_tasks) for epoch in set(epochs.tolist())}
    return np.array([orders[epoch][offset] for epoch, offset in zip(epochs.tolist(), offsets, strict=True)])


def collect(player: Player, params, config: Config, step: int, cursor: int) -> tuple[Batch | None, list[Episodes], int]:
    """Plays groups until the batch is full of groups with signal, or --max_resampling is reached.

    Returns the batch (None when nothing has signal), all that was played, and the number of the next task.
    """
    key = jax.random.fold_in(jax.random.key(config.seed), step)
    largest = player.num_prompts(config.groups_per_batch, config.group_size)
    played, kept, missing, budget = [], [], config.groups_per_batch, config.most_groups
    share = 1.0  # of the groups that can be learnt from, so far
    while missing and budget:
        places = cursor + np.arange(min(num_groups_to_draw(missing, share, largest), budget))
        ids = task_numbers(config.seed, player.num_tasks, places)
        # Keys go by the place in the run: where a new epoch begins, a task may come twice in a step.
        episodes = player.play(params, ids, config.group_size, key, places)
        lengths = episodes.rollouts.lengths - episodes.rollouts.prompt_lengths
        scores = add_length_reward(episodes.scores, lengths, config.num_generation_tokens, config)
        episodes = replace(episodes, scores=scores)
        drawn = make_batch(episodes, config)
        rewards = drawn.rewards.reshape(len(ids), -1)
        groups = np.flatnonzero(has_signal(rewards, config) | (not config.do_group_filter))[:missing]
        played.append(episodes)
        rows = np.arange(rewards.size).reshape(rewards.shape)[groups].ravel()
        kept.append(take(drawn, rows))
        missing, budget = missing - len(groups), budget - len(ids)
        share = (config.groups_per_batch - missing) / (config.most_groups - budget)
        # Tasks behind the last one that is needed come again: a step's batch does not depend on `rows_per_call`.
        cursor += len(ids) if missing else groups[-1].item() + 1
    return concatenate(kept) if missing < config.groups_per_batch else None, played, cursor


def num_groups_to_draw(missing: int, share: float, largest: int) -> int:
    """Returns how many groups to sample at once, for about `missing` of them to have signal where `share` of them do.

    The number is one of `draw_sizes`; what is drawn does not depend on it, only how much of it is thrown away.
    """
    return min((size for size in draw_sizes(largest) if size * share >= missing), default=largest)


def make_batch(episodes: Episodes, config: Config) -> Batch:
    """Returns the batch of all rollouts that were played; the reward of one whose grader failed is NaN."""
    r, is_dropped = episodes.rollouts, episodes.failed & (config.on_reward_failure == "drop")
    return Batch(
        r.tokens,
        r.mask,
        r.logprobs,
        np.where(is_dropped, np.float32(np.nan), episodes.scores["return"]),
        r.lengths,
        r.prompt_lengths,
        r.finished,
        r.support,
        group_size=config.group_size,
    )


@dataclass(frozen=True)
class Learner:
    """What turns a batch into a better state."""

    model: Qwen
    optimizer: optax.GradientTransformation
    layout: Layout
    config: Config
    reference: Any = None  # parameters of the model that the KL is measured to
    report_bad: Callable[[Batch], None] = lambda batch: None  # called with each minibatch whose update was skipped
    first: int = 1 << 30  # the first column to score is this at most; fewer of them, fewer programs

    def assess(self, params, batch: Batch) -> tuple[Batch, dict[str, float]]:
        """The batch with all that is known before the first update, advantages too; rows without any leave it."""
        clock = time.perf_counter()
        batch = take(batch, np.arange(len(batch.rewards)), bucket(batch.tokens.shape[1]))  # few shapes to compile
        batch, metrics = self.credit(self.look_back(params, batch))
        return batch, metrics | {"times/logprobs": time.perf_counter() - clock, "num_rows": len(batch.rewards)}

    @waiting("updating")
    def learn(
        self, state: TrainState, batch: Batch, step: int, progress: float = 0.0
    ) -> tuple[TrainState, dict[str, float]]:
        """Makes all updates of a step; metrics are means over them, `updates/...` lists of each one's.

        `progress` of the run, from 0 to 1, is what the learning rate follows.
        """
        clock, updates = time.perf_counter(), []
        num_updates = int(self.layout.fetch(state.step))
        for epoch in range(self.config.ppo_epochs if len(batch.rewards) else 0):
            minibatches, done = list(self.minibatches(batch, step, epoch)), []
            for minibatch in minibatches:
                multiplier = lr_multiplier(self.config, progress, num_updates + len(updates) + len(done))
                state, parts, metrics = self.update(state, minibatch, multiplier)
                done.append((parts, metrics))
            updates += (done := [objectives.total(parts) | each for parts, each in self.layout.fetch(done)])
            self.check(minibatches, done)
            if self.config.target_kl and np.mean([each["approx_kl"] for each in done]) > self.config.target_kl:
                break
        metrics = {name: float(np.mean([each[name] for each in updates])) for name in (updates or [{}])[0]}
        if len(updates) > 1:
            names = ("loss", "approx_kl", "clip_fraction", "grad_norm")
            metrics |= {f"updates/{name}": [float(each[name]) for each in updates] for name in names}
        return state, metrics | {"times/update": time.perf_counter() - clock, "num_updates": len(updates)}

    def rehearse(self, state: TrainState, width: int) -> None:
        """Compiles all that learning from rows of so many columns can need, by running it on a row of zeros."""
        config, zeros = self.config, np.zeros((1, width), np.float32)
        support = np.zeros((1, width, config.distribution.support_size(self.model.vocab_size)), np.int32)
        row = Batch(
            np.int32(zeros), zeros == 0, zeros, zeros[:, 0], np.array([width]), np.array([width - 1]), zeros[:, 0] == 0,
            support if support.size else None, group_size=config.group_size,
        )  # fmt: skip
        batch = take(self.look_back(state.params, row), np.zeros(config.num_rollouts, int))
        batch, _ = self.credit(batch.replace(rewards=np.arange(config.num_rollouts, dtype=np.float32) % 2))
        row = normalize(take(batch, np.arange(1)), 1, config.num_generation_tokens, config)
        for _, piece, first in self.microbatches(row, config.minibatch_size):
            sums, _ = accumulate(self.model, config, state.params, self.zeros(state.params), piece, first)
        apply_gradients.lower(self.optimizer, state, *sums, np.float32(1)).compile()
        jax.tree.map(lambda x: x[0], state.params[LAYERS])  # as for a model that is saved

    @waiting("log-probabilities")
    def look_back(self, params, batch: Batch) -> Batch:
        """What losses and advantages need to know from before the first update, from the graph that is trained."""
        config = self.config
        needs_old = config.recompute_logprobs or config.updates_per_step > 1 or config.has_kl_in_reward
        if config.has_critic or needs_old and not config.do_inference_logprobs:
            scores = self.scores(params, batch)
            batch = batch.replace(old_logprobs=scores.logprobs, values=scores.values, entropies=scores.entropy)
        if config.do_inference_logprobs:
            batch = batch.replace(old_logprobs=batch.sample_logprobs)
        if config.kl_coef:
            batch = batch.replace(ref_logprobs=self.scores(self.reference, batch).logprobs)
        return batch

    def credit(self, batch: Batch) -> tuple[Batch, dict[str, float]]:
        """The batch with advantages, without the rows that leave it."""
        num_rows, metrics = len(batch.rewards), {}
        # Where groups without signal were not even taken along, some like them keep the shape, and so what is compiled.
        may_miss = self.config.do_group_filter and self.config.is_group_relative
        missing = max(0, self.config.num_rollouts - num_rows) * may_miss
        whole = take(batch, np.resize(np.arange(num_rows), num_rows + missing))
        whole.mask[num_rows:], whole.rewards[num_rows:] = False, 0.0
        advantage, keep = (np.asarray(x)[:num_rows] for x in advantages(whole, self.config))
        batch = batch.replace(advantages=advantage)
        batch = batch.replace(mask=batch.mask & keep[:, None])
        if batch.mask.any():
            metrics = describe_advantages(advantage[keep], batch.mask[keep])
        if self.config.has_critic:
            returns = objectives.generalised_advantages(batch, self.config) + batch.values
            batch = batch.replace(returns=np.asarray(returns))
            for name, targets in (("", batch.returns), ("_of_reward", batch.rewards[:, None])):
                metrics[f"value/explained_variance{name}"] = explained_variance(targets, batch.values, batch.mask)
        return take(batch, np.flatnonzero(keep)), metrics

    def scores(self, params, batch: Batch) -> TokenScores:
        """What a model says of each token of the batch."""
        parts = []
        for rows, piece, first in self.microbatches(batch, self.config.batch_size):
            scores = score(self.model, params, piece.tokens, self.config.temperature, first, piece.support)
            parts.append((rows, self.layout.fetch(scores)))

        def whole(*parts_of_one):
            out = np.zeros(batch.tokens.shape, np.float32)
            for (rows, _), part in zip(parts, parts_of_one, strict=True):
                out[rows] = fit(part[: len(rows)], out.shape[1])
            return out

        return jax.tree.map(whole, *(scores for _, scores in parts))

    def minibatches(self, batch: Batch, step: int, epoch: int) -> Iterator[Batch]:
        """The batch in random order, about --ppo_minibatch rollouts at a time."""
        num_rows = len(batch.rewards)
        order = np.random.default_rng((self.config.seed, step, epoch)).permutation(num_rows)
        for rows in np.array_split(order, -(-num_rows // self.config.minibatch_size)):
            yield take(batch, rows)

    def check(self, minibatches: list[Batch], updates: list[dict]) -> None:
        """Raises FloatingPointError after --max_skipped_updates updates in a row that were not finite."""
        for minibatch, each in zip(minibatches, updates, strict=True):
            if each["skipped_in_a_row"]:
                self.report_bad(minibatch)
            if each["skipped_in_a_row"] >= self.config.max_skipped_updates:
                raise FloatingPointError(
                    f"{each['skipped_in_a_row']} updates in a row had a loss or a gradient that is not finite: lower "
                    "--lr, or look at the batches in bad_batches/; the parameters are those before them"
                )

    def update(
        self, state: TrainState, batch: Batch, multiplier: float = 1.0
    ) -> tuple[TrainState, list[dict], dict]:
        """Makes one optimiser step by the gradients of a minibatch's micro-batches; returns their metrics and its own.

        `multiplier` scales the learning rates.
        """
        batch = normalize(batch, self.config.minibatch_size, self.config.num_generation_tokens, self.config)
        sums, parts, num_slots = self.zeros(state.params), [], 0
        for _, piece, first in self.microbatches(batch, self.config.minibatch_size):
            sums, metrics = accumulate(self.model, self.config, state.params, sums, piece, first)
            parts.append(metrics)
            num_slots += piece.tokens.size
        state, metrics = apply_gradients(self.optimizer, state, *sums, np.float32(multiplier))
        metrics["lr"] = multiplier * self.config.init_lr_frac * self.config.lr
        work = {"padding": 1 - batch.lengths.sum() / num_slots, "flops": training_flops(self.model, batch.lengths)}
        return state, parts, metrics | {f"speed/{name}": value for name, value in work.items()}

    def zeros(self, params) -> tuple[Any, Array]:
        """Where the gradient and the loss of micro-batches are summed."""
        dtype = self.config.grad_dtype or "float32"
        grads = jax.tree.map(lambda x: jnp.zeros(x.shape, dtype, device=x.sharding), params)
        return grads, self.layout.put(np.float32(0))

    def microbatches(self, batch: Batch, most: int) -> Iterator[tuple[np.ndarray, Batch, int]]:
        """Rows of similar length, piece by piece: (their numbers, the piece on the devices, first column to score).

        `most` is what the batch has rows, where none has left it.
        """
        cut = list(pieces(batch.lengths, self.config.tokens_per_microbatch, self.layout.row_shards, most))
        batch = batch.replace(entropies=None)  # which no loss reads
        for rows, num_rows, width in track(cut, "micro-batches"):
            piece = take(batch, np.resize(rows, num_rows), width)
            piece.mask[len(rows) :] = False  # rows that only fill the shape up
            yield rows, self.layout.put(piece), min(power_below(int(piece.prompt_lengths.min())), self.first)


def describe_advantages(advantages: Float[np.ndarray, "B T"], mask: Bool[np.ndarray, "B T"]) -> dict[str, float]:
    """Returns the metrics of the advantages of the tokens that are learnt from, and their number per rollout."""
    x = advantages[mask]
    return {
        "advantage/mean": float(x.mean()),
        "advantage/magnitude": float(np.abs(x).mean()),
        "advantage/max": float(x.max()),
        "advantage/min": float(x.min()),
        "tokens_per_rollout": x.size / len(mask),
    }


@partial(jax.jit, static_argnames=("model", "temperature", "first"))
def score(model: Qwen, params, tokens: Int[Array, "B T"], temperature: float, first: int, support=None) -> TokenScores:
    return score_tokens(model, params, tokens, temperature, first, support)


@partial(jax.jit, static_argnames=("model", "config", "first"), donate_argnames="sums")
def accumulate(model: Qwen, config: Config, params, sums, batch: Batch, first: int):
    """Adds a micro-batch's part of gradient and loss; its metrics are parts of sums too."""

    def loss(params):
        scores = score_tokens(model, params, batch.tokens, config.temperature, first, batch.support)
        loss, metrics = policy_loss(scores.logprobs, scores.entropy, batch, config)
        if config.has_critic:
            metrics["value/loss"] = value_loss(scores.values, batch, config)
            loss += metrics["value/loss"]
        return loss, metrics

    (part, metrics), grads = jax.value_and_grad(loss, has_aux=True)(params)
    return jax.tree.map(lambda x, new: (x + new).astype(x.dtype), sums, (grads, part)), metrics


@partial(jax.jit, static_argnames="optimizer", donate_argnames="state")
def apply_gradients(
    optimizer, state: TrainState, grads, loss=0.0, multiplier=1.0
) -> tuple[TrainState, dict[str, Array]]:
    """Makes one optimiser step, or none where the loss or the gradient is not finite.

    `multiplier` scales the updates, which are linear in the learning rates, weight decay included.
    """
    grads = jax.tree.map(lambda grad, x: grad.astype(x.dtype), grads, state.params)
    norm = optax.tree.norm(grads)
    is_finite = jnp.isfinite(norm) & jnp.isfinite(loss)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    updates = jax.tree.map(lambda x: (multiplier * x).astype(x.dtype), updates)
    new = TrainState(optax.apply_updates(state.params, updates), opt_state, state.step + 1, state.num_skipped)
    state = jax.tree.map(lambda new, old: jnp.where(is_finite, new, old), new, state)
    num_skipped = jnp.where(is_finite, 0, state.num_skipped + 1)
    return state.replace(num_skipped=num_skipped), {"grad_norm": norm, "skipped_in_a_row": num_skipped + 0} | {
        "update_norm": optax.tree.norm(updates),
        "param_norm": optax.tree.norm(state.params),
    }


def held_out(testers: dict[str, Player], params, config: Config, with_greedy: bool) -> dict[str, float]:
    """Returns the scores on held-out problems under the names of the log, "test_env/..." and "valid_env/..."."""
    metrics = {}
    for role, tester in testers.items():
        scores, _ = evaluate(tester, params, config.num_eval_tasks, config.num_eval_samples, config.seed)
        metrics |= {f"{role}/{name}": value for name, value in scores.items()}
    if with_greedy and "test_env" in testers:
        scores, _ = evaluate(testers["test_env"].greedy(), params, config.num_eval_tasks, 1, config.seed)
        metrics |= {f"test_env_greedy/{name}": value for name, value in scores.items()}
    return metrics


def selection_score(metrics: dict[str, float]) -> float | None:
    """Returns the held-out return by which --save_best chooses, None where nothing was evaluated."""
    return metrics.get("valid_env/return", metrics.get("test_env/return"))


def resolve_environments(config: Config) -> dict[str, RolloutSettings]:
    """Returns how each environment is played, by role: "env" trains, "test_env" and "valid_env" are held out."""
    training = resolve_settings(config, config.env_name)
    overrides = parse_options(config.test_env_options, "--test_env_options")
    environments = {"env": training}
    if config.test_env_name:
        environments["test_env"] = resolve_settings(config, test_name(config.test_env_name), training, overrides)
    if config.valid_env_name:
        name = test_name(config.valid_env_name, default="valid")
        environments["valid_env"] = resolve_settings(config, name, training, overrides)
    check_files(config, [settings.name for settings in environments.values()])
    return environments


def resolve_model_dir(name: str) -> str:
    """Returns the name of the model to load: for a local run folder, that of its last step."""
    return find_checkpoints(name, find_model)[-1][0] if find_local(name) else name


def main(config: Config):
    with user_errors():
        layout = make_layout(config)
        environments = resolve_environments(config)
        config = replace(config, model_dir=resolve_model_dir(config.model_dir))
        run = Run(config, layout)  # before anything is loaded: its folder may be in use
        run.check_data({settings.name: settings.env for settings in environments.values()})
        given = {"unroll": config.unroll_layers, "attention": config.attention, "kv_dtype": config.kv_dtype}
        model, params, tokenizer = load_model(find_model(config.model_dir), layout, config.dtype, **given)
        config = replace(config, save_dir=str(run.directory))
        players = {
            role: make_player(config, settings, model, tokenizer, layout) for role, settings in environments.items()
        }
        player = players["env"]
        end = config.num_epochs * player.num_tasks or math.inf  # cursor behind the last problem
        config = replace(config, num_generation_tokens=player.sampler.max_new_tokens)
    optimizer = make_optimizer(config, config.has_critic)
    reference = jax.tree.map(lambda x: x.astype(model.dtype, copy=True), params) if config.kl_coef else None
    if config.has_critic:
        params |= {CRITIC: make_critic(model, params)}
    with user_errors():
        state, restored = run.states.restore(init_state(params, optimizer))
    del params  # the state holds them, and each update replaces them
    config, model, memory = fit_memory(config, model, layout, state, reference)
    done, cursor, num_rollouts = (restored.get(name, 0) for name in ("step", "cursor", "num_rollouts"))
    best = restored.get("best")
    less_memory = " or set --remat full" * (model.remat != "full")
    learner = Learner(model, optimizer, layout, config, reference, run.write_bad_batch)

    def save(name: str) -> None:
        save_model(run.directory / name, model, state.params, tokenizer, "", layout.fetch, layout.is_main)

    with contextlib.ExitStack() as stack:
        logger = stack.enter_context(run.start_logger(done if restored else -1))
        compilations = stack.enter_context(Compilations(run.directory / "programs.jsonl" if layout.is_main else None))
        stack.enter_context(run)  # however the run ends, what it has reached is saved
        for each in players.values():
            stack.enter_context(each.scorer)
        logger.say(f"{config.model_dir}: {model.num_parameters:,} parameters on {layout.describe(state.params)}")
        logger.say(*(settings.describe() for settings in environments.values()))
        logger.say(*memory)
        logger.say(objectives.describe(config), describe_optimizer(config, state.params))
        logger.say(*filter(None, (config.distribution.note, *(each.env.note for each in players.values()))))
        logger.say(f"{f'resuming at step {done} in' if done else 'writing to'} {run.directory}")
        if config.precompile:
            players, learner = precompile(config, players, learner, state)
            said = "compiled ahead: {compile/num_programs} programs, {compile/num_from_cache} more were in the cache"
            logger.say(said.format_map(compilations.take()))
        player, testers = players["env"], {role: players[role] for role in players if role != "env"}
        if testers and not done:
            with run.interruptible():
                metrics = held_out(testers, state.params, config, config.test_greedy)
            logger.log(0, metrics)
            logger.line(0, metrics)
            best = selection_score(metrics)
            if config.save_best:
                save("best")
        step = done
        for step in range(done + 1, config.max_steps + 1) if cursor < end else []:
            clock, progress = time.perf_counter(), max((step - 1) / config.max_steps, cursor / end)
            with run.profiled(step == done + 3):
                with run.interruptible():
                    batch, played, cursor = collect(player, state.params, config, step, cursor)
                metrics = describe_play(played, config.group_size)
                if batch is not None:
                    with out_of_memory("tokens_per_microbatch", config.tokens_per_microbatch, less_memory):
                        batch, assessed = learner.assess(state.params, batch)
                        state, learnt = learner.learn(state, batch, step, progress)
                    metrics |= assessed | learnt
            num_rollouts += metrics["rollout/num_rollouts"]
            metrics |= {"rollout/total_rollouts": num_rollouts, "env/epochs": cursor / player.num_tasks}
            metrics |= describe_speed(model, layout, played, metrics) | compilations.take()
            metrics |= {"times/step": time.perf_counter() - clock, "memory/peak_gb": layout.peak_memory / 1e9}
            last = step == config.max_steps or cursor >= end
            if testers and (last or is_due(step, config.test_interval)):
                metrics |= held_out(testers, state.params, config, config.test_greedy and last)
            logger.log(step, metrics)
            logger.line(step, metrics)
            rows = rollout_rows(played, config.group_size, tokenizer, batch)
            run.write_rollouts(step, rows, played)
            if last or step == done + 1 or is_due(step, config.sample_interval):
                logger.sample(step, *example(played[0], tokenizer))
                logger.rollouts(step, [row for row in rows if row["group"] < 2])
            score = selection_score(metrics)
            if config.save_best and score is not None and (best is None or score > best):
                best = score
                save("best")
            is_saved = last or is_due(step, config.save_interval)
            if is_saved:
                save(f"step{step}")
            reached = {"step": step, "cursor": cursor, "num_rollouts": num_rollouts, "best": best}
            run.reached(step, state, reached, is_saved)
            if last:
                break
        logger.say(run.before_and_after(), f"model: {run.directory / f'step{step}'}")
        logger.say(f"curves and completions: {run.directory / 'report.html'}")


if __name__ == "__main__":
    with ending_together():
        main(parse(Config, sys.argv[1:], __doc__, default_preset="configs/demo.py")[0])
