"""Samples completions with a KV cache: compiled segments, early exit, compaction, one prefill per group.

    python core/sampling.py --ckpt_dir ~/checkpoints/Qwen3-1.7B/     # a chat on a terminal, else a few built-in prompts

Letters: N prompts, G completions of each, B = N G rows, P prompt columns, T row length, V vocabulary, S sampler slots
(rows that the device works on; rows leave as they finish).
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import json
import os
from collections.abc import Callable, Generator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Bool, Float, Int, UInt32

from models import qwen3
from models.checkpoint import find_model, load_model
from models.distribution import MAX_SUPPORT, Distribution, log_softmax_at, uniform_numbers
from models.qwen3 import Qwen
from models.tokenizer import Tokenizer
from utils.devices.memory import out_of_memory
from utils.devices.runtime import take_turns
from utils.devices.sharding import Layout, LayoutConfig, ending_together, make_layout, on_each, single_device
from utils.evaluation.chat import chat
from utils.evaluation.tables import find_checkpoints
from utils.metrics.logger import printable
from utils.metrics.terminal import waiting
from utils.settings.config import option, parse
from utils.settings.errors import UserError, user_errors
from utils.training.batching import Array, bucket, concatenate, round_up, survivors

SEGMENT = 32  # decode steps between two looks of the host at what has finished
CHAIN_BYTES = 1 << 27  # of weights, below which two chains of small products are faster than one on a CPU


@dataclass(frozen=True)
class SamplingConfig:
    """Sampling."""

    num_generation_tokens: int = option(-1, "completion limit, tokens; -1: the environment's")
    force_answer_at: int = option(-1, "tokens before the limit where an answer is forced; 0: never, -1: environment's")
    prompt_length: int = option(256, "longest prompt accepted, tokens")
    temperature: float = option(1.0, "of sampling and of the policy that is trained; 0: greedy")
    top_k: int = option(0, f"sample from the k likeliest tokens only, up to {MAX_SUPPORT}; 0: all")
    top_p: float = option(1.0, "sample from the likeliest tokens that hold this probability")
    min_p: float = option(0.0, "sample from tokens with at least this fraction of the likeliest one's probability")
    kv_dtype: str = option(
        "", "of the KV cache; int8: about half the memory and traffic, and probabilities that differ a little from "
        "those that are trained (--importance_correction truncate)", ["", "int8"]
    )  # fmt: skip
    stop_strings: str = option("", "comma-separated texts or special tokens that end a completion")
    inference_batch_per_device: int = option(64, "rows sampled at a time, per device")

    def __post_init__(self):
        if min(self.prompt_length, self.inference_batch_per_device, abs(self.num_generation_tokens)) < 1:
            raise UserError("--prompt_length, --inference_batch_per_device and --num_generation_tokens start at 1")
        assert self.distribution  # which checks its own settings

    @property
    def distribution(self) -> Distribution:
        return Distribution(self.temperature, self.top_k, self.top_p, self.min_p)


@dataclass(frozen=True)
class ForcedAnswer:
    """The beginning of an answer, written for a reply that comes near its limit without one."""

    start: str = "<answer>"
    signs: tuple[str, ...] = ("<answer>",)  # texts that show that an answer has begun
    opening: str = ""  # the end of the prompt, which the reply continues; it may have opened a think block

    def text_after(self, reply: str) -> str:
        """Returns what to write after this reply, on a new line; empty where it has begun its answer."""
        text = self.opening + reply
        if any(sign in text for sign in self.signs):
            return ""
        if text.rfind("<think>") > text.rfind("</think>"):
            return "</think>\n" + self.start
        return self.start if text.endswith("\n") else "\n" + self.start


@struct.dataclass
class Rollouts:
    """Prompts with their completions, right-padded; every [B, T] array speaks of the token in its own column."""

    tokens: Int[Array, "B T"]
    mask: Bool[Array, "B T"]  # tokens that the policy chose: completion with its stop token, without forced tokens
    logprobs: Float[Array, "B T"]  # of each completion token under the distribution it was drawn from, nats
    lengths: Int[Array, "B"]  # prompt + completion
    prompt_lengths: Int[Array, "B"]
    finished: Bool[Array, "B"]  # ended by a stop token or string, not by the limit
    slot_steps: Float[Array, "B"]  # its share of the decode steps of all slots; its length where no slot was idle
    support: Int[Array, "B T S"] | None = None  # ids that could be drawn, -1 fills up; None: all


@dataclass(frozen=True)
class Sampler:
    """How to sample: hashable, so itself the static argument of jit.

    The key of a draw is made from (key, task id, number of the sample, token), so that what is drawn depends neither on
    the batch it stands in, nor on its place there, nor on compaction or the number of devices.
    """

    model: Qwen
    max_new_tokens: int
    stop_ids: tuple[int, ...]
    distribution: Distribution = Distribution()
    stop_strings: tuple[str, ...] = ()
    force_answer_at: int = 0
    forced_answer: ForcedAnswer = field(default=ForcedAnswer(), compare=False)
    max_prompt_tokens: int = 1 << 30
    compact: bool = True
    segment: int = SEGMENT
    prompt_columns: int = 0  # prompts are padded to at least so many
    tokenizer: Tokenizer | None = field(default=None, compare=False)  # for stop strings and forced answers
    layout: Layout = field(default_factory=single_device, compare=False)
    # Told after each segment: the first row of those it speaks of, their tokens, columns drawn, lengths.
    watch: Callable[[int, Array, int, Array], None] | None = field(default=None, compare=False)

    def __call__(self, params, prompts: list[list[int]], ids: Int[Array, "N"], num_samples: int, key) -> Rollouts:
        """Draws `num_samples` completions of each prompt; rows of a prompt stand side by side.

        Raises: UserError for an empty prompt or one longer than `max_prompt_tokens`.
        """
        for i, prompt in zip(ids, prompts, strict=True):
            if not 0 < len(prompt) <= self.max_prompt_tokens:
                raise UserError(
                    f"prompt of task {i} has {len(prompt)} tokens, allowed are 1 to {self.max_prompt_tokens}: "
                    "raise --prompt_length or shorten it"
                )
        N, G = len(prompts), num_samples
        keys = np.asarray(row_keys(key, np.repeat(np.asarray(ids), G), np.tile(np.arange(G), N)))
        weights = rollout_weights(self.model, params, self.layout)
        P, part = max(self.prompt_columns, bucket(max(map(len, prompts)) - 1)), N // self.num_chains(N)
        parts = [slice(first, first + part) for first in range(0, N, part)]
        chains = [self.draw(weights, prompts[each], P, keys.reshape(N, G, 2)[each], each.start * G) for each in parts]
        return concatenate(take_turns(chains))

    def num_chains(self, num_prompts: int) -> int:
        """Equal parts of a batch that are sampled side by side.

        On a CPU the products of a token are too small for several cores: two chains of them, each waiting for itself
        only, take a quarter less time. Weights that no cache holds would be read twice as often.
        """
        is_alone = self.layout.is_cpu and self.layout.mesh.size == 1 and (os.cpu_count() or 1) > 1
        is_small = 4 * self.model.num_parameters < CHAIN_BYTES
        return 2 if is_alone and is_small and num_prompts % 2 == 0 else 1

    def draw(
        self, weights, prompts: list[list[int]], P: int, keys: UInt32[Array, "N G 2"], first: int
    ) -> Generator[Any, None, Rollouts]:
        """Draws the completions of some prompts, the first of which is row `first`; yields what it waits for."""
        layout, (N, G, _) = self.layout, keys.shape
        B, owner = N * G, np.repeat(np.arange(N), G)  # prompt of each row
        keys, last = keys.reshape(B, 2), np.array([prompt[-1] for prompt in prompts], np.int32)[owner]
        tokens = np.zeros((B, self.max_new_tokens), np.int32)
        logprobs, mask = np.zeros(tokens.shape, np.float32), np.zeros(tokens.shape, bool)
        support = np.zeros((*tokens.shape, self.distribution.support_size(self.model.vocab_size)), np.int32)
        lengths, done, slot_steps = np.full(B, self.max_new_tokens), np.zeros(B, bool), np.zeros(B)

        # The first decode step reads a prompt's last token; the others are read here, once for the group.
        filled = np.resize(np.arange(N), round_up(N, layout.row_shards))  # some twice
        starts = np.array([P + 1 - len(prompts[i]) for i in filled], np.int32)
        padded = np.stack([np.pad(prompts[i][:-1], (P + 1 - len(prompts[i]), 0)) for i in filled]).astype(np.int32)
        prefix = prefill(self.model, weights, *layout.put((padded, starts)))
        slots = (filled[:, None] * G + np.arange(G)).ravel()  # row of each slot
        caches, num_caches, width, t = prefix, len(filled), 0, 0  # its columns will be overwritten; tokens drawn
        for steps in self.segments():
            if done.all():
                break
            while self.compact and len(kept := survivors(slots, done, layout.row_shards)) < len(slots):
                # Who is left shares little: from now on each row has its own copy of the prompt.
                shared = kept // (len(slots) // len(starts))
                slots, starts, num_caches = slots[kept], starts[shared], len(kept)
                prefix, caches = (regroup(x, layout.put(np.int32(rows)), n)
                                  for x, rows, n in ((prefix, shared, P), (caches, kept, width)))  # fmt: skip
            if t + steps > width:
                width, source = bucket(t + steps), np.arange(len(slots)) * num_caches // len(slots)
                caches, num_caches = regroup(caches, layout.put(np.int32(source)), width), len(slots)
            forced = self.forced_tokens(slots, tokens, t, steps)
            state = layout.put((starts, last[slots], keys[slots], forced))
            caches, *drawn = decode_segment(self, weights, prefix, caches, np.int32(t), *state)
            slot_steps[~done] += steps * len(slots) / (~done).sum()

            yield drawn
            drawn, scores, ids_drawn_from = layout.fetch(drawn)
            rows, at = np.unique(slots, return_index=True)
            rows, at = rows[~done[rows]], at[~done[rows]]
            tokens[rows, t : t + steps], logprobs[rows, t : t + steps] = drawn[at], scores[at]
            support[rows, t : t + steps] = ids_drawn_from[at]
            mask[rows, t : t + steps] = forced[at] < 0
            last[rows] = drawn[at, -1]
            for row in rows:
                if end := self.end_of(tokens[row], t, t + steps):
                    lengths[row], done[row] = end, True
            t += steps
            if self.watch:
                self.watch(first, tokens, t, lengths)

        columns = tokens, mask, logprobs, support if support.size else None
        return assemble(prompts, owner, lengths, done, slot_steps, *columns)

    def rehearse(self, params, num_prompts: int, num_samples: int) -> None:
        """Runs, on zeros, all programs that a call for so many prompts of `prompt_columns` tokens can need."""
        layout, shards, P = self.layout, self.layout.row_shards, self.prompt_columns
        N = round_up(num_prompts // self.num_chains(num_prompts), shards)
        steps, ends = self.segments(), np.cumsum(self.segments()).tolist()
        shapes = list(dict.fromkeys(zip(steps, map(bucket, ends), strict=True)))  # steps and columns of each segment

        def zeros(*shape: int, dtype=np.int32):
            return layout.put(np.zeros(shape, dtype))

        row_keys(jax.random.key(0), *np.zeros((2, num_prompts * num_samples), int))
        weights = rollout_weights(self.model, params, layout)
        caches = prefix = prefill(self.model, weights, zeros(N, P), zeros(N))
        num_prefixes, size, width = N, N * num_samples, 0
        while True:
            fewer = len(survivors(np.arange(size), np.ones(size, bool), shards)) if self.compact else size
            smaller = None
            for steps, needed in shapes:
                if needed > width:
                    caches, width = regroup(caches, zeros(size), needed), needed
                state = zeros(num_prefixes), zeros(size), zeros(size, 2, dtype=np.uint32), zeros(size, steps)
                caches, *drawn = decode_segment(self, weights, prefix, caches, np.int32(0), *state)
                layout.fetch(drawn)
                if fewer < size:
                    compacted = regroup(caches, zeros(fewer), width)
                    smaller = smaller or compacted
            if fewer == size:
                break
            prefix, caches, width = regroup(prefix, zeros(fewer), P), smaller, shapes[0][1]
            num_prefixes = size = fewer

    def segments(self) -> list[int]:
        """Lengths of the decode segments, a few equal ones up to the forced answer and then to the limit."""
        lengths = []
        for part in filter(None, (self.max_new_tokens - self.force_answer_at, self.force_answer_at)):
            steps = -(-part // -(-part // self.segment))
            lengths += [min(steps, part - start) for start in range(0, part, steps)]
        return lengths

    def forced_tokens(self, slots, tokens, t: int, steps: int) -> Int[Array, "S steps"]:
        """Returns tokens to write in place of drawn ones, for rows without an answer, and -1 elsewhere."""
        forced = np.full((len(slots), steps), -1, np.int32)
        if self.force_answer_at and t == self.max_new_tokens - self.force_answer_at:
            for i, row in enumerate(slots):
                text = self.forced_answer.text_after(self.tokenizer.decode(tokens[row, :t]))
                ids = self.tokenizer.encode(text)[:steps]
                forced[i, : len(ids)] = ids
        return forced

    def end_of(self, tokens: Int[Array, "A"], start: int, stop: int) -> int | None:
        """Completion length where these columns bring a stop token or complete a stop string."""
        ends = np.flatnonzero(np.isin(tokens[start:stop], self.stop_ids))[:1] + start + 1
        last = int(ends[0]) if ends.size else stop
        if self.stop_strings and self.holds_stop_string(tokens[:last]):
            return next(n for n in range(start + 1, last + 1) if self.holds_stop_string(tokens[:n]))
        return last if ends.size else None

    def holds_stop_string(self, tokens) -> bool:
        text = self.tokenizer.decode(tokens)
        return any(stop in text for stop in self.stop_strings)


def assemble(prompts, owner, lengths, finished, slot_steps, tokens, mask, logprobs, support) -> Rollouts:
    """Puts each row's completion, the arrays [B, A, ...], behind its prompt."""
    prompt_lengths = np.array([len(prompt) for prompt in prompts])[owner]
    columns = np.arange((prompt_lengths + lengths).max()) - prompt_lengths[:, None]  # 0: the completion's first
    is_completion, source = (columns >= 0) & (columns < lengths[:, None]), np.clip(columns, 0, tokens.shape[1] - 1)

    def place(x):
        each = (...,) + (None,) * (x.ndim - 2)
        return np.where(is_completion[each], np.take_along_axis(x, source[each], axis=1), np.zeros((), x.dtype))

    rows = place(tokens)
    for row, prompt in zip(rows, (prompts[i] for i in owner), strict=True):
        row[: len(prompt)] = prompt
    support = None if support is None else place(support)
    lengths = prompt_lengths + lengths
    return Rollouts(rows, place(mask), place(logprobs), lengths, prompt_lengths, finished, slot_steps, support)


