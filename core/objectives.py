"""What is maximised: advantages, policy losses, KL, aggregation. Pure functions; fork this file to hack the loss.

A new objective is a function of about ten lines and its name in one table: `GROUP_ADVANTAGES` or `BATCH_ADVANTAGES`
(from the rewards), `OBJECTIVES` (loss of each token), `KL` or `normalize` (aggregation). A run prints the `formula` of
each at the start. Everything is float32.

Letters: N prompts, G rollouts of each, B = N G rows, T row length, S ids of a truncated distribution.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.lax import stop_gradient
from jaxtyping import Bool, Float, Int

from utils.settings.config import option
from utils.settings.errors import UserError
from utils.training.batching import Array

NO_SIGNAL = 1e-6  # rewards of a group closer than this are equal: rounding alone gives them a deviation above zero
LOG_RATIOS = np.linspace(-1.0, 1.0, 201)  # of new to old probability: where tokens are counted for a quantile
Function = TypeVar("Function", bound=Callable)


@struct.dataclass
class Batch:
    """Rollouts to learn from; every [B, T] array speaks of the token in its own column."""

    tokens: Int[Array, "B T"]
    mask: Bool[Array, "B T"]  # tokens that the policy chose
    sample_logprobs: Float[Array, "B T"]  # under the distribution that was sampled
    rewards: Float[Array, "B"]  # NaN: the grader failed
    lengths: Int[Array, "B"]  # prompt + completion
    prompt_lengths: Int[Array, "B"]
    finished: Bool[Array, "B"] | None = None  # not cut off by the limit
    support: Int[Array, "B T S"] | None = None  # ids that could be drawn, -1 fills up; None: all
    old_logprobs: Float[Array, "B T"] | None = None  # None: this update is the rollout's first, so old = new
    ref_logprobs: Float[Array, "B T"] | None = None  # of the reference model
    values: Float[Array, "B T"] | None = None  # the critic's, of the state in which the token was chosen
    advantages: Float[Array, "B T"] | None = None
    returns: Float[Array, "B T"] | None = None  # what the critic is to learn
    entropies: Float[Array, "B T"] | None = None  # of the old policy, nats: to be looked at, no loss reads it
    denominator: Float[Array, "B"] | None = None  # of the loss summed over a row: see `normalize`
    num_tokens: Float[Array, "B"] | None = None  # masked tokens of the whole optimiser batch
    group_size: int = struct.field(pytree_node=False, default=1)


def formula(text: str) -> Callable[[Function], Function]:
    """Attaches the formula that `describe` prints; it may name {low}, {high}, {dual_clip} and {config.<option>}."""

    def attach(function: Function) -> Function:
        function.formula = text
        return function

    return attach


# Advantages: from the rewards [N, G], one for each row or each token


@formula("(r - mean) / std of the group")
def group_zscore(rewards: Float[Array, "N G"], batch: Batch, config) -> Float[Array, "N G"]:
    """Advantage of GRPO. Source: arXiv 2402.03300, section 4.1.2."""
    deviation = jnp.nanstd(rewards, axis=1, keepdims=True)
    return group_mean(rewards, batch, config) / jnp.where(deviation > 0, deviation, 1.0)


@formula("r - mean of the group")
def group_mean(rewards: Float[Array, "N G"], batch: Batch, config) -> Float[Array, "N G"]:
    """Advantage of Dr. GRPO. Source: arXiv 2503.20783, section 3.2."""
    return rewards - jnp.nanmean(rewards, axis=1, keepdims=True)


@formula("r - mean of the others in the group")
def rloo(rewards: Float[Array, "N G"], batch: Batch, config) -> Float[Array, "N G"]:
    """Advantage of REINFORCE leave-one-out. Source: arXiv 2402.14740."""
    G = jnp.isfinite(rewards).sum(axis=1, keepdims=True)
    return G / jnp.maximum(G - 1, 1) * group_mean(rewards, batch, config)


@formula("(r - mean) / mean of the group, 0 where the mean is not positive")
def maxrl(rewards: Float[Array, "N G"], batch: Batch, config) -> Float[Array, "N G"]:
    """Advantage of MaxRL. Source: arXiv 2602.02710."""
    mean = jnp.nanmean(rewards, axis=1, keepdims=True)
    return jnp.where(mean > 0, (rewards - mean) / jnp.where(mean > 0, mean, 1.0), 0.0)


@formula("r - mean of the group, whitened over the tokens of the batch")
def whitened_group_mean(rewards: Float[Array, "N G"], batch: Batch, config) -> Float[Array, "B T"]:
    """Advantage of REINFORCE++ with a group baseline. Source: arXiv 2501.03262."""
    return standardize(group_mean(rewards, batch, config).reshape(-1, 1), batch.mask)


@formula("1 for the {config.best_k} best of the group, the others leave the batch")
def best_k(rewards: Float[Array, "N G"], batch: Batch, config) -> Float[Array, "N G"]:
    """Advantage of self-imitation; ties go to the first. Source: RAFT, arXiv 2304.06767; easy-GRPO's sil."""
    rank = jnp.argsort(jnp.argsort(-rewards, axis=1, stable=True), axis=1)
    return (rank < config.best_k).astype(jnp.float32)


