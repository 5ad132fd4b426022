"""SIL / RAFT (arXiv 2304.06767; easy-GRPO's k best of n): imitate the best completions of each group.

Plain supervised learning on the k best of n samples, here [k, n] = [2, 32]; the rest leaves the batch, and so do
groups without signal (--do_group_filter 0 imitates the first k of these too, be all of them right or all wrong). No
ratio, no negative examples. Expect entropy to fall fast, and near misses to teach little.
"""


def get_config():
    return {
        "advantage": "best_k",
        "best_k": 2,
        "group_size": 32,
        "objective": "reinforce",
        "loss_normalization": "constant",
        "ppo_minibatch": 0,
        "entropy_coef": 0.0,
    }
