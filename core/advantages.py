"""Advantages: from the rewards of a step to what each token is worth. NumPy on the host. Fork this file to change it.

To change the advantage: write a function beside `rloo` and add its name to GROUP_ADVANTAGES or BATCH_ADVANTAGES.
To change which rows are dropped: `kept` in `compute_advantages`. The loss, which reads advantages: core/objectives.py.

N prompts, G rollouts of each, E = N G rollouts, B rows of their tokens, T row length. Everything is float32.
"""

from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Bool, Float

from core.objectives import LossConfig, PolicyConfig
from core.records import Batch, differs, graded_mean, masked_whiten
from core.terms.corrections import CorrectionConfig
from core.terms.critic import CriticConfig, generalized_advantages
from core.terms.reference import KLConfig, kl_penalty
from core.terms.reward_parts import PartsConfig, by_part, check_parts, part_rewards
from core.terms.shaping import ShapingConfig, shape_advantages
from utils.batching import select_rows
from utils.settings.errors import refuse
from utils.settings.options import group, option

# From the rewards [N, G] (NaN: the grader failed), one advantage for each rollout [N, G], which its rows share, or for
# each token [B, T]. All take the same arguments; `batch.mask` is False in rows that the filters drop.


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
    return masked_whiten(batch.of_rows(centered.reshape(-1, 1)), batch.mask)


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

    The reward of a token is then r - kl_coef sum over s >= t of KL_s. Source: arXiv 2501.03262, eq. 8-10.
    """
    if not config.has_kl_in_reward:
        return masked_whiten(rewards, np.isfinite(rewards))
    penalty = kl_penalty(batch, config.kl)
    penalty_to_go = np.cumsum(penalty[:, ::-1], axis=1)[:, ::-1]
    return masked_whiten(batch.rewards[:, None] - penalty_to_go, batch.mask)


def gae(rewards: Float[np.ndarray, "N G"], batch: Batch, config: "ObjectiveConfig") -> np.ndarray:
    """Advantage of PPO, from the critic's values; whitened by `compute_advantages`. Source: arXiv 1506.02438."""
    penalty = kl_penalty(batch, config.kl) if config.has_kl_in_reward else 0
    return generalized_advantages(batch, penalty, config.critic)


def turn_mean(rewards: Float[np.ndarray, "KN G"], batch: Batch, config: "ObjectiveConfig") -> np.ndarray:
    """Advantage of the turns of each number, by `group_mean`."""
    from core.terms.turn_rewards import of_turns

    return of_turns(group_mean, rewards, batch, config)


def turn_zscore(rewards: Float[np.ndarray, "KN G"], batch: Batch, config: "ObjectiveConfig") -> np.ndarray:
    """Advantage of the turns of each number, by `group_zscore`."""
    from core.terms.turn_rewards import of_turns

    return of_turns(group_zscore, rewards, batch, config)


# Methods that compare the rollouts of a group. A group of equal rewards has no signal, and the group filter drops it.
GROUP_ADVANTAGES = {
    "group_zscore": group_zscore,
    "group_mean": group_mean,
    "rloo": rloo,
    "maxrl": maxrl,
    "reinforce++_baseline": whitened_group_mean,
    "best_k": best_k,
}
# These compare the turns of the same number in a group, or each part of the reward.
TURN_ADVANTAGES = {"turn_mean": turn_mean, "turn_zscore": turn_zscore}
PART_ADVANTAGES = {"gdpo": by_part(group_zscore)}
# These do not compare within a group, so groups of one work. The group filter drops only groups of reinforce whose
# rewards are all 0.
BATCH_ADVANTAGES = {"none": no_advantage, "reinforce": raw_rewards, "batch_zscore": batch_zscore, "gae": gae}
ADVANTAGES = GROUP_ADVANTAGES | TURN_ADVANTAGES | PART_ADVANTAGES | BATCH_ADVANTAGES


