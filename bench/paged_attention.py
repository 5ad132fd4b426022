"""Attention of a decode step over pages of a cache, on a GPU: the sampler's kernel beside the one that JAX ships.

    python bench/paged_attention.py                          # elsewhere than on a GPU: a small check, interpreted
    python bench/paged_attention.py --json paged.json

Each row of a batch has one new token, and a table of the pages that hold its keys and values. `jax` is
jax.experimental.pallas.ops.gpu.paged_attention, `ours` is `triton` of models/pages.py. The error is the largest
difference from attention in float32. Bandwidth counts the keys and values that rows have.

S rows, H query heads, K key heads, G query heads of a key head, C channels, n pages of p tokens.
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
from jaxtyping import Float, Int

from bench.common import Figure, environment, report, seconds_of
from models.attention import View
from models.names import Array
from models.pages import triton

COLUMNS = ("heads", "channels", "layers", "rows", "page", "kernel", "ms", "GB/s", "error")
SHAPES = ((14, 2, 64, 24), (16, 8, 128, 28))  # H, K, C and layers of Qwen2.5-0.5B and Qwen3-0.6B


class Pages(NamedTuple):
    """Pages of rows: their numbers in the pool, and the tokens that they hold."""

    table: Int[Array, "S w"]
    lengths: Int[Array, "S"]


def ours(q: Float[Array, "S K G C"], pool: Float[Array, "n p 2*K C"], pages: Pages) -> Float[Array, "S K G C"]:
    """Returns what the sampler's kernel computes."""
    settings = View(1.0), jax.default_backend() == "cpu"
    out = triton(q.reshape(len(q), 1, -1, q.shape[-1]), pool, pages.table, pages.lengths - 1, *settings)
    return out.reshape(q.shape)


def of_jax(q: Float[Array, "S K G C"], pool: tuple[Array, Array], pages: Pages) -> Float[Array, "S K G C"]:
    """Returns what JAX's kernel computes, in blocks of 64 tokens."""
    from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention

    block = max(1, 64 // pool[0].shape[2])
    flat = q.reshape(len(q), -1, q.shape[-1])
    result = paged_attention(flat, *pool, *pages, pages_per_compute_block=block, k_splits=1, num_warps=2)
    return result.reshape(q.shape)


@partial(jax.jit, static_argnums=(0, 1))
def all_layers(
    kernel: Callable[..., Array], num_layers: int, q: Array, pool: Array | tuple[Array, Array], pages: Pages
) -> Float[Array, "S K G C"]:
    """Computes the attention of all layers in a loop, as a decode step does."""

    def layer(_: Array, x: Float[Array, "S K G C"]) -> Float[Array, "S K G C"]:
        return (kernel(x, pool, pages) + q).astype(q.dtype)

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
    """Returns a line of the table for each kernel: rows of 244 tokens on average."""
    rng = np.random.default_rng(0)
    H, K, C, num_layers = shape
    width = 8 * -(-448 // (8 * page))
    lengths = np.int32(rng.normal(244, 75, num_rows).clip(190, 440))
    num_pages = num_rows * width
    pages = Pages(np.int32(rng.permutation(num_pages)).reshape(num_rows, width), lengths)
    dtype = jnp.bfloat16 if is_gpu else jnp.float32
    keys = jax.random.split(jax.random.key(0), 2)
    q = jax.random.normal(keys[0], (num_rows, K, H // K, C), dtype)
    pool = jax.random.normal(keys[1], (num_pages, page, 2 * K, C), dtype)
    of_kinds = tuple(jnp.moveaxis(pool[:, :, i::2], 2, 0) for i in range(2))  # keys and values, [K, n, p, C]
    kernels = {"ours": (ours, pool)} | ({"jax": (of_jax, of_kinds)} if is_gpu else {})
    num_bytes = num_layers * 2 * K * C * lengths.sum() * dtype.dtype.itemsize

    lines = []
    for name, (kernel, of_kernel) in kernels.items():
        result = np.asarray(kernel(q, of_kernel, pages), np.float32)
        error = 0.0
        for row in range(0, num_rows, max(1, num_rows // 8)):
            columns = slice(0, lengths[row])
            seen = [np.asarray(x[:, pages.table[row]], np.float32).reshape(K, -1, C)[:, columns] for x in of_kinds]
            error = max(error, float(np.abs(result[row] - plain(np.asarray(q, np.float32)[row], *seen)).max()))
        run = partial(all_layers, kernel, num_layers, q, of_kernel, pages)
        seconds = float(np.median(seconds_of(run, repeats)))
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
