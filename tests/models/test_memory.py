"""What is chosen by the memory there is, and what is said where it does not suffice."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh

from bench.common import shape
from bench.compiled import state_shapes
from core.config import Config
from core.extensions.teacher import second_layout
from models.architecture import Decoder, is_spec
from models.attention import SKIPPING
from models.memory import (
    BESIDE,
    BETWEEN,
    ELSEWHERE,
    MemoryPlan,
    Sizes,
    choose_rollout,
    describe_rollout,
    describe_whole,
    fit_memory,
    kv_row_bytes,
    measure_sizes,
    out_of_memory,
    rows_that_fit,
    sampling_room,
    update_bytes,
)
from models.optimizers import OptimizerConfig, make_optimizer
from models.state import TrainState
from tests.helpers import HYBRID, MODEL
from utils.batching import MicrobatchShape, bucket, choose_shapes
from utils.devices.sharding import MESH_AXES, Layout, bytes_on_device, single_device
from utils.settings.config import make_config
from utils.settings.errors import UserError

GB = 10**9


@dataclass(frozen=True)
class Device(Layout):
    """One accelerator with a memory of our choice."""

    device_memory: int = 0
    is_cpu: bool = False


def settings_for(**settings) -> Config:
    return make_config(Config, **{"num_generation_tokens": 1024} | settings)


def row_length(config: Config) -> int:
    return bucket(config.sampling.prompt_length + config.sampling.num_generation_tokens)


def state_of(model: Decoder, config: OptimizerConfig) -> TrainState:
    """Shapes where a run has arrays."""
    here = single_device().replicated
    table = model.parameter_table()
    params = jax.tree.map(lambda spec: jax.ShapeDtypeStruct(spec.shape, jnp.float32), table, is_leaf=is_spec)
    state = TrainState(params, jax.eval_shape(make_optimizer(config).init, params), (), ())
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), state)


def fit(name: str, gigabytes: float, place: str = BETWEEN, **settings) -> tuple[MemoryPlan, Sizes]:
    """Returns what is decided for a model on a device of so much memory, and the sizes that decide it."""
    config = settings_for(**settings)
    layout = Device(single_device().mesh, int(gigabytes * GB))
    model = replace(shape(name, dtype="bfloat16"), mesh=layout.mesh)
    state = state_of(model, config.optimizer)
    run = config.memory, model, layout, state, None, row_length(config)
    rows = config.minibatch_size, config.sampling.inference_batch_per_device
    return fit_memory(*run, *rows, place), measure_sizes(*run, place)


def full_rows(num_rows: int, width: int) -> MicrobatchShape:
    return MicrobatchShape(num_rows, width, num_rows * width)


def update_of(sizes: Sizes, model: Decoder, remat: str, num_tokens: int) -> int:
    """Returns the bytes of the largest micro-batch of so many packed tokens, rows of 1,536 columns."""
    largest = choose_shapes(num_tokens, 1536, settings_for().minibatch_size, model.kernel in SKIPPING)[0]
    return update_bytes(sizes, model, remat, largest)


def test_a_cpu_gets_small_microbatches():
    config, layout = settings_for(num_generation_tokens=128, prompt_length=64), single_device()
    model = shape("small", mesh=layout.mesh)
    state = state_of(model, config.optimizer)
    plan = fit_memory(config.memory, model, layout, state, None, row_length(config), config.minibatch_size, 0)
    assert (plan.remat, plan.tokens_per_microbatch) == ("none", 1024)


# GB that `accumulate` needs in all, as compiled for an H200, 16 rows x 1024 tokens: bench/compiled.py
COMPILED = {
    ("Qwen3-0.6B", "plain", "none"): 79.9,
    ("Qwen3-0.6B", "plain", "dots"): 20.2,
    ("Qwen3-0.6B", "plain", "full"): 9.6,
    ("Qwen3-0.6B", "cudnn", "none"): 49.3,
    ("Qwen3-0.6B", "cudnn", "dots"): 19.4,
    ("Qwen3-0.6B", "cudnn", "full"): 8.6,
    ("Qwen3-1.7B", "cudnn", "none"): 89.6,
    ("Qwen3-1.7B", "cudnn", "dots"): 41.0,
    ("Qwen3-4B", "cudnn", "none"): 185.7,
    ("Qwen3-4B", "cudnn", "dots"): 86.9,
}


@pytest.mark.parametrize(("name", "kernel", "remat"), COMPILED)
def test_estimates_are_near_what_is_compiled(name, kernel, remat, monkeypatch):
    # The kernel of a device that is not here.
    monkeypatch.setattr(Decoder, "kernel", kernel)
    model = shape(name, dtype="bfloat16")
    params = 4 * model.num_parameters
    sizes = Sizes(held=params, gradients=2 * params, sampling_copy=0, kv_row=0, available=0)
    estimate = update_bytes(sizes, model, remat, full_rows(16, 1024)) / GB
    assert 0.94 < estimate / COMPILED[name, kernel, remat] < 1.15


@dataclass(frozen=True)
class Tpu:
    """A chip that is not there."""

    id: int
    platform: str = "tpu"
    device_kind: str = "TPU v5"


# The same for TPUs, whose memory is cut by fsdp, by the tokens of a micro-batch on each: docs/lab/compiled.md
COMPILED_FOR_TPUS = {
    ("Qwen3-0.6B", 8, "dots", 6144): 10.27,
    ("Qwen3-0.6B", 8, "none", 12288): 32.08,
    ("Qwen3-1.7B", 8, "full", 12288): 10.63,
    ("Qwen3-1.7B", 8, "none", 12288): 54.81,
    ("Qwen3-8B", 8, "full", 6144): 28.3,
    ("Qwen3-8B", 8, "dots", 12288): 70.24,
    ("Llama-3.2-3B", 1, "dots", 6144): 89.0,
    ("Qwen3.5-4B", 1, "full", 3072): 97.3,
    ("Qwen3-30B-A3B", 8, "full", 12288): 107.6,
}


def tpus(num_devices: int, gigabytes: float = 0, tp: int = 1) -> Device:
    chips = np.array([Tpu(i) for i in range(num_devices)], dtype=object)
    return Device(Mesh(chips.reshape(1, -1, tp), MESH_AXES, axis_types=(AxisType.Auto,) * 3), int(gigabytes * GB))


@pytest.mark.parametrize(("name", "num_devices", "remat", "num_tokens"), COMPILED_FOR_TPUS)
def test_estimates_are_near_what_is_compiled_for_tpus(name, num_devices, remat, num_tokens):
    layout = tpus(num_devices)
    model = shape(name, dtype="bfloat16", mesh=layout.mesh)
    config = settings_for()
    sizes = measure_sizes(config.memory, model, layout, state_shapes(model, layout, config), None, 1536)
    estimate = update_bytes(sizes, model, remat, full_rows(num_tokens // 1536, 1536)) / GB
    assert 0.92 < estimate / COMPILED_FOR_TPUS[name, num_devices, remat, num_tokens] < 1.08


# Devices of a copy of the weights that samples, by model, devices and chips: docs/lab/compiled.md
ROLLOUT = {
    ("Qwen3-1.7B", 8, 16.9): 1,
    ("Qwen3-4B", 8, 16.9): 2,
    ("Qwen3-8B", 8, 16.9): 8,
    ("Qwen3-8B", 8, 33.6): 2,
    ("Qwen3-8B", 8, 84.9): 1,
}


@pytest.mark.parametrize(("name", "num_devices", "gigabytes"), ROLLOUT)
def test_sampling_weights_are_sharded_if_rows_have_no_room(name, num_devices, gigabytes):
    layout = tpus(num_devices, gigabytes)
    model = shape(name, dtype="bfloat16", mesh=layout.mesh)
    config = settings_for()
    arguments = config.memory, model, layout, state_shapes(model, layout, config), None, 1536
    sizes = measure_sizes(*arguments)
    tp = sizes.rollout.mesh.shape["tp"]
    assert tp == ROLLOUT[name, num_devices, gigabytes]
    assert list(sizes.rollout.mesh.devices.flat) == list(layout.mesh.devices.flat)
    assert sizes.sampling_copy == pytest.approx(2 * model.num_parameters / tp, rel=0.01)
    assert len(describe_rollout(model, layout, sizes.rollout)) == (tp > 1)
    asked = measure_sizes(*arguments, rollout_tp=num_devices)
    assert asked.rollout.row_shards == 1
    assert asked.kv_row * num_devices == kv_row_bytes(model, layout, 1536)


def test_what_tp_does_not_divide_is_named():
    layouts = [Layout(AbstractMesh((1, 1, tp), MESH_AXES)) for tp in (1, 2, 16, 16)]
    assert not describe_whole(MODEL, *layouts[:2])
    (found,) = describe_whole(replace(HYBRID, num_experts=4, moe_intermediate_size=24), *layouts)
    whole = "4 attention heads, 2 key heads, 24 MLP columns, 200 ids of the vocabulary, 4 heads of linear attention"
    assert found.startswith(f"tp=16 does not divide {whole}: ")


def test_what_cannot_be_cut_for_sampling_is_refused_by_name():
    layout = tpus(8, tp=2)
    model = shape("Qwen3-0.6B", dtype="bfloat16", mesh=layout.mesh)
    with pytest.raises(UserError, match="--rollout_tp 4 is invalid, since the mesh allows 2, 8: give"):
        choose_rollout(model, layout, 0, 1536, 4)
    with pytest.raises(UserError, match="--rollout_tp 8 is invalid, since weights .* allows 2: give"):
        choose_rollout(replace(model, lora_rank=8), layout, 0, 1536, 8)
    two_heads = replace(model, num_key_value_heads=2)
    cut = [kv_row_bytes(two_heads, layout.with_tp(tp), 1536) for tp in (2, 8)]
    assert cut[0] * 2 == cut[1], "8 devices have both heads each"


def test_plan_counts_the_copied_head_of_a_teacher_on_tpus(monkeypatch):
    model = Decoder(64, 16, 32, 1, 2, 1, 8)
    head = jnp.ones((64, 24), "bfloat16")
    assert second_layout(model, head) is None
    # A device that is not here.
    monkeypatch.setattr("core.extensions.teacher.runs_on", lambda model, platform: platform == "tpu")
    assert bytes_on_device((head, second_layout(model, head))) == 2 * head.nbytes


def test_the_more_memory_the_less_is_recomputed():
    plans = [fit("Qwen3-0.6B", memory)[0] for memory in (17, 40, 80, 1000)]
    order = [("full", "dots", "none").index(plan.remat) for plan in plans]
    assert order == sorted(order)
    assert order[0] == 0
    assert order[-1] == 2
    assert plans[-1].tokens_per_microbatch == 16384
    model = shape("Qwen3-0.6B", dtype="bfloat16")
    for memory in (17, 40, 80):
        plan, sizes = fit("Qwen3-0.6B", memory)
        tokens = plan.tokens_per_microbatch
        assert update_of(sizes, model, plan.remat, tokens) < 0.9 * memory * GB
        assert tokens == 16384 or update_of(sizes, model, plan.remat, 2 * tokens) > 0.9 * memory * GB
        assert not any("will not fit" in note for note in plan.notes[1:]) or "KV cache" in plan.notes[1]


def test_as_many_rows_are_sampled_as_fit_beside_what_is_held():
    model, layout = shape("Qwen3-0.6B", dtype="bfloat16"), Device(single_device().mesh)
    found = []
    for memory in (20, 40, 80, 140):
        plan, sizes = fit("Qwen3-0.6B", memory, inference_batch_per_device=0)
        found.append(rows_that_fit(plan.sampling_room.num_bytes, model, layout, 1536))
        bytes_of_row = sizes.kv_row + 12 * 151936  # with its logits
        used = sizes.held + sizes.sampling_copy + found[-1] * bytes_of_row
        assert used <= sizes.available < used + bytes_of_row
        assert not any("KV cache" in note for note in plan.notes)
    assert found == sorted(found)
    assert found[-1] > 300
    assert rows_that_fit(0, model, layout, 1536) == 1
    assert rows_that_fit(1 << 50, model, single_device(), 1536) == 512
    without_training = sampling_room(model, replace(layout, device_memory=40 * GB), {}, 1536)
    assert without_training.num_bytes == 36 * GB - 2 * model.num_parameters


def test_rows_sampled_beside_updates_fit_with_them():
    """The copy that samples is there twice during an evaluation, but then no update is."""
    model = shape("Qwen3-0.6B", dtype="bfloat16")
    copy = 2 * model.num_parameters
    for memory in (20, 40, 80):
        between, before = fit("Qwen3-0.6B", memory, inference_batch_per_device=0)
        plan, sizes = fit("Qwen3-0.6B", memory, BESIDE, inference_batch_per_device=0)
        assert sizes.held == before.held + copy
        update = update_of(sizes, model, plan.remat, plan.tokens_per_microbatch)
        assert update + plan.sampling_room.num_bytes <= sizes.available
        assert sizes.held + copy + plan.sampling_room.num_bytes <= sizes.available
        assert plan.sampling_room.num_bytes < between.sampling_room.num_bytes
        # Not where one row alone takes more than half of what is free.
        is_tight = plan.tokens_per_microbatch < 3072
        assert is_tight or plan.sampling_room.num_bytes >= (sizes.available - sizes.held) // 2
    assert fit("Qwen3-0.6B", 80, ELSEWHERE)[1].held == before.held


def test_what_the_user_says_is_done():
    plan, _ = fit("Qwen3-0.6B", 140, remat="full", tokens_per_microbatch=4096)
    assert (plan.remat, plan.tokens_per_microbatch) == ("full", 4096)
    plan, _ = fit("Qwen3-0.6B", 30, tokens_per_microbatch=4096)
    assert (plan.remat, plan.tokens_per_microbatch) == ("dots", 4096)


def test_what_does_not_fit_is_said():
    plan, sizes = fit("Qwen3-1.7B", 80, inference_batch_per_device=512)
    fitting = int(plan.notes[1].rsplit(" ", 1)[1])
    rest = sizes.available - sizes.held - sizes.sampling_copy
    assert "KV cache" in plan.notes[1]
    assert fitting * sizes.kv_row <= rest < (fitting + 1) * sizes.kv_row
    plan, _ = fit("Qwen3-0.6B", 30, tokens_per_microbatch=1 << 18, inference_batch_per_device=8)
    assert "lower --tokens_per_microbatch to 131072" in plan.notes[1]
    for place in (BETWEEN, ELSEWHERE):
        assert fit("Qwen3-8B", 80, place)[0].notes[-1].startswith("no update fits: take --optimizer adafactor")
    assert not fit("Qwen3-0.6B", 1000)[0].notes, "where there is plenty, nothing is said"
    for num_tokens, sums in ((16384, 8), (8192, 16)):  # of 128 rows of 1,024 tokens
        bfloat16 = {"grad_dtype": "bfloat16", "ppo_minibatch": 128, "prompt_length": 512, "num_generation_tokens": 512}
        notes = fit("Qwen3-0.6B", 1000, tokens_per_microbatch=num_tokens, **bfloat16)[0].notes
        assert [note for note in notes if f"sums up to {sums} micro-batches in bfloat16" in note] == list(notes)
        assert len(notes) == (sums > 8)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [12, 8, 0]),
        ({"optimizer": "adafactor"}, [4, 8, 0]),
        ({"grad_dtype": "bfloat16"}, [12, 6, 0]),
        ({"offload": "optimizer"}, [4, 8, 16]),  # moments in the host's memory count in their step only
    ],
    ids=str,
)
def test_bytes_of_a_parameter_follow_from_the_settings(settings, expected):
    _, sizes = fit("Qwen3-1.7B", 80, **settings)
    assert [round(x / 1720574976) for x in (sizes.held, sizes.gradients, sizes.step)] == expected


def test_offloaded_moments_make_room():
    assert fit("Qwen3-8B", 150)[0].notes[1:]
    assert not fit("Qwen3-8B", 150, offload="optimizer")[0].notes[1:]


def test_an_allocation_that_fails_becomes_a_sentence(capsys):
    with pytest.raises(SystemExit), out_of_memory("tokens_per_microbatch", 16384, " or set --remat full"):
        jnp.zeros((1 << 45,), jnp.int8).block_until_ready()
    assert "lower --tokens_per_microbatch from 16384 to 8192 or set --remat full;" in capsys.readouterr().err
    with pytest.raises(jax.errors.JaxRuntimeError), out_of_memory("tokens_per_microbatch", 16384):
        raise jax.errors.JaxRuntimeError("INTERNAL: something else")
