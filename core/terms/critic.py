"""The critic of PPO: generalized advantages from its values, and its loss. For --advantage gae.

B rows, T row length.
"""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from core.records import Batch, token_mean
from models.names import Array
from utils.settings.errors import refuse
from utils.settings.options import option


@dataclass(frozen=True)
class CriticConfig:
    """Critic of --advantage gae."""

    gamma: float = option(1.0, "Discount factor per token of --advantage gae; 1: no discount")
    gae_lambda: float = option(0.95, "Lambda of --advantage gae; 0: rely on the critic; 1: rely on the return")
    value_clip: float = option(
        0.2,
        "Clip range of the critic of --advantage gae: largest change of a value in a step, in units of the reward "
        "(usual: about a fifth of the spread of returns); 0: no limit",
    )

    def __post_init__(self):
        refuse([
            (self.value_clip < 0,
             f"--value_clip {self.value_clip} must not be negative: raise it, or give 0 to switch it off"),
            (not (0 <= self.gamma <= 1 and 0 <= self.gae_lambda <= 1),
             "--gamma and --gae_lambda must be from 0 to 1: correct the one that is not"),
        ])  # fmt: skip


def generalized_advantages(
    batch: Batch, penalty: Float[np.ndarray, "B T"] | float, config: CriticConfig
) -> Float[np.ndarray, "B T"]:
    """Returns sums of temporal differences, discounted by gamma x lambda per token.

    The reward comes with the last token that the policy chose. In episodes, each turn's reward comes with the turn's
    last token. `penalty` is subtracted from the rewards of tokens. Tokens that the policy did not choose are skipped.
    Source: arXiv 1506.02438, eq. 16.
    """
    rewards = batch.token_rewards
    if rewards is None:
        tokens_to_go = np.cumsum(batch.mask[:, ::-1], axis=1)[:, ::-1]
        rewards = np.where(batch.mask & (tokens_to_go == 1), batch.rewards[:, None], 0)
    rewards = rewards - penalty
    gamma, decay = np.float32(config.gamma), np.float32(config.gae_lambda)
    mask, values = batch.mask, batch.values
    advantages = np.zeros(mask.shape, np.float32)
    next_value = np.zeros(len(mask), np.float32)
    next_advantage = np.zeros(len(mask), np.float32)
    for t in reversed(range(mask.shape[1])):
        target = rewards[:, t] + gamma * (next_value + decay * next_advantage)
        advantages[:, t] = np.where(mask[:, t], target - values[:, t], 0)
        next_advantage = np.where(mask[:, t], target - values[:, t], next_advantage)
        next_value = np.where(mask[:, t], values[:, t], next_value)
    return advantages


def value_loss(values: Float[Array, "B T"], batch: Batch, value_clip: float) -> Float[Array, ""]:
    """Returns the mean over tokens of 0.5 max((V - R)^2, (V_old + clip(V - V_old) - R)^2).

    Source: PPO2 of OpenAI's baselines.
    """
    errors = (values - batch.returns) ** 2
    if value_clip:
        moved = jnp.clip(values - batch.values, -value_clip, value_clip)
        clipped_errors = (batch.values + moved - batch.returns) ** 2
        errors = jnp.maximum(errors, clipped_errors)
    return token_mean(0.5 * errors, batch)
