"""The cache of the sampler's slots: which rows it holds, and how wide it is.

S sampler slots, R rows of a cache, K key heads, A columns, W columns afterwards, C channels of a head.
"""

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int, PyTree, Shaped

from models.deltanet import RecurrentState
from models.names import Array
from utils.devices.sharding import Layout, on_each

Cache = PyTree[Array]  # for each layer keys and values, or a state: see models/attention.py, models/deltanet.py


def resize_cache(layout: Layout, caches: Cache, source: Int[np.ndarray, "S"], width: int) -> Cache:
    """Fan-out, compaction and growth in one gather: slot i takes over cache row source[i], `width` columns wide.

    A single CPU copies the rows without a program: each pair of shapes would have one of its own to compile.
    """
    if layout.is_single_cpu:
        return layout.put(take_rows(jax.tree.map(np.asarray, caches), source, width, np.pad))
    return gather_cache(caches, layout.put(np.int32(source)), width)


@partial(jax.jit, static_argnums=2)
def gather_cache(caches: Cache, source: Int[Array, "S"], width: int) -> Cache:
    """Computes `resize_cache` on devices.

    `source` counts over all shards, which are equal. A slot's row is in its own shard, and the remainder is its number
    there. A gather over all devices would make caches whole on each.
    """

    def gather(_: None, state: tuple[Cache, Int[Array, "S"]]) -> Cache:
        return take_rows(*state, width, jnp.pad)

    return on_each(jax.typeof(source).sharding.mesh, gather, None, (caches, source))


def take_rows(caches: Cache, source: Int[Array, "S"], width: int, pad: Callable[..., Array]) -> Cache:
    """Returns caches of other rows; a state has rows only: the first fan-out copies a prompt's to its completions."""

    def take(x: Shaped[Array, "R ..."]) -> Shaped[Array, "S ..."]:
        return x[source % len(x)]

    def take_columns(x: Shaped[Array, "R K A C"]) -> Shaped[Array, "S K W C"]:
        x = take(x[:, :, :width])
        missing = width - x.shape[2]
        return pad(x, ((0, 0), (0, 0), (0, missing), (0, 0))) if missing else x

    return [jax.tree.map(take if isinstance(cache, RecurrentState) else take_columns, cache) for cache in caches]


def gather_rows(sources: Sequence[tuple[Cache, int]], width: int) -> Cache:
    """Returns copies of rows of caches on the host, `width` columns wide; a state has rows only."""
    caches, numbers = zip(*sources, strict=True)

    def take(*arrays: np.ndarray) -> Shaped[np.ndarray, "S ..."]:
        return np.stack([x[i] for x, i in zip(arrays, numbers, strict=True)])

    def take_columns(*arrays: np.ndarray) -> Shaped[np.ndarray, "S K W C"]:
        first = arrays[0]
        taken = np.zeros((len(arrays), first.shape[1], width, first.shape[3]), first.dtype)
        for row, x, i in zip(taken, arrays, numbers, strict=True):
            num_columns = min(width, x.shape[2])
            row[:, :num_columns] = x[i, :, :num_columns]
        return taken

    return [
        jax.tree.map(take if isinstance(layers[0], RecurrentState) else take_columns, *layers)
        for layers in zip(*caches, strict=True)
    ]
