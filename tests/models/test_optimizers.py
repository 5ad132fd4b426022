"""Optimizers against references in float64: Muon by the SVD, Adafactor and learning rates by their formulas.

Letters: L layers, D width.
"""

from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from core.learner import apply_gradients
from models.optimizers import OptimizerConfig, describe_optimizer, make_optimizer, schedule
from models.state import init_state
from tests.helpers import assert_close, on_layout, rounding
from tests.learning import SGD
from tests.oracles.layers import orthogonalized
from tests.processes import on_four_devices
from utils.devices.compile_log import Compilations
from utils.devices.sharding import Layout, single_device
from utils.devices.startup import DeviceConfig, make_layout

EMBED = "model.embed_tokens.weight"
LAYERS = "model.layers"
HEAD = "lm_head.weight"
L, D = 2, 12
SHAPES = {
    EMBED: (5, D),
    LAYERS: {"mlp.up_proj.weight": (L, D, D), "input_layernorm.weight": (L, D), "self_attn.q_proj.bias": (L, D)},
    "model.norm.weight": (D,),
    HEAD: (5, D),
}
NO_CLIP = {"max_grad_norm": 1e9}


def random_tree(shapes: dict, seed: int = 0) -> dict:
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda shape: np.float32(rng.normal(size=shape)), shapes, is_leaf=lambda x: type(x) is tuple)


def by_name(tree) -> dict[str, np.ndarray]:
    return {path[-1].key: np.asarray(x) for path, x in jax.tree.leaves_with_path(tree)}


def train(config: OptimizerConfig, params: dict, gradients, total_steps: int = 10) -> list[dict[str, np.ndarray]]:
    """Parameters by name, before and after each jitted update; `gradients`: trees, or a function of the parameters."""
    optimizer = make_optimizer(config)
    state = init_state(jax.tree.map(jnp.array, params), optimizer)
    history = [by_name(state.params)]
    for i, gradient in enumerate([gradients] * total_steps if callable(gradients) else gradients):
        gradient = gradient(state.params) if callable(gradient) else gradient
        factor = np.float32(schedule(config, i / total_steps))
        state, _ = apply_gradients(optimizer, config.warmup_steps, state, gradient, factor=factor)
        history.append(by_name(state.params))
    return history


# Muon


@pytest.mark.parametrize(
    ("shapes", "names"),
    [
        ({LAYERS: {"mlp.up_proj.weight": (L, 18, 8), "mlp.down_proj.weight": (L, 8, 18)}}, ("up_proj", "down_proj")),
        ({"mlp.up_proj.lora_B.weight": (L, 18, 8), "mlp.up_proj.lora_A.weight": (L, 8, 18)}, ("lora_B", "lora_A")),
    ],
)
def test_muon_orthogonalizes_each_layer_by_itself(shapes, names):
    params = random_tree(shapes)
    gradients = [random_tree(shapes, seed) for seed in (1, 2, 3)]
    for gradient in gradients:
        for x in by_name(gradient).values():
            x[1] *= 100  # which would drown the first layer, were they taken together
    config = OptimizerConfig(optimizer="muon", matrix_lr=0.1, weight_decay=0.2, **NO_CLIP)
    after = train(config, params, gradients)[-1]
    assert describe_optimizer(config, params) == "muon for matrices (576) at 0.1, constant"
    for part, scale in zip(names, ((18 / 8) ** 0.5, 1.0), strict=True):
        name = next(name for name in after if part in name)
        for layer in range(L):
            x = np.float64(by_name(params)[name][layer])
            momentum = 0.0
            for step, gradient in enumerate(gradients, 1):
                g = np.float64(by_name(gradient)[name][layer])
                momentum = 0.95 * momentum + 0.05 * g
                ahead = 0.95 * momentum / (1 - 0.95 ** (step + 1)) + 0.05 * g / (1 - 0.95**step)
                x = x - 0.1 * (scale * orthogonalized(ahead) + 0.2 * x)
            # Five times three products, with sums of 8 or 18 terms; the smallest singular value grows to about 1.
            size = max(np.abs(x).max(), 0.1 * scale * np.linalg.norm(ahead) / np.linalg.norm(ahead, -2))
            assert_close(after[name][layer], x, 5 * 3 * 18, size, err_msg=name)


# Learning rates


