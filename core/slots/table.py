"""Which slots and pages of the cache rows have, and how many there are of each.

To change when a row is admitted: `PageTable.admit` and `chances_to_go_on`.

B rows, R some of them, w pages of the longest row.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int, Shaped

from models.architecture import Decoder
from models.pages import NOWHERE, Pages, Paging
from utils.batching import power_above, round_up
from utils.devices.sharding import Layout
from utils.settings.errors import UserError

PAGE, PAGE_ON_CPU = 64, 8  # tokens
LANES_ON_CPU = (8, 64)
LANES_OF_SMALL = (16,)  # of a model whose weights stay in the cache of a core: more lanes take no less time a row
SMALL_BYTES = 1 << 22  # of the weights of such a model
LAUNCH, LAUNCH_ON_CPU = 1 << 20, 16  # time of a step of a program beside that of its lanes, in lanes: it reads weights
CHUNKS = ((64, 64), (4, 1024))  # rows and tokens of a prefill, over all devices that share rows
CHUNKS_ON_CPU = ((32, 16), (4, 128))
AT_ONCE = 8  # share of the slots that are free before rows take them, as a divisor
FULL = 0.95  # share of the pages in use, as expected; the rest is a reserve for chance
BINS = 64  # ranges of lengths that are counted
PRIOR_ROWS = 8  # rows of all lengths that count as ended before the first row ends


class PageSizes(NamedTuple):
    """Sizes of a cache in pages and of the programs that read it, over all shards."""

    page: int  # tokens
    width: int  # pages of the longest row
    num_pages: int
    num_slots: int
    steps: int  # steps of a segment
    lanes: list[int]  # rows that a decode program computes, the fewest first
    chunks: list[tuple[int, int]]  # rows and tokens of prefills
    widths: list[int]  # pages of a row that programs read, the fewest first
    launch: int  # time of a program beside that of its lanes, in lanes

    def num_lanes(self, num_rows: int) -> int:
        """Returns the lanes of the programs that compute so many rows in the least time."""
        return min(self.lanes, key=lambda lanes: -(-num_rows // lanes) * (lanes + self.launch))

    def read_width(self, num_tokens: int) -> int:
        """Returns how many pages of each row a program reads, so that they hold these tokens."""
        return next(width for width in self.widths if width * self.page >= num_tokens or width == self.width)


def page_sizes(
    paging: Paging,
    model: Decoder,
    layout: Layout,
    num_rows: int,
    longest_prompt: int,
    limit: int,
    tokens_per_turn: int,
    segment: int,
) -> PageSizes:
    """Returns the sizes for a call of so many rows, of which a small model on a CPU samples parts in threads.

    `limit`: tokens of a completion; `segment`: most steps of one. Raises: UserError if not even one row fits.
    """
    num_shards, num_parts = layout.row_shards, layout.num_chains(model.num_parameters)
    page, longest = page_tokens(paging.page, layout), longest_prompt + limit
    width = -(-longest // page)
    num_slots = round_up(-(-paging.num_slots // num_parts) or power_above(num_rows), num_shards)
    num_pages = (paging.num_pages or num_slots * width * num_parts) // num_shards
    if num_pages < width:
        raise UserError(
            f"the cache has pages for {num_pages * page:,} tokens on each device, and a row may have {longest:,}: "
            "lower --num_generation_tokens or --prompt_length"
        )
    lanes, widths = sorted({round_up(-(-num_slots * n // 4), num_shards) for n in (1, 2, 3, 4)}), [width]
    if layout.is_cpu:
        sizes = LANES_OF_SMALL if 4 * model.num_parameters < SMALL_BYTES else LANES_ON_CPU
        lanes = [size * num_shards for size in sizes if size * num_shards <= num_slots] or [num_slots]
        widths = [part for n in (4, 2) if (part := -(-width // n)) * page >= 64] + [width]
    chunks, most_tokens = (CHUNKS_ON_CPU, 2 * (longest_prompt or limit)) if layout.is_cpu else (CHUNKS, longest)
    return PageSizes(
        *(page, width, max(width, num_pages // num_parts) * num_shards, num_slots),
        # A row that ends in a segment waits for its end, and for the end of the next one if that is launched already.
        steps=min(segment, tokens_per_turn or max(16 if layout.is_cpu else 8, limit // 64)),
        lanes=lanes,
        chunks=[(round_up(rows, num_shards), n) for rows, n in chunks if n < most_tokens or n == chunks[0][1]],
        widths=widths,
        launch=LAUNCH_ON_CPU if layout.is_cpu else LAUNCH,
    )


def page_tokens(page_size: int, layout: Layout) -> int:
    """Returns the tokens of a page; below 1: chosen for the hardware."""
    return page_size if page_size > 0 else PAGE_ON_CPU if layout.is_cpu else PAGE


def chances_to_go_on(
    ended: Sequence[int], num_drawn: Int[np.ndarray, "B"], limit: int
) -> tuple[Float[np.ndarray, "B n"], Float[np.ndarray, "n"]]:
    """Returns the chances that rows of `num_drawn` tokens go on after numbers of more tokens, and these numbers.

    The chances are the product-limit estimate of Kaplan and Meier (1958). It uses the lengths of rows that have
    `ended`, and the tokens of rows that go on.
    """
    num_bins = min(limit, BINS)
    width = limit / num_bins

    def bins_of(lengths: Sequence[int]) -> Int[np.ndarray, "m"]:
        return np.minimum(np.asarray(lengths, int) / width, num_bins - 1).astype(int)

    bins = bins_of(num_drawn)
    num_ended = np.bincount(bins_of(ended), minlength=num_bins) + PRIOR_ROWS / num_bins
    num_left = num_ended + np.bincount(bins[num_drawn > 0], minlength=num_bins)
    num_at_risk = np.cumsum(num_left[::-1])[::-1]
    survival = np.cumprod(1 - num_ended / num_at_risk)
    survival = np.concatenate([[1.0], survival, np.zeros(num_bins)])  # at the beginning of each bin
    later = bins[:, None] + np.arange(num_bins)
    return survival[later] / np.maximum(survival[bins], 1e-9)[:, None], np.arange(num_bins) * width


def expected_pages(
    table: "PageTable",
    lengths: Int[np.ndarray, "B"],
    num_drawn: Int[np.ndarray, "B"],
    steps: int,
    limit: int,
    ended: Sequence[int],
) -> Float[np.ndarray, "B n"]:
    """Returns the pages that each row is expected to need after its prompt, after numbers of more tokens.

    `lengths`: of prompts, without the last token; `ended`: numbers of tokens of rows that have ended.
    """
    chances, num_more = chances_to_go_on(ended, num_drawn, limit)
    num_tokens = np.minimum(num_drawn[:, None] + num_more + steps, limit)
    return chances * (-(-(lengths[:, None] + num_tokens) // table.page) - table.num_shared[:, None])


@dataclass
class SharedPages:
    """The pages that a prompt fills, and the number of rows that hold them."""

    pages: list[int]
    num_rows: int = 0


@dataclass
class Shard:
    """Free pages and slots of a shard of the mesh, and its rows."""

    pages: list[int]
    slots: list[int]
    waiting: list[int]  # rows without a slot, the next one first
    resident: list[int] = field(default_factory=list)  # rows with a slot, the oldest first
    prompts: dict[int, SharedPages] = field(default_factory=dict)

    def take(self, num_pages: int) -> list[int]:
        """Returns so many free pages, which are no longer free."""
        return [self.pages.pop() for _ in range(num_pages)]


class PageTable:
    """Which slots and pages rows have; each row belongs to a shard, whose slots and pages are numbered on their own."""

    def __init__(
        self,
        num_shards: int,
        num_slots: int,
        num_pages: int,
        width: int,
        page: int,
        prompts: Int[np.ndarray, "B"],
        prompt_lengths: Int[np.ndarray, "B"],
        shares: bool = True,
    ):
        """`num_slots`, `num_pages`: of a shard; `prompts`: numbers, equal for rows with the same prompt.

        `shares`: such rows share the pages that it fills. A state of linear attention is a row's own, with its prompt.
        """
        self.num_slots, self.num_all_pages, self.page = num_slots, num_pages, page
        self.prompts, self.shares = prompts, shares
        self.num_shared = self.num_full(prompt_lengths)
        self.was_idle = np.zeros(len(prompts), bool)  # at the last call of `rows_that_may_yield`
        self.table = np.full((num_shards * num_slots, width), NOWHERE, np.int32)
        self.slots = np.full(len(prompts), -1)  # slot of each row, numbered over all shards; -1: none
        self.num_pages = np.zeros(len(prompts), int)  # pages of each row
        parts = np.array_split(np.arange(len(prompts)), num_shards)
        self.shard_of_row = np.repeat(np.arange(num_shards), list(map(len, parts)))
        self.shards = []
        for rows in parts:
            pages, slots = list(range(num_pages))[::-1], list(range(num_slots))[::-1]
            self.shards.append(Shard(pages=pages, slots=slots, waiting=rows.tolist()))

    def num_full(self, prompt_lengths: Int[np.ndarray, "*R"]) -> Int[np.ndarray, "*R"]:
        """Returns the pages that prompts fill and rows share; the last token of a prompt is computed by each row."""
        return np.maximum(0, prompt_lengths - 1) // self.page * self.shares

    def begin(self, row: int, same: int | None, prompt_length: int) -> None:
        """Takes a row out of its slot, to wait with another prompt: that of the row `same`, or one of its own."""
        if self.slots[row] >= 0:
            self.leave(row)
            self.shards[self.shard_of_row[row]].waiting.append(row)
        self.prompts[row] = self.prompts.max() + 1 if same is None else self.prompts[same]
        self.num_shared[row] = self.num_full(np.array(prompt_length))

    def rows_that_may_yield(
        self, is_sampling: Bool[np.ndarray, "B"], is_idle: Bool[np.ndarray, "B"]
    ) -> Bool[np.ndarray, "B"]:
        """Returns idle rows that were idle at the last call, too, or whose shard samples nothing."""
        was_idle, self.was_idle = self.was_idle, is_idle
        is_sampled = (self.slots >= 0) & is_sampling
        return is_idle & (was_idle | ~np.isin(self.shard_of_row, self.shard_of_row[is_sampled]))

    def reserve(self, needed: Int[np.ndarray, "B"]) -> list[int]:
        """Gives resident rows the pages that they need; if pages run out, returns the youngest rows, put aside."""
        aside = []
        for shard in self.shards:
            for row in [row for row in shard.resident if needed[row] > self.num_pages[row]]:
                while self.slots[row] >= 0 and len(shard.pages) < needed[row] - self.num_pages[row]:
                    aside.append(shard.resident[-1])
                    self.leave(aside[-1])
                    shard.waiting.insert(0, aside[-1])
                if self.slots[row] >= 0:
                    self.extend(shard, row, int(needed[row]))
        return aside

    def may_admit(self, shard: Shard, may_yield: Bool[np.ndarray, "B"]) -> bool:
        """True if rows wait, and enough slots are free, or held by idle rows, to make a prefill worth its time."""
        fewest = min(self.num_slots // AT_ONCE, len(shard.waiting))
        num_idle = int(may_yield[shard.resident].sum())
        return bool(shard.waiting) and (num_idle == len(shard.resident) or len(shard.slots) + num_idle >= fewest)

    def admit(
        self,
        may_draw: Bool[np.ndarray, "B"],
        may_yield: Bool[np.ndarray, "B"],
        needed: Int[np.ndarray, "B"],
        expected: Float[np.ndarray, "B n"],
    ) -> tuple[list[int], list[int], list[int]]:
        """Gives slots to rows that wait, while there are enough pages for the numbers that rows are `expected` to need.

        It admits several at once, since a prefill of few rows takes as long as one of many. Idle rows that `may_yield`
        are put aside if a row that wants to be sampled would have to wait for them. Returns the admitted rows, the
        first row of each prompt whose pages have to be computed, and the rows put aside.
        """
        admitted, firsts, aside = [], [], []
        for shard in [shard for shard in self.shards if self.may_admit(shard, may_yield)]:
            idle = [row for row in shard.resident if may_yield[row]]
            in_use = self.pages_in_use(shard, expected)
            for row in [row for row in shard.waiting if may_draw[row]]:
                while not (has_room := self.has_room(shard, row, needed, in_use + expected[row])) and idle:
                    aside.append(idle.pop(0))
                    self.leave(aside[-1])
                    shard.waiting.append(aside[-1])
                    in_use = self.pages_in_use(shard, expected)
                if not has_room:
                    break
                in_use = in_use + expected[row] + self.num_missing(shard, row)
                if self.prompts[row] not in shard.prompts:
                    shard.prompts[self.prompts[row]] = SharedPages(shard.take(self.num_shared[row]))
                    firsts += [row] if self.num_shared[row] else []
                self.enter(shard, row, int(needed[row]))
                admitted.append(row)
        return admitted, firsts, aside

    def pages_in_use(self, shard: Shard, expected: Float[np.ndarray, "B n"]) -> Float[np.ndarray, "n"]:
        """Returns the pages that the prompts and the resident rows of a shard are expected to need."""
        return expected[shard.resident].sum(axis=0) + sum(len(shared.pages) for shared in shard.prompts.values())

    def num_missing(self, shard: Shard, row: int) -> int:
        """Returns the pages of a row's prompt that the shard does not hold."""
        return 0 if self.prompts[row] in shard.prompts else int(self.num_shared[row])

    def has_room(self, shard: Shard, row: int, needed: Int[np.ndarray, "B"], in_use: Float[np.ndarray, "n"]) -> bool:
        """True if a shard has a slot for a row, and pages: those that it needs now, and those `in_use` later."""
        num_missing = self.num_missing(shard, row)
        is_expected = (in_use + num_missing).max() <= FULL * self.num_all_pages or not shard.resident
        num_needed = needed[row] - self.num_shared[row] + num_missing
        return bool(shard.slots) and is_expected and len(shard.pages) >= num_needed

    def enter(self, shard: Shard, row: int, num_pages: int) -> None:
        """Gives a row a slot, the pages of its prompt, and pages of its own."""
        shared = shard.prompts[self.prompts[row]]
        shared.num_rows += 1
        slot = self.slots[row] = self.shard_of_row[row] * self.num_slots + shard.slots.pop()
        self.num_pages[row] = len(shared.pages)
        self.table[slot, : len(shared.pages)] = shared.pages
        self.extend(shard, row, num_pages)
        shard.waiting.remove(row)
        shard.resident.append(row)

    def extend(self, shard: Shard, row: int, num_pages: int) -> None:
        """Gets a row pages until it has so many."""
        new = slice(self.num_pages[row], num_pages)
        self.table[self.slots[row], new] = shard.take(num_pages - self.num_pages[row])
        self.num_pages[row] = num_pages

    def leave(self, row: int) -> None:
        """Frees the slot and the pages of a row."""
        shard, slot = self.shards[self.shard_of_row[row]], self.slots[row]
        shard.pages += self.table[slot, self.num_shared[row] : self.num_pages[row]].tolist()
        shared = shard.prompts[self.prompts[row]]
        shared.num_rows -= 1
        if not shared.num_rows:
            shard.pages += shard.prompts.pop(self.prompts[row]).pages
        shard.slots.append(int(slot % self.num_slots))
        shard.resident.remove(row)
        self.table[slot] = NOWHERE
        self.slots[row], self.num_pages[row] = -1, 0

    def drop(self, row: int) -> None:
        """Takes a row out for good."""
        if self.slots[row] >= 0:
            self.leave(row)
        else:
            self.shards[self.shard_of_row[row]].waiting.remove(row)

    def ranks(self, rows: Int[np.ndarray, "R"]) -> Int[np.ndarray, "R"]:
        """Returns the number of each row among those of its shard."""
        shards = self.shard_of_row[rows]
        order = np.argsort(shards, kind="stable")
        ranks = np.empty(len(rows), int)
        ranks[order] = np.arange(len(rows)) - np.searchsorted(shards[order], shards[order])
        return ranks

    def lanes(self, rows: Int[np.ndarray, "R"], num_lanes: int) -> Int[np.ndarray, "R"]:
        """Returns places for rows among `num_lanes`, of which each shard has an equal part."""
        return self.ranks(rows) + self.shard_of_row[rows] * (num_lanes // len(self.shards))

    def pages(
        self,
        lanes: Int[np.ndarray, "R"],
        num_lanes: int,
        table: Int[np.ndarray, "R w"],
        slots: Int[np.ndarray, "R"],
        columns: Int[np.ndarray, "R"],
        counts: Int[np.ndarray, "R"],
    ) -> Pages:
        """Returns the pages of rows in their lanes; other lanes have no pages."""
        return Pages(
            table=in_lanes(np.int32(table), lanes, num_lanes, NOWHERE),
            slots=in_lanes(np.int32(slots), lanes, num_lanes, NOWHERE),
            columns=in_lanes(np.int32(columns), lanes, num_lanes),
            counts=in_lanes(np.int32(counts), lanes, num_lanes),
        )


def in_lanes(x: Shaped[np.ndarray, "R ..."], lanes: Int[np.ndarray, "R"], num_lanes: int, empty: int = 0) -> np.ndarray:
    """Returns the values of rows in their lanes, and `empty` in the other lanes."""
    filled = np.full((num_lanes, *x.shape[1:]), empty, x.dtype)
    filled[lanes] = x
    return filled