@dataclass(frozen=True)
class ObjectiveConfig:
    """Advantages."""

    advantage: str = option("group_zscore", "Advantage estimator; gae: trains a critic too", list(ADVANTAGES))
    best_k: int = option(2, "Number of completions that --advantage best_k trains on, the best ones of each group")
    do_group_filter: bool = option(
        True,
        "Drop groups whose rewards are all equal: they teach nothing. reinforce drops only groups of "
        "rewards 0; turn_mean and turn_zscore compare each turn. 0: keep all, with advantage 0 (best_k: the first k, "
        "right or wrong)",
    )
    do_truncation_filter: bool = option(False, "Drop completions that were truncated at --num_generation_tokens")
    parts: PartsConfig = group(PartsConfig)
    shaping: ShapingConfig = group(ShapingConfig)
    policy: PolicyConfig = group(PolicyConfig)
    corrections: CorrectionConfig = group(CorrectionConfig)
    kl: KLConfig = group(KLConfig)
    critic: CriticConfig = group(CriticConfig)

    def __post_init__(self):
        check_parts(self.parts, self.advantage)
        refuse([
            (self.policy.objective == "dppo" and self.corrections.is_corrected,
             "--objective dppo corrects for the sampler itself: leave --importance_correction out"),
            (self.advantage in TURN_ADVANTAGES | PART_ADVANTAGES
             and (self.has_kl_in_reward or self.shaping.do_global_normalization),
             f"--advantage {self.advantage} works without --kl_in reward and --do_global_normalization only: leave "
             "them out"),
            (self.best_k < 1, f"--best_k {self.best_k} must be at least 1: raise it"),
            (self.advantage in ("gae", "best_k") and self.shaping.do_global_normalization,
             f"--do_global_normalization has no effect with --advantage {self.advantage}, since gae is normalized "
             "already and best_k gives 1 to all: remove it"),
        ])  # fmt: skip

    @property
    def has_critic(self) -> bool:
        return self.advantage == "gae"

    @property
    def has_kl_in_reward(self) -> bool:
        return self.kl.kl_coef > 0 and self.kl.kl_in == "reward"

    @property
    def loss(self) -> LossConfig:
        """Returns the options of the loss as jit takes them; members of a population share programs by these."""
        policy, kl = self.policy, self.kl
        low, high = policy.clip_epsilon, policy.clip_epsilon_high
        high = low if high == -1 else high
        return LossConfig(
            objective=policy.objective,
            dual_clip=policy.dual_clip,
            corrections=self.corrections,
            value_clip=self.critic.value_clip,
            kl_in=kl.kl_in,
            clip_epsilon=low,
            clip_epsilon_high=high,
            clip_range=(1 - low, 1 + high),
            kl_coef=kl.kl_coef or None,
            entropy_coef=policy.entropy_coef or None,
        )


def compared_rewards(batch: Batch, config: ObjectiveConfig) -> Float[np.ndarray, "K N G"]:
    """Returns the rewards that the method compares: K = 1, those from each of K turns on, or those of K parts."""
    rewards = np.float32(batch.rewards)[None]
    if config.advantage in TURN_ADVANTAGES and batch.token_rewards is not None:
        from core.terms.turn_rewards import turn_returns

        rewards = turn_returns(batch)
    if config.advantage in PART_ADVANTAGES:
        rewards = part_rewards(batch, config.parts)
    return rewards[:, batch.first_rows].reshape(len(rewards), -1, batch.group_size)


def has_signal(rewards: Float[np.ndarray, "*R G"], config: ObjectiveConfig) -> Bool[np.ndarray, "*R"]:
    """Returns True for groups that can teach: their rewards differ, or the method compares nothing.

    Raw rewards are compared with 0. Without the filter, best_k imitates the first k rollouts of equal ones.
    """
    if config.advantage == "reinforce" and not (config.shaping.do_global_normalization or config.has_kl_in_reward):
        return differs(np.insert(rewards, 0, 0, axis=-1))
    imitates_all = config.advantage == "best_k" and not config.do_group_filter
    return differs(rewards) | imitates_all | (config.advantage in BATCH_ADVANTAGES)


def compute_advantages(batch: Batch, config: ObjectiveConfig) -> Batch:
    """Returns the batch with advantages (with a critic also its targets), without the rows that are dropped.

    Rollouts are compared, and their rows share what they get. Rows whose advantage is NaN are dropped. Methods that
    average by `graded_mean` ignore rollouts whose reward is NaN (the grader failed); other methods make the whole group
    NaN. A truncated rollout that is dropped counts in the baseline.
    """
    if not len(batch):
        return batch
    first_rows, graded = batch.first_rows, compared_rewards(batch, config)
    if config.has_kl_in_reward:
        penalty = np.add.reduceat(kl_penalty(batch, config.kl).sum(axis=1), first_rows)
        graded = graded - penalty.reshape(-1, batch.group_size)
    signal = batch.of_rows(np.repeat(has_signal(graded, config).any(axis=0), batch.group_size))

    kept = np.isfinite(batch.rewards)
    if config.do_group_filter:
        kept &= signal
    if config.do_truncation_filter:
        kept &= batch.of_rows(np.logical_and.reduceat(batch.finished, first_rows))
    batch = replace(batch, mask=batch.mask & kept[:, None])

    compared = np.float32(ADVANTAGES[config.advantage](graded.reshape(-1, batch.group_size), batch, config))
    if compared.size == len(first_rows):
        compared = batch.of_rows(compared.reshape(-1, 1))
    kept &= np.isfinite(compared).all(axis=1)  # of [B, 1] or [B, T]
    batch = replace(batch, mask=batch.mask & kept[:, None])

    shaped, returns = compared, None
    if config.has_critic:
        shaped, returns = masked_whiten(compared, batch.mask), compared + batch.values
    if config.shaping != ShapingConfig():
        shaped = shape_advantages(shaped, signal, kept, batch, config.shaping)
    advantages = np.float32(np.where(batch.mask & signal[:, None], shaped, 0))
    batch = replace(batch, advantages=advantages, returns=returns, token_rewards=None, reward_parts={})
    return select_rows(batch, np.flatnonzero(kept))
