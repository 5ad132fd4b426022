"""models/player learns a game that a program plays with it: recipes/games/preset.py, over pages as all programs."""

from recipes.games import preset


def get_config():
    return preset.get_config() | {
        "env_name": "agent",
        "env_options": "",
        "test_env_name": "agent-test",
        "prompt_length": 64,
        "max_steps": 20,
        "test_interval": 10,
        "num_eval_tasks": 256,
        "save_interval": 0,
    }
