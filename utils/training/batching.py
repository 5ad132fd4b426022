"""Shapes: few of them, so that little is compiled, and rows of similar length together, so that little is padding."""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jaxtyping import Bool, Int, Shaped

Array = jax.Array | np.ndarray  # of the shapes in signatures: a host array will do where a device array will


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def bucket(n: int) -> int:
    """The next of 32, 48, 64, 96, 128, 192, ...: at most a third of it is padding."""
    power = max(32, 1 << (n - 1).bit_length())
    return power * 3 // 4 if 32 < power and n <= power * 3 // 4 else power


def draw_sizes(largest: int) -> list[int]:
    """Returns the numbers of groups that may be sampled at once: few, since each has programs of its own."""
    return [-(-largest // divisor) for divisor in (1, 2, 4, 8)]


def power_below(n: int) -> int:
    """The last of 1, 2, 4, 8, ... up to n."""
    return 1 << n.bit_length() - 1


def fit(x: Shaped[np.ndarray, "..."], width: int) -> Shaped[np.ndarray, "..."]:
    """Cuts or pads the columns of a [B, T, ...] array; [B] stays."""
    rest = ((0, 0),) * (x.ndim - 2)
    return np.pad(x[:, :width], ((0, 0), (0, max(0, width - x.shape[1])), *rest)) if x.ndim > 1 else x


def take(tree: Any, rows: Int[np.ndarray, "B"], width: int | None = None) -> Any:
    """These rows of every array of a pytree, and so many of their columns."""
    return jax.tree.map(lambda x: x[rows] if width is None else fit(x[rows], width), tree)


def concatenate(trees: list[Any]) -> Any:
    """Pytrees of [B, ...] arrays one below the other, columns padded to the widest; one alone as it is."""
    if len(trees) == 1:
        return trees[0]
    width = max(x.shape[1] for tree in trees for x in jax.tree.leaves(tree) if x.ndim > 1)
    return jax.tree.map(lambda *parts: np.concatenate([fit(x, width) for x in parts]), *trees)


def survivors(slots: Int[np.ndarray, "S"], done: Bool[np.ndarray, "B"], shards: int) -> Int[np.ndarray, "K"]:
    """The places in `slots` (rows, cut into equal shards) to go on with: of each row that is not done, in its shard.

    All shards keep the same number, the next smaller power of two or all: some rows stand twice, and a shard where all
    are done keeps one. Whoever wants fewer asks again: so few sizes follow each other that all can be compiled ahead.
    """
    rows, places = np.unique(slots, return_index=True)
    places, size = places[~done[rows]], len(slots) // shards
    parts = [places[places // size == i] for i in range(shards)]
    half = (1 << (size - 1).bit_length()) // 2
    if max(-(-8 // shards), *map(len, parts)) > half:
        return np.arange(len(slots))
    return np.concatenate([np.resize(part if part.size else [i * size], half) for i, part in enumerate(parts)])


def pieces(
    lengths: Int[np.ndarray, "B"], tokens_per_shard: int, shards: int, most: int
) -> Iterator[tuple[np.ndarray, int, int]]:
    """Cuts rows into pieces of similar length and about `tokens_per_shard` tokens for each shard, longest first.

    Yields row numbers, and the rows and columns to pad them to. The number of rows, a power of two for each shard,
    follows from the columns (and is no more than hold `most` rows): one compiled shape per bucket of lengths.
    """
    order = np.argsort(lengths, kind="stable")
    needed = 1 << (-(-most // shards) - 1).bit_length()
    while order.size:
        width = bucket(int(lengths[order[-1]]))
        num_rows = shards * min(needed, 1 << max(1, tokens_per_shard // width).bit_length() - 1)
        yield order[-num_rows:], num_rows, width
        order = order[:-num_rows]
