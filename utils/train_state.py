"""Parameters, optimiser state and step; the optimiser."""

from dataclasses import dataclass
from typing import Any

import jax
import optax
from flax import struct
from jaxtyping import Int

from utils.batching import Array
from utils.config import option


@dataclass(frozen=True)
class OptimizerConfig:
    """Optimiser."""

    lr: float = option(1e-6, "learning rate at its peak")
    lr_schedule: str = option("constant", "after the warm-up", ["constant", "linear", "cosine"])
    warmup_steps: int = option(0, "optimiser steps from 0 to the peak")
    weight_decay: float = option(1e-2, "AdamW's, not on norms and biases")
    b1: float = option(0.9, "AdamW's")
    b2: float = option(0.95, "AdamW's")
    max_grad_norm: float = option(1.0, "gradients are scaled down to this global norm")
    train_vocab: bool = option(True, "train the embedding and the head too")

    def __post_init__(self):
        if self.lr < 0 or self.warmup_steps < 0 or self.weight_decay < 0 or self.max_grad_norm <= 0:
            raise ValueError("--lr, --warmup_steps and --weight_decay must not be negative, --max_grad_norm above 0")


@struct.dataclass
class TrainState:
    params: Any
    opt_state: Any
    step: Int[Array, ""]  # optimiser steps taken


def make_schedule(config: OptimizerConfig, total_steps: int) -> optax.Schedule:
    """Learning rate by optimiser step: warm-up, then constant, or down to 0 at `total_steps`."""
    rest = max(1, total_steps - config.warmup_steps)
    after = {
        "constant": optax.constant_schedule(config.lr),
        "linear": optax.linear_schedule(config.lr, 0.0, rest),
        "cosine": optax.cosine_decay_schedule(config.lr, rest),
    }[config.lr_schedule]
    # The step number of the first update is 0: starting the ramp there would waste it.
    ramp = optax.linear_schedule(config.lr / max(1, config.warmup_steps), config.lr, max(1, config.warmup_steps - 1))
    return optax.join_schedules([ramp, after], [config.warmup_steps])


def make_optimizer(config: OptimizerConfig, total_steps: int) -> optax.GradientTransformation:
    """AdamW behind a clip of the global norm."""

    def is_decayed(params):
        return jax.tree.map_with_path(lambda path, x: "norm" not in path[-1].key and "bias" not in path[-1].key, params)

    adamw = optax.adamw(
        make_schedule(config, total_steps), config.b1, config.b2, weight_decay=config.weight_decay, mask=is_decayed
    )
    optimizer = optax.chain(optax.clip_by_global_norm(config.max_grad_norm), adamw)
    if config.train_vocab:
        return optimizer

    def label(params):
        # Frozen means frozen: without this, weight decay would still move the embedding.
        return {name: "trained" if name.startswith("model.") and "embed" not in name else "frozen" for name in params}

    return optax.multi_transform({"trained": optimizer, "frozen": optax.set_to_zero()}, label)


def init_state(params: Any, optimizer: optax.GradientTransformation) -> TrainState:
    """State at step 0; Adam's moments are laid out as the parameters are."""
    return TrainState(params, jax.jit(optimizer.init)(params), jax.numpy.zeros((), jax.numpy.int32))
