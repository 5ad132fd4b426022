"""Attention with grouped query heads: of training rows, of prompts, of new tokens; layouts are private to this file.

Letters: B rows, T tokens of a row, N prompts of P tokens, S cache columns, H query heads, K key heads, G = H / K,
C channels of a head.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Bool, Float, Int
from jaxtyping import Int8 as IntegerArray

from utils.devices.sharding import ROWS
from utils.settings.errors import UserError
from utils.training.batching import Array, round_up


class Int8(NamedTuple):
    """Keys or values in a byte each: integers times the scale of their token and head."""

    integers: IntegerArray[Array, "B K S C"]
    scale: Float[Array, "B K S 1"]


Cache = tuple[Float[Array, "B K S C"] | Int8, Float[Array, "B K S C"] | Int8]
Prompts = tuple[Float[Array, "N K P C"] | Int8, Float[Array, "N K P C"] | Int8]  # caches that rows share
MASKED = -1e30  # finite: a padded row has no visible column, and its softmax must not be NaN


def attend(
    q: Float[Array, "B T H C"], k: Float[Array, "B S K C"], v: Float[Array, "B S K C"], mask: Bool[Array, "*B T S"]
) -> tuple[Float[Array, "B T H*C"], Cache]:
    """Attention of tokens of rows under `mask` (True = visible); also returns k and v in the layout of the cache."""
    T, C, K = q.shape[1], q.shape[3], k.shape[2]
    k, v = (rearrange(x, "B S K C -> B K S C") for x in (k, v))
    # The G queries of a key head share the time axis, so that both products are plain batched matmuls.
    q = rearrange(q, "B T (K G) C -> B K (G T) C", K=K)
    scores = (q @ k.swapaxes(2, 3)).astype(jnp.float32) * C**-0.5
    scores = rearrange(scores, "B K (G T) S -> B K G T S", T=T)
    scores = jnp.where(mask[..., None, None, :, :], scores, MASKED)
    probs = rearrange(jax.nn.softmax(scores), "B K G T S -> B K (G T) S")
    out = probs.astype(v.dtype) @ v
    return rearrange(out, "B K (G T) C -> B T (K G C)", T=T), (k, v)


def causal_mask(num_tokens: int) -> Bool[Array, "T T"]:
    """Each token sees itself and what stands left of it: all that right-padded training rows need."""
    return jnp.tril(jnp.ones((num_tokens, num_tokens), bool))


def attend_rows(
    q: Float[Array, "B T H C"], k: Float[Array, "B T K C"], v: Float[Array, "B T K C"], kernel: str, mesh: Mesh | None
) -> Float[Array, "B T H*C"]:
    """Causal attention of right-padded rows."""
    T = q.shape[1]
    if kernel == "plain":
        # A quarter of the row at a time sees what stands left of its end: three eighths less than all of it.
        mask, step = causal_mask(T), -(-T // max(1, min(4, T // 32)))
        parts = [(slice(i, i + step), slice(0, i + step)) for i in range(0, T, step)]
        return jnp.concatenate([attend(q[:, a], k[:, b], v[:, b], mask[a, b])[0] for a, b in parts], axis=1)
    # XLA cannot cut a kernel, so each device gets its rows and heads; cuDNN's would not be found in the compilation
    # cache otherwise.
    heads = PartitionSpec(ROWS, None, "tp")
    cut = jax.shard_map(KERNELS[kernel], mesh=mesh, in_specs=(heads,) * 3, out_specs=heads, check_vma=False)
    return rearrange(cut(q, k, v), "B T H C -> B T (H C)")


def choose_kernel(kernel: str, mesh: Mesh | None, dtype, num_channels: int, num_key_heads: int) -> str:
    """What computes the attention of training rows: auto is cuDNN on NVIDIA, splash on TPU, plain elsewhere.

    Raises: UserError for a kernel that cannot.
    """
    kind = mesh.devices.flat[0].device_kind.lower() if mesh else ""
    limits = {
        "cudnn": {
            "an NVIDIA GPU": "nvidia" in kind,
            "--dtype bfloat16": dtype == jnp.bfloat16,
            "heads of at most 128 channels": num_channels <= 128 and num_channels % 8 == 0,
        },
        "splash": {"a TPU": "tpu" in kind, "heads of 128 channels": num_channels % 128 == 0},
        "plain": {},
    }
    for name in ("cudnn", "splash"):
        limits[name]["key heads that --mesh tp divides"] = not mesh or num_key_heads % mesh.shape["tp"] == 0
    if kernel == "auto":
        return next(name for name, needs in limits.items() if all(needs.values()))
    if missing := [need for need, is_met in limits[kernel].items() if not is_met]:
        raise UserError(f"--attention {kernel} needs {', '.join(missing)}: leave it at auto")
    return kernel


def cudnn(
    q: Float[Array, "B T H C"], k: Float[Array, "B T K C"], v: Float[Array, "B T K C"]
) -> Float[Array, "B T H C"]:
    """cuDNN's flash attention: memory and traffic grow with T, not with its square."""
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")


