"""Rewards of the turns of an episode: by token, and summed from each turn on.

N prompts, G rollouts of each, E = N G rollouts, B rows of their tokens, T row length, K turns.
"""

from collections.abc import Callable

import numpy as np
from jaxtyping import Bool, Float, Int

from core.records import Batch, Episodes, differs


def of_turns(
    advantage: Callable[..., np.ndarray], rewards: Float[np.ndarray, "KN G"], batch: Batch, config: object
) -> Float[np.ndarray, "B T"]:
    """Returns the advantages of a method of core/advantages.py that compares turns instead of rollouts.

    Each token gets the advantage of its turn. It is 0 if all turns of this number in the group earn the same. The turns
    of a rollout's first row are compared; other rows take the advantages of those of the same number.
    """
    advantages = advantage(rewards, batch, config) * differs(rewards)[:, None]
    by_number = batch.of_rows(advantages.reshape(-1, len(batch.first_rows)).T)  # [B, K]
    # Tokens before the first turn get the advantage of the first turn. A single reply is one turn.
    num_turns = np.maximum(np.isfinite(by_number).sum(axis=1, keepdims=True), 1)
    turns = np.clip(turn_numbers(batch.mask), 0, num_turns - 1)
    return np.take_along_axis(by_number, turns, axis=1)


def turn_numbers(mask: Bool[np.ndarray, "B T"]) -> Int[np.ndarray, "B T"]:
    """Returns the number of each token's turn, from 0 on. A token between turns has the number of the turn before it.

    Tokens of the prompt have the number -1.
    """
    before = np.pad(mask, ((0, 0), (1, 0)))[:, :-1]
    is_first = mask & ~before
    return np.cumsum(is_first, axis=1) - 1


def token_rewards(episodes: Episodes, rewards: Float[np.ndarray, "B"]) -> Float[np.ndarray, "B T"]:
    """Returns the reward of each turn, in the column of the turn's last token; 0 elsewhere.

    The last turn also gets what the episode earned beside the rewards of its turns. The turns are those of the
    rollout's first row; each other row gets the whole reward with its last turn. A row may have lost turns: a program
    did not get them, or their stop text came first. What is left of the rewards goes to its last turn then.
    """
    mask = episodes.completions.mask
    is_last = mask & ~np.pad(mask, ((0, 0), (0, 1)))[:, 1:]
    by_token = np.zeros(mask.shape, np.float32)
    of_turns = dict(zip(episodes.first_rows.tolist(), episodes.turn_rewards, strict=True))
    for row in range(len(mask)):
        columns = np.flatnonzero(is_last[row])
        if not columns.size:  # its program failed before it got a reply
            continue
        earned = of_turns.get(row, [])[: columns.size]
        by_token[row, columns[: len(earned)]] = earned
        by_token[row, columns[-1]] += rewards[row] - np.float32(sum(earned))
    return by_token


def turn_returns(batch: Batch) -> Float[np.ndarray, "K B"]:
    """Returns the sum of rewards from the turn of each number on; NaN if the grader failed or a row has no such turn.

    Sources: PipelineRL and Tunix.
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
