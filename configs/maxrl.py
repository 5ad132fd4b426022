"""MaxRL (arXiv 2602.02710): (r - mean) / mean, a weight that grows as a prompt gets harder.

Towards maximum likelihood of success: a prompt solved once in sixteen counts sixteen times as much as under
REINFORCE. Rewards must not be negative. Clip and aggregation are our choice. Expect progress on the hardest
prompts, and noise.
"""


def get_config():
    return {
        "advantage": "maxrl",
        "objective": "ppo",
        "loss_normalization": "token_mean",
        "clip_epsilon": 0.2,
        "clip_epsilon_high": -1.0,
        "entropy_coef": 0.0,
    }
