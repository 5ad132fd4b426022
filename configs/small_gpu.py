"""Qwen3-1.7B on one GPU of 24 GB: float32 parameters, Adafactor, gradients added up in bfloat16, no KL.

    XLA_PYTHON_CLIENT_MEM_FRACTION=0.92 python core/grpo.py --config configs/small_gpu.py --model_dir Qwen/Qwen3-1.7B

What that takes: python bench/compiled.py --config configs/small_gpu.py --memory 23.7 --models 1.7B --devices 1
"""


def get_config():
    return {
        "model_dir": "Qwen/Qwen3-1.7B",
        "env_name": "gsm8k",
        "groups_per_batch": 32,
        "group_size": 8,
        "ppo_minibatch": 64,
        "num_generation_tokens": 512,
        "optimizer": "adafactor",
        "grad_dtype": "bfloat16",
        "remat": "full",
        "tokens_per_microbatch": 2048,
        "inference_batch_per_device": 64,
    }
