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
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    import utils.settings.packages  # noqa: F401 (says what to install)

import statistics
from typing import NamedTuple

import jax
import jax.numpy as jnp

from bench.common import environment, make_prompts, report, seconds_of
from bench.rollout import make_rollout
from bench.train_step import BenchTraining, load_training, make_update, random_batch
from core.sampler import Sampler
from models.architecture import Decoder
from models.names import Params
from utils.devices.sharding import Layout
from utils.devices.startup import make_layout
from utils.settings.config import parse

GIGA = 1e9


class Limits(NamedTuple):
    """Best rates of this machine: FLOP/s, and bytes/s."""

    matmul: float
    read: float
    copy: float


class Measurement(NamedTuple):
    """Work that was timed: its tokens, its bytes that must be read, and its FLOPs."""

    name: str
    seconds: float
    num_tokens: float
    num_bytes: float
    flops: float


def measure_limits(model: Decoder, num_rows: int) -> Limits:
    """Measures the limits of this machine; `num_rows`: of the product of the model's MLP."""
    on_cpu = jax.default_backend() == "cpu"
    read, copy = bandwidths(256 << 20 if on_cpu else 4 << 30)
    return Limits(matmul_rate(model, num_rows), read, copy)


def matmul_rate(model: Decoder, num_rows: int) -> float:
    """Returns the best FLOP/s of products of squares and of the model's MLP, in its type."""
    sides = (1024, 2048) if jax.default_backend() == "cpu" else (4096, 8192)
    sizes = [(side,) * 3 for side in sides]
    sizes.append((num_rows, model.hidden_size, model.intermediate_size))
    rates = []
    for m, k, n in sizes:
        a = jnp.ones((m, k), model.dtype)
        b = jnp.ones((k, n), model.dtype)
        product = jax.jit(jnp.matmul)
        seconds = seconds_of(lambda f=product, a=a, b=b: f(a, b), 10)
        rates.append(2 * m * k * n / min(seconds))
    return max(rates)


def bandwidths(num_bytes: int) -> tuple[float, float]:
    """Returns bytes/s of reading an array, and of copying it (read and written)."""
    x = jnp.ones(num_bytes // 4, jnp.float32)
    add_up = jax.jit(jnp.sum)
    plus_one = jax.jit(lambda x: x + 1)
    read = min(seconds_of(lambda: add_up(x), 10))
    copy = min(seconds_of(lambda: plus_one(x), 10))
    return num_bytes / read, 2 * num_bytes / copy


def attention_flops(model: Decoder, columns: float) -> float:
    """Returns the FLOPs of both products of attention for one token that sees so many columns, forward."""
    return 4.0 * model.num_hidden_layers * model.num_attention_heads * model.head_dim * columns


def measure_rollout(config: BenchTraining, model: Decoder, params: Params, layout: Layout) -> Measurement:
    """Times sampling."""
    update, limit = config.update, config.num_generation_tokens
    prompts = make_prompts(model.vocab_size, update.groups_per_batch, config.bench.prompt_tokens)
    sampler = Sampler(model, limit, (), layout=layout)
    rollout = make_rollout(sampler, params, prompts, update.group_size)
    seconds = statistics.median(seconds_of(rollout, config.bench.repeats))
    B = config.batch_size
    columns = config.bench.prompt_tokens + (limit + 1) / 2
    item = jnp.dtype(model.dtype).itemsize
    # Bytes of all tokens of all rows.
    num_bytes = limit * (B * model.cache_bytes * columns + model.num_matrix_parameters * item)
    flops = limit * B * (2 * model.num_matrix_parameters + attention_flops(model, columns))
    return Measurement(f"rollout {B} x {limit}", seconds, B * limit, num_bytes, flops)


def measure_update(config: BenchTraining, model: Decoder, params: Params, layout: Layout) -> Measurement:
    """Times one update from given rollouts."""
    batch = random_batch(config, model.vocab_size)
    update = make_update(config, model, params, layout, batch)
    seconds = statistics.median(seconds_of(update, config.bench.repeats))
    B, T = batch.tokens.shape
    head = model.vocab_size * model.hidden_size
    # The head sees completion tokens only.
    flops = 6 * B * T * (model.num_matrix_parameters - head)
    flops += 6 * B * config.num_generation_tokens * head
    flops += 3 * B * T * attention_flops(model, (T + 1) / 2)
    num_bytes = 4 * 4 * model.num_parameters  # weights, gradient and two moments are read at least once
    return Measurement(f"update {B} x {T}", seconds, B * T, num_bytes, flops)


def main(config: BenchTraining) -> None:
    layout = make_layout(config.devices)
    model, params = load_training(config, layout)
    row_length = config.bench.prompt_tokens + config.num_generation_tokens
    limits = measure_limits(model, config.batch_size * row_length)
    table = []
    for measure in (measure_rollout, measure_update):
        work = measure(config, model, params, layout)
        speed = work.num_tokens / work.seconds
        of_read = work.num_bytes / work.seconds / limits.read
        of_matmul = work.flops / work.seconds / limits.matmul
        table.append((work.name, f"{work.seconds:.3f}", f"{speed:,.0f}", f"{of_read:.1%}", f"{of_matmul:.1%}"))
    rates = {
        "matmul GFLOP/s": round(limits.matmul / GIGA),
        "read GB/s": round(limits.read / GIGA, 1),
        "copy GB/s": round(limits.copy / GIGA, 1),
    }
    columns = ("work", "seconds", "tokens/s", "of read bandwidth", "of matmul rate")
    title = f"Roofline, {config.model_name}, {model.dtype}: median of {config.bench.repeats}"
    report(title, columns, table, environment() | rates, config.bench.json)


if __name__ == "__main__":
    main(parse(BenchTraining, sys.argv[1:], __doc__))
