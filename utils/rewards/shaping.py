"""Settings of data and rewards, and the rewards that need lengths in tokens, which environments do not know."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int

from utils.settings.config import option
from utils.settings.errors import UserError


@dataclass(frozen=True)
class RewardConfig:
    """Data and rewards."""

    data_dir: str = option("", "folder with the environment's files; empty: the Hugging Face hub or its cache")
    reward: str = option("", "FILE.py:FUNCTION, the reward of the environment dataset")
    format_reward: str = option(
        "", "reward for the form of replies, added to the return: think_answer is 1 for a think block, then an answer "
        "block, and nothing else; tags is a quarter for each of the four tags; blocks is 0.1 for a think block, 0.5 "
        "for an answer block, 1 for both in form", ["", "think_answer", "tags", "blocks"],
    )  # fmt: skip
    format_weight: float = option(0.1, "factor of --format_reward")
    length_reward: str = option("", "adds a reward for the length of replies", ["", "overlong", "cosine"])
    length_weight: float = option(1.0, "factor of --length_reward")
    overlong_buffer: int = option(0, "tokens before the limit in which the overlong penalty grows; 0: a fifth of it")
    score_timeout: float = option(10.0, "for the scoring of one completion, seconds")
    max_error_share: float = option(0.5, "the run stops when more of the completions than this (and 8) get no score")
    on_reward_failure: str = option(
        "drop", "rollouts whose reward failed or timed out: drop leaves them out of their group's baseline and out of "
        "the loss, zero gives them a reward of 0", ["drop", "zero"]
    )  # fmt: skip
    num_score_workers: int = option(0, "processes that score; 0: one for each core, 16 at most")

    def __post_init__(self):
        if self.overlong_buffer < 0:
            raise UserError("--overlong_buffer must not be negative")
        if self.score_timeout <= 0 or self.num_score_workers < 0 or not 0 <= self.max_error_share <= 1:
            raise UserError("--score_timeout must be positive, --max_error_share from 0 to 1")

    @property
    def env_flags(self) -> dict[str, str | float]:
        """Those of these settings that are options of the environment, where they are set."""
        flags = {name: getattr(self, name) for name in ("data_dir", "reward", "format_reward")}
        flags = {name: value for name, value in flags.items() if value}
        return flags | ({"format_weight": self.format_weight} if self.format_reward else {})


def add_truncation_penalty(
    scores: dict[str, Float[np.ndarray, "B"]], is_truncated: Bool[np.ndarray, "B"], penalty: float
) -> dict[str, Float[np.ndarray, "B"]]:
    """Returns the scores with "truncation", in the return already: minus `penalty` for truncated replies that earn.

    The environment says how much (`Env.truncation_penalty`); it cannot subtract it itself, since it sees a reply's text
    and not whether the token limit ended it.
    """
    is_penalized = is_truncated & (scores["return"] > 0)
    truncation = np.where(is_penalized, -penalty, 0.0).astype(np.float32)
    return scores | {"truncation": truncation, "return": scores["return"] + truncation}


def add_length_reward(
    scores: dict[str, Float[np.ndarray, "B"]], lengths: Int[np.ndarray, "B"], limit: int, config: RewardConfig
) -> dict[str, Float[np.ndarray, "B"]]:
    """The scores with "length", in the return already; as they are where --length_reward is off.

    `lengths` and `limit`: tokens of each completion, and the most there may be.
    """
    match config.length_reward:
        case "overlong":
            length = overlong_penalty(lengths, limit, config.overlong_buffer or max(1, limit // 5))
        case "cosine":
            length = cosine_reward(scores["correct_answer"], lengths, limit)
        case _:
            return scores
    length = (config.length_weight * length).astype(np.float32)
    return scores | {"length": length, "return": scores["return"] + length}


def overlong_penalty(lengths: Int[np.ndarray, "B"], limit: int, buffer: int) -> Float[np.ndarray, "B"]:
    """0 up to `limit - buffer` tokens, then linearly down to -1 at the limit. Source: arXiv 2503.14476, eq. 13."""
    return np.clip((limit - buffer - lengths) / buffer, -1, 0)


def cosine_reward(correct: Float[np.ndarray, "B"], lengths: Int[np.ndarray, "B"], limit: int) -> Float[np.ndarray, "B"]:
    """From 1 (short) to 0.5 (at the limit) for correct replies, from -1 (short) to -0.5 for wrong ones, by a cosine.

    Source: arXiv 2502.03373, eq. 1, with the end points of huggingface/open-r1.
    """
    shortness = (1 + np.cos(np.pi * np.minimum(lengths, limit) / limit)) / 2  # 1 for no token, 0 at the limit
    return np.where(correct > 0, 1, -1) * (0.5 + 0.5 * shortness)
