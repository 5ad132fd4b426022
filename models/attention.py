"""Attention with grouped query heads: of training rows, and of new tokens; layouts are private to this file.

Letters: B rows, T tokens of a row, S cache columns, P columns before them, H query heads, K key heads, G = H / K, C
channels of a head.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange
from jax.sharding import Mesh, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Bool, Float, Int, Int8

from models.names import Array
from utils.batching import round_up
from utils.devices.runtime import cuda_capability
from utils.devices.sharding import ROWS, on_devices


class QuantizedKV(NamedTuple):
    """Keys or values in a byte each: integers times the scale of their token and head."""

    integers: Int8[Array, "B K S C"]
    scale: Float[Array, "B K S 1"]


class View(NamedTuple):
    """Settings of the attention of a layer."""

    scale: float  # factor of the products of queries and keys
    window: int = 0  # tokens that a token sees, itself included; 0: all


RowHeads = Float[Array, "B T H C"]
KeyHeads = Float[Array, "B S K C"]
NewHeads = Float[Array, "B T K C"]
CachedHeads = Float[Array, "B K S C"]
LayerCache = tuple[CachedHeads | QuantizedKV, CachedHeads | QuantizedKV]  # keys and values
HeadsBefore = Float[Array, "B K P C"]
CacheBefore = tuple[HeadsBefore | QuantizedKV, HeadsBefore | QuantizedKV]  # of columns before those of a LayerCache
MASKED = -1e30  # finite: a padded row has no visible column, and its softmax must not be NaN


def masked_attention(
    q: RowHeads, k: KeyHeads, v: KeyHeads, mask: Bool[Array, "*B T S"], scale: float
) -> Float[Array, "B T H*C"]:
    """Computes attention under `mask` (True: visible)."""
    T = q.shape[1]
    K = k.shape[2]
    k = rearrange(k, "B S K C -> B K S C")
    v = rearrange(v, "B S K C -> B K S C")
    # The G queries of a key head share the time axis, so that both products are plain batched matmuls.
    q = rearrange(q, "B T (K G) C -> B K (G T) C", K=K)
    scores = jnp.einsum("bkqc,bksc->bkqs", q, k, preferred_element_type=jnp.float32) * scale
    scores = rearrange(scores, "B K (G T) S -> B K G T S", T=T)
    scores = jnp.where(mask[..., None, None, :, :], scores, MASKED)
    probs = jax.nn.softmax(scores)
    probs = rearrange(probs, "B K G T S -> B K (G T) S")
    out = probs.astype(v.dtype) @ v
    return rearrange(out, "B K (G T) C -> B T (K G C)", T=T)


def causal_mask(num_tokens: int, window: int = 0) -> Bool[Array, "T T"]:
    """Returns the causal mask: each token sees itself and those left of it, `window` tokens in all (0: every one).

    Right-padded rows need no other.
    """
    visible = jnp.ones((num_tokens, num_tokens), bool)
    causal = jnp.tril(visible)
    return causal & ~jnp.tril(visible, -window) if window else causal


def train_attention(
    q: RowHeads,
    k: KeyHeads,
    v: KeyHeads,
    view: View,
    kernel: str,
    mesh: Mesh | None,
    lengths: Int[Array, "B"] | None = None,
) -> Float[Array, "B T H*C"]:
    """Computes causal attention of right-padded rows with the kernel that `choose_kernel` returned.

    `lengths`: tokens of each row; None: T. A kernel of SKIPPING computes no others: the result there is arbitrary.
    """
    if kernel == "plain":
        return plain_attention(q, k, v, view)
    of_rows = ()
    if kernel in SKIPPING:
        of_rows = (jnp.full(len(q), q.shape[1], jnp.int32) if lengths is None else lengths,)
    # XLA cannot partition a kernel, so each device gets its rows and heads; cuDNN's would not be found in the
    # compilation cache otherwise.
    heads = PartitionSpec(ROWS, None, "tp")
    in_specs = (heads, heads, heads, *(PartitionSpec(ROWS) for _ in of_rows))
    compute = partial(KERNELS[kernel], view=view)
    per_device = on_devices(mesh, compute, in_specs, heads)
    out = per_device(q, k, v, *of_rows)
    return rearrange(out, "B T H C -> B T (H C)")


def plain_attention(q: RowHeads, k: KeyHeads, v: KeyHeads, view: View) -> Float[Array, "B T H*C"]:
    """Computes causal attention up to a quarter of the row at a time, over the columns that it sees.

    Quarters are three eighths less work, and a quarter of the scores in memory; each has 64 columns or more, since it
    compiles kernels of its own.
    """
    T = q.shape[1]
    mask = causal_mask(T, view.window)
    num_blocks = max(1, min(4, T // 64))
    block_size = -(-T // num_blocks)
    outputs = []
    for start in range(0, T, block_size):
        end = start + block_size
        block = slice(start, end)
        first_seen = max(0, start - view.window + 1) if view.window else 0
        seen = slice(first_seen, end)
        out = masked_attention(q[:, block], k[:, seen], v[:, seen], mask[block, seen], view.scale)
        outputs.append(out)
    return jnp.concatenate(outputs, axis=1)


def choose_kernel(kernel: str, mesh: Mesh | None, dtype: DTypeLike, num_channels: int, num_key_heads: int) -> str:
    """Returns the kernel for attention of training rows; auto: cuDNN on NVIDIA, splash on TPU, plain elsewhere.

    cuDNN's needs Ampere or later, bfloat16 and heads of at most 128 channels; splash needs heads of 128 channels.
    """
    if kernel != "auto":
        return kernel
    if mesh is None or num_key_heads % mesh.shape["tp"]:
        return "plain"
    device = mesh.devices.flat[0]
    device_kind = device.device_kind.lower()
    has_cudnn = "nvidia" in device_kind and cuda_capability(device) >= 8
    if has_cudnn and dtype == jnp.bfloat16 and num_channels <= 128 and num_channels % 8 == 0:
        return "cudnn"
    return "splash" if "tpu" in device_kind and num_channels % 128 == 0 else "plain"


def cudnn(q: RowHeads, k: KeyHeads, v: KeyHeads, lengths: Int[Array, "B"], view: View) -> RowHeads:
    """Computes causal attention with cuDNN's flash kernel: memory and traffic grow with T, not with its square."""
    window = (view.window - 1, 0) if view.window else None
    is_token = jnp.arange(q.shape[1]) < lengths[:, None]
    q, k, v = (jnp.where(is_token[..., None, None], x, 0) for x in (q, k, v))  # the kernel leaves no gradient there
    lengths = jnp.maximum(lengths, 1)
    return jax.nn.dot_product_attention(
        q,
        k,
        v,
        scale=view.scale,
        is_causal=True,
        query_seq_lengths=lengths,
        key_value_seq_lengths=lengths,
        local_window_size=window,
        implementation="cudnn",
    )


