"""Checks of options: of sampling, of the objective, and of groups together. A leaf: the groups check themselves by it.

A table lists what may be wrong, and what to do about it. What a model or an environment cannot do with some options is
in core/chains/attach.py.
"""

from collections.abc import Sequence
from typing import Any

from utils.settings.errors import UserError


def refuse(mistakes: Sequence[tuple[bool, str]]) -> None:
    """Raises UserError for the first of the mistakes that was made."""
    for is_wrong, message in mistakes:
        if is_wrong:
            raise UserError(message)


def check_sampling(config: Any) -> None:
    """Checks SamplingConfig of core/sampler.py."""
    refuse([
        (config.prompt_length < 1 or config.num_generation_tokens < -1 or config.num_generation_tokens == 0,
         "--prompt_length and --num_generation_tokens must be at least 1: raise the lower one, or give "
         "--num_generation_tokens -1 for the environment's own limit"),
        (config.inference_batch_per_device < 0,
         "--inference_batch_per_device must not be negative: give 1 or more, or 0 for as many rows as fit in memory"),
        (config.page_size not in (-1, 0, 8, 16, 32, 64, 128, 256),
         f"--page_size {config.page_size} is no page size: give a power of two from 8 to 256, 0 for no pages, or -1 to "
         "have it chosen"),
    ])  # fmt: skip
    config.distribution.describe()  # it checks its own settings when it is made


def check_objective(config: Any) -> None:
    """Checks ObjectiveConfig of core/advantages.py, with the options of the loss."""
    refuse([
        (config.clip_epsilon < 0 or config.clip_epsilon_high < 0 and config.clip_epsilon_high != -1,
         "--clip_epsilon and --clip_epsilon_high must not be negative: raise the lower one (--clip_epsilon_high -1: as "
         "--clip_epsilon)"),
        (config.dual_clip != 0 and config.dual_clip <= 1,
         f"--dual_clip {config.dual_clip} must be above 1: raise it, or give 0 for none"),
        (config.importance_cap <= 0, f"--importance_cap {config.importance_cap} must be above 0: raise it"),
        (not 0 <= config.importance_floor <= config.importance_cap,
         f"--importance_floor {config.importance_floor} must be from 0 to --importance_cap {config.importance_cap}: "
         "correct it"),
        (config.importance_floor != 0 and config.importance_correction != "mask",
         "--importance_floor has no effect without --importance_correction mask: give both, or leave it out"),
        (config.off_policy_mask < 0, "--off_policy_mask must not be negative: raise it, or give 0 to switch it off"),
        (min(config.value_clip, config.kl_coef) < 0,
         "--value_clip and --kl_coef must not be negative: raise the lower one, or give 0 to switch it off"),
        (config.kl_in == "loss" and config.kl_estimator == "k1",
         "--kl_estimator k1 in the loss has an expected gradient of zero: choose k2 or k3, or --kl_in reward"),
        (config.kl_in == "reward" and config.kl_estimator not in ("", "k1"),
         f"--kl_estimator {config.kl_estimator} has no effect with --kl_in reward, which subtracts log p - log p_ref: "
         "leave it out"),
        (config.objective == "dppo" and config.is_corrected,
         "--objective dppo corrects for the sampler itself: leave --importance_correction out"),
        (not (0 <= config.gamma <= 1 and 0 <= config.gae_lambda <= 1),
         "--gamma and --gae_lambda must be from 0 to 1: correct the one that is not"),
        (config.advantage in ("turn_mean", "turn_zscore")
         and (config.has_kl_in_reward or config.do_global_normalization),
         f"--advantage {config.advantage} works without --kl_in reward and --do_global_normalization only: leave them "
         "out"),
        (config.best_k < 1, f"--best_k {config.best_k} must be at least 1: raise it"),
        (config.advantage in ("gae", "best_k") and config.do_global_normalization,
         f"--do_global_normalization has no effect with --advantage {config.advantage}, since gae is normalized "
         "already and best_k gives 1 to all: leave it out"),
    ])  # fmt: skip


