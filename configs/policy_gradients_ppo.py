"""PPO as policy-gradients' configs/ppo.yaml has it: what differs from its GRPO, behind whose preset this one is given.

    python core/grpo.py --config configs/policy_gradients.py --config configs/policy_gradients_ppo.py

16 prompts a step with one completion each, a critic, gamma 0.99 and lambda 0.95, 15,000 problems.

Differences: the critic has an optimizer of its own, at the same rate (there one Adam for both and a coefficient of 0.1,
which Adam divides out again, but for the norm that both are clipped by); advantages are whitened over the batch.
--kl_coef needs --kl_in reward, which subtracts log p - log p_ref from each token's reward. There, the mean of k3 is
subtracted from the completion's reward.
Source: github.com/zafstojano/policy-gradients.
"""


def get_config():
    return {
        "env_options": "datasets=spell_backward(min_word_len=3;max_word_len=10),num_tasks=15000,"
        "format_reward=tags,format_weight=0.5",
        "advantage": "gae",
        "gamma": 0.99,
        "gae_lambda": 0.95,
        "value_clip": 0.2,
        "critic_lr": 5e-6,
        "groups_per_batch": 16,
        "group_size": 1,
        "ppo_minibatch": 8,
    }
