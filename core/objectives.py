"""Policy losses and aggregation: pure functions of JAX, inside of jit. Fork this file to hack the loss.

To change the loss: write a function beside `ppo` and add its name to OBJECTIVES.
To change the aggregation: `set_loss_denominators`. To add a metric of a loss: a line in `policy_loss`, a sum.
To add a term: its function and its name in TERMS, as that of the KL in core/terms/reference.py.
To change the advantage: core/advantages.py. Metrics of ratios: core/terms/ratios.py.

Everything is float32. Another value of a setting compiles the update anew, but of those that TracedLossConfig lists: a
controller may change these at each step. B rows, T row length.
"""

from dataclasses import dataclass, fields, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import stop_gradient
from jaxtyping import Bool, Float

from core.records import Batch, row_mean, sum_over_rows, token_mean, zero_outside_mask
from core.terms.corrections import CorrectionConfig, token_weights
from core.terms.critic import CriticConfig
from core.terms.distill import distillation_loss
from core.terms.ratios import ratio_metrics, sampler_metrics
from core.terms.reference import reference_kl
from models.distribution import TokenOutputs
from models.names import Array
from utils.settings.options import option

Coefficient = object  # a number, or the tracer or placeholder that JAX puts in its place
TokenLosses = tuple[Float[Array, "B T"], Bool[Array, "B T"]]  # losses, and True where a clip leaves no gradient


# Policy losses: of each token, from its log-probability; gradients flow through `logprobs` alone


def ppo(logprobs: Float[Array, "B T"], batch: Batch, config: "LossConfig") -> TokenLosses:
    """Loss of PPO and GRPO. Source: arXiv 1707.06347, eq. 7; dual clip: arXiv 1912.09729, eq. 5."""
    A = batch.advantages
    ratio = jnp.exp(logprobs - batch.old_logprobs)
    unclipped = -ratio * A
    clipped = -jnp.clip(ratio, *config.clip_range) * A
    losses = jnp.maximum(unclipped, clipped)
    if config.dual_clip:
        losses = jnp.where(A < 0, jnp.minimum(losses, -config.dual_clip * A), losses)
    return losses, losses != unclipped


def ppo_all_clip(logprobs: Float[Array, "B T"], batch: Batch, config: "LossConfig") -> TokenLosses:
    """Loss without a gradient outside the clip range, whatever the sign of A. Source: kvfrans/lmpo."""
    ratio = jnp.exp(logprobs - batch.old_logprobs)
    clipped = jnp.clip(ratio, *config.clip_range)
    return -clipped * batch.advantages, clipped != ratio


def reinforce(logprobs: Float[Array, "B T"], batch: Batch, config: "LossConfig") -> TokenLosses:
    """Loss of REINFORCE. Source: Williams 1992."""
    return -batch.advantages * logprobs, jnp.zeros(logprobs.shape, bool)


def cispo(logprobs: Float[Array, "B T"], batch: Batch, config: "LossConfig") -> TokenLosses:
    """Loss of CISPO: every token keeps a gradient. Source: arXiv 2506.13585."""
    ratio = jnp.exp(logprobs - batch.old_logprobs)
    weight = stop_gradient(jnp.clip(ratio, *config.clip_range))
    # A clipped weight still has a gradient, so clip_fraction counts weights of 0 only.
    return -weight * batch.advantages * logprobs, weight == 0


def gspo(logprobs: Float[Array, "B T"], batch: Batch, config: "LossConfig") -> TokenLosses:
    """Loss of GSPO, in its token form. Source: arXiv 2507.18071, section 4.3."""
    mean = stop_gradient(row_mean(logprobs - batch.old_logprobs, batch.mask))
    s = jnp.exp(mean + logprobs - stop_gradient(logprobs))
    unclipped = -s * batch.advantages
    losses = jnp.maximum(unclipped, -jnp.clip(s, *config.clip_range) * batch.advantages)
    return losses, losses != unclipped


