"""Operations of training, and nominal speeds of devices."""

import numpy as np
from jaxtyping import Int

from models.architecture import Decoder
from models.names import Array

# Nominal speeds by kind of device: bfloat16 FLOP/s without sparsity, sums in float32; bytes/s of its memory. Source:
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


def training_flops(
    model: Decoder, lengths: Counts, num_tokens: int, num_targets: int, has_critic: bool = False
) -> float:
    """Returns the operations of a forward and a backward pass; recomputed ones do not count.

    They are 6 for each of `num_tokens` (a prompt that rows share counts once) and parameter, 4 below adapters; for the
    head, for each of `num_targets`. A token of linear attention makes three products with the memory.
    Source: arXiv 2204.02311, appendix B, with half of the attention, since the other half is masked.
    """
    width = model.num_attention_layers * model.num_attention_heads * model.head_dim
    head = model.vocab_size * model.hidden_size
    factor = 4 if model.lora_rank else 6
    products = factor * (model.num_matrix_parameters - head)
    if model.lora_rank:
        from models.lora import adapter_parameters

        products += 6 * adapter_parameters(model)
    attention = 6 * width * lengths.astype(np.float64) ** 2
    memory_size = model.delta.memory_size if model.delta else 0
    recurrence = 18 * model.num_linear_layers * memory_size * lengths
    mixing = (attention + recurrence).sum()
    if has_critic:
        products += 6 * (model.num_matrix_parameters - head)
        mixing *= 2
    return float(products * num_tokens + factor * head * num_targets + mixing)
