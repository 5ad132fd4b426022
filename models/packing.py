"""Packs the tokens of rows: a prompt that rows share is computed once, and padding not at all.

Products of tokens with weights are of packed tokens; attention, convolutions and recurrences are of rows. The last
token of a prompt belongs to each row, as completion tokens do: the first of them is sampled from its state.

Letters: B rows, T columns, S shards of rows, n tokens or slots, M packed tokens of a shard.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int, Shaped

from models.names import Array
from utils.batching import MicrobatchShape, RowSizes, resize_columns
from utils.devices.sharding import constrain

NOWHERE = 1 << 30


class Packing(NamedTuple):
    """Indices of packed tokens in the rows of their shard, flattened, and numbers of packed tokens in the rows.

    Padding has the index or the number NOWHERE, and reads as 0.
    """

    indices: Int[Array, "S M"]  # tokens whose next one is a target, then others, then padding
    numbers: Int[Array, "B T"]  # NOWHERE also if an earlier row of the shard has the token of a shared prompt
    first_row: Int[Array, "B"]  # first row of the shard with this row's prompt
    lengths: Int[Array, "B"]  # computed tokens of a row, in the first row with its prompt or in itself
    num_targets: Int[Array, "S"]  # of the shard that has most: loops over targets, with collectives of tp inside, agree

    @property
    def num_tokens(self) -> int:
        """Returns the number of packed tokens of all shards without padding."""
        return int((self.numbers != NOWHERE).sum())


def pack_rows(sizes: RowSizes, shape: MicrobatchShape, shards: int) -> Packing:
    """Returns the packing of rows in a micro-batch of this shape; rows of a shard with equal prompts share one.

    Empty rows have length 0.
    """
    rows = np.split(np.arange(len(sizes.lengths)), shards)
    parts = [pack_shard(sizes.select(part), shape) for part in rows]
    indices, numbers, first_rows, num_targets = map(np.stack, zip(*parts, strict=True))
    return Packing(
        indices=indices,
        numbers=numbers.reshape(-1, shape.width),
        first_row=first_rows.ravel(),
        lengths=np.maximum(sizes.lengths - 1, 0).astype(np.int32),  # the state of a last token has no target
        num_targets=np.full_like(num_targets, num_targets.max()),
    )


def pack_shard(
    sizes: RowSizes, shape: MicrobatchShape
) -> tuple[Int[np.ndarray, "M"], Int[np.ndarray, "b*T"], Int[np.ndarray, "b"], Int[np.ndarray, ""]]:
    """Returns indices, numbers, first rows and the number of targets of one shard: see Packing."""
    num_rows, width, num_packed = shape
    _, firsts, prompt_numbers = np.unique(sizes.prompts, return_index=True, return_inverse=True)
    first_row = firsts[prompt_numbers]
    columns = np.arange(width)
    last_of_prompt = sizes.prompt_lengths[:, None] - 1
    is_prompt = columns < last_of_prompt
    is_first = first_row == np.arange(num_rows)
    is_computed = (columns < sizes.lengths[:, None] - 1) & (is_first[:, None] | ~is_prompt)
    is_target = is_computed & resize_columns(sizes.is_target[:, 1:], width)
    tokens = np.flatnonzero(is_target)
    tokens = np.append(tokens, np.flatnonzero(is_computed & ~is_target))
    indices = np.full(num_packed, NOWHERE, np.int32)
    indices[: len(tokens)] = tokens
    numbers = np.full(num_rows * width, NOWHERE, np.int32)
    numbers[tokens] = np.arange(len(tokens))
    return indices, numbers, first_row.astype(np.int32), np.int32(is_target.sum())


def read(x: Shaped[Array, "n ..."], indices: Int[Array, "m"], padding_value: int = 0) -> Shaped[Array, "m ..."]:
    """Returns x[indices], `padding_value` for NOWHERE."""
    return x.at[indices].get(mode="fill", fill_value=padding_value)


@jax.custom_vjp
def move(x: Float[Array, "n ..."], indices: Int[Array, "m"], numbers: Int[Array, "n"]) -> Float[Array, "m ..."]:
    """Returns x[indices], 0 for NOWHERE; `numbers` is the inverse: its gradient is a gather, faster than a scatter."""
    return read(x, indices)


move.defvjp(
    lambda x, indices, numbers: (read(x, indices), numbers),
    lambda numbers, gradient: (read(gradient, numbers), None, None),
)


def by_shard(x: Shaped[Array, "B T ..."], packing: Packing) -> Shaped[Array, "S n ..."]:
    """Returns the rows of each shard one after the other."""
    return x.reshape(len(packing.indices), -1, *x.shape[2:])


def pack_ids(x: Int[Array, "B T ..."], packing: Packing | None) -> Int[Array, "S M ..."]:
    """Returns the packed tokens' ids; without a packing, the ids of rows."""
    if packing is None:
        return x
    return jax.vmap(read)(by_shard(x, packing), packing.indices)


