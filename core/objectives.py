"""Policy losses and aggregation: pure functions of JAX, inside of jit. Fork this file to hack the loss.

To change the loss: write a function beside `ppo` and add its name to OBJECTIVES.
To change the aggregation: `set_loss_denominators`. To add a metric of a loss: a line in `policy_loss`, a sum.
To add a term: lines in `policy_loss`, as those of the KL.
To change the advantage: core/advantages.py. Metrics of ratios: core/terms/ratios.py.

Everything is float32. Changing a setting recompiles the update, except a coefficient of LossConfig: a controller may
change coefficients at each step. B rows, T row length.
"""

from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import stop_gradient
from jaxtyping import Bool, Float

from core.records import TEACHER_COEFFICIENTS, Batch, row_mean, sum_over_rows, token_mean, zero_outside_mask
from core.terms.corrections import CorrectionConfig, token_weights
from core.terms.ratios import ratio_metrics, sampler_metrics
from core.terms.reference import reference_kl
from models.distribution import TokenOutputs
from models.names import Array
from utils.settings.errors import refuse
from utils.settings.options import option

Coefficient = object  # a number, or the tracer or placeholder that JAX puts in its place
STATIC = {"static": True}  # metadata of a field: another value compiles another program
TokenLosses = tuple[Float[Array, "B T"], Bool[Array, "B T"]]  # losses; True: a clip leaves the token no gradient


# Policy losses: the loss of each token, from its log-probability; gradients flow through `logprobs` alone


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
    """Loss of SAPO: a soft gate instead of the clip. Source: arXiv 2511.20347."""
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


@dataclass(frozen=True)
class PolicyConfig:
    """Policy loss."""

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

    def __post_init__(self):
        refuse([
            (self.clip_epsilon < 0 or self.clip_epsilon_high < 0 and self.clip_epsilon_high != -1,
             "--clip_epsilon and --clip_epsilon_high must not be negative: raise the lower one (--clip_epsilon_high "
             "-1: as --clip_epsilon)"),
            (self.dual_clip != 0 and self.dual_clip <= 1,
             f"--dual_clip {self.dual_clip} must be above 1: raise it, or give 0 for none"),
        ])  # fmt: skip


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LossConfig:
    """All options that the loss reads, as jit takes them. Coefficients are traced numbers; other fields are static."""

    objective: str = field(metadata=STATIC)
    dual_clip: float = field(metadata=STATIC)
    corrections: CorrectionConfig = field(metadata=STATIC)
    kl_in: str = field(metadata=STATIC)
    value_clip: float = field(metadata=STATIC)
    clip_epsilon: Coefficient
    clip_epsilon_high: Coefficient
    clip_range: tuple[Coefficient, Coefficient]  # of the ratio; computed in float64, then rounded
    kl_coef: Coefficient | None  # None: off
    entropy_coef: Coefficient | None  # None: off


def set_loss_denominators(batch: Batch, num_rollouts: int, num_generation_tokens: int, config: PolicyConfig) -> Batch:
    """Sets the divisors of each row's loss from the whole optimizer batch, so that micro-batches change nothing.

    `constant` (Dr. GRPO) divides by the rollouts of a full optimizer batch (`num_rollouts`) times the completion limit.
    Dropping a rollout then has the same effect as giving it advantage 0. Source: arXiv 2503.20783, section 3.2.
    """
    row_tokens = np.float32(batch.mask.sum(axis=1))
    num_tokens = np.full_like(row_tokens, max(row_tokens.sum(), 1))
    rollout_tokens = np.add.reduceat(row_tokens, batch.first_rows)
    denominators = {
        "token_mean": num_tokens,
        "sequence_mean": batch.of_rows(len(rollout_tokens) * np.maximum(rollout_tokens, 1)),
        "constant": np.full_like(row_tokens, num_rollouts * num_generation_tokens),
    }
    return replace(batch, denominator=denominators[config.loss_normalization], num_tokens=num_tokens)


def policy_loss(outputs: TokenOutputs, batch: Batch, config: LossConfig) -> tuple[Float[Array, ""], dict[str, Array]]:
    """Returns the loss of a micro-batch, and its metrics.

    To add a term on another output of the model: add a field to TokenOutputs, and here the lines that read it.
    The optimizer batch's metric is the sum over micro-batches: a mean over tokens is a `token_mean`, never `x.mean()`.
    Metrics whose names end in _max or _min are reduced by max or min. Those that end in _histogram are arrays of sums.
    """
    # In the only update of a step, the old log-probabilities are the new ones.
    old = stop_gradient(outputs.logprobs) if batch.old_logprobs is None else batch.old_logprobs
    logprobs, old, sampled = (zero_outside_mask(x, batch) for x in (outputs.logprobs, old, batch.sample_logprobs))
    batch = replace(batch, old_logprobs=old, sample_logprobs=sampled)
    losses, is_clipped = OBJECTIVES[config.objective](logprobs, batch, config)
    weights = jnp.ones(losses.shape)
    if config.corrections != CorrectionConfig():
        weights = token_weights(logprobs, batch, config.corrections)
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
    if config.kl_coef is not None:
        kl = reference_kl(logprobs, batch)
        metrics["kl"] = token_mean(kl, batch)
        if config.kl_in == "loss":
            loss += config.kl_coef * sum_over_rows(kl, batch, batch.denominator)
    if TEACHER_COEFFICIENTS in batch.extras:
        from core.terms.distill import distillation

        metrics |= distillation(outputs, batch)
        loss += metrics["distill/loss"]
    metrics |= ratio_metrics(logprobs, batch) | sampler_metrics(batch)
    return loss, metrics | {"loss": loss, "entropy_loss": entropy_loss}
