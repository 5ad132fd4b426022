"""Samples completions with a KV cache: compiled segments, early exit, fewer slots for fewer rows, shared prompts.

`Chain` samples single replies on one CPU: all rows are at the same token. On accelerators and in conversations,
core/chains/pages.py samples. `Chain` has two caches: of prompts, one row a prompt, and of completions, one row a slot.

To change which token is sampled (a penalty, another truncation): the step of `draw_tokens`.
To change when a completion ends: `completion_end`. To change the order of work, or what is kept of it: `Sampler`.

N prompts, G completions of each, B = N G rows, P prompt columns, A completion columns, T row length, S sampler slots.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Event
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int, PyTree, UInt32

from core.blocks import Blocks, CachedRow, is_live, sizes_of
from core.records import Completions
from models import decoder, lora
from models.architecture import Decoder, Table, is_spec
from models.cache import Cache
from models.distribution import MAX_SUPPORT, Distribution, sampling_uniforms
from models.lora import attach, split_policy
from models.names import ADAPTERS, Array, Key, LayerNumbers, Params, Policy, Weights
from models.pages import Paging
from models.tokenizer import Tokenizer
from utils.batching import bucket, concatenate, round_up
from utils.devices.sharding import Layout, single_device
from utils.devices.threads import take_turns
from utils.runs.shutdown import Stop
from utils.settings.errors import UserError, refuse
from utils.settings.options import option
from utils.threefry import threefry

MIN_SEGMENT, SEGMENT = 16, 32  # decode steps between two transfers of the tokens to the host
PROMPTS = 8  # prompts whose caches are computed at once


@dataclass(frozen=True)
class SamplingConfig:
    """Sampling."""

    num_generation_tokens: int = option(-1, "Token limit of a completion; -1: the environment's limit", essential=True)
    force_answer_at: int = option(
        -1,
        "Force an answer this many tokens before the completion limit, if the reply has none yet; 0: never; -1: as "
        "the environment sets it",
    )
    prompt_length: int = option(
        256,
        "Maximum number of tokens of a prompt. Problems of a data set with a longer prompt are left out; a longer "
        "prompt of any other kind is an error",
    )
    temperature: float = option(
        1.0, "Softmax temperature of sampling and of the trained policy; 0: greedy (evaluation only)"
    )
    top_k: int = option(0, f"Number of likeliest tokens to sample from, at most {MAX_SUPPORT}; 0: all tokens")
    top_p: float = option(
        1.0, "Total probability of the likeliest tokens to sample from (nucleus sampling); 1: all tokens"
    )
    min_p: float = option(
        0.0, "Minimum probability of a token to sample, as a share of the likeliest token's probability; 0: all tokens"
    )
    stop_strings: str = option("", "Texts or special tokens that end a completion, separated by commas")
    page_size: int = option(
        -1,
        "Tokens in a page of the KV cache; 0: no pages, for single replies on one CPU; -1: chosen for the hardware",
        resumable=True,
    )
    inference_batch_per_device: int = option(
        0, "Rows sampled at a time on each device; 0: as many as fit in memory", resumable=True
    )

    def __post_init__(self):
        refuse([
            (self.prompt_length < 1 or self.num_generation_tokens < -1 or self.num_generation_tokens == 0,
             "--prompt_length and --num_generation_tokens must be at least 1: raise the lower one, or give "
             "--num_generation_tokens -1 for the environment's own limit"),
            (self.inference_batch_per_device < 0,
             "--inference_batch_per_device must not be negative: give 1 or more, or 0 for as many rows as fit in "
             "memory"),
            (self.page_size not in (-1, 0, 8, 16, 32, 64, 128, 256),
             f"--page_size {self.page_size} is no page size: give a power of two from 8 to 256, 0 for no pages, or -1 "
             "to have it chosen"),
        ])  # fmt: skip
        self.distribution.describe()  # it checks its own settings when it is made

    @property
    def distribution(self) -> Distribution:
        return Distribution(self.temperature, self.top_k, self.top_p, self.min_p)


class ChainJob(NamedTuple):
    """Prompts of a call that one chain samples, with equal numbers of completions."""

    prompts: Sequence[list[int]]
    keys: UInt32[np.ndarray, "B 2"]  # a key for each completion; rows of a prompt are adjacent
    num_columns: int  # padded length of prompts
    row_offset: int  # rows of the call before these


class Segment(NamedTuple):
    """The completions of a chain after a segment of its decode steps."""

    first_row: int  # number of the chain's first row in the call
    tokens: Int[np.ndarray, "B A"]
    num_sampled: int  # columns of tokens, so far
    lengths: Int[np.ndarray, "B"]  # tokens of completions; above `num_sampled` if a row goes on

    def ended_rows(self) -> list[int]:
        """Returns the rows of the chain that have ended."""
        return np.flatnonzero(self.lengths <= self.num_sampled).tolist()


class Drawn:
    """Host arrays of the rows of a chain, filled segment by segment; rows of a prompt are adjacent."""

    def __init__(self, sampler: "Sampler", prompts: Sequence[list[int]], num_rows: int):
        model, num_columns = sampler.model, sampler.max_new_tokens
        support_size, route_shape = sampler.distribution.support_size(model.vocab_size), model.route_shape
        shape = num_rows, num_columns
        self.prompts = prompts
        self.owner = np.repeat(np.arange(len(prompts)), num_rows // len(prompts))  # prompt of each row
        self.prompt_lengths = np.array([len(prompt) for prompt in prompts])[self.owner]
        self.first_tokens = np.array([prompt[-1] for prompt in prompts], np.int32)[self.owner]  # inputs of first steps
        self.tokens = np.zeros(shape, np.int32)
        self.logprobs = np.zeros(shape, np.float32)
        self.mask = np.zeros(shape, bool)
        self.support = np.zeros((*shape, support_size), np.int32)
        self.routes = np.zeros((*shape, *route_shape), np.int16)
        self.lengths = np.full(num_rows, num_columns)
        self.done = np.zeros(num_rows, bool)
        self.slot_steps = np.zeros(num_rows)

    def add(
        self,
        rows: Int[np.ndarray, "R"],
        starts: Int[np.ndarray, "R"],
        counts: Int[np.ndarray, "R"],
        results: Sequence[np.ndarray],
    ) -> None:
        """Writes the first `counts` tokens that were sampled for rows, from the columns `starts` on."""
        i, j = np.nonzero(np.arange(results[0].shape[1]) < counts[:, None])
        places = rows[i], starts[i] + j
        for array, new in zip((self.tokens, self.logprobs, self.support, self.routes), results, strict=True):
            array[places] = new[i, j]
        self.mask[places] = True

    def completions(self) -> Completions:
        """Returns each row's completion behind its prompt."""
        lengths = self.prompt_lengths + self.lengths
        columns = np.arange(lengths.max()) - self.prompt_lengths[:, None]  # 0: the first of the completion
        is_completion = (columns >= 0) & (columns < self.lengths[:, None])
        source = np.clip(columns, 0, self.tokens.shape[1] - 1)

        def behind_prompt(x: np.ndarray) -> np.ndarray:
            axes = (...,) + (None,) * (x.ndim - 2)
            moved = np.take_along_axis(x, source[axes], axis=1)
            return np.where(is_completion[axes], moved, np.zeros((), x.dtype))

        tokens = behind_prompt(self.tokens)
        for row, i in enumerate(self.owner):
            tokens[row, : len(self.prompts[i])] = self.prompts[i]
        return Completions(
            tokens=tokens,
            mask=behind_prompt(self.mask),
            logprobs=behind_prompt(self.logprobs),
            lengths=lengths,
            prompt_lengths=self.prompt_lengths,
            finished=self.done,
            slot_steps=self.slot_steps,
            num_observed=np.zeros(len(lengths), int),
            support=behind_prompt(self.support) if self.support.size else None,
            routes=behind_prompt(self.routes) if self.routes.size else None,
        )


