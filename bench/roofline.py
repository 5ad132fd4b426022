"""How near sampling and training come to what this machine can do, its limits measured in the same run.

    python bench/roofline.py                                 # the small model, on CPU
    python bench/roofline.py --shape Qwen3-0.6B --groups_per_batch 32 --prompt_tokens 512 --num_generation_tokens 512

Limits: the best rate of square and model-sized matrix products in the model's type, and the bandwidth of reading an
array too large for caches and of copying it. Decode: bytes of weights and of the filled cache that a token must read,
over time, as a fraction of the read bandwidth; and its matrix products as a fraction of the matmul rate, since small
models with many rows are bound by these. Training: 6 x parameters (embedding lookups are none) + attention, per token,
over time, as a fraction of the matmul rate (MFU). Padding and recomputation count as time, not as work.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import statistics

import jax
import jax.numpy as jnp

from bench.common import BenchConfig, environment, load, make_prompts, report, seconds_of
from bench.rollout import make_rollout
from bench.train_step import layers, make_batch, make_update, some_rows
from core.grpo import Config
from models.qwen3 import Qwen
from utils.devices.sharding import make_layout
from utils.settings.config import parse

GIGA = 1e9


@dataclass(frozen=True)
class Command(BenchConfig, Config):
    """Roofline."""

    ppo_minibatch: int = 0


def matmul_rate(model: Qwen, num_rows: int) -> float:
    """The best FLOP/s of products of squares and of the model's MLP, in its type."""
    sides = (1024, 2048) if jax.default_backend() == "cpu" else (4096, 8192)
    sizes = [(side,) * 3 for side in sides] + [(num_rows, model.hidden_size, model.intermediate_size)]
    rates = []
    for m, k, n in sizes:
        a, b = (jnp.ones(size, model.dtype) for size in ((m, k), (k, n)))
        product = jax.jit(jnp.matmul)
        rates.append(2 * m * k * n / min(seconds_of(lambda f=product, a=a, b=b: f(a, b), 10)))
    return max(rates)


def bandwidths(num_bytes: int) -> tuple[float, float]:
    """Bytes/s of reading an array, and of copying it (read and written)."""
    x, add, plus_one = jnp.ones(num_bytes // 4, jnp.float32), jax.jit(jnp.sum), jax.jit(lambda x: x + 1)
    read, copy = (min(seconds_of(lambda f=f: f(x), 10)) for f in (add, plus_one))
    return num_bytes / read, 2 * num_bytes / copy


def attention_flops(model: Qwen, columns: float) -> float:
    """FLOPs of both products of attention for one token that sees so many columns, forward."""
    return 4.0 * model.num_hidden_layers * model.num_attention_heads * model.head_dim * columns


def decode_row(config: Command, model: Qwen, params, layout, matmul: float, read: float) -> tuple:
    """Sampling: tokens/s, and fractions of the limits."""
    prompts = make_prompts(model.vocab_size, config.groups_per_batch, config.prompt_tokens)
    limit, B = config.num_generation_tokens, config.groups_per_batch * config.group_size
    rollout = make_rollout(model, params, prompts, config.group_size, limit, layout=layout)
    seconds = statistics.median(seconds_of(rollout, config.repeats))
    columns, size = config.prompt_tokens + (limit + 1) / 2, jnp.dtype(model.dtype).itemsize
    # Bytes of all tokens of all rows.
    work = limit * (B * model.cache_bytes * columns + model.num_matrix_parameters * size)
    flops = limit * B * (2 * model.num_matrix_parameters + attention_flops(model, columns))
    return f"rollout {B} x {limit}", seconds, B * limit / seconds, work / seconds / read, flops / seconds / matmul


def train_row(config: Command, model: Qwen, params, layout, matmul: float, read: float) -> tuple:
    """One update from given rollouts: tokens/s, and MFU."""
    batch = make_batch(some_rows(config, model.vocab_size), config.prompt_tokens, config.group_size)
    seconds = statistics.median(seconds_of(make_update(config, model, params, layout, batch), config.repeats))
    B, T = batch.tokens.shape
    head = model.vocab_size * model.hidden_size
    # The head sees completion tokens only.
    flops = 6 * (B * T * (model.num_matrix_parameters - head) + B * config.num_generation_tokens * head)
    flops += 3 * B * T * attention_flops(model, (T + 1) / 2)
    state = 4 * 4 * model.num_parameters  # weights, gradient and two moments are read at least once
    return f"update {B} x {T}", seconds, B * T / seconds, state / seconds / read, flops / seconds / matmul


def main(config: Command) -> None:
    layout = make_layout(config)
    model, params = load(config, layout, config.dtype, **layers(config))
    B = config.groups_per_batch * config.group_size
    matmul = matmul_rate(model, B * (config.prompt_tokens + config.num_generation_tokens))
    read, copy = bandwidths(256 << 20 if jax.default_backend() == "cpu" else 4 << 30)
    table = [row(config, model, params, layout, matmul, read) for row in (decode_row, train_row)]
    table = [(what, f"{s:.3f}", f"{v:,.0f}", f"{b:.1%}", f"{m:.1%}") for what, s, v, b, m in table]
    limits = {"matmul GFLOP/s": round(matmul / GIGA), "read GB/s": round(read / GIGA, 1)}
    limits["copy GB/s"] = round(copy / GIGA, 1)
    columns = ("work", "seconds", "tokens/s", "of read bandwidth", "of matmul rate")
    title = f"Roofline, {config.model_dir or config.shape}, {model.dtype}: median of {config.repeats}"
    report(title, columns, table, environment() | limits, config.json)


if __name__ == "__main__":
    main(parse(Command, sys.argv[1:], __doc__)[0])
