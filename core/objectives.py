"""Advantages, policy losses, KL, aggregation: pure functions. Fork this file to hack the loss.

To change the loss: write a function beside `ppo` and add its name to OBJECTIVES.
To change the advantage: write a function beside `rloo` and add its name to GROUP_ADVANTAGES or BATCH_ADVANTAGES.
To change the aggregation: `set_loss_denominators`. To add a metric of a loss: a line in `policy_loss`, a sum.

Advantages are NumPy on the host, losses are JAX inside of jit; everything is float32. Another value of a
setting compiles the update anew, but of those that TracedLossConfig lists: a controller may change these at each step.
N prompts, G rollouts of each, B = N G rows, T row length, S ids of a truncated distribution, R bins of log ratios.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import stop_gradient
from jaxtyping import Bool, Float, Int

from core.records import NO_SIGNAL, Batch, turn_numbers
from models.distribution import TokenScores
from models.names import Array
from utils.batching import select_rows
from utils.settings.config import option
from utils.settings.errors import UserError

LOG_RATIOS = np.linspace(-1.0, 1.0, 201)  # centres of the histogram of log ratios, from which a quantile is read
Function = TypeVar("Function", bound=Callable)
Coefficient = object  # a number, or the tracer or placeholder that JAX puts in its place
TokenLosses = tuple[Float[Array, "B T"], Bool[Array, "B T"]]  # losses, and True where a clip leaves no gradient


def formula(text: str) -> Callable[[Function], Function]:
    """Attaches the formula that a run prints; fields: {low}, {high}, {fall}, {rise}, {dual_clip}, {config.<option>}."""

    def attach(function: Function) -> Function:
        function.formula = text
        return function

    return attach


# Advantages: from the rewards [N, G] (NaN: the grader failed), one for each row [N, G] or each token [B, T]. All take
# the same arguments; `batch.mask` is False in rows that the filters drop.


@formula("(r - mean) / std of the group")
def group_zscore(rewards: Float[np.ndarray, "N G"], batch: Batch, config: "ObjectiveConfig") -> np.ndarray:
    """Advantage of GRPO, with the population's deviation (ddof 0). Source: arXiv 2402.03300, section 4.1.2."""
    centred = group_mean(rewards, batch, config)
    deviation = np.sqrt(graded_mean(centred**2))
    return centred / np.where(deviation > 0, deviation, 1)


@formula("r - mean of the group")
def group_mean(rewards: Float[np.ndarray, "N G"], batch: Batch, config: "ObjectiveConfig") -> np.ndarray:
    """Advantage of Dr. GRPO. Source: arXiv 2503.20783, section 3.2."""
    return rewards - graded_mean(rewards)


@formula("r - mean of the others in the group")
def rloo(rewards: Float[np.ndarray, "N G"], batch: Batch, config: "ObjectiveConfig") -> np.ndarray:
    """Advantage of REINFORCE leave-one-out. Source: arXiv 2402.14740."""
    G = np.isfinite(rewards).sum(axis=1, keepdims=True)
    scale = np.float32(G / np.maximum(G - 1, 1))
    return scale * group_mean(rewards, batch, config)


@formula("(r - mean) / mean of the group, 0 where the mean is not positive")
def maxrl(rewards: Float[np.ndarray, "N G"], batch: Batch, config: "ObjectiveConfig") -> np.ndarray:
    """Advantage of MaxRL. Source: arXiv 2602.02710."""
    mean = graded_mean(rewards)
    is_positive = mean > 0
    scaled = (rewards - mean) / np.where(is_positive, mean, 1)
    return np.where(is_positive, scaled, 0)


@formula("r - mean of the group, whitened over the tokens of the batch")
def whitened_group_mean(rewards: Float[np.ndarray, "N G"], batch: Batch, config: "ObjectiveConfig") -> np.ndarray:
    """Advantage of REINFORCE++ with a group baseline. Source: arXiv 2501.03262."""
    centred = group_mean(rewards, batch, config)
    return masked_whiten(centred.reshape(-1, 1), batch.mask)


@formula("1 for the {config.best_k} best of the group, the others are dropped")
def best_k(rewards: Float[np.ndarray, "N G"], batch: Batch, config: "ObjectiveConfig") -> np.ndarray:
    """Advantage of self-imitation; ties go to the first. Source: RAFT, arXiv 2304.06767; easy-GRPO's sil."""
    order = np.argsort(-rewards, axis=1, kind="stable")
    rank = np.argsort(order, axis=1)
    return np.float32(rank < config.best_k)


