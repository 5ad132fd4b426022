"""The sanity check of kvfrans/lmpo for models/tiny: the reward is the number of characters, at most 256.

The reward is not for poems: noise of 256 characters, truncated at the limit, has full marks. Two minutes on a CPU.
"""

from configs import cpu


def get_config():
    return cpu.get_config() | {
        "model_dir": "models/tiny",
        "env_name": "poem",
        "env_options": "max_characters=256",
        "test_env_name": "poem-test",
        "num_eval_tasks": 32,
        "num_eval_samples": 4,
        "num_generation_tokens": 128,
        "advantage": "group_mean",
        "loss_normalization": "constant",
        "entropy_coef": 0.0,
        "groups_per_batch": 8,
        "group_size": 16,
        "tokens_per_microbatch": 2048,
        "save_interval": 0,
    }
