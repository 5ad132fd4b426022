"""REINFORCE++ with a group baseline (arXiv 2501.03262): r - mean of the group, whitened over the batch's tokens.

The group's mean is the baseline as in Dr. GRPO, the scale is the batch's as in REINFORCE++, so that no single group
is amplified. Expect the curve of GRPO with steadier gradient norms.
"""


def get_config():
    return {
        "advantage": "reinforce++_baseline",
        "objective": "ppo",
        "loss_normalization": "token_mean",
        "clip_epsilon": 0.2,
        "clip_epsilon_high": -1.0,
        "entropy_coef": 0.0,
    }