def splash(
    q: Float[Array, "B T H C"], k: Float[Array, "B T K C"], v: Float[Array, "B T K C"], interpret: bool = False
) -> Float[Array, "B T H C"]:
    """The same in Pallas for TPU; rows are padded to whole blocks, which a causal mask never looks at."""
    from jax.experimental.pallas.ops.tpu import splash_attention as pallas

    T, H, C = q.shape[1:]
    length = round_up(T, 128)
    padding = (0, 0), (0, length - T), (0, 0), (0, 0)
    q, k, v = (rearrange(jnp.pad(x, padding), "B T H C -> B H T C") for x in (q * C**-0.5, k, v))
    block = next(size for size in (512, 256, 128) if length % size == 0)
    names = ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute", "q_dq", "kv_dq")
    kernel = pallas.make_splash_mha_single_device(
        pallas.MultiHeadMask([pallas.CausalMask((length, length))] * H),
        block_sizes=pallas.BlockSizes(**{f"block_{name}": block for name in names}), interpret=interpret,
    )  # fmt: skip
    return rearrange(jax.vmap(kernel)(q, k, v), "B H T C -> B T H C")[:, :T]


KERNELS = {"cudnn": cudnn, "splash": splash}


def compress(x: Float[Array, "B K S C"], dtype: str) -> Float[Array, "B K S C"] | Int8:
    """Keys or values as a cache of this dtype keeps them: as they are, or int8."""
    if dtype != "int8":
        return x
    scale = jnp.maximum(jnp.abs(x).max(-1, keepdims=True), 1e-6) / 127
    return Int8(jnp.round(x / scale).astype(jnp.int8), scale)


def expand(x: Float[Array, "B K S C"] | Int8, dtype) -> tuple[Float[Array, "B K S C"], Float[Array, "B K 1 S"] | float]:
    """What products read, and what their results are multiplied by: int8 is never multiplied out in memory."""
    return (x.integers.astype(dtype), x.scale[..., 0][:, :, None]) if isinstance(x, Int8) else (x, 1.0)


def attend_cache(
    q: Float[Array, "B 1 H C"],
    k: Float[Array, "B 1 K C"],
    v: Float[Array, "B 1 K C"],
    prompts: Prompts,
    cache: Cache,
    starts: Int[Array, "N"],
    column: Int[Array, ""],
    dtype: str = "",
) -> tuple[Float[Array, "B 1 H*C"], Cache]:
    """Attention of one new token per row, written at `column` of its cache, over its prompt and columns [0, column].

    B / N rows side by side share one of the prompts [N, K, P, C], which is read once for all of them; it stands in
    columns [starts, P). All rows share the column, so that the write is one dynamic_update_slice, done in place inside
    a loop.
    """
    new = tuple(compress(rearrange(x, "B S K C -> B K S C"), dtype) for x in (k, v))
    cache = jax.tree.map(lambda old, new: jax.lax.dynamic_update_slice(old, new, (0, 0, column, 0)), cache, new)
    (keys, key_scale), (values, value_scale) = (expand(x, q.dtype) for x in cache)
    (first_keys, first_key_scale), (first_values, first_value_scale) = (expand(x, q.dtype) for x in prompts)
    N, K, P, C = first_keys.shape
    q = rearrange(q, "B 1 (K G) C -> B K G C", K=K)
    G = q.shape[2]

    def by_prompt(x):  # the queries of the R rows that share a prompt are rows of one matmul
        return rearrange(x, "(N R) K G X -> N K (R G) X", N=N)

    def by_row(x):
        return rearrange(x, "N K (R G) X -> (N R) K G X", G=G)

    at_prompt = jnp.einsum("nkgc,nkpc->nkgp", by_prompt(q), first_keys, preferred_element_type=jnp.float32)
    if jax.default_backend() == "cpu" and C < 64:
        # XLA:CPU runs this small batched product 6x slower as a matmul (2.4 against 0.4 ms at B 256, K 2, S 128, C 32).
        scores = (q[:, :, :, None] * keys[:, :, None]).sum(-1)
    else:
        scores = jnp.einsum("bkgc,bksc->bkgs", q, keys, preferred_element_type=jnp.float32)
    at_prompt = jnp.where((jnp.arange(P) >= starts[:, None])[:, None, None], at_prompt * first_key_scale, MASKED)
    scores = jnp.where(jnp.arange(keys.shape[2]) <= column, scores.astype(jnp.float32) * key_scale, MASKED)
    probs = jax.nn.softmax(jnp.concatenate([by_row(at_prompt), scores], axis=-1) * C**-0.5)
    at_prompt, at_row = by_prompt(probs[..., :P]) * first_value_scale, probs[..., P:] * value_scale
    out = jnp.einsum("bkgs,bksc->bkgc", at_row.astype(q.dtype), values)
    out += by_row(jnp.einsum("nkgp,nkpc->nkgc", at_prompt.astype(q.dtype), first_values))
    return rearrange(out, "B K G C -> B 1 (K G C)"), cache
