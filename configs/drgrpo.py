"""Dr. GRPO (arXiv 2503.20783): GRPO without its two biases.

A = r - mean, not divided by the deviation (which favors prompts that are nearly solved or nearly hopeless), and a
loss divided by a constant (the rollouts of a full minibatch times the completion limit, whatever the filters drop),
not by lengths (which favors long wrong completions). No KL. Expect shorter wrong answers than GRPO's, and smaller
steps on prompts of little variance.
"""


def get_config():
    return {
        "advantage": "group_mean",
        "objective": "ppo",
        "loss_normalization": "constant",
        "clip_epsilon": 0.2,
        "clip_epsilon_high": -1.0,
        "entropy_coef": 0.0,
    }
