"""Named parts of the reward, each compared within its group by itself: --advantage gdpo.

N prompts, G rollouts of each, B = N G rows, K parts.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from core.records import Batch, differs, masked_whiten
from utils.settings.errors import UserError, refuse
from utils.settings.options import option


@dataclass(frozen=True)
class PartsConfig:
    """Parts of the reward."""

    reward_parts: str = option(
        "",
        "Parts of the reward that --advantage gdpo compares, each with its weight, as correct_answer=1,format=0.5. The "
        "parts are those that are logged as env/NAME; the return itself is not trained on; empty: none",
    )

    @property
    def weights(self) -> dict[str, float]:
        """Returns the weight of each part. Raises: UserError for a text that is not name=number, or a name twice."""
        weights = {}
        for item in filter(None, map(str.strip, self.reward_parts.split(","))):
            name, _, number = (word.strip() for word in item.rpartition("="))
            try:
                weight = float(number)
            except ValueError:
                weight = math.nan
            if not name or name in weights or not math.isfinite(weight):
                raise UserError(
                    f"--reward_parts {self.reward_parts}: {item!r} is not a new name with a number: write each part as "
                    "correct_answer=1"
                )
            weights[name] = weight
        return weights


def check_parts(config: PartsConfig, advantage: str) -> None:
    """Raises UserError if --advantage gdpo has no parts, or if another advantage has some."""
    has_weights = any(config.weights.values())
    refuse([
        (advantage == "gdpo" and not has_weights,
         "--advantage gdpo compares parts of the reward, and --reward_parts names none: name them with their weights, "
         "as --reward_parts correct_answer=1,format=0.5"),
        (advantage != "gdpo" and config.reward_parts != "",
         f"--reward_parts has no effect with --advantage {advantage}: give --advantage gdpo, or remove it"),
    ])  # fmt: skip


def part_rewards(batch: Batch, config: PartsConfig) -> Float[np.ndarray, "K B"]:
    """Returns the rewards by part, without weights; NaN if there is no reward or no such part, 0 if no reply has it."""
    absent = np.zeros(len(batch))
    parts = np.float32([batch.reward_parts.get(name, absent) for name in config.weights])
    return np.where(np.isnan(batch.rewards), np.float32(np.nan), parts)


def by_part(advantage: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    """Returns a method of core/advantages.py that compares each part of the reward by itself.

    The results are summed by the parts' weights, and then whitened over the rows that stay. A part whose rewards are
    all equal in a group adds exactly 0 to it, and so does a part that a row has not. Source: GDPO, arXiv 2601.05242,
    section 3.1; rows without a part as in TRL's normalize_then_sum.
    """

    def of_parts(rewards: Float[np.ndarray, "KN G"], batch: Batch, config: object) -> Float[np.ndarray, "B 1"]:
        weights = np.float32([*config.parts.weights.values()])
        advantages = advantage(rewards, batch, config) * differs(rewards)[:, None]
        summed = weights @ np.nan_to_num(advantages).reshape(len(weights), -1)
        is_kept = np.logical_or.reduceat(batch.mask.any(axis=1), batch.first_rows)
        return masked_whiten(summed[:, None], is_kept[:, None])

    return of_parts