@dataclass(frozen=True)
class Sampler:
    """Samples completions of prompts.

    A token's key is made from (key, position of the group, number of the sample, number of the token). So samples do
    not depend on the batch, the row's place in it, compaction or the number of devices.
    """

    model: Decoder
    max_new_tokens: int
    stop_ids: tuple[int, ...]
    distribution: Distribution = Distribution()
    stop_strings: tuple[str, ...] = ()
    force_answer_at: int = 0  # tokens before the limit: a segment begins there
    # Tokens to write there instead of sampled ones, after the tokens of a reply: core/chains/forced.py.
    forced_answer: Callable[[Int[np.ndarray, "A"]], list[int]] = lambda reply: []
    max_prompt_tokens: int = 1 << 30
    block_sizes: tuple[int, ...] = ()  # see core/blocks.py; empty: by the model's size
    segment: int = SEGMENT
    prompt_columns: int = 0  # least width to which prompts are padded
    paging: Paging = field(default_factory=Paging)  # see core/chains/pages.py
    tokenizer: Tokenizer | None = None  # needed by stop strings and forced answers
    layout: Layout = field(default_factory=single_device)
    make_chain: Callable[["Sampler", Weights, ChainJob], "Chain"] | None = None  # None: `Chain`; core/chains/
    # Weights for these rows of a call: the members of a population have adapters of their own.
    weights_of: Callable[[Weights, Int[np.ndarray, "S"]], Weights] = lambda weights, rows: weights
    cancelled: Event | None = field(default=None, compare=False)  # set by another thread: sampling raises Stop
    on_segment: Callable[[Segment], None] | None = None  # called after each segment, from the thread of its chain

    def on(self, layout: Layout) -> "Sampler":
        """Returns a sampler on another mesh of the same devices."""
        return replace(self, model=replace(self.model, mesh=layout.mesh), layout=layout)

    def load_weights(self, params: Policy) -> Weights:
        """Returns the weights cast and laid out for sampling, once for all tokens.

        The base below adapters is copied only if the model `merges_adapters`.
        """
        if ADAPTERS not in params:
            policy = {name: params[name] for name in self.model.parameter_table()}  # without a critic
            return decode_weights(self.model, self.layout, policy, self.model.layer_numbers)
        base, adapters = split_policy(params)
        weights = attach(base, layer_adapters(self.model, adapters))
        return merge(weights) if self.model.merges_adapters else weights

    def generate(
        self, weights: Weights, prompts: Sequence[list[int]], positions: Int[Array, "N"], num_samples: int, key: Key
    ) -> Completions:
        """Samples `num_samples` completions of each prompt; rows of a prompt are adjacent.

        `positions` make the keys of prompts differ: positions in the run, or task numbers if no task occurs twice.
        Raises: UserError for an empty prompt or one longer than `max_prompt_tokens`.
        """
        for i, prompt in zip(positions, prompts, strict=True):
            if not 0 < len(prompt) <= self.max_prompt_tokens:
                raise UserError(
                    f"prompt {i} has {len(prompt)} tokens, allowed are 1 to {self.max_prompt_tokens}: raise "
                    f"--prompt_length or shorten it (the model has {self.model.num_positions:,} positions in all)"
                )
        return self.draw(weights, prompts, sample_keys(key, positions, num_samples))

    def draw(self, weights: Weights, prompts: Sequence[list[int]], keys: UInt32[np.ndarray, "B 2"]) -> Completions:
        """Samples a completion for each key; keys of a prompt are adjacent. Raises: Stop once it is `cancelled`."""
        num_prompts = len(prompts)
        num_samples = len(keys) // num_prompts
        num_columns = max(self.prompt_columns, bucket(max(map(len, prompts)) - 1))
        make_chain, chains = self.make_chain or Chain, []
        for part in np.array_split(np.arange(num_prompts), self.num_chains(num_prompts)):
            start, stop = int(part[0]), int(part[-1]) + 1
            rows = slice(start * num_samples, stop * num_samples)
            job = ChainJob(prompts[start:stop], keys[rows], num_columns, row_offset=rows.start)
            chains.append(make_chain(self, weights, job))
        cancelled = self.cancelled or Event()
        completions = take_turns(lambda chain: chain.run(cancelled), chains, cancelled)
        if cancelled.is_set():
            raise Stop
        return concatenate(completions)

    def num_chains(self, num_prompts: int) -> int:
        """Returns the number of about equal parts of a batch that are sampled at the same time."""
        return min(num_prompts, self.layout.num_chains(self.model.num_parameters))

    def segments(self) -> list[int]:
        """Returns the steps of each decode segment: equal numbers up to the forced answer, and from there to the limit.

        Rows that end in a segment wait for its end. Segments are longer for long limits.
        """
        most_steps = min(self.segment, max(MIN_SEGMENT, self.max_new_tokens // 64))
        lengths = []
        for num_tokens in (self.max_new_tokens - self.force_answer_at, self.force_answer_at):
            if num_tokens:
                num_segments = -(-num_tokens // most_steps)
                steps = -(-num_tokens // num_segments)
                lengths += [min(steps, num_tokens - start) for start in range(0, num_tokens, steps)]
        return lengths

    def cache_columns(self, num_tokens: int) -> int:
        """Returns the width of a cache for this number of completion tokens: one of few, since each has its programs.

        The widths are the limit, its half, quarter and eighth, if these are at least 64 columns.
        """
        parts = [self.max_new_tokens >> n for n in range(4)]
        widths = [round_up(part, 32) for part in parts if part >= 64 or part == parts[0]]
        return min(width for width in widths if width >= num_tokens)

    def completion_ends(self, tokens: Int[np.ndarray, "R A"], start: int, stop: int) -> Int[np.ndarray, "R"]:
        """Returns the length of each completion that ends in these columns; 0 for a completion that goes on."""
        if self.stop_strings:
            return np.array([self.completion_end(row, start, stop) or 0 for row in tokens], int)
        is_stop = np.isin(tokens[:, start:stop], self.stop_ids)
        return np.where(is_stop.any(axis=1), start + is_stop.argmax(axis=1) + 1, 0)

    def completion_end(self, tokens: Int[np.ndarray, "A"], start: int, stop: int) -> int | None:
        """Returns the completion's length if these columns hold a stop token or complete a stop string; None if not."""
        is_stop = np.isin(tokens[start:stop], self.stop_ids)
        end = start + int(np.argmax(is_stop)) + 1 if is_stop.any() else None
        last = end or stop
        if self.has_stop_string(tokens[:last]):
            return next(n for n in range(start + 1, last + 1) if self.has_stop_string(tokens[:n]))
        return end

    def has_stop_string(self, tokens: Int[np.ndarray, "A"]) -> bool:
        """True if the text of these tokens holds a stop string."""
        text = self.tokenizer.decode(tokens) if self.stop_strings else ""
        return any(stop in text for stop in self.stop_strings)


class Chain:
    """The completions of some prompts, sampled in step on one CPU. Their slots: core/blocks.py."""

    def __init__(self, sampler: Sampler, weights: Weights, job: ChainJob):
        self.sampler, self.layout, self.weights = sampler, sampler.layout, weights
        self.prompts, self.keys, self.num_columns, self.row_offset = job
        self.drawn = Drawn(sampler, self.prompts, len(self.keys))
        self.last_tokens = self.drawn.first_tokens
        self.forced = np.full_like(self.drawn.tokens, -1)  # tokens to write instead of sampled ones; -1: none
        # The cache holds prompt[:-1] at the right end of `num_columns`: n tokens begin at num_columns - (n - 1).
        self.starts = np.int32([self.num_columns + 1 - len(prompt) for prompt in self.prompts])
        sizes = sampler.block_sizes or sizes_of(sampler.model)
        self.slots = Blocks(self.layout, sizes, len(self.keys), self.starts, self.num_columns)

    def run(self, cancelled: Event) -> Completions:
        """Samples segments until all rows are done, and returns the completions."""
        sampler, drawn = self.sampler, self.drawn
        self.slots.open(self.prefill(), sampler.cache_columns(1))
        for start, steps in self.segments(cancelled):
            end = start + steps
            for rows, forced, columns in [self.launch(i, start, steps) for i in range(len(self.slots.blocks))]:
                is_drawn = is_live(rows, drawn.done)
                live = rows[is_drawn]
                results = [x[is_drawn] for x in self.layout.fetch(columns)]
                drawn.add(live, np.full(len(live), start), np.full(len(live), steps), results)
                drawn.mask[live, start:end] = forced[is_drawn, :steps] < 0
                drawn.slot_steps[live] += len(rows) * steps / len(live)
                ends = sampler.completion_ends(drawn.tokens[live], start, end)
                drawn.lengths[live] = np.where(ends, ends, drawn.lengths[live])
                drawn.done[live] = ends > 0
            self.last_tokens = drawn.tokens[:, end - 1]
            if sampler.on_segment:
                sampler.on_segment(Segment(self.row_offset, drawn.tokens, end, drawn.lengths))
        return drawn.completions()

    def segments(self, cancelled: Event) -> Iterator[tuple[int, int]]:
        """Yields the first token and the steps of each segment, while there are rows that are not done."""
        start = 0
        for steps in self.sampler.segments():
            if self.drawn.done.all() or cancelled.is_set():
                return
            self.slots.fit(self.drawn.done, self.sampler.cache_columns(start + steps))
            yield start, steps
            start += steps

    def launch(self, number: int, start: int, steps: int) -> tuple[np.ndarray, np.ndarray, "SampledTokens"]:
        """Launches a segment of a block; returns the rows of its slots, their forced tokens, and the samples."""
        sampler, block = self.sampler, self.slots.blocks[number]
        rows = np.maximum(block.rows, 0)
        forced = self.forced_tokens(block.rows, start)
        state = self.layout.put(
            SlotState(
                start=np.int32(start),
                starts=block.starts,
                last_tokens=self.last_tokens[rows],
                keys=self.keys[rows],
                forced=forced,
                count=np.int32(steps),
            )
        )
        weights = sampler.weights_of(self.weights, self.row_offset + rows)
        cache, columns = decode_segment(
            sampler.model, sampler.distribution, forced.shape[1], weights, block.prompts, block.cache, state
        )
        self.slots.blocks[number] = block._replace(cache=cache)
        return block.rows, forced, columns

    def forced_tokens(self, rows: Int[np.ndarray, "S"], start: int) -> Int[np.ndarray, "S s"]:
        """Returns the tokens to write instead of sampled ones, in columns of the longest segment; -1 for none."""
        sampler, width, rows = self.sampler, max(self.sampler.segments()), np.maximum(rows, 0)
        if start == sampler.max_new_tokens - sampler.force_answer_at:
            for row in set(rows.tolist()):
                answer = sampler.forced_answer(self.drawn.tokens[row, :start])[: sampler.force_answer_at]
                self.forced[row, start : start + len(answer)] = answer
        forced = self.forced[rows, start : start + width]
        return np.pad(forced, ((0, 0), (0, width - forced.shape[1])), constant_values=-1)

    def prefill(self) -> list[CachedRow]:
        """Computes the caches of prompts, without their last tokens, which the first decode step reads.

        Returns for each prompt a cache, and the number of its row there.
        """
        group_size = len(self.keys) // len(self.prompts)
        size = PROMPTS if len(self.prompts) > 1 else 1
        places = []
        for first in range(0, len(self.prompts), size):
            tokens = np.zeros((size, self.num_columns), np.int32)
            starts = np.full(size, self.num_columns, np.int32)
            rows = np.full(size, first * group_size)
            part = self.prompts[first : first + size]
            for i, prompt in enumerate(part):
                starts[i] = self.starts[first + i]
                tokens[i, starts[i] :] = prompt[:-1]
                rows[i] = (first + i) * group_size
            weights = self.sampler.weights_of(self.weights, self.row_offset + rows)
            tokens, starts = self.layout.put((tokens, starts))
            cache = jax.tree.map(np.asarray, prefill(self.sampler.model, weights, tokens, starts))
            places += [(cache, i) for i in range(len(part))]
        return places


def sample_keys(key: Key, positions: Int[Array, "N"], num_samples: int) -> UInt32[np.ndarray, "B 2"]:
    """Returns the keys of `num_samples` samples of each prompt; keys of a prompt are adjacent."""
    samples = np.tile(np.arange(num_samples), len(positions))
    return row_keys(key, np.repeat(np.asarray(positions), num_samples), samples)


def row_keys(key: Key, ids: Int[np.ndarray, "B"], samples: Int[np.ndarray, "B"]) -> UInt32[np.ndarray, "B 2"]:
    """Returns the key of each row, fold_in(fold_in(key, id), sample), as plain numbers."""
    words = tuple(np.asarray(jax.random.key_data(key)))
    return np.stack(threefry(threefry(words, ids), samples), axis=1)


@partial(jax.jit, static_argnums=(0, 1))
def decode_weights(model: Decoder, layout: Layout, params: Params, numbers: LayerNumbers) -> Weights:
    """Returns the weights in the shapes that decoding reads. Shards of fsdp are gathered, since each token reads all.

    `layout`: the mesh that samples. Weights are first sharded as in training: if `tp` is larger there, no device ever
    holds them whole.
    """

    def lay_out(weights: Params | Weights, table: Table, rollout: bool) -> Params | Weights:
        shardings = jax.tree.map(lambda spec: layout.sharding(*spec, rollout), table, is_leaf=is_spec)
        return jax.lax.with_sharding_constraint(weights, shardings)

    cast = lay_out(decoder.cast_params(model, params), model.parameter_table(), rollout=False)
    return lay_out(decoder.decode_weights(model, cast, numbers), model.weights_table(), rollout=True)


layer_adapters = jax.jit(lora.layer_adapters, static_argnums=0)
merge = jax.jit(lora.merge)
prefill = jax.jit(decoder.prefill, static_argnums=0)


# Tokens, their log-probabilities, the ids that could be sampled, and the experts that computed the samples.
SampledTokens = tuple[Int[Array, "S s"], Float[Array, "S s"], Int[Array, "S s U"], Int[Array, "S s L k"]]
DecodeStep = tuple[Float[Array, "S V"], PyTree, Int[Array, "S 1 L k"]]  # logits, the new cache, experts


class SlotState(NamedTuple):
    """State of slots that are at the same token, from which a segment goes on."""

    start: Int[Array, ""]  # number of the next token
    starts: Int[Array, "N"]  # first column of each prompt in its cache
    last_tokens: Int[Array, "S"]
    keys: UInt32[Array, "S 2"]
    forced: Int[Array, "S s"] | None = None  # tokens to write instead of sampled ones, -1 for none; None: none at all
    count: Int[Array, ""] | None = None  # steps that are needed; None: all of the segment


@partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=5)
def decode_segment(
    model: Decoder,
    distribution: Distribution,
    num_steps: int,
    weights: Weights,
    prompt_cache: Cache,
    cache: Cache,
    state: SlotState,
) -> tuple[Cache, SampledTokens]:
    """Samples the next tokens of each slot, after its last one; returns the cache, and the tokens in columns."""

    def forward(i: Int[Array, ""], cache: Cache, last: Int[Array, "S"]) -> DecodeStep:
        return decoder.decode(model, weights, prompt_cache, cache, last[:, None], state.start + i, state.starts)

    last, keys = state.last_tokens, state.keys
    numbers = jnp.broadcast_to(state.start, len(keys))
    cache, _, columns = draw_tokens(
        model, distribution, num_steps, forward, cache, last, keys, numbers, state.forced, state.count
    )
    return cache, columns


def draw_tokens(
    model: Decoder,
    distribution: Distribution,
    num_steps: int,
    forward: Callable[..., DecodeStep],
    cache: PyTree,
    last: Int[Array, "S"],
    keys: UInt32[Array, "S 2"],
    numbers: Int[Array, "S"],
    forced: Int[Array, "S s"] | None = None,
    count: Int[Array, ""] | None = None,
) -> tuple[PyTree, Int[Array, "S"], SampledTokens]:
    """Samples tokens number `numbers`, ... of each row; returns the cache, the last token of each, and the columns.

    `forward` computes the logits behind the last tokens of step i, the new cache, and the experts. `forced` tokens (-1:
    none) are written instead of sampled ones, with log-probability 0. `count`: steps to make; None: all.
    """
    # All at once: in the loop these would be twenty small programs for a token.
    uniforms = sampling_uniforms(keys, numbers + jnp.arange(num_steps)[:, None])

    def step(i: Int[Array, ""], state: tuple) -> tuple:
        cache, last, columns = state
        logits, cache, route = forward(i, cache, last)
        token, logprob, ids = distribution.draw(logits, uniforms[i])
        if forced is not None:
            is_forced = forced[:, i] >= 0
            token, logprob = jnp.where(is_forced, forced[:, i], token), jnp.where(is_forced, 0.0, logprob)
        token = token.astype(jnp.int32)
        new = token, logprob, ids, route[:, 0]
        columns = jax.tree.map(lambda column, x: column.at[:, i].set(x), columns, new)
        return cache, token, columns

    columns = empty_columns(model, distribution, (len(keys), num_steps))
    # The number of steps is static: on a GPU, the host would read a condition after every token.
    return jax.lax.fori_loop(0, num_steps if count is None else count, step, (cache, last, columns))


def empty_columns(model: Decoder, distribution: Distribution, shape: tuple[int, int]) -> SampledTokens:
    """Returns zeros, which a segment replaces by its samples."""
    tokens = jnp.zeros(shape, jnp.int32)
    logprobs = jnp.zeros(shape, jnp.float32)
    support = jnp.zeros((*shape, distribution.support_size(model.vocab_size)), jnp.int32)
    routes = jnp.zeros((*shape, *model.route_shape), jnp.int16)
    return tokens, logprobs, support, routes


def make_sampler(
    config: SamplingConfig, model: Decoder, tokenizer: Tokenizer, layout: Layout, max_new_tokens: int
) -> Sampler:
    """Returns the sampler of these settings. Forced answers and pages are added by core/chains/attach.py."""
    stop_ids, stop_strings = tokenizer.read_stops(config.stop_strings)
    model.check_positions("a prompt with its completion", max_new_tokens + 1, "lower --num_generation_tokens")
    return Sampler(
        model=model,
        max_new_tokens=max_new_tokens,
        stop_ids=stop_ids,
        distribution=config.distribution,
        stop_strings=stop_strings,
        max_prompt_tokens=min(config.prompt_length, model.num_positions - max_new_tokens),
        tokenizer=tokenizer,
        layout=layout,
    )
