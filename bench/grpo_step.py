"""The whole step of GRPO: rollout, rewards, advantages, one update; where its time goes.

    python bench/grpo_step.py                                # 64 completions of 128 tokens, prompts of 64 in 8 groups
    python bench/grpo_step.py --shape Qwen3-1.7B --groups_per_batch 64 --num_generation_tokens 512

Further options are those of training (core/grpo.py --help). The reward is the share of even token ids: it costs next
to nothing. "update" holds the advantages too; "rest" is the reading of metrics.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    import utils.settings.packages  # noqa: F401 (says what to install)

import statistics
import time
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jaxtyping import Float

from bench.common import environment, make_prompts, report, spread
from bench.train_step import BenchTraining, load_training
from core.advantages import compute_advantages
from core.chains.pages import with_pages
from core.config import Config
from core.learner import make_learner, split_minibatches
from core.records import Batch, Completions
from core.sampler import Sampler
from models.architecture import Decoder
from models.names import Params
from utils.devices.sharding import Layout
from utils.devices.startup import make_layout
from utils.settings.config import parse

PARTS = ("rollout", "logprobs", "update")


def even_tokens(completions: Completions) -> Float[np.ndarray, "B"]:
    """Returns the reward of each row: its share of even token ids."""
    mask = completions.mask
    is_even = (completions.tokens % 2 == 0) & mask
    return np.float32(is_even.sum(axis=1) / mask.sum(axis=1))


def make_batch(completions: Completions, group_size: int) -> Batch:
    """Returns all rows, to learn from."""
    return Batch(
        completions.tokens,
        completions.mask,
        completions.logprobs,
        even_tokens(completions),
        completions.lengths,
        completions.prompt_lengths,
        completions.finished,
        completions.support,
        completions.routes,
        group_size=group_size,
    )


def make_step(
    config: Config, model: Decoder, params: Params, layout: Layout, prompts: Sequence[list[int]]
) -> Callable[[], dict[str, float]]:
    """Returns a function that makes one step after another; it returns tokens drawn and the seconds of the parts."""
    limit = config.sampling.num_generation_tokens
    sampler = with_pages(Sampler(model, limit, (), layout=layout), -1)
    learner, state = make_learner(config, model, params, layout, limit)
    group_size = config.update.group_size
    ids = np.arange(len(prompts))
    number = 0

    def step() -> dict[str, float]:
        nonlocal state, number
        clocks = [time.perf_counter()]
        number += 1
        key = jax.random.fold_in(jax.random.key(config.seed), number)
        weights = sampler.load_weights(state.params)
        completions = sampler.generate(weights, prompts, ids, group_size, key)
        clocks.append(time.perf_counter())
        _, batch = learner.add_logprobs(state, make_batch(completions, group_size))
        clocks.append(time.perf_counter())
        batch = compute_advantages(batch, config.objective)
        (minibatch,) = split_minibatches(batch, config, number, epoch=0)
        state, update = learner.update(state, minibatch, 0.0)
        jax.block_until_ready(state)
        clocks.append(time.perf_counter())
        learner.metrics([update])
        seconds = dict(zip(PARTS, np.diff(clocks).tolist(), strict=True))
        seconds["step"] = time.perf_counter() - clocks[0]
        return seconds | {"tokens": int(completions.mask.sum())}

    return step


def main(config: BenchTraining) -> None:
    layout = make_layout(config.devices)
    model, params = load_training(config, layout)
    prompts = make_prompts(model.vocab_size, config.update.groups_per_batch, config.bench.prompt_tokens)
    step = make_step(config, model, params, layout, prompts)
    step()
    steps = [step() for _ in range(config.bench.repeats)]
    for seconds in steps:
        seconds["rest"] = seconds["step"] - sum(seconds[part] for part in PARTS)
    median_step = statistics.median(seconds["step"] for seconds in steps)
    table = []
    for name in (*PARTS, "rest", "step"):
        values = [seconds[name] for seconds in steps]
        share = statistics.median(values) / median_step
        table.append((name, spread(values, 3), f"{share:.1%}"))
    title = f"Step of {steps[0]['tokens']:,} tokens, {config.model_name}, {model.dtype}: "
    title += f"median (range) of {config.bench.repeats}"
    report(title, ("part", "seconds", "of the step"), table, environment(), config.bench.json, steps=steps)


if __name__ == "__main__":
    main(parse(BenchTraining, sys.argv[1:], __doc__))