def splash(q: RowHeads, k: KeyHeads, v: KeyHeads, view: View, interpret: bool = False) -> RowHeads:
    """Computes causal attention with the Pallas kernel for TPU.

    Rows are padded to whole blocks; a causal mask never looks at the padding.
    """
    from jax.experimental.pallas.ops.tpu import splash_attention as pallas

    T = q.shape[1]
    H = q.shape[2]
    length = round_up(T, 128)
    padding = (0, 0), (0, length - T), (0, 0), (0, 0)

    def pad(x: Float[Array, "B T H C"]) -> Float[Array, "B H P C"]:
        return rearrange(jnp.pad(x, padding), "B T H C -> B H T C")

    q = pad((q.astype(jnp.float32) * view.scale).astype(q.dtype))  # the factor itself is not rounded
    k = pad(k)
    v = pad(v)
    block = next(size for size in (512, 384, 256, 128) if length % size == 0)
    names = ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute", "q_dq", "kv_dq")
    block_sizes = pallas.BlockSizes(**{f"block_{name}": block for name in names})
    square = length, length
    mask = pallas.LocalMask(square, (view.window - 1, 0), 0) if view.window else pallas.CausalMask(square)
    mask = pallas.MultiHeadMask([mask] * H)
    kernel = pallas.make_splash_mha_single_device(mask, block_sizes=block_sizes, interpret=interpret)
    out = jax.vmap(kernel)(q, k, v)
    out = rearrange(out, "B H T C -> B T H C")
    return out[:, :T]


KERNELS = {"cudnn": cudnn, "splash": splash}
SKIPPING = ("cudnn",)  # kernels that compute no padding


def quantize_kv(heads: CachedHeads, kv_dtype: str) -> CachedHeads | QuantizedKV:
    """Returns keys or values as a cache of `kv_dtype` stores them: int8 with a scale, or unchanged."""
    if kv_dtype != "int8":
        return heads
    largest = jnp.abs(heads).max(-1, keepdims=True)
    scale = jnp.maximum(largest, 1e-6) / 127
    integers = jnp.round(heads / scale).astype(jnp.int8)
    return QuantizedKV(integers, scale)