def packed_positions(num_columns: int, packing: Packing | None) -> Int[Array, "*S M"]:
    """Returns the columns of packed tokens; without a packing, the columns of a row."""
    return jnp.arange(num_columns) if packing is None else packing.indices % num_columns


def pack(x: Float[Array, "B T ..."], packing: Packing | None) -> Float[Array, "S M ..."]:
    """Returns the entries of the packed tokens in an array of heads over rows; without a packing the array."""
    if packing is None:
        return x
    packed = jax.vmap(move)(by_shard(x, packing), packing.indices, by_shard(packing.numbers, packing))
    return constrain(packed, "rows", None, "heads")


def unpack(
    x: Float[Array, "S M ..."], packing: Packing | None, with_shared: bool = True
) -> Float[Array, "B T ..."]:
    """Returns rows of heads that packed tokens hold, a shared prompt in each of its rows; without a packing the array.

    Without `with_shared`, a shared prompt is 0 but in the first of its rows.
    """
    if packing is None:
        return x
    rows = constrain(to_rows(x, packing), "rows", None, "heads")
    return share_prompts(rows, packing) if with_shared else rows


def to_rows(x: Shaped[Array, "S M ..."], packing: Packing) -> Shaped[Array, "B T ..."]:
    """Returns packed tokens in the columns of their rows, 0 elsewhere."""
    rows = jax.vmap(move)(x, by_shard(packing.numbers, packing), packing.indices)
    return rows.reshape(*packing.numbers.shape, *x.shape[2:])


def share_prompts(rows: Float[Array, "B T ..."], packing: Packing) -> Float[Array, "B T ..."]:
    """Copies the columns of a shared prompt from the first row that has it.

    By a product with zeros and ones, whose gradient adds up rows without a scatter.
    """
    num_shards = len(packing.indices)
    first_rows = packing.first_row.reshape(num_shards, -1)
    is_first = jax.nn.one_hot(first_rows, first_rows.shape[1], dtype=rows.dtype)
    of_shards = rows.reshape(num_shards, -1, *rows.shape[1:])
    copies = jnp.einsum("sij,sj...->si...", is_first, of_shards, precision=jax.lax.Precision.HIGHEST)
    is_own = jnp.expand_dims(packing.numbers != NOWHERE, range(2, rows.ndim))
    return jnp.where(is_own, rows, copies.reshape(rows.shape))


def target_states(hidden: Float[Array, "S M D"], packing: Packing | None) -> Float[Array, "S M D"]:
    """Returns the states that next tokens come from; without a packing, all columns but the last."""
    return hidden[:, :-1] if packing is None else hidden


def target_columns(
    x: Shaped[Array, "B T ..."], packing: Packing | None, padding_value: int = 0
) -> Shaped[Array, "S M ..."]:
    """Returns an array's entries of the tokens after packed ones."""
    if packing is None:
        return x[:, 1:]
    return jax.vmap(partial(read, padding_value=padding_value))(by_shard(x, packing), packing.indices + 1)


def to_token_columns(outputs: Shaped[Array, "S M ..."], packing: Packing | None) -> Shaped[Array, "B T ..."]:
    """Returns the output of each target token in its own column; 0 for tokens that are no targets."""
    if packing is not None:
        outputs = to_rows(outputs, packing)[:, :-1]
    return jnp.pad(outputs, [(0, 0), (1, 0), *[(0, 0)] * (outputs.ndim - 2)])
