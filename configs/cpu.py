"""Steps that suit a small model on a CPU, for any environment: 128 short rollouts, one update each.

    python core/grpo.py --config configs/cpu.py --env_name dataset --env_options path=problems.jsonl

The learning rate is that of models/tiny and models/player; pretrained models take a tenth to a hundredth of it.
An evaluation of 256 problems shows changes beyond about ± 0.07 (64 problems: ± 0.13).
"""


def get_config():
    return {
        "num_generation_tokens": 64,
        "groups_per_batch": 16,
        "group_size": 8,
        "max_resampling": 1.0,
        "ppo_minibatch": 0,
        "inference_batch_per_device": 128,
        "remat": "none",
        "lr": 6e-4,
        "weight_decay": 0.0,
        "max_steps": 40,
        "test_interval": 10,
        "num_eval_tasks": 256,
    }