def test_parameter_groups_have_own_rates_and_one_schedule():
    rates = {"lr": 0.3, "lr_schedule": "linear", "b1": 0.8, "adam_eps": 1e-10, "weight_decay": 0}
    config = OptimizerConfig(optimizer="muon", **rates, **NO_CLIP)
    gradient = jax.tree.map(np.ones_like, random_tree(SHAPES))
    gradient[LAYERS]["mlp.up_proj.weight"][:] = np.eye(D)
    history = train(config, random_tree(SHAPES), [gradient] * 4, total_steps=4)
    width = (D / 768) ** -0.5
    peaks = {"embed_tokens": 0.2 * width, "lm_head": 0.004 * width, "up_proj": 0.02}  # the others: --lr
    for name in history[0]:
        peak = next((rate for part, rate in peaks.items() if part in name), 0.3)
        # AdamW moves by its rate where the gradient never changes; of the identity all singular values are equal.
        direction = orthogonalized(np.eye(D)) if "up_proj" in name else 1.0
        for i, share in enumerate([1, 0.75, 0.5, 0.25]):
            moved = history[i][name] - history[i + 1][name]
            expected = np.broadcast_to(share * peak * direction, moved.shape)
            # A difference of two rounded numbers; of the move itself, the identity's polynomial, or 1 - 0.95^t.
            tolerance = {"rtol": rounding(5 * 3 * D, 20), "atol": rounding(2, np.abs(history[i][name]).max())}
            np.testing.assert_allclose(moved, expected, err_msg=name, **tolerance)


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "adafactor"])
def test_norms_do_not_decay(optimizer):
    params = random_tree(SHAPES)
    rates = dict.fromkeys(("lr", "matrix_lr", "embedding_lr", "unembedding_lr"), 0.1)
    config = OptimizerConfig(optimizer, **rates, weight_decay=0.5)
    before, after = train(config, params, [jax.tree.map(np.zeros_like, params)])
    for name, x in before.items():
        is_vocabulary = name in (EMBED, HEAD)
        rate = 0.1 * (D / 768) ** -0.5 if optimizer == "muon" and is_vocabulary else 0.1
        is_decayed = name == "mlp.up_proj.weight" or is_vocabulary
        factor = 1 - 0.5 * rate if is_decayed else 1.0
        np.testing.assert_allclose(after[name], factor * x, rtol=rounding(4) if factor < 1 else 0, err_msg=name)


# Memory


def num_bytes(tree) -> int:
    return sum(prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def test_adafactor_factors_each_layer_by_rows_and_columns():
    shapes = {LAYERS: {"mlp.up_proj.weight": (L, 128, 160)}, "model.norm.weight": (160,)}
    params, gradient = random_tree(shapes), random_tree(shapes, 1)
    before, after = train(OptimizerConfig("adafactor", lr=0.1, weight_decay=0.2, **NO_CLIP), params, [gradient])
    g = np.float64(gradient[LAYERS]["mlp.up_proj.weight"])
    rows = np.square(g).mean(2, keepdims=True)
    columns = np.square(g).mean(1, keepdims=True)
    direction = g / np.sqrt(rows * columns / rows.mean(1, keepdims=True))
    direction /= max(1, np.sqrt(np.square(direction).mean()))
    expected = before["mlp.up_proj.weight"] - 0.1 * (direction + 0.2 * before["mlp.up_proj.weight"])
    assert_close(after["mlp.up_proj.weight"], expected, 128 + 160)  # means over rows and columns
    states = [jax.eval_shape(make_optimizer(OptimizerConfig(name)).init, params) for name in ("adafactor", "adamw")]
    assert 20 * num_bytes(states[0]) < num_bytes(states[1])


# Layout


def assert_compiled_once(layout: Layout, **flags) -> None:
    """Two updates are one compilation, and moments are laid out like their parameters."""
    optimizer = make_optimizer(OptimizerConfig(**flags))
    state = init_state(on_layout(layout), optimizer)
    shardings = {path[-1].key: x.sharding for path, x in jax.tree.leaves_with_path(state.params)}
    for _, moments in optax.tree.get_all_with_path(state.opt_state, "mu"):
        for path, x in jax.tree.leaves_with_path(moments):
            assert x.sharding == shardings[path[-1].key]
    num_programs = []
    with Compilations() as compilations:
        for _ in range(2):
            gradient = jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype, device=x.sharding), state.params)
            state, _ = apply_gradients(optimizer, 0, state, gradient)
            num_programs.append(len(compilations.take_programs()))
    assert num_programs[0] > 0
    assert num_programs[1] == 0


def four_devices() -> Layout:
    return make_layout(DeviceConfig(mesh="fsdp=2,tp=2"))


def test_the_second_update_does_not_compile():
    assert_compiled_once(single_device())
    assert_compiled_once(single_device(), optimizer="muon")


@pytest.mark.slow
def test_the_second_update_does_not_compile_on_four_devices():
    on_four_devices(__file__, "assert_compiled_once(four_devices(), optimizer='muon')")


@pytest.mark.parametrize("flags", [{"matrix_lr": -1.0}, {"embedding_lr": -1.0}, {"b1": 1.0}, {"adam_eps": 0.0}])
def test_what_is_out_of_range_is_named(flags):
    with pytest.raises(ValueError, match=f"--{next(iter(flags))}"):
        OptimizerConfig(**flags)


@pytest.mark.parametrize(
    ("lr_schedule", "warmup_steps", "expected"),
    [
        ("constant", 0, [1, 1, 1, 1, 1, 1, 1, 1]),
        ("constant", 4, [0.25, 0.5, 0.75, 1, 1, 1, 1, 1]),
        ("linear", 0, [1, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125]),
        ("linear", 4, [0.25, 0.4375, 0.5625, 0.625, 0.5, 0.375, 0.25, 0.125]),  # warm-up x schedule
        ("cosine", 0, [(1 + np.cos(np.pi * i / 8)) / 2 for i in range(8)]),
    ],
)
def test_learning_rates(lr_schedule, warmup_steps, expected):
    config = OptimizerConfig(lr_schedule=lr_schedule, warmup_steps=warmup_steps)
    state = init_state({"x": jnp.zeros(2)}, SGD)
    multipliers = []
    for i in range(8):
        factor = np.float32(schedule(config, i / 8))
        state, metrics = apply_gradients(SGD, warmup_steps, state, {"x": jnp.ones(2)}, factor=factor)
        multipliers.append(float(metrics["lr_multiplier"]))
    assert_close(multipliers, expected, 3)
    assert_close(state.params["x"], -np.sum(expected), 8 * 3)
