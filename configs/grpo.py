"""GRPO (DeepSeekMath, arXiv 2402.03300): the default of every setting but the entropy bonus, spelled out.

Each completion is compared with its group, A = (r - mean) / std. The paper averages over sequences and adds a KL
(k3) to the reference; here, as in most of today's runs, tokens are averaged and there is no KL
(--loss_normalization sequence_mean --kl_coef 0.04 is the paper's). Expect long completions to weigh more, and easy
and hopeless prompts to be amplified by the small deviation of their groups.
"""


def get_config():
    return {
        "advantage": "group_zscore",
        "objective": "ppo",
        "loss_normalization": "token_mean",
        "clip_epsilon": 0.2,
        "clip_epsilon_high": -1.0,
        "entropy_coef": 0.0,
    }
