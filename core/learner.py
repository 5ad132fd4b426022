"""Turns a batch into a better policy: micro-batches that fit, log-probabilities, gradients, optimizer steps.

B rows of a batch, T row length.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Float, Int, PyTree

from core.objectives import LossConfig, policy_loss, set_loss_denominators
from core.records import Batch, Episodes
from core.terms.critic import value_loss
from core.terms.ratios import reduce_metrics
from core.terms.reference import copy_policy
from models.architecture import Decoder
from models.attention import SKIPPING
from models.decoder import make_critic, token_outputs
from models.distribution import Distribution, TokenOutputs
from models.memory import Room, fit_memory, out_of_memory
from models.names import CRITIC, Adapters, Array, Params, Policy, Weights, make_policy
from models.optimizers import make_optimizer, schedule
from models.packing import Packing, pack_rows
from models.speed import training_flops
from models.state import TrainState, init_state
from utils.batching import (
    EMPTY,
    Microbatch,
    MicrobatchShape,
    bucket,
    choose_shapes,
    measure_rows,
    plan_microbatches,
    resize_columns,
    select_rows,
)
from utils.devices.memory import DEVICE, HOST, check_offload, in_memory
from utils.devices.sharding import Layout, zeros_of
from utils.devices.threads import side_by_side
from utils.metrics.terminal import track

MAX_SKIPPED = 3  # updates in a row that are not finite, after which the run stops
PackedRows = tuple[Int[np.ndarray, "b"], Batch, Packing]  # numbers of rows (EMPTY: none), micro-batch, and its packing
MicrobatchMetrics = tuple[dict[str, Array], Packing]  # metrics of a micro-batch: see reduce_metrics
LearnerConfig = Any  # settings of a run: Config of core/config.py, which lies above this file
Sums = tuple[Params | Adapters, Float[Array, ""]]  # gradient and loss of an optimizer batch, summed over micro-batches


class Update(NamedTuple):
    """An optimizer step that was made: its minibatch, and metrics that are still on the devices."""

    minibatch: Batch
    parts: Sequence[dict[str, Array]]  # metrics of the micro-batches: see reduce_metrics
    metrics: dict[str, Array]


@dataclass(frozen=True)
class Learner:
    """Computes log-probabilities and makes optimizer steps; micro-batches change results by rounding only."""

    model: Decoder
    optimizer: optax.GradientTransformation
    layout: Layout
    config: LearnerConfig
    num_generation_tokens: int  # completion limit
    tokens_per_microbatch: int  # packed tokens of a device
    reference: Params | Weights | None = None  # parameters of the reference model of the KL
    base: Weights = field(default_factory=dict)  # frozen base of LoRA; empty if all parameters are trained
    beside: Weights = field(default_factory=dict)  # frozen weights that the loss also reads: a teacher's head
    on_skipped: Callable[[Batch], None] = lambda minibatch: None  # called with a minibatch whose update was skipped
    notes: tuple[str, ...] = ()  # decisions about memory, printed at the start
    sampling_room: Room | None = None  # None: not planned yet

    def policy(self, params: Params | Adapters) -> Policy:
        """Returns the policy whose trained parameters these are."""
        return make_policy(self.base, params)

    @property
    def distribution(self) -> Distribution:
        """Returns the distribution that is sampled, by which log-probabilities are computed."""
        return self.config.sampling.distribution

    @property
    def has_old_logprobs(self) -> bool:
        """True if the training graph computes old log-probabilities: several updates, KL in the reward, a critic."""
        config = self.config
        is_needed = config.updates_per_step > 1 or config.objective.has_kl_in_reward
        return config.objective.has_critic or (is_needed and not config.trusts_sampler)

    @property
    def row_length(self) -> int:
        """Returns the maximum number of columns of a row."""
        return self.config.sampling.prompt_length + self.num_generation_tokens

    @property
    def most_rows(self) -> int:
        """Returns the maximum number of rows of an optimizer step on a shard."""
        return -(-self.config.minibatch_size // self.layout.row_shards)

    @property
    def shapes(self) -> tuple[MicrobatchShape, ...]:
        """Returns the shapes of all micro-batches of the run."""
        skips_padding = self.model.kernel in SKIPPING
        return choose_shapes(self.tokens_per_microbatch, self.row_length, self.most_rows, skips_padding)

    @property
    def shapes_without_gradients(self) -> tuple[MicrobatchShape, ...]:
        """Returns the shapes without gradients, the larger one of each width: padding costs less than a program."""
        return tuple({shape.width: shape for shape in reversed(self.shapes)}.values())[::-1]

    def add_logprobs(
        self, state: TrainState, batch: Batch, episodes: Episodes | None = None
    ) -> tuple[TrainState, Batch]:
        """Adds old and reference log-probabilities and the critic's values, before the first update of a step.

        `episodes` are those of the rows; a teacher reads their texts.
        """
        if not len(batch):
            return state, batch
        every_row = np.arange(len(batch))
        batch = select_rows(batch, every_row, bucket(batch.tokens.shape[1]))  # few widths to compile
        with self.out_of_memory():
            if self.has_old_logprobs:
                outputs = self.compute_outputs(self.policy(state.params), batch)
                batch = replace(batch, old_logprobs=outputs.logprobs, values=outputs.values, entropies=outputs.entropy)
            if self.config.trusts_sampler:
                batch = replace(batch, old_logprobs=batch.sample_logprobs)
            if self.reference is not None:
                outputs = self.compute_outputs(self.reference, replace(batch, routes=None))  # by its own router
                batch = replace(batch, ref_logprobs=outputs.logprobs)
        return state, batch

    def compute_outputs(self, params: Policy, batch: Batch) -> TokenOutputs:
        """Returns log-probabilities, entropies and values of all tokens of a batch, on the host."""

        def fetch(microbatches: Iterator[PackedRows]) -> list[tuple[np.ndarray, TokenOutputs]]:
            launched = ((x, self.microbatch_outputs(params, *self.layout.put(arrays))) for x, *arrays in microbatches)
            ahead = itertools.pairwise(itertools.chain(launched, [None]))  # the next one is computed during a fetch
            return [(rows, self.layout.fetch(outputs)) for (rows, outputs), _ in ahead]

        by_name: dict[str, np.ndarray] = {}
        for rows, outputs in itertools.chain(*side_by_side(fetch, self.chains(batch, self.shapes_without_gradients))):
            is_row = rows != EMPTY
            for name, x in outputs._asdict().items():
                if x is not None:
                    whole = by_name.setdefault(name, np.zeros((*batch.tokens.shape, *x.shape[2:]), x.dtype))
                    whole[rows[is_row]] = resize_columns(x[is_row], whole.shape[1])
        return type(outputs)(**by_name)

    def microbatch_outputs(self, params: Policy, batch: Batch, packing: Packing) -> TokenOutputs:
        """Returns the outputs for the tokens of a micro-batch, on the devices."""
        return packed_outputs(
            self.model, params, batch.tokens, self.distribution, batch.support, batch.routes, packing, batch.extras
        )

    def update(self, state: TrainState, minibatch: Batch, fraction_done: float) -> tuple[TrainState, Update]:
        """Makes one optimizer step by the gradients of a minibatch's micro-batches.

        The learning rate follows the fraction of the run that is done.
        """
        config = self.config
        minibatch = set_loss_denominators(
            minibatch, config.minibatch_size, self.num_generation_tokens, config.objective.policy
        )
        chains = self.chains(minibatch, self.shapes)
        with self.out_of_memory():
            sums, parts = zip(*side_by_side(partial(self.add_up, state.params), chains), strict=True)
            grads, loss = reduce(add_sums, sums)
            factor, warmup_steps = np.float32(schedule(config.optimizer, fraction_done)), config.optimizer.warmup_steps
            trained = replace(state.trained, opt_state=in_memory(DEVICE, state.opt_state))
            trained, metrics = apply_gradients(self.optimizer, warmup_steps, trained, grads, loss, factor)
            state = self.between_updates(replace(trained, extra=state.extra))
        parts, packings = zip(*itertools.chain(*parts), strict=True)
        num_tokens = sum(packing.num_tokens for packing in packings)
        metrics["speed/padding"] = 1 - num_tokens / sum(packing.indices.size for packing in packings)
        num_targets = int(minibatch.mask.sum())
        metrics["speed/flops"] = training_flops(
            self.model, minibatch.lengths, num_tokens, num_targets, config.objective.has_critic
        )
        return state, Update(minibatch, parts, metrics)

    def add_up(
        self, params: Params | Adapters, microbatches: Iterator[PackedRows]
    ) -> tuple[Sums, list[MicrobatchMetrics]]:
        """Returns the sums of gradients and losses of micro-batches, and metrics and packing of each."""
        loss, parts = self.config.objective.loss, []
        sums = zeros_of(params, self.config.memory.grad_dtype or "float32"), self.layout.put(np.float32(0))
        for _, *arrays in microbatches:
            microbatch, packing = self.layout.put(arrays)
            sums, metrics = accumulate(
                self.model, loss, self.distribution, params, sums, microbatch, packing, self.base, self.beside
            )
            parts.append((metrics, arrays[-1]))
        return sums, parts

    def between_updates(self, state: TrainState) -> TrainState:
        """Returns the state between updates: --offload keeps the optimizer's state on the host."""
        if not self.config.memory.offload:
            return state
        return replace(state, opt_state=in_memory(HOST, state.opt_state))

    def chains(self, batch: Batch, shapes: Sequence[MicrobatchShape]) -> list[Iterator[PackedRows]]:
        """Returns the micro-batches of a batch, divided into chains; a micro-batch is built when it is needed."""
        sizes = measure_rows(batch.tokens, batch.prompt_lengths, batch.lengths, batch.mask)
        shards = self.layout.row_shards
        plan = plan_microbatches(sizes, shapes, shards)
        batch = replace(batch, entropies=None, rollout=None)  # read by no loss

        def make_rows(plan: Sequence[Microbatch]) -> Iterator[PackedRows]:
            for rows, shape in track(plan, "micro-batches"):
                microbatch = select_rows(batch, rows, shape.width)
                microbatch.mask[rows == EMPTY] = False
                yield rows, microbatch, pack_rows(sizes.select(rows), shape, shards)

        num_chains = self.layout.num_chains(self.model.num_parameters)
        return [make_rows(plan[first::num_chains]) for first in range(num_chains)]

    def planned(self, state: TrainState, beside: PyTree = None) -> Self:
        """Returns a learner whose micro-batches fit into memory, next to this state and other arrays."""
        config = self.config
        plan = fit_memory(
            config.memory,
            self.model,
            self.layout,
            state,
            others=(self.reference or self.base, beside),
            row_length=bucket(self.row_length),
            most_rows=self.most_rows,
            num_sampled_rows=config.sampling.inference_batch_per_device,
            schedule=config.place_of_sampling,
            rollout_tp=config.devices.rollout_tp,
        )
        return replace(
            self,
            model=replace(self.model, remat=plan.remat),
            tokens_per_microbatch=plan.tokens_per_microbatch,
            sampling_room=plan.sampling_room,
            notes=plan.notes,
        )

    def read(self, update: Update) -> dict[str, float | np.ndarray]:
        """Returns the metrics of an update, from the devices."""
        parts, metrics = self.layout.fetch((update.parts, update.metrics))
        lr = float(metrics.pop("lr_multiplier")) * self.config.optimizer.lr
        return reduce_metrics(parts) | metrics | {"lr": lr}

    def metrics(self, updates: Sequence[Update]) -> dict[str, float | list[float]]:
        """Returns the metrics of a step: means over its updates, and lists with a number for each as "updates/...".

        Raises: FloatingPointError after MAX_SKIPPED updates in a row whose loss or gradient is not finite.
        """
        rows = [self.read(update) for update in updates]
        for update, row in zip(updates, rows, strict=True):
            num_skipped = int(row["skipped_in_a_row"])
            if num_skipped:
                self.on_skipped(update.minibatch)
            if num_skipped >= MAX_SKIPPED:
                raise FloatingPointError(
                    f"{num_skipped} updates in a row had a loss or a gradient that is not finite: lower --lr, or read "
                    "the batches in bad_batches/. The parameters are those from before these updates"
                )
        metrics = {name: np.mean([row[name] for row in rows], axis=0).tolist() for name in (rows or [{}])[0]}
        if len(rows) > 1:
            for name in ("loss", "approx_kl", "clip_fraction", "grad_norm"):
                metrics[f"updates/{name}"] = [float(row[name]) for row in rows]
        return metrics | {"num_updates": len(rows)}

    def out_of_memory(self) -> contextlib.AbstractContextManager[None]:
        """Ends the program with the option to lower if a device runs out of memory."""
        more = "" if self.model.remat == "full" else " or set --remat full"
        return out_of_memory("tokens_per_microbatch", self.tokens_per_microbatch, more)


