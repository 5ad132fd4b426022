"""What XLA makes of the sampler and of the train step, read in its programs for GPUs, TPUs and, for small models, CPU.

Programs for accelerators need compilers that bench/compiled.py tells how to install.
"""

import math
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import jaxtyping
import pytest

from bench import compiled, hlo
from bench.common import shape
from models.architecture import Decoder
from models.logits import LOGIT_ELEMENTS
from utils.devices.sharding import bytes_on_device
from utils.settings.config import with_options

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("optimized")]


def needs(target: str) -> pytest.MarkDecorator:
    """Returns the mark of a test that compiles for an accelerator."""
    missing = f"needs XLA's compiler for {target}: see bench/compiled.py"
    return pytest.mark.skipif(not compiled.has_compiler(target), reason=missing)


needs_h200 = needs("h200")
needs_tpu = needs("v5p")
B, S = 256, 1024  # slots, tokens of the longest row
PROMPT = 64  # tokens
ROWS, T = 4, 1024  # of each device, their columns
MESHES = {"fsdp": {"fsdp": 8}, "fsdp and tp": {"fsdp": 4, "tp": 2}, "tp": {"tp": 8}}
MODEL = shape("Qwen3-0.6B", dtype="bfloat16")
FEW = replace(MODEL, num_hidden_layers=2)  # where layers are alike


def decode_segment(model: Decoder, layout: compiled.Imagined, num_slots: int, width: int) -> compiled.Program:
    """Compiles a segment over pages of rows of `width` tokens."""
    limits = {"prompt_length": PROMPT, "num_generation_tokens": width - PROMPT}
    config = with_options(compiled.CONFIG, **limits)
    return list(compiled.sampling_programs(config, model, layout, num_slots))[-1]


def keys_of_a_layer(program: compiled.Program, num_layers: int) -> int:
    """Returns the elements of the keys of a layer that a device holds."""
    caches = program.arguments[5]
    return bytes_on_device(caches) // jax.tree.leaves(caches)[0].dtype.itemsize // (2 * num_layers)


def assert_in_place(program: compiled.Program, num_layers: int) -> None:
    """No iteration copies, transposes or slices as much as a layer's keys, and memory holds one cache."""
    assert not hlo.large_moves(program.hlo, keys_of_a_layer(program, num_layers))
    assert hlo.loop_bodies(program.hlo)
    assert program.temporaries < bytes_on_device(program.arguments[5]) / 4


def test_bytes_are_counted_as_they_are_moved():
    """By operand: a slice as much as it returns, an update in place as much as is new, a loop as often as it runs."""
    text = """
%slice_of (a: f32[9,100], i: s32[]) -> f32[1,100] {
  %a = f32[9,100]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  ROOT %part = f32[1,100]{1,0:T(8,128)} dynamic-slice(%a, %i, %zero), dynamic_slice_sizes={1,100}
}

%body (state: (s32[], f32[9,100])) -> (s32[], f32[9,100]) {
  %state = (s32[], f32[9,100]{1,0}) parameter(0)
  %count = s32[] get-tuple-element(%state), index=0
  %rows = f32[9,100]{1,0} get-tuple-element(%state), index=1
  %row = f32[1,100]{1,0:T(8,128)S(1)} fusion(%rows, %count), kind=kLoop, calls=%slice_of, attributes="{
}}"
  %none = s32[] constant(0)
  %updated = f32[9,100]{1,0} dynamic-update-slice(%rows, %row, %count, %none)
  ROOT %next = (s32[], f32[9,100]{1,0}) tuple(%count, %updated)
}

%is_more (state: (s32[], f32[9,100])) -> pred[] {
  %state.1 = (s32[], f32[9,100]{1,0}) parameter(0)
  %count.1 = s32[] get-tuple-element(%state.1), index=0
  %trips = s32[] constant(5)
  ROOT %less = pred[] compare(%count.1, %trips), direction=LT
}

ENTRY %main (x: (s32[], f32[9,100])) -> (s32[], f32[9,100]) {
  %x = (s32[], f32[9,100]{1,0}) parameter(0)
  ROOT %loop = (s32[], f32[9,100]{1,0}) while(%x), condition=%is_more, body=%body
}
"""
    step = hlo.loop_traffic(text)["body"]
    assert step.read["rows"] == step.written == 400  # the row that is read lies in VMEM
    whole = hlo.traffic(hlo.computations(text), "main")
    assert whole.read["rows"] == whole.written == 5 * 400