@formula("r")
def raw_rewards(rewards: Float[Array, "N G"], batch: Batch, config) -> Float[Array, "N G"]:
    """Advantage of REINFORCE. Source: Williams 1992."""
    return rewards


@formula("(r - mean) / std of the batch")
def batch_zscore(rewards: Float[Array, "N G"], batch: Batch, config) -> Float[Array, "N G"] | Float[Array, "B T"]:
    """Advantage of REINFORCE++: over completions, or with the KL in the reward over tokens.

    A token pays for the KL from itself on: r - kl_coef sum over s >= t of KL_s. Source: arXiv 2501.03262, eq. 8-10.
    """
    if not config.has_kl_in_reward:
        return standardize(rewards, jnp.isfinite(rewards))
    penalty = kl_penalty(batch, config)
    penalty_to_go = jnp.cumsum(penalty[:, ::-1], axis=1)[:, ::-1]
    return standardize(batch.rewards[:, None] - penalty_to_go, batch.mask)


@formula("generalised, gamma {config.gamma:g}, lambda {config.gae_lambda:g}, whitened over the batch")
def gae(rewards: Float[Array, "N G"], batch: Batch, config) -> Float[Array, "B T"]:
    """Advantage of PPO, from the critic's values. Source: arXiv 1506.02438."""
    return standardize(generalised_advantages(batch, config), batch.mask)


# These compare the rollouts of a group: one whose rewards are equal has no signal, and the group filter drops it.
GROUP_ADVANTAGES = {
    "group_zscore": group_zscore, "group_mean": group_mean, "rloo": rloo, "maxrl": maxrl,
    "reinforce++_baseline": whitened_group_mean, "best_k": best_k,
}  # fmt: skip
# These do not: the group filter leaves them alone, and a group of one will do.
BATCH_ADVANTAGES = {"reinforce": raw_rewards, "batch_zscore": batch_zscore, "gae": gae}
ADVANTAGES = GROUP_ADVANTAGES | BATCH_ADVANTAGES

# Policy losses: of each token, from its log-probability; gradients flow through `logprobs` alone


@formula("max(-ratio A, -clip(ratio, {low}, {high}) A){dual_clip}")
def ppo(logprobs: Float[Array, "B T"], batch: Batch, config) -> Float[Array, "B T"]:
    """Loss of PPO and GRPO. Source: arXiv 1707.06347, eq. 7; dual clip: arXiv 1912.09729, eq. 5."""
    ratio, A = jnp.exp(logprobs - batch.old_logprobs), batch.advantages
    losses = jnp.maximum(-ratio * A, -jnp.clip(ratio, *config.clip_range) * A)
    return jnp.where((A < 0) & (config.dual_clip > 0), jnp.minimum(losses, -config.dual_clip * A), losses)


