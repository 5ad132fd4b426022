"""Gated DeltaNet: linear attention with a memory of constant size, which a gate decays and the delta rule corrects.

The memory of a head is a matrix S that maps keys to values. A token has query q, key k, value v, log decay g and
write strength beta. It makes S := exp(g) S, then S := S + beta k (v - S^T k)^T, and its output is S^T q.
Source: arXiv 2412.06464; constants as in transformers, models/qwen3_5/modeling_qwen3_5.py.

B rows, T tokens of a row, H value heads, J key heads, C channels of a key, E channels of a value. The convolution has F
channels and reads W earlier tokens. n chunks of s tokens.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange
from jax.typing import DTypeLike
from jaxtyping import Bool, Float

from models.architecture import DeltaShape
from models.names import Array, Memory, RecurrentState
from utils.batching import power_above
from utils.devices.sharding import constrain

CHUNK = 64  # tokens that are computed by matrix products, from one memory to the next; a power of two
EPS = 1e-6  # added to the squared length of queries and keys
ValueHeads = Float[Array, "B H T E"]


class DeltaInputs(NamedTuple):
    """Inputs of the delta rule for each value head, float32."""

    q: Float[Array, "B H T C"]
    k: Float[Array, "B H T C"]
    v: ValueHeads
    log_decay: Float[Array, "B H T"]
    beta: Float[Array, "B H T"]


class Chunks(NamedTuple):
    """Matrices of each chunk that are independent of the memory before it."""

    q: Float[Array, "n B H s C"]  # decayed since the chunk began
    k: Float[Array, "n B H s C"]  # decayed until the chunk ends
    scores: Float[Array, "n B H s s"]  # products of queries with keys of the chunk
    values: Float[Array, "n B H s E"]  # values that are written if the memory before the chunk is empty
    reads: Float[Array, "n B H s C"]  # keys by which earlier memory is subtracted from the values
    decay: Float[Array, "n B H"]  # decay of the memory by the whole chunk


def init_state(shape: DeltaShape, num_rows: int, dtype: DTypeLike) -> RecurrentState:
    """Returns the state of rows before their first token: zeros."""
    columns = jnp.zeros((num_rows, shape.kernel - 1, shape.conv_width), dtype)
    size = num_rows, shape.num_value_heads, shape.key_channels, shape.value_channels
    memory = jnp.zeros(size, jnp.float32)
    columns = constrain(columns, "rows", None, "heads")
    return RecurrentState(columns, constrain(memory, "rows", "heads"))


def causal_conv(
    columns: Float[Array, "B W F"],
    x: Float[Array, "B T F"],
    weight: Float[Array, "F 1 V"],
    is_token: Bool[Array, "B T"] | None = None,
) -> tuple[Float[Array, "B T F"], Float[Array, "B W F"]]:
    """Convolves each channel over its last V = W + 1 tokens, then SiLU; returns the last columns of tokens too."""
    num_tokens = x.shape[1]
    inputs = jnp.concatenate([columns.astype(x.dtype), x], axis=1)
    out = jnp.zeros(x.shape, jnp.float32)
    for i in range(weight.shape[-1]):
        tap = weight[:, 0, i].astype(x.dtype)
        out += inputs[:, i : i + num_tokens].astype(jnp.float32) * tap.astype(jnp.float32)
    if is_token is None:
        return jax.nn.silu(out).astype(x.dtype), inputs[:, num_tokens:]
    ends = jnp.max(jnp.where(is_token, jnp.arange(1, num_tokens + 1), 0), axis=1)  # columns up to the last token
    last = ends[:, None] + jnp.arange(columns.shape[1])
    return jax.nn.silu(out).astype(x.dtype), jnp.take_along_axis(inputs, last[..., None], axis=1)


def unit_vectors(x: Float[Array, "... C"]) -> Float[Array, "... C"]:
    """Returns vectors divided by their length."""
    squares = jnp.sum(x * x, axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(squares + EPS)


def delta_inputs(
    shape: DeltaShape, qkv: Float[Array, "B T F"], log_decay: Float[Array, "B T H"], beta: Float[Array, "B T H"]
) -> DeltaInputs:
    """Returns the heads of the convolution's output: queries and keys of unit length, each key head repeated."""
    ends = shape.key_width, 2 * shape.key_width
    q, k, v = jnp.split(qkv.astype(jnp.float32), ends, axis=-1)
    q = rearrange(q, "B T (J C) -> B J T C", C=shape.key_channels)
    k = rearrange(k, "B T (J C) -> B J T C", C=shape.key_channels)
    v = rearrange(v, "B T (H E) -> B H T E", E=shape.value_channels)
    q = unit_vectors(q) * shape.key_channels**-0.5
    k = unit_vectors(k)
    group_size = shape.num_value_heads // shape.num_key_heads
    q = jnp.repeat(q, group_size, axis=1)
    k = jnp.repeat(k, group_size, axis=1)
    inputs = DeltaInputs(q, k, v, log_decay=log_decay.swapaxes(1, 2), beta=beta.swapaxes(1, 2))
    return jax.tree.map(lambda x: constrain(x, "rows", "heads"), inputs)


