"""Settings of data and rewards, and the rewards that need lengths in tokens, which environments do not get."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int

from utils.settings.errors import UserError
from utils.settings.options import option

CompletionLengths = Int[np.ndarray, "B"]  # tokens
RewardArray = Float[np.ndarray, "B"]
RewardArrays = dict[str, RewardArray]  # by name; "return" is what training maximizes


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


def add_truncation_penalty(scores: RewardArrays, is_truncated: Bool[np.ndarray, "B"], penalty: float) -> RewardArrays:
    """Returns the scores with "truncation", added to the return: minus `penalty` for truncated replies that earn.

    The environment sets the penalty (`Env.truncation_penalty`; 0: none). It cannot subtract the penalty itself, since
    it gets a reply's text, and not whether the token limit ended the reply.
    """
    if not penalty:
        return scores
    is_penalized = is_truncated & (scores["return"] > 0)
    truncation = np.where(is_penalized, -penalty, 0.0).astype(np.float32)
    return scores | {"truncation": truncation, "return": scores["return"] + truncation}


def add_length_reward(
    scores: RewardArrays, lengths: CompletionLengths, limit: int, config: RewardConfig
) -> RewardArrays:
    """Returns the scores with "length_reward", added to the return; unchanged if --length_reward is off.

    `lengths` and `limit`: tokens of each completion, and the most there may be.
    """
    match config.length_reward:
        case "overlong":
            reward = overlong_penalty(lengths, limit, buffer=max(1, limit // 5))
        case "cosine":
            reward = cosine_reward(scores["correct_answer"], lengths, limit)
        case _:
            return scores
    reward = reward.astype(np.float32)
    return scores | {"length_reward": reward, "return": scores["return"] + reward}


def overlong_penalty(lengths: CompletionLengths, limit: int, buffer: int) -> RewardArray:
    """Returns 0 up to `limit - buffer` tokens, then linearly down to -1 at the limit.

    Source: arXiv 2503.14476, eq. 13.
    """
    return np.clip((limit - buffer - lengths) / buffer, -1, 0)


def cosine_reward(correct: RewardArray, lengths: CompletionLengths, limit: int) -> RewardArray:
    """Returns 1 (short) to 0.5 (at the limit) for correct replies, -1 (short) to -0.5 for wrong ones, by a cosine.

    Source: arXiv 2502.03373, eq. 1, with the end points of huggingface/open-r1.
    """
    num_tokens = np.minimum(lengths, limit)
    shortness = (1 + np.cos(np.pi * num_tokens / limit)) / 2  # 1 for no token, 0 at the limit
    sign = np.where(correct > 0, 1, -1)
    return sign * (0.5 + 0.5 * shortness)
