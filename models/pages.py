"""Pages of a cache: rows of a pool hold as many as their tokens fill, so that bytes follow the tokens that are there.

Attention over pages is a kernel on GPUs (Pallas on Triton, which JAX 0.11 deprecates) and on TPUs
(ragged_paged_attention, which JAX ships). Elsewhere the pages of a segment are copied into one array for each row, and
what the segment adds is written back at its end.

R rows, T new tokens of a row, w pages of a table, n pages of a pool, p tokens of a page, S slots.
H query heads, K key heads, G = H / K, C channels of a head.
"""

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from typing import NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange
from jax.sharding import PartitionSpec
from jaxtyping import Float, Int, PyTree, Shaped

from models.architecture import LINEAR, Decoder
from models.attention import KeyHeads, LayerCache, QuantizedKV, RowHeads, View, decode_attention, quantize_kv
from models.names import Array, RecurrentState
from utils.batching import power_above, round_up
from utils.devices.runtime import cuda_capability
from utils.devices.sharding import ROWS, Layout, on_devices, on_each

NOWHERE = 1 << 30  # number of no page or slot: reads return any values, and writes are dropped
HISTORY = 4096  # rows whose lengths are kept
QUERIES = 64  # queries of a block in the kernel for GPUs, at least 16
Pool = Float[Array, "n p 2*K C"] | QuantizedKV  # pages of a layer: keys and values of each head, side by side
State = list[Pool | RecurrentState]  # pools, or states of slots, of all layers
Work = list[tuple[LayerCache | None, PyTree]]  # for each layer what a segment only reads, and what it changes


@dataclass(frozen=True)
class Paging:
    """Sizes of a cache in pages, over all devices, and counts from sampling over it."""

    page: int = 0  # tokens; 0: chosen for the hardware
    num_pages: int = 0  # 0: as a call needs
    num_slots: int = 0
    ended: deque[int] = field(default_factory=lambda: deque(maxlen=HISTORY), compare=False)  # lengths of rows
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=16), compare=False)  # to continue a turn
    load: Counter[str] = field(default_factory=Counter, compare=False)  # sums over segments: see `Scheduler.decode`

    def take_load(self) -> dict[str, float]:
        """Returns the counts since the last call."""
        load = dict(self.load)
        self.load.clear()
        return load


class Pages(NamedTuple):
    """Rows whose next tokens are computed: their pages, and which of their tokens are new."""

    table: Int[Array, "R w"]  # numbers in the pool of their shard
    slots: Int[Array, "R"]  # numbers of their states
    columns: Int[Array, "R"]  # tokens before the new ones
    counts: Int[Array, "R"]  # new tokens; more that are computed are padding


def paged_kernel(model: Decoder) -> str:
    """Returns how attention reads pages: by a kernel, or plain, as after JAX has removed Pallas on Triton."""
    if model.mesh is None:
        return "plain"
    device = model.mesh.devices.flat[0]
    kind = device.device_kind.lower()
    if "tpu" in kind:
        return "plain" if model.kv_dtype else "ragged"
    has_triton = "nvidia" in kind and cuda_capability(device) >= 8 and find_spec("jax.experimental.pallas.triton")
    return "triton" if has_triton else "plain"


def stored_channels(model: Decoder) -> int:
    """Returns the channels of a head in the pool: as many as the model has, or more that are 0 for the kernel."""
    rounded = {"triton": power_above(model.head_dim), "ragged": round_up(model.head_dim, 128)}
    return rounded.get(paged_kernel(model), model.head_dim)


def page_bytes(model: Decoder, page: int) -> int:
    """Bytes of a page of all layers."""
    return model.cache_bytes * page * stored_channels(model) // model.head_dim


@partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def new_state(model: Decoder, layout: Layout, num_pages: int, page: int, num_slots: int) -> State:
    """Returns pools of `num_pages` without a token, and states of slots, over all shards."""
    K, shape = model.num_key_value_heads, (num_pages, page)

    def zeros(dtype: str, *sizes: int, axes: tuple[str | None, ...]) -> Array:
        x = jnp.zeros(sizes, dtype)
        return jax.lax.with_sharding_constraint(x, layout.sharding(sizes, ("rows", *axes)))

    def new_pool() -> Pool:
        axes = None, "kv_heads" if K % layout.mesh.shape["tp"] == 0 else None
        if model.kv_dtype == "int8":
            integers = zeros("int8", *shape, 2 * K, stored_channels(model), axes=axes)
            return QuantizedKV(integers, zeros(model.dtype, *shape, 2 * K, 1, axes=axes))
        return zeros(model.dtype, *shape, 2 * K, stored_channels(model), axes=axes)

    def new_slots() -> RecurrentState:
        from models.deltanet import init_state

        shapes = jax.eval_shape(lambda: init_state(model.delta, num_slots, model.dtype))
        columns = zeros(shapes.columns.dtype, *shapes.columns.shape, axes=(None, "heads"))
        return RecurrentState(columns, zeros(shapes.memory.dtype, *shapes.memory.shape, axes=("heads",)))

    return [new_slots() if kind == LINEAR else new_pool() for kind in model.kinds]


def begin(model: Decoder, state: State, pages: Pages, num_tokens: int) -> Work:
    """Returns the arrays that computing `num_tokens` more of each row reads and changes: copies, or the pools."""
    is_plain = paged_kernel(model) == "plain"

    def copy(layer: Pool | RecurrentState, pages: Pages) -> tuple[LayerCache | None, PyTree]:
        if isinstance(layer, RecurrentState):
            return None, jax.tree.map(lambda x: states_of(x, pages), layer)
        before = tuple(jax.tree.map(partial(read_pages, pages.table, i), layer) for i in range(2))
        own = jax.tree.map(lambda x: jnp.zeros((*x.shape[:2], num_tokens, x.shape[3]), x.dtype), before)
        return before, own

    work = []
    for layer in state:
        if is_plain or isinstance(layer, RecurrentState):
            work.append(on_shards(copy, layer, pages))
        else:
            work.append((None, layer))
    return work


def end(model: Decoder, state: State, changed: list[PyTree], pages: Pages) -> State:
    """Returns the state with the changed arrays written back."""
    is_plain = paged_kernel(model) == "plain"

    def write_back(layer: Pool | RecurrentState, new: PyTree, pages: Pages) -> Pool | RecurrentState:
        if isinstance(layer, RecurrentState):
            return jax.tree.map(lambda x, new: x.at[pages.slots].set(new, mode="drop"), layer, new)
        heads = jax.tree.map(interleave, *new)
        return jax.tree.map(lambda x, new: write_pages(x, new, pages.table, pages.columns), layer, heads)

    new_state = []
    for layer, new in zip(state, changed, strict=True):
        if is_plain or isinstance(layer, RecurrentState):
            new_state.append(on_shards(write_back, layer, new, pages))
        else:
            new_state.append(new)
    return new_state


def states_of(x: Shaped[Array, "S ..."], pages: Pages) -> Shaped[Array, "R ..."]:
    """Returns the states of rows: 0 before their first token."""
    is_new = pages.columns == 0
    return jnp.where(is_new.reshape(-1, *[1] * (x.ndim - 1)), 0, x.at[pages.slots].get(mode="clip"))


def on_shards(f: Callable[..., PyTree], *rows: PyTree) -> PyTree:
    """Returns f of each shard's rows, whose slots and pages have numbers of their own."""
    mesh = jax.typeof(jax.tree.leaves(rows)[-1]).sharding.mesh
    return on_each(mesh, lambda _, rows: f(*rows), None, rows)


def read_slots(x: Shaped[Array, "S ..."], slots: Int[Array, "R"]) -> Shaped[Array, "R ..."]:
    """Returns the entries of rows' slots."""
    return on_shards(lambda x, slots: x.at[slots].get(mode="clip"), x, slots)


def write_slots(
    x: Shaped[Array, "S ..."], new: Shaped[Array, "R ..."], slots: Int[Array, "R"]
) -> Shaped[Array, "S ..."]:
    """Returns an array of slots with the new entries of rows in it."""
    return on_shards(lambda x, new, slots: x.at[slots].set(new, mode="drop"), x, new, slots)