def delta_rule(inputs: DeltaInputs, memory: Memory) -> tuple[ValueHeads, Memory]:
    """Computes the outputs of these tokens and the memory after the last one."""
    if inputs.q.shape[2] == 1:
        return recurrent_rule(inputs, memory)
    return chunked_rule(inputs, memory)


def recurrent_rule(inputs: DeltaInputs, memory: Memory) -> tuple[ValueHeads, Memory]:
    """Computes the delta rule for one token of each row. Source: arXiv 2412.06464, equation 10."""
    q, k, v, log_decay, beta = jax.tree.map(lambda x: x[:, :, 0], inputs)
    memory = jnp.exp(log_decay)[..., None, None] * memory
    predicted = jnp.sum(memory * k[..., None], axis=2)
    correction = beta[..., None] * (v - predicted)
    memory = memory + k[..., None] * correction[:, :, None]
    out = jnp.sum(memory * q[..., None], axis=2)
    return out[:, :, None], memory


def chunked_rule(inputs: DeltaInputs, memory: Memory, chunk: int = CHUNK) -> tuple[ValueHeads, Memory]:
    """Computes the delta rule by matrix products, `chunk` tokens (a power of two) from one memory to the next.

    Source: arXiv 2412.06464, section 3.3.
    """
    num_tokens = inputs.q.shape[2]
    size = min(chunk, power_above(num_tokens))

    def advance(memory: Memory, x: Chunks) -> tuple[Memory, ValueHeads]:
        values = x.values - x.reads @ memory
        out = x.q @ memory + x.scores @ values
        memory = x.decay[..., None, None] * memory + x.k.swapaxes(-1, -2) @ values
        return memory, out

    # On TPU the default is one pass of bfloat16 products, except below float32 models.
    with jax.default_matmul_precision(jax.config.jax_default_matmul_precision or "high"):
        chunks = make_chunks(inputs, size)
        memory, out = jax.lax.scan(advance, memory, chunks)
    out = rearrange(out, "n B H s E -> B H (n s) E")
    return out[:, :, :num_tokens], memory


def make_chunks(inputs: DeltaInputs, size: int) -> Chunks:
    """Returns the matrices of each chunk of `size` tokens; rows are filled up with tokens that change nothing.

    The corrections of a chunk solve a triangular system: each depends on the keys that were written before it.
    """
    padding = -inputs.q.shape[2] % size

    def split(x: Float[Array, "B H T ..."]) -> Float[Array, "n B H s ..."]:
        other_axes = [(0, 0)] * (x.ndim - 3)
        x = jnp.pad(x, [(0, 0), (0, 0), (0, padding), *other_axes])
        return rearrange(x, "B H (n s) ... -> n B H s ...", s=size)

    q, k, v, log_decay, beta = jax.tree.map(split, inputs)
    total = jnp.cumsum(log_decay, axis=-1)
    between = total[..., :, None] - total[..., None, :]
    causal = jnp.tril(jnp.ones((size, size), bool))
    # Masked before exp: above the diagonal it can overflow, and its gradient would be NaN.
    decay = jnp.exp(jnp.where(causal, between, -jnp.inf))
    since_start = jnp.exp(total)[..., None]
    until_end = jnp.exp(total[..., -1:] - total)[..., None]
    k_beta = beta[..., None] * k
    keys = k.swapaxes(-1, -2)
    overlaps = jnp.tril(k_beta @ keys * decay, -1)
    solve = invert_unit_lower(overlaps)
    return Chunks(
        q=q * since_start,
        k=k * until_end,
        scores=q @ keys * decay,
        values=solve @ (beta[..., None] * v),
        reads=solve @ (k_beta * since_start),
        decay=jnp.exp(total[..., -1]),
    )


def invert_unit_lower(below: Float[Array, "... s s"]) -> Float[Array, "... s s"]:
    """Inverts 1 + `below`, whose entries are under the diagonal, by halves: both diagonal blocks in one call.

    Matrix products alone: XLA gathers the rows of all devices for a triangular solve. The series of powers of `below`
    would need products too, but its terms grow beyond float32 if keys are alike.
    """
    size = below.shape[-1]
    if size == 1:
        return jnp.ones_like(below)
    half = size // 2
    blocks = jnp.stack([below[..., :half, :half], below[..., half:, half:]])
    first, second = invert_unit_lower(blocks)
    product = jnp.matmul(below[..., half:, :half], first, precision="highest")
    corner = -jnp.matmul(second, product, precision="highest")
    top = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
    bottom = jnp.concatenate([corner, second], axis=-1)
    return jnp.concatenate([top, bottom], axis=-2)


def gated_norm(
    x: Float[Array, "B T H E"], gate: Float[Array, "B T H*E"], gain: Float[Array, "E"], eps: float
) -> Float[Array, "B T H*E"]:
    """Returns the outputs of heads over their root mean square, times the gain, times SiLU of the gate."""
    mean_square = jnp.mean(x * x, axis=-1, keepdims=True)
    gain = gain.astype(gate.dtype)
    x = x * jax.lax.rsqrt(mean_square + eps) * gain.astype(jnp.float32)
    x = rearrange(x, "B T H E -> B T (H E)")
    return (x * jax.nn.silu(gate.astype(jnp.float32))).astype(gate.dtype)
