"""Attention of a decode step over pages of a cache, on a GPU: the kernel that JAX ships beside two written here.

    python bench/paged_attention.py                          # elsewhere than on a GPU: a small check, interpreted
    python bench/paged_attention.py --json paged.json

The sampler does not use pages yet. Each row of a batch has one new token, and a table of the pages that hold its keys
and values. `jax` is jax.experimental.pallas.ops.gpu.paged_attention; `pages` loads whole pages by their number;
`groups` reads a prompt's pages once for the eight rows that share it, then continues with each row's own pages. The
error is the largest difference from attention in float32. Bandwidth counts the keys and values that rows have, those
of a shared prompt for each row, so that `groups` may exceed the memory's.

S rows, N prompts, H query heads, K key heads, G query heads of a key head, C channels, p tokens of a page.
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    import utils.settings.packages  # noqa: F401 (says what to install)

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Float, Int

from bench.common import Figure, environment, report, seconds_of
from models.names import Array

ROWS_OF_A_PROMPT = 8
FEWEST_ROWS = 16  # of a product on the tensor cores
COLUMNS = ("heads", "channels", "layers", "rows", "page", "kernel", "ms", "GB/s", "error")
SHAPES = ((14, 2, 64, 24), (16, 8, 128, 28))  # H, K, C and layers of Qwen2.5-0.5B and Qwen3-0.6B


class Carry(NamedTuple):
    """Attention over some of the pages: values weighted by exponentials, largest scores, sums of exponentials."""

    values: Float[Array, "... G C"]
    largest: Float[Array, "... G"]
    total: Float[Array, "... G"]


class Pages(NamedTuple):
    """Pages of rows: their numbers in the pool, and the tokens that they hold."""

    table: Int[Array, "S w"]
    lengths: Int[Array, "S"]


def over_pages(
    q: Float[Array, "S K G C"],
    pool: tuple[Float[Array, "K n p C"], Float[Array, "K n p C"]],
    pages: Pages,
    before: Carry | None = None,
    is_last: bool = True,
) -> Float[Array, "S K G C"] | Carry:
    """Returns the attention of rows over their pages and what came `before`; a Carry unless it `is_last`."""
    S, K, G, C = q.shape
    num_pages, page = pool[0].shape[1:3]
    height = max(FEWEST_ROWS, 1 << (G - 1).bit_length())
    heads = pl.ds(0, height)

    def kernel(q_ref, keys, values, table, length, *refs) -> None:
        is_head = jnp.arange(height) < G

        def load(ref: Array, padding: float) -> Array:
            if len(ref.shape) == 1:
                return plgpu.load(ref.at[heads], mask=is_head, other=padding)
            return plgpu.load(ref.at[heads, :], mask=is_head[:, None], other=padding)

        def attend(i: Array, carry: Carry) -> Carry:
            scores = plgpu.dot(query, keys[table[i]].T)
            is_token = jnp.arange(page) + i * page < length[0]
            scores = jnp.where(is_token, scores, -1e30)
            largest = jnp.maximum(carry.largest, scores.max(axis=1))
            factor, mass = jnp.exp(carry.largest - largest), jnp.exp(scores - largest[:, None])
            new = plgpu.dot(mass.astype(q.dtype), values[table[i]])
            return Carry(carry.values * factor[:, None] + new, largest, carry.total * factor + mass.sum(axis=1))

        query = load(q_ref, 0.0)
        if before is None:
            carry = Carry(jnp.zeros((height, C)), jnp.full(height, -1e30), jnp.zeros(height))
        else:
            carry = Carry(*map(load, refs[:3], (0.0, -1e30, 1.0)))
        carry = jax.lax.fori_loop(0, pl.cdiv(length[0], page), attend, carry)
        if is_last:
            result = (carry.values / carry.total[:, None]).astype(q.dtype)
            plgpu.store(refs[-1].at[heads, :], result, mask=is_head[:, None])
            return
        plgpu.store(refs[-3].at[heads, :], carry.values, mask=is_head[:, None])
        plgpu.store(refs[-2].at[heads], carry.largest, mask=is_head)
        plgpu.store(refs[-1].at[heads], carry.total, mask=is_head)

    def of_head(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, None, *shape), lambda s, k: (s, k) + (0,) * len(shape))

    of_pool = pl.BlockSpec((None, num_pages, page, C), lambda s, k: (k, 0, 0, 0))
    of_table = pl.BlockSpec((None, pages.table.shape[1]), lambda s, k: (s, 0))
    carried = [of_head(G, C), of_head(G), of_head(G)]
    sums = [jax.ShapeDtypeStruct((S, K, *more), jnp.float32) for more in ((G, C), (G,), (G,))]
    result = pl.pallas_call(
        kernel,
        grid=(S, K),
        in_specs=[of_head(G, C), of_pool, of_pool, of_table, pl.BlockSpec((1,), lambda s, k: (s,))]
        + (carried if before else []),
        out_specs=of_head(G, C) if is_last else carried,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype) if is_last else sums,
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=3),
        interpret=jax.default_backend() == "cpu",
    )(q, *pool, *pages, *(before or ()))
    return result if is_last else Carry(*result)


def over_groups(
    q: Float[Array, "S K G C"], pool: tuple[Array, Array], prompts: Pages, own: Pages
) -> Float[Array, "S K G C"]:
    """Returns the attention of rows over their prompt's pages, which are read once for a group, and their own."""
    num_rows, K, G, C = q.shape
    N = len(prompts.lengths)
    groups = jnp.swapaxes(q.reshape(N, -1, K, G, C), 1, 2).reshape(N, K, -1, C)
    carry = over_pages(groups, pool, prompts, is_last=False)

    def of_rows(x: Float[Array, "N K r ..."]) -> Float[Array, "S K G ..."]:
        x = x.reshape(N, K, -1, G, *x.shape[3:])
        return jnp.swapaxes(x, 1, 2).reshape(num_rows, K, G, *x.shape[4:])

    return over_pages(q, pool, own, Carry(*map(of_rows, carry)))