@formula("-clip(ratio, {low}, {high}) A")
def ppo_all_clip(logprobs: Float[Array, "B T"], batch: Batch, config) -> Float[Array, "B T"]:
    """Loss without a gradient outside the clip range, whatever the sign of A. Source: kvfrans/lmpo."""
    return -jnp.clip(jnp.exp(logprobs - batch.old_logprobs), *config.clip_range) * batch.advantages


@formula("-A log p")
def reinforce(logprobs: Float[Array, "B T"], batch: Batch, config) -> Float[Array, "B T"]:
    """Loss of REINFORCE. Source: Williams 1992."""
    return -batch.advantages * logprobs


@formula("-stopgrad(clip(ratio, {low}, {high})) A log p")
def cispo(logprobs: Float[Array, "B T"], batch: Batch, config) -> Float[Array, "B T"]:
    """Loss of CISPO: every token keeps a gradient. Source: arXiv 2506.13585."""
    ratio = jnp.exp(logprobs - batch.old_logprobs)
    return -stop_gradient(jnp.clip(ratio, *config.clip_range)) * batch.advantages * logprobs


@formula("max(-s A, -clip(s, {low}, {high}) A), s = the geometric mean of a completion's ratios")
def gspo(logprobs: Float[Array, "B T"], batch: Batch, config) -> Float[Array, "B T"]:
    """Loss of GSPO, in its token form. Source: arXiv 2507.18071, section 4.3."""
    mean = row_mean(logprobs - batch.old_logprobs, batch.mask)
    s = jnp.exp(stop_gradient(mean) + logprobs - stop_gradient(logprobs))
    return jnp.maximum(-s * batch.advantages, -jnp.clip(s, *config.clip_range) * batch.advantages)


@formula("-ratio A with ratio = p / p_sample, 0 where p - p_sample along A is beyond {fall} or +{rise}")
def dppo(logprobs: Float[Array, "B T"], batch: Batch, config) -> Float[Array, "B T"]:
    """Loss of DPPO with binary total variation. Source: arXiv 2602.04879."""
    low, high = config.clip_range
    moved = stop_gradient(jnp.exp(logprobs)) - jnp.exp(batch.sample_logprobs)
    inside = jnp.where(batch.advantages > 0, moved <= high - 1, moved >= low - 1)
    return jnp.where(inside, -jnp.exp(logprobs - batch.sample_logprobs) * batch.advantages, 0.0)


@formula("-(4 / tau) sigmoid(tau (ratio - 1)) A, tau = {config.sapo_tau:g}, {config.sapo_tau_negative:g} where A < 0")
def sapo(logprobs: Float[Array, "B T"], batch: Batch, config) -> Float[Array, "B T"]:
    """Loss of SAPO: a soft gate in the place of the clip. Source: arXiv 2511.20347."""
    tau = jnp.where(batch.advantages > 0, config.sapo_tau, config.sapo_tau_negative)
    return -4 / tau * jax.nn.sigmoid(tau * (jnp.exp(logprobs - batch.old_logprobs) - 1)) * batch.advantages


OBJECTIVES = {
    "ppo": ppo, "ppo_all_clip": ppo_all_clip, "reinforce": reinforce, "cispo": cispo, "gspo": gspo, "dppo": dppo,
    "sapo": sapo,
}  # fmt: skip
KL = {  # estimators from x = log p - log p_ref. Source: joschu.net/blog/kl-approx.html
    "k1": lambda x: x,
    "k2": lambda x: x**2 / 2,
    "k3": lambda x: jnp.exp(-x) + x - 1,
}