@formula("r")
def raw_rewards(rewards: Float[np.ndarray, "N G"], batch: Batch, config: "ObjectiveConfig") -> np.ndarray:
    """Advantage of REINFORCE. Source: Williams 1992."""
    return rewards


@formula("(r - mean) / std of the batch")
def batch_zscore(rewards: Float[np.ndarray, "N G"], batch: Batch, config: "ObjectiveConfig") -> np.ndarray:
    """Advantage of REINFORCE++: over completions, or with the KL in the reward over tokens.

    A token pays for the KL from itself on: r - kl_coef sum over s >= t of KL_s. Source: arXiv 2501.03262, eq. 8-10.
    """
    if not config.has_kl_in_reward:
        return masked_whiten(rewards, np.isfinite(rewards))
    penalty = kl_penalty(batch, config)
    penalty_to_go = np.cumsum(penalty[:, ::-1], axis=1)[:, ::-1]
    return masked_whiten(batch.rewards[:, None] - penalty_to_go, batch.mask)


@formula("generalised, gamma {config.gamma:g}, lambda {config.gae_lambda:g}, whitened over the batch")
def gae(rewards: Float[np.ndarray, "N G"], batch: Batch, config: "ObjectiveConfig") -> np.ndarray:
    """Advantage of PPO, from the critic's values. Source: arXiv 1506.02438."""
    return masked_whiten(generalised_advantages(batch, config), batch.mask)


# These compare the rollouts of a group: one whose rewards are equal has no signal, and the group filter drops it.
GROUP_ADVANTAGES = {
    "group_zscore": group_zscore,
    "group_mean": group_mean,
    "rloo": rloo,
    "maxrl": maxrl,
    "reinforce++_baseline": whitened_group_mean,
    "best_k": best_k,
}
# These do not: the group filter drops rewards of 0 of reinforce and nothing else, and a group of one will do.
BATCH_ADVANTAGES = {"reinforce": raw_rewards, "batch_zscore": batch_zscore, "gae": gae}
ADVANTAGES = GROUP_ADVANTAGES | BATCH_ADVANTAGES
WHOLE_EPISODES = ("gae", "best_k", "reinforce++_baseline")  # these do not value a turn by itself

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


@formula("-(4 / tau) sigmoid(tau (ratio - 1)) A, tau = {config.sapo_tau:g}, {config.sapo_tau_negative:g} where A < 0")
def sapo(logprobs: Float[Array, "B T"], batch: Batch, config: "LossConfig") -> TokenLosses:
    """Loss of SAPO: a soft gate in the place of the clip. Source: arXiv 2511.20347."""
    tau = jnp.where(batch.advantages > 0, config.sapo_tau, config.sapo_tau_negative)
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
    sapo_tau: float = option(1.0, "Steepness of the gate of --objective sapo for positive advantages")
    sapo_tau_negative: float = option(1.05, "Steepness of the gate of --objective sapo for negative advantages")
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


@dataclass(frozen=True)
class TracedLossConfig(LossConfig):
    """Loss inside of jit: the coefficients below are traced numbers, None where they are 0; all else is static."""

    clip_epsilon: Coefficient = 0.2
    clip_epsilon_high: Coefficient = 0.2
    clip_range: tuple[Coefficient, Coefficient] = (0.8, 1.2)  # rounded once, from float64
    kl_coef: Coefficient | None = None
    entropy_coef: Coefficient | None = None


COEFFICIENTS = ["clip_epsilon", "clip_epsilon_high", "clip_range", "kl_coef", "entropy_coef"]
STATIC = [field.name for field in fields(LossConfig) if field.name not in COEFFICIENTS]
jax.tree_util.register_dataclass(TracedLossConfig, COEFFICIENTS, STATIC)


