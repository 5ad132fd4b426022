"""Options that went: what replaces each, for command lines, presets and config.json of old runs that name them."""

from collections.abc import Mapping
from typing import NamedTuple

from utils.settings.errors import UserError


class Removed(NamedTuple):
    """Default of an option that went, and what replaces it, as the end of a sentence.

    changes_results: a run that had another value than the default would go on as another run without it.
    """

    default: bool | int | float | str
    replacement: str
    changes_results: bool = False


REMOVED: Mapping[str, Removed] = {
    "credit": Removed("trajectory", "--advantage turn_mean and turn_zscore compare turns", changes_results=True),
    "turn_gamma": Removed(1.0, "turns are compared by the plain sum of later rewards", changes_results=True),
    "sapo_tau": Removed(1.0, "it is a number of `sapo` in core/objectives.py", changes_results=True),
    "sapo_tau_negative": Removed(1.05, "it is a number of `sapo` in core/objectives.py", changes_results=True),
    "recompute_logprobs": Removed(False, "old log-probabilities of a step with one update equal the current ones"),
    "max_skipped_updates": Removed(3, "a run ends after three updates in a row that are not finite"),
    "attention": Removed("auto", "its kernel is chosen by device and model"),
    "coordinator_address": Removed("", "set JAX_COORDINATOR_ADDRESS in the environment"),
    "device_type": Removed("", "set JAX_PLATFORMS in the environment to cpu, cuda or tpu"),
    "length_weight": Removed(1.0, "--length_reward is added as it is (envs/scoring/shaping.py)", changes_results=True),
    "max_error_share": Removed(0.5, "a run stops where half of its rewards fail: catch the errors within the reward"),
    "num_processes": Removed(-1, "set JAX_NUM_PROCESSES in the environment"),
    "num_speculative_tokens": Removed(0, "the last rows of a batch are drawn as all others"),
    "on_reward_failure": Removed("drop", "failures are dropped: return 0 within the reward", changes_results=True),
    "overlong_buffer": Removed(0, "it is a fifth of the token limit (envs/scoring/shaping.py)", changes_results=True),
    "precompile": Removed(False, "all programs are compiled before the first step"),
    "process_id": Removed(-1, "set JAX_PROCESS_ID in the environment"),
    "sample_interval": Removed(10, "examples are printed every --test_interval steps"),
    "test_greedy": Removed(False, "a saved model is evaluated by core/eval.py --temperature 0"),
    "unroll_layers": Removed(False, "layers are unrolled for small models on a CPU"),
    "valid_env_name": Removed("", "give --test_env_name X-valid; core/eval.py evaluates X-test", changes_results=True),
    "wandb_mode": Removed("", "set WANDB_MODE in the environment"),
}


def check_removed(name: str, value: object, source: str, is_forced: bool) -> None:
    """Prints what replaces an option that went, if its value in a file is not the default.

    source: the value as the file has it. Raises: UserError if it changed results, unless `is_forced`.
    """
    gone = REMOVED[name]
    if value == gone.default:
        return
    text = f"{source}: there is no option {name} any more: {gone.replacement}"
    if gone.changes_results and not is_forced:
        raise UserError(f"{text} (--resume force goes on without it)")
    print("note:", text)
