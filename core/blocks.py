"""Blocks of slots of one CPU: their rows, the caches of these rows, and when blocks become fewer.

A block is what one call of a program computes. Blocks have one of few sizes, whatever is sampled, so that there are few
programs; all rows are at the same token. At first the rows of a group are adjacent and share the cache of their prompt.
As rows end, the others are gathered in fewer blocks, each with a copy of its prompt's cache.

B rows, S slots of a block, N prompts of a block.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Int

from models import decoder
from models.architecture import Decoder
from models.cache import Cache, gather_rows
from utils.devices.sharding import Layout

SIZES = (256, 192, 128, 96, 64, 32, 16, 8, 1)  # slots of a block
SMALL_SIZES = (16,)  # of a model whose weights stay in the cache of a core: more slots take no less time a row
SMALL_BYTES = 1 << 22  # of the weights of such a model
COST = 16  # of a step of a block, in rows: weights are read for each
CachedRow = tuple[Cache, int]  # a cache on the host, and the row in it


class Block(NamedTuple):
    """Slots that one call of a program computes, and their caches: N prompts, and a row for each slot."""

    rows: Int[np.ndarray, "S"]  # of each slot; -1: empty
    starts: Int[np.ndarray, "N"]  # first columns of the prompts
    prompts: Cache
    cache: Cache
    width: int  # columns of the cache for completions


def sizes_of(model: Decoder) -> tuple[int, ...]:
    """Returns the slots that blocks of a model may have."""
    return SMALL_SIZES if 4 * model.num_parameters < SMALL_BYTES else SIZES


def block_size(sizes: Sequence[int], num_rows: int) -> int:
    """Returns the size whose blocks compute so many rows in the least time."""
    return min(sizes, key=lambda size: cost([size] * -(-num_rows // size)))


def block_shape(sizes: Sequence[int], num_rows: int, group_size: int) -> tuple[int, int]:
    """Returns the prompts of each of the blocks that begin to sample so many rows, and the slots of a prompt."""
    size = block_size(sizes, num_rows)
    if group_size <= 2 or num_rows <= min(sizes):  # two rows gain nothing by a prompt in common
        return size, 1
    slots = -(-group_size // -(-group_size // size))
    return size // slots, slots


def cost(sizes: Sequence[int]) -> int:
    """Returns the time of a step of blocks with so many slots, in rows."""
    return sum(size + COST for size in sizes)


class Blocks:
    """The blocks of a chain's rows, a prompt's rows adjacent; `starts` are the first columns of the prompts."""

    def __init__(
        self, layout: Layout, sizes: Sequence[int], num_rows: int, starts: Int[np.ndarray, "N"], num_columns: int
    ):
        self.layout, self.sizes, self.num_columns = layout, sizes, num_columns
        self.num_rows, self.group_size = num_rows, num_rows // len(starts)
        self.starts = np.repeat(starts, self.group_size)
        self.blocks: list[Block] = []
        self.is_shared = False  # slots have a prompt in common

    def open(self, prompts: Sequence[CachedRow], width: int) -> None:
        """Gives all rows a slot, by the caches of their prompts."""
        per_block, per_prompt = block_shape(self.sizes, self.num_rows, self.group_size)
        self.is_shared = per_prompt > 1
        groups = np.arange(self.num_rows).reshape(-1, self.group_size)
        groups = np.pad(groups, ((0, 0), (0, -self.group_size % per_prompt)), constant_values=-1)
        groups = groups.reshape(-1, per_prompt)
        groups = np.pad(groups, ((0, -len(groups) % per_block), (0, 0)), constant_values=-1)
        for rows in groups.reshape(-1, per_block, per_prompt):
            sources = [prompts[max(0, row) // self.group_size] for row in rows[:, 0].tolist()]
            slots = [source for source in sources for _ in range(per_prompt)]
            self.blocks.append(self.fill(rows.ravel(), sources, slots, width))

    def fit(self, done: Bool[np.ndarray, "B"], width: int) -> None:
        """Gathers the rows that are not done in fewer blocks if that is cheaper, and widens caches to `width` columns.

        Rows that share prompts stay until it saves a quarter.
        """
        num_live = [int(is_live(block.rows, done).sum()) for block in self.blocks]
        self.blocks = [block for block, count in zip(self.blocks, num_live, strict=True) if count]
        size = block_size(self.sizes, sum(num_live))
        num_blocks = -(-sum(num_live) // size)
        today = cost([len(block.rows) for block in self.blocks]) * (0.75 if self.is_shared else 1.0)
        if cost([size] * num_blocks) < today:
            self.gather(done, size, num_blocks, width)
        self.blocks = [block if block.width >= width else self.widen(block, width) for block in self.blocks]

    def gather(self, done: Bool[np.ndarray, "B"], size: int, num_blocks: int, width: int) -> None:
        """Gathers rows in so many blocks: the fullest of this size stay, and take the rows of the others."""
        sources = {row: found for block in self.blocks for row, found in sources_of(block, done).items()}
        kept = [] if self.is_shared else [block for block in self.blocks if len(block.rows) == size]
        kept = sorted(kept, key=lambda block: is_live(block.rows, done).sum())[-num_blocks:]
        staying = {row for block in kept for row in block.rows.tolist()}
        moving = [row for row in sources if row not in staying]
        self.blocks, self.is_shared = [], False
        for block in kept or [None] * num_blocks:
            rows = np.full(size, -1) if block is None else np.where(is_live(block.rows, done), block.rows, -1)
            places = np.flatnonzero(rows < 0)[: len(moving)]
            if len(places):
                rows[places], moving = moving[: len(places)], moving[len(places) :]
                of_slots = [sources[row if row >= 0 else int(rows.max())] for row in rows.tolist()]
                block = self.fill(rows, *zip(*of_slots, strict=True), width)  # noqa: PLW2901
            self.blocks.append(block)

    def fill(
        self, rows: Int[np.ndarray, "S"], prompts: Sequence[CachedRow], slots: Sequence[CachedRow], width: int
    ) -> Block:
        """Returns a block of these rows, with copies of the caches that its prompts and its slots have."""
        firsts = rows.reshape(len(prompts), -1)[:, 0]
        starts = np.where(firsts < 0, self.num_columns, self.starts[firsts]).astype(np.int32)
        prompt_cache = gather_rows([(decoder.without_states(cache), i) for cache, i in prompts], self.num_columns)
        prompt_cache, cache = self.layout.put((prompt_cache, gather_rows(slots, width)))
        return Block(rows=rows, starts=starts, prompts=prompt_cache, cache=cache, width=width)

    def widen(self, block: Block, width: int) -> Block:
        """Returns a block with room for more tokens."""
        cache = jax.tree.map(np.asarray, block.cache)
        wider = gather_rows([(cache, slot) for slot in range(len(block.rows))], width)
        return block._replace(cache=self.layout.put(wider), width=width)


def is_live(rows: Int[np.ndarray, "S"], done: Bool[np.ndarray, "B"]) -> Bool[np.ndarray, "S"]:
    """True for slots whose row is not done."""
    return (rows >= 0) & ~done[rows]


def sources_of(block: Block, done: Bool[np.ndarray, "B"]) -> dict[int, tuple[CachedRow, CachedRow]]:
    """Returns the caches of the prompt and of the completion of each row that is not done."""
    prompts, cache = jax.tree.map(np.asarray, (block.prompts, block.cache))
    per_prompt = len(block.rows) // len(block.starts)
    slots = np.flatnonzero(is_live(block.rows, done)).tolist()
    return {int(block.rows[slot]): ((prompts, slot // per_prompt), (cache, slot)) for slot in slots}