def dppo(logprobs: Float[Array, "B T"], batch: Batch, config: "LossConfig") -> TokenLosses:
    """Loss of DPPO with binary total variation. Source: arXiv 2602.04879."""
    fall, rise = config.clip_epsilon, config.clip_epsilon_high
    moved = stop_gradient(jnp.exp(logprobs)) - jnp.exp(batch.sample_logprobs)
    is_inside = jnp.where(batch.advantages > 0, moved <= rise, moved >= -fall)
    ratio = jnp.exp(logprobs - batch.sample_logprobs)
    return jnp.where(is_inside, -ratio * batch.advantages, 0.0), ~is_inside


def sapo(logprobs: Float[Array, "B T"], batch: Batch, config: "LossConfig") -> TokenLosses:
    """Loss of SAPO: a soft gate in place of the clip. Source: arXiv 2511.20347."""
    tau = jnp.where(batch.advantages > 0, 1.0, 1.05)
    ratio = jnp.exp(logprobs - batch.old_logprobs)
    gate = jax.nn.sigmoid(tau * (ratio - 1))
    return -4 / tau * gate * batch.advantages, jnp.zeros(ratio.shape, bool)


OBJECTIVES = {
    "ppo": ppo,
    "ppo_all_clip": ppo_all_clip,
    "reinforce": reinforce,
    "cispo": cispo,
    "gspo": gspo,
    "dppo": dppo,
    "sapo": sapo,
}
# Added to the policy's loss: each returns its value, 0 where it is off, and its metrics.
TERMS = [reference_kl, distillation_loss]


@dataclass(frozen=True)
class LossConfig(CorrectionConfig, CriticConfig):
    """Loss: all that a function of OBJECTIVES may read."""

    objective: str = option("ppo", "Policy loss", list(OBJECTIVES), essential=True)
    clip_epsilon: float = option(
        0.2,
        "Lower clip range: the ratio of new to old probability is clipped below 1 - clip_epsilon; dppo: the largest "
        "decrease of a probability",
    )
    clip_epsilon_high: float = option(
        -1.0,
        "Upper clip range: the ratio is clipped above 1 + clip_epsilon_high; dppo: the largest increase of a "
        "probability; -1: equal to --clip_epsilon",
    )
    dual_clip: float = option(
        0.0,
        "Dual clip of --objective ppo, a number above 1: the loss of a token with a negative advantage A is at most "
        "-A times this number; 0: off",
    )
    loss_normalization: str = option(
        "token_mean",
        "Aggregation of token losses; token_mean: mean over all tokens; sequence_mean: mean over the tokens of a "
        "completion, then over completions; constant (Dr. GRPO): sum divided by completions x --num_generation_tokens",
        ["token_mean", "sequence_mean", "constant"],
    )
    entropy_coef: float = option(0.001, "Coefficient of the entropy bonus (mean over tokens, in nats); 0: off")

    @property
    def clip_epsilons(self) -> tuple[float, float]:
        is_symmetric = self.clip_epsilon_high == -1
        return self.clip_epsilon, self.clip_epsilon if is_symmetric else self.clip_epsilon_high

    @property
    def clip_range(self) -> tuple[float, float]:
        low, high = self.clip_epsilons
        return 1 - low, 1 + high

    @property
    def loss(self) -> "TracedLossConfig":
        """Returns the settings of the loss alone: members of a population share its programs where these are equal.

        Terms whose coefficients are None are not computed.
        """
        settings = {field.name: getattr(self, field.name) for field in fields(LossConfig)}
        used = {"clip_epsilon_high": self.clip_epsilons[1], "clip_range": self.clip_range}
        used |= {name: settings[name] or None for name in ("kl_coef", "entropy_coef")}
        return TracedLossConfig(**settings | used)


