"""REINFORCE (Williams 1992): -r log p, no baseline, no ratio.

The plainest policy gradient, for comparison. With rewards that are never negative every completion is made
likelier, the better ones more so; groups whose rewards are all 0 teach nothing and leave, as in kvfrans/lmpo with
--do_group_normalization 0. Expect noise, and slower learning than with any baseline.
"""


def get_config():
    return {
        "advantage": "reinforce",
        "objective": "reinforce",
        "loss_normalization": "token_mean",
        "entropy_coef": 0.0,
    }
