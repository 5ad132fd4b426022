"""Speculative decoding of the last rows of a batch: tokens are drafted, computed in one pass, and kept where drawn.

A draw is a function of the logits and of the uniform numbers at its address (seed, step, task, sample, token). So a
draft is right where the token that is drawn in its place is the draft: tokens are those of `decode_segment`, without a
rule of rejection or anything to correct. Log-probabilities differ by the rounding of products of more tokens.

Drafts are what followed a row's last tokens where they occurred last, in its own text or before that in its group's
(prompt look-up decoding). They are found on the device: a pass takes no longer than its products.

S sampler slots, k drafted tokens, W tokens of the text behind which a row goes on.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from threading import Event

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jaxtyping import Float, Int, UInt32

from core.extensions.ragged import RaggedChain
from core.records import Completions
from core.sampler import Cache, Columns, Sampler, empty_columns
from models import decoder
from models.architecture import Decoder
from models.distribution import Distribution, sampling_uniforms
from models.names import Array, Weights
from utils.batching import bucket

FEWEST_MATCHES, MOST_MATCHES = 2, 8  # last tokens of a row that are looked up
TAIL_SLOTS, TAIL_SLOTS_ON_CPU = 16, 2  # of a shard: with this few a pass is bound by the weights, not by its tokens
PASSES = 8  # between two transfers to the host
MIN_GAIN = 1.5  # tokens of a pass and row below which segments are taken to be faster
PAUSE = 128  # tokens of a row that are then drawn in segments
TEXT_TOKENS = 1 << 14  # of a group that are searched at most


class SpeculativeChain(RaggedChain):
    """Completions whose tail is drawn several tokens at a time; each row there has its own length."""

    def __init__(self, num_drafted: int, sampler: Sampler, *arguments: object):
        super().__init__(sampler, *arguments)
        self.draft_tokens = num_drafted  # of a row in a pass
        of_shard = TAIL_SLOTS_ON_CPU if self.layout.is_cpu else TAIL_SLOTS
        self.tail_slots = of_shard * self.layout.row_shards
        self.fewest_slots = 1
        num_rows = len(self.keys)
        self.reached_limit = np.zeros(num_rows, bool)
        self.num_drafted = np.zeros(num_rows, int)
        self.num_accepted = np.zeros(num_rows, int)
        self.pause = 0  # tokens to draw before the next draft

    def run(self, cancelled: Event) -> Completions:
        """Draws all rows: see `Chain.run`."""
        completions = super().run(cancelled)
        finished = completions.finished & ~self.reached_limit
        drafts = {"num_drafted": self.num_drafted, "num_accepted": self.num_accepted}
        return replace(completions, finished=finished, **drafts)

    def segments(self, cancelled: Event) -> Iterator[tuple[int, int]]:
        """Yields the segments before the tail, and draws that."""
        for start, steps in super().segments(cancelled):
            if len(self.slots) <= self.tail_slots:
                self.draw_tail(start, cancelled)
                return
            yield start, steps

    def draw_tail(self, start: int, cancelled: Event) -> None:
        """Draws the rows that are left, all of `start` tokens by now."""
        self.num_tokens[:] = start
        self.is_drawing = ~self.drawn.done
        self.last_tokens = self.last_tokens.copy()
        while self.is_drawing.any() and not cancelled.is_set():
            self.compact()
            if self.pause:
                steps = self.sampler.segments()[0]
                self.draw_segment(steps)
                self.pause = max(0, self.pause - steps)
            else:
                self.draw_passes()
            self.report()

    def draw_passes(self) -> None:
        """Draws several passes of the rows, each over the last token of a row and its drafts."""
        sampler = self.sampler
        self.grow_for(PASSES * (1 + self.draft_tokens))
        rows = np.maximum(self.slots, 0)
        state = self.layout.put((self.starts, *self.texts(), self.next_columns(), self.keys[rows]))
        settings = sampler.model, sampler.distribution, self.draft_tokens
        arguments = self.weights_of(rows), self.prompt_cache, self.cache
        self.cache, results = draw_with_drafts(*settings, *arguments, *state)
        counts, num_drafted, *columns = self.layout.fetch(results)
        live = self.add_columns(columns, counts, num_passes=PASSES)
        self.num_drafted[self.slots[live]] += num_drafted[live]
        self.num_accepted[self.slots[live]] += counts[live] - PASSES
        if counts[live].mean() < MIN_GAIN * PASSES:
            self.pause = PAUSE

    def texts(self) -> tuple[Int[np.ndarray, "S W"], Int[np.ndarray, "S"]]:
        """Returns the text of each slot's group, its own row last, with room for what is drawn; and its length."""
        texts = [self.text(int(row)) if row >= 0 else [0] for row in self.slots]
        lengths = np.int32([len(text) for text in texts])
        width = bucket(int(lengths.max()) + PASSES * (1 + self.draft_tokens))
        padded = np.zeros((len(texts), width), np.int32)
        for row, text in zip(padded, texts, strict=True):
            row[: len(text)] = text
        return padded, lengths

    def text(self, row: int) -> list[int]:
        """Returns the completions of a row's group, then its prompt and its own."""
        tokens = []
        siblings = np.flatnonzero(self.owner == self.owner[row])
        for sibling in siblings[siblings != row]:
            length = min(self.num_tokens[sibling], self.drawn.lengths[sibling])
            tokens += self.drawn.tokens[sibling, :length].tolist()
        own = self.drawn.tokens[row, : self.num_tokens[row]].tolist()
        return [*tokens, *self.prompts[self.owner[row]], *own][-TEXT_TOKENS:]

    def end_turn(self, row: int, is_cut_off: bool) -> None:
        """Takes a completion that has ended."""
        self.drawn.lengths[row] = self.num_tokens[row]
        self.drawn.done[row] = True
        self.reached_limit[row] = is_cut_off

    def report(self) -> None:
        """Calls `on_segment`; rows that are not done have a length beyond the drawn columns."""
        if self.sampler.on_segment:
            drawn = self.drawn
            longest = int(np.where(drawn.done, drawn.lengths, self.num_tokens).max())
            lengths = np.where(drawn.done, drawn.lengths, longest + 1)
            self.sampler.on_segment(self.row_offset, drawn.tokens, longest, lengths)


@partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=5)
def draw_with_drafts(
    model: Decoder,
    distribution: Distribution,
    num_drafted: int,
    weights: Weights,
    prompt_cache: Cache,
    cache: Cache,
    starts: Int[Array, "N"],
    texts: Int[Array, "S W"],
    lengths: Int[Array, "S"],
    columns: Int[Array, "S"],
    keys: UInt32[Array, "S 2"],
) -> tuple[Cache, tuple[Int[Array, "S"], Int[Array, "S"], *Columns]]:
    """Draws tokens behind texts, in PASSES over the last token and its drafts, from each slot's column on.

    Returns the cache, then for each slot how many tokens were drawn and drafted, and what `decode_segment` returns.
    """
    num_rows = len(texts)
    width = 1 + num_drafted
    rows = jnp.arange(num_rows)[:, None]
    offsets = jnp.arange(width)

    def draw_pass(_: int, state: tuple) -> tuple:
        cache, texts, counts, num_looked_up, drawn = state
        drafts = look_up(texts, lengths + counts, num_drafted)
        last = texts[rows, (lengths + counts)[:, None] - 1]
        tokens = jnp.concatenate([last, jnp.maximum(drafts, 0)], axis=1)
        numbers = columns + counts
        state = prompt_cache, cache, tokens, numbers, starts
        hidden, cache, routes = decoder.decode_states(model, weights, *state)
        logits = decoder.head(model, weights, hidden)
        token, logprob, ids = draw_each(distribution, logits, keys, numbers)
        # The next pass overwrites the tokens behind a wrong draft.
        texts = texts.at[rows, (lengths + counts)[:, None] + offsets].set(token, mode="drop")
        new = token, logprob, ids, routes
        drawn_columns = counts[:, None] + offsets
        drawn = jax.tree.map(lambda column, x: column.at[rows, drawn_columns].set(x, mode="drop"), drawn, new)
        is_right = jnp.cumprod(token[:, :-1] == drafts, axis=1)
        num_looked_up += num_drafted * (drafts[:, 0] >= 0)
        return cache, texts, counts + 1 + is_right.sum(1), num_looked_up, drawn

    none = jnp.zeros_like(lengths)
    drawn = empty_columns(model, distribution, (num_rows, PASSES * width))
    state = cache, texts, none, none, drawn
    cache, _, counts, num_looked_up, drawn = jax.lax.fori_loop(0, PASSES, draw_pass, state)
    return cache, (counts, num_looked_up, *drawn)


def draw_each(
    distribution: Distribution, logits: Float[Array, "S T V"], keys: UInt32[Array, "S 2"], numbers: Int[Array, "S"]
) -> tuple[Int[Array, "S T"], Float[Array, "S T"], Int[Array, "S T U"]]:
    """Draws a token from each distribution of a row; the first one is for its token number `numbers`."""
    width = logits.shape[1]
    steps = numbers + jnp.arange(width)[:, None]
    uniforms = sampling_uniforms(keys, steps)
    flat = rearrange(logits, "S T V -> (S T) V"), rearrange(uniforms, "T S u -> (S T) u")
    token, logprob, ids = (rearrange(x, "(S T) ... -> S T ...", T=width) for x in distribution.draw(*flat))
    return token.astype(jnp.int32), logprob, ids


def look_up(texts: Int[Array, "S W"], lengths: Int[Array, "S"], num_tokens: int) -> Int[Array, "S k"]:
    """Returns the tokens behind the longest earlier match of each text's end, the latest one of equal matches.

    They are repeated where the text ends; -1 where not even FEWEST_MATCHES tokens occurred.
    """
    ends = lengths[:, None]
    columns = jnp.arange(texts.shape[1])
    is_equal = columns < ends
    num_equal = jnp.zeros_like(texts)
    for n in range(1, MOST_MATCHES + 1):
        before = jnp.where(columns >= n, jnp.roll(texts, n, axis=1), -1)
        last = jnp.take_along_axis(texts, jnp.maximum(ends - n, 0), axis=1)
        is_equal &= before == last
        num_equal += is_equal
    match = jnp.argmax(num_equal * len(columns) + columns * (num_equal > 0), axis=1)[:, None]
    is_found = jnp.take_along_axis(num_equal, match, axis=1) >= FEWEST_MATCHES
    period = jnp.maximum(ends - match, 1)
    found = jnp.take_along_axis(texts, match + jnp.arange(num_tokens) % period, axis=1)
    return jnp.where(is_found, found, -1)