@dataclass(frozen=True)
class TracedLossConfig(LossConfig):
    """Loss inside of jit: the coefficients below are traced numbers, None where they are 0; all else is static."""

    clip_epsilon: Coefficient = 0.2
    clip_epsilon_high: Coefficient = 0.2
    clip_range: tuple[Coefficient, Coefficient] = (0.8, 1.2)  # rounded once, from float64
    kl_coef: Coefficient | None = None
    entropy_coef: Coefficient | None = None


COEFFICIENTS = ["clip_epsilon", "clip_epsilon_high", "clip_range", "kl_coef", "entropy_coef"]
OF_HOST = ["loss_normalization", "gamma", "gae_lambda"]  # read before the update: another one compiles nothing
STATIC = [field.name for field in fields(LossConfig) if field.name not in (*COEFFICIENTS, *OF_HOST)]
jax.tree_util.register_dataclass(TracedLossConfig, COEFFICIENTS, STATIC, OF_HOST)


def set_loss_denominators(batch: Batch, num_rollouts: int, num_generation_tokens: int, config: LossConfig) -> Batch:
    """Sets the divisors of each row's loss from the whole optimizer batch, so that micro-batches change nothing.

    `constant`, Dr. GRPO's, is `num_rollouts`, those of a full optimizer batch, times the completion limit: a row that
    was dropped changes the gradient no more than one with advantage 0. Source: arXiv 2503.20783, section 3.2.
    """
    row_tokens = np.float32(batch.mask.sum(axis=1))
    num_tokens = np.full_like(row_tokens, max(row_tokens.sum(), 1))
    denominators = {
        "token_mean": num_tokens,
        "sequence_mean": len(batch) * np.maximum(row_tokens, 1),
        "constant": np.full_like(row_tokens, num_rollouts * num_generation_tokens),
    }
    return replace(batch, denominator=denominators[config.loss_normalization], num_tokens=num_tokens)


def policy_loss(outputs: TokenOutputs, batch: Batch, config: LossConfig) -> tuple[Float[Array, ""], dict[str, Array]]:
    """Returns the loss of a micro-batch, and its metrics.

    A term of another output of the model is a field of TokenOutputs, and a function in TERMS that reads it.
    The optimizer batch's metric is the sum over micro-batches: a mean over tokens is a `token_mean`, never `x.mean()`.
    Of names that end in _max or _min it is the extreme. Names that end in _histogram are arrays of sums.
    """
    batch = with_old_logprobs(outputs.logprobs, batch)
    logprobs = zero_outside_mask(outputs.logprobs, batch)
    outputs = outputs._replace(logprobs=logprobs)
    losses, is_clipped = OBJECTIVES[config.objective](logprobs, batch, config)
    weights = token_weights(logprobs, batch, config)
    loss = sum_over_rows(losses * weights, batch, batch.denominator)
    metrics = {
        "policy_loss": loss,
        "entropy": token_mean(outputs.entropy, batch),
        "logprob": token_mean(logprobs, batch),
        "clip_fraction": token_mean(is_clipped & (batch.advantages != 0), batch),
        "masked_fraction": token_mean(weights == 0, batch),
    }
    entropy_loss = jnp.zeros(()) if config.entropy_coef is None else -config.entropy_coef * metrics["entropy"]
    loss += entropy_loss
    for term in TERMS:
        added, its_metrics = term(outputs, batch, config)
        loss += added
        metrics |= its_metrics
    metrics |= ratio_metrics(logprobs, batch) | sampler_metrics(batch)
    return loss, metrics | {"loss": loss, "entropy_loss": entropy_loss}


def with_old_logprobs(logprobs: Float[Array, "B T"], batch: Batch) -> Batch:
    """Returns the batch with masked log-probabilities; the old ones are the new ones where this update is the first."""
    old = stop_gradient(logprobs) if batch.old_logprobs is None else batch.old_logprobs
    sampled = zero_outside_mask(batch.sample_logprobs, batch)
    return replace(batch, old_logprobs=zero_outside_mask(old, batch), sample_logprobs=sampled)
