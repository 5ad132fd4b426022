"""Computes tokens that are not in the cache of their row: prompts, observations, forced answers, rows put aside.

R rows and T tokens of a prefill, w pages of the longest row.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int, Int16

from core.slots.rows import Rows
from core.slots.table import PageSizes, PageTable, in_lanes
from models import decoder
from models.architecture import Decoder
from models.names import Array, Weights
from models.pages import NOWHERE, Pages, State, begin, end, page_attention


class PrefillJob(NamedTuple):
    """Tokens whose cache is to be computed, of a row, or of the prompt that it shares."""

    row: int
    slot: int  # number in the row's shard; NOWHERE: pages of a shared prompt
    table: Int[np.ndarray, "_"]
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


def make_job(
    model: Decoder, rows: Rows, table: PageTable, row: int, start: int, stop: int, is_shared: bool = False
) -> PrefillJob:
    """Returns the computation of some columns of a row."""
    prompt, slot, routes = rows.prompts[row], table.slots[row], None
    first = len(prompt)
    tokens = [*prompt[start:stop], *rows.tokens[row, max(0, start - first) : max(0, stop - first)].tolist()]
    if model.num_experts:  # experts of a column are recorded with the token that was sampled after it
        own = rows.routes[row, max(0, start - first + 1) : max(0, stop - first + 1)]
        routes = np.pad(own, ((stop - start - len(own), 0), (0, 0), (0, 0)))
    pages = table.table[slot].copy()
    pages[-(-stop // table.page) :] = NOWHERE  # padding is written nowhere
    return PrefillJob(
        row=row,
        slot=NOWHERE if is_shared else slot % table.num_slots,
        table=pages,
        column=start,
        tokens=tokens,
        routes=routes,
    )


def chunks_of(
    jobs: Sequence[PrefillJob], table: PageTable, shapes: Sequence[tuple[int, int]]
) -> Iterator[tuple[list[PrefillJob], tuple[int, int]]]:
    """Yields parts of the jobs that are computed at once, shared prompts first, each with its (rows, tokens)."""
    num_shards = len(table.shards)
    while jobs:
        jobs = sorted(jobs, key=lambda job: (job.slot != NOWHERE, -len(job.tokens)))

        def num_calls(shape: tuple[int, int], jobs: Sequence[PrefillJob] = jobs) -> tuple[int, int]:
            parts = [-(-len(job.tokens) // shape[1]) for job in jobs]
            return max(max(parts), -(-sum(parts) // shape[0])) * shape[0] * shape[1], shape[1]

        num_rows, num_tokens = min(shapes, key=num_calls)
        rows_left, now, later = np.full(num_shards, num_rows // num_shards), [], []
        goes_on = False  # a prompt, before whose end no row can be computed that shares it
        for job in jobs:
            shard = table.shard_of_row[job.row]
            if not rows_left[shard] or goes_on and job.slot != NOWHERE:
                later.append(job)
                continue
            rows_left[shard] -= 1
            first, rest = job.cut(num_tokens)
            now.append(first)
            later += [rest] if rest.tokens else []
            goes_on |= bool(rest.tokens) and job.slot == NOWHERE
        yield now, (num_rows, num_tokens)
        jobs = later


def chunk_arrays(
    model: Decoder, jobs: Sequence[PrefillJob], table: PageTable, sizes: PageSizes, num_rows: int, num_tokens: int
) -> tuple[Int[np.ndarray, "R"], Pages, Int[np.ndarray, "R T"], Int16[np.ndarray, "R T L k"] | None]:
    """Returns the rows of jobs in their lanes, and the arguments of `prefill_pages`."""
    rows, columns = np.array([job.row for job in jobs]), np.array([job.column for job in jobs])
    slots, counts = np.array([job.slot for job in jobs]), np.array([len(job.tokens) for job in jobs])
    width = sizes.read_width(int((columns + counts).max()))
    lanes = table.lanes(rows, num_rows)
    pages = table.pages(lanes, num_rows, np.array([job.table[:width] for job in jobs]), slots, columns, counts)
    tokens = np.zeros((num_rows, num_tokens), np.int32)
    routes = np.zeros((num_rows, num_tokens, *model.route_shape), np.int16)
    for lane, job in zip(lanes, jobs, strict=True):
        tokens[lane, : len(job.tokens)] = job.tokens
        if job.routes is not None:
            routes[lane, : len(job.tokens)] = job.routes
    return in_lanes(rows, lanes, num_rows), pages, tokens, routes if model.num_experts else None


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
