"""Rewards for the length of completions: --length_reward."""

from dataclasses import replace

import numpy as np

from core.records import Episodes
from envs.scoring.shaping import RewardConfig, add_length_reward


def with_length_reward(episodes: Episodes, limit: int, config: RewardConfig) -> Episodes:
    """Returns the episodes with --length_reward in their scores, 0 where the reward failed.

    `limit`: most tokens of a completion, or of an episode with what was said in it; what it cut off counts as full.
    """
    completions = episodes.completions
    lengths = np.where(completions.finished, completions.lengths - completions.prompt_lengths, limit)
    scores = add_length_reward(episodes.scores, lengths, limit, config)
    scores = {name: np.where(episodes.failed, np.float32(0), x) for name, x in scores.items()}
    return replace(episodes, scores=scores)
