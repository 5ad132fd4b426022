"""Log-probabilities and other outputs for tokens from their hidden states: logits [B, T, V] never exist, only chunks.

Letters: B rows, T columns, n chunks, w columns of a chunk, V vocabulary, D width of the model, E width of its teacher.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Float, Int, PyTree, Shaped

from models.distribution import Distribution, TokenOutputs
from models.names import TEACHER, Array, Extras, Hidden
from utils.batching import padding_of
from utils.devices.sharding import constrain

LOGIT_ELEMENTS = 1 << 27  # logits at a time on a device (0.5 GB in float32)
ALIGNED = 128  # columns of a chunk are a multiple: products of other sizes are slow on GPUs


class LMHeads(NamedTuple):
    """Matrices that make logits: the model's, and its teacher's if there is one."""

    own: Float[Array, "V D"]
    teacher: Float[Array, "V E"] | None


class TargetColumns(NamedTuple):
    """Columns of target tokens: the normed state before each one, the token, ids that could be sampled, and extras."""

    states: Hidden
    targets: Int[Array, "B T"]
    support: Int[Array, "B T S"] | None
    extras: Extras


def project(weight: Float[Array, "V D"], x: Float[Array, "... D"]) -> Float[Array, "... V"]:
    """Computes float32 logits of normed states, by products in their dtype."""
    logits = jnp.matmul(x, weight.astype(x.dtype).T, preferred_element_type=jnp.float32)
    columns = [None] * (x.ndim - 2)
    return constrain(logits, "rows", *columns, "vocab")


def chunked_outputs(
    distribution: Distribution,
    heads: LMHeads,
    columns: TargetColumns,
    num_targets: Int[Array, "B"] | None = None,
    is_trained: bool = True,
) -> TokenOutputs:
    """Returns the outputs for columns, from LOGIT_ELEMENTS logits at a time.

    No logits are made of the columns after the first `num_targets` of all rows; None: all are targets. `is_trained`:
    the model's head gets a gradient.
    """
    num_rows, num_columns = columns.targets.shape
    num_heads = 1 + (heads.teacher is not None)
    most_columns = LOGIT_ELEMENTS // (num_heads * num_rows * len(heads.own))
    if most_columns >= num_columns:
        return outputs_from(distribution, project(heads.own, columns.states), heads.teacher, columns)
    width = most_columns // ALIGNED * ALIGNED or max(1, most_columns)
    num_chunks = -(-num_columns // width)

    def split(path: Sequence[object], x: Array) -> Array:
        other_axes = [(0, 0)] * (x.ndim - 2)
        padding = [(0, 0), (0, num_chunks * width - num_columns), *other_axes]
        padded = jnp.pad(x, padding, constant_values=padding_of(path))
        return rearrange(padded, "B (n w) ... -> n B w ...", w=width)

    def join(x: Shaped[Array, "n B w ..."]) -> Shaped[Array, "B T ..."]:
        return rearrange(x, "n B w ... -> B (n w) ...")[:, :num_columns]

    chunks = jax.tree.map_with_path(split, columns)
    num_needed = num_chunks if num_targets is None else -(-num_targets.max() // width)
    fixed = Fixed(heads.teacher, chunks, num_needed)
    outputs = outputs_of_chunks(distribution, is_trained, heads.own, chunks.states, fixed)
    return jax.tree.map(join, outputs)


def outputs_from(
    distribution: Distribution,
    logits: Float[Array, "B w V"],
    teacher: Float[Array, "V E"] | None,
    chunk: TargetColumns,
) -> TokenOutputs:
    """Returns the outputs for columns with these logits; a teacher's logits are made of its own states."""
    extras = chunk.extras
    if teacher is not None:
        extras = extras | {TEACHER: project(teacher, extras[TEACHER])}
    return distribution.outputs(logits, chunk.targets, chunk.support, extras)


class Fixed(NamedTuple):
    """A teacher's head, columns and the number of chunks: inputs without a gradient."""

    teacher: Float[Array, "V E"] | None
    chunks: TargetColumns
    num_needed: Int[Array, ""] | int


# The gradient is written out. Reverse mode would keep logits between the passes of a loop, or read and write them more
# often, and a loop that it differentiates cannot end early.
@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def outputs_of_chunks(
    distribution: Distribution,
    is_trained: bool,
    head: Float[Array, "V D"],
    states: Float[Array, "n B w D"],
    fixed: Fixed,
) -> TokenOutputs:
    """Returns the outputs [n B w] for chunks, one after the other; 0 in chunks that are not needed."""
    weight = head.astype(states.dtype)

    def add(i: Int[Array, ""], outputs: TokenOutputs) -> TokenOutputs:
        return put(outputs, i, of_chunk(i))

    def of_chunk(i: Int[Array, ""] | int) -> TokenOutputs:
        return outputs_from(distribution, project(weight, states[i]), fixed.teacher, at(fixed.chunks, i))

    shapes = jax.eval_shape(of_chunk, 0)
    nothing = jax.tree.map(lambda x: jnp.zeros((len(states), *x.shape), x.dtype), shapes)
    return jax.lax.fori_loop(0, fixed.num_needed, add, nothing)


Residuals = tuple[Float[Array, "V D"], Float[Array, "n B w D"], Fixed]


def forward(
    distribution: Distribution,
    is_trained: bool,
    head: Float[Array, "V D"],
    states: Float[Array, "n B w D"],
    fixed: Fixed,
) -> tuple[TokenOutputs, Residuals]:
    """Returns what `outputs_of_chunks` does, and what its gradient needs."""
    return outputs_of_chunks(distribution, is_trained, head, states, fixed), (head, states, fixed)


def backward(
    distribution: Distribution, is_trained: bool, kept: Residuals, cotangents: TokenOutputs
) -> tuple[Float[Array, "V D"] | None, Float[Array, "n B w D"], None]:
    """Returns gradients by the head and the states, from logits that are made again.

    Gradients by logits are rounded to the states' dtype, as the products that they enter. The head's is summed in
    float32.
    """
    head, states, fixed = kept
    weight = head.astype(states.dtype)

    def add(i: Int[Array, ""], sums: tuple[Array | None, Array]) -> tuple[Array | None, Array]:
        by_head, by_states = sums
        outputs = partial(outputs_from, distribution, teacher=fixed.teacher, chunk=at(fixed.chunks, i))
        _, pull = jax.vjp(outputs, project(weight, states[i]))
        (by_logits,) = pull(at(cotangents, i))
        by_logits = by_logits.astype(states.dtype)
        if is_trained:
            by_head += jnp.einsum("bwv,bwd->vd", by_logits, states[i], preferred_element_type=jnp.float32)
        return by_head, put(by_states, i, by_logits @ weight)

    nothing = jnp.zeros(head.shape, head.dtype) if is_trained else None
    by_head, by_states = jax.lax.fori_loop(0, fixed.num_needed, add, (nothing, jnp.zeros_like(states)))
    return by_head, by_states, None


outputs_of_chunks.defvjp(forward, backward)


def at(arrays: PyTree, i: Int[Array, ""] | int) -> PyTree:
    """Returns entry `i` of each array."""
    return jax.tree.map(lambda x: x[i], arrays)


def put(arrays: PyTree, i: Int[Array, ""], entries: PyTree) -> PyTree:
    """Returns the arrays with other entries at `i`."""
    return jax.tree.map(lambda x, entry: x.at[i].set(entry), arrays, entries)
