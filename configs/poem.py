"""lmpo's sanity check for models/tiny: the reward is the number of characters, 256 at most, whatever they are.

The reward is not for poems: noise of 256 characters, cut off at the limit, has full marks. Two minutes on a CPU.
"""


def get_config():
    return {
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
        "max_resampling": 1.0,
        "ppo_minibatch": 0,
        "inference_batch_per_device": 128,
        "tokens_per_microbatch": 4096,
        "remat": "none",
        "unroll_layers": True,
        "lr": 6e-4,
        "weight_decay": 0.0,
        "max_steps": 40,
        "test_interval": 10,
        "save_interval": 0,
    }
