"""Least seconds of sampling, and measured speeds of a device: for bench/roofline.py.

Letters: L layers, H query heads, K key heads, C channels of a head, T row length.
"""

import time
from collections import Counter
from functools import cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Float, Int

from models.architecture import LINEAR, SLIDING, Decoder
from models.names import Array
from utils.batching import RowSizes


class Limits(NamedTuple):
    """Measured speeds of a device, per second: operations of matrix products, bytes of its memory."""

    flops: float
    bandwidth: float

    def seconds(self, flops: ArrayLike, num_bytes: ArrayLike) -> float:
        """Returns the seconds of pieces of work: of each the longer of its products and its bytes."""
        return float(np.maximum(flops / self.flops, num_bytes / self.bandwidth).sum())

    def describe(self) -> str:
        return f"{self.flops / 1e12:.4g} TFLOP/s and {self.bandwidth / 1e9:,.0f} GB/s"


@cache
def measure_limits(device: jax.Device, dtype: str) -> Limits:
    """Measures a device by one program, in less than a second, once in a process."""
    side, size, repeats = 2**14 // jnp.dtype(dtype).itemsize, 2**27, 4
    if device.platform == "cpu":
        side, size, repeats = 1024, 2**25, 2

    def seconds(*counts: int) -> float:
        start = time.perf_counter()
        jax.block_until_ready(exercise(dtype, side, size, *map(np.int32, counts)))
        return time.perf_counter() - start

    with jax.default_device(device):
        seconds(1, 1)  # compiles
        tries = ((0, 0), (repeats, 0), (0, repeats))
        nothing, products, copies = (min(seconds(*counts) for _ in range(3)) for counts in tries)
    return Limits(repeats * 4 * 2 * side**3 / (products - nothing), repeats * 2 * 4 * size / (copies - nothing))


@partial(jax.jit, static_argnums=(0, 1, 2))
def exercise(
    dtype: str, side: int, size: int, num_products: Int[Array, ""], num_copies: Int[Array, ""]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Multiplies square matrices, four times each, then reads and writes an array, as often as the numbers give."""
    matrix = jax.random.normal(jax.random.key(0), (side, side), dtype) / side**0.5  # zeros would take less power
    # XLA copies the result of an iteration: one product would take a twentieth longer for it.
    product = jax.lax.fori_loop(0, num_products, lambda _, x: matrix @ (matrix @ (matrix @ (matrix @ x))), matrix)
    copy = jax.lax.fori_loop(0, num_copies, lambda _, x: x / 2 + 1, jnp.zeros(size))
    return product[0, 0], copy[0]


def decode_seconds(model: Decoder, rows: RowSizes, limits: Limits) -> float:
    """Returns the least seconds in which a device can sample the target tokens of rows, all rows at once.

    It adds up parts, each the longer time of its products and its bytes. In each step the parts are the weights of the
    layers, read once, and the head with its logits; of experts, those count that the live rows choose, at most all.
    Over all steps the parts are attention and states. Each token reads the keys and values before it; a prompt's are
    read once for all its rows. All other tokens, a prompt's once, are prefilled at once.
    """
    _, firsts = np.unique(rows.prompts, return_index=True)
    prompt_lengths = rows.prompt_lengths[firsts, None]
    num_draws = rows.is_target.sum(axis=1)
    num_steps = np.zeros((len(firsts), 1), int)
    np.maximum.at(num_steps[:, 0], rows.prompts, num_draws)
    live = len(num_draws) - np.cumsum(np.bincount(num_draws))[:-1]  # rows that sample a token in each step
    columns = np.arange(rows.is_target.shape[1])
    own = columns - rows.prompt_lengths[:, None]  # 0: the first token behind the prompt
    is_appended = (own >= 0) & (columns < rows.lengths[:, None]) & ~rows.is_target
    drawn_columns = rows.is_target.sum(axis=0)
    prefilled_columns = is_appended.sum(axis=0) + (columns < prompt_lengths).sum(axis=0)
    num_prefilled = prefilled_columns.sum() - len(firsts)  # the first step computes the last token of a prompt

    itemsize, base_itemsize = (jnp.dtype(dtype).itemsize for dtype in (model.dtype, model.base_dtype or model.dtype))
    head = model.vocab_size * model.hidden_size
    layers = model.num_matrix_parameters - head
    others = layers - model.expert_parameters(model.num_experts_per_tok)
    experts = model.expert_parameters(1) * np.minimum(live * model.num_experts_per_tok, model.num_experts)
    seconds = limits.seconds(2 * layers * live, base_itemsize * others + itemsize * experts)
    seconds += limits.seconds(2 * head * live, itemsize * head + 4 * model.vocab_size * live)

    memory_size = model.num_linear_layers * (model.delta.memory_size if model.delta else 0)
    seconds += limits.seconds(6 * memory_size * num_draws.sum(), 2 * model.state_bytes * num_draws.sum())
    prefill_flops = (2 * layers + 6 * memory_size) * num_prefilled
    windows = Counter(model.sliding_window * (kind == SLIDING) for kind in model.kinds if kind != LINEAR)
    for window, num_layers in windows.items():
        width = window or len(columns)
        flops = 4 * num_layers * model.num_attention_heads * model.head_dim * np.minimum(columns, width)
        of_prompts = np.clip(width - columns, 0, prompt_lengths).sum(where=columns < num_steps)
        num_read = np.minimum(own, width).sum(where=rows.is_target) + of_prompts
        share = num_layers / model.num_attention_layers
        seconds += limits.seconds(flops @ drawn_columns, share * model.cache_bytes * num_read)
        prefill_flops += flops @ prefilled_columns
    return seconds + limits.seconds(prefill_flops, 0)