def check_combinations(config: Any) -> None:
    """Checks Config of core/config.py: the loop's own options, and those of several groups together."""
    update, objective, sampling, kv_dtype = config.update, config.objective, config.sampling, config.compute.kv_dtype
    is_uncorrected = config.ahead > 0 and not objective.is_corrected
    check_distillation(config.distill, objective.advantage, update.group_size)
    refuse([
        (config.max_steps < 1 or min(config.num_epochs, config.seed) < 0,
         "--max_steps must be at least 1, and --num_epochs and --seed must not be negative: raise the one that is "
         "lower"),
        (objective.is_group_relative and update.group_size < 2,
         f"--advantage {objective.advantage} compares rollouts of a group: raise --group_size above 1"),
        (objective.advantage == "best_k" and objective.best_k > update.group_size,
         f"--best_k {objective.best_k} is more than --group_size {update.group_size}: lower --best_k, or raise "
         "--group_size"),
        (config.batch_size % config.minibatch_size > 0,
         f"--ppo_minibatch {update.ppo_minibatch} does not divide the {config.batch_size} rollouts of a step, which "
         "are --groups_per_batch x --group_size (best_k: x --best_k): give a divisor, or 0 for one update"),
        (config.lora.lora_rank > 0 and objective.has_critic,
         "--advantage gae trains a critic, which --lora_rank does not support: leave out one of the two"),
        (config.run.save_best and not config.held_out.test_env_name,
         "--save_best needs held-out scores: give --test_env_name"),
        (sampling.temperature == 0,
         "--temperature 0 always samples the same completion: give one above 0 for training"),
        (config.distill.teacher != "" and not sampling.distribution.is_whole,
         "--teacher compares whole distributions: leave --top_k, --top_p and --min_p out"),
        (update.do_inference_logprobs and objective.is_corrected,
         "--do_inference_logprobs leaves --importance_correction nothing to correct: leave out one of the two"),
        (update.do_inference_logprobs and objective.do_mask_inference_ratio,
         "--do_inference_logprobs leaves --do_mask_inference_ratio nothing to mask: leave out one of the two"),
        (kv_dtype != "" and not objective.is_corrected and objective.objective != "dppo",
         f"--kv_dtype {kv_dtype} samples from other probabilities than those that are trained: correct for it by "
         "--importance_correction truncate, or use --objective dppo"),
        (config.ahead not in (0, 1),
         f"--ahead {config.ahead} is refused: give 0 or 1"),
        (config.devices.rollout_devices > 0 and not config.ahead,
         "--rollout_devices sample while the others train: give --ahead 1, or leave --rollout_devices out"),
        (is_uncorrected and objective.do_mask_inference_ratio,
         "--do_mask_inference_ratio has no effect with --ahead 1, since old log-probabilities are the sampler's: add "
         "--importance_correction truncate, or leave it out"),
        (is_uncorrected and objective.objective == "reinforce",
         "--ahead 1 samples with weights one step old, which --objective reinforce does not account for: add "
         "--importance_correction truncate, or choose another objective"),
    ])  # fmt: skip


def check_distillation(config: Any, advantage: str, group_size: int) -> None:
    """Checks DistillConfig of core/terms/distill.py, and the advantage beside it."""
    options = [name for name, value in vars(config).items() if value != getattr(type(config), name)]
    is_self = config.teacher == "self"
    refuse([
        (not config.teacher and advantage == "none",
         "--advantage none learns nothing without --teacher: give --teacher, or another advantage"),
        (not config.teacher and options != [],
         f"--{' --'.join(options)} has no effect without --teacher: give --teacher, or leave it out"),
        (not 0 < config.distill_beta < 1,
         f"--distill_beta {config.distill_beta} must be above 0 and below 1: correct it, or choose one of its ends, "
         "--distill forward or reverse"),
        ("distill_beta" in options and config.distill != "jsd",
         f"--distill_beta has no effect with --distill {config.distill}: give --distill jsd, or leave it out"),
        (config.distill_coef <= 0, f"--distill_coef {config.distill_coef} must be above 0: raise it"),
        (not 0 <= config.teacher_decay < 1,
         f"--teacher_decay {config.teacher_decay} must be from 0 to below 1: correct it"),
        (not 0 <= config.max_length_growth <= 1,
         f"--max_length_growth {config.max_length_growth} must be from 0 to 1: correct it"),
        (config.teacher_decay > 0 and not is_self,
         "--teacher_decay averages the policies of --teacher self: give --teacher self, or leave it out"),
        (is_self and not config.teacher_prefix and not config.teacher_decay,
         "--teacher self is the policy itself and teaches nothing new: give it another prompt by --teacher_prefix, or "
         "--teacher_decay"),
        (config.teacher_prefix == "sibling" and group_size < 2,
         "--teacher_prefix sibling shows another completion of the group: raise --group_size above 1"),
        (config.teacher != "" and advantage == "best_k",
         "--advantage best_k drops the other completions, which --teacher is to teach: choose another advantage"),
    ])  # fmt: skip