def of_jax(q: Float[Array, "S K G C"], pool: tuple[Array, Array], pages: Pages) -> Float[Array, "S K G C"]:
    """Returns what JAX's kernel computes, in blocks of 64 tokens."""
    from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention

    block = max(1, 64 // pool[0].shape[2])
    flat = q.reshape(len(q), -1, q.shape[-1])
    result = paged_attention(flat, *pool, *pages, pages_per_compute_block=block, k_splits=1, num_warps=2)
    return result.reshape(q.shape)


@partial(jax.jit, static_argnums=(0, 1))
def all_layers(
    kernel: Callable[..., Array], num_layers: int, q: Array, pool: tuple[Array, Array], tables: tuple[Pages, ...]
) -> Float[Array, "S K G C"]:
    """Computes the attention of all layers in a loop, as a decode step does."""

    def layer(_: Array, x: Float[Array, "S K G C"]) -> Float[Array, "S K G C"]:
        return (kernel(x, pool, *tables) + q).astype(q.dtype)

    return jax.lax.fori_loop(0, num_layers, layer, q)


def plain(
    q: Float[np.ndarray, "K G C"], keys: Float[np.ndarray, "K n C"], values: Float[np.ndarray, "K n C"]
) -> Float[np.ndarray, "K G C"]:
    """Returns the attention of one row in float32."""
    scores = np.einsum("kgc,knc->kgn", q, keys)
    mass = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("kgn,knc->kgc", mass / mass.sum(-1, keepdims=True), values)


def measure(
    shape: tuple[int, int, int, int], num_rows: int, page: int, repeats: int, is_gpu: bool
) -> list[list[Figure]]:
    """Returns a line of the table for each kernel: rows of 244 tokens on average, 100 of them their prompt's."""
    rng = np.random.default_rng(0)
    H, K, C, num_layers = shape
    num_prompts = num_rows // ROWS_OF_A_PROMPT
    width = 8 * -(-448 // (8 * page))
    lengths = np.int32(rng.normal(244, 75, num_rows).clip(190, 440))
    of_prompts = np.int32(rng.normal(100, 20, num_prompts).clip(40, 180))
    num_own = lengths - np.repeat(of_prompts, ROWS_OF_A_PROMPT)
    num_pages = num_rows * width
    numbers = np.int32(rng.permutation(num_pages)).reshape(num_rows, width)
    pages = Pages(numbers, lengths)
    prompts, own = Pages(numbers[::ROWS_OF_A_PROMPT], of_prompts), Pages(numbers[::-1].copy(), num_own)
    dtype = jnp.bfloat16 if is_gpu else jnp.float32
    keys = jax.random.split(jax.random.key(0), 3)
    q = jax.random.normal(keys[0], (num_rows, K, H // K, C), dtype)
    pool = tuple(jax.random.normal(key, (K, num_pages, page, C), dtype) for key in keys[1:])
    kernels = {"jax": (of_jax, (pages,))} if is_gpu else {}
    kernels |= {"pages": (over_pages, (pages,)), "groups": (over_groups, (prompts, own))}
    num_bytes = num_layers * 2 * K * C * lengths.sum() * dtype.dtype.itemsize

    lines = []
    for name, (kernel, tables) in kernels.items():
        result = np.asarray(kernel(q, pool, *tables), np.float32)
        error = 0.0
        for row in range(0, num_rows, max(1, num_rows // 8)):
            parts = [(table[row * len(table) // num_rows], n[row * len(n) // num_rows]) for table, n in tables]
            seen = [
                np.concatenate([np.asarray(x, np.float32)[:, t].reshape(K, -1, C)[:, :n] for t, n in parts], axis=1)
                for x in pool
            ]
            error = max(error, float(np.abs(result[row] - plain(np.asarray(q, np.float32)[row], *seen)).max()))
        seconds = float(np.median(seconds_of(partial(all_layers, kernel, num_layers, q, pool, tables), repeats)))
        figures = round(seconds * 1e3, 2), round(num_bytes / seconds / 1e9, 1), float(f"{error:.1g}")
        lines.append([H, C, num_layers, num_rows, page, name, *figures])
    return lines


def main(rows: list[int], repeats: int, file: str) -> None:
    is_gpu = jax.default_backend() == "gpu"
    lines = []
    for shape in SHAPES if is_gpu else [(4, 2, 32, 1)]:
        for num_rows in rows if is_gpu else [16]:
            for page in (64, 16):
                lines += measure(shape, num_rows, page, repeats if is_gpu else 1, is_gpu)
    report("Attention of a decode step over pages, all layers", COLUMNS, lines, environment(), file)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[128, 512, 1024], help="rows of a batch")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--json", default="", help="file for the figures; empty: not written")
    options = parser.parse_args()
    main(options.rows, options.repeats, options.json)
