"""SAPO (arXiv 2511.20347): a sigmoid gate instead of the clip.

The gradient of a token fades as its ratio leaves 1, a little faster for negative advantages (tau 1.05 against 1),
and never vanishes. Expect clip_fraction 0 and behavior close to GRPO's while ratios stay near 1.
"""


def get_config():
    return {
        "advantage": "group_zscore",
        "objective": "sapo",
        "loss_normalization": "sequence_mean",
        "entropy_coef": 0.0,
    }
