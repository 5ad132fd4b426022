"""Policy losses, KL, aggregation: pure functions of JAX, inside of jit. Fork this file to hack the loss.

To change the loss: write a function beside `ppo` and add its name to OBJECTIVES.
To change the aggregation: `set_loss_denominators`. To add a metric of a loss: a line in `policy_loss`, a sum.
To change the advantage: core/advantages.py. Metrics of ratios: core/run/ratios.py.

Everything is float32. Another value of a setting compiles the update anew, but of those that TracedLossConfig lists: a
controller may change these at each step. B rows, T row length.
"""

from dataclasses import dataclass, fields, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import stop_gradient
from jaxtyping import Bool, Float

from core.extensions.formulas import formula
from core.records import Batch, row_mean, sum_over_rows, token_mean, zero_outside_mask
from core.run.ratios import ratio_metrics, sampler_metrics
from models.distribution import TokenScores
from models.names import Array
from utils.settings.options import option

Coefficient = object  # a number, or the tracer or placeholder that JAX puts in its place
TokenLosses = tuple[Float[Array, "B T"], Bool[Array, "B T"]]  # losses, and True where a clip leaves no gradient


# Policy losses: of each token, from its log-probability; gradients flow through `logprobs` alone


@formula("max(-ratio A, -clip(ratio, {low}, {high}) A){dual_clip}")
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


@formula("-clip(ratio, {low}, {high}) A")
def ppo_all_clip(logprobs: Float[Array, "B T"], batch: Batch, config: "LossConfig") -> TokenLosses:
    """Loss without a gradient outside the clip range, whatever the sign of A. Source: kvfrans/lmpo."""
    ratio = jnp.exp(logprobs - batch.old_logprobs)
    clipped = jnp.clip(ratio, *config.clip_range)
    return -clipped * batch.advantages, clipped != ratio


@formula("-A log p")
def reinforce(logprobs: Float[Array, "B T"], batch: Batch, config: "LossConfig") -> TokenLosses:
    """Loss of REINFORCE. Source: Williams 1992."""
    return -batch.advantages * logprobs, jnp.zeros(logprobs.shape, bool)


@formula("-stopgrad(clip(ratio, {low}, {high})) A log p")
def cispo(logprobs: Float[Array, "B T"], batch: Batch, config: "LossConfig") -> TokenLosses:
    """Loss of CISPO: every token keeps a gradient. Source: arXiv 2506.13585."""
    ratio = jnp.exp(logprobs - batch.old_logprobs)
    weight = stop_gradient(jnp.clip(ratio, *config.clip_range))
    # A clipped weight still has a gradient, so clip_fraction counts weights of 0 only.
    return -weight * batch.advantages * logprobs, weight == 0


@formula("max(-s A, -clip(s, {low}, {high}) A), s = the geometric mean of a completion's ratios")
def gspo(logprobs: Float[Array, "B T"], batch: Batch, config: "LossConfig") -> TokenLosses:
    """Loss of GSPO, in its token form. Source: arXiv 2507.18071, section 4.3."""
    mean = stop_gradient(row_mean(logprobs - batch.old_logprobs, batch.mask))
    s = jnp.exp(mean + logprobs - stop_gradient(logprobs))
    unclipped = -s * batch.advantages
    losses = jnp.maximum(unclipped, -jnp.clip(s, *config.clip_range) * batch.advantages)
    return losses, losses != unclipped


@formula("-ratio A with ratio = p / p_sample, 0 where p - p_sample along A is beyond {fall} or +{rise}")
def dppo(logprobs: Float[Array, "B T"], batch: Batch, config: "LossConfig") -> TokenLosses:
    """Loss of DPPO with binary total variation. Source: arXiv 2602.04879."""
    fall, rise = config.clip_epsilon, config.clip_epsilon_high
    moved = stop_gradient(jnp.exp(logprobs)) - jnp.exp(batch.sample_logprobs)
    is_inside = jnp.where(batch.advantages > 0, moved <= rise, moved >= -fall)
    ratio = jnp.exp(logprobs - batch.sample_logprobs)
    return jnp.where(is_inside, -ratio * batch.advantages, 0.0), ~is_inside


