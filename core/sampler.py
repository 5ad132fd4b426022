"""Samples completions over the pages of a KV cache: rows take slots and leave them, in one queue, with few programs.

A row's way: it waits -> `Scheduler.admit` gives it a slot and pages (`PageTable.admit` in core/slots/table.py chooses),
and `prefill` computes its prompt -> `decode` launches segments of tokens -> `end` cuts them where a reply ends ->
`end_reply` calls `force_answer` at the limit before a forced answer, or else `on_end`, which turns of an environment
(core/chains/turns.py) and programs of agents set -> `follow` continues the row with what comes next, or `finish` takes
it out.

A token depends on the key of its row, its number in the row, and the tokens before it. So rows may be admitted in any
order, put aside if pages run out, and computed again from their own tokens: no token changes.

To change which token is sampled (a penalty, another truncation): `draw_tokens` in core/slots/decode.py; the learner's
log-probabilities come from `Distribution` in models/distribution.py, and have to follow.
To change when a reply ends: `Sampler.ends_of`. To change the order of work: `Scheduler.run`.

N prompts, G completions of each, B = N G rows, R some of them, A completion columns, S lanes of a program, s steps of a
segment.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from threading import Event
from time import perf_counter
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Int, UInt32

from core.records import Completions
from core.slots.decode import SampledTokens, decode_pages
from core.slots.prefill import PrefillJob, chunk_arrays, chunks_of, make_job, prefill_pages
from core.slots.rows import Next, Rows, Segment, Stops, Turn
from core.slots.table import PageSizes, PageTable, expected_pages, in_lanes, page_sizes, page_tokens
from models import decoder
from models.architecture import Decoder, Table, is_spec
from models.distribution import MAX_SUPPORT, Distribution
from models.names import ADAPTERS, Array, Key, LayerNumbers, Params, Policy, Weights
from models.pages import Paging, new_state, paged_kernel
from models.tokenizer import Tokenizer
from utils.batching import concatenate
from utils.devices.sharding import Layout, single_device
from utils.devices.threads import LAUNCHING, between_turns, take_turns
from utils.runs.shutdown import Stop
from utils.settings.errors import UserError, refuse
from utils.settings.options import option
from utils.threefry import threefry

SEGMENT = 32  # most decode steps between two transfers of the tokens to the host


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
        "Maximum number of tokens of a prompt. Problems of a data set with a longer prompt are skipped; a longer "
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
    page_size: int = option(-1, "Tokens in a page of the KV cache; -1: chosen for the hardware", resumable=True)
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
            (self.page_size not in (-1, 8, 16, 32, 64, 128, 256),
             f"--page_size {self.page_size} is invalid: give a power of two from 8 to 256, or -1 to have it "
             "chosen"),
        ])  # fmt: skip
        self.distribution.describe()  # it checks its own settings when it is made

    @property
    def distribution(self) -> Distribution:
        return Distribution(self.temperature, self.top_k, self.top_p, self.min_p)


@dataclass(frozen=True)
class Sampler:
    """Samples completions of prompts.

    A token's key is made from (key, position of the group, number of the sample, number of the token). So samples do
    not depend on the batch, the row's place in it, the schedule or the number of devices.
    """

    model: Decoder
    max_new_tokens: int
    stop_ids: tuple[int, ...]
    distribution: Distribution = Distribution()
    stop_strings: tuple[str, ...] = ()
    tokens_per_turn: int = 0  # limit of a reply; 0: none besides the row's
    force_answer_at: int = 0  # tokens before the limit, at which a reply that has not ended is asked for its answer
    # Tokens to write there instead of sampled ones, after the tokens of a reply: core/chains/forced.py.
    forced_answer: Callable[[Int[np.ndarray, "A"]], list[int]] = lambda reply: []
    max_prompt_tokens: int = 1 << 30
    segment: int = SEGMENT
    paging: Paging = field(default_factory=Paging)
    tokenizer: Tokenizer | None = None  # needed by stop strings and forced answers
    layout: Layout = field(default_factory=single_device)
    # Weights for these rows of a call: the members of a population have adapters of their own.
    weights_of: Callable[[Weights, Int[np.ndarray, "S"]], Weights] = lambda weights, rows: weights
    cancelled: Event | None = field(default=None, compare=False)  # set by another thread: sampling raises Stop
    # Functions that are called by the thread that samples. None: rows are single replies, for which nobody listens.
    on_segment: Callable[[Segment], None] | None = None  # after each segment
    on_tokens: Callable[[Turn], bool] | None = None  # of a reply that has not ended: whether it goes on
    on_end: Callable[[Turn], Next | None] | None = None  # of a reply that has ended: what follows; None: it waits
    # Between segments: what follows the replies of rows that wait, by row. Arguments: these rows, whether no row can be
    # sampled, the seconds that a segment with new tokens takes, and the number of rows that are sampled.
    on_wait: Callable[[set[int], bool, float, int], dict[int, Next]] | None = None

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
        from models.lora import attach, jit_layer_adapters, jit_merge, split_policy

        base, adapters = split_policy(params)
        weights = attach(base, jit_layer_adapters(self.model, adapters))
        return jit_merge(weights) if self.model.merges_adapters else weights

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
        """Samples a completion for each key; keys of a prompt are adjacent. Raises: Stop once it is `cancelled`.

        A small model on a CPU samples two parts of the rows in threads.
        """
        num_samples = len(keys) // len(prompts)
        num_parts = min(len(prompts), self.layout.num_chains(self.model.num_parameters))
        schedulers = []
        for part in np.array_split(np.arange(len(prompts)), num_parts):
            first, stop = int(part[0]), int(part[-1]) + 1
            rows = slice(first * num_samples, stop * num_samples)
            schedulers.append(Scheduler(self, weights, prompts[first:stop], keys[rows], rows.start))
        cancelled = self.cancelled or Event()
        completions = take_turns(lambda scheduler: scheduler.run(cancelled), schedulers, cancelled)
        if cancelled.is_set():
            raise Stop
        return concatenate(completions)

    def sizes(self, num_rows: int = 1, longest_prompt: int = 0) -> PageSizes:
        """Returns the sizes of the cache and of programs; numbers that the settings leave open are those of a call."""
        if self.max_prompt_tokens < self.model.num_positions:
            longest_prompt = self.max_prompt_tokens
        settings = self.max_new_tokens, self.tokens_per_turn, self.segment
        return page_sizes(self.paging, self.model, self.layout, num_rows, longest_prompt, *settings)

    def ends_of(
        self,
        rows: Rows,
        drawn: Int[np.ndarray, "R"],
        starts: Int[np.ndarray, "R"],
        counts: Int[np.ndarray, "R"],
        tokens: Int[np.ndarray, "R s"],
    ) -> tuple[Int[np.ndarray, "R"], Bool[np.ndarray, "R"]]:
        """Returns how many of the new tokens belong to a reply, and True if the last of them ends it."""
        is_stop = np.isin(tokens, self.stop_ids)
        for i, row in enumerate(drawn.tolist() if rows.stops else ()):
            is_stop[i] |= np.isin(tokens[i], rows.stops.get(row, Stops()).ids)
        num_before = np.hstack([is_stop, np.ones((len(drawn), 1), bool)]).argmax(axis=1)
        has_stop, counts = num_before < counts, np.minimum(num_before + 1, counts)
        for i, row in enumerate(drawn.tolist() if self.stop_strings or rows.stops else ()):
            strings = *self.stop_strings, *rows.stops.get(row, Stops()).strings
            before = rows.tokens[row, rows.starts[row] : starts[i]]
            reply = np.append(before, tokens[i, : counts[i]])
            if end := self.string_end(reply, len(before), strings):
                counts[i], has_stop[i] = end - len(before), True
        return counts, has_stop

    def string_end(self, tokens: Int[np.ndarray, "A"], start: int, strings: Sequence[str]) -> int | None:
        """Returns the reply's length at which the tokens from `start` on complete one of these; None if they do not."""
        if not strings:
            return None
        longest, first = max(map(len, strings)), start
        while first and len(self.tokenizer.decode(tokens[first:start])) < longest + 8:  # 8: parts of a character
            first = max(0, 2 * first - start - 8)

        def has_string(num_tokens: int) -> bool:
            text = self.tokenizer.decode(tokens[first:num_tokens])
            return any(string in text for string in strings)

        lengths = range(start + 1, len(tokens) + 1)
        return next(filter(has_string, lengths)) if has_string(len(tokens)) else None


