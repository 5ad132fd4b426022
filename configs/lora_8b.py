"""Qwen3-8B on one GPU of 24 GB: adapters of rank 32 over a bfloat16 base, which sampling and updates share.

    XLA_PYTHON_CLIENT_MEM_FRACTION=0.92 python core/grpo.py --config configs/lora_8b.py

Not run by us. Compiled: 17.4 GB held, updates take 19.2 and sampling 19.8 of the 23.7 GB, see docs/lab/compiled.md.
"""


def get_config():
    return {
        "model_dir": "Qwen/Qwen3-8B",
        "env_name": "gsm8k",
        "groups_per_batch": 32,
        "group_size": 8,
        "ppo_minibatch": 64,
        "num_generation_tokens": 512,
        "lora_rank": 32,
        "lr": 1e-5,
        "weight_decay": 0.0,
        "remat": "full",
        "tokens_per_microbatch": 1024,
        "inference_batch_per_device": 32,
    }
