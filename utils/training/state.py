"""Parameters, optimiser state and step; the optimisers."""

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Int, UInt

from utils.settings.config import option
from utils.settings.errors import UserError
from utils.training.batching import Array

VOCABULARY = {"model.embed_tokens.weight": "embedding_lr", "lm_head.weight": "unembedding_lr"}
CRITIC = "critic"  # params[CRITIC], where there is one
NOUNS = {
    "matrix_lr": "matrices",
    "embedding_lr": "the embedding",
    "unembedding_lr": "the head",
    "lr": "the rest",
    "critic_lr": "the critic",
}
ROWS_AND_COLUMNS = optax.contrib.MuonDimensionNumbers(reduction_axis=-1, output_axis=-2)  # of [L, out, in]


@dataclass(frozen=True)
class OptimizerConfig:
    """Optimiser.

    nanochat's recipe for RL: --optimizer muon --init_lr_frac 0.05 --lr_schedule linear --b1 0.8 --adam_eps 1e-10
    --weight_decay 0. Source: github.com/karpathy/nanochat, scripts/chat_rl.py
    """

    optimizer: str = option("adamw", "muon: AdamW for all but the layers' matrices", ["adamw", "muon", "adafactor"])
    lr: float = option(1e-6, "learning rate at its peak; with muon that of norms, biases and value head only")
    matrix_lr: float = option(0.02, "with --optimizer muon: that of the matrices of the layers")
    embedding_lr: float = option(
        0.2, "with --optimizer muon: that of the embedding, also of a tied one, x (width / 768)^-0.5; made for weights "
        "of deviation 1: Qwen's, near 0.02, need less"
    )  # fmt: skip
    unembedding_lr: float = option(0.004, "with --optimizer muon: that of an untied head, x (width / 768)^-0.5")
    critic_lr: float = option(1e-5, "with --advantage gae: that of the critic, by AdamW")
    init_lr_frac: float = option(1.0, "all learning rates are multiplied by it")
    lr_schedule: str = option(
        "constant", "course of all learning rates: constant, or down to 0 at the end of the run (by its steps, or by "
        "its problems with --num_epochs)", ["constant", "linear", "cosine"]
    )  # fmt: skip
    warmup_steps: int = option(0, "optimiser steps in which the learning rate rises linearly to its peak")
    weight_decay: float = option(1e-2, "x learning rate, per step; not on norms and biases")
    b1: float = option(0.9, "AdamW's")
    b2: float = option(0.95, "AdamW's")
    adam_eps: float = option(1e-8, "AdamW's")
    mu_dtype: str = option("", "AdamW's and Muon's first moment; empty: float32", ["", "bfloat16", "float32"])
    max_grad_norm: float = option(1.0, "gradients are scaled down to this global norm")
    train_vocab: bool = option(True, "train the embedding and the head too")

    def __post_init__(self):
        for name in (*NOUNS, "init_lr_frac", "warmup_steps", "weight_decay"):
            if getattr(self, name) < 0:
                raise UserError(f"--{name} must not be negative")
        if self.max_grad_norm <= 0 or self.adam_eps <= 0:
            raise UserError("--max_grad_norm and --adam_eps must be above 0")
        if not (0 <= self.b1 < 1 and 0 <= self.b2 < 1):
            raise UserError("--b1 and --b2 must be at least 0 and below 1")


@struct.dataclass
class TrainState:
    params: Any
    opt_state: Any
    step: Int[Array, ""]  # optimiser steps taken
    num_skipped: Int[Array, ""]  # updates in a row that were not finite


def lr_multiplier(config: OptimizerConfig, progress: float, num_updates: int) -> float:
    """Returns the share of the peak learning rates at which an update is made: warm-up times schedule.

    The warm-up counts optimiser steps (`num_updates` were made before this one). The schedule follows the progress of
    the run, from 0 to 1, and so reaches its end however many updates a step makes.
    """
    warmup = min(1.0, (num_updates + 1) / max(1, config.warmup_steps))
    schedules = {"constant": 1.0, "linear": 1.0 - progress, "cosine": (1 + math.cos(math.pi * progress)) / 2}
    return warmup * schedules[config.lr_schedule]


def rate_name(path: tuple, x: Array) -> str:
    """The option that holds a parameter's learning rate under --optimizer muon."""
    if path[0].key == CRITIC:
        return "critic_lr"
    if path[0].key == "model.layers":
        return "matrix_lr" if x.ndim == 3 else "lr"
    return VOCABULARY.get(path[0].key, "lr")


def width_factor(x: Array) -> float:
    """What nanochat multiplies the learning rates of embedding and head by: they were tuned at a width of 768."""
    return (x.shape[-1] / 768) ** -0.5


