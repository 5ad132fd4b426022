"""Rollout: seconds and tokens/s of the sampler, the first call apart, since it compiles.

    python bench/rollout.py                                  # 64 completions of 128 tokens, prompts of 64 in 8 groups
    python bench/rollout.py --shape Qwen3-0.6B --groups_per_batch 32 --num_generation_tokens 1024 --stop_share 0.002

--stop_share S makes completions end at random: so much of the vocabulary are stop tokens, and to a random model all
tokens are about equally likely, so that lengths are geometric with mean 1 / S. Then the same is measured without
compaction. --lengths 100,1024 draws the lengths of prompts and completions from this range, all equally likely: with
256 groups of one, the work that nano-vllm's benchmark gives to vLLM.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    import utils.settings.packages  # noqa: F401 (says what to install)

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from threading import Event
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Int

from bench.common import BenchConfig, RowsConfig, environment, load, make_prompts, report, seconds_of, spread
from core.records import Completions
from core.sampler import Chain, ChainJob, Sampler
from models.names import Params, Weights
from utils.devices.startup import DeviceConfig, make_layout
from utils.settings.config import parse
from utils.settings.errors import UserError
from utils.settings.options import group, option


@dataclass(frozen=True)
class Command:
    """Rollout."""

    stop_share: float = option(0.0, "Share of the vocabulary that ends a completion")
    lengths: str = option("", "Range of the tokens of prompts and of completions, as 100,1024; empty: all are equal")
    dtype: str = option("", "Data type of matmuls and cache; empty: bfloat16, float32 on CPU")
    bench: BenchConfig = group(BenchConfig)
    rows: RowsConfig = group(RowsConfig)
    devices: DeviceConfig = group(DeviceConfig)


class FixedLengths(Chain):
    """Completions that end after numbers of tokens that are given, whatever is drawn."""

    def __init__(self, limits: Int[np.ndarray, "B"], sampler: Sampler, weights: Weights, job: ChainJob):
        super().__init__(sampler, weights, job)
        self.limits = limits[self.row_offset :][: len(self.keys)]

    def segments(self, cancelled: Event) -> Iterator[tuple[int, int]]:
        drawn = self.drawn
        for start, steps in super().segments(cancelled):
            yield start, steps
            has_ended = ~drawn.done & (self.limits <= start + steps)
            drawn.lengths[has_ended] = self.limits[has_ended]
            drawn.done |= has_ended


class Work(NamedTuple):
    """Prompts, the most tokens of a completion, and what draws them."""

    prompts: list[list[int]]
    limit: int
    make_chain: Callable[[Sampler, Weights, ChainJob], Chain]


def make_work(config: Command, vocab_size: int) -> Work:
    """Returns prompts and completions of equal lengths, or of random ones with --lengths.

    Raises: UserError for --lengths that cannot be read.
    """
    bench, rows = config.bench, config.rows
    if not config.lengths:
        prompts = make_prompts(vocab_size, rows.groups_per_batch, bench.prompt_tokens)
        return Work(prompts, rows.num_generation_tokens, Chain)
    try:
        low, high = map(int, config.lengths.split(","))
        lengths = np.random.default_rng(0).integers(low, high, (2, rows.groups_per_batch), endpoint=True)
    except ValueError:
        raise UserError(f"--lengths {config.lengths} is no range like 100,1024") from None
    prompts = make_prompts(vocab_size, rows.groups_per_batch, high)
    prompts = [prompt[:length] for prompt, length in zip(prompts, lengths[0], strict=True)]
    limits = np.repeat(lengths[1], rows.group_size)
    return Work(prompts, int(limits.max()), partial(FixedLengths, limits))


def make_rollout(
    sampler: Sampler, params: Params, prompts: Sequence[list[int]], group_size: int, first_id: int = 0
) -> Callable[[], Completions]:
    """Returns a function that samples the same completions at every call, from weights that it lays out anew."""
    ids = first_id + np.arange(len(prompts))
    key = jax.random.key(0)

    def rollout() -> Completions:
        weights = sampler.load_weights(params)
        return sampler.generate(weights, prompts, ids, group_size, key)

    return rollout


def completion_lengths(completions: Completions) -> Int[np.ndarray, "B"]:
    return completions.lengths - completions.prompt_lengths


def main(config: Command) -> None:
    bench, rows = config.bench, config.rows
    layout = make_layout(config.devices)
    model, params = load(rows.model_dir, bench.shape, layout, config.dtype)
    prompts, limit, make_chain = make_work(config, model.vocab_size)
    num_stop_ids = int(config.stop_share * model.vocab_size)
    table = []
    for block_sizes in ((), (rows.num_rows,)) if num_stop_ids else ((),):
        stop_ids = tuple(range(num_stop_ids))
        sampler = Sampler(model, limit, stop_ids, layout=layout, block_sizes=block_sizes, make_chain=make_chain)
        rollout = make_rollout(sampler, params, prompts, rows.group_size)
        start = time.perf_counter()
        num_tokens = int(completion_lengths(rollout()).sum())
        first_call = time.perf_counter() - start
        seconds = seconds_of(rollout, bench.repeats)
        speeds = [num_tokens / x for x in seconds]
        name = f"{rows.num_rows} x {limit}, {'no compaction' if block_sizes else 'compaction'}"
        table.append((name, num_tokens, first_call, spread(seconds, 3), spread(speeds, 0)))
    columns = ("completions", "tokens", "first call, s", "seconds", "tokens/s")
    title = f"Rollout, {rows.model_dir or bench.shape}, {model.dtype}: median (range) of {bench.repeats}"
    report(title, columns, table, environment(), bench.json)


if __name__ == "__main__":
    main(parse(Command, sys.argv[1:], __doc__))
