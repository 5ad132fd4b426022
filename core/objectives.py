"""What is maximised: advantages, policy losses, aggregation. Pure functions; fork this file to hack the loss.

A new objective is a function of about ten lines and its name in a table: `ADVANTAGES` (from the rewards of groups),
`OBJECTIVES` (loss of each token) or `normalize` (aggregation). Everything is float32.

Letters: N prompts, G rollouts of a prompt, B = N G rows, T row length.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Bool, Float, Int

from utils.batching import Array
from utils.config import option

NO_SIGNAL = 1e-6  # rewards of a group closer than this are equal: rounding alone gives them a deviation above zero


@struct.dataclass
class Batch:
    """Rollouts to learn from; every [B, T] array speaks of the token in its own column."""

    tokens: Int[Array, "B T"]
    mask: Bool[Array, "B T"]  # tokens that the policy chose
    sample_logprobs: Float[Array, "B T"]  # under the distribution that was sampled
    rewards: Float[Array, "B"]
    lengths: Int[Array, "B"]  # prompt + completion
    prompt_lengths: Int[Array, "B"]
    advantages: Float[Array, "B T"] | None = None
    old_logprobs: Float[Array, "B T"] | None = None  # None: this update is the rollout's first, so old = new
    denominator: Float[Array, "B"] | None = None  # of the loss summed over a row: see `normalize`
    num_tokens: Float[Array, "B"] | None = None  # masked tokens of the whole optimiser batch
    group_size: int = struct.field(pytree_node=False, default=1)


@dataclass(frozen=True)
class ObjectiveConfig:
    """Objective."""

    advantage: str = option("group_zscore", "estimator", ["group_zscore", "group_mean", "reinforce"])
    objective: str = option("ppo", "policy loss", ["ppo", "ppo_all_clip", "reinforce"])
    loss_normalization: str = option("token_mean", "aggregation", ["token_mean", "sequence_mean", "constant"])
    clip_epsilon: float = option(0.2, "the ratio is clipped below 1 - this")
    clip_epsilon_high: float = option(-1.0, "and above 1 + this; -1: as --clip_epsilon")
    entropy_coef: float = option(0.001, "weight of the entropy bonus (mean nats per token)")
    do_group_filter: bool = option(True, "drop groups whose rewards are all equal")
    do_global_normalization: bool = option(False, "then normalise advantages over the batch")
    do_clip_advantages: bool = option(False, "then learn from positive advantages only")
    negative_advantage_multiplier: float = option(1.0, "then weigh negative advantages by this")
    do_mask_importance_ratio: bool = option(False, "leave tokens with new/old probability above 2 out of the loss")
    do_mask_inference_ratio: bool = option(False, "leave tokens with old/sampled probability above 2 out of the loss")

    def __post_init__(self):
        if self.clip_epsilon < 0 or (self.clip_epsilon_high < 0 and self.clip_epsilon_high != -1):
            raise ValueError("--clip_epsilon and --clip_epsilon_high must not be negative")

    @property
    def is_group_relative(self) -> bool:
        return self.advantage.startswith("group_")

    @property
    def clip_range(self) -> tuple[float, float]:
        high = self.clip_epsilon if self.clip_epsilon_high == -1 else self.clip_epsilon_high
        return 1 - self.clip_epsilon, 1 + high


def group_zscore(rewards: Float[Array, "N G"]) -> Float[Array, "N G"]:
    """(r - mean) / std of the group. Source: GRPO, arXiv 2402.03300, section 4.1.2."""
    deviation = rewards.std(axis=1, keepdims=True)
    return group_mean(rewards) / jnp.where(deviation > 0, deviation, 1.0)


def group_mean(rewards: Float[Array, "N G"]) -> Float[Array, "N G"]:
    """r - mean of the group. Source: Dr. GRPO, arXiv 2503.20783, section 3.2."""
    return rewards - rewards.mean(axis=1, keepdims=True)


def reinforce_advantage(rewards: Float[Array, "N G"]) -> Float[Array, "N G"]:
    """The reward itself."""
    return rewards


ADVANTAGES = {"group_zscore": group_zscore, "group_mean": group_mean, "reinforce": reinforce_advantage}


def advantages(batch: Batch, config: ObjectiveConfig) -> tuple[Float[Array, "B T"], Bool[Array, "B"]]:
    """The advantage of each token, and which rows stay in the batch: the group filter drops groups without signal."""
    rewards = jnp.asarray(batch.rewards, jnp.float32).reshape(-1, batch.group_size)
    has_signal = rewards.max(axis=1) - rewards.min(axis=1) > NO_SIGNAL if config.is_group_relative else True
    has_signal = jnp.repeat(jnp.broadcast_to(has_signal, len(rewards)), batch.group_size)
    keep = has_signal if config.do_group_filter else jnp.ones_like(has_signal)
    advantage = jnp.where(has_signal, ADVANTAGES[config.advantage](rewards).reshape(-1), 0.0)
    if config.do_global_normalization:
        mean, deviation = jnp.mean(advantage, where=keep), jnp.std(advantage, where=keep)
        advantage = (advantage - mean) / jnp.where(deviation > 0, deviation, 1.0)
    if config.do_clip_advantages:
        advantage = jnp.maximum(advantage, 0.0)
    advantage = jnp.where(advantage < 0, config.negative_advantage_multiplier * advantage, advantage)
    advantage = jnp.where(has_signal, advantage, 0.0)  # which the mean over the batch has moved
    return jnp.where(batch.mask, advantage[:, None], 0.0), keep


def ppo(logprobs: Float[Array, "B T"], batch: Batch, config: ObjectiveConfig) -> Float[Array, "B T"]:
    """max(-ratio A, -clip(ratio) A). Source: arXiv 1707.06347, eq. 7."""
    ratio = jnp.exp(logprobs - batch.old_logprobs)
    return jnp.maximum(-ratio * batch.advantages, -jnp.clip(ratio, *config.clip_range) * batch.advantages)


def ppo_all_clip(logprobs: Float[Array, "B T"], batch: Batch, config: ObjectiveConfig) -> Float[Array, "B T"]:
    """-clip(ratio) A: no gradient outside the clip range, whatever the sign of A. Source: kvfrans/lmpo."""
    return -jnp.clip(jnp.exp(logprobs - batch.old_logprobs), *config.clip_range) * batch.advantages


def reinforce(logprobs: Float[Array, "B T"], batch: Batch, config: ObjectiveConfig) -> Float[Array, "B T"]:
    """-A log p."""
    return -batch.advantages * logprobs


OBJECTIVES = {"ppo": ppo, "ppo_all_clip": ppo_all_clip, "reinforce": reinforce}


def normalize(batch: Batch, num_generation_tokens: int, config: ObjectiveConfig) -> Batch:
    """Sets what the sum over each row is divided by, from the whole optimiser batch: micro-batches change nothing.

    `constant` is Dr. GRPO's: rows times the completion limit. Source: arXiv 2503.20783, section 3.2.
    """
    row_tokens = jnp.asarray(batch.mask).sum(axis=1).astype(jnp.float32)
    num_rows, num_tokens = len(row_tokens), jnp.full_like(row_tokens, jnp.maximum(row_tokens.sum(), 1.0))
    denominator = {
        "token_mean": num_tokens,
        "sequence_mean": num_rows * jnp.maximum(row_tokens, 1.0),
        "constant": jnp.full_like(row_tokens, num_rows * num_generation_tokens),
    }[config.loss_normalization]
    return batch.replace(denominator=denominator, num_tokens=num_tokens)


def policy_loss(
    logprobs: Float[Array, "B T"], entropy: Float[Array, "B T"], batch: Batch, config: ObjectiveConfig
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    """The loss of a micro-batch and its metrics: parts of sums over the optimiser batch, to be added up."""
    mask = batch.mask
    logprobs = jnp.where(mask, logprobs, 0.0)  # padding must not overflow in exp
    old = jax.lax.stop_gradient(logprobs) if batch.old_logprobs is None else jnp.where(mask, batch.old_logprobs, 0.0)
    batch = batch.replace(old_logprobs=old)
    ratio, sample_ratio = jnp.exp(logprobs - old), jnp.exp(old - jnp.where(mask, batch.sample_logprobs, 0.0))
    losses = OBJECTIVES[config.objective](logprobs, batch, config)
    if config.do_mask_importance_ratio:
        losses = jnp.where(ratio > 2, 0.0, losses)
    if config.do_mask_inference_ratio:
        losses = jnp.where(sample_ratio > 2, 0.0, losses)

    def token_mean(x):
        return (jnp.where(mask, x, 0.0).sum(axis=1) / batch.num_tokens).sum()

    policy = (jnp.where(mask, losses, 0.0).sum(axis=1) / batch.denominator).sum()
    loss = policy - config.entropy_coef * token_mean(entropy)
    low, high = config.clip_range
    clipped = jnp.where(batch.advantages > 0, ratio > high, ratio < low) & (batch.advantages != 0)
    return loss, {
        "loss": loss,
        "policy_loss": policy,
        "entropy": token_mean(entropy),
        "approx_kl": token_mean((ratio - 1) - (logprobs - old)),  # k3 of KL(old || new)
        "clip_fraction": token_mean(clipped),
        "importance_ratio": token_mean(ratio),
        "inference_recompute/logprob_diff": token_mean(jnp.abs(old - batch.sample_logprobs)),
        "inference_recompute/ratio": token_mean(sample_ratio),
    }


def describe(config: ObjectiveConfig) -> str:
    """The resolved objective in one line."""
    low, high = config.clip_range
    advantage = {"group_zscore": "(r - mean)/std", "group_mean": "r - mean", "reinforce": "r"}[config.advantage]
    clip = f"clip(ratio, {low:g}, {high:g}) A"
    loss = {"ppo": f"max(-ratio A, -{clip})", "ppo_all_clip": f"-{clip}", "reinforce": "-A log p"}[config.objective]
    bonus = f" - {config.entropy_coef:g} entropy" if config.entropy_coef else ""
    return f"minimise {config.loss_normalization} of {loss}{bonus}, A = {advantage}"
