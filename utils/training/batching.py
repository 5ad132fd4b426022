"""Shapes: few of them, so that little is compiled, and rows of similar length together, so that little is padding."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeVar

import jax
import numpy as np
from jaxtyping import Bool, Int, Shaped

Tree = TypeVar("Tree")  # a pytree of [B, ...] arrays


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def bucket(n: int) -> int:
    """Returns the next of 32, 48, 64, 96, 128, 192, ...: at most a third of it is padding."""
    power = max(32, power_above(n))
    three_quarters = power * 3 // 4
    return three_quarters if 32 < power and n <= three_quarters else power


def power_above(n: int) -> int:
    """Returns the first of 1, 2, 4, 8, ... from n on."""
    return 1 << (n - 1).bit_length()


def power_below(n: int) -> int:
    """Returns the last of 1, 2, 4, 8, ... up to n."""
    return 1 << n.bit_length() - 1


def group_counts(largest: int) -> list[int]:
    """Returns the numbers of groups that may be sampled at once: few, since each has programs of its own."""
    return [-(-largest // divisor) for divisor in (1, 2, 4, 8)]


def resize_columns(x: Shaped[np.ndarray, "..."], width: int) -> Shaped[np.ndarray, "..."]:
    """Returns a [B, T, ...] array cut or padded to so many columns; a [B] array as it is."""
    if x.ndim == 1:
        return x
    missing = max(0, width - x.shape[1])
    padding = [(0, 0)] * x.ndim
    padding[1] = (0, missing)
    return np.pad(x[:, :width], padding)


def select_rows(tree: Tree, rows: Int[np.ndarray, "B"], width: int | None = None) -> Tree:
    """Returns these rows of every array of a pytree, resized to `width` columns if that is given."""
    if width is None:
        return jax.tree.map(lambda x: x[rows], tree)
    return jax.tree.map(lambda x: resize_columns(x[rows], width), tree)


def concatenate(trees: Sequence[Tree]) -> Tree:
    """Returns pytrees of [B, ...] arrays one below the other, columns padded to the widest; a single one as it is."""
    if len(trees) == 1:
        return trees[0]
    widths = [x.shape[1] for tree in trees for x in jax.tree.leaves(tree) if x.ndim > 1]

    def join(*arrays: np.ndarray) -> np.ndarray:
        return np.concatenate([resize_columns(x, max(widths)) for x in arrays])

    return jax.tree.map(join, *trees)


def live_slots(slots: Int[np.ndarray, "S"], done: Bool[np.ndarray, "B"], shards: int) -> Int[np.ndarray, "K"] | None:
    """Returns the slots to continue with after compaction, -1 for an empty one; None while too many rows are live.

    `slots` holds the row of each sampler slot (-1: empty), cut into equal shards; a row stays in its shard. All shards
    keep half of their slots, rounded up to a power of two, and at least 8 stay in all: few sizes follow each other, so
    that all of them can be compiled ahead.
    """
    size = len(slots) // shards
    is_live = slots >= 0
    is_live[is_live] = ~done[slots[is_live]]
    places = [shard * size + np.flatnonzero(live) for shard, live in enumerate(is_live.reshape(shards, size))]
    half = power_above(size) // 2
    if half < max(-(-8 // shards), *map(len, places)):
        return None
    kept = np.full((shards, half), -1)
    for row, shard_places in zip(kept, places, strict=True):
        row[: len(shard_places)] = shard_places
    return kept.ravel()


class Microbatch(NamedTuple):
    """Rows of similar length, and the shape that they are padded to."""

    rows: Int[np.ndarray, "R"]
    num_rows: int
    width: int


def plan_microbatches(
    lengths: Int[np.ndarray, "B"], tokens_per_shard: int, shards: int, max_rows: int
) -> Iterator[Microbatch]:
    """Cuts rows into micro-batches of similar length and about `tokens_per_shard` tokens for each shard, longest first.

    The number of rows, a power of two for each shard, follows from the columns (and is no more than hold `max_rows`
    rows): one compiled shape per bucket of lengths.
    """
    order = np.argsort(lengths, kind="stable")
    enough = power_above(-(-max_rows // shards))
    while order.size:
        longest = int(lengths[order[-1]])
        width = bucket(longest)
        fitting = power_below(max(1, tokens_per_shard // width))
        num_rows = shards * min(enough, fitting)
        yield Microbatch(order[-num_rows:], num_rows, width)
        order = order[:-num_rows]
