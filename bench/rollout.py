"""Rollout: seconds and tokens/s of the sampler, the first call apart, since it compiles.

    python bench/rollout.py                                  # 64 completions of 128 tokens, prompts of 64 in 8 groups
    python bench/rollout.py --shape Qwen3-0.6B --groups_per_batch 32 --num_generation_tokens 1024 --stop_share 0.002

--stop_share S makes completions end at random: so much of the vocabulary are stop tokens, and to a random model all
tokens are about equally likely, so that lengths are geometric with mean 1 / S. Then the same is measured without
compaction.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import time
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jaxtyping import Int

from bench.common import BenchConfig, RowsConfig, environment, load, make_prompts, report, seconds_of, spread
from core.records import Completions
from core.sampling import Sampler
from models.names import Params
from utils.devices.startup import DeviceConfig, make_layout
from utils.settings.config import group, option, parse


@dataclass(frozen=True)
class Command:
    """Rollout."""

    stop_share: float = option(0.0, "Share of the vocabulary that ends a completion")
    dtype: str = option("", "Data type of matmuls and cache; empty: bfloat16, float32 on CPU")
    bench: BenchConfig = group(BenchConfig)
    rows: RowsConfig = group(RowsConfig)
    devices: DeviceConfig = group(DeviceConfig)


def make_rollout(
    sampler: Sampler, params: Params, prompts: Sequence[list[int]], group_size: int
) -> Callable[[], Completions]:
    """Returns a function that samples the same completions at every call, from weights that it lays out anew."""
    ids = np.arange(len(prompts))
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
    prompts = make_prompts(model.vocab_size, rows.groups_per_batch, bench.prompt_tokens)
    limit = rows.num_generation_tokens
    num_stop_ids = int(config.stop_share * model.vocab_size)
    table = []
    for is_compact in (True, False) if num_stop_ids else (True,):
        sampler = Sampler(model, limit, tuple(range(num_stop_ids)), layout=layout, compact=is_compact)
        rollout = make_rollout(sampler, params, prompts, rows.group_size)
        start = time.perf_counter()
        num_tokens = int(completion_lengths(rollout()).sum())
        first_call = time.perf_counter() - start
        seconds = seconds_of(rollout, bench.repeats)
        speeds = [num_tokens / x for x in seconds]
        name = f"{rows.num_rows} x {limit}, {'compaction' if is_compact else 'no compaction'}"
        table.append((name, num_tokens, first_call, spread(seconds, 3), spread(speeds, 0)))
    columns = ("completions", "tokens", "first call, s", "seconds", "tokens/s")
    title = f"Rollout, {rows.model_dir or bench.shape}, {model.dtype}: median (range) of {bench.repeats}"
    report(title, columns, table, environment(), bench.json)


if __name__ == "__main__":
    main(parse(Command, sys.argv[1:], __doc__))