@dataclass(frozen=True)
class ObjectiveConfig(LossConfig):
    """Objective."""

    advantage: str = option("group_zscore", "Advantage estimator; gae trains a critic", list(ADVANTAGES))
    loss_normalization: str = option(
        "token_mean",
        "Aggregation of token losses; token_mean: over all tokens, sequence_mean: over tokens of a completion, then"
        " over completions, constant: sum over (completions x --num_generation_tokens), as Dr. GRPO",
        ["token_mean", "sequence_mean", "constant"],
    )
    best_k: int = option(2, "Number of best completions of each group that --advantage best_k trains on")
    credit: str = option(
        "trajectory",
        "Rewards by which turns of an episode are compared; trajectory: those of the whole episode, turn: those from "
        "this turn on, with the turns of the group that have the same number",
        ["trajectory", "turn"],
    )
    turn_gamma: float = option(1.0, "Discount factor per turn of --credit turn; 1: none")
    gamma: float = option(1.0, "Discount factor per token of --advantage gae; 1: none")
    gae_lambda: float = option(0.95, "Lambda of --advantage gae: 0 relies on the critic, 1 on the return")
    do_group_filter: bool = option(
        True,
        "Filter of groups whose rewards are all equal (--advantage reinforce: all 0; --credit turn: in each turn); 0: "
        "they stay with advantage 0 (--advantage best_k trains on their first k completions, right or wrong)",
    )
    do_truncation_filter: bool = option(False, "Filter of completions that were cut off at --num_generation_tokens")
    do_global_normalization: bool = option(
        False, "Normalisation of advantages over the batch to mean 0 and standard deviation 1, after --advantage"
    )
    do_clip_advantages: bool = option(False, "Replacement of negative advantages by 0, after --do_global_normalization")
    negative_advantage_multiplier: float = option(1.0, "Factor of negative advantages, applied last; 1: none")

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
            (not 0 <= self.turn_gamma <= 1, "--turn_gamma goes from 0 to 1"),
            (self.credit == "turn" and (self.has_kl_in_reward or self.advantage in WHOLE_EPISODES),
             "--credit turn has no use for --advantage gae, best_k or reinforce++_baseline, nor for --kl_in reward"),
            (self.best_k < 1, "--best_k must be at least 1"),
            (self.kl_in == "loss" and self.kl_estimator == "k1",
             "--kl_estimator k1 in the loss has an expected gradient of zero: choose k2 or k3, or --kl_in reward"),
            (self.kl_in == "reward" and self.kl_estimator not in ("", "k1"),
             f"--kl_in reward subtracts log p - log p_ref: --kl_estimator {self.kl_estimator} has no effect there"),
            (self.objective == "dppo" and self.importance_correction != "none",
             "--objective dppo corrects for the sampler itself: leave --importance_correction out"),
            (self.advantage in ("gae", "best_k") and self.do_global_normalization,
             f"--do_global_normalization has no use for --advantage {self.advantage}: gae is whitened, best_k all 1"),
        ):  # fmt: skip
            if wrong:
                raise UserError(message)

    @property
    def loss(self) -> TracedLossConfig:
        """Returns the settings of the loss alone: members of a population share its programs where these are equal.

        Terms whose coefficients are None are not computed.
        """
        settings = {field.name: getattr(self, field.name) for field in fields(LossConfig)}
        used = {"clip_epsilon_high": self.clip_epsilons[1], "clip_range": self.clip_range}
        used |= {name: settings[name] or None for name in ("kl_coef", "entropy_coef")}
        return TracedLossConfig(**settings | used)

    @property
    def is_group_relative(self) -> bool:
        return self.advantage not in BATCH_ADVANTAGES

    @property
    def has_critic(self) -> bool:
        return self.advantage == "gae"

    @property
    def has_kl_in_reward(self) -> bool:
        return self.kl_coef > 0 and self.kl_in == "reward"


def compared_rewards(
    batch: Batch, config: ObjectiveConfig
) -> tuple[Float[np.ndarray, "B K"], Int[np.ndarray, "B T"] | None]:
    """Returns what rollouts of a group are compared by, and the column that a token is credited with; None: the only.

    It is the reward, or with --credit turn for the turn of each number the rewards from there on, discounted by
    turn_gamma a turn; NaN where a grader failed or there is no such turn. Source: PipelineRL and Tunix.
    """
    rewards = np.float32(batch.rewards)
    if config.credit != "turn" or batch.token_rewards is None or not batch.mask.any():
        return rewards[:, None], None
    turns = turn_numbers(batch.mask)
    num_turns = turns.max() + 1
    returns = np.full((len(batch), num_turns), np.nan, np.float32)
    rewards_to_go = np.zeros(len(batch))  # float64: equal sums must be equal in any order of their parts
    for turn in reversed(range(num_turns)):
        is_turn = batch.mask & (turns == turn)
        rewards = np.where(is_turn, batch.token_rewards, 0).sum(axis=1)
        rewards_to_go = rewards + config.turn_gamma * rewards_to_go
        returns[:, turn] = np.where(is_turn.any(axis=1), rewards_to_go, np.nan)
    return returns, np.maximum(turns, 0)


