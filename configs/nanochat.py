"""nanochat's chat_rl: REINFORCE on r - mean with token-level normalisation, and Muon.

16 prompts x 16 completions of at most 256 tokens, temperature 1, top-k 50, one update a step; Muon for matrices
(0.02), AdamW for the embedding (0.2) and the head (0.004), all times 0.05 and falling linearly to 0. Known
differences: the loss is normalised over the whole batch, log-probabilities are those of the truncated distribution,
and the stop token is trained. Expect fast early progress, then the schedule's calm.
"""


def get_config():
    return {
        "advantage": "group_mean",
        "objective": "reinforce",
        "loss_normalization": "token_mean",
        "groups_per_batch": 16,
        "group_size": 16,
        "ppo_minibatch": 0,
        "num_generation_tokens": 256,
        "temperature": 1.0,
        "top_k": 50,
        "entropy_coef": 0.0,
        "optimizer": "muon",
        "matrix_lr": 0.02,
        "embedding_lr": 0.2,
        "unembedding_lr": 0.004,
        "b1": 0.8,
        "adam_eps": 1e-10,
        "init_lr_frac": 0.05,
        "lr_schedule": "linear",
        "weight_decay": 0.0,
    }
