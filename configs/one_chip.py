"""One chip, as notebooks and clouds lend it: Qwen3-0.6B with LoRA learns GSM8K, in pieces that fit the chip found.

    python core/grpo.py --config configs/one_chip.py
    python core/grpo.py --config configs/one_chip.py --model_dir google/gemma-3-1b-it    # or Qwen/Qwen3-1.7B
    python core/grpo.py --config configs/one_chip.py --lora_rank 0 --lr 1e-6 --optimizer adafactor --grad_dtype bfloat16

The last one trains all parameters. As many rows are sampled at a time as fit. A T4 has no bfloat16, and
as compiled, sampling does not fit on it. Not run by us; memory was read from compiled programs: docs/lab/compiled.md.
"""

import os

from utils.devices.startup import join_devices
from utils.settings.errors import UserError

# --remat by kind, as JAX names it: if there is room, the one that recomputes less.
CHIPS = {"Tesla T4": "full", "NVIDIA L4": "full", "TPU v5 lite": "full", "TPU v6 lite": "dots"}


def find_chip() -> str:
    """Returns the kind of the device. Raises: UserError for one that is not of CHIPS."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")  # share of a GPU's memory; JAX's default is 0.75
    kind = join_devices()[0].device_kind
    if kind in CHIPS:
        return kind
    raise UserError(
        f"configs/one_chip.py is for {', '.join(CHIPS)}, and this is {kind}: take configs/cpu.py on a CPU, "
        "configs/small_gpu.py or configs/lora_8b.py on a larger GPU"
    )


def get_config():
    return {
        "model_dir": "Qwen/Qwen3-0.6B",
        "env_name": "gsm8k",
        "env_options": "thinking=off",
        "test_env_name": "gsm8k-test",
        "num_eval_tasks": 256,
        "num_eval_samples": 1,
        "test_interval": 10,
        "groups_per_batch": 16,
        "group_size": 8,
        "ppo_minibatch": 64,
        "num_generation_tokens": 512,
        "lora_rank": 32,
        "lr": 1e-5,
        "weight_decay": 0.0,
        "remat": CHIPS[find_chip()],
        "tokens_per_microbatch": 2048,
        "max_steps": 100,
    }
