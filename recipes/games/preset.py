"""models/player learns games of several turns on two CPU cores; run.sh names the game.

Dr. GRPO (arXiv 2503.20783) as in configs/demo.py. The base model keeps to the rules but plays carelessly; what RL finds
is the play of the few experts among its documents.
"""

from configs import demo


def get_config():
    return demo.get_config() | {
        "model_dir": "models/player",
        "env_name": "guess",
        "env_options": "prompt=bare,min_size=16",
        "test_env_name": "guess-test",
        "num_generation_tokens": 96,
        "lr": 1e-3,
        "lr_schedule": "linear",
        "max_steps": 140,
        "test_interval": 20,
        "num_eval_samples": 1,
        "save_interval": 70,
    }
