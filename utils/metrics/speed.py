"""How fast a step was, and how near that is to what the devices can do.

Letters: L layers, H query heads, K key heads, C channels of a head, T row length.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from utils.training.batching import Array

PEAKS = {  # of a device, by its kind: bfloat16 FLOP/s without sparsity, bytes/s of its memory. Source: data sheets
    "NVIDIA H200": (989e12, 4.8e12),
    "NVIDIA H100 80GB HBM3": (989e12, 3.35e12),
    "NVIDIA A100-SXM4-80GB": (312e12, 2.04e12),
    "NVIDIA A100-SXM4-40GB": (312e12, 1.56e12),
    "NVIDIA L40S": (362e12, 0.864e12),
    "NVIDIA GeForce RTX 4090": (165e12, 1.01e12),
    "TPU v4": (275e12, 1.2e12),
    "TPU v5 lite": (197e12, 0.82e12),
    "TPU v5": (459e12, 2.77e12),
    "TPU v6 lite": (918e12, 1.64e12),
}


def sampling_bytes(model, prompt_lengths: Int[Array, "B"], lengths: Int[Array, "B"]) -> float:
    """The least that sampling these rows in one batch reads: the weights for each token, and each row's cache."""
    cached = (lengths * (lengths - 1) - prompt_lengths * (prompt_lengths - 1)) / 2  # tokens, summed over the draws
    weights = jnp.dtype(model.dtype).itemsize * model.num_parameters
    return float(weights * (lengths - prompt_lengths).max() + model.cache_bytes * cached.sum())


def training_flops(model, lengths: Int[Array, "B"]) -> float:
    """Of a forward and a backward pass: 6 for each token and parameter, and causal attention. Recomputing is no work.

    Source: arXiv 2204.02311, appendix B, with half of the attention, since the other half is masked.
    """
    width = model.num_hidden_layers * model.num_attention_heads * model.head_dim
    return float((6 * model.num_matrix_parameters * lengths + 6 * width * lengths.astype(np.float64) ** 2).sum())


def describe_speed(model, layout, played: list, metrics: dict[str, float]) -> dict[str, float]:
    """Rates of a step from its rollouts, and their share of what the devices could do, where that is known.

    `mfu` counts rows that were learnt from, without padding; `decode_bandwidth` the bytes that had to be read.
    """
    peaks, num_devices = PEAKS.get(layout.mesh.devices.flat[0].device_kind), layout.mesh.size
    rollouts = [each.rollouts for each in played]
    num_bytes = sum(sampling_bytes(model, np.asarray(r.prompt_lengths), np.asarray(r.lengths)) for r in rollouts)
    tokens = sum(float(np.sum(r.lengths - r.prompt_lengths)) for r in rollouts)
    speed = {
        "speed/occupancy": tokens / sum(float(np.sum(r.slot_steps)) for r in rollouts),
        "speed/decode_gb_per_second": num_bytes / metrics["times/rollout"] / 1e9,
    }
    if metrics.get("num_updates"):
        flops = metrics["num_updates"] * metrics["speed/flops"]
        speed["speed/update_tflops"] = flops / metrics["times/update"] / 1e12
    if peaks:
        speed["speed/decode_bandwidth"] = speed["speed/decode_gb_per_second"] * 1e9 / peaks[1] / num_devices
        if "speed/update_tflops" in speed:
            speed["speed/mfu"] = speed["speed/update_tflops"] * 1e12 / peaks[0] / num_devices
    return speed
