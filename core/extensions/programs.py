"""Programs of a run, to compile them before step 1, found by public fields of the objects that call them.

Each function yields jitted functions with the shapes of their arguments, and is sent the shapes of what they return.
"""

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import get_args, get_type_hints

import jax
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import PyTree

from core import learner as learners
from core import records
from core import sampler as sampling
from core.config import Config
from core.learner import Learner
from core.records import Batch
from core.rollout import RolloutWorker
from core.sampler import Sampler
from models.architecture import Decoder
from models.checkpoint import layer_rows, take_layer
from models.names import ADAPTERS, LAYERS, Policy
from models.packing import Packing, pack_rows
from models.pages import Pages, new_state
from models.state import TrainState
from utils.batching import MicrobatchShape, empty_rows
from utils.devices.compilation import Programs, shapes_of
from utils.devices.memory import DEVICE, by_mesh, mix_bits
from utils.devices.sharding import Layout, zeros


def run_programs(
    config: Config, workers: Mapping[str, RolloutWorker], learner: Learner, state: TrainState
) -> list[Programs]:
    """Returns the programs of a run in lists that are independent of one another, those that compile longest first."""
    policy = learner.policy(state.params)
    params = shapes_of(workers["env"].take_over(policy) if config.ahead else policy)
    lists = learner_programs(learner, state)
    sampling_workers = [worker for role, worker in workers.items() if config.samples or role != "env"]
    return lists + [page_programs(worker.sampler, params) for worker in sampling_workers]


# Rollouts


def page_programs(sampler: Sampler, params: PyTree, num_rows: int = 1) -> Programs:
    """Yields each program of sampling: of a sampler without slots and pages of its own, for so many rows.

    `params`: arrays or their shapes.
    """
    layout, model, sizes = sampler.layout, sampler.model, sampler.sizes(num_rows)
    weights = yield from weight_programs(sampler, params)
    state = yield new_state, (model, layout, sizes.num_pages, sizes.page, sizes.num_slots)
    last_tokens = row_shape(layout, sizes.num_slots)

    def pages_of(num_rows: int, width: int) -> Pages:
        return Pages(row_shape(layout, num_rows, width), *[row_shape(layout, num_rows)] * 3)

    settings = model, sampler.distribution, sizes.steps, sampler.stop_ids if model.delta else ()
    for width in sizes.widths:
        for num_rows, num_tokens in sizes.chunks:
            routes = row_shape(layout, num_rows, num_tokens, *model.route_shape, dtype=np.int16)
            tokens = row_shape(layout, num_rows, num_tokens)
            inputs = pages_of(num_rows, width), tokens, routes if model.num_experts else None
            state = yield sampling.prefill_pages, (model, weights, state, *inputs)
        for num_lanes in reversed(sizes.lanes):
            of_lanes = row_shape(layout, num_lanes)
            inputs = pages_of(num_lanes, width), of_lanes, of_lanes, row_shape(layout, num_lanes, 2, dtype=np.uint32)
            state, last_tokens, _ = yield sampling.decode_pages, (*settings, weights, state, last_tokens, *inputs)


def weight_programs(sampler: Sampler, params: PyTree) -> Programs:
    """Yields the programs of `load_weights`, and returns the shapes of the weights."""
    model = sampler.model
    if ADAPTERS not in params:
        policy = {name: params[name] for name in model.parameter_table()}
        return (yield sampling.decode_weights, (model, sampler.layout, policy, model.layer_numbers))
    from models.lora import attach, jit_layer_adapters, jit_merge, split_policy

    base, adapters = split_policy(params)
    weights = attach(base, (yield jit_layer_adapters, (model, adapters)))
    if model.merges_adapters:
        weights = yield jit_merge, (weights,)
    return weights


