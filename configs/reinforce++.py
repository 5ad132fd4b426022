"""REINFORCE++ (arXiv 2501.03262): the baseline is the mean over the batch, not over the group.

A = (r - mean) / std over the batch, PPO's clip, and a KL to the initial model taken off the reward (k1). Groups are
not needed: --group_size 1 works. Expect prompts of unequal difficulty to add noise that a group's mean would have
removed.
"""


def get_config():
    return {
        "advantage": "batch_zscore",
        "objective": "ppo",
        "loss_normalization": "token_mean",
        "clip_epsilon": 0.2,
        "clip_epsilon_high": -1.0,
        "kl_coef": 0.001,
        "kl_in": "reward",
        "entropy_coef": 0.0,
    }