def make_optimizer(config: OptimizerConfig, has_critic: bool = False) -> optax.GradientTransformation:
    """AdamW, Adafactor, or Muon with AdamW, behind a clip of the global norm; the critic has an AdamW of its own.

    All learning rates are at their peaks: `lr_multiplier` scales the updates.

    Muon: momentum 0.95 with Nesterov's look-ahead, orthogonalised in each layer by 5 steps of Newton-Schulz, times
    max(1, rows / columns)^0.5. Sources: kellerjordan.github.io/posts/muon; arXiv 1711.05101 (AdamW), 1804.04235
    (Adafactor; its --lr is absolute, as AdamW's, not a share of the parameter).
    """

    def is_decayed(params):
        return jax.tree.map_with_path(lambda path, x: "norm" not in path[-1].key and "bias" not in path[-1].key, params)

    def rate(name: str) -> float:
        return config.init_lr_frac * getattr(config, name)

    decay, moment = config.weight_decay, config.mu_dtype or "float32"

    def adamw(name: str = "lr"):
        return optax.adamw(
            rate(name), config.b1, config.b2, config.adam_eps, mu_dtype=moment, weight_decay=decay, mask=is_decayed
        )

    def adafactor():
        # The parts of optax.adafactor, whose own weight decay does not follow the learning rate.
        decayed, scaled = optax.add_decayed_weights(decay, is_decayed), optax.scale_by_learning_rate(rate("lr"))
        return optax.chain(optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0), decayed, scaled)

    def muon():
        matrices = optax.contrib.muon(
            rate("matrix_lr"), weight_decay=decay, mu_dtype=moment, muon_weight_dimension_numbers=ROWS_AND_COLUMNS
        )
        by_width = optax.stateless(lambda updates, _: jax.tree.map(lambda x: width_factor(x) * x, updates))
        vocabulary = {name: optax.chain(adamw(name), by_width) for name in VOCABULARY.values()}
        parts = {"matrix_lr": matrices, "lr": adamw()} | vocabulary
        return optax.partition(parts, lambda params: jax.tree.map_with_path(rate_name, params))

    def clipped(optimizer):
        return optax.chain(optax.clip_by_global_norm(config.max_grad_norm), optimizer)

    policy = clipped({"adamw": adamw, "adafactor": adafactor, "muon": muon}[config.optimizer]())
    if config.train_vocab and not has_critic:
        return policy

    def label(params):
        # Frozen means frozen: without this, weight decay would still move the embedding.
        frozen = () if config.train_vocab else VOCABULARY
        return {name: CRITIC if name == CRITIC else "frozen" if name in frozen else "policy" for name in params}

    return optax.partition(
        {"policy": policy, CRITIC: clipped(adamw("critic_lr")), "frozen": optax.set_to_zero()}, label
    )


def describe_optimizer(config: OptimizerConfig, params: Any) -> str:
    """In one line: what is optimised how, with numbers of parameters and learning rates at their peak."""
    is_muon, sizes, peaks = config.optimizer == "muon", Counter(), {}
    for path, x in jax.tree.leaves_with_path(params):
        is_frozen = path[0].key in VOCABULARY and not config.train_vocab
        name = "frozen" if is_frozen else rate_name(path, x) if is_muon or path[0].key == CRITIC else "lr"
        factor = width_factor(x) if name in VOCABULARY.values() else 1.0
        sizes[name] += x.size
        peaks[name] = f"{factor * config.init_lr_frac * getattr(config, name, 0.0):.3g}"
    parts = [f"{NOUNS[name]} ({sizes[name]:,}) at {peaks[name]}" for name in NOUNS if name in sizes]
    simple = f"{config.optimizer} for {sizes['lr']:,} parameters at {peaks['lr']}"
    simple += f", AdamW for {parts[-1]}" * (CRITIC in params)
    text = f"Muon for {parts[0]}, AdamW for {', '.join(parts[1:])}" if is_muon else simple
    text += f", {config.lr_schedule}" + f" after {config.warmup_steps} steps of warm-up" * (config.warmup_steps > 0)
    if "embedding_lr" in sizes and "lm_head.weight" not in params:
        text += "; the tied embedding takes the embedding rate"
    return text + f"; {sizes['frozen']:,} frozen" * ("frozen" in sizes)


def init_state(params: Any, optimizer: optax.GradientTransformation) -> TrainState:
    """State at step 0, laid out as updates leave it: moments like their parameters, the rest on every device.

    With other shardings than those of an update's results, the second update would compile anew.
    """
    step, num_skipped = (jnp.zeros((), jnp.int32) for _ in range(2))
    # Outside of jit, which would put the moments of all parameters on one device.
    state = TrainState(params, optimizer.init(params), step, num_skipped)
    mesh = getattr(jax.tree.leaves(params)[0].sharding, "mesh", None)

    def settle(x: Array) -> Array:
        spec = [axis if axis and mesh.shape[axis] > 1 else None for axis in getattr(x.sharding, "spec", ())]
        while spec and spec[-1] is None:
            spec.pop()
        return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))  # parameters are not copied

    return jax.tree.map(settle, state) if mesh else state


@jax.jit
def fingerprint(state: Any) -> list[UInt[Array, ""]]:
    """A number for each array that tells whether a bit of it has changed; it is the same on every mesh.

    The sum, modulo 2^32, of all elements' bits mixed with their place: one wrong element always shows, more of them but
    once in 4 billion. Source: the mixing of MurmurHash3's 32-bit finaliser.
    """

    def mixed(x: Array) -> Array:
        x = jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}").astype(jnp.uint32)
        stride = 0x9E3779B1
        for axis in reversed(range(x.ndim)):
            x += jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis) * jnp.uint32(stride)
            stride = stride * x.shape[axis] % 2**32
        x = (x ^ x >> 16) * jnp.uint32(0x85EBCA6B)
        x = (x ^ x >> 13) * jnp.uint32(0xC2B2AE35)
        return (x ^ x >> 16).sum(dtype=jnp.uint32)

    return [mixed(x) for x in jax.tree.leaves(state)]