@dataclass(frozen=True)
class ObjectiveConfig:
    """Objective."""

    advantage: str = option("group_zscore", "estimator", list(ADVANTAGES))
    objective: str = option("ppo", "policy loss", list(OBJECTIVES))
    loss_normalization: str = option("token_mean", "aggregation", ["token_mean", "sequence_mean", "constant"])
    clip_epsilon: float = option(0.2, "the ratio is clipped below 1 - this; dppo: the most that p may fall")
    clip_epsilon_high: float = option(-1.0, "and above 1 + this (dppo: rise); -1: as --clip_epsilon")
    dual_clip: float = option(0.0, "ppo: the loss of a negative advantage is at most this times -A; 0: off")
    sapo_tau: float = option(1.0, "sapo: steepness of the gate")
    sapo_tau_negative: float = option(1.05, "sapo: and for negative advantages")
    best_k: int = option(2, "advantage best_k: completions of a group to learn from")
    gamma: float = option(1.0, "advantage gae: discount of a token")
    gae_lambda: float = option(0.95, "advantage gae: 0 trusts the critic, 1 the return")
    value_clip: float = option(
        0.2, "advantage gae: the most that a value moves in a step, in units of the reward: about a fifth of the "
        "spread of returns; 0: no limit"
    )  # fmt: skip
    kl_coef: float = option(0.0, "weight of the KL to the initial model, which is loaded when this is above 0")
    kl_estimator: str = option("", "of that KL; empty: k3 in the loss, k1 in the reward", ["", *KL])
    kl_in: str = option("loss", "where the KL counts", ["loss", "reward"])
    entropy_coef: float = option(0.001, "weight of the entropy bonus (mean nats per token)")
    importance_correction: str = option(
        "none", "for a sampler that differs from the trainer, by w = old / sampled probability: min(w, cap), or w and "
        "0 outside [floor, cap]", ["none", "truncate", "mask"]
    )  # fmt: skip
    importance_level: str = option("token", "w of a token, or product over the completion", ["token", "sequence"])
    importance_cap: float = option(2.0, "largest w: see --importance_correction")
    importance_floor: float = option(0.0, "smallest w of --importance_correction mask; IcePop: 0.5 with a cap of 5")
    off_policy_mask: float = option(
        0.0, "leave completions with a negative advantage out of the policy loss whose mean log(sampled / new "
        "probability) is above this; 0: off"
    )  # fmt: skip
    do_group_filter: bool = option(
        True, "drop groups whose rewards are all equal; 0 keeps them with advantage 0 (best_k: learns from their first "
        "k, whether right or wrong)"
    )  # fmt: skip
    do_truncation_filter: bool = option(False, "drop completions that the limit has cut off")
    do_global_normalization: bool = option(False, "then normalise advantages over the batch")
    do_clip_advantages: bool = option(False, "then learn from positive advantages only")
    negative_advantage_multiplier: float = option(1.0, "then weigh negative advantages by this")
    do_mask_importance_ratio: bool = option(
        False, "leave tokens with a new/old probability of 2 or more out of the policy loss"
    )
    do_mask_inference_ratio: bool = option(
        False, "leave tokens with a sampled/old probability of 2 or more out of the policy loss"
    )

    def __post_init__(self):
        for wrong, message in (
            (self.clip_epsilon < 0 or self.clip_epsilon_high < 0 and self.clip_epsilon_high != -1,
             "--clip_epsilon and --clip_epsilon_high must not be negative"),
            (self.dual_clip and self.dual_clip <= 1, "--dual_clip must be above 1, or 0 for none"),
            (min(self.sapo_tau, self.sapo_tau_negative, self.importance_cap) <= 0,
             "--sapo_tau, --sapo_tau_negative and --importance_cap must be positive"),
            (not 0 <= self.importance_floor <= self.importance_cap,
             "--importance_floor goes from 0 to --importance_cap"),
            (self.importance_floor and self.importance_correction != "mask",
             "--importance_floor has no effect without --importance_correction mask"),
            (self.off_policy_mask < 0, "--off_policy_mask must not be negative; 0 switches it off"),
            (not (0 <= self.gamma <= 1 and 0 <= self.gae_lambda <= 1), "--gamma and --gae_lambda go from 0 to 1"),
            (min(self.value_clip, self.kl_coef) < 0, "--value_clip and --kl_coef must not be negative"),
            (self.best_k < 1, "--best_k must be at least 1"),
            (self.kl_in == "loss" and self.kl_estimator == "k1",
             "--kl_estimator k1 in the loss has an expected gradient of zero: choose k2 or k3, or --kl_in reward"),
            (self.kl_in == "reward" and self.kl_estimator not in ("", "k1"),
             f"--kl_in reward takes log p - log p_ref off: --kl_estimator {self.kl_estimator} has no effect there"),
            (self.objective == "dppo" and self.importance_correction != "none",
             "--objective dppo corrects for the sampler itself: leave --importance_correction out"),
            (self.advantage in ("gae", "best_k") and self.do_global_normalization,
             f"--do_global_normalization has no use for --advantage {self.advantage}: gae is whitened, best_k all 1"),
        ):  # fmt: skip
            if wrong:
                raise UserError(message)

    @property
    def is_group_relative(self) -> bool:
        return self.advantage not in BATCH_ADVANTAGES

    @property
    def has_critic(self) -> bool:
        return self.advantage == "gae"

    @property
    def has_kl_in_reward(self) -> bool:
        return self.kl_coef > 0 and self.kl_in == "reward"

    @property
    def clip_range(self) -> tuple[float, float]:
        high = self.clip_epsilon if self.clip_epsilon_high == -1 else self.clip_epsilon_high
        return 1 - self.clip_epsilon, 1 + high


