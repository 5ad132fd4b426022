"""Mixtures of experts: against a loop over tokens, and on meshes. Whole models are in test_model.py."""

from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from core.records import Completions
from core.sampler import Sampler
from models import decoder, experts
from models.architecture import Decoder
from models.experts import Experts
from models.names import LAYERS, Params
from tests.helpers import MODEL as DENSE
from tests.helpers import assert_close, depth, random_params
from tests.oracles.layers import loop_over_tokens
from tests.processes import on_four_devices
from utils.devices.sharding import MESH_AXES, single_device
from utils.devices.startup import DeviceConfig, make_layout

FIXTURES = Path(__file__).parents[1] / "fixtures"
D, E, F, K = 12, 5, 6, 2  # width, experts, width of an expert, experts of a token
MODEL = replace(DENSE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, norm_topk_prob=True)

logits = jax.jit(decoder.logits, static_argnums=0)
compute = jax.jit(decoder.token_outputs, static_argnums=0)


def arguments(rows: int, columns: int) -> tuple[jax.Array, Experts, jax.Array, jax.Array]:
    """Returns a router, matrices, tokens, and a direction to multiply outputs by."""
    rng = np.random.default_rng(0)
    shapes = (D, E), (E, F, D), (E, F, D), (E, F, D)
    router, *matrices = (jnp.float32(rng.normal(0, 0.5, shape)) for shape in shapes)
    x, direction = (jnp.float32(rng.standard_normal((rows, columns, D))) for _ in range(2))
    return router, Experts(*matrices), x, direction


def outputs_and_gradients(f, router, matrices, x, direction) -> list[jax.Array]:
    """Returns f(router, matrices, x), and its product with the direction differentiated by all of them."""

    @jax.jit
    def both(*inputs):
        outputs, pull_back = jax.vjp(f, *inputs)
        return outputs, pull_back(direction)

    return jax.tree.leaves(both(router, matrices, x))


def mixture(product: str, normalize: bool, mesh, recorded=None):
    """Returns the function of router, matrices and tokens that is tested."""

    def f(router, matrices, x):
        routing = experts.choose_experts(x @ router, K, normalize, recorded)
        return experts.mix_experts(matrices, x, routing, jax.nn.silu, product, mesh)

    return f


def assert_is_loop(f, normalize: bool, chosen: np.ndarray, values) -> None:
    """Asserts that f has the outputs and gradients of a loop over tokens and their chosen experts."""
    found = outputs_and_gradients(f, *values)
    expected = outputs_and_gradients(loop_over_tokens(normalize, chosen), *values)
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other, 3 * (2 * D + E + F) + 10)  # sums over tokens, too


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("product", ["dense", *experts.PRODUCTS])
def test_experts_equal_a_loop_over_tokens(product, normalize, monkeypatch):
    if product == "tokamax":
        pytest.importorskip("tokamax", reason="tokamax is needed by this case alone")
    # Few tokens would have another product.
    monkeypatch.setattr(experts, "FEW_TOKENS", 0)
    router, _, x, _ = values = arguments(2, 5)
    chosen = np.argsort(x @ router).reshape(-1, E)[:, -K:]
    assert len(np.unique(chosen)) == E, "every expert has tokens"
    assert_is_loop(mixture(product, normalize, single_device().mesh), normalize, chosen, values)


def test_recorded_experts_are_weighted_by_the_router_of_today():
    """Any of them, and its gradient is that of the whole softmax; where none is recorded, the likeliest are taken."""
    router, _, x, _ = values = arguments(2, 5)
    recorded = np.argsort(np.random.default_rng(1).random((10, E)))[:, :K] + 1
    recorded[::3] = 0
    likeliest = np.argsort(x @ router).reshape(-1, E)[:, -K:]
    chosen = np.where(recorded > 0, recorded - 1, likeliest)
    assert_is_loop(mixture("dense", True, None, recorded.reshape(2, 5, K)), True, chosen, values)