def read_pages(table: Int[Array, "R w"], offset: int, pool: Shaped[Array, "n p 2*K C"]) -> Shaped[Array, "R K w*p C"]:
    """Returns the keys (`offset` 0) or values (1) in the pages of rows, one after the other."""
    heads = pool[:, :, offset::2].at[table].get(mode="clip")
    return rearrange(heads, "R w p K C -> R K (w p) C")


def interleave(keys: Shaped[Array, "R K T C"], values: Shaped[Array, "R K T C"]) -> Shaped[Array, "R T 2*K C"]:
    """Returns keys and values of each head beside each other."""
    return rearrange([keys, values], "n R K T C -> R T (K n) C")


def write_pages(
    pool: Shaped[Array, "n p 2*K C"],
    heads: Shaped[Array, "R T 2*K C"],
    table: Int[Array, "R w"],
    columns: Int[Array, "R"],
) -> Shaped[Array, "n p 2*K C"]:
    """Returns a pool with the keys and values of new tokens in it, from `columns` on; those without a page are dropped.
    """
    page, width = pool.shape[1], table.shape[1]
    own = columns[:, None] + jnp.arange(heads.shape[1])
    numbers = jnp.take_along_axis(table, jnp.minimum(own // page, width - 1), axis=1)
    numbers = jnp.where(own < width * page, numbers, NOWHERE)
    return pool.at[numbers, own % page].set(heads, mode="drop")


def page_attention(
    q: RowHeads,
    k: KeyHeads,
    v: KeyHeads,
    model: Decoder,
    pages: Pages,
    number: Int[Array, ""],
    before: LayerCache | None,
    cache: LayerCache | Pool,
    view: View,
) -> tuple[Float[Array, "R T H*C"], PyTree]:
    """Computes causal attention of new tokens, number `number` of their segment on; returns what they change, too."""
    kernel = paged_kernel(model)
    if kernel == "plain":
        return decode_attention(q, k, v, before, cache, pages.columns, number, view, model.kv_dtype)

    def attend(q: RowHeads, k: KeyHeads, v: KeyHeads, pool: Pool, pages: Pages) -> tuple[RowHeads, Pool]:
        columns = pages.columns + number
        padding = (0, 0), (0, 0), (0, 0), (0, stored_channels(model) - q.shape[-1])
        q, k, v = (jnp.pad(x, padding) for x in (q, k, v))
        heads = quantize_kv(rearrange([k, v], "n R T K C -> R T (K n) C"), model.kv_dtype)
        pool = jax.tree.map(lambda x, new: write_pages(x, new, pages.table, columns), pool, heads)
        table = jnp.minimum(pages.table, len(jax.tree.leaves(pool)[0]) - 1)
        return KERNELS[kernel](q, pool, table, columns, view), pool

    tp = "tp" if k.shape[2] % model.mesh.shape["tp"] == 0 else None
    heads, rows = PartitionSpec(ROWS, None, tp), PartitionSpec(ROWS)
    on_each_device = on_devices(model.mesh, attend, (heads, heads, heads, heads, rows), (heads, heads))
    out, pool = on_each_device(q, k, v, cache, pages)
    return rearrange(out[..., : q.shape[-1]], "R T H C -> R T (H C)"), pool


def triton(
    q: RowHeads, pool: Pool, table: Int[Array, "R w"], columns: Int[Array, "R"], view: View, interpret: bool = False
) -> RowHeads:
    """Computes causal attention of new tokens over the pages of their rows, and reads only the pages that they see."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton as plgpu

    T, H, C = q.shape[1:]
    num_pages, page, num_heads = jax.tree.leaves(pool)[0].shape[:3]
    K = num_heads // 2
    G = H // K
    q = rearrange(q, "R T (K G) C -> R K (T G) C", K=K)
    block = min(QUERIES, max(16, power_above(T * G)))

    def attend(q_ref: Array, keys: tuple, values: tuple, table: Array, column: Array, out_ref: Array) -> None:
        first = pl.program_id(2) * block
        queries = first + jnp.arange(block)
        is_query = (queries < T * G)[:, None]
        own_columns = column[0] + queries // G
        query = plgpu.load(q_ref.at[pl.ds(first, block), :], mask=is_query, other=0.0)

        def read(refs: tuple, i: Array) -> tuple[Array, Array | float]:
            """Returns a page of keys or values, and the factors of its tokens."""
            heads = refs[0][table[i]].astype(query.dtype)
            return heads, refs[1][table[i]].reshape(1, page) if len(refs) == 2 else 1.0

        def attend_page(i: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            out, top, total = carry
            key, key_scale = read(keys, i)
            value, value_scale = read(values, i)
            scores = plgpu.dot(query, key.T) * (view.scale * key_scale)
            seen = i * page + jnp.arange(page)
            is_seen = seen <= own_columns[:, None]
            if view.window:
                is_seen &= seen > own_columns[:, None] - view.window
            scores = jnp.where(is_seen, scores, -1e30)
            new_top = jnp.maximum(top, scores.max(axis=1))
            factor = jnp.exp(top - new_top)
            mass = jnp.exp(scores - new_top[:, None])
            total = total * factor + mass.sum(axis=1)
            mass = (mass * value_scale).astype(value.dtype)
            return out * factor[:, None] + plgpu.dot(mass, value), new_top, total

        last_column = column[0] + jnp.minimum(first + block, T * G) // G  # of the block or one after
        first_page = jnp.maximum(0, column[0] + first // G - view.window + 1) // page if view.window else 0
        zeros = jnp.zeros((block, C)), jnp.full(block, -1e30), jnp.zeros(block)
        last_page = jnp.minimum(last_column // page + 1, table.shape[0])
        out, _, total = jax.lax.fori_loop(first_page, last_page, attend_page, zeros)
        plgpu.store(out_ref.at[pl.ds(first, block), :], (out / total[:, None]).astype(query.dtype), mask=is_query)

    def of_head(offset: int) -> tuple[pl.BlockSpec, ...]:
        return tuple(
            pl.BlockSpec((num_pages, page, None, x.shape[3]), lambda r, k, b: (0, 0, 2 * k + offset, 0))
            for x in jax.tree.leaves(pool)
        )

    of_queries = pl.BlockSpec((None, None, T * G, C), lambda r, k, b: (r, k, 0, 0))
    of_table = pl.BlockSpec((None, table.shape[1]), lambda r, k, b: (r, 0))
    leaves = tuple(jax.tree.leaves(pool))
    out = pl.pallas_call(
        attend,
        grid=(len(q), K, pl.cdiv(T * G, block)),
        in_specs=[of_queries, of_head(0), of_head(1), of_table, pl.BlockSpec((1,), lambda r, k, b: (r,))],
        out_specs=of_queries,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=3),
        interpret=interpret,
    )(q, leaves, leaves, table, columns)
    return rearrange(out, "R K (T G) C -> R T (K G) C", G=G)


def ragged(q: RowHeads, pool: Pool, table: Int[Array, "R w"], columns: Int[Array, "R"], view: View) -> RowHeads:
    """Computes causal attention of new tokens over the pages of their rows by the kernel that JAX ships for TPUs."""
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

    num_rows, num_tokens, page = len(q), q.shape[1], pool.shape[1]
    out = ragged_paged_attention(
        rearrange(q, "R T H C -> (R T) H C"),
        pool,
        columns + num_tokens,
        table,
        jnp.arange(num_rows + 1) * num_tokens,
        jnp.array([num_rows]),
        sm_scale=view.scale,
        sliding_window=view.window or None,
        num_kv_pages_per_block=min(table.shape[1], max(1, 128 // page)),
        num_queries_per_block=8,
        vmem_limit_bytes=64 << 20,
    )
    return rearrange(out, "(R T) H C -> R T H C", T=num_tokens)


KERNELS = {"triton": triton, "ragged": ragged}
