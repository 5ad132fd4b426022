"""Corrections of the policy loss for a sampler whose probabilities are not the trainer's: weights and masks of tokens.

B rows, T row length.
"""

from dataclasses import dataclass

import jax.numpy as jnp
from jax.lax import stop_gradient
from jaxtyping import Bool, Float

from core.records import Batch, row_mean
from models.names import Array
from utils.settings.errors import refuse
from utils.settings.options import option


@dataclass(frozen=True)
class CorrectionConfig:
    """Corrections of the loss for how rollouts were sampled."""

    importance_correction: str = option(
        "none",
        "Correction if the sampler's probabilities differ from the trainer's, by the weight w = old / sampled "
        "probability; truncate: min(w, --importance_cap); mask: w, and 0 outside [--importance_floor, "
        "--importance_cap]; none: no correction",
        ["none", "truncate", "mask"],
    )
    importance_level: str = option(
        "token",
        "Level of the weight of --importance_correction; token: a weight for each token; sequence: their product over "
        "the completion",
        ["token", "sequence"],
    )
    importance_cap: float = option(2.0, "Largest weight of --importance_correction")
    importance_floor: float = option(
        0.0, "Smallest weight of --importance_correction mask (IcePop: 0.5, with --importance_cap 5); 0: none"
    )
    off_policy_mask: float = option(
        0.0,
        "Limit on a completion's mean log(sampled / new probability), in nats per token. Above it, a completion with "
        "a negative advantage is masked out of the policy loss; 0: off",
    )
    do_mask_importance_ratio: bool = option(
        False, "Mask tokens whose new / old probability is 2 or more"
    )
    do_mask_inference_ratio: bool = option(
        False, "Mask tokens whose sampled / old probability is 2 or more"
    )

    def __post_init__(self):
        refuse([
            (self.importance_cap <= 0, f"--importance_cap {self.importance_cap} must be above 0: raise it"),
            (not 0 <= self.importance_floor <= self.importance_cap,
             f"--importance_floor {self.importance_floor} must be from 0 to --importance_cap {self.importance_cap}: "
             "correct it"),
            (self.importance_floor != 0 and self.importance_correction != "mask",
             "--importance_floor has no effect without --importance_correction mask: give both, or neither"),
            (self.off_policy_mask < 0, "--off_policy_mask must not be negative: raise it, or give 0 to switch it off"),
        ])  # fmt: skip

    @property
    def is_corrected(self) -> bool:
        """True if the loss weighs tokens by old probability / sampled probability."""
        return self.importance_correction != "none"


def token_weights(logprobs: Float[Array, "B T"], batch: Batch, config: CorrectionConfig) -> Float[Array, "B T"]:
    """Returns the weight of each token in the policy loss; 0 for tokens that a mask leaves out."""
    weights = importance_weights(batch.old_logprobs - batch.sample_logprobs, config)
    return jnp.where(kept_tokens(logprobs, batch, config), weights, 0.0)


def importance_weights(log_ratio: Float[Array, "B T"], config: CorrectionConfig) -> Float[Array, "B #T"]:
    """Returns weights that correct for sampling with other probabilities than the old ones.

    Sources: Ionides 2008 for truncation, IcePop (arXiv 2510.18855) for a mask with a floor.
    """
    if config.importance_correction == "none":
        return jnp.ones((len(log_ratio), 1))
    if config.importance_level == "sequence":
        log_ratio = log_ratio.sum(axis=1, keepdims=True)
    w = stop_gradient(jnp.exp(log_ratio))
    if config.importance_correction == "truncate":
        return jnp.minimum(w, config.importance_cap)
    is_inside = (w >= config.importance_floor) & (w <= config.importance_cap)
    return jnp.where(is_inside, w, 0.0)


def kept_tokens(logprobs: Float[Array, "B T"], batch: Batch, config: CorrectionConfig) -> Bool[Array, "B T"]:
    """Returns True for tokens that no mask leaves out of the policy loss.

    Sources: kvfrans/lmpo for the ratios of a token; arXiv 2512.02556 (DeepSeek-V3.2), section 3.1, for
    --off_policy_mask.
    """
    keep = jnp.asarray(batch.mask)
    if config.do_mask_importance_ratio:
        keep &= jnp.exp(logprobs - batch.old_logprobs) < 2
    if config.do_mask_inference_ratio:
        keep &= jnp.exp(batch.sample_logprobs - batch.old_logprobs) < 2
    if config.off_policy_mask:
        divergence = row_mean(batch.sample_logprobs - logprobs, batch.mask)
        is_near = divergence <= config.off_policy_mask
        keep &= is_near | (batch.advantages >= 0)
    return keep
