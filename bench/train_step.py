"""Update: seconds of old log-probabilities, loss, gradient and one optimizer step.

    python bench/train_step.py                               # 64 rows of 64 + 128 tokens
    python bench/train_step.py --lora_rank 8                 # adapters and all parameters in turn, and their ratio
    python bench/train_step.py --shape Qwen3-0.6B --groups_per_batch 2 --prompt_tokens 512 --num_generation_tokens 512

Further options are those of training (core/grpo.py --help). bench/compiled.py has the memory of an update.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    import utils.settings.packages  # noqa: F401 (says what to install)

import jax
import numpy as np

from bench.common import BenchConfig, environment, make_prompts, report, rounds_of, shape, spread
from core.advantages import compute_advantages
from core.config import Config
from core.learner import Learner, make_learner, split_minibatches
from core.records import Batch, Completions
from core.sampler import SamplingConfig, decode_weights
from models.architecture import Decoder, is_spec
from models.checkpoint import default_dtype, lay_out_adapters, load_model
from models.decoder import init_params
from models.lora import init_adapters
from models.names import Adapters, Params
from models.state import TrainState
from utils.devices.sharding import Layout
from utils.devices.startup import make_layout
from utils.settings.config import parse, with_options
from utils.settings.groups import UpdateConfig
from utils.settings.options import group, option


@dataclass(frozen=True)
class BenchUpdate(UpdateConfig):
    """Batch and updates."""

    groups_per_batch: int = 8
    ppo_minibatch: int = 0


@dataclass(frozen=True)
class BenchSampling(SamplingConfig):
    """Sampling."""

    num_generation_tokens: int = 128


@dataclass(frozen=True)
class BenchTraining(Config):
    """Training that is measured, with its own defaults."""

    model_dir: str = option("", "Hugging Face folder of a model to measure; empty: a random one of --shape")
    bench: BenchConfig = group(BenchConfig)
    update: BenchUpdate = group(BenchUpdate)
    sampling: BenchSampling = group(BenchSampling)

    @property
    def model_name(self) -> str:
        return self.model_dir or self.bench.shape

    @property
    def num_generation_tokens(self) -> int:
        return self.sampling.num_generation_tokens


def load_training(config: BenchTraining, layout: Layout) -> tuple[Decoder, Params]:
    """Returns the model to measure, and its parameters: of a folder, or random ones of a named shape."""
    arguments = config.compute.arguments
    if config.model_dir:
        return load_model(config.model_dir, layout, **arguments)[:2]
    arguments |= {"dtype": config.compute.dtype or default_dtype(), "mesh": layout.mesh}
    model = shape(config.bench.shape, **arguments)
    table = model.parameter_table()
    shardings = jax.tree.map(lambda spec: layout.sharding(*spec), table, is_leaf=is_spec)
    init = jax.jit(init_params, static_argnums=0, out_shardings=shardings)
    return model, init(model, jax.random.key(0))


def make_batch(rows: Sequence[list[int]], num_prompt_tokens: int, group_size: int) -> Batch:
    """Returns rollouts of equal length, whose rewards rise within each group."""
    tokens = np.array(rows, np.int32)
    num_rows, length = tokens.shape
    is_completion = np.arange(length) >= num_prompt_tokens
    return Batch(
        tokens=tokens,
        mask=np.tile(is_completion, (num_rows, 1)),
        sample_logprobs=np.zeros(tokens.shape, np.float32),
        rewards=np.float32(np.arange(num_rows) % group_size / group_size),
        lengths=np.full(num_rows, length),
        prompt_lengths=np.full(num_rows, num_prompt_tokens),
        finished=np.ones(num_rows, bool),
        group_size=group_size,
    )


def batch_of(completions: Completions, group_size: int) -> Batch:
    """Returns all rows, to learn from; the reward of a row is its share of even token ids."""
    mask = completions.mask
    is_even = (completions.tokens % 2 == 0) & mask
    return Batch(
        completions.tokens,
        mask,
        completions.logprobs,
        np.float32(is_even.sum(axis=1) / mask.sum(axis=1)),
        completions.lengths,
        completions.prompt_lengths,
        completions.finished,
        completions.support,
        completions.routes,
        group_size=group_size,
    )


def learn(
    config: Config, learner: Learner, state: TrainState, batch: Batch, number: int, with_old: bool = False
) -> TrainState:
    """Makes step `number`, of one update; with_old: with old log-probabilities, as a step of several updates."""
    _, prepared = learner.add_logprobs(state, batch)
    if with_old:
        old = learner.compute_outputs(learner.policy(state.params), batch)
        prepared = replace(prepared, old_logprobs=old.logprobs)
    prepared = compute_advantages(prepared, config.objective)
    (minibatch,) = split_minibatches(prepared, config, number, epoch=0)
    state, made = learner.update(state, minibatch, 0.0)
    learner.metrics([made])
    return jax.block_until_ready(state)


def make_update(
    config: BenchTraining, model: Decoder, params: Params, layout: Layout, batch: Batch, with_old: bool = False
) -> Callable[[], Params | Adapters]:
    """Returns a function that learns from the batch, again and again; under --lora_rank it trains adapters."""
    base = None
    if config.lora.lora_rank:
        base = decode_weights(model, layout, params, model.layer_numbers)
        adapters = init_adapters(model, config.lora.lora_rank, jax.random.key(0))
        params = lay_out_adapters(model, adapters, layout)
    learner, state = make_learner(config, model, params, layout, config.num_generation_tokens, base=base)

    def update() -> Params | Adapters:
        nonlocal state
        state = learn(config, learner, state, batch, 1, with_old)
        return state.params

    return update


def random_batch(config: BenchTraining, vocabulary: int) -> Batch:
    """Returns random prompts with random completions."""
    num_groups = config.update.groups_per_batch
    group_size = config.update.group_size
    prompts = make_prompts(vocabulary, num_groups, config.bench.prompt_tokens)
    completions = make_prompts(vocabulary, num_groups * group_size, config.num_generation_tokens)
    rows = [prompts[i // group_size] + completion for i, completion in enumerate(completions)]
    return make_batch(rows, config.bench.prompt_tokens, group_size)


def timed_update(config: BenchTraining, layout: Layout, with_old: bool) -> Callable[[], Params | Adapters]:
    """Returns a function that learns from random rows, with a model of its own."""
    model, params = load_training(config, layout)
    return make_update(config, model, params, layout, random_batch(config, model.vocab_size), with_old)


def main(config: BenchTraining) -> None:
    layout = make_layout(config.devices)
    variants = {"all parameters": with_options(config, lora_rank=0)}
    if config.lora.lora_rank:
        variants[f"adapters of rank {config.lora.lora_rank}"] = config
    works = {"old log-probabilities and one update": True, "one update": False}
    table = []
    for work, with_old in works.items():
        updates = [timed_update(variant, layout, with_old) for variant in variants.values()]
        times = rounds_of(updates, config.bench.repeats)
        for name, seconds in zip(variants, times, strict=True):
            ratios = (seconds / times[0]).T
            table.append((work, name, spread(seconds[:, 0], 3), *(spread(ratio, 3) for ratio in ratios)))
    num_tokens = config.batch_size * (config.bench.prompt_tokens + config.num_generation_tokens)
    dtype = config.compute.dtype or default_dtype()
    title = f"Update, {config.model_name}, {dtype}, {num_tokens:,} tokens: median (range) of {config.bench.repeats}"
    columns = "work", "trained", "seconds", "seconds / of all", "CPU seconds / of all"
    report(title, columns, table, environment(), config.bench.json)


if __name__ == "__main__":
    main(parse(BenchTraining, sys.argv[1:], __doc__))
