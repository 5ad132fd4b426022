"""The whole step of GRPO: rollout, rewards, advantages, one update; where its time goes.

    python bench/grpo_step.py                                # 64 completions of 128 tokens, prompts of 64 in 8 groups
    python bench/grpo_step.py --shape Qwen3-1.7B --groups_per_batch 64 --num_generation_tokens 512

Further options are those of training (core/grpo.py --help). The reward is the share of even token ids: it costs next
to nothing. "rest" is all that is neither sampling nor log-probabilities nor the update.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import statistics
import time
from collections.abc import Callable

import jax
import numpy as np

from bench.common import BenchConfig, environment, load, make_prompts, report, spread
from bench.train_step import layers, make_learner
from core.grpo import Config
from core.objectives import Batch
from core.sampling import Rollouts, Sampler
from models.qwen3 import Qwen
from utils.devices.sharding import make_layout
from utils.settings.config import parse


@dataclass(frozen=True)
class Command(BenchConfig, Config):
    """Step."""

    ppo_minibatch: int = 0


def even_tokens(r: Rollouts) -> np.ndarray:
    """The reward of each row: its share of even token ids."""
    return ((r.tokens % 2 == 0) & r.mask).sum(1) / r.mask.sum(1)


def make_step(config: Config, model: Qwen, params, layout, prompts: list[list[int]]) -> Callable[[], dict[str, float]]:
    """A function that takes one step after another; returns tokens drawn and the seconds of the parts."""
    sampler = Sampler(model, config.num_generation_tokens, (), layout=layout)
    (learner, state), number = make_learner(config, model, params, layout), 0

    def step() -> dict[str, float]:
        nonlocal state, number
        clock, number = time.perf_counter(), number + 1
        key = jax.random.fold_in(jax.random.key(config.seed), number)
        r = sampler(state.params, prompts, np.arange(len(prompts)), config.group_size, key)
        sampled, rewards = time.perf_counter(), even_tokens(r).astype(np.float32)
        batch = Batch(
            r.tokens, r.mask, r.logprobs, rewards, r.lengths, r.prompt_lengths, r.finished,
            group_size=config.group_size,
        )  # fmt: skip
        batch, assessed = learner.assess(state.params, batch)
        state, learnt = learner.learn(state, batch, number)
        jax.block_until_ready(state)
        assert learnt["num_updates"] == 1, learnt
        return {
            "tokens": int(r.mask.sum()), "step": time.perf_counter() - clock, "rollout": sampled - clock,
            "logprobs": assessed["times/logprobs"], "update": learnt["times/update"],
        }  # fmt: skip

    return step


def main(config: Command) -> None:
    layout = make_layout(config)
    model, params = load(config, layout, config.dtype, **layers(config))
    prompts = make_prompts(model.vocab_size, config.groups_per_batch, config.prompt_tokens)
    step = make_step(config, model, params, layout, prompts)
    step()
    steps = [step() for _ in range(config.repeats)]
    for each in steps:
        each["rest"] = each["step"] - each["rollout"] - each["logprobs"] - each["update"]
    whole, rows = statistics.median(each["step"] for each in steps), []
    for name in ("rollout", "logprobs", "update", "rest", "step"):
        seconds = [each[name] for each in steps]
        rows.append((name, spread(seconds, 3), f"{statistics.median(seconds) / whole:.1%}"))
    title = f"Step of {steps[0]['tokens']:,} tokens, {config.model_dir or config.shape}, {model.dtype}: "
    title += f"median (range) of {config.repeats}"
    report(title, ("part", "seconds", "of the step"), rows, environment(), config.json, steps=steps)


if __name__ == "__main__":
    main(parse(Command, sys.argv[1:], __doc__)[0])
