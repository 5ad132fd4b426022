"""Update: seconds of old log-probabilities, loss, gradient and one optimiser step; its memory against a naive one's.

    python bench/train_step.py                               # 64 rows of 64 + 128 tokens
    python bench/train_step.py --shape small_vocab --memory  # compiles only, so that any shape will do anywhere
    python bench/train_step.py --shape Qwen3-0.6B --groups_per_batch 2 --prompt_tokens 512 --num_generation_tokens 512

Further options are those of training (core/grpo.py --help). The naive step makes the logits [B, T, V] of all rows at
once with the same model; memory is what the compiler says that the step needs, parameters and gradients included.
"""

import sys
from dataclasses import dataclass, replace
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import jax
import jax.numpy as jnp
import numpy as np

from bench.common import BenchConfig, environment, load, make_prompts, report, seconds_of, shape, spread
from core.grpo import Config, Learner, accumulate
from core.objectives import Batch, policy_loss
from models.checkpoint import load_model
from models.distribution import entropy, log_softmax_at
from models.qwen3 import Qwen, init_params, logits
from utils.devices.memory import fit_memory
from utils.devices.sharding import make_layout
from utils.settings.config import option, parse
from utils.training.state import TrainState, init_state, make_optimizer

GB = 1e9


@dataclass(frozen=True)
class Command(BenchConfig, Config):
    """Update."""

    ppo_minibatch: int = 0
    memory: bool = option(False, "the memory of the compiled step instead of its time")


def make_learner(config: Config, model: Qwen, params, layout) -> tuple[Learner, TrainState]:
    """What turns a batch into a better state, and that state at step 0; memory is divided as a run does it."""
    optimizer = make_optimizer(config)
    state = init_state(params, optimizer)
    config, model, _ = fit_memory(config, model, layout, state)
    return Learner(model, optimizer, layout, config), state


def layers(config: Config) -> dict[str, bool | str]:
    """What the settings say of how the layers are compiled."""
    return {"unroll": config.unroll_layers, "attention": config.attention}


def make_batch(rows: list[list[int]], num_prompt_tokens: int, group_size: int, rewards=None) -> Batch:
    """Rollouts of equal length; rewards rise within each group where none are given."""
    tokens = np.array(rows, np.int32)
    is_completion = np.broadcast_to(np.arange(tokens.shape[1]) >= num_prompt_tokens, tokens.shape)
    rewards = np.arange(len(tokens)) % group_size / group_size if rewards is None else rewards
    lengths, ones = np.full(len(tokens), tokens.shape[1]), np.ones(len(tokens), int)
    return Batch(
        tokens, is_completion.copy(), np.zeros(tokens.shape, np.float32), rewards.astype(np.float32), lengths,
        num_prompt_tokens * ones, ones > 0, group_size=group_size,
    )  # fmt: skip


def make_update(config: Config, model: Qwen, params, layout, batch: Batch):
    """A function that learns from the batch, again and again."""
    learner, state = make_learner(config, model, params, layout)

    def update():
        nonlocal state
        assessed, _ = learner.assess(state.params, batch)
        state, metrics = learner.learn(state, assessed, 1)
        assert metrics["num_updates"] == 1, metrics
        return state.params

    return update


def some_rows(config: BenchConfig, vocabulary: int) -> list[list[int]]:
    """Random prompts, each with random completions."""
    prompts = make_prompts(vocabulary, config.groups_per_batch, config.prompt_tokens)
    completions = make_prompts(vocabulary, config.groups_per_batch * config.group_size, config.num_generation_tokens)
    return [prompts[i // config.group_size] + completion for i, completion in enumerate(completions)]


def naive_accumulate(model: Qwen, config: Config, params, grads, batch: Batch):
    """What `accumulate` computes, from the logits [B, T, V]."""

    def loss(params):
        scaled, targets = logits(model, params, batch.tokens)[:, :-1] / config.temperature, batch.tokens[:, 1:]
        first = ((0, 0), (1, 0))
        scores = jnp.pad(log_softmax_at(scaled, targets), first), jnp.pad(entropy(scaled), first)
        return policy_loss(*scores, batch, config)

    (_, metrics), new = jax.value_and_grad(loss, has_aux=True)(params)
    return jax.tree.map(jnp.add, grads, new), metrics


def gigabytes(compiled) -> float:
    """What a compiled function needs at once, its arguments included."""
    m = compiled.memory_analysis()
    size = m.argument_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes + m.temp_size_in_bytes
    return size / GB


def memory(config: Command, model: Qwen, layout) -> list[tuple]:
    """Rows of a table: rows x tokens, our memory, the naive step's, their ratio, and the size of the logits."""
    params, table = jax.eval_shape(lambda: init_params(model, jax.random.key(0))), []
    # Nothing is allocated here that --remat auto could go by: the most careful choice stands for it.
    config = replace(config, tokens_per_microbatch=config.tokens_per_microbatch or 8192)
    model = replace(model, remat="full" if config.remat == "auto" else config.remat)
    learner = Learner(model, make_optimizer(config), layout, config)
    for factor in (1, 2, 4):
        sized = replace(config, groups_per_batch=factor * config.groups_per_batch)
        batch = make_batch(some_rows(sized, model.vocab_size), config.prompt_tokens, config.group_size)
        zeros = np.zeros(batch.tokens.shape, np.float32)
        batch = batch.replace(advantages=zeros, denominator=zeros[:, 0], num_tokens=zeros[:, 0])
        pieces = [gigabytes(accumulate.lower(model, config, params, (params, np.float32(0)), piece, first).compile())
                  for _, piece, first in learner.microbatches(batch, len(batch.rewards))][:1]  # fmt: skip
        naive = jax.jit(naive_accumulate, static_argnums=(0, 1), donate_argnums=3)
        whole = gigabytes(naive.lower(model, config, params, params, batch).compile())
        B, T = batch.tokens.shape
        table.append((f"{B} x {T}", pieces[0], whole, pieces[0] / whole, 4 * B * T * model.vocab_size / GB))
    return table


def main(config: Command) -> None:
    layout, name = make_layout(config), config.model_dir or config.shape
    if config.memory:
        model = shape(config.shape, dtype=config.dtype or "float32", **layers(config))
        if config.model_dir:
            model = load_model(config.model_dir, layout, config.dtype, **layers(config))[0]
        columns = ("rows x tokens", "step, GB", "naive step, GB", "ratio", "logits [B, T, V], GB")
        table = memory(config, model, layout)
        return report(f"Memory of the update, {name}, {model.dtype}", columns, table, environment(), config.json)
    table = []
    for old in (True, False):
        model, params = load(config, layout, config.dtype, **layers(config))
        batch = make_batch(some_rows(config, model.vocab_size), config.prompt_tokens, config.group_size)
        update = make_update(replace(config, recompute_logprobs=old), model, params, layout, batch)
        seconds = seconds_of(update, config.repeats)
        what = "old log-probabilities and one update" if old else "one update"
        table.append((what, batch.tokens.size, spread(seconds, 3), spread([batch.tokens.size / x for x in seconds], 0)))
    title = f"Update, {name}, {model.dtype}: median (range) of {config.repeats}"
    report(title, ("work", "tokens", "seconds", "tokens/s"), table, environment(), config.json)


if __name__ == "__main__":
    main(parse(Command, sys.argv[1:], __doc__)[0])