@jax.jit
def row_keys(key, ids: Int[Array, "B"], samples: Int[Array, "B"]) -> UInt32[Array, "B 2"]:
    """The key of each row, as plain numbers."""
    return jax.random.key_data(jax.vmap(lambda i, j: jax.random.fold_in(jax.random.fold_in(key, i), j))(ids, samples))


def rollout_weights(model: Qwen, params, layout: Layout):
    """The weights as sampling reads them, cast and laid out once a call: left to the loop it would be every token."""
    table = model.unstacked_table()
    shardings = jax.tree.map(lambda spec: layout.sharding(*spec, rollout=True), table, is_leaf=qwen3.is_spec)
    policy = {name: params[name] for name in table}  # without a critic
    return jax.jit(qwen3.unstack, static_argnums=0, out_shardings=shardings)(model, policy)


def make_sampler(
    config: SamplingConfig,
    model: Qwen,
    tokenizer: Tokenizer,
    layout: Layout,
    max_new_tokens: int,
    force_at: int,
    forced_answer: ForcedAnswer = ForcedAnswer(),
) -> Sampler:
    """Returns the sampler that these settings ask for."""
    if not 0 <= force_at < max_new_tokens:
        raise UserError(f"--force_answer_at {force_at} must be below the {max_new_tokens} tokens of a completion")
    stop_ids, stop_strings = read_stops(config.stop_strings, tokenizer)
    return Sampler(
        model, max_new_tokens, stop_ids, config.distribution, stop_strings, force_at, forced_answer,
        config.prompt_length, tokenizer=tokenizer, layout=layout,
    )  # fmt: skip


