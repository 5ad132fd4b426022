"""RLOO (arXiv 2402.14740): each completion against the mean of the others in its group.

An unbiased baseline, (G / (G - 1)) (r - mean), here with PPO's clip for several updates. The paper has no ratio and
takes the completion as one action: --objective reinforce --loss_normalization constant, with its KL by --kl_in
reward. Expect it to behave as Dr. GRPO with a slightly larger step.
"""


def get_config():
    return {
        "advantage": "rloo",
        "objective": "ppo",
        "loss_normalization": "token_mean",
        "clip_epsilon": 0.2,
        "clip_epsilon_high": -1.0,
        "entropy_coef": 0.0,
    }
