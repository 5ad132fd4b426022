"""CISPO (MiniMax-M1, arXiv 2506.13585; range as in ScaleRL, arXiv 2510.13786): clip the weight, keep the gradient.

REINFORCE weighted by the clipped ratio: tokens that PPO's clip would leave without a gradient still learn, with a
bounded weight in [0, 5]. Expect clip_fraction 0, and more movement in a step than with PPO.
"""


def get_config():
    return {
        "advantage": "group_zscore",
        "objective": "cispo",
        "loss_normalization": "token_mean",
        "clip_epsilon": 1.0,
        "clip_epsilon_high": 4.0,
        "entropy_coef": 0.0,
    }