def has_signal(rewards: Float[np.ndarray, "B K"], group_size: int, config: ObjectiveConfig) -> Bool[np.ndarray, "N K"]:
    """True where a group can teach: what its rollouts are compared by differs, or the advantage compares nothing.

    Raw rewards are compared with 0. Without the filter best_k imitates the first k rollouts of equal ones.
    """
    groups = rewards.reshape(-1, group_size, rewards.shape[1])
    is_graded = ~np.isnan(groups)
    is_raw = config.advantage == "reinforce" and not (config.do_global_normalization or config.has_kl_in_reward)
    highest = groups.max(axis=1, where=is_graded, initial=0 if is_raw else -np.inf)
    lowest = groups.min(axis=1, where=is_graded, initial=0 if is_raw else np.inf)
    imitates_all = config.advantage == "best_k" and not config.do_group_filter
    compares = is_raw or (config.is_group_relative and not imitates_all)
    return (highest - lowest > NO_SIGNAL) | (not compares)


def compute_advantages(batch: Batch, config: ObjectiveConfig) -> Batch:
    """Returns the batch with advantages (with a critic also its targets), without the rows that are dropped.

    Functions that average by `graded_mean` ignore rows whose reward is NaN (the grader failed); others make the whole
    group NaN, and it is dropped. A completion that is dropped for being truncated counts in its group's baseline.
    """
    if not len(batch):
        return batch
    # Grade.
    rewards, columns = compared_rewards(batch, config)
    rewards = rewards - kl_penalty(batch, config).sum(axis=1, keepdims=True)
    # Filter.
    signal = np.repeat(has_signal(rewards, batch.group_size, config), batch.group_size, axis=0)
    keep = np.isfinite(batch.rewards) & (signal.any(axis=1) | (not config.do_group_filter))
    keep &= batch.finished if config.do_truncation_filter else True
    batch = replace(batch, mask=batch.mask & keep[:, None])
    # Compare.
    groups = np.moveaxis(rewards.reshape(-1, batch.group_size, rewards.shape[1]), 2, 0)
    compared = [ADVANTAGES[config.advantage](group, batch, config) for group in groups]
    advantages = np.concatenate([np.float32(x).reshape(len(keep), -1) for x in compared], axis=1)  # [B, K] or [B, T]
    if columns is not None:
        assert advantages.shape == rewards.shape, "an advantage of each token does not value turns"
        advantages, signal = (np.take_along_axis(x, columns, axis=1) for x in (advantages, signal))
    keep &= np.isfinite(advantages).all(axis=1)
    if config.advantage == "best_k":
        keep &= advantages[:, 0] > 0
    batch = replace(batch, mask=batch.mask & keep[:, None])
    # Shape.
    advantages = np.where(signal, advantages, 0)
    advantages = shape_advantages(advantages, keep, batch, config)
    advantages = np.where(batch.mask & signal, advantages, 0)
    returns = generalised_advantages(batch, config) + batch.values if config.has_critic else None
    batch = replace(batch, advantages=np.float32(advantages), returns=returns, token_rewards=None)
    return select_rows(batch, np.flatnonzero(keep))


def shape_advantages(
    advantages: Float[np.ndarray, "B C"], keep: Bool[np.ndarray, "B"], batch: Batch, config: ObjectiveConfig
) -> Float[np.ndarray, "B D"]:
    """Returns advantages normalised over the batch, clipped and weighed, as far as the settings ask for it."""
    if config.do_global_normalization:
        is_per_token = advantages.shape[1] > 1
        counted = batch.mask if is_per_token else keep[:, None]
        advantages = masked_whiten(advantages, counted)
    if config.do_clip_advantages:
        advantages = np.maximum(advantages, 0)
    weight = np.float32(config.negative_advantage_multiplier)
    return np.where(advantages < 0, weight * advantages, advantages)


def graded_mean(x: Float[np.ndarray, "N G"]) -> Float[np.ndarray, "N 1"]:
    """Mean over the numbers of each group that are not NaN; 0 where all are (np.nanmean would warn)."""
    is_graded = ~np.isnan(x)
    num_graded = np.float32(is_graded.sum(axis=1, keepdims=True))
    total = np.where(is_graded, x, 0).sum(axis=1, keepdims=True)
    return total / np.maximum(num_graded, 1)


