"""The cache of rows that one CPU samples in step: copies of rows, at another width.

S slots, K key heads, W columns, C channels of a head.
"""

from collections.abc import Sequence

import jax
import numpy as np
from jaxtyping import PyTree, Shaped

from models.deltanet import RecurrentState
from models.names import Array

Cache = PyTree[Array]  # for each layer keys and values, or a state: see models/attention.py, models/deltanet.py


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
