"""GRPO with the settings of policy-gradients: small batches, sharp sampling, a mean over sequences.

4 prompts x 8 completions of at most 512 tokens a step, at temperature 0.6, top-p 0.95 and top-k 20, one update of all
of them at a learning rate of 5e-6. Its ratio ignores temperature and truncation; here both sides of the ratio are of
the distribution that was sampled. Name the data sets with --env_options datasets=..., for example its own YAML file.
Source: github.com/zafstojano/policy-gradients. Expect little exploration: at temperature 0.6 most groups are alike.
"""


def get_config():
    return {
        "env_name": "reasoning_gym",
        "format_reward": "tags",
        "format_weight": 0.5,
        "advantage": "group_zscore",
        "objective": "ppo",
        "loss_normalization": "sequence_mean",
        "clip_epsilon": 0.2,
        "groups_per_batch": 4,
        "group_size": 8,
        "max_resampling": 1.0,
        "ppo_minibatch": 0,
        "num_generation_tokens": 512,
        "temperature": 0.6,
        "top_p": 0.95,
        "top_k": 20,
        "entropy_coef": 0.0,
        "lr": 5e-6,
        "max_grad_norm": 1.0,
        "seed": 42,
    }