def masked_whiten(x: Float[np.ndarray, "R C"], where: Bool[np.ndarray, "R D"]) -> Float[np.ndarray, "R E"]:
    """Returns (x - mean) / std, both over `where`; 0 where all of that is equal."""
    x, where = np.broadcast_arrays(x, where)
    if not where.any():
        return np.zeros_like(x)
    counted = x[where]
    if np.ptp(counted) <= NO_SIGNAL:
        return np.zeros_like(x)
    return (x - counted.mean()) / np.maximum(counted.std(), NO_SIGNAL / 2)


def row_mean(x: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> Float[Array, "B 1"]:
    """Mean over the tokens of each row where the mask is True, 0 where there are none."""
    num_tokens = mask.sum(axis=1, keepdims=True)
    return x.sum(axis=1, keepdims=True, where=mask) / jnp.maximum(num_tokens, 1)


def kl_penalty(batch: Batch, config: ObjectiveConfig) -> Float[np.ndarray, "B T"]:
    """Penalty subtracted from the reward of each token under --kl_in reward."""
    if not config.has_kl_in_reward:
        return np.zeros(batch.mask.shape, np.float32)
    x = np.where(batch.mask, batch.old_logprobs - batch.ref_logprobs, 0)
    return np.float32(config.kl_coef) * x


def generalised_advantages(batch: Batch, config: ObjectiveConfig) -> Float[np.ndarray, "B T"]:
    """Sums of temporal differences, discounted by gamma lambda a token; the reward comes with the last chosen token.

    In episodes each turn's reward comes with its own last token. Tokens that the policy did not choose are passed over.
    Source: arXiv 1506.02438, eq. 16.
    """
    mask, values, rewards = batch.mask, batch.values, batch.token_rewards
    if rewards is None:
        tokens_to_go = np.cumsum(mask[:, ::-1], axis=1)[:, ::-1]
        rewards = np.where(mask & (tokens_to_go == 1), batch.rewards[:, None], 0)
    rewards = rewards - kl_penalty(batch, config)
    gamma, decay = np.float32(config.gamma), np.float32(config.gae_lambda)
    advantages = np.zeros(mask.shape, np.float32)
    next_value = np.zeros(len(mask), np.float32)
    next_advantage = np.zeros(len(mask), np.float32)
    for t in reversed(range(mask.shape[1])):
        target = rewards[:, t] + gamma * (next_value + decay * next_advantage)
        advantages[:, t] = np.where(mask[:, t], target - values[:, t], 0)
        next_advantage = np.where(mask[:, t], target - values[:, t], next_advantage)
        next_value = np.where(mask[:, t], values[:, t], next_value)
    return advantages


def set_loss_denominators(
    batch: Batch, num_rollouts: int, num_generation_tokens: int, config: ObjectiveConfig
) -> Batch:
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


def policy_loss(
    scores: TokenScores, batch: Batch, config: LossConfig
) -> tuple[Float[Array, ""], dict[str, Array]]:
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


def zero_outside_mask(x: Float[Array, "B T"] | Bool[Array, "B T"], batch: Batch) -> Float[Array, "B T"]:
    """Returns x with 0 in the padding, whose numbers could overflow in exp."""
    return jnp.where(batch.mask, x, 0.0)


def with_old_logprobs(logprobs: Float[Array, "B T"], batch: Batch) -> Batch:
    """Returns the batch with masked log-probabilities; the old ones are the new ones where this update is the first."""
    old = stop_gradient(logprobs) if batch.old_logprobs is None else batch.old_logprobs
    sampled = zero_outside_mask(batch.sample_logprobs, batch)
    return replace(batch, old_logprobs=zero_outside_mask(old, batch), sample_logprobs=sampled)


def sum_over_rows(
    x: Float[Array, "B T"] | Bool[Array, "B T"], batch: Batch, denominator: Float[Array, "B"]
) -> Float[Array, ""]:
    """Sum over tokens where the mask is True, each row divided by its denominator."""
    return (zero_outside_mask(x, batch).sum(axis=1) / denominator).sum()


def token_mean(x: Float[Array, "B T"] | Bool[Array, "B T"], batch: Batch) -> Float[Array, ""]:
    """Share of this micro-batch in the mean over the tokens of the optimiser batch."""
    return sum_over_rows(x, batch, batch.num_tokens)


def reference_kl(
    logprobs: Float[Array, "B T"], batch: Batch, config: LossConfig
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Returns the KL's part of the loss, 0 where it counts in the reward, and its mean over tokens, nats."""
    log_ratio = logprobs - zero_outside_mask(batch.ref_logprobs, batch)
    if config.kl_in == "reward":
        return jnp.zeros(()), token_mean(KL["k3"](log_ratio), batch)
    kl = KL[config.kl_estimator or "k3"](log_ratio)
    return config.kl_coef * sum_over_rows(kl, batch, batch.denominator), token_mean(kl, batch)


def ratio_metrics(log_ratio: Float[Array, "B T"], batch: Batch) -> dict[str, Array]:
    """Metrics of the ratio of new to old probability; approx_kl is k3 of KL(old || new)."""
    ratio = jnp.exp(log_ratio)
    return {
        "approx_kl": token_mean((ratio - 1) - log_ratio, batch),
        "importance_ratio": token_mean(ratio, batch),
        "importance_ratio_magnitude": token_mean(jnp.abs(ratio - 1), batch),
        "importance_ratio_max": ratio.max(where=batch.mask, initial=0.0),
        "importance_ratio_min": ratio.min(where=batch.mask, initial=jnp.inf),
        "importance_ratio_histogram": histogram(log_ratio, batch.mask) / batch.num_tokens[0],
    }


def sampler_metrics(log_ratio: Float[Array, "B T"], batch: Batch) -> dict[str, Array]:
    """Metrics of the ratio of old probability to the sampler's; the KL is k3 of KL(sampled || old)."""
    ratio = jnp.exp(log_ratio)
    names = {
        "prob_diff": token_mean(jnp.abs(jnp.exp(batch.old_logprobs) - jnp.exp(batch.sample_logprobs)), batch),
        "logprob_diff": token_mean(jnp.abs(log_ratio), batch),
        "logprob_diff_max": jnp.abs(log_ratio).max(),
        "kl": token_mean((ratio - 1) - log_ratio, batch),
        "ratio": token_mean(ratio, batch),
        "ratio_squared": token_mean(ratio**2, batch),
    }
    return {f"inference_recompute/{name}": value for name, value in names.items()}


def histogram(log_ratio: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> Float[Array, "R"]:
    """Numbers of tokens by their log ratio, nearest of LOG_RATIOS: unlike a quantile they can be added up."""
    num_bins = len(LOG_RATIOS)
    width = LOG_RATIOS[1] - LOG_RATIOS[0]
    nearest = jnp.round((log_ratio - LOG_RATIOS[0]) / width)
    bins = jnp.clip(nearest, 0, num_bins - 1).astype(jnp.int32)
    counts = mask.astype(jnp.float32)
    return jnp.zeros(num_bins).at[bins].add(counts)


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


def value_loss(values: Float[Array, "B T"], batch: Batch, config: LossConfig) -> Float[Array, ""]:
    """0.5 max((V - R)^2, (V_old + clip(V - V_old) - R)^2), mean over tokens. Source: PPO2 of OpenAI's baselines."""
    errors = (values - batch.returns) ** 2
    if config.value_clip:
        moved = jnp.clip(values - batch.values, -config.value_clip, config.value_clip)
        clipped_errors = (batch.values + moved - batch.returns) ** 2
        errors = jnp.maximum(errors, clipped_errors)
    return token_mean(0.5 * errors, batch)


def reduce_metrics(parts: Sequence[dict[str, Array]]) -> dict[str, float | np.ndarray]:
    """Returns the metrics of an optimiser batch from those of its micro-batches, as their names say: see `policy_loss`.

    The same sums of parts that were cut otherwise are what the tests compare: there a mean of a micro-batch fails.
    """
    reductions = {"max": np.nanmax, "min": np.nanmin}
    metrics = {}
    for name in parts[0]:
        kind = name.rpartition("_")[2]
        x = reductions.get(kind, np.sum)([part[name] for part in parts], axis=0)
        assert kind == "histogram" or not x.shape, f"{name} {x.shape} is no number: reduce it, or name it _histogram"
        metrics[name] = x if kind == "histogram" else float(x)
    counts = metrics["importance_ratio_histogram"]
    squared = metrics.pop("inference_recompute/ratio_squared")
    place = np.searchsorted(np.cumsum(counts), 0.99 * counts.sum())
    place = min(place, len(LOG_RATIOS) - 1)
    metrics["importance_ratio_q99"] = float(np.exp(LOG_RATIOS[place]))
    ratio = metrics["inference_recompute/ratio"]
    metrics["inference_recompute/effective_sample_share"] = ratio**2 / max(squared, 1e-30)
    return metrics
