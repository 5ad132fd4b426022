"""LUSPO (arXiv 2602.05261): GSPO without its bias against long completions.

GSPO's loss of a completion counts once for each of its tokens: a sum over tokens, divided by a constant, instead of the
mean. The clip range is that of section 5.1, about six times GSPO's. Expect longer completions than GSPO's.
"""


def get_config():
    return {
        "advantage": "group_zscore",
        "objective": "gspo",
        "loss_normalization": "constant",
        "clip_epsilon": 0.002,
        "clip_epsilon_high": 0.0025,
        "entropy_coef": 0.0,
    }
