"""Advantages shaped over the batch: normalized, weighted.

B rows, T row length; C columns of advantages, 1 or T; D columns of shaped advantages.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float

from core.records import Batch, masked_whiten
from utils.settings.options import option


@dataclass(frozen=True)
class ShapingConfig:
    """Shaping of advantages."""

    do_global_normalization: bool = option(
        False, "Normalize advantages over the batch to mean 0 and standard deviation 1, after --advantage"
    )
    negative_advantage_multiplier: float = option(
        1.0, "Factor of negative advantages, applied last; 0: they are replaced by 0; 1: no change"
    )


def shape_advantages(
    advantages: Float[np.ndarray, "B C"],
    signal: Bool[np.ndarray, "B"],
    kept: Bool[np.ndarray, "B"],
    batch: Batch,
    config: ShapingConfig,
) -> Float[np.ndarray, "B D"]:
    """Returns the advantages normalized and weighted, as far as the options are on.

    They are normalized over the rollouts that are kept, or over their tokens if each token has its own advantage.
    Rollouts of groups without signal count there with advantage 0.
    """
    if config.do_global_normalization:
        is_per_token = advantages.shape[1] > 1
        is_first = np.isin(np.arange(len(batch)), batch.first_rows)
        counted = batch.mask if is_per_token else (kept & is_first)[:, None]
        advantages = masked_whiten(np.where(signal[:, None], advantages, 0), counted)
    if config.negative_advantage_multiplier != 1:
        weight = np.float32(config.negative_advantage_multiplier)
        advantages = np.where(advantages < 0, weight * advantages, advantages)
    return advantages
