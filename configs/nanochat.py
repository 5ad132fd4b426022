"""nanochat's chat_rl: REINFORCE on r - mean with token-level normalization and Muon, on GSM8K for one epoch.

16 prompts x 16 completions of at most 256 tokens, temperature 1, top-k 50, one update a step without clipping. Muon for
the matrices, AdamW for the embedding and the head, at nanochat's rates times its 0.05, falling linearly to 0.

Differences: the embedding's rate is nanochat's 0.2 times 0.02, the deviation of a pretrained embedding (nanochat's
starts at 1, so 0.2 is as large a step); one pair of betas, 0.8 and 0.95 (nanochat: 0.8, 0.96 for the head and 0.8,
0.995 for the embedding); Muon without a second moment; no weight decay; the loss is normalized over the whole
batch; log-probabilities are those of the truncated distribution; the stop token is trained.
Source: github.com/karpathy/nanochat, scripts/chat_rl.py. Expect fast early progress, then the schedule's calm.
"""


def get_config():
    return {
        "env_name": "gsm8k",
        "env_options": "form=hash,partial=0",
        "test_env_name": "gsm8k-test",
        "num_eval_tasks": 400,
        "num_eval_samples": 8,
        "test_interval": 60,
        "save_interval": 60,
        "num_epochs": 1,
        "advantage": "group_mean",
        "objective": "reinforce",
        "loss_normalization": "token_mean",
        "groups_per_batch": 16,
        "group_size": 16,
        "max_resampling": 1.0,
        "ppo_minibatch": 0,
        "num_generation_tokens": 256,
        "force_answer_at": 0,
        "temperature": 1.0,
        "top_k": 50,
        "entropy_coef": 0.0,
        "optimizer": "muon",
        "lr": 5e-8,
        "matrix_lr": 1e-3,
        "embedding_lr": 2e-4,
        "unembedding_lr": 2e-4,
        "b1": 0.8,
        "b2": 0.95,
        "adam_eps": 1e-10,
        "lr_schedule": "linear",
        "weight_decay": 0.0,
        "max_grad_norm": 1e9,
    }
