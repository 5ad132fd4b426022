"""Least bytes of sampling, operations of training, and what devices can do of both in a second.

Letters: L layers, H query heads, K key heads, C channels of a head, T row length.
"""

from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from models.architecture import Decoder
from models.lora import adapter_parameters
from models.names import Array

# Of a device, by its kind: bfloat16 FLOP/s without sparsity and with sums in float32, bytes/s of its memory. Source:
# NVIDIA's data sheets and architecture papers, of the A10G AWS's, and cloud.google.com/tpu/docs.
PEAKS = {
    "NVIDIA GB200": (2500e12, 8e12),
    "NVIDIA B200": (2250e12, 8e12),
    "NVIDIA H200": (989e12, 4.8e12),
    "NVIDIA H100 80GB HBM3": (989e12, 3.35e12),
    "NVIDIA H100 NVL": (835e12, 3.9e12),
    "NVIDIA H100 PCIe": (756e12, 2e12),
    "NVIDIA A100-SXM4-80GB": (312e12, 2.04e12),
    "NVIDIA A100-SXM4-40GB": (312e12, 1.56e12),
    "NVIDIA L40S": (362e12, 0.864e12),
    "NVIDIA L4": (121e12, 0.3e12),
    "NVIDIA A10G": (70e12, 0.6e12),
    "Tesla T4": (8.1e12, 0.32e12),  # has no bfloat16: its products are those of float32
    "NVIDIA GeForce RTX 5090": (209.5e12, 1.79e12),
    "NVIDIA GeForce RTX 4090": (165e12, 1.01e12),
    "NVIDIA GeForce RTX 3090": (71e12, 0.936e12),
    "TPU v4": (275e12, 1.2e12),
    "TPU v5 lite": (197e12, 0.82e12),
    "TPU v5": (459e12, 2.77e12),
    "TPU v6 lite": (918e12, 1.64e12),
    "TPU7x": (1153.5e12, 3.69e12),  # half a chip, which JAX shows as two devices
}


Counts = Int[Array, "B"]  # tokens of each row


def sampling_bytes(model: Decoder, prompt_lengths: Counts, lengths: Counts) -> float:
    """Returns the least bytes that sampling these rows in one batch reads: weights for each token, caches, states.

    Of a mixture of experts, a step reads as many experts as its live rows choose in all, at most all of them.
    """
    final_tokens = lengths * (lengths - 1)
    prompt_tokens = prompt_lengths * (prompt_lengths - 1)
    cached_tokens = (final_tokens - prompt_tokens) / 2  # summed over the draws
    steps = np.arange((lengths - prompt_lengths).max())
    num_rows = (lengths - prompt_lengths > steps[:, None]).sum(1)
    num_experts = np.minimum(num_rows * model.num_experts_per_tok, model.num_experts)
    other_parameters = model.num_parameters - model.expert_parameters(model.num_experts)
    num_read = other_parameters * len(steps) + model.expert_parameters(1) * num_experts.sum()
    num_draws = (lengths - prompt_lengths).sum()
    row_bytes = model.cache_bytes * cached_tokens.sum() + model.state_bytes * num_draws
    return float(jnp.dtype(model.dtype).itemsize * num_read + row_bytes)


def training_flops(model: Decoder, lengths: Counts, num_tokens: int, has_critic: bool = False) -> float:
    """Returns the operations of a forward and a backward pass; recomputed ones do not count.

    They are 6 for each of `num_tokens` (a prompt that rows share counts once) and parameter, 4 where it has no gradient
    as below adapters, and those of causal attention of rows of these lengths. A token of linear attention makes three
    products with the memory: it reads the old value, writes the new one, and reads the output. A critic is a second
    trunk.
    Source: arXiv 2204.02311, appendix B, with half of the attention, since the other half is masked.
    """
    width = model.num_attention_layers * model.num_attention_heads * model.head_dim
    products = (4 if model.lora_rank else 6) * model.num_matrix_parameters + 6 * adapter_parameters(model)
    attention = 6 * width * lengths.astype(np.float64) ** 2
    memory_size = model.delta.memory_size if model.delta else 0
    recurrence = 18 * model.num_linear_layers * memory_size * lengths
    mixing = (attention + recurrence).sum()
    if has_critic:
        products += 6 * (model.num_matrix_parameters - model.vocab_size * model.hidden_size)
        mixing *= 2
    return float(products * num_tokens + mixing)


def shares_of_peak(
    speed: Mapping[str, float],
    peak_flops: float,
    peak_bandwidth: float,
    num_devices: int,
    num_rollout_devices: int,
) -> dict[str, float]:
    """Returns the rates of a step as shares of what its devices can do."""
    bandwidth = speed["speed/decode_gb_per_second"] * 1e9
    shares = {"speed/decode_bandwidth": bandwidth / peak_bandwidth / num_rollout_devices}
    if "speed/update_tflops" in speed:
        flops = speed["speed/update_tflops"] * 1e12
        shares["speed/mfu"] = flops / peak_flops / num_devices
    return shares


def attention_cost(model: Decoder) -> float:
    """Returns the cost of a pair of columns of a row in a layer's attention, over that of a token's products."""
    num_products = 2 * model.num_attention_heads * model.head_dim
    slowness = 1.5 if model.kernel == "plain" else 1  # passes over its scores; measured with 0.9M and 7M parameters
    return slowness * num_products * model.num_hidden_layers / model.num_matrix_parameters
