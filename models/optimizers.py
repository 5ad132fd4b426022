"""The optimizers: AdamW, Adafactor, Muon; their learning rates, schedule and weight decay."""

import math
from collections import Counter
from dataclasses import dataclass
from functools import cache

import jax
import optax
from jaxtyping import PyTree

from models.names import CRITIC, EMBED, HEAD, Array, Params, is_matrix
from utils.settings.errors import UserError
from utils.settings.options import option

VOCABULARY = {EMBED: "embedding_lr", HEAD: "unembedding_lr"}
NOUNS = {
    "matrix_lr": "matrices", "embedding_lr": "the embedding", "unembedding_lr": "the head", "lr": "the rest",
    "critic_lr": "the critic",
}  # fmt: skip
ROWS_AND_COLUMNS = optax.contrib.MuonDimensionNumbers(reduction_axis=-1, output_axis=-2)  # of [..., out, in]


def rate_name(path: tuple, _: Array) -> str:
    """Returns the option that holds a parameter's learning rate under --optimizer muon."""
    if path[0].key == CRITIC:
        return "critic_lr"
    name = path[-1].key
    return VOCABULARY.get(name, "matrix_lr" if is_matrix(name) else "lr")


def width_factor(x: Array) -> float:
    """Factor of the learning rates of embedding and head in nanochat, which tuned them at a width of 768."""
    return (x.shape[-1] / 768) ** -0.5


def is_decayed(params: Params) -> PyTree:
    """True for parameters with weight decay: all except norms, biases and the decay rates of linear attention."""
    without = "norm", "bias", "A_log"
    return jax.tree.map_with_path(lambda path, _: not any(part in path[-1].key for part in without), params)


def adamw(config: "OptimizerConfig", rate_option: str = "lr") -> optax.GradientTransformation:
    """AdamW. Source: arXiv 1711.05101."""
    return optax.adamw(
        getattr(config, rate_option),
        config.b1,
        config.b2,
        config.adam_eps,
        mu_dtype="float32",
        weight_decay=config.weight_decay,
        mask=is_decayed,
    )


def adafactor(config: "OptimizerConfig") -> optax.GradientTransformation:
    """Adafactor; its --lr is absolute, as AdamW's, not a share of the parameter. Source: arXiv 1804.04235."""
    # The parts of optax.adafactor, whose own weight decay does not follow the learning rate.
    return optax.chain(
        optax.scale_by_factored_rms(),
        optax.clip_by_block_rms(1.0),
        optax.add_decayed_weights(config.weight_decay, is_decayed),
        optax.scale_by_learning_rate(config.lr),
    )


def muon(config: "OptimizerConfig") -> optax.GradientTransformation:
    """Muon for the matrices of the layers, or A and B of their adapters, AdamW for the other parameters.

    Momentum 0.95 with Nesterov's look-ahead, orthogonalized in each layer by 5 steps of Newton-Schulz, times
    max(1, rows / columns)^0.5. Source: kellerjordan.github.io/posts/muon.
    """
    # Newton-Schulz needs little precision: its source runs in bfloat16. Its products here have the default one of their
    # float32 operands (a pass of bfloat16 on TPU, TF32 on NVIDIA), with sums and what is between them in float32.
    matrices = optax.contrib.muon(
        config.matrix_lr,
        weight_decay=config.weight_decay,
        mu_dtype="float32",
        muon_weight_dimension_numbers=ROWS_AND_COLUMNS,
    )
    by_width = optax.stateless(lambda updates, _: jax.tree.map(lambda x: width_factor(x) * x, updates))
    optimizers = {"matrix_lr": matrices, "lr": adamw(config)}
    for name in VOCABULARY.values():
        optimizers[name] = optax.chain(adamw(config, name), by_width)
    return optax.partition(optimizers, lambda params: jax.tree.map_with_path(rate_name, params))


OPTIMIZERS = {"adamw": adamw, "adafactor": adafactor, "muon": muon}


