"""Every family of models: the sampler agrees with the trainer, on one device and on four."""

from functools import cache, partial
from pathlib import Path

import jax
import numpy as np
import pytest

from core.records import Completions
from core.sampler import Sampler
from models import decoder
from models.architecture import Decoder
from models.checkpoint import load_model
from models.families import FAMILIES
from models.names import Params
from tests.helpers import assert_close, depth, gradient_depth, slow
from tests.processes import on_four_devices
from utils.devices.sharding import Layout, single_device
from utils.devices.startup import DeviceConfig, make_layout

FIXTURES = Path(__file__).parents[1] / "fixtures"
NAMES = sorted(file.parent.name for file in FIXTURES.glob("*/expected.npz"))
FIRST = {name.split("-")[0]: name for name in reversed(NAMES)}  # a shape of each family
LENGTHS, LIMIT, G = (9, 4, 14), 40, 4  # of prompts; of completions
STOPS = tuple(range(4))  # so that rows end at different times, and compaction takes place


def test_every_family_has_shapes():
    found = {load_model(FIXTURES / name)[0].family for name in NAMES}
    assert found == set(FAMILIES)


logits = jax.jit(decoder.logits, static_argnums=0)


def generate(model: Decoder, params: Params, layout: Layout) -> Completions:
    """Draws in segments, so that the cache grows and rows that have ended leave."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, model.vocab_size, length).tolist() for length in LENGTHS]
    sampler = Sampler(model, LIMIT, STOPS, segment=10, layout=layout)
    return sampler.generate(sampler.load_weights(params), prompts, np.arange(len(prompts)), G, jax.random.key(0))


def loss(model: Decoder, tokens: np.ndarray, mask: np.ndarray, params: Params) -> jax.Array:
    logprobs = decoder.token_outputs(model, params, tokens).logprobs
    return -(logprobs * mask).sum() / mask.sum()


@cache
def on_one_device(name: str) -> tuple[Decoder, Params, Completions]:
    model, params, _ = load_model(FIXTURES / name)
    return model, params, generate(model, params, single_device())


FEW = ("qwen3moe-sharded", "qwen3_5-images")


@pytest.mark.parametrize("name", [*FEW, *slow(*(name for name in NAMES if name not in FEW))])
def test_the_sampler_and_the_trainer_agree(name):
    model, params, drawn = on_one_device(name)
    assert len(set(drawn.lengths - drawn.prompt_lengths)) > 3, "else no row has left the others"
    outputs = jax.jit(partial(decoder.token_outputs, model))(params, drawn.tokens)
    size = np.abs(logits(model, params, drawn.tokens)).max()
    expected = np.where(drawn.mask, outputs.logprobs, 0)
    assert_close(drawn.logprobs, expected, depth(model, drawn.tokens.shape[1]), size)


def on_mesh(names: list[str], folder: str) -> None:
    """Writes what is drawn, and the gradient of it, on four devices."""
    layout = make_layout(DeviceConfig(mesh="fsdp=2,tp=2"))
    for name in names:
        model, params, _ = load_model(FIXTURES / name, layout)
        drawn = generate(model, params, layout)
        rows = layout.put((drawn.tokens, drawn.mask))
        gradient = layout.fetch(jax.jit(jax.grad(partial(loss, model, *rows)))(params))
        arrays = {str(i): x for i, x in enumerate(jax.tree.leaves(gradient))}
        np.savez(Path(folder) / f"{name}.npz", tokens=drawn.tokens, logprobs=drawn.logprobs, **arrays)


@pytest.mark.slow
@pytest.mark.parametrize("families", [("qwen3moe",), tuple(sorted(set(FIRST) - {"qwen3moe"}))], ids=" ".join)
def test_four_devices_draw_and_learn_as_one(families, tmp_path):
    names = [FIRST[family] for family in families]
    on_four_devices(__file__, f"on_mesh({names!r}, {str(tmp_path)!r})")
    for name in names:
        model, params, drawn = on_one_device(name)
        with np.load(tmp_path / f"{name}.npz") as arrays:
            found = dict(arrays)
        np.testing.assert_array_equal(found["tokens"], drawn.tokens, err_msg=name)
        size = np.abs(logits(model, params, drawn.tokens)).max()
        operations = depth(model, drawn.tokens.shape[1])
        assert_close(found["logprobs"], drawn.logprobs, operations, size, err_msg=name)
        gradient = jax.jit(jax.grad(partial(loss, model, drawn.tokens, drawn.mask)))(params)
        operations = gradient_depth(model, drawn.tokens.shape[1], drawn.tokens.size)
        for i, expected in enumerate(jax.tree.leaves(gradient)):
            size = 10 * np.abs(expected).max()
            assert_close(found[str(i)], expected, operations, size, err_msg=f"{name} {i}")
