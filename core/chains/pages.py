"""Samples completions over pages of a cache: rows take slots and leave them, in one queue, with few programs.

A sample depends on its row's key, number and tokens alone. So rows may be admitted in any order, put aside if pages run
out, and computed again from their own tokens: no token changes. `PagedChain.prefill` computes all that is not in a
row's cache: prompts, observations, forced answers, and rows that were put aside.

To change when a row is admitted: `PageTable.admit` and `chances_to_go_on`. To change how tokens are sampled:
core/sampler.py.

B rows, A columns behind the prompt, S lanes of a decode program, s steps of a segment, R rows and T tokens of a
prefill, w pages of the longest row, p tokens of a page.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Event
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int, Int16, Shaped, UInt32

from core.records import Completions
from core.sampler import ChainJob, Drawn, SampledTokens, Sampler, Segment, draw_tokens
from models import decoder
from models.architecture import Decoder
from models.distribution import Distribution
from models.names import Array, Weights
from models.pages import (
    NOWHERE,
    Pages,
    Paging,
    State,
    begin,
    end,
    new_state,
    page_attention,
    paged_kernel,
    read_slots,
    write_slots,
)
from utils.batching import few_widths, power_above, round_up
from utils.devices.threads import LAUNCHING
from utils.settings.errors import UserError

PAGE, PAGE_ON_CPU = 64, 16  # tokens
FEWEST_LANES = 8
AT_ONCE = 8  # share of the slots that are free before rows take them, as a divisor
FULL = 0.95  # share of the pages in use, as expected; the rest is a reserve for chance
BINS = 64  # ranges of lengths that are counted
PRIOR_ROWS = 8  # rows of all lengths that count as ended before the first row ends
CHUNKS = ((64, 64), (4, 1024))  # rows and tokens of a prefill, over all devices that share rows
CHUNKS_ON_CPU = ((32, 16), (8, 64), (2, 256))


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
        prompts: Int[np.ndarray, "B"],
        num_shared: Int[np.ndarray, "B"],
    ):
        """`num_slots`, `num_pages`: of a shard; `num_shared`: pages that the prompt of each row fills."""
        self.num_slots, self.num_all_pages = num_slots, num_pages
        self.prompts, self.num_shared = prompts, num_shared
        self.table = np.full((num_shards * num_slots, width), NOWHERE, np.int32)
        self.slots = np.full(len(prompts), -1)  # slot of each row, numbered over all shards; -1: none
        self.num_pages = np.zeros(len(prompts), int)  # pages of each row
        parts = np.array_split(np.arange(len(prompts)), num_shards)
        self.shard_of_row = np.repeat(np.arange(num_shards), list(map(len, parts)))
        self.shards = []
        for rows in parts:
            pages, slots = list(range(num_pages))[::-1], list(range(num_slots))[::-1]
            self.shards.append(Shard(pages=pages, slots=slots, waiting=rows.tolist()))

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
        """True if rows wait, and so many slots can be had that a prefill of their rows is worth its time."""
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

    def lanes(self, rows: Int[np.ndarray, "R"], num_lanes: int) -> Int[np.ndarray, "R"]:
        """Returns places for rows among `num_lanes`, of which each shard has an equal part."""
        shards = self.shard_of_row[rows]
        order = np.argsort(shards, kind="stable")
        places = np.empty(len(rows), int)
        firsts = np.searchsorted(shards[order], shards[order])
        places[order] = np.arange(len(rows)) - firsts
        return places + shards * (num_lanes // len(self.shards))

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


class PrefillJob(NamedTuple):
    """Tokens whose cache is to be computed, of a row, or of the prompt that it shares."""

    row: int
    slot: int  # number in the row's shard
    table: Int[np.ndarray, "..."]
    column: int  # column of the first token
    tokens: Sequence[int]
    routes: Int16[np.ndarray, "n L k"] | None  # experts by which they were computed; 0 if unknown

    def cut(self, num_tokens: int) -> "tuple[PrefillJob, PrefillJob]":
        """Returns the first tokens, and the others."""
        before, behind = slice(num_tokens), slice(num_tokens, None)
        routes = (None, None) if self.routes is None else (self.routes[before], self.routes[behind])
        first = self._replace(tokens=self.tokens[before], routes=routes[0])
        rest = self._replace(column=self.column + num_tokens, tokens=self.tokens[behind], routes=routes[1])
        return first, rest


class LaunchedSegment(NamedTuple):
    """A segment whose results are not read yet: its rows, their lanes, first tokens, and tokens that count."""

    rows: Int[np.ndarray, "R"]
    lanes: Int[np.ndarray, "R"]
    starts: Int[np.ndarray, "R"]
    counts: Int[np.ndarray, "R"]
    versions: Int[np.ndarray, "R"]
    columns: SampledTokens
    has_prefill: bool  # the cache of rows was computed before it


class PagedChain:
    """The completions of some prompts while they are sampled over pages; tokens and tables are on the host."""

    def __init__(self, sampler: Sampler, weights: Weights, job: ChainJob):
        model, layout, num_rows = sampler.model, sampler.layout, len(job.keys)
        self.sampler, self.model, self.layout, self.weights = sampler, model, layout, weights
        self.keys, self.row_offset = job.keys, job.row_offset
        self.drawn = Drawn(sampler, job.prompts, num_rows)
        self.prompt_lengths = self.drawn.prompt_lengths
        self.num_tokens = np.zeros(num_rows, int)  # behind the prompt
        self.num_launched = np.zeros(num_rows, int)  # tokens, with those of segments whose results are not read yet
        self.num_cached = np.zeros(num_rows, int)  # tokens of prompt and completion in the cache
        self.num_lost = np.zeros(num_rows, int)  # cached tokens, when the row was put aside
        self.num_recomputed = np.zeros(num_rows, int)
        self.versions = np.zeros(num_rows, int)  # results of segments for an earlier version are ignored
        self.turn_starts = np.zeros(num_rows, int)
        self.is_drawing = np.ones(num_rows, bool)
        self.is_over = np.zeros(num_rows, bool)
        self.is_idle = np.zeros(num_rows, bool)  # waits for what follows its turn, when the last segment was launched
        self.was_forced = np.full(num_rows, not sampler.force_answer_at)
        self.has_prefill = False  # before the next segment

        longest_prompt = int(self.prompt_lengths.max())
        if not sampler.paging.adapts and sampler.max_prompt_tokens < model.num_positions:
            longest_prompt = sampler.max_prompt_tokens
        sizes = self.sizes = page_sizes(sampler, num_rows, longest_prompt)
        num_shards = layout.row_shards
        # A state of linear attention is a row's own: its prompt is computed for each row.
        num_shared = np.where(model.delta is None, (self.prompt_lengths - 1) // sizes.page, 0)
        self.table = PageTable(
            num_shards=num_shards,
            num_slots=sizes.num_slots // num_shards,
            num_pages=sizes.num_pages // num_shards,
            width=sizes.width,
            prompts=self.drawn.owner,
            num_shared=num_shared,
        )
        self.state = new_state(model, layout, sizes.num_pages, sizes.page, sizes.num_slots)
        self.last_tokens = layout.put(np.zeros(sizes.num_slots, np.int32))
        # On a CPU, tokens after the end of a turn would cost time. A DeltaNet state cannot go back to that end.
        self.is_ahead = not (sampler.paging.adapts or model.delta)

    def run(self, cancelled: Event) -> Completions:
        """Samples segments until all rows are over, and returns the completions."""
        launched = None
        while not (self.is_over.all() or cancelled.is_set()):
            with LAUNCHING:
                self.prefill()
                previous, launched = launched, self.launch()
            if not self.is_ahead:
                previous, launched = launched, None
            if previous:
                self.read(previous)
                self.report()
            self.between_segments(is_idle=not (previous or launched))
        self.drawn.lengths = self.num_tokens
        return replace(self.drawn.completions(), num_recomputed=self.num_recomputed)

    # Methods that a chain with turns replaces: see core/chains/turns.py.

    def turn_limits(self) -> Int[np.ndarray, "B"]:
        """Returns the number of tokens of each row at which its turn ends."""
        limit = self.sampler.max_new_tokens
        return np.where(self.was_forced, limit, limit - self.sampler.force_answer_at)

    def end_turn(self, row: int, is_cut_off: bool) -> None:
        """Takes a row whose turn has ended, with a stop or at its limit."""
        sampler, num_tokens = self.sampler, int(self.num_tokens[row])
        if not is_cut_off or self.was_forced[row]:
            self.finish(row, is_finished=not is_cut_off)
            return
        self.was_forced[row] = True
        tokens = sampler.forced_answer(self.drawn.tokens[row, :num_tokens])[: sampler.max_new_tokens - num_tokens]
        self.append(row, tokens)
        stop = sampler.completion_end(self.drawn.tokens[row], num_tokens, num_tokens + len(tokens))
        if stop or num_tokens + len(tokens) == sampler.max_new_tokens:
            self.num_tokens[row] = stop or sampler.max_new_tokens
            self.finish(row, is_finished=stop is not None)

    def between_segments(self, is_idle: bool) -> None:
        """Is called after each segment; `is_idle`: no row samples."""

    # Pages

    def prefill(self) -> None:
        """Gives rows slots and pages, and computes the tokens missing in their cache, except the last one."""
        paging, lengths = self.sampler.paging, self.prompt_lengths - 1
        page = self.sizes.page
        needed = -(-(lengths + np.minimum(self.num_launched + self.sizes.steps, self.turn_limits())) // page)
        self.lose(self.table.reserve(np.where(self.is_drawing, needed, 0)))
        is_read = self.num_launched == self.num_tokens
        jobs, may_yield = [], self.rows_that_may_yield()
        if any(self.table.may_admit(shard, may_yield) for shard in self.table.shards):
            limit, num_drawn = self.sampler.max_new_tokens, np.where(self.is_over, 0, self.num_launched)
            chances, num_more = chances_to_go_on(paging.ended, num_drawn, limit)
            num_tokens = np.minimum(num_drawn[:, None] + num_more + self.sizes.steps, limit)
            expected = chances * (-(-(lengths[:, None] + num_tokens) // page) - self.table.num_shared[:, None])
            admitted, firsts, aside = self.table.admit(self.is_drawing & is_read, may_yield, needed, expected)
            self.lose(aside)
            for row in admitted:
                self.num_cached[row] = self.table.num_shared[row] * page
                self.num_recomputed[row] += max(0, self.num_lost[row] - self.num_cached[row])
            jobs = [self.make_job(row, 0, self.table.num_shared[row] * page, is_shared=True) for row in firsts]
        if paged_kernel(self.model) == "plain":  # a program reads copies of pages from before its own results
            self.compute(jobs)
            jobs = []
        num_known = lengths + self.num_tokens
        is_behind = (self.table.slots >= 0) & self.is_drawing & is_read & (self.num_cached < num_known)
        rows = np.flatnonzero(is_behind).tolist()
        self.compute(jobs + [self.make_job(row, self.num_cached[row], num_known[row]) for row in rows])
        self.num_cached[rows] = num_known[rows]
        self.has_prefill = bool(len(rows))

    def lose(self, rows: Sequence[int]) -> None:
        """Forgets the cache of rows that were put aside: it is computed again from their tokens."""
        self.num_lost[rows], self.num_cached[rows] = self.num_cached[rows], 0

    def rows_that_may_yield(self) -> Bool[np.ndarray, "B"]:
        """Returns rows that wait for what follows their turn: since the segment before, or while nothing is sampled."""
        was_idle, self.is_idle = self.is_idle, ~(self.is_drawing | self.is_over)
        shards, is_sampled = self.table.shard_of_row, (self.table.slots >= 0) & self.is_drawing
        return self.is_idle & (was_idle | ~np.isin(shards, shards[is_sampled]))

    def make_job(self, row: int, start: int, stop: int, is_shared: bool = False) -> PrefillJob:
        """Returns the computation of some columns of a row."""
        prompt = self.drawn.prompts[self.drawn.owner[row]]
        first = len(prompt)
        tokens = [*prompt[start:stop], *self.drawn.tokens[row, max(0, start - first) : max(0, stop - first)].tolist()]
        slot, routes = self.table.slots[row], None
        if self.model.num_experts:  # experts of a column are recorded with the token that was sampled behind it
            own = self.drawn.routes[row, max(0, start - first + 1) : max(0, stop - first + 1)]
            routes = np.pad(own, ((stop - start - len(own), 0), (0, 0), (0, 0)))
        table = self.table.table[slot].copy()
        table[-(-stop // self.sizes.page) :] = NOWHERE  # padding is written nowhere
        return PrefillJob(
            row=row,
            slot=NOWHERE if is_shared else slot % self.table.num_slots,
            table=table,
            column=start,
            tokens=tokens,
            routes=routes,
        )

    def compute(self, jobs: list[PrefillJob]) -> None:
        """Computes the cache of tokens of several rows at once, in few shapes; shared prompts first."""
        num_shards = len(self.table.shards)
        while jobs:
            jobs.sort(key=lambda job: (job.slot != NOWHERE, -len(job.tokens)))
            longest = max(len(job.tokens) for job in jobs)
            num_rows, num_tokens = next((c for c in self.sizes.chunks if c[1] >= longest), self.sizes.chunks[-1])
            rows_left, now, later = np.full(num_shards, num_rows // num_shards), [], []
            goes_on = False  # a prompt, before whose end no row can be computed that shares it
            for job in jobs:
                shard = self.table.shard_of_row[job.row]
                if not rows_left[shard] or goes_on and job.slot != NOWHERE:
                    later.append(job)
                    continue
                rows_left[shard] -= 1
                first, rest = job.cut(num_tokens)
                now.append(first)
                later += [rest] if rest.tokens else []
                goes_on |= bool(rest.tokens) and job.slot == NOWHERE
            self.compute_chunk(now, num_rows, num_tokens)
            jobs = later

    def compute_chunk(self, jobs: list[PrefillJob], num_rows: int, num_tokens: int) -> None:
        """Computes the cache of at most `num_rows` jobs of at most `num_tokens` tokens each."""
        rows, columns = np.array([job.row for job in jobs]), np.array([job.column for job in jobs])
        slots, counts = np.array([job.slot for job in jobs]), np.array([len(job.tokens) for job in jobs])
        lanes = self.table.lanes(rows, num_rows)
        table = np.array([job.table for job in jobs])[:, : self.read_width(int((columns + counts).max()))]
        pages = self.table.pages(lanes, num_rows, table, slots, columns, counts)
        tokens = np.zeros((num_rows, num_tokens), np.int32)
        routes = np.zeros((num_rows, num_tokens, *self.model.route_shape), np.int16)
        for lane, job in zip(lanes, jobs, strict=True):
            tokens[lane, : len(job.tokens)] = job.tokens
            if job.routes is not None:
                routes[lane, : len(job.tokens)] = job.routes
        weights = self.weights_of(in_lanes(rows, lanes, num_rows))
        pages, tokens, routes = self.layout.put((pages, tokens, routes if self.model.num_experts else None))
        self.state = prefill_pages(self.model, weights, self.state, pages, tokens, routes)

    def read_width(self, num_tokens: int) -> int:
        """Returns how many pages of each row a program reads: all, or one of few numbers that hold these tokens."""
        width = self.table.table.shape[1]
        if not self.sampler.paging.adapts:
            return width
        page = self.sizes.page
        return min(width, -(-few_widths(num_tokens, width * page) // page))

    def weights_of(self, rows: Int[np.ndarray, "S"]) -> Weights:
        """Returns the weights that these rows are sampled with."""
        return self.sampler.weights_of(self.weights, self.row_offset + rows)

    # Segments

    def launch(self) -> LaunchedSegment | None:
        """Launches the next segment of all rows that can be sampled; None: there are none."""
        sampler, limits = self.sampler, self.turn_limits()
        rows = np.flatnonzero((self.table.slots >= 0) & self.is_drawing & (self.num_launched < limits))
        if not rows.size:
            return None
        starts = self.num_launched[rows]
        counts = np.minimum(self.sizes.steps, limits[rows] - starts)
        num_shards = len(self.table.shards)
        fullest = np.bincount(self.table.shard_of_row[rows]).max() * num_shards
        num_lanes = next(size for size in self.sizes.lanes if size >= fullest)
        lanes = self.table.lanes(rows, num_lanes)
        columns = self.prompt_lengths[rows] - 1 + starts
        width = self.read_width(int(columns.max()) + self.sizes.steps)
        slots = self.table.slots[rows]
        pages = self.table.pages(
            lanes, num_lanes, self.table.table[slots, :width], slots % self.table.num_slots, columns, counts
        )
        is_read = starts == self.num_tokens[rows]
        given = np.where(is_read, self.last_tokens_of(rows), -1).astype(np.int32)
        of_lanes = [in_lanes(x, lanes, num_lanes) for x in (given, starts.astype(np.int32), self.keys[rows])]
        pages, given, numbers, keys = self.layout.put((pages, *of_lanes))
        self.state, self.last_tokens, columns = decode_pages(
            self.model,
            sampler.distribution,
            self.sizes.steps,
            sampler.stop_ids if self.model.delta else (),
            self.weights_of(in_lanes(rows, lanes, num_lanes)),
            self.state,
            self.last_tokens,
            pages,
            given,
            numbers,
            keys,
        )
        self.num_launched[rows] += counts
        self.num_cached[rows] = self.prompt_lengths[rows] - 1 + self.num_launched[rows]
        shards = self.table.shards
        num_free = sum(len(shard.pages) for shard in shards)
        sampler.paging.load.update(
            segments=1,
            rows_running=len(rows),
            rows_waiting=sum(len(shard.waiting) for shard in shards),
            pages_in_use=1 - num_free / self.sizes.num_pages,
        )
        return LaunchedSegment(
            rows=rows,
            lanes=lanes,
            starts=starts,
            counts=counts,
            versions=self.versions[rows],
            columns=columns,
            has_prefill=self.has_prefill,
        )

    def last_tokens_of(self, rows: Int[np.ndarray, "R"]) -> Int[np.ndarray, "R"]:
        """Returns the last known token of each row."""
        num_tokens = self.num_tokens[rows]
        return np.where(num_tokens, self.drawn.tokens[rows, num_tokens - 1], self.drawn.first_tokens[rows])

    def read(self, segment: LaunchedSegment) -> None:
        """Adds the tokens of a segment to its rows, up to the end of their turns."""
        results = self.layout.fetch(segment.columns)
        is_valid = (self.versions[segment.rows] == segment.versions) & ~self.is_over[segment.rows]
        rows, lanes = segment.rows[is_valid], segment.lanes[is_valid]
        starts, counts = segment.starts[is_valid], segment.counts[is_valid]
        if not len(rows):
            return
        results = [x[lanes] for x in results]
        counts, has_stop = self.turn_ends(rows, starts, counts, results[0])
        self.drawn.add(rows, starts, counts, results)
        self.drawn.slot_steps[rows] += segment.columns[0].size / len(rows)
        self.num_tokens[rows] += counts
        is_at_end = has_stop | (self.num_tokens[rows] == self.turn_limits()[rows])
        for row, is_stop in zip(rows[is_at_end].tolist(), has_stop[is_at_end].tolist(), strict=True):
            self.forget_launched(row)
            self.end_turn(row, is_cut_off=not is_stop)

    def turn_ends(
        self, rows: Int[np.ndarray, "R"], starts: Int[np.ndarray, "R"], counts: Int[np.ndarray, "R"], tokens: np.ndarray
    ) -> tuple[Int[np.ndarray, "R"], Bool[np.ndarray, "R"]]:
        """Returns how many of the new tokens belong to a turn, and True if the last of them ends it."""
        sampler, num_steps = self.sampler, tokens.shape[1]
        if not sampler.stop_strings:
            ends = sampler.completion_ends(np.where(np.arange(num_steps) < counts[:, None], tokens, -1), 0, num_steps)
            return np.where(ends, ends, counts), ends > 0
        found = [self.text_end(sampler, row, starts[i], tokens[i, : counts[i]]) for i, row in enumerate(rows.tolist())]
        ends = np.array(found, int)
        return np.where(ends, ends, counts), ends > 0

    def text_end(self, sampler: Sampler, row: int, start: int, tokens: Int[np.ndarray, "n"]) -> int:
        """Returns how many of the tokens, from column `start` on, belong to a turn that ends in them; 0: it goes on."""
        said = self.drawn.tokens[row, self.turn_starts[row] : start]
        turn = np.append(said, tokens)
        stop = sampler.completion_end(turn, len(said), len(turn))
        return stop - len(said) if stop else 0

    def forget_launched(self, row: int) -> None:
        """Takes a row back to its known tokens: tokens that were launched after them do not belong to it."""
        self.num_launched[row] = self.num_tokens[row]
        self.num_cached[row] = min(self.num_cached[row], self.prompt_lengths[row] - 1 + self.num_tokens[row])
        self.versions[row] += 1

    def append(self, row: int, tokens: Sequence[int]) -> None:
        """Appends tokens to a row that were not sampled."""
        start = int(self.num_tokens[row])
        self.drawn.tokens[row, start : start + len(tokens)] = tokens
        self.num_tokens[row] = self.num_launched[row] = start + len(tokens)

    def finish(self, row: int, is_finished: bool) -> None:
        """Takes a row out; `is_finished`: it was not truncated."""
        self.drawn.done[row] = is_finished
        self.is_over[row], self.is_drawing[row] = True, False
        if self.num_tokens[row]:
            self.sampler.paging.ended.append(int(self.num_tokens[row]))
        self.table.drop(row)

    def report(self) -> None:
        """Calls `on_segment`; rows that are not over have a length beyond the sampled columns."""
        if self.sampler.on_segment:
            longest = int(self.num_tokens.max())
            lengths = np.where(self.is_over, self.num_tokens, longest + 1)
            self.sampler.on_segment(Segment(self.row_offset, self.drawn.tokens, longest, lengths))


def with_pages(sampler: Sampler, page_size: int, has_turns: bool = False) -> Sampler:
    """Returns a sampler over pages of this size; -1: chosen, 0: a sampler of rows in step.

    In step, one CPU samples single replies faster. Raises: UserError if rows cannot be sampled in step.
    """
    layout = sampler.layout
    may_be_in_step = layout.is_single_cpu and not has_turns
    if page_size == 0 and not may_be_in_step:
        raise UserError("--page_size 0 samples without pages, for single replies on one CPU only: leave it out")
    if page_size == 0 or page_size < 0 and may_be_in_step:
        return sampler
    adapts = layout.is_cpu and page_size < 0
    page = page_size if page_size > 0 else PAGE_ON_CPU if layout.is_cpu else PAGE
    return replace(sampler, paging=Paging(page, adapts=adapts), make_chain=PagedChain)


class PageSizes(NamedTuple):
    """Sizes of sampling over pages, over all shards."""

    page: int  # tokens
    width: int  # pages of the longest row
    num_pages: int
    num_slots: int
    steps: int  # steps of a segment
    lanes: list[int]  # numbers of lanes that decode programs have, the fewest first
    chunks: list[tuple[int, int]]  # rows and tokens of prefills


def page_sizes(sampler: Sampler, num_rows: int, longest_prompt: int) -> PageSizes:
    """Returns the sizes for a call of so many rows. Raises: UserError if not even one row fits into the pages."""
    paging, num_shards = sampler.paging, sampler.layout.row_shards
    page, longest = paging.page or PAGE_ON_CPU, longest_prompt + sampler.max_new_tokens
    width = -(-longest // page)
    num_slots = paging.num_slots or round_up(power_above(num_rows), num_shards)
    num_pages = (paging.num_pages or num_slots * width) // num_shards
    if num_pages < width:
        raise UserError(
            f"the cache has pages for {num_pages * page:,} tokens on each device, and a row may have {longest:,}: "
            "lower --num_generation_tokens or --prompt_length"
        )
    # A row that ends in a segment waits for its end, and for the end of the next one if that is launched already.
    steps = min(sampler.segment, max(16 if paging.adapts else 8, sampler.max_new_tokens // 64))
    lanes = [num_slots]
    if not paging.adapts:
        lanes = sorted({round_up(-(-num_slots // 4), num_shards), num_slots})
    while paging.adapts and lanes[0] % (2 * num_shards) == 0 and lanes[0] > FEWEST_LANES:
        lanes.insert(0, lanes[0] // 2)
    chunks = [(round_up(rows, num_shards), num_tokens) for rows, num_tokens in CHUNKS_ON_CPU if paging.adapts]
    chunks = chunks or [(round_up(rows, num_shards), n) for rows, n in CHUNKS if n < longest or n == CHUNKS[0][1]]
    return PageSizes(
        page=page,
        width=width,
        num_pages=num_pages * num_shards,
        num_slots=num_slots,
        steps=steps,
        lanes=lanes,
        chunks=chunks,
    )


@partial(jax.jit, static_argnums=0, donate_argnums=2)
def prefill_pages(
    model: Decoder,
    weights: Weights,
    state: State,
    pages: Pages,
    tokens: Int[Array, "R T"],
    routes: Int[Array, "R T L k"] | None,
) -> State:
    """Returns the state with the keys and values of the first `pages.counts` tokens of each row."""
    num_tokens = tokens.shape[1]
    before, cache = map(list, zip(*begin(model, state, pages, num_tokens), strict=True))
    is_token = jnp.arange(num_tokens) < pages.counts[:, None]
    attention = partial(page_attention, model=model, pages=pages, number=jnp.int32(0))
    _, cache, _ = decoder.decode_states(
        model, weights, before, cache, tokens, pages.columns, attention, is_token, routes
    )
    return end(model, state, cache, pages)


@partial(jax.jit, static_argnums=(0, 1, 2, 3), donate_argnums=(5, 6))
def decode_pages(
    model: Decoder,
    distribution: Distribution,
    num_steps: int,
    stop_ids: tuple[int, ...],
    weights: Weights,
    state: State,
    last_tokens: Int[Array, "N"],
    pages: Pages,
    given: Int[Array, "S"],
    numbers: Int[Array, "S"],
    keys: UInt32[Array, "S 2"],
) -> tuple[State, Int[Array, "N"], SampledTokens]:
    """Samples tokens number `numbers`, ... of each lane, after the token that is `given`; -1: the slot's last one.

    Returns the state, the last token of each slot, and the columns. States of linear attention stop before the last
    token that counts, or before the first of `stop_ids`.
    """
    last = jnp.where(given >= 0, given, read_slots(last_tokens, pages.slots))
    before, layers = map(list, zip(*begin(model, state, pages, num_steps), strict=True))
    has_states = model.delta is not None

    def forward(i: Int[Array, ""], cache: tuple, last: Int[Array, "S"]) -> tuple[Float[Array, "S V"], tuple, Array]:
        layers, is_live = cache
        if has_states:
            is_live &= (i < pages.counts) & ((i == 0) | ~jnp.isin(last, jnp.array(stop_ids, jnp.int32)))
        attention = partial(page_attention, model=model, pages=pages, number=i)
        is_token = is_live[:, None] if has_states else None
        hidden, layers, routes = decoder.decode_states(
            model, weights, before, layers, last[:, None], pages.columns + i, attention, is_token
        )
        return decoder.head(model, weights, hidden[:, -1]), (layers, is_live), routes

    cache = layers, jnp.ones(len(keys), bool)
    (layers, _), last, columns = draw_tokens(model, distribution, num_steps, forward, cache, last, keys, numbers)
    last_tokens = write_slots(last_tokens, last, pages.slots)
    return end(model, state, layers, pages), last_tokens, columns
