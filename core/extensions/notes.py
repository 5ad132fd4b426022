"""Notes that a run prints at its start: loss and advantage as resolved, optimizer, adapters, padding, --ahead."""

from core.advantages import ObjectiveConfig
from core.config import Config
from core.learner import Learner
from core.objectives import TERMS
from models.architecture import Decoder
from models.names import Adapters, Params
from models.optimizers import describe_optimizer
from models.speed import limits_of

FULL_RATES = 2e-6  # learning rates of full training are up to this; those of adapters are about 10 times as high
SMALL = 10**8  # parameters; smaller models take higher rates
WRITTEN_TERMS = ("reference_kl", "distillation_loss")  # of TERMS: they have words or lines of their own
UNCLIPPED = ("reinforce", "sapo")  # losses that do not read the clip range


def training_notes(config: Config, learner: Learner, params: Params | Adapters) -> list[str]:
    """Returns a line for each decision about memory, loss, optimizer and rollouts."""
    notes = (
        *learner.notes,
        describe_objective(config.objective),
        describe_optimizer(config.optimizer, params),
        config.sampling.distribution.describe(),
        describe_adapters(config, learner.model, bool(learner.base)),
        describe_padding(config.minibatch_size, learner.layout.row_shards),
        describe_ahead(config),
        describe_limits(learner),
    )
    return list(filter(None, notes))


def describe_objective(config: ObjectiveConfig) -> str:
    """Returns the resolved objective in one line."""
    text = f"minimize {config.loss_normalization} of {config.objective}"
    if config.objective not in UNCLIPPED:
        text += " (clip_epsilon {:g}, {:g})".format(*config.clip_epsilons)
    if config.objective == "ppo" and config.dual_clip:
        text += f", at most -{config.dual_clip:g} A where A < 0"
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
        text += f" + {config.kl_coef:g} k3(p || p_ref)"
    if config.entropy_coef:
        text += f" - {config.entropy_coef:g} entropy"
    text += "".join(f" + {term.__name__}" for term in TERMS if term.__name__ not in WRITTEN_TERMS)
    if config.has_kl_in_reward:
        text += f"; r = reward - {config.kl_coef:g} log(p / p_ref)"
    text += f"; A = {config.advantage}"
    if config.advantage == "best_k":
        text += f", k = {config.best_k}"
    if config.has_critic:
        text += f", gamma {config.gamma:g}, lambda {config.gae_lambda:g}"
    if config.do_global_normalization:
        text += ", normalized over the batch"
    if config.do_clip_advantages:
        text += ", 0 where negative"
    if config.negative_advantage_multiplier != 1:
        text += f", times {config.negative_advantage_multiplier:g} where negative"
    if config.has_critic and config.value_clip:
        text += f"; values move by at most {config.value_clip:g}"
    return text


def describe_ahead(config: Config) -> str:
    """Returns in one line how rollouts are drawn ahead, and how the loss treats that."""
    if not config.ahead:
        return ""
    where = "on the devices beside those of --mesh" if config.devices.mesh else "on the same device"
    old = "the sampler's" if config.trusts_sampler else "recomputed, with the weight w for the difference"
    return f"rollouts are drawn a step ahead, {where}, by weights that are a step old; p_old is {old}"


def describe_limits(learner: Learner) -> str:
    """Returns in one line what a device was measured to do, by which speed/decode_roofline and update_roofline go."""
    limits = limits_of(learner.layout, learner.model.dtype)
    return f"a device was measured: {limits.describe()}" if limits else ""


def describe_padding(num_rows: int, shards: int) -> str:
    """Returns in one line how much of an update is padding if a minibatch has fewer rows than the mesh has parts."""
    if num_rows >= shards:
        return ""
    return (
        f"{1 - num_rows / shards:.0%} of each update is padding, since --mesh cuts rows into {shards} parts "
        f"(data x fsdp) and a minibatch has {num_rows}: raise it to {shards} (--ppo_minibatch, --groups_per_batch), or "
        "give tp more of the devices"
    )


def describe_adapters(config: Config, model: Decoder, has_base: bool) -> str:
    """Returns in one line how adapters are sampled, and whether the learning rate fits what is trained."""
    lr = config.optimizer.lr
    if not has_base:
        is_fast = lr >= FULL_RATES * 10 and model.num_parameters > SMALL
        return f"--lr {lr:g} fits adapters: full training takes about a tenth" if is_fast else ""
    sampled = "from a copy with them added" if model.merges_adapters else "beside the base"
    dtype = model.base_dtype or model.dtype
    sizes = f"rank {model.lora_rank} and alpha {model.lora_alpha:g}"
    text = f"adapters of {sizes} over a base in {dtype}, sampled {sampled}"
    if lr <= FULL_RATES:
        text += f"; --lr {lr:g} fits full training: adapters take about 10 times as much"
    return text
