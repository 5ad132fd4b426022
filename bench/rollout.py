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

import jax
import numpy as np

from bench.common import BenchConfig, environment, load, make_prompts, report, seconds_of, spread
from core.sampling import Rollouts, Sampler
from models.qwen3 import Qwen
from utils.devices.sharding import LayoutConfig, make_layout
from utils.settings.config import option, parse


@dataclass(frozen=True)
class Command(BenchConfig, LayoutConfig):
    """Rollout."""

    stop_share: float = option(0.0, "share of the vocabulary that ends a completion")
    dtype: str = option("", "of matmuls and cache; empty: bfloat16, float32 on CPU")


def make_rollout(model: Qwen, params, prompts: list[list[int]], group_size: int, limit: int, stop_ids=(), **settings):
    """A function that samples the same completions at every call."""
    sampler = Sampler(model, limit, tuple(stop_ids), **settings)
    ids, key = np.arange(len(prompts)), jax.random.key(0)

    def rollout() -> Rollouts:
        return sampler(params, prompts, ids, group_size, key)

    return rollout


def num_completion_tokens(rollouts: Rollouts) -> int:
    return int((rollouts.lengths - rollouts.prompt_lengths).sum())


def main(config: Command) -> None:
    layout = make_layout(config)
    model, params = load(config, layout, config.dtype)
    prompts = make_prompts(model.vocab_size, config.groups_per_batch, config.prompt_tokens)
    stop_ids, limit, rows = range(int(config.stop_share * model.vocab_size)), config.num_generation_tokens, []
    for compact in (True, False) if stop_ids else (True,):
        rollout = make_rollout(
            model, params, prompts, config.group_size, limit, stop_ids, layout=layout, compact=compact
        )  # fmt: skip
        start = time.perf_counter()
        tokens = num_completion_tokens(rollout())
        first, seconds = time.perf_counter() - start, seconds_of(rollout, config.repeats)
        what = f"{len(prompts) * config.group_size} x {limit}, " + ("compaction" if compact else "no compaction")
        per_second = [tokens / x for x in seconds]
        rows.append((what, tokens, first, spread(seconds, 3), spread(per_second, 0)))
    columns = ("completions", "tokens", "first call, s", "seconds", "tokens/s")
    title = f"Rollout, {config.model_dir or config.shape}, {model.dtype}: median (range) of {config.repeats}"
    report(title, columns, rows, environment(), config.json)


if __name__ == "__main__":
    main(parse(Command, sys.argv[1:], __doc__)[0])
