"""Credit: rewards of an episode by token, and from each turn on; advantages shaped over the batch.

N prompts, G rollouts of each, B = N G rows, T row length, K turns.
"""

from collections.abc import Callable

import numpy as np
from jaxtyping import Bool, Float, Int

from core.records import Batch, Episodes, differs

BY_TURN = ("turn_mean", "turn_zscore")  # advantages that compare the rewards [K N, G] from each of K turns on


def by_turn(advantage: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    """Returns for tokens the advantage of their turn, 0 where the group's turns of this number earn the same."""

    def of_turns(rewards: Float[np.ndarray, "KN G"], batch: Batch, config: object) -> Float[np.ndarray, "B T"]:
        advantages = advantage(rewards, batch, config) * differs(rewards)[:, None]
        by_number = advantages.reshape(-1, len(batch))
        # Tokens before the first turn have what is of the first; of single replies all is one turn.
        turns = np.clip(turn_numbers(batch.mask), 0, len(by_number) - 1)
        return np.take_along_axis(by_number.T, turns, axis=1)

    return of_turns


def turn_numbers(mask: Bool[np.ndarray, "B T"]) -> Int[np.ndarray, "B T"]:
    """Returns the number of each token's turn, from 0 on; tokens between turns have that of the last, the prompt -1."""
    before = np.pad(mask, ((0, 0), (1, 0)))[:, :-1]
    is_first = mask & ~before
    return np.cumsum(is_first, axis=1) - 1


def token_rewards(episodes: Episodes, rewards: Float[np.ndarray, "B"]) -> Float[np.ndarray, "B T"]:
    """Returns the rewards of turns, each with its last token; the last turn gets what else the episode earned."""
    mask = episodes.completions.mask
    behind = np.pad(mask, ((0, 0), (0, 1)))[:, 1:]
    is_last = mask & ~behind
    by_token = np.zeros(mask.shape, np.float32)
    for row, of_turns in enumerate(episodes.turn_rewards):
        columns = np.flatnonzero(is_last[row])
        by_token[row, columns[: len(of_turns)]] = of_turns
        by_token[row, columns[-1]] += rewards[row] - np.float32(sum(of_turns))
    return by_token


def turn_returns(batch: Batch) -> Float[np.ndarray, "K B"]:
    """Returns the sum of rewards from the turn of each number on; NaN where a grader failed or a row has no such turn.

    Source: PipelineRL and Tunix.
    """
    turns = turn_numbers(batch.mask)
    num_turns = max(1, turns.max() + 1)
    returns = np.full((num_turns, len(batch)), np.nan, np.float32)
    rewards_to_go = np.zeros(len(batch))  # float64: equal sums must be equal in any order of their parts
    for turn in reversed(range(num_turns)):
        is_turn = batch.mask & (turns == turn)
        rewards_to_go += np.where(is_turn, batch.token_rewards, 0).sum(axis=1)
        returns[turn] = np.where(is_turn.any(axis=1), rewards_to_go, np.nan)
    return returns
