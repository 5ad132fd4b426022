"""KL divergence from the reference model, the policy that the run began with: a term of the loss, or of the reward.

B rows, T row length.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Float

from core.records import Batch, zero_outside_mask
from models.names import LORA_B, Adapters, Array, Params, Policy, Weights, dtype_of, make_policy
from utils.settings.errors import UserError
from utils.settings.options import option


@dataclass(frozen=True)
class KLConfig:
    """KL divergence from the policy that the run began with."""

    kl_coef: float = option(
        0.0,
        "Coefficient of the KL divergence from the reference model: the policy at the start of the run, adapters "
        "included. If above 0, a copy of its trained parameters is kept in memory, and kl is logged; 0: off",
    )
    kl_in: str = option(
        "loss",
        "Place of the KL divergence of --kl_coef; loss: a term of the loss, by the estimator k3; reward: a penalty on "
        "the reward, by k1",
        ["loss", "reward"],
    )

    def __post_init__(self):
        if self.kl_coef < 0:
            raise UserError(f"--kl_coef {self.kl_coef} must not be negative: raise it, or give 0 to switch it off")


def copy_policy(base: Weights, trained: Params | Adapters, dtype: DTypeLike) -> Policy:
    """Returns the policy that a run begins with. It shares the `base`, and updates do not change it.

    New adapters add nothing to the base, so the policy is then the base.
    """
    if not base:
        return jax.tree.map_with_path(lambda path, x: x.astype(dtype_of(path[-1].key, dtype), copy=True), trained)
    if not any(x.any() for name, x in trained.items() if name.endswith(LORA_B)):
        return base
    return make_policy(base, jax.tree.map(jnp.copy, trained))


def reference_kl(logprobs: Float[Array, "B T"], batch: Batch) -> Float[Array, "B T"]:
    """Returns an estimate of KL(p || p_ref) at each token, nats: k3 of joschu.net/blog/kl-approx.html."""
    x = logprobs - zero_outside_mask(batch.ref_logprobs, batch)
    return jnp.exp(-x) + x - 1


def kl_penalty(batch: Batch, config: KLConfig) -> Float[np.ndarray, "B T"]:
    """Returns what --kl_in reward subtracts from the reward of each token, by k1 = log p - log p_ref."""
    x = np.where(batch.mask, batch.old_logprobs - batch.ref_logprobs, 0)
    return np.float32(config.kl_coef) * x