def draw(model: Decoder, prompts: list[list[int]]) -> Completions:
    """Draws completions in several segments, some of which end early so that slots are compacted."""
    sampler = Sampler(model, 24, tuple(range(20)), segment=8)
    weights = sampler.load_weights(random_params(model))
    return sampler.generate(weights, prompts, np.arange(len(prompts)), 8, jax.random.key(0))


def assert_sampled(model: Decoder, params: Params, drawn: Completions, routes) -> None:
    """Asserts that the training pass gives the log-probabilities of the sampler."""
    logprobs = compute(model, params, drawn.tokens, routes=routes).logprobs
    largest = np.abs(logits(model, params, drawn.tokens)).max()
    operations = depth(model, drawn.tokens.shape[1])
    assert_close(logprobs[drawn.mask], drawn.logprobs[drawn.mask], operations, largest)


def test_recorded_experts_stand_in_the_columns_of_their_tokens():
    """Recorded experts are those of the forward pass."""
    drawn = draw(MODEL, [[30, 40, 50, 60], [70, 80], list(range(90, 100))])
    assert drawn.routes.shape == (*drawn.tokens.shape, 2, 2)
    assert (drawn.routes > 0).all(axis=(2, 3)).tolist() == drawn.mask.tolist()
    assert_sampled(MODEL, random_params(MODEL), drawn, drawn.routes)
    assert_sampled(MODEL, random_params(MODEL), drawn, None)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        assert_sampled(MODEL, random_params(MODEL), drawn, np.roll(drawn.routes, 1, axis=1))


def test_training_takes_the_experts_of_the_sampler():
    """A single expert of weight 1 stays the same whatever the router becomes; one-token prompts are recorded wholly."""
    model = replace(MODEL, num_experts_per_tok=1)
    drawn = draw(model, [[30], [40]])
    params = random_params(model)
    routers = "mlp.gate.weight"
    turned = params | {LAYERS: params[LAYERS] | {routers: -params[LAYERS][routers]}}
    assert_sampled(model, turned, drawn, drawn.routes)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        assert_sampled(model, turned, drawn, None)


def test_an_expert_without_tokens_has_no_gradient(monkeypatch):
    # Few tokens would have another product.
    monkeypatch.setattr(experts, "FEW_TOKENS", 0)
    router, matrices, x, direction = arguments(2, 5)
    values = jnp.abs(router).at[:, 3].set(-1), matrices, jnp.abs(x), direction
    for product in ("dense", "ragged"):
        _, _, gate, up, down, _ = outputs_and_gradients(mixture(product, True, single_device().mesh), *values)
        for gradient in (gate, up, down):
            assert gradient.any() and not gradient[3].any()


def test_products_are_chosen_by_device(monkeypatch):
    @dataclass(frozen=True)
    class Device:
        device_kind: str
        id: int = 0

    def choose(kind: str) -> str:
        device = np.array([Device(kind)]).reshape(1, 1, 1)
        return experts.choose_product(jax.sharding.Mesh(device, MESH_AXES))

    for is_installed, product in ((True, "tokamax"), (None, "dense")):
        # The package is installed, or is not.
        monkeypatch.setattr(experts, "find_spec", {"tokamax": is_installed}.get)
        assert choose("NVIDIA H200") == product
        assert choose("TPU v5e") == "ragged"
        assert choose("cpu") == experts.choose_product(None) == "dense"


def same_layer_on_four_devices() -> None:
    """Asserts that sorted products are the same on meshes, also where the width does not divide."""
    experts.FEW_TOKENS = 0
    values = arguments(4, 3)
    expected = outputs_and_gradients(mixture("dense", True, None), *values)
    for mesh in ("tp=2,fsdp=2", "tp=4", "data=2,fsdp=2"):  # 6 is no multiple of 4
        layout = make_layout(DeviceConfig(mesh=mesh))
        found = outputs_and_gradients(mixture("ragged", True, layout.mesh), *values)
        for one, other in zip(found, expected, strict=True):
            assert_close(one, other, 3 * (2 * D + E + F) + 12, err_msg=mesh)


@pytest.mark.slow
def test_experts_are_the_same_on_meshes():
    on_four_devices(__file__, "same_layer_on_four_devices()")
