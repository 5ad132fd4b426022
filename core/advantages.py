"""Advantages: from the rewards of a step to what each token is worth. NumPy on the host. Fork this file to change it.

To change the advantage: write a function beside `rloo` and add its name to GROUP_ADVANTAGES or BATCH_ADVANTAGES.
To change what leaves the batch: "Filter" in `compute_advantages`. The loss, which reads them: core/objectives.py.

N prompts, G rollouts of each, B = N G rows, T row length. Everything is float32.
"""

from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Bool, Float

from core.objectives import LossConfig
from core.records import Batch, differs, graded_mean, masked_whiten
from core.terms.corrections import check_corrections
from core.terms.critic import check_critic, gae, generalized_advantages
from core.terms.reference import check_kl, kl_penalty
from core.terms.shaping import ShapingConfig, normalize_advantages
from core.terms.turn_rewards import BY_TURN, by_turn, turn_returns
from utils.batching import select_rows
from utils.settings.errors import refuse
from utils.settings.options import option

# From the rewards [N, G] (NaN: the grader failed), one advantage for each row [N, G] or each token [B, T]. All take the
# same arguments; `batch.mask` is False in rows that the filters drop.


def group_zscore(rewards: Float[np.ndarray, "N G"], batch: Batch, config: "ObjectiveConfig") -> np.ndarray:
    """Advantage of GRPO, with the population's deviation (ddof 0). Source: arXiv 2402.03300, section 4.1.2."""
    centered = group_mean(rewards, batch, config)
    deviation = np.sqrt(graded_mean(centered**2))
    return centered / np.where(deviation > 0, deviation, 1)


def group_mean(rewards: Float[np.ndarray, "N G"], batch: Batch, config: "ObjectiveConfig") -> np.ndarray:
    """Advantage of Dr. GRPO. Source: arXiv 2503.20783, section 3.2."""
    return rewards - graded_mean(rewards)


def rloo(rewards: Float[np.ndarray, "N G"], batch: Batch, config: "ObjectiveConfig") -> np.ndarray:
    """Advantage of REINFORCE leave-one-out. Source: arXiv 2402.14740."""
    G = np.isfinite(rewards).sum(axis=1, keepdims=True)
    scale = np.float32(G / np.maximum(G - 1, 1))
    return scale * group_mean(rewards, batch, config)


def maxrl(rewards: Float[np.ndarray, "N G"], batch: Batch, config: "ObjectiveConfig") -> np.ndarray:
    """Advantage of MaxRL. Source: arXiv 2602.02710."""
    mean = graded_mean(rewards)
    is_positive = mean > 0
    scaled = (rewards - mean) / np.where(is_positive, mean, 1)
    return np.where(is_positive, scaled, 0)


def whitened_group_mean(rewards: Float[np.ndarray, "N G"], batch: Batch, config: "ObjectiveConfig") -> np.ndarray:
    """Advantage of REINFORCE++ with a group baseline. Source: arXiv 2501.03262."""
    centered = group_mean(rewards, batch, config)
    return masked_whiten(centered.reshape(-1, 1), batch.mask)


def best_k(rewards: Float[np.ndarray, "N G"], batch: Batch, config: "ObjectiveConfig") -> np.ndarray:
    """Advantage of self-imitation, NaN for those that it drops; ties go to the first.

    Source: RAFT, arXiv 2304.06767; easy-GRPO's sil.
    """
    order = np.argsort(-rewards, axis=1, kind="stable")
    rank = np.argsort(order, axis=1)
    return np.where(rank < config.best_k, 1, np.nan)


def no_advantage(rewards: Float[np.ndarray, "N G"], batch: Batch, config: "ObjectiveConfig") -> np.ndarray:
    """Advantage of distillation alone: rewards teach nothing."""
    return np.zeros_like(rewards)


def raw_rewards(rewards: Float[np.ndarray, "N G"], batch: Batch, config: "ObjectiveConfig") -> np.ndarray:
    """Advantage of REINFORCE. Source: Williams 1992."""
    return rewards


def batch_zscore(rewards: Float[np.ndarray, "N G"], batch: Batch, config: "ObjectiveConfig") -> np.ndarray:
    """Advantage of REINFORCE++: over completions, or with the KL in the reward over tokens.

    A token pays for the KL from itself on: r - kl_coef sum over s >= t of KL_s. Source: arXiv 2501.03262, eq. 8-10.
    """
    if not config.has_kl_in_reward:
        return masked_whiten(rewards, np.isfinite(rewards))
    penalty = kl_penalty(batch, config)
    penalty_to_go = np.cumsum(penalty[:, ::-1], axis=1)[:, ::-1]
    return masked_whiten(batch.rewards[:, None] - penalty_to_go, batch.mask)


# These compare the rollouts of a group: one whose rewards are equal has no signal, and the group filter drops it.
GROUP_ADVANTAGES = {
    "group_zscore": group_zscore,
    "group_mean": group_mean,
    "rloo": rloo,
    "maxrl": maxrl,
    "reinforce++_baseline": whitened_group_mean,
    "best_k": best_k,
    "turn_mean": by_turn(group_mean),
    "turn_zscore": by_turn(group_zscore),
}
# These do not: the group filter drops rewards of 0 of reinforce and nothing else, and a group of one will do.
BATCH_ADVANTAGES = {"none": no_advantage, "reinforce": raw_rewards, "batch_zscore": batch_zscore, "gae": gae}
ADVANTAGES = GROUP_ADVANTAGES | BATCH_ADVANTAGES


