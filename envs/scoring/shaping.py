"""Settings of rewards, and the penalty of truncated replies."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float

from envs.base import Env
from utils.settings.errors import UserError
from utils.settings.options import option

RewardArrays = dict[str, Float[np.ndarray, "B"]]  # by name; "return" is what training maximizes


@dataclass(frozen=True)
class RewardConfig:
    """Rewards."""

    length_reward: str = option(
        "",
        "Reward for the length of completions, added to the return; overlong (DAPO): a penalty, down to -1, over the "
        "last fifth of the token limit; cosine: 1 (short) to 0.5 if correct, -1 (short) to -0.5 if wrong; empty: none",
        ["", "overlong", "cosine"],
    )
    score_timeout: float = option(10.0, "Time limit for grading one completion, in seconds", resumable=True)
    num_score_workers: int = option(
        0, "Number of processes that grade completions; 0: one per CPU core, at most 16", resumable=True
    )

    def __post_init__(self):
        if self.score_timeout <= 0 or self.num_score_workers < 0:
            raise UserError(
                "--score_timeout must be above 0, and --num_score_workers must not be negative: correct the one that "
                "is lower"
            )


def reward_names(parts: Iterable[str], env: Env) -> set[str]:
    """Returns the names of the scores of replies, of which the environment has named these parts."""
    others = (("correct_answer", env.has_turns), ("truncation", env.truncation_penalty))
    return {"return", *parts, *(name for name, is_there in others if is_there)}


def add_truncation_penalty(scores: RewardArrays, is_truncated: Bool[np.ndarray, "B"], penalty: float) -> RewardArrays:
    """Returns the scores with "truncation", added to the return: minus `penalty` for truncated replies that earn.

    An environment cannot subtract its penalty itself, since it does not see why a reply ended.
    """
    if not penalty:
        return scores
    is_penalized = is_truncated & (scores["return"] > 0)
    truncation = np.where(is_penalized, -penalty, 0.0).astype(np.float32)
    return scores | {"truncation": truncation, "return": scores["return"] + truncation}