def has_signal(rewards: Float[Array, "N G"], config: ObjectiveConfig) -> Bool[Array, "N"]:
    """True for groups that can teach: their rewards differ, or the advantage does not compare them.

    Without the filter best_k compares nothing either: it imitates, also where all are as good.
    """
    is_graded = rewards == rewards  # not NaN, of NumPy and of JAX arrays
    highest = rewards.max(axis=1, where=is_graded, initial=-jnp.inf)
    lowest = rewards.min(axis=1, where=is_graded, initial=jnp.inf)
    differ = highest - lowest > NO_SIGNAL
    imitates_all = config.advantage == "best_k" and not config.do_group_filter
    return differ | imitates_all | (not config.is_group_relative)


@partial(jax.jit, static_argnames="config")  # else each of its operations would compile for each width
def advantages(batch: Batch, config: ObjectiveConfig) -> tuple[Float[Array, "B T"], Bool[Array, "B"]]:
    """Returns the advantage of each token, and which rows stay in the batch.

    A rollout whose reward is NaN, since its grader failed, leaves its group before the baseline is formed; where an
    advantage function does not provide for that (nanmean), its whole group leaves.
    """
    rewards = jnp.asarray(batch.rewards, jnp.float32) - kl_penalty(batch, config).sum(axis=1)
    rewards = rewards.reshape(-1, batch.group_size)
    signal = jnp.repeat(has_signal(rewards, config), batch.group_size)
    is_graded = jnp.isfinite(rewards).ravel()
    keep = signal & is_graded if config.do_group_filter else is_graded
    if config.do_truncation_filter:
        keep &= jnp.asarray(batch.finished)
    batch = batch.replace(mask=batch.mask & keep[:, None])
    advantage = ADVANTAGES[config.advantage](rewards, batch, config).reshape(len(keep), -1)  # [B, 1] or [B, T]
    keep &= jnp.isfinite(advantage).all(axis=1)
    if config.advantage == "best_k":
        keep &= advantage[:, 0] > 0
    advantage = jnp.where(signal[:, None], advantage, 0.0)
    if config.do_global_normalization:
        is_per_token = advantage.shape[1] > 1
        advantage = standardize(advantage, batch.mask if is_per_token else keep[:, None])
    if config.do_clip_advantages:
        advantage = jnp.maximum(advantage, 0.0)
    advantage = jnp.where(advantage < 0, config.negative_advantage_multiplier * advantage, advantage)
    return jnp.where(batch.mask & (signal & keep)[:, None], advantage, 0.0), keep