@dataclass(frozen=True)
class ObjectiveConfig(ShapingConfig, LossConfig):
    """Advantages.

    The options of the loss, which it inherits, are in the same group: KL in the reward is of both.
    """

    advantage: str = option("group_zscore", "Advantage estimator; gae: trains a critic too", list(ADVANTAGES))
    best_k: int = option(2, "Number of completions that --advantage best_k trains on, the best ones of each group")
    do_group_filter: bool = option(
        True,
        "Leave out groups whose rewards are all equal: they teach nothing. reinforce leaves out only groups of "
        "rewards 0; turn_mean and turn_zscore compare each turn. 0: keep all, with advantage 0 (best_k: the first k, "
        "right or wrong)",
    )
    do_truncation_filter: bool = option(False, "Leave out completions truncated at --num_generation_tokens")

    def __post_init__(self):
        check_kl(self)
        check_critic(self)
        check_corrections(self)
        refuse([
            (self.clip_epsilon < 0 or self.clip_epsilon_high < 0 and self.clip_epsilon_high != -1,
             "--clip_epsilon and --clip_epsilon_high must not be negative: raise the lower one (--clip_epsilon_high "
             "-1: as --clip_epsilon)"),
            (self.dual_clip != 0 and self.dual_clip <= 1,
             f"--dual_clip {self.dual_clip} must be above 1: raise it, or give 0 for none"),
            (self.objective == "dppo" and self.is_corrected,
             "--objective dppo corrects for the sampler itself: leave --importance_correction out"),
            (self.advantage in ("turn_mean", "turn_zscore")
             and (self.has_kl_in_reward or self.do_global_normalization),
             f"--advantage {self.advantage} works without --kl_in reward and --do_global_normalization only: leave "
             "them out"),
            (self.best_k < 1, f"--best_k {self.best_k} must be at least 1: raise it"),
            (self.advantage in ("gae", "best_k") and self.do_global_normalization,
             f"--do_global_normalization has no effect with --advantage {self.advantage}, since gae is normalized "
             "already and best_k gives 1 to all: leave it out"),
        ])  # fmt: skip

    @property
    def is_group_relative(self) -> bool:
        return self.advantage not in BATCH_ADVANTAGES

    @property
    def has_critic(self) -> bool:
        return self.advantage == "gae"


def has_signal(rewards: Float[np.ndarray, "*R G"], config: ObjectiveConfig) -> Bool[np.ndarray, "*R"]:
    """True where a group can teach: its rewards differ, or the advantage compares nothing.

    Raw rewards are compared with 0. Without the filter best_k imitates the first k rollouts of equal ones.
    """
    is_raw = config.advantage == "reinforce" and not (config.do_global_normalization or config.has_kl_in_reward)
    compared = np.insert(rewards, 0, 0, axis=-1) if is_raw else rewards
    imitates_all = config.advantage == "best_k" and not config.do_group_filter
    compares = is_raw or (config.is_group_relative and not imitates_all)
    return differs(compared) | (not compares)


def compared_rewards(batch: Batch, config: ObjectiveConfig) -> Float[np.ndarray, "K N G"]:
    """Returns the rewards by which groups are compared: K = 1, or by turn as --advantage and the episodes have it."""
    is_by_turn = config.advantage in BY_TURN and batch.token_rewards is not None
    rewards = turn_returns(batch) if is_by_turn else np.float32(batch.rewards)[None]
    return rewards.reshape(len(rewards), -1, batch.group_size)


def compute_advantages(batch: Batch, config: ObjectiveConfig) -> Batch:
    """Returns the batch with advantages (with a critic also its targets), without the rows that are dropped.

    Rows whose advantage is NaN are dropped. Functions that average by `graded_mean` ignore rows whose reward is NaN
    (the grader failed), others make the whole group NaN. A truncated row that is dropped counts in the baseline.
    """
    if not len(batch):
        return batch
    # Grade.
    rewards = compared_rewards(batch, config)
    if config.has_kl_in_reward:
        rewards = rewards - kl_penalty(batch, config).sum(axis=1).reshape(-1, batch.group_size)
    # Filter.
    signal = np.repeat(has_signal(rewards, config).any(axis=0), batch.group_size)
    keep = np.isfinite(batch.rewards) & (signal | (not config.do_group_filter))
    keep &= batch.finished if config.do_truncation_filter else True
    batch = replace(batch, mask=batch.mask & keep[:, None])
    # Compare.
    advantages = ADVANTAGES[config.advantage](rewards.reshape(-1, batch.group_size), batch, config)
    advantages = np.float32(advantages).reshape(len(batch), -1)  # [B, 1] or [B, T]
    keep &= np.isfinite(advantages).all(axis=1)
    batch = replace(batch, mask=batch.mask & keep[:, None])
    # Shape.
    advantages = np.where(signal[:, None], advantages, 0)
    if config.do_global_normalization:
        advantages = normalize_advantages(advantages, keep, batch)
    if config.do_clip_advantages:
        advantages = np.maximum(advantages, 0)
    if config.negative_advantage_multiplier != 1:
        weight = np.float32(config.negative_advantage_multiplier)
        advantages = np.where(advantages < 0, weight * advantages, advantages)
    advantages = np.where(batch.mask & signal[:, None], advantages, 0)
    returns = generalized_advantages(batch, config) + batch.values if config.has_critic else None
    batch = replace(batch, advantages=np.float32(advantages), returns=returns, token_rewards=None)
    return select_rows(batch, np.flatnonzero(keep))
