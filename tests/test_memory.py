"""What is chosen by the memory there is, and what is said where it does not suffice."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import pytest

from bench.common import shape
from core.grpo import Config
from models.qwen3 import Qwen, is_spec
from utils.devices.memory import Sizes, fit_memory, measure, out_of_memory, update_bytes
from utils.devices.sharding import Layout, single_device
from utils.training.state import TrainState, make_optimizer

GB = 10**9


@dataclass(frozen=True)
class Device(Layout):
    """One accelerator with a memory of our choice."""

    device_memory: int = 0
    is_cpu: bool = False


def settings_for(**settings) -> Config:
    return replace(Config(num_generation_tokens=1024), **settings)


def state_of(model, config: Config) -> TrainState:
    """Shapes where a run has arrays."""
    here = single_device().replicated
    params = jax.tree.map(lambda spec: jax.ShapeDtypeStruct(spec.shape, jnp.float32), model.table(), is_leaf=is_spec)
    state = TrainState(params, jax.eval_shape(make_optimizer(config).init, params), (), ())
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), state)


def fit(name: str, gigabytes: float, **settings) -> tuple[Config, list[str], Sizes]:
    layout, config = Device(single_device().mesh, int(gigabytes * GB)), settings_for(**settings)
    model = replace(shape(name, dtype="bfloat16"), mesh=layout.mesh)
    state = state_of(model, config)
    found, fitted, said = fit_memory(config, model, layout, state)
    assert fitted == replace(model, remat=found.remat)
    return found, said, measure(found, model, layout, state)


def test_a_cpu_gets_small_microbatches():
    config, model = settings_for(num_generation_tokens=128, prompt_length=64), shape("small")
    layout = single_device()
    found, _, _ = fit_memory(config, replace(model, mesh=layout.mesh), layout, state_of(model, config))
    assert (found.remat, found.tokens_per_microbatch) == ("none", 2048)


# GB that `accumulate` needs in all, as compiled for an H200, 16 rows x 1024 tokens: bench/h200.py
COMPILED = {
    ("Qwen3-0.6B", "plain", "none"): 79.9, ("Qwen3-0.6B", "plain", "dots"): 20.2, ("Qwen3-0.6B", "plain", "full"): 9.6,
    ("Qwen3-0.6B", "cudnn", "none"): 49.3, ("Qwen3-0.6B", "cudnn", "dots"): 19.4, ("Qwen3-0.6B", "cudnn", "full"): 8.6,
    ("Qwen3-1.7B", "cudnn", "none"): 89.6, ("Qwen3-1.7B", "cudnn", "dots"): 41.0,
    ("Qwen3-4B", "cudnn", "none"): 185.7, ("Qwen3-4B", "cudnn", "dots"): 86.9,
}  # fmt: skip


@pytest.mark.parametrize(("name", "kernel", "remat"), COMPILED)
def test_estimates_are_near_what_is_compiled(name, kernel, remat, monkeypatch):
    monkeypatch.setattr(Qwen, "kernel", kernel)
    model = shape(name, dtype="bfloat16")
    params = 4 * model.num_parameters
    sizes = Sizes(held=params, gradients=2 * params, sampling_copy=0, kv_row=0, available=0)
    found = update_bytes(sizes, model, remat, 16 * 1024, 1024) / GB
    assert 0.94 < found / COMPILED[name, kernel, remat] < 1.15


def test_the_more_memory_the_less_is_recomputed():
    found = [fit("Qwen3-0.6B", memory)[0] for memory in (20, 40, 80, 1000)]
    order = [("full", "dots", "none").index(each.remat) for each in found]
    assert order == sorted(order) and order[0] == 0 and order[-1] == 2
    assert found[-1].tokens_per_microbatch == 32768
    for memory in (20, 40, 80):
        config, said, sizes = fit("Qwen3-0.6B", memory)
        model, tokens = shape("Qwen3-0.6B", dtype="bfloat16"), config.tokens_per_microbatch
        assert update_bytes(sizes, model, config.remat, tokens, 1536) < 0.9 * memory * GB
        assert tokens == 32768 or update_bytes(sizes, model, config.remat, 2 * tokens, 1536) > 0.9 * memory * GB
        assert not any("will not fit" in each for each in said[1:]) or "KV cache" in said[1]


def test_what_the_user_says_is_done():
    config, *_ = fit("Qwen3-0.6B", 140, remat="full", tokens_per_microbatch=4096)
    assert (config.remat, config.tokens_per_microbatch) == ("full", 4096)
    config, *_ = fit("Qwen3-0.6B", 30, tokens_per_microbatch=4096)
    assert (config.remat, config.tokens_per_microbatch) == ("dots", 4096)


def test_what_does_not_fit_is_said():
    _, said, sizes = fit("Qwen3-1.7B", 80, inference_batch_per_device=512)
    fitting = int(said[1].rsplit(" ", 1)[1])
    rest = sizes.available - sizes.held - sizes.sampling_copy
    assert "KV cache" in said[1] and fitting * sizes.kv_row <= rest < (fitting + 1) * sizes.kv_row
    _, said, _ = fit("Qwen3-0.6B", 30, tokens_per_microbatch=1 << 18, inference_batch_per_device=8)
    assert "lower --tokens_per_microbatch to 131072" in said[1]
    _, said, _ = fit("Qwen3-8B", 80)
    assert any("--optimizer adafactor" in each for each in said)


def test_optimizers_and_dtypes_count():
    held = [fit("Qwen3-1.7B", 80, **settings)[2].held for settings in (
        {}, {"mu_dtype": "bfloat16"}, {"optimizer": "adafactor"}
    )]  # fmt: skip
    assert [round(each / 1720574976) for each in held] == [12, 10, 4]
    gradients = [fit("Qwen3-1.7B", 80, grad_dtype=dtype)[2].gradients for dtype in ("", "bfloat16")]
    assert [round(each / 1720574976) for each in gradients] == [8, 6]


def test_an_allocation_that_fails_becomes_a_sentence(capsys):
    with pytest.raises(SystemExit), out_of_memory("tokens_per_microbatch", 16384, " or set --remat full"):
        jnp.zeros((1 << 45,), jnp.int8).block_until_ready()
    assert "lower --tokens_per_microbatch from 16384 to 8192 or set --remat full;" in capsys.readouterr().err
    with pytest.raises(jax.errors.JaxRuntimeError), out_of_memory("tokens_per_microbatch", 16384):
        raise jax.errors.JaxRuntimeError("INTERNAL: something else")
