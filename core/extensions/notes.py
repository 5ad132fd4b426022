"""Notes that a run prints at its start: loss and advantage as resolved, optimizer, adapters, padding, --ahead."""

from core.advantages import ObjectiveConfig
from core.config import Config
from core.learner import Learner
from core.rollout import RolloutWorker
from envs.scoring.shaping import reward_names
from models.architecture import Decoder
from models.memory import describe_whole
from models.names import Adapters, Params
from models.optimizers import describe_optimizer
from models.speed import limits_of
from utils.settings.errors import UserError

FULL_RATES = 2e-6  # learning rates of full training are up to this; those of adapters are about 10 times as high
SMALL, HIGH_RATE = 50 * 10**6, 1e-5  # full training of more parameters at a higher rate gets a warning
UNCLIPPED = ("reinforce", "sapo")  # losses that do not read the clip range


def training_notes(
    config: Config, learner: Learner, params: Params | Adapters, worker: RolloutWorker
) -> list[str]:
    """Returns a line for each decision about memory, loss, optimizer and rollouts.

    Raises: UserError for parts of the reward that are not there.
    """
    limits = limits_of(learner.layout, learner.model.dtype)  # by which speed/decode_roofline and update_roofline go
    notes = (
        *learner.notes,
        describe_objective(config.objective),
        describe_parts(config, worker),
        describe_optimizer(config.optimizer, params),
        config.sampling.distribution.describe(),
        describe_adapters(config, learner.model) if learner.base else warn_of_rate(config, learner.model),
        describe_padding(config.minibatch_size, learner.layout.row_shards),
        describe_ahead(config),
        *(describe_whole(learner.model, worker.layout) if config.ahead and worker.layout != learner.layout else ()),
        f"a device was measured: {limits.describe()}" if limits else "",
    )
    return list(filter(None, notes))


def describe_objective(config: ObjectiveConfig) -> str:
    """Returns the resolved objective in one line."""
    policy, corrections, kl, shaping, loss = config.policy, config.corrections, config.kl, config.shaping, config.loss
    text = f"minimize {policy.loss_normalization} of {policy.objective}"
    if policy.objective not in UNCLIPPED:
        text += f" (clip_epsilon {loss.clip_epsilon:g}, {loss.clip_epsilon_high:g})"
    if policy.objective == "ppo" and policy.dual_clip:
        text += f", at most -{policy.dual_clip:g} A where A < 0"
    if policy.objective == "gspo":
        names = {"constant": " (LUSPO)", "token_mean": " (GSPO is that of sequence_mean only)"}
        text += names.get(policy.loss_normalization, "")
    if corrections.importance_correction == "truncate":
        text += f", x min(w, {corrections.importance_cap:g}) by {corrections.importance_level}"
    if corrections.importance_correction == "mask":
        low, high = corrections.importance_floor, corrections.importance_cap
        text += f", x w by {corrections.importance_level}, 0 outside [{low:g}, {high:g}]"
    if corrections.off_policy_mask:
        text += f", 0 where A < 0 and mean log(p_sample / p) > {corrections.off_policy_mask:g}"
    if corrections.do_mask_importance_ratio:
        text += ", 0 where p / p_old >= 2"
    if corrections.do_mask_inference_ratio:
        text += ", 0 where p_sample / p_old >= 2"
    if kl.kl_coef and kl.kl_in == "loss":
        text += f" + {kl.kl_coef:g} k3(p || p_ref)"
    if policy.entropy_coef:
        text += f" - {policy.entropy_coef:g} entropy"
    if config.has_kl_in_reward:
        text += f"; r = reward - {kl.kl_coef:g} log(p / p_ref)"
    text += f"; A = {config.advantage}"
    if config.advantage == "best_k":
        text += f", k = {config.best_k}"
    if config.has_critic:
        text += f", gamma {config.critic.gamma:g}, lambda {config.critic.gae_lambda:g}"
    if shaping.do_global_normalization:
        text += ", normalized over the batch"
    if shaping.do_clip_advantages:
        text += ", 0 where negative"
    if shaping.negative_advantage_multiplier != 1:
        text += f", times {shaping.negative_advantage_multiplier:g} where negative"
    if config.has_critic and config.critic.value_clip:
        text += f"; values move by at most {config.critic.value_clip:g}"
    return text


def describe_parts(config: Config, worker: RolloutWorker) -> str:
    """Returns in one line the parts of the reward that gdpo compares; empty without them.

    Raises: UserError for a part that is asked for and no reward has, when replies to the first problems are tried.
    """
    weights = config.objective.parts.weights
    asked = {name: f"--reward_parts {name}={weight:g}" for name, weight in weights.items()}
    if config.rewards.length_reward == "cosine":
        asked.setdefault("correct_answer", "--length_reward cosine, which pays by correct_answer")
    parts = worker.scorer.parts
    found = reward_names(parts, worker.env)
    found |= {"length_reward"} if config.rewards.length_reward else set()
    for name, option in asked.items():
        if parts and not worker.env.rollouts and name not in found:  # a program names its own
            raise UserError(
                f"{option}: no reward of {worker.name} has this part: name some of {', '.join(sorted(found))}"
            )
    if not weights:
        return ""
    terms = [f"{weight:g} x {name}" for name, weight in weights.items()]
    return f"A sums z-scores of {' + '.join(terms)}, and is normalized over the batch"


def describe_ahead(config: Config) -> str:
    """Returns in one line how rollouts are drawn ahead, and how the loss treats that."""
    if not config.ahead:
        return ""
    where = "on the devices beside those of --mesh" if config.devices.mesh else "on the same device"
    old = "the sampler's" if config.trusts_sampler else "recomputed, with the weight w for the difference"
    return f"rollouts are drawn a step ahead, {where}, by weights that are a step old; p_old is {old}"


def describe_padding(num_rows: int, shards: int) -> str:
    """Returns in one line how much of an update is padding if a minibatch has fewer rows than the mesh has parts."""
    if num_rows >= shards:
        return ""
    return (
        f"{1 - num_rows / shards:.0%} of each update is padding, since --mesh cuts rows into {shards} parts "
        f"(data x fsdp) and a minibatch has {num_rows}: raise it to {shards} (--ppo_minibatch, --groups_per_batch), or "
        "give tp more of the devices"
    )


def warn_of_rate(config: Config, model: Decoder) -> str:
    """Returns a warning if the learning rate is high for training all parameters of a model of this size; or nothing.

    Source of the figures: github.com/jjyaoao/HelloAgents/issues/107, 500 problems, greedy.
    """
    if config.optimizer.lr <= HIGH_RATE or model.num_parameters <= SMALL:
        return ""
    return (
        f"warning: --lr {config.optimizer.lr:g} is high for training all {model.num_parameters:,} parameters, and a "
        "policy may collapse: in HelloAgents' GRPO of Qwen3-0.6B, 5e-5 took GSM8K from 57.0% to 2.4%, even with "
        "adapters, and 1e-6 was stable: lower --lr to 1e-6"
    )


def describe_adapters(config: Config, model: Decoder) -> str:
    """Returns in one line how adapters are sampled, and whether the learning rate fits them."""
    lr = config.optimizer.lr
    sampled = "from a copy with them added" if model.merges_adapters else "beside the base"
    dtype = model.base_dtype or model.dtype
    sizes = f"rank {model.lora_rank} and alpha {model.lora_alpha:g}"
    text = f"adapters of {sizes} over a base in {dtype}, sampled {sampled}"
    if lr <= FULL_RATES:
        text += f"; --lr {lr:g} fits full training: adapters take about 10 times as much"
    return text