def read_stops(text: str, tokenizer: Tokenizer) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Returns the ids and the texts that end a completion: the tokenizer's ids, and those of --stop_strings.

    A special token counts by its id, since it is not part of the text that is searched for stop strings.
    Raises: UserError for a stop string that holds a special token and more.
    """
    stop_ids, stop_strings, special_ids = [*tokenizer.stop_ids], [], tokenizer.special_ids
    for stop in filter(None, text.split(",")):
        special = next((token for token in special_ids if token in stop), None)
        if special is None:
            stop_strings.append(stop)
        elif stop == special:
            stop_ids.append(special_ids[stop])
        else:
            raise UserError(
                f"--stop_strings {stop!r} can never match, since {special} is a special token and not text: "
                f"give {special} alone, or text without it"
            )
    return tuple(dict.fromkeys(stop_ids)), tuple(stop_strings)


@partial(jax.jit, static_argnums=0)
def prefill(model: Qwen, weights, tokens: Int[Array, "N P"], starts: Int[Array, "N"]):
    """The cache of left-padded prompts."""
    return qwen3.prefill(model, weights, tokens, starts)


@partial(jax.jit, static_argnums=2)
def regroup(caches, source: Int[Array, "S"], width: int):
    """Fan-out, compaction and growth in one gather: slot i takes over cache row source[i], `width` columns wide.

    Each of them stays on its device: gathered from all, caches would be whole on each device.
    """

    def move(_, state):
        caches, source = state

        def one(x):
            x = x[source % len(x), :, :width]
            return jnp.pad(x, ((0, 0), (0, 0), (0, max(0, width - x.shape[2])), (0, 0)))

        return jax.tree.map(one, caches)

    return on_each(jax.typeof(source).sharding.mesh, move, None, (caches, source))


@partial(jax.jit, static_argnums=0, donate_argnums=3)
def decode_segment(sampler: Sampler, weights, prefix, caches, t, starts, last, keys, forced: Int[Array, "S steps"]):
    """Draws tokens number t, t + 1, ... for each slot, after its token `last`.

    Returns the cache, tokens [S, steps], their log-probabilities, and the ids that they were drawn from.
    """
    # All at once: in the loop it would be twenty small programs for a token.
    uniforms = uniform_numbers(jax.random.wrap_key_data(keys), t + jnp.arange(forced.shape[1]))

    def step(i, state):
        caches, last, tokens, logprobs, support = state
        logits, caches = qwen3.decode(sampler.model, weights, prefix, caches, last, t + i, starts)
        drawn, scores, ids = sampler.distribution.draw(logits, uniforms[i])
        if sampler.force_answer_at:
            force = forced[:, i]
            truth = log_softmax_at(logits / (sampler.distribution.temperature or 1.0), jnp.maximum(force, 0))
            drawn, scores = jnp.where(force < 0, drawn, force), jnp.where(force < 0, scores, truth)
        drawn = drawn.astype(jnp.int32)
        return caches, drawn, tokens.at[:, i].set(drawn), logprobs.at[:, i].set(scores), support.at[:, i].set(ids)

    outputs = jnp.zeros(forced.shape, jnp.int32), jnp.zeros(forced.shape, jnp.float32)
    outputs += (jnp.zeros((*forced.shape, sampler.distribution.support_size(sampler.model.vocab_size)), jnp.int32),)
    # A static number of steps: a condition on the device would be read by the host after every token on a GPU.
    caches, _, *outputs = jax.lax.fori_loop(0, forced.shape[1], step, (caches, last, *outputs))
    return caches, *outputs


@dataclass(frozen=True)
class Command(SamplingConfig, LayoutConfig):
    """Prompts and output."""

    ckpt_dir: str = option("models/tiny", "Hugging Face folder, hub id or run folder (its last step)")
    prompts: str = option("", 'JSONL file of {"prompt": text} or {"messages": [...]}; empty: a few built-in prompts')
    json: str = option("", "JSONL file to write: the same rows with the completions")
    raw: bool = option(False, "continue plain prompts as they are, without chat template")
    thinking: bool = option(False, "let Qwen3 think first")
    num_samples: int = option(1, "completions of each prompt")
    seed: int = option(0, "of the draws")
    dtype: str = option("", "of the matmuls; empty: bfloat16, float32 on CPU", ["", "bfloat16", "float32"])


PROMPTS = ("Use 3 7 12 to make 24.", "Write a poem about the sea.", "What is the capital of France?")


def read_prompts(path: str) -> list[dict]:
    """The rows of a JSONL file, each with "prompt" or "messages"."""
    lines = Path(path).expanduser().read_text().splitlines()
    rows = [json.loads(line) for line in lines if line.strip()]
    for i, row in enumerate(rows, 1):
        if not isinstance(row, dict) or not row.keys() & {"prompt", "messages"}:
            raise UserError(f'{path}: row {i} has neither "prompt" nor "messages"')
    return rows


def main(config: Command):
    with user_errors():
        layout = make_layout(config)
        rows = read_prompts(config.prompts) if config.prompts else [{"prompt": prompt} for prompt in PROMPTS]
        given = {"param_dtype": config.dtype, "kv_dtype": config.kv_dtype}
        _, folder = find_checkpoints(config.ckpt_dir, find_model)[-1]  # the last one of a run folder
        model, params, tokenizer = load_model(folder, layout, config.dtype, **given)
        limit = 256 if config.num_generation_tokens < 0 else config.num_generation_tokens
        sampler = make_sampler(config, model, tokenizer, layout, limit, max(0, config.force_answer_at))
    if not config.prompts and not config.json and sys.stdin.isatty() and sys.stdout.isatty():
        sampler = replace(sampler, segment=8, max_prompt_tokens=model.max_position_embeddings)
        return chat(sampler, params, jax.random.key(config.seed), config.thinking)
    with user_errors():
        prompts = [
            tokenizer.encode(row["prompt"]) if config.raw and "prompt" in row
            else tokenizer.chat(row.get("messages") or [{"role": "user", "content": row["prompt"]}], config.thinking)
            for row in rows
        ]  # fmt: skip
    out, G = [], config.num_samples
    per_call = max(1, config.inference_batch_per_device * layout.row_shards // G)
    for start in range(0, len(rows), per_call):
        ids = np.arange(start, min(start + per_call, len(rows)))
        memory = out_of_memory("inference_batch_per_device", config.inference_batch_per_device)
        with waiting("sampling", len(ids) * G, "rows") as wait, user_errors(), memory:
            each = replace(sampler, watch=partial(wait.watch, start * G))
            r = each(params, [prompts[i] for i in ids], ids, G, jax.random.key(config.seed))
        for b, i in enumerate(np.repeat(ids, G)):
            completion = slice(int(r.prompt_lengths[b]), int(r.lengths[b]))
            drawn, logprobs = r.tokens[b, completion].tolist(), r.logprobs[b, completion].tolist()
            drawn = {"tokens": drawn, "logprobs": logprobs, "text": tokenizer.decode(drawn)}
            out.append(rows[i] | {"prompt_tokens": prompts[i]} | drawn | {"finished": bool(r.finished[b])})
    if layout.is_main and config.json:
        Path(config.json).expanduser().write_text("".join(json.dumps(row) + "\n" for row in out))
    elif layout.is_main:
        for row in out:
            print(f"{'#' * 25} {printable(tokenizer.decode(row['prompt_tokens']))}\n{printable(row['text'])}")


if __name__ == "__main__":
    with ending_together():
        main(parse(Command, sys.argv[1:], __doc__, aliases={"model_dir": "ckpt_dir"})[0])