def row_shape(layout: Layout, *shape: int, dtype: DTypeLike = np.int32) -> jax.ShapeDtypeStruct:
    """Returns the shape of an array that is sharded by rows."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=layout.rows)


# Updates


def learner_programs(learner: Learner, state: TrainState) -> list[Programs]:
    """Returns the programs that compute log-probabilities, update the policy and save it."""
    lists = [update_programs(learner, state, shape) for shape in learner.shapes]
    if not learner.layout.is_single_cpu:
        lists.append(saving_programs(learner.model, state))
    return lists


def update_programs(learner: Learner, state: TrainState, shape: MicrobatchShape) -> Programs:
    """Yields the programs that micro-batches of this shape need."""
    config, model = learner.config, learner.model
    params, dtype = shapes_of(state.params), config.memory.grad_dtype or "float32"
    grads = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype, sharding=x.sharding), params)
    sums = grads, jax.ShapeDtypeStruct((), np.float32, sharding=learner.layout.replicated)
    batch, packing = zero_batch(learner, shape)
    taught, updated = learner, batch
    if config.distill.teacher:  # a TaughtLearner of core/extensions/teacher.py
        taught = learner.with_head(state)
        updated = replace(batch, extras=batch.extras | taught.shapes_of_extras(batch))
    settings = model, config.objective.loss, learner.distribution
    weights = learner.base, taught.beside
    yield learners.accumulate, (*settings, params, sums, updated, packing, *weights)
    is_without_gradients = shape in learner.shapes_without_gradients
    if learner.has_old_logprobs and is_without_gradients:
        yield outputs_program(learner, learner.policy(params), batch, packing)
    if config.objective.kl.kl_coef > 0 and is_without_gradients:
        yield outputs_program(learner, learner.reference, replace(batch, routes=None), packing)
    yield zeros, (tuple(jax.tree.leaves(params)), dtype)
    if learner.layout.num_chains(model.num_parameters) > 1:
        yield learners.add_sums, (sums, sums)
    trained = shapes_of(state.trained, DEVICE)
    warmup_steps = config.optimizer.warmup_steps
    yield learners.apply_gradients, (learner.optimizer, warmup_steps, trained, *sums, np.float32(1))


def outputs_program(learner: Learner, policy: Policy, batch: Batch, packing: Packing) -> tuple[Callable, tuple]:
    """Returns the program of `microbatch_outputs`."""
    inputs = batch.tokens, learner.distribution, batch.support, batch.routes, packing, batch.extras
    return learners.packed_outputs, (learner.model, policy, *inputs)


def saving_programs(model: Decoder, state: TrainState) -> Programs:
    """Yields the programs that read a state to save it; arrays of a single CPU are read without."""
    for arrays in by_mesh(jax.tree.leaves(shapes_of(state, DEVICE))):
        yield mix_bits, (arrays,)
    if LAYERS in state.params:
        yield take_layer, (state.params[LAYERS], layer_rows(model.layers_with(), 0))


def zero_batch(learner: Learner, shape: MicrobatchShape) -> tuple[Batch, Packing]:
    """Returns zeros with the fields of a micro-batch of this shape, on the devices."""
    config, model, shards = learner.config, learner.model, learner.layout.row_shards
    num_rows = shards * shape.num_rows
    sizes = empty_rows(num_rows, shape.width)
    num_layers, num_routes = model.route_shape
    support_size = config.sampling.distribution.support_size(model.vocab_size)
    letters = {"B": num_rows, "T": shape.width, "S": support_size, "L": num_layers, "k": num_routes}
    is_used = {
        "support": support_size > 0,
        "routes": model.num_experts > 0,
        "rollout": False,
        "token_rewards": False,
        "reward_parts": False,
        "entropies": False,
        "old_logprobs": learner.has_old_logprobs or config.trusts_sampler,
        "ref_logprobs": config.objective.kl.kl_coef > 0,
        "values": config.objective.has_critic,
        "returns": config.objective.has_critic,
    }
    hints = get_type_hints(Batch)

    def zeros(name: str, hint: type) -> np.ndarray:
        hint = next(iter(get_args(hint)), hint)
        dtype = np.int16 if name == "routes" else {"f": np.float32, "i": np.int32, "b": bool}[hint.dtypes[0][0]]
        return np.zeros([letters[letter] for letter in hint.dim_str.split()], dtype)

    names = [field.name for field in fields(Batch) if is_used.get(field.name, True)]
    arrays = {name: zeros(name, hints[name]) for name in names if name not in ("extras", "group_size")}
    extras = {name: zeros(name, hint) for name, hint in records.EXTRAS.items()}
    batch = Batch(**arrays, extras=extras, group_size=config.update.group_size)
    batch = replace(batch, lengths=sizes.lengths, prompt_lengths=sizes.prompt_lengths)
    return learner.layout.put((batch, pack_rows(sizes, shape, shards)))
