"""Rewards for the length of completions in tokens, which environments do not get: --length_reward.

B rows.
"""

from dataclasses import replace

import numpy as np
from jaxtyping import Float, Int

from core.records import Episodes

CompletionLengths = Int[np.ndarray, "B"]  # tokens
RewardArray = Float[np.ndarray, "B"]


def with_length_reward(episodes: Episodes, limit: int, kind: str) -> Episodes:
    """Returns the episodes with the score "length_reward", added to "return"; `kind` is that of --length_reward.

    `limit`: maximum number of tokens of a completion, or of an episode with its observations. A truncated completion
    counts as `limit` tokens long. If the grader failed, the length reward is 0 too.
    """
    completions, scores = episodes.completions, episodes.scores
    lengths = np.add.reduceat(completions.lengths - completions.prompt_lengths, episodes.first_rows)
    lengths = np.where(episodes.finished, lengths, limit)
    if kind == "overlong":
        reward = overlong_penalty(lengths, limit, buffer=max(1, limit // 5))
    else:
        reward = cosine_reward(scores["correct_answer"], lengths, limit)
    reward = np.where(episodes.failed, 0, reward).astype(np.float32)
    return replace(episodes, scores=scores | {"length_reward": reward, "return": scores["return"] + reward})


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
