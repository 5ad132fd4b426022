"""models/tiny learns Countdown on two CPU cores in a few minutes.

Dr. GRPO (arXiv 2503.20783) on 16 prompts x 16 rollouts, four updates each. The base model can compute but gives up too
early; what RL finds is longer search.

An evaluation of 512 problems, two samples each, measures the change from the first to the last, problem by problem, to
± 0.036 (256: ± 0.050; three seeds). Fewer hardly end sooner: most of a first one is compilation.
"""


def get_config():
    return {
        "model_dir": "models/tiny",
        "env_name": "countdown",
        "env_options": (
            "numbers=3,min_number=1,max_number=15,max_target=30,expression=tree,max_value=30,prompt=bare,"
            "truncation_penalty=0"
        ),
        "test_env_name": "countdown-test",
        "prompt_length": 32,
        "num_generation_tokens": 192,
        "force_answer_at": 0,
        "advantage": "group_mean",
        "loss_normalization": "constant",
        "entropy_coef": 0.0,
        "groups_per_batch": 16,
        "group_size": 16,
        "max_resampling": 1.0,
        "ppo_minibatch": 64,
        "inference_batch_per_device": 256,
        "tokens_per_microbatch": 512,
        "remat": "none",
        "lr": 6e-4,
        "lr_schedule": "linear",
        "weight_decay": 0.0,
        "max_steps": 24,
        "test_interval": 6,
        "num_eval_tasks": 512,
        "num_eval_samples": 2,
        "save_interval": 12,
    }
