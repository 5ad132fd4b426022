"""DPPO (arXiv 2602.04879): a trust region in probability, not in its ratio.

A token loses its gradient once its probability has moved by more than 0.2 along its advantage, measured from the
sampler's; rare tokens may so change their ratio freely. The ratio is to the sampler's probability too, which
corrects for a sampler that differs from the trainer. Expect few tokens to be held back (low clip_fraction).
"""


def get_config():
    return {
        "advantage": "group_mean",
        "objective": "dppo",
        "loss_normalization": "token_mean",
        "clip_epsilon": 0.2,
        "clip_epsilon_high": -1.0,
        "entropy_coef": 0.0,
    }