class Launched(NamedTuple):
    """A segment of some rows whose results are not read yet: their lanes, first tokens, and tokens that count."""

    rows: Int[np.ndarray, "R"]
    lanes: Int[np.ndarray, "R"]
    starts: Int[np.ndarray, "R"]
    counts: Int[np.ndarray, "R"]
    versions: Int[np.ndarray, "R"]
    columns: SampledTokens
    has_prefill: bool  # tokens of rows were computed before it


class Scheduler:
    """The rows of some prompts while they are sampled: admitted to slots, decoded segment by segment, and ended."""

    def __init__(
        self,
        sampler: Sampler,
        weights: Weights,
        prompts: Sequence[list[int]],
        keys: UInt32[np.ndarray, "B 2"],
        first_row: int = 0,
    ):
        """`keys` of a prompt are adjacent; `first_row`: number of the first row in the call."""
        self.sampler, self.model, self.layout, self.weights = sampler, sampler.model, sampler.layout, weights
        model, layout, self.keys, self.first_row = sampler.model, sampler.layout, keys.copy(), first_row
        self.rows = Rows(model, prompts, len(keys), sampler.max_new_tokens, sampler.distribution)
        self.rows.limits[:] = self.limit_of(0) - sampler.force_answer_at
        self.was_forced = np.full(len(keys), not sampler.force_answer_at)
        sizes = self.sizes = sampler.sizes(len(keys), int(self.rows.prompt_lengths.max()))
        num_shards = layout.row_shards
        self.table = PageTable(
            num_shards=num_shards,
            num_slots=sizes.num_slots // num_shards,
            num_pages=sizes.num_pages // num_shards,
            width=sizes.width,
            page=sizes.page,
            prompts=np.repeat(np.arange(len(prompts)), len(keys) // len(prompts)),
            prompt_lengths=self.rows.prompt_lengths,
            shares=not model.delta,
        )
        self.state = new_state(model, layout, sizes.num_pages, sizes.page, sizes.num_slots)
        self.last_tokens = layout.put(np.zeros(sizes.num_slots, np.int32))
        # On a CPU, tokens after the end of a reply would cost time. A DeltaNet state cannot go back to that end.
        self.is_ahead = not (layout.is_cpu or model.delta)
        self.has_prefill, self.clock = False, perf_counter()  # before the next segment

    def run(self, cancelled: Event) -> Completions:
        """Samples segments until all rows are over, and returns the completions."""
        launched = []
        while not (self.rows.is_over.all() or cancelled.is_set()):
            with LAUNCHING:
                self.admit()
                previous, launched = launched, self.decode()
            if not self.is_ahead:
                previous, launched = launched, []
            for segment in previous:
                self.end(segment)
            self.listen(previous, is_idle=not (previous or launched))
        return self.rows.completions()

    # Admit

    def admit(self) -> None:
        """Gives rows slots and pages, and computes the tokens missing in their cache, except the last one."""
        rows, table, page = self.rows, self.table, self.sizes.page
        lengths = rows.prompt_lengths - 1
        needed = -(-(lengths + np.minimum(rows.num_launched + self.sizes.steps, rows.limits)) // page)
        rows.lose(table.reserve(np.where(rows.is_sampling, needed, 0)))
        is_ready = rows.is_sampling & (rows.num_launched == rows.num_tokens)
        jobs, may_yield = [], table.rows_that_may_yield(rows.is_sampling, ~(rows.is_sampling | rows.is_over))
        if any(table.may_admit(shard, may_yield) for shard in table.shards):
            steps, limit, ended = self.sizes.steps, self.sampler.max_new_tokens, self.sampler.paging.ended
            expected = expected_pages(table, lengths, np.where(rows.is_over, 0, rows.num_launched), steps, limit, ended)
            admitted, firsts, aside = table.admit(is_ready, may_yield, needed, expected)
            rows.lose(aside)
            rows.num_cached[admitted] = table.num_shared[admitted] * page
            rows.num_recomputed[admitted] += np.maximum(0, rows.num_lost[admitted] - rows.num_cached[admitted])
            jobs = [make_job(self.model, rows, table, row, 0, table.num_shared[row] * page, True) for row in firsts]
        if paged_kernel(self.model) == "plain":  # a program reads copies of pages from before its own results
            self.prefill(jobs)
            jobs = []
        num_known = lengths + rows.num_tokens
        behind = np.flatnonzero((table.slots >= 0) & is_ready & (rows.num_cached < num_known)).tolist()
        of_rows = [make_job(self.model, rows, table, row, rows.num_cached[row], num_known[row]) for row in behind]
        self.prefill(jobs + of_rows)
        rows.num_cached[behind] = num_known[behind]
        self.has_prefill = bool(behind)

    def prefill(self, jobs: Sequence[PrefillJob]) -> None:
        """Computes the cache of tokens of several rows at once, in few shapes; shared prompts first."""
        for part, (num_rows, num_tokens) in chunks_of(jobs, self.table, self.sizes.chunks):
            rows, *arrays = chunk_arrays(self.model, part, self.table, self.sizes, num_rows, num_tokens)
            self.state = prefill_pages(self.model, self.weights_of(rows), self.state, *self.layout.put(tuple(arrays)))

    def weights_of(self, rows: Int[np.ndarray, "S"]) -> Weights:
        """Returns the weights that these rows are sampled with."""
        return self.sampler.weights_of(self.weights, self.first_row + rows)

    # Decode

    def decode(self) -> list[Launched]:
        """Launches the next segment of all rows that can be sampled, in programs of few sizes."""
        rows, table, launched = self.rows, self.table, []
        drawing = np.flatnonzero((table.slots >= 0) & rows.is_sampling & (rows.num_launched < rows.limits))
        if not drawing.size:
            return []
        num_free = sum(len(shard.pages) for shard in table.shards)
        self.sampler.paging.load.update(
            segments=1,
            rows_running=len(drawing),
            rows_waiting=sum(len(shard.waiting) for shard in table.shards),
            pages_in_use=1 - num_free / self.sizes.num_pages,
        )
        drawing = drawing[np.argsort(rows.num_launched[drawing], kind="stable")]  # long rows read more pages
        own = [rows.distributions.get(row, self.sampler.distribution) for row in drawing.tolist()]
        for distribution in dict.fromkeys(own):
            part = drawing[[each == distribution for each in own]] if rows.distributions else drawing
            ranks, num_shards = table.ranks(part), len(table.shards)
            num_lanes = self.sizes.num_lanes((ranks.max() + 1) * num_shards)
            numbers = ranks // (num_lanes // num_shards)
            launched += [self.launch(part[numbers == i], num_lanes, distribution) for i in range(numbers.max() + 1)]
        return launched

    def launch(self, drawing: Int[np.ndarray, "R"], num_lanes: int, distribution: Distribution) -> Launched:
        """Launches the next segment of these rows."""
        rows, table, starts = self.rows, self.table, self.rows.num_launched[drawing]
        counts = np.minimum(self.sizes.steps, rows.limits[drawing] - starts)
        lanes, slots = table.lanes(drawing, num_lanes), table.slots[drawing]
        columns = rows.prompt_lengths[drawing] - 1 + starts
        width = self.sizes.read_width(int(columns.max()) + self.sizes.steps)
        pages = table.pages(lanes, num_lanes, table.table[slots, :width], slots % table.num_slots, columns, counts)
        given = np.where(starts == rows.num_tokens[drawing], rows.last_tokens(drawing), -1).astype(np.int32)
        of_lanes = [in_lanes(x, lanes, num_lanes) for x in (given, starts.astype(np.int32), self.keys[drawing])]
        self.state, self.last_tokens, sampled = decode_pages(
            self.model,
            distribution,
            self.sizes.steps,
            self.sampler.stop_ids if self.model.delta else (),
            self.weights_of(in_lanes(drawing, lanes, num_lanes)),
            self.state,
            self.last_tokens,
            *self.layout.put((pages, *of_lanes)),
        )
        rows.num_launched[drawing] += counts
        rows.num_cached[drawing] = rows.prompt_lengths[drawing] - 1 + rows.num_launched[drawing]
        return Launched(drawing, lanes, starts, counts, rows.versions[drawing], sampled, self.has_prefill)

    # End

    def end(self, segment: Launched) -> None:
        """Adds the tokens of a segment to its rows, and ends the replies that stop in them or reach their limits."""
        rows, results = self.rows, self.layout.fetch(segment.columns)
        is_valid = (rows.versions[segment.rows] == segment.versions) & ~rows.is_over[segment.rows]
        drawn, lanes, starts, counts = (x[is_valid] for x in segment[:4])
        if not len(drawn):
            return
        results = [x[lanes] for x in results]
        counts, has_stop = self.sampler.ends_of(rows, drawn, starts, counts, results[0])
        rows.add(drawn, starts, counts, results)
        rows.slot_steps[drawn] += segment.columns[0].size / len(drawn)
        has_ended = has_stop | (rows.num_tokens[drawn] == rows.limits[drawn])
        for row, is_stop in zip(drawn[has_ended].tolist(), has_stop[has_ended].tolist(), strict=True):
            rows.take_back(row, int(rows.num_tokens[row]))
            self.end_reply(row, is_stop)

    def end_reply(self, row: int, has_stop: bool) -> None:
        """Takes a row whose reply has ended, with a stop or at its limit, to what follows."""
        if not (has_stop or self.was_forced[row]):
            self.force_answer(row)
            return
        following = Next(finished=has_stop)
        if self.sampler.on_end:
            following = self.sampler.on_end(self.rows.turn(row, self.first_row, is_truncated=not has_stop))
        if following:
            self.follow(row, following)
        else:
            self.rows.is_sampling[row] = False

    def force_answer(self, row: int) -> None:
        """Writes the beginning of an answer after a reply that is near the limit."""
        sampler, rows, start = self.sampler, self.rows, int(self.rows.num_tokens[row])
        self.was_forced[row], rows.limits[row] = True, sampler.max_new_tokens
        tokens = sampler.forced_answer(rows.tokens[row, :start])[: sampler.max_new_tokens - start]
        (count,), (has_stop,) = sampler.ends_of(rows, *(np.array([x], int) for x in (row, start, len(tokens), tokens)))
        rows.append(row, tokens[:count])
        if has_stop or rows.num_tokens[row] == sampler.max_new_tokens:
            self.finish(row, bool(has_stop))

    def follow(self, row: int, following: Next) -> None:
        """Continues a row after its reply, begins it, or takes it out."""
        rows = self.rows
        if following.num_kept is not None:
            rows.take_back(row, int(rows.starts[row]) + following.num_kept)
        if not following.tokens:
            return self.finish(row, following.finished)
        if following.begins:
            self.begin(row, list(following.tokens), following.key)
        else:
            rows.append(row, following.tokens)
            rows.num_observed[row] += len(following.tokens)
        rows.begin_reply(row, self.limit_of(row, following.limit), following)

    def limit_of(self, row: int, num_tokens: int = 0) -> int:
        """Returns the column before which a reply ends that begins after the tokens of a row."""
        start, limits = int(self.rows.num_tokens[row]), [n for n in (num_tokens, self.sampler.tokens_per_turn) if n]
        return min([int(self.rows.capacities[row]), *(start + n for n in limits)])

    def begin(self, row: int, prompt: list[int], key: UInt32[np.ndarray, "2"] | None) -> None:
        """Gives a row its prompt; what it held is forgotten. Rows with equal prompts share pages."""
        same = self.rows.prompts.index(prompt) if prompt in self.rows.prompts else None
        self.table.begin(row, same, len(prompt))
        self.rows.restart(row, prompt)
        most = self.sampler.max_new_tokens
        self.rows.capacities[row] = min(most, most + self.sampler.max_prompt_tokens - len(prompt))
        if key is not None:
            self.keys[row] = key

    def finish(self, row: int, is_finished: bool) -> None:
        """Takes a row out; `is_finished`: it was not truncated."""
        rows = self.rows
        if not rows.prompts[row]:  # nobody asked for a reply
            rows.restart(row, list(self.sampler.stop_ids[:1]))
        rows.finished[row] = is_finished
        rows.is_over[row], rows.is_sampling[row] = True, False
        if rows.num_tokens[row]:
            self.sampler.paging.ended.append(int(rows.num_tokens[row]))
        self.table.drop(row)

    # Listen

    def listen(self, segments: Sequence[Launched], is_idle: bool) -> None:
        """Calls the functions that listen to segments, and appends what has come for rows that wait."""
        sampler, rows = self.sampler, self.rows
        if segments and sampler.on_segment:
            longest = int(rows.num_tokens.max())
            lengths = np.where(rows.is_over, rows.num_tokens, longest + 1)
            sampler.on_segment(Segment(self.first_row, rows.tokens, longest, lengths))
        if sampler.on_tokens:
            sampled = np.concatenate([segment.rows for segment in segments]) if segments else np.zeros(0, int)
            for row in sampled[rows.is_sampling[sampled]].tolist():
                if not sampler.on_tokens(rows.turn(row, self.first_row)):
                    rows.is_sampling[row] = False
                    rows.take_back(row, int(rows.num_tokens[row]))
        if sampler.on_wait:
            seconds = sampler.paging.seconds
            seconds.extend(perf_counter() - self.clock for segment in segments[-1:] if segment.has_prefill)
            waiting = np.flatnonzero(~rows.is_sampling & ~rows.is_over)
            numbers = {self.first_row + row for row in waiting.tolist()}
            pace = median(seconds) if seconds else 0.0
            with between_turns():
                found = sampler.on_wait(numbers, is_idle, pace, int(rows.is_sampling.sum()))
            for number, following in found.items():
                self.follow(number - self.first_row, following)
            self.clock = perf_counter()


def sample_keys(key: Key, positions: Int[Array, "N"], num_samples: int) -> UInt32[np.ndarray, "B 2"]:
    """Returns the keys fold_in(fold_in(key, position), sample), as plain numbers; keys of a prompt are adjacent."""
    ids, samples = np.repeat(np.asarray(positions), num_samples), np.tile(np.arange(num_samples), len(positions))
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


def make_sampler(
    config: SamplingConfig, model: Decoder, tokenizer: Tokenizer, layout: Layout, max_new_tokens: int
) -> Sampler:
    """Returns the sampler of these settings. Forced answers and turns are added by core/chains/attach.py."""
    stop_ids, stop_strings = tokenizer.read_stops(config.stop_strings)
    model.check_positions("a prompt with its completion", max_new_tokens + 1, "lower --num_generation_tokens")
    return Sampler(
        model=model,
        max_new_tokens=max_new_tokens,
        stop_ids=stop_ids,
        distribution=config.distribution,
        stop_strings=stop_strings,
        paging=Paging(
            page_tokens(config.page_size, layout), num_slots=config.inference_batch_per_device * layout.row_shards
        ),
        max_prompt_tokens=min(config.prompt_length, model.num_positions - max_new_tokens),
        tokenizer=tokenizer,
        layout=layout,
    )