def split_minibatches(batch: Batch, config: LearnerConfig, step: int, epoch: int) -> list[Batch]:
    """Returns the rollouts in random order, in ceil(rollouts / --ppo_minibatch) nearly equal parts: all of them."""
    rows = np.split(np.arange(len(batch)), batch.first_rows[1:])  # of each rollout
    order = np.random.default_rng((config.seed, step, epoch)).permutation(len(rows)) if len(batch) else []
    num_minibatches = -(-len(order) // config.minibatch_size)
    parts = np.array_split(order, num_minibatches) if num_minibatches else []
    return [select_rows(batch, np.concatenate([rows[rollout] for rollout in part])) for part in parts]


packed_outputs = jax.jit(token_outputs, static_argnums=(0, 3))


@partial(jax.jit, static_argnums=(0, 2), donate_argnums=4)
def accumulate(
    model: Decoder,
    objective: LossConfig,
    distribution: Distribution,
    params: Params | Adapters,
    sums: Sums,
    batch: Batch,
    packing: Packing,
    base: Weights | None = None,
    beside: Weights | None = None,
) -> tuple[Sums, dict[str, Array]]:
    """Adds a micro-batch's gradient and loss to the sums; returns the sums, and its metrics, which are also summed."""

    def loss_of(params: Params | Adapters) -> tuple[Float[Array, ""], dict[str, Array]]:
        policy = make_policy(base, params) | (beside or {})
        outputs = token_outputs(
            model, policy, batch.tokens, distribution, batch.support, batch.routes, packing, batch.extras
        )
        loss, metrics = policy_loss(outputs, batch, objective)
        if batch.returns is not None:
            metrics["value/loss"] = value_loss(outputs.values, batch, objective.value_clip)
            loss += metrics["value/loss"]
        return loss, metrics

    (loss, metrics), grads = jax.value_and_grad(loss_of, has_aux=True)(params)
    return jax.tree.map(lambda x, new: (x + new).astype(x.dtype), sums, (grads, loss)), metrics


@partial(jax.jit, donate_argnums=0)
def add_sums(sums: Sums, others: Sums) -> Sums:
    """Adds the gradients and losses of two chains of micro-batches."""
    return jax.tree.map(jnp.add, sums, others)


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def apply_gradients(
    optimizer: optax.GradientTransformation,
    warmup_steps: int,
    state: TrainState,
    grads: Params | Adapters,
    loss: Float[Array, ""] = 0.0,
    factor: Float[Array, ""] = 1.0,
) -> tuple[TrainState, dict[str, Array]]:
    """Makes one optimizer step, or none if the loss or the gradient is not finite.

    The updates are linear in the learning rates, weight decay included. They are scaled by `factor`, which is that of
    the schedule, and by the warm-up, which counts optimizer steps.
    """
    multiplier = factor * jnp.minimum(1.0, (state.step + 1) / max(1, warmup_steps))
    grads = jax.tree.map(lambda grad, x: grad.astype(x.dtype), grads, state.params)
    norm = optax.tree.norm(grads)
    is_finite = jnp.isfinite(norm) & jnp.isfinite(loss)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    updates = jax.tree.map(lambda x: (multiplier * x).astype(x.dtype), updates)
    params = optax.apply_updates(state.params, updates)
    new = TrainState(params, opt_state, state.step + 1, state.num_skipped)
    state = jax.tree.map(lambda new, old: jnp.where(is_finite, new, old), new, state)
    num_skipped = jnp.where(is_finite, 0, state.num_skipped + 1)
    metrics = {
        "grad_norm": norm,
        "update_norm": optax.tree.norm(updates),
        "param_norm": optax.tree.norm(state.params),
        "skipped_in_a_row": num_skipped + 0,  # a copy, since the state is donated to the next update
        "lr_multiplier": multiplier,
    }
    return replace(state, num_skipped=num_skipped), metrics


def make_learner(
    config: LearnerConfig,
    model: Decoder,
    params: Params | Adapters,
    layout: Layout,
    num_generation_tokens: int,
    on_skipped: Callable[[Batch], None] = lambda minibatch: None,
    base: Weights | None = None,
) -> tuple[Learner, TrainState]:
    """Returns the learner, with micro-batches that fit into memory, and the training state at step 0.

    `params` are trained: adapters if there is a `base` below them.
    """
    base = base or {}
    objective = config.objective
    optimizer = make_optimizer(config.optimizer, objective.has_critic)
    if config.memory.offload:
        check_offload(layout.mesh)
    reference = copy_policy(base, params, model.dtype) if objective.kl.kl_coef > 0 else None
    if objective.has_critic:
        params = params | {CRITIC: make_critic(model, params)}
    state = init_state(params, optimizer)
    learner = Learner(
        model=model,
        optimizer=optimizer,
        layout=layout,
        config=config,
        num_generation_tokens=num_generation_tokens,
        tokens_per_microbatch=0,
        reference=reference,
        base=base,
        on_skipped=on_skipped,
    )
    learner = learner.planned(state)
    return learner, learner.between_updates(state)