def standardize(x: Float[Array, "R C"], where: Bool[Array, "R D"]) -> Float[Array, "R _"]:
    """(x - mean) / std, both over `where`; 0 where all of that is equal."""
    x, where = jnp.broadcast_arrays(x, where)
    spread = x.max(where=where, initial=-jnp.inf) - x.min(where=where, initial=jnp.inf)
    scaled = (x - x.mean(where=where)) / jnp.maximum(x.std(where=where), NO_SIGNAL / 2)
    return jnp.where(spread > NO_SIGNAL, scaled, 0.0)


def row_mean(x: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> Float[Array, "B 1"]:
    """Mean over the masked tokens of each row, 0 where there are none."""
    num_tokens = mask.sum(axis=1, keepdims=True)
    return x.sum(axis=1, keepdims=True, where=mask) / jnp.maximum(num_tokens, 1)


def kl_penalty(batch: Batch, config: ObjectiveConfig) -> Float[Array, "B T"]:
    """What is taken off each token's reward under --kl_in reward."""
    if not config.has_kl_in_reward:
        return jnp.zeros(batch.mask.shape)
    return config.kl_coef * jnp.where(batch.mask, batch.old_logprobs - batch.ref_logprobs, 0.0)


@partial(jax.jit, static_argnames="config")
def generalised_advantages(batch: Batch, config: ObjectiveConfig) -> Float[Array, "B T"]:
    """Sums of temporal differences, discounted by gamma lambda a token; the reward comes with the last chosen token.

    Tokens that the policy did not choose are passed over. Source: arXiv 1506.02438, eq. 16.
    """
    mask = jnp.asarray(batch.mask)
    is_last = mask & (jnp.cumsum(mask[:, ::-1], axis=1)[:, ::-1] == 1)
    rewards = jnp.where(is_last, jnp.asarray(batch.rewards, jnp.float32)[:, None], 0.0) - kl_penalty(batch, config)

    def step(after, column):
        next_value, next_advantage = after
        chosen, value, reward = column
        advantage = reward + config.gamma * (next_value + config.gae_lambda * next_advantage) - value
        return (jnp.where(chosen, value, next_value), jnp.where(chosen, advantage, next_advantage)), advantage

    columns = mask.T, jnp.asarray(batch.values).T, rewards.T
    _, result = jax.lax.scan(step, tuple(jnp.zeros((2, len(mask)))), columns, reverse=True)
    return jnp.where(mask, result.T, 0.0)


def normalize(batch: Batch, num_rollouts: int, num_generation_tokens: int, config: ObjectiveConfig) -> Batch:
    """Sets what the sum over each row is divided by, from the whole optimiser batch: micro-batches change nothing.

    `constant`, Dr. GRPO's, is `num_rollouts`, those of a full optimiser batch, times the completion limit: a row that
    has left the batch changes the gradient no more than one with advantage 0. Source: arXiv 2503.20783, section 3.2.
    """
    row_tokens = np.asarray(batch.mask).sum(axis=1).astype(np.float32)
    num_rows, num_tokens = len(row_tokens), np.full_like(row_tokens, max(row_tokens.sum(), 1.0))
    denominator = {
        "token_mean": num_tokens,
        "sequence_mean": num_rows * np.maximum(row_tokens, 1.0),
        "constant": np.full_like(row_tokens, num_rollouts * num_generation_tokens),
    }[config.loss_normalization]
    return batch.replace(denominator=denominator, num_tokens=num_tokens)


def policy_loss(
    logprobs: Float[Array, "B T"], entropy: Float[Array, "B T"], batch: Batch, config: ObjectiveConfig
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    """The loss of a micro-batch and its metrics: parts of the optimiser batch's, see `total`."""
    mask = batch.mask

    def clean(x):  # what stands in the padding must not overflow in exp
        return jnp.where(mask, x, 0.0)

    logprobs, sampled = clean(logprobs), clean(batch.sample_logprobs)
    old = stop_gradient(logprobs) if batch.old_logprobs is None else clean(batch.old_logprobs)
    batch = batch.replace(old_logprobs=old, sample_logprobs=sampled)
    ratio, sample_ratio = jnp.exp(logprobs - old), jnp.exp(old - sampled)

    def token_losses(logprobs):
        return OBJECTIVES[config.objective](logprobs, batch, config)

    losses, slope = jax.jvp(token_losses, (logprobs,), (jnp.ones_like(logprobs),))
    weights = jnp.where(kept_tokens(logprobs, batch, config), importance_weights(old - sampled, config), 0.0)
    losses *= weights

    def token_mean(x):
        return (clean(x).sum(axis=1) / batch.num_tokens).sum()

    def aggregate(x):
        return (clean(x).sum(axis=1) / batch.denominator).sum()

    metrics = {"policy_loss": aggregate(losses), "entropy": token_mean(entropy)}
    loss = metrics["policy_loss"] - config.entropy_coef * metrics["entropy"]
    if config.kl_coef:
        x, in_loss = logprobs - clean(batch.ref_logprobs), config.kl_in == "loss"
        kl = KL[in_loss and config.kl_estimator or "k3"](x)
        metrics["kl"] = token_mean(kl)
        loss = loss + config.kl_coef * aggregate(kl) if in_loss else loss
    return loss, metrics | {
        "loss": loss,
        "approx_kl": token_mean((ratio - 1) - (logprobs - old)),  # k3 of KL(old || new)
        "clip_fraction": token_mean((slope == 0) & (batch.advantages != 0)),  # tokens without a gradient
        "masked_fraction": token_mean(weights == 0),
        "entropy_loss": -config.entropy_coef * metrics["entropy"],
        "logprob": token_mean(logprobs),
        "importance_ratio": token_mean(ratio),
        "importance_ratio_max": ratio.max(where=mask, initial=0.0),
        "importance_ratio_min": ratio.min(where=mask, initial=jnp.inf),
        "importance_ratio_histogram": histogram(logprobs - old, mask) / batch.num_tokens[0],
        "inference_recompute/logprob_diff": token_mean(jnp.abs(old - sampled)),
        "inference_recompute/logprob_diff_max": jnp.abs(old - sampled).max(),
        "inference_recompute/kl": token_mean((sample_ratio - 1) - (old - sampled)),  # k3 of KL(sampled || old)
        "inference_recompute/ratio": token_mean(sample_ratio),
        "inference_recompute/ratio_squared": token_mean(sample_ratio**2),
    }


def histogram(log_ratio: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> Float[Array, "R"]:
    """Numbers of tokens by their log ratio, nearest of LOG_RATIOS: unlike a quantile they can be added up."""
    step = LOG_RATIOS[1] - LOG_RATIOS[0]
    bins = jnp.clip(jnp.round((log_ratio - LOG_RATIOS[0]) / step), 0, len(LOG_RATIOS) - 1).astype(jnp.int32)
    return jnp.zeros(len(LOG_RATIOS)).at[bins].add(mask.astype(jnp.float32))


def kept_tokens(logprobs: Float[Array, "B T"], batch: Batch, config: ObjectiveConfig) -> Bool[Array, "B T"]:
    """True for tokens that no mask leaves out of the policy loss.

    Source: kvfrans/lmpo for the ratios of a token; DeepSeek-V3.2, arXiv 2512.02556, section 3.1, for --off_policy_mask.
    """
    old, sampled, keep = batch.old_logprobs, batch.sample_logprobs, jnp.asarray(batch.mask)
    if config.do_mask_importance_ratio:
        keep &= jnp.exp(logprobs - old) < 2
    if config.do_mask_inference_ratio:
        keep &= jnp.exp(sampled - old) < 2
    if config.off_policy_mask:
        is_near = row_mean(sampled - logprobs, batch.mask) <= config.off_policy_mask
        keep &= is_near | (batch.advantages >= 0)
    return keep


def importance_weights(log_ratio: Float[Array, "B T"], config: ObjectiveConfig) -> Float[Array, "B #T"]:
    """Weights that make up for sampling with other probabilities than old ones.

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


def value_loss(values: Float[Array, "B T"], batch: Batch, config: ObjectiveConfig) -> Float[Array, ""]:
    """0.5 max((V - R)^2, (V_old + clip(V - V_old) - R)^2), mean over tokens. Source: PPO2 of OpenAI's baselines."""
    errors = (values - batch.returns) ** 2
    if config.value_clip:
        moved = jnp.clip(values - batch.values, -config.value_clip, config.value_clip)
        errors = jnp.maximum(errors, (batch.values + moved - batch.returns) ** 2)
    return (jnp.where(batch.mask, 0.5 * errors, 0.0).sum(axis=1) / batch.num_tokens).sum()


def total(parts: list[dict[str, Array]]) -> dict[str, float]:
    """Returns the metrics of an optimiser batch from those of its micro-batches: sums, and extremes of _max, _min."""
    reduce = {"max": np.nanmax, "min": np.nanmin}
    metrics = {}
    for name in parts[0]:
        values = [part[name] for part in parts]
        metrics[name] = reduce.get(name.rpartition("_")[2], np.sum)(values, axis=0)
    shares = metrics.pop("importance_ratio_histogram")
    place = np.searchsorted(np.cumsum(shares), 0.99 * shares.sum())
    metrics = {name: float(x) for name, x in metrics.items()}
    metrics["importance_ratio_q99"] = float(np.exp(LOG_RATIOS[min(place, len(LOG_RATIOS) - 1)]))
    squared = metrics.pop("inference_recompute/ratio_squared")
    share = metrics["inference_recompute/ratio"] ** 2 / max(squared, 1e-30)
    return metrics | {"inference_recompute/effective_sample_share": share}


def describe(config: ObjectiveConfig) -> str:
    """The resolved objective in one line."""
    text = f"minimise {config.loss_normalization} of {formula_of(OBJECTIVES[config.objective], config)}"
    if config.objective == "gspo" and config.loss_normalization != "sequence_mean":
        text += " (GSPO is that of sequence_mean only)"
    if config.importance_correction == "truncate":
        text += f", x min(w, {config.importance_cap:g}) by {config.importance_level}"
    if config.importance_correction == "mask":
        low, high = config.importance_floor, config.importance_cap
        text += f", x w by {config.importance_level}, 0 outside [{low:g}, {high:g}]"
    if config.off_policy_mask:
        text += f", 0 where A < 0 and mean log(p_sample / p) > {config.off_policy_mask:g}"
    if config.do_mask_importance_ratio:
        text += ", 0 where p / p_old >= 2"
    if config.do_mask_inference_ratio:
        text += ", 0 where p_sample / p_old >= 2"
    if config.kl_coef and config.kl_in == "loss":
        text += f" + {config.kl_coef:g} {config.kl_estimator or 'k3'}(p || p_ref)"
    if config.entropy_coef:
        text += f" - {config.entropy_coef:g} entropy"
    if config.has_kl_in_reward:
        text += f"; r = reward - {config.kl_coef:g} log(p / p_ref)"
    text += f"; A = {formula_of(ADVANTAGES[config.advantage], config)}"
    if config.do_global_normalization:
        text += ", normalised over the batch"
    if config.do_clip_advantages:
        text += ", 0 where negative"
    if config.negative_advantage_multiplier != 1:
        text += f", times {config.negative_advantage_multiplier:g} where negative"
    if config.has_critic and config.value_clip:
        text += f"; values move by at most {config.value_clip:g}"
    return text


def formula_of(function: Callable, config: ObjectiveConfig) -> str:
    """The function's formula with its numbers; its name, where it has none."""
    low, high = config.clip_range
    dual_clip = f", at most -{config.dual_clip:g} A where A < 0" if config.dual_clip else ""
    terms = {"low": f"{low:g}", "high": f"{high:g}", "fall": f"{low - 1:g}", "rise": f"{high - 1:g}"}
    text = getattr(function, "formula", function.__name__)
    return text.format(config=config, dual_clip=dual_clip, **terms)
