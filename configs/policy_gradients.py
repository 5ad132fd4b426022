"""GRPO as policy-gradients' configs/grpo.yaml has it: words spelled backwards, small batches, sharp sampling, one pass.

4 prompts x 8 completions a step at temperature 0.6, top-p 0.95 and top-k 20; four updates of 8 completions by Adam
(5e-6, no weight decay), each a mean over sequences; groups whose rewards are equal stay in that mean. 3,000 problems
make 750 steps. --env_options datasets=FILE.yaml takes another data block of that project.

Differences: its ratio ignores temperature and truncation, here both sides are of the distribution that was sampled; its
512 tokens include the prompt; its standard deviation is that of a sample (n - 1); a fifth of the questions is kept for
reasoning_gym-test, a tenth for -valid. --kl_coef (its beta, 0) adds k3 of reference / policy to the loss, there of
policy / reference.
Source: github.com/zafstojano/policy-gradients. Expect little exploration: at temperature 0.6 most groups are alike.
"""


def get_config():
    return {
        "env_name": "reasoning_gym",
        "env_options": "datasets=spell_backward(min_word_len=3;max_word_len=10),num_tasks=3000,"
        "format_reward=tags,format_weight=0.5",
        "num_epochs": 1,
        "advantage": "group_zscore",
        "objective": "ppo",
        "loss_normalization": "sequence_mean",
        "clip_epsilon": 0.2,
        "kl_coef": 0.0,
        "do_group_filter": False,
        "clip_epsilon_high": -1.0,
        "groups_per_batch": 4,
        "group_size": 8,
        "max_resampling": 1.0,
        "ppo_minibatch": 8,
        "num_generation_tokens": 512,
        "temperature": 0.6,
        "top_p": 0.95,
        "top_k": 20,
        "entropy_coef": 0.0,
        "lr": 5e-6,
        "b1": 0.9,
        "b2": 0.999,
        "adam_eps": 1e-8,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "seed": 42,
    }
