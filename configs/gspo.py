"""GSPO (arXiv 2507.18071): the ratio of a whole completion, not of its tokens.

The geometric mean of a completion's ratios is clipped, in a range a thousand times narrower than PPO's, since means
move less. No KL. Expect most completions to be clipped after the first updates of a step (high clip_fraction),
which the paper observes too, and calm training of mixtures of experts.
"""


def get_config():
    return {
        "advantage": "group_zscore",
        "objective": "gspo",
        "loss_normalization": "sequence_mean",
        "clip_epsilon": 0.0003,
        "clip_epsilon_high": 0.0004,
        "entropy_coef": 0.0,
    }
