"""Reads a command line and its presets as assignments of values to names."""

import reprlib
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from utils.settings.errors import UserError, most_similar
from utils.settings.presets import read_preset

Value: TypeAlias = bool | int | float | str
BOOLEANS = {"0": False, "1": True, "true": True, "false": False}


class Assignment(NamedTuple):
    """A value for a name, not yet converted; `source` is how the user wrote it, for error messages.

    `preset` is the file that holds it, empty on the command line.
    """

    name: str
    value: object
    source: str
    preset: str = ""


TRL_NAMES = {  # our names of options of TRL and transformers
    "learning_rate": "lr",
    "lr_scheduler_type": "lr_schedule",
    "model": "model_dir",
    "model_name_or_path": "model_dir",
    "output_dir": "save_dir",
    "num_generations": "group_size",
    "max_completion_length": "num_generation_tokens",
    "max_prompt_length": "prompt_length",
    "num_train_epochs": "num_epochs",
    "epochs": "num_epochs",
    "num_iterations": "ppo_epochs",
    "batch_size": "groups_per_batch",
    "per_device_train_batch_size": "tokens_per_microbatch",
    "gradient_checkpointing": "remat",
    "beta": "kl_coef",
    "loss_type": "loss_normalization",
    "lora_r": "lora_rank",
    "save_steps": "save_interval",
    "eval_steps": "test_interval",
}

GONE = {  # options of kvfrans/lmpo and of earlier versions that are rejected: why, or what to give instead
    "agent_processes": "give it as --env_options agent_processes=N",
    "also_eval": "name further environments in --test_env_name, or in --env_name of core/eval.py and core/sft.py",
    "device_type": "JAX finds the device, and JAX_PLATFORMS=cpu names another",
    "init_lr_frac": "give the rate itself, --lr",
    "kl_estimator": "the KL is k3 with --kl_in loss, and k1 with --kl_in reward",
    "kl_every": "--kl_coef logs kl, and 1e-9 changes no result",
    "mlflow": "metrics go to metrics.jsonl, wandb (--wandb_name) and TensorBoard (--tensorboard)",
    "prefill_batch_split": "each prompt is prefilled once, so remove it",
    "rollouts_from": "give it to recipes/offline/train.py",
    "save_rollouts_dir": "rollouts are written to <save_dir>/rollouts, so remove it",
    "test_env_options": "give them in parentheses, as --test_env_name X-test(numbers=3)",
    "train_vocab": "--lora_rank N trains neither the embedding nor the head",
    "use_flash_attn": "attention is chosen by platform, so remove it",
    "use_xla_flags": "set XLA_FLAGS in the environment",
}
WERE_ON = {"train_vocab"}  # of GONE: 1 changed nothing; of the others, 0 or nothing


def read_assignments(argv: Sequence[str], types: Mapping[str, type], aliases: Mapping[str, str]) -> list[Assignment]:
    """Returns the assignments of the presets (`--config FILE`), then of the command line, which win.

    types: the type of each option by name. Raises: UserError for an unreadable preset or command line.
    """
    from_presets, from_command_line = [], []
    for name, value in read_arguments(argv, {"config": str, **types}, aliases):
        if name == "config":
            for key, content in read_preset(value).items():
                source = f"{key}={reprlib.repr(content)} in {value}"
                from_presets.append(Assignment(aliases.get(key, key), content, source, value))
            continue
        from_command_line.append(Assignment(name, value, f"--{name}={value}"))
    return from_presets + from_command_line


def read_arguments(argv: Sequence[str], types: Mapping[str, type], aliases: Mapping[str, str]) -> list[tuple[str, str]]:
    """Splits a command line into names and values: `--name value`, `--name=value`, `--name` and `--noname` of a bool.

    Not by argparse, which refuses values that begin with a dash. Raises: UserError.
    """
    arguments, words = [], list(reversed(argv))
    while words:
        word = words.pop()
        if not word.startswith("-"):
            raise UserError(f"{word!r} belongs to no option: write options as --name value")
        name, equals, value = word.lstrip("-").partition("=")
        name = aliases.get(name.replace("-", "_"), name.replace("-", "_"))
        positive = name.removeprefix("no")
        if name not in types and types.get(positive) is bool:
            name, equals, value = positive, "=", "false"
        if name not in types:
            raise UserError(f"there is no option --{name}{nearest(name, [*types, 'help'])}")
        if not equals:
            has_value = bool(words) and not words[-1].startswith("-" if types[name] is bool else "--")
            if not has_value and types[name] is not bool:
                raise UserError(f"--{name} needs a value: give one")
            value = words.pop() if has_value else "true"
            if types[name] is bool and value.lower() not in BOOLEANS:
                raise UserError(f"--{name} is {value!r}: give one of {', '.join(BOOLEANS)}")
        arguments.append((name, value))
    return arguments


def nearest(name: str, names: Iterable[str]) -> str:
    """Returns the end of a sentence about an unknown name: its name here, or the most similar one."""
    names = list(names)
    lower = str(name).lower()
    if lower in GONE:
        return f": {GONE[lower]}"
    beginnings = [known for known in names if known.startswith(f"{lower}_")]
    known = [TRL_NAMES.get(lower, lower), *beginnings, most_similar(lower, names)]
    close = next((name for name in known if name in names), "")
    return f"; did you mean --{close}?" if close else " (--help all lists the options)."
