"""Advantages shaped over the batch: normalized, clipped, weighted.

B rows, T row length; C columns of advantages, 1 or T; D columns of shaped advantages.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float

from core.records import Batch, masked_whiten
from utils.settings.options import option


@dataclass(frozen=True, kw_only=True)
class ShapingConfig:
    """Advantages, behind --advantage."""

    do_global_normalization: bool = option(
        False, "Normalize advantages over the batch to mean 0 and standard deviation 1, after --advantage"
    )
    do_clip_advantages: bool = option(False, "Replace negative advantages by 0, after --do_global_normalization")
    negative_advantage_multiplier: float = option(1.0, "Factor of negative advantages, applied last; 1: no change")


def normalize_advantages(
    advantages: Float[np.ndarray, "B C"], keep: Bool[np.ndarray, "B"], batch: Batch
) -> Float[np.ndarray, "B D"]:
    """Returns advantages normalized over the rows that are kept, or over their tokens if each has its own."""
    is_per_token = advantages.shape[1] > 1
    counted = batch.mask if is_per_token else keep[:, None]
    return masked_whiten(advantages, counted)
