"""KL divergence from the reference model, the policy that the run began with: a term of the loss, or of the reward.

B rows, T row length.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Float

from core.records import Batch, sum_over_rows, token_mean, zero_outside_mask
from models.distribution import TokenOutputs
from models.lora import LORA_B, make_policy
from models.names import Adapters, Array, Params, Policy, Weights
from utils.settings.errors import refuse
from utils.settings.options import option


@dataclass(frozen=True, kw_only=True)
class ReferenceConfig:
    """KL divergence from the policy that the run began with."""

    kl_coef: float = option(
        0.0,
        "Coefficient of the KL divergence from the reference model: the policy at the start of the run, adapters "
        "included. If above 0, a copy of its trained parameters is kept in memory; 0: off",
    )
    kl_in: str = option(
        "loss",
        "Place of the KL divergence of --kl_coef; loss: a term of the loss, by the estimator k3; reward: a penalty on "
        "the reward, by k1",
        ["loss", "reward"],
    )

    @property
    def has_kl_in_reward(self) -> bool:
        return self.kl_coef > 0 and self.kl_in == "reward"


def check_kl(config: ReferenceConfig) -> None:
    """Raises UserError for options of the KL divergence that contradict one another."""
    refuse([
        (config.kl_coef < 0, f"--kl_coef {config.kl_coef} must not be negative: raise it, or give 0 to switch it off"),
    ])  # fmt: skip


def copy_policy(base: Weights, trained: Params | Adapters, dtype: DTypeLike) -> Policy:
    """Returns the policy that a run begins with, of which updates change nothing; it shares the `base`.

    New adapters add nothing to the base, which then is the policy.
    """
    if not base:
        return jax.tree.map(lambda x: x.astype(dtype, copy=True), trained)
    if not any(x.any() for name, x in trained.items() if name.endswith(LORA_B)):
        return base
    return make_policy(base, jax.tree.map(jnp.copy, trained))


def reference_kl(
    outputs: TokenOutputs, batch: Batch, config: ReferenceConfig
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """Returns the KL's term of the loss, 0 where it counts in the reward, and its mean over tokens, nats."""
    if config.kl_coef is None:
        return jnp.zeros(()), {}
    kl = k3(outputs.logprobs - zero_outside_mask(batch.ref_logprobs, batch))
    if config.kl_in == "reward":
        return jnp.zeros(()), {"kl": token_mean(kl, batch)}
    return config.kl_coef * sum_over_rows(kl, batch, batch.denominator), {"kl": token_mean(kl, batch)}


def k3(x: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """Estimate of KL(p || p_ref) from x = log p - log p_ref. Source: joschu.net/blog/kl-approx.html."""
    return jnp.exp(-x) + x - 1


def kl_penalty(batch: Batch, config: ReferenceConfig) -> Float[np.ndarray, "B T"]:
    """Penalty subtracted from the reward of each token under --kl_in reward: log p - log p_ref, the estimator k1."""
    x = np.where(batch.mask, batch.old_logprobs - batch.ref_logprobs, 0)
    return np.float32(config.kl_coef) * x