@formula("-(4 / tau) sigmoid(tau (ratio - 1)) A, tau = 1, 1.05 where A < 0")
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
KL = {  # estimators from x = log p - log p_ref. Source: joschu.net/blog/kl-approx.html
    "k1": lambda x: x,
    "k2": lambda x: x**2 / 2,
    "k3": lambda x: jnp.exp(-x) + x - 1,
}


@dataclass(frozen=True)
class LossConfig:
    """Loss: all that a function of OBJECTIVES may read."""

    objective: str = option("ppo", "Policy loss", list(OBJECTIVES), essential=True)
    clip_epsilon: float = option(
        0.2,
        "Lower clip range: the ratio of new to old probability is clipped below 1 - clip_epsilon; with --objective "
        "dppo the largest fall of a probability",
    )
    clip_epsilon_high: float = option(
        -1.0,
        "Upper clip range: the ratio is clipped above 1 + clip_epsilon_high; with --objective dppo the largest rise"
        " of a probability; -1: as --clip_epsilon",
    )
    dual_clip: float = option(
        0.0,
        "Dual clip of --objective ppo: the loss of a token with a negative advantage A is at most -A times this "
        "number, above 1; 0: off",
    )
    loss_normalization: str = option(
        "token_mean",
        "Aggregation of token losses; token_mean: over all tokens, sequence_mean: over tokens of a completion, then"
        " over completions, constant: sum over (completions x --num_generation_tokens), as Dr. GRPO",
        ["token_mean", "sequence_mean", "constant"],
    )
    value_clip: float = option(
        0.2,
        "Clip range of the critic of --advantage gae: largest change of a value in a step, in units of the reward; "
        "about a fifth of the spread of returns is usual; 0: no limit",
    )
    kl_coef: float = option(
        0.0,
        "Coefficient of the KL divergence from the initial model; above 0, a copy of that is kept in memory; 0: off",
    )
    kl_estimator: str = option(
        "", "Estimator of the KL divergence of --kl_coef; empty: k3 in the loss, k1 in the reward", ["", *KL]
    )
    kl_in: str = option(
        "loss",
        "Place of the KL divergence of --kl_coef: a term of the loss, or a penalty on the reward",
        ["loss", "reward"],
    )
    entropy_coef: float = option(0.001, "Coefficient of the entropy bonus (mean over tokens, nats); 0: off")
    importance_correction: str = option(
        "none",
        "Correction for a sampler whose probabilities differ from the trainer's, by the weight w = old / sampled "
        "probability; truncate: min(w, --importance_cap), mask: w, and 0 outside [--importance_floor, "
        "--importance_cap]",
        ["none", "truncate", "mask"],
    )
    importance_level: str = option(
        "token",
        "Level of the weight of --importance_correction: of each token, or the product over the completion",
        ["token", "sequence"],
    )
    importance_cap: float = option(2.0, "Largest weight of --importance_correction")
    importance_floor: float = option(
        0.0, "Smallest weight of --importance_correction mask; IcePop: 0.5 with --importance_cap 5; 0: none"
    )
    off_policy_mask: float = option(
        0.0,
        "Mean log(sampled / new probability), nats per token, above which completions with a negative advantage are"
        " left out of the policy loss; 0: off",
    )
    do_mask_importance_ratio: bool = option(
        False, "Mask of tokens whose new / old probability is 2 or more, in the policy loss"
    )
    do_mask_inference_ratio: bool = option(
        False, "Mask of tokens whose sampled / old probability is 2 or more, in the policy loss"
    )

    @property
    def clip_epsilons(self) -> tuple[float, float]:
        is_symmetric = self.clip_epsilon_high == -1
        return self.clip_epsilon, self.clip_epsilon if is_symmetric else self.clip_epsilon_high

    @property
    def clip_range(self) -> tuple[float, float]:
        low, high = self.clip_epsilons
        return 1 - low, 1 + high

    @property
    def has_kl_in_reward(self) -> bool:
        return self.kl_coef > 0 and self.kl_in == "reward"

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
OF_HOST = ["loss_normalization"]  # read by set_loss_denominators: another one compiles nothing
STATIC = [field.name for field in fields(LossConfig) if field.name not in (*COEFFICIENTS, *OF_HOST)]
jax.tree_util.register_dataclass(TracedLossConfig, COEFFICIENTS, STATIC, OF_HOST)