def dequantize_kv(
    heads: CachedHeads | QuantizedKV, dtype: DTypeLike
) -> tuple[CachedHeads, Float[Array, "B K 1 S"] | float]:
    """Returns the operand of a product, and the scale of the product's results.

    int8 is never multiplied out in memory.
    """
    if not isinstance(heads, QuantizedKV):
        return heads, 1.0
    operand = heads.integers.astype(dtype)
    return operand, heads.scale[..., 0][:, :, None]


def row_scores(q: Float[Array, "B K Q C"], keys: CachedHeads) -> Float[Array, "B K Q S"]:
    """Computes the products of queries with the keys of their own row."""
    multiply = partial(jnp.einsum, preferred_element_type=jnp.float32)

    def one_product(q: Array, keys: Array) -> Array:
        return multiply("bkqc,bksc->bkqs", q, keys)

    def one_for_each_query(q: Array, keys: Array) -> Array:
        queries = rearrange(q, "B K Q C -> Q B K C")
        return jnp.stack([multiply("bkc,bksc->bks", query, keys) for query in queries], axis=2)

    if q.shape[2] >= 8:
        return one_product(q, keys)
    # XLA:CPU reads the keys at 2 to 5 GB/s in one product, and at 9 to 30 in one for each query.
    return jax.lax.platform_dependent(q, keys, cpu=one_for_each_query, default=one_product)


def decode_attention(
    q: RowHeads,
    k: NewHeads,
    v: NewHeads,
    before: CacheBefore,
    cache: LayerCache,
    ends: Int[Array, "B"],
    column: Int[Array, ""],
    view: View,
    kv_dtype: str = "",
) -> tuple[Float[Array, "B T H*C"], LayerCache]:
    """Computes causal attention of new tokens over what is before the cache, the cache, and themselves.

    Returns the cache with the new tokens in it, from `column` on; what it held from there on is masked. The P columns
    `before` it, of which the first `ends` hold tokens, are only read: the pages of models/pages.py.
    """
    new = tuple(quantize_kv(rearrange(heads, "B T K C -> B K T C"), kv_dtype) for heads in (k, v))
    cache = jax.tree.map(lambda x, y: jax.lax.dynamic_update_slice(x, y, (0, 0, column, 0)), cache, new)
    keys, key_scale = dequantize_kv(cache[0], q.dtype)
    values, value_scale = dequantize_kv(cache[1], q.dtype)
    keys_before, key_scale_before = dequantize_kv(before[0], q.dtype)
    values_before, value_scale_before = dequantize_kv(before[1], q.dtype)
    T, columns_before = q.shape[1], jnp.arange(keys_before.shape[2])
    q = rearrange(q, "B T (K G) C -> B K (G T) C", K=keys.shape[1])
    Q = q.shape[2]
    scores_before = jnp.einsum("bkqc,bkpc->bkqp", q, keys_before, preferred_element_type=jnp.float32)
    is_before = columns_before < ends[:, None]
    scores_before = jnp.where(is_before[:, None, None], scores_before * key_scale_before, MASKED)
    scores = row_scores(q, keys)
    own_columns = (column + jnp.arange(T))[:, None]  # of the new tokens
    cache_columns = jnp.arange(keys.shape[2])
    is_seen = cache_columns <= own_columns
    if view.window:
        is_seen &= cache_columns > own_columns - view.window
        in_window = columns_before > ends[:, None, None] + own_columns - view.window
        scores_before = jnp.where(of_queries(in_window, Q), scores_before, MASKED)
    scores = jnp.where(of_queries(is_seen, Q), scores.astype(jnp.float32) * key_scale, MASKED)

    # One softmax over both: concatenated, the scores would be written to memory once more.
    top = jnp.maximum(scores_before.max(-1, keepdims=True), scores.max(-1, keepdims=True))
    mass_before = jnp.exp((scores_before - top) * view.scale)
    mass = jnp.exp((scores - top) * view.scale)
    total = mass_before.sum(-1, keepdims=True) + mass.sum(-1, keepdims=True)
    mass = (mass * value_scale).astype(q.dtype)
    mass_before = (mass_before * value_scale_before).astype(q.dtype)
    out = jnp.einsum("bkqs,bksc->bkqc", mass, values, preferred_element_type=jnp.float32)
    out += jnp.einsum("bkqp,bkpc->bkqc", mass_before, values_before, preferred_element_type=jnp.float32)
    out = (out / total).astype(q.dtype)
    return rearrange(out, "B K (G T) C -> B T (K G C)", T=T), cache


def of_queries(mask: Bool[Array, "*B T S"], num_queries: int) -> Bool[Array, "*B 1 Q S"]:
    """Returns a mask of tokens, repeated for each query head of a key head."""
    of_heads = jnp.tile(mask, (num_queries // mask.shape[-2], 1))
    return of_heads[..., None, :, :]
