"""DAPO (arXiv 2503.14476): GRPO for long chains of thought.

Four changes to GRPO: the clip range is wider above (unlikely tokens may grow), groups without signal are sampled
again (--max_resampling), tokens are averaged over the whole batch, and completions near the limit lose reward
softly (in the last fifth of the limit, 4096 of 20480 tokens in the paper). G = 16, no KL, no entropy bonus. Expect
entropy to stay up.
"""


def get_config():
    return {
        "advantage": "group_zscore",
        "objective": "ppo",
        "loss_normalization": "token_mean",
        "clip_epsilon": 0.2,
        "clip_epsilon_high": 0.28,
        "group_size": 16,
        "do_group_filter": True,
        "max_resampling": 4.0,
        "length_reward": "overlong",
        "entropy_coef": 0.0,
    }