def set_loss_denominators(batch: Batch, num_rollouts: int, num_generation_tokens: int, config: LossConfig) -> Batch:
    """Sets the divisors of each row's loss from the whole optimiser batch, so that micro-batches change nothing.

    `constant`, Dr. GRPO's, is `num_rollouts`, those of a full optimiser batch, times the completion limit: a row that
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


def policy_loss(scores: TokenScores, batch: Batch, config: LossConfig) -> tuple[Float[Array, ""], dict[str, Array]]:
    """Returns the loss of a micro-batch, and its metrics.

    The optimiser batch's metric is the sum over micro-batches: a mean over tokens is a `token_mean`, never `x.mean()`.
    Of names that end in _max or _min it is the extreme. Names that end in _histogram are arrays of sums.
    """
    batch = with_old_logprobs(scores.logprobs, batch)
    logprobs = zero_outside_mask(scores.logprobs, batch)
    log_ratio = logprobs - batch.old_logprobs
    sampler_log_ratio = batch.old_logprobs - batch.sample_logprobs

    losses, is_clipped = OBJECTIVES[config.objective](logprobs, batch, config)
    weights = importance_weights(sampler_log_ratio, config)
    weights = jnp.where(kept_tokens(logprobs, batch, config), weights, 0.0)
    loss = sum_over_rows(losses * weights, batch, batch.denominator)
    metrics = {
        "policy_loss": loss,
        "entropy": token_mean(scores.entropy, batch),
        "logprob": token_mean(logprobs, batch),
        "clip_fraction": token_mean(is_clipped & (batch.advantages != 0), batch),
        "masked_fraction": token_mean(weights == 0, batch),
    }
    entropy_loss = jnp.zeros(()) if config.entropy_coef is None else -config.entropy_coef * metrics["entropy"]
    loss += entropy_loss
    if config.kl_coef is not None:
        kl_loss, metrics["kl"] = reference_kl(logprobs, batch, config)
        loss += kl_loss
    metrics |= ratio_metrics(log_ratio, batch) | sampler_metrics(sampler_log_ratio, batch)
    return loss, metrics | {"loss": loss, "entropy_loss": entropy_loss}


def with_old_logprobs(logprobs: Float[Array, "B T"], batch: Batch) -> Batch:
    """Returns the batch with masked log-probabilities; the old ones are the new ones where this update is the first."""
    old = stop_gradient(logprobs) if batch.old_logprobs is None else batch.old_logprobs
    sampled = zero_outside_mask(batch.sample_logprobs, batch)
    return replace(batch, old_logprobs=zero_outside_mask(old, batch), sample_logprobs=sampled)


def reference_kl(
    logprobs: Float[Array, "B T"], batch: Batch, config: LossConfig
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Returns the KL's part of the loss, 0 where it counts in the reward, and its mean over tokens, nats."""
    log_ratio = logprobs - zero_outside_mask(batch.ref_logprobs, batch)
    if config.kl_in == "reward":
        return jnp.zeros(()), token_mean(KL["k3"](log_ratio), batch)
    kl = KL[config.kl_estimator or "k3"](log_ratio)
    return config.kl_coef * sum_over_rows(kl, batch, batch.denominator), token_mean(kl, batch)


def kept_tokens(logprobs: Float[Array, "B T"], batch: Batch, config: LossConfig) -> Bool[Array, "B T"]:
    """True for tokens that no mask leaves out of the policy loss.

    Source: kvfrans/lmpo for the ratios of a token; DeepSeek-V3.2, arXiv 2512.02556, section 3.1, for --off_policy_mask.
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


def importance_weights(log_ratio: Float[Array, "B T"], config: LossConfig) -> Float[Array, "B #T"]:
    """Weights that correct for sampling with probabilities other than the old ones.

    Source: Ionides 2008 for truncation, IcePop (arXiv 2510.18855) for a mask with a floor.
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


def value_loss(values: Float[Array, "B T"], batch: Batch, config: LossConfig) -> Float[Array, ""]:
    """0.5 max((V - R)^2, (V_old + clip(V - V_old) - R)^2), mean over tokens. Source: PPO2 of OpenAI's baselines."""
    errors = (values - batch.returns) ** 2
    if config.value_clip:
        moved = jnp.clip(values - batch.values, -config.value_clip, config.value_clip)
        clipped_errors = (batch.values + moved - batch.returns) ** 2
        errors = jnp.maximum(errors, clipped_errors)
    return token_mean(0.5 * errors, batch)