def test_collectives_are_counted_as_they_run():
    """In a loop as often as it runs, a chain of fusions once, a sum that is cut in its fusion as a reduce-scatter.

    And bytes that leave a slice are those of its border.
    """
    text = """
%start (a: bf16[4,8]) -> bf16[16,8] {
  %a = bf16[4,8]{1,0} parameter(0)
  ROOT %whole = bf16[16,8]{1,0} all-gather(%a), replica_groups=[2,4]<=[8], frontend_attributes={chain_id="3"}
}

%done (a.1: bf16[4,8]) -> bf16[16,8] {
  %a.1 = bf16[4,8]{1,0} parameter(0)
  ROOT %whole.1 = bf16[16,8]{1,0} all-gather(%a.1), replica_groups=[2,4]<=[8], frontend_attributes={chain_id="3"}
}

%all-reduce-scatter.1 (b: bf16[16,8]) -> bf16[4,8] {
  %b = bf16[16,8]{1,0} parameter(0)
  %all = bf16[16,8]{1,0} all-reduce(%b), replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add
  ROOT %own = bf16[4,8]{1,0} dynamic-slice(%all), dynamic_slice_sizes={4,8}
}

%body (x: bf16[4,8]) -> bf16[4,8] {
  %x = bf16[4,8]{1,0} parameter(0)
  %started = bf16[16,8]{1,0} fusion(%x), kind=kCustom, calls=%start
  %ended = bf16[16,8]{1,0} fusion(%x), kind=kCustom, calls=%done
  ROOT %cut = bf16[4,8]{1,0} fusion(%ended), kind=kCustom, calls=%all-reduce-scatter.1
}

ENTRY %main (y: bf16[4,8]) -> bf16[4,8] {
  %y = bf16[4,8]{1,0} parameter(0)
  %loop = bf16[4,8]{1,0} while(%y), condition=%is_more, body=%body, backend_config={"known_trip_count":{"n":"5"}}
  %sum = bf16[4,8]{1,0} all-reduce-start(%loop), replica_groups=[4,2]<=[2,4]T(1,0), to_apply=%add
  %summed = bf16[4,8]{1,0} all-reduce-done(%sum)
  %moved = bf16[4,8]{1,0} all-to-all(%summed), replica_groups=mesh['a'=2,'b'=4] {'a','b'}, dimensions={0}
  ROOT %sent = bf16[4,8] collective-permute(%moved), replica_groups=mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'a'}
}
"""
    slices = [0] * 4 + [1] * 4
    found = {each.kind: each for each in hlo.transfers(text, slices)}
    of_slices = ((0, 1, 2, 3), (4, 5, 6, 7))
    whole, part = 16 * 8 * 2, 4 * 8 * 2  # bytes
    assert found["all-gather"] == hlo.Transfer("all-gather", 5, 3 / 4 * whole, of_slices)
    assert found["reduce-scatter"] == hlo.Transfer("reduce-scatter", 5, 3 / 4 * whole, of_slices)
    assert found["all-reduce"] == hlo.Transfer("all-reduce", 1, part, ((0, 4), (1, 5), (2, 6), (3, 7)))
    assert found["all-to-all"] == hlo.Transfer("all-to-all", 1, 7 / 8 * part, (tuple(range(8)),))
    pairs = ((0, 1), (2, 3), (4, 5), (6, 7))
    assert found["collective-permute"] == hlo.Transfer("collective-permute", 1, part, pairs)
    crossing = [each.crossing(slices) for each in found.values()]
    assert crossing == [0, 0, part, 2 / 8 * 7 / 8 * part, 0]


def test_a_cache_that_is_copied_is_noticed():
    """By a scan over layers with the cache among what it scans."""

    def decode(caches, q):
        def step(i, state):
            def layer(q, cache):
                cache = jax.lax.dynamic_update_slice(cache, q[:, :, None], (0, 0, i, 0))
                return q + (q[:, :, None] * cache).sum(2), cache

            return jax.lax.scan(layer, state[1], state[0])[::-1]

        return jax.lax.fori_loop(0, 8, step, (caches, q))

    caches, q = (jax.ShapeDtypeStruct(size, jnp.float32) for size in ((3, 32, 2, 256, 64), (32, 2, 64)))
    program = compiled.compile_for(jax.jit(decode, donate_argnums=0), caches, q)
    assert len(hlo.large_moves(program.hlo, math.prod(caches.shape[1:]))) > 1
    assert program.temporaries > 4 * math.prod(caches.shape)


