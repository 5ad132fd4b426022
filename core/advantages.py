"""Advantages: from the rewards of a step to what each token is worth. NumPy on the host. Fork this file to change it.

To change the advantage: write a function beside `rloo` and add its name to GROUP_ADVANTAGES or BATCH_ADVANTAGES.
To change what leaves the batch: "Filter" in `compute_advantages`. The loss, which reads them: core/objectives.py.

N prompts, G rollouts of each, B = N G rows, T row length. Everything is float32.
"""

from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Bool, Float

from core.extensions.checks import check_objective
from core.extensions.credit import discounted_differences, of_tokens, turn_returns
from core.extensions.formulas import formula
from core.objectives import LossConfig
from core.records import NO_SIGNAL, Batch
from utils.batching import select_rows
from utils.settings.options import option

# From the rewards [N, G] (NaN: the grader failed), one advantage for each row [N, G] or each token [B, T]. All take the
# same arguments; `batch.mask` is False in rows that the filters drop.


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


@formula("r - mean of the group's turns of this number, r = the rewards from the turn on")
def turn_mean(rewards: Float[np.ndarray, "KN G"], batch: Batch, config: "ObjectiveConfig") -> np.ndarray:
    """Advantage of each turn of an episode, 0 where the group's turns of this number earn the same."""
    advantages = group_mean(rewards, batch, config) * has_signal(rewards, config)[:, None]
    return of_tokens(advantages.reshape(-1, len(batch)), batch.mask)


@formula("(r - mean) / std of the group's turns of this number, r = the rewards from the turn on")
def turn_zscore(rewards: Float[np.ndarray, "KN G"], batch: Batch, config: "ObjectiveConfig") -> np.ndarray:
    """Advantage of each turn of an episode, 0 where the group's turns of this number earn the same."""
    advantages = group_zscore(rewards, batch, config) * has_signal(rewards, config)[:, None]
    return of_tokens(advantages.reshape(-1, len(batch)), batch.mask)


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
    "turn_mean": turn_mean,
    "turn_zscore": turn_zscore,
}
TURN_ADVANTAGES = ("turn_mean", "turn_zscore")  # their rewards [K N, G] are those from each of K turns on
# These do not: the group filter drops rewards of 0 of reinforce and nothing else, and a group of one will do.
BATCH_ADVANTAGES = {"reinforce": raw_rewards, "batch_zscore": batch_zscore, "gae": gae}
ADVANTAGES = GROUP_ADVANTAGES | BATCH_ADVANTAGES


@dataclass(frozen=True)
class ObjectiveConfig(LossConfig):
    """Advantages.

    The options of the loss, which it inherits, are in the same group: KL in the reward is of both.
    """

    advantage: str = option("group_zscore", "Advantage estimator; gae trains a critic", list(ADVANTAGES))
    best_k: int = option(2, "Number of best completions of each group that --advantage best_k trains on")
    gamma: float = option(1.0, "Discount factor per token of --advantage gae; 1: none")
    gae_lambda: float = option(0.95, "Lambda of --advantage gae: 0 relies on the critic, 1 on the return")
    do_group_filter: bool = option(
        True,
        "Filter of groups whose rewards are all equal (--advantage reinforce: all 0; turn_...: in each turn); 0: they "
        "stay with advantage 0 (--advantage best_k trains on their first k completions, right or wrong)",
    )
    do_truncation_filter: bool = option(False, "Filter of completions that were cut off at --num_generation_tokens")
    do_global_normalization: bool = option(
        False, "Normalisation of advantages over the batch to mean 0 and standard deviation 1, after --advantage"
    )
    do_clip_advantages: bool = option(False, "Replacement of negative advantages by 0, after --do_global_normalization")
    negative_advantage_multiplier: float = option(1.0, "Factor of negative advantages, applied last; 1: none")

    def __post_init__(self):
        check_objective(self)

    @property
    def is_group_relative(self) -> bool:
        return self.advantage not in BATCH_ADVANTAGES

    @property
    def has_critic(self) -> bool:
        return self.advantage == "gae"


def compared_rewards(batch: Batch, config: ObjectiveConfig) -> Float[np.ndarray, "K N G"]:
    """Returns the rewards by which groups are compared: K = 1, or by turn as --advantage and the episodes have it."""
    is_by_turn = config.advantage in TURN_ADVANTAGES and batch.token_rewards is not None
    rewards = turn_returns(batch) if is_by_turn else np.float32(batch.rewards)[None]
    return rewards.reshape(len(rewards), -1, batch.group_size)


def has_signal(rewards: Float[np.ndarray, "*R G"], config: ObjectiveConfig) -> Bool[np.ndarray, "*R"]:
    """True where a group can teach: its rewards differ, or the advantage compares nothing.

    Raw rewards are compared with 0. Without the filter best_k imitates the first k rollouts of equal ones.
    """
    is_graded = ~np.isnan(rewards)
    is_raw = config.advantage == "reinforce" and not (config.do_global_normalization or config.has_kl_in_reward)
    highest = rewards.max(axis=-1, where=is_graded, initial=0 if is_raw else -np.inf)
    lowest = rewards.min(axis=-1, where=is_graded, initial=0 if is_raw else np.inf)
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
    penalty = kl_penalty(batch, config).sum(axis=1).reshape(-1, batch.group_size)
    rewards = compared_rewards(batch, config) - penalty
    # Filter.
    signal = np.repeat(has_signal(rewards, config).any(axis=0), batch.group_size)
    keep = np.isfinite(batch.rewards) & (signal | (not config.do_group_filter))
    keep &= batch.finished if config.do_truncation_filter else True
    batch = replace(batch, mask=batch.mask & keep[:, None])
    # Compare.
    advantages = ADVANTAGES[config.advantage](rewards.reshape(-1, batch.group_size), batch, config)
    advantages = np.float32(advantages).reshape(len(batch), -1)  # [B, 1] or [B, T]
    keep &= np.isfinite(advantages).all(axis=1)
    if config.advantage == "best_k":
        keep &= advantages[:, 0] > 0
    batch = replace(batch, mask=batch.mask & keep[:, None])
    # Shape.
    advantages = np.where(signal[:, None], advantages, 0)
    advantages = shape_advantages(advantages, keep, batch, config)
    advantages = np.where(batch.mask & signal[:, None], advantages, 0)
    returns = generalised_advantages(batch, config) + batch.values if config.has_critic else None
    batch = replace(batch, advantages=np.float32(advantages), returns=returns, token_rewards=None)
    return select_rows(batch, np.flatnonzero(keep))


def shape_advantages(
    advantages: Float[np.ndarray, "B C"], keep: Bool[np.ndarray, "B"], batch: Batch, config: ObjectiveConfig
) -> Float[np.ndarray, "B D"]:
    """Returns advantages normalised over the batch, clipped and weighed as the settings say."""
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
    rewards = batch.token_rewards
    if rewards is None:
        tokens_to_go = np.cumsum(batch.mask[:, ::-1], axis=1)[:, ::-1]
        rewards = np.where(batch.mask & (tokens_to_go == 1), batch.rewards[:, None], 0)
    rewards = rewards - kl_penalty(batch, config)
    return discounted_differences(rewards, batch.values, batch.mask, config.gamma, config.gae_lambda)