@dataclass(frozen=True)
class OptimizerConfig:
    """Optimizer.

    nanochat's recipe for RL: configs/nanochat.py.
    """

    optimizer: str = option(
        "adamw",
        "Optimizer; muon: Muon for the layers' matrices (or the A and B of their adapters), AdamW for all "
        "other parameters",
        list(OPTIMIZERS),
    )
    lr: float = option(
        1e-6,
        "Peak learning rate; with --optimizer muon that of norms and biases only; embedding, head and critic have "
        "options of their own",
        essential=True,
    )
    matrix_lr: float = option(0.02, "Peak learning rate of the layers' matrices with --optimizer muon")
    embedding_lr: float = option(
        0.2,
        "Peak learning rate of the embedding with --optimizer muon, times (width / 768)^-0.5. The default fits "
        "embeddings of standard deviation 1; Qwen's, near 0.02, need a lower rate",
    )
    unembedding_lr: float = option(
        0.004, "Peak learning rate of an untied head with --optimizer muon, times (width / 768)^-0.5"
    )
    critic_lr: float = option(1e-5, "Peak learning rate of the critic of --advantage gae, which AdamW trains")
    lr_schedule: str = option(
        "constant",
        "Schedule of all learning rates after warm-up; linear, cosine: they fall to 0 at the end of the run "
        "(--max_steps, or --num_epochs if that comes first)",
        ["constant", "linear", "cosine"],
    )
    warmup_steps: int = option(0, "Optimizer steps over which learning rates rise linearly to their peaks; 0: none")
    weight_decay: float = option(
        1e-2, "Weight decay in an optimizer step, as a multiple of the learning rate; norms and biases have none"
    )
    b1: float = option(0.9, "Decay rate of AdamW's first moment")
    b2: float = option(0.95, "Decay rate of AdamW's second moment")
    adam_eps: float = option(1e-8, "Epsilon of AdamW, added to the square root of the second moment")
    max_grad_norm: float = option(
        1.0, "Limit on the global norm of the gradient; a larger gradient is scaled down to it"
    )

    def __post_init__(self):
        for name in (*NOUNS, "warmup_steps", "weight_decay"):
            if getattr(self, name) < 0:
                raise UserError(f"--{name} must not be negative: raise it")
        if self.max_grad_norm <= 0 or self.adam_eps <= 0:
            raise UserError("--max_grad_norm and --adam_eps must be above 0: raise the one that is not")
        if not (0 <= self.b1 < 1 and 0 <= self.b2 < 1):
            raise UserError("--b1 and --b2 must be at least 0 and below 1: correct the one that is not")


def schedule(config: OptimizerConfig, progress: float) -> float:
    """Returns the share of the peak learning rates at this progress of the run, from 0 to 1, without the warm-up.

    It follows the run, not its updates, and so reaches its end however many updates a step makes.
    """
    schedules = {"constant": 1.0, "linear": 1.0 - progress, "cosine": (1 + math.cos(math.pi * progress)) / 2}
    return schedules[config.lr_schedule]


@cache  # so that members of a population with equal settings share programs
def make_optimizer(config: OptimizerConfig, has_critic: bool = False) -> optax.GradientTransformation:
    """Returns the optimizer after a clip of the global norm; the critic has an AdamW and a clip of its own.

    All learning rates are at their peaks: `apply_gradients` scales the updates by warm-up and schedule.
    """
    clip = optax.clip_by_global_norm(config.max_grad_norm)
    policy = optax.chain(clip, OPTIMIZERS[config.optimizer](config))
    if not has_critic:
        return policy
    critic = optax.chain(clip, adamw(config, "critic_lr"))

    def label(params: Params) -> dict[str, str]:
        return {name: CRITIC if name == CRITIC else "policy" for name in params}

    return optax.partition({"policy": policy, CRITIC: critic}, label)


def describe_optimizer(config: OptimizerConfig, params: Params) -> str:
    """Returns in one line the optimizer, and the number and peak learning rate of each kind of parameters."""
    nouns = NOUNS if config.optimizer == "muon" else NOUNS | {"lr": "parameters"}
    sizes, peaks = Counter(), {}
    for path, x in jax.tree.leaves_with_path(params):
        name = rate_name(path, x) if config.optimizer == "muon" or path[0].key == CRITIC else "lr"
        sizes[name] += x.size
        peaks[name] = getattr(config, name, 0) * (width_factor(x) if name in VOCABULARY.values() else 1)
    groups = [f"{noun} ({sizes[name]:,}) at {peaks[name]:.3g}" for name, noun in nouns.items() if name in sizes]
    warmup = f" after {config.warmup_steps} steps of warm-up" if config.warmup_steps else ""
    return f"{config.optimizer} for {', '.join(groups)}, {config.lr_schedule}{warmup}"