@needs_h200
def test_decoding_writes_the_cache_in_place_on_an_h200():
    model = replace(MODEL, num_hidden_layers=12)
    layout = compiled.imagine("h200")
    program = decode_segment(model, layout, B, S)
    assert_in_place(program, model.num_hidden_layers)
    least, _ = compiled.least_bytes(model, layout, program)
    step = max(hlo.loop_traffic(program.hlo, layout.target.cache).values(), key=lambda part: part.num_bytes)
    assert step.num_bytes < 1.05 * least, (step.num_bytes, least)


@needs_h200
@pytest.mark.parametrize("sizes", MESHES.values(), ids=MESHES)
def test_eight_h200s_gather_nothing_for_a_token(sizes):
    model = FEW
    layout = compiled.imagine("h200", **sizes)
    program = decode_segment(model, layout, B, S)
    assert_in_place(program, model.num_hidden_layers)
    sent = hlo.collectives(program.hlo)
    assert not [each.line for each in sent if not each.op.startswith("all-reduce")]
    # Two of a layer, one of the embedding; three to draw: largest logit, masses of blocks, logits of one block.
    assert len(sent) == (2 * model.num_hidden_layers + 4 if "tp" in sizes else 0)


EXPERTS = {"num_experts": 32, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
MIXTURE = Decoder(8192, 256, 512, 1, 4, 2, 64, tie_word_embeddings=False, dtype="bfloat16", **EXPERTS)


@pytest.mark.parametrize(("num_rows", "num_read"), [(1, 2), (8, 16), (64, 32)])
@pytest.mark.parametrize("target", [pytest.param(name, marks=needs(name)) for name in ("h200", "v5p")])
def test_a_step_reads_experts_once(target, num_rows, num_read):
    """Only those of its rows where these are few; and no matrices of experts are laid out anew for a segment."""
    layout = compiled.imagine(target)
    model = replace(MIXTURE, mesh=layout.mesh)
    program = decode_segment(model, layout, num_rows, 2 * PROMPT)
    step = max(hlo.loop_traffic(program.hlo).values(), key=lambda part: part.num_bytes)
    one_expert = 2 * model.expert_parameters(1)
    assert compiled.expert_bytes(model, layout, program.hlo, step) == num_read * one_expert
    lines = (line for body in hlo.computations(program.hlo).values() for line in body)
    assert not [line.line for line in lines if line.op == "copy" and line.elements == model.expert_parameters(32) // 3]


@needs_tpu
@pytest.mark.parametrize(("num_layers", "num_rows"), [(1, 64), (4, 40)])
def test_decoding_writes_the_cache_in_place_on_a_tpu(num_layers, num_rows):
    """And reads weights and caches once; what a small model has in VMEM all the time it does not read.

    Keys of 40 rows fit into VMEM: without the options of utils/devices/runtime.py they go there and back.
    """
    layout = compiled.imagine("v5e")
    model = replace(MODEL, num_hidden_layers=num_layers)
    program = decode_segment(model, layout, num_rows, S)
    assert not hlo.large_moves(program.hlo, keys_of_a_layer(program, num_layers))
    least, _ = compiled.least_bytes(model, layout, program)
    step = max(hlo.loop_traffic(program.hlo).values(), key=lambda part: part.num_bytes)
    assert 0.9 * least < step.num_bytes < 1.05 * least
    assert not hlo.collectives(program.hlo)


def train_step(
    model: Decoder, layout: compiled.Imagined, num_rows: int, num_columns: int, **options
) -> compiled.Program:
    """Compiles an update of rows on each device."""
    jaxtyping.config.update("jaxtyping_disable", True)  # a batch of shapes is no batch of arrays
    try:
        config = with_options(compiled.CONFIG, **options)
        return compiled.train_step(replace(model, mesh=layout.mesh), layout, num_rows, num_columns, config)
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)


@needs_h200
@pytest.mark.parametrize("teacher", ["", "Qwen3-0.6B"])
@pytest.mark.parametrize("sizes", [{}, *MESHES.values()], ids=["one", *MESHES])
def test_a_train_step_never_holds_the_logits_of_all_tokens(sizes, teacher):
    """Nor of more than a chunk of them; and eight devices send each other no logits, and the head's weight once."""
    model = replace(FEW, remat="dots", attention="plain")
    program = train_step(model, compiled.imagine("h200", **sizes), ROWS, T, teacher=teacher)
    num_devices = math.prod(sizes.values())
    vocabulary = MODEL.vocab_size
    lines = (each for body in hlo.computations(program.hlo).values() for each in body)
    largest = max(each.elements for each in lines if each.op not in hlo.FREE)
    assert largest <= max(LOGIT_ELEMENTS, vocabulary * MODEL.hidden_size)
    assert ROWS * T * vocabulary > 2 * largest, "the rows of a device are too few to tell"
    gathered = [each.elements for each in hlo.collectives(program.hlo)]
    assert max(gathered, default=0) < vocabulary * MODEL.hidden_size / num_devices / 4


@pytest.mark.parametrize("target", [pytest.param(name, marks=needs(name)) for name in ("t4", "l4", "v5e", "v6e")])
def test_one_chip_holds_a_chunk_of_the_logits_of_gemma(target):
    """Of 262,144 tokens; those of all rows would be 4.3 GB. And a T4 is given no products of bfloat16."""
    dtype = "float32" if target == "t4" else "bfloat16"
    model = compiled.with_layers(shape("Gemma-3-1B", dtype=dtype, remat="full"), 2)
    text = train_step(model, compiled.imagine(target), ROWS, T).hlo
    lines = [line for body in hlo.computations(text).values() for line in body if line.op not in hlo.FREE]
    largest = max(line.elements for line in lines)
    assert largest <= model.vocab_size * model.hidden_size < ROWS * T * model.vocab_size / 3
    assert ("bf16[" in text) == (target != "t4")


@needs_tpu
@pytest.mark.parametrize(("target", "most"), [("v5e", 1.1), ("v5p", 1.7)])
def test_an_update_for_tpus_gathers_all_of_its_weights(target, most):
    """By itself XLA sends pieces of weights around, and sums products in bfloat16: a windowed einsum.

    Short rows compile in a tenth of the time. XLA sums over the three dimensions of a v5p by all-reduces.
    """
    layout = compiled.imagine(target, fsdp=8)
    model = replace(FEW, vocab_size=2048, remat="full", attention="plain")
    text = train_step(model, layout, 1, 128).hlo
    assert "windowed_dot_general" not in text
    summed = re.findall(r"= (\w+)\[\S* (?:reduce-scatter|all-reduce)\(", text)
    assert set(summed) == {"f32"}
    sent = compiled.measure_communication(model, layout, text)
    assert sent["sent"] < most * sent["FSDP's minimum"]


@needs_h200
def test_an_update_sends_what_fsdp_must():
    """On two hosts gradients alone cross the network, those of the embedding once, though it is used twice."""
    layout = compiled.imagine("h200", num_slices=2, data=2, fsdp=8)
    model = replace(FEW, remat="full", attention="plain")
    sent = compiled.measure_communication(model, layout, train_step(model, layout, 1, T).hlo)
    assert sent["sent"] < 1.1 * sent["FSDP's minimum"]
    # A layer's gradients together, and the head's.
    assert sent[compiled.times_of("reduce-scatter")] == model.num_hidden_layers + 1
    assert sent["their minimum"] <= sent["to other slices"] < 1.01 * sent["their minimum"]


@needs_h200
def test_gathered_weights_are_not_kept_for_the_backward_pass():
    """Though nothing else is recomputed: those of all layers are a whole model on each device."""
    layout = compiled.imagine("h200", fsdp=8)
    settings = {"vocab_size": 2048, "remat": "none", "attention": "plain"}
    few, more = (replace(MODEL, num_hidden_layers=n, **settings) for n in (2, 6))
    added = train_step(more, layout, 1, 32).temporaries - train_step(few, layout, 1, 32).temporaries
    assert added < 2 * (more.num_parameters - few.num_parameters)
