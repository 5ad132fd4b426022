"""What XLA makes of the sampler and of the train step, read in its programs for H200s and, for a small model, for CPU.

The programs for H200s need a compiler that bench/h200.py tells how to install.
"""

import math
from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import jaxtyping
import pytest

from bench import h200
from bench.common import shape
from models import decoder
from models.architecture import Decoder
from utils.devices.sharding import single_device

pytestmark = pytest.mark.usefixtures("optimized")
needs_compiler = pytest.mark.skipif(not h200.has_compiler(), reason="needs XLA's compiler for GPUs: see bench/h200.py")
B, S = 256, 1024  # slots, columns of the cache
ROWS, T = 4, 1024  # of each device, their columns
MESHES = {"fsdp": {"fsdp": 8}, "fsdp and tp": {"fsdp": 4, "tp": 2}, "tp": {"tp": 8}}
MODEL = shape("Qwen3-0.6B", dtype="bfloat16")
FEW = replace(MODEL, num_hidden_layers=4)  # where layers are alike


def assert_in_place(program: h200.Program, model: Decoder, layout) -> None:
    """No iteration copies, transposes or slices as much as a layer's keys, and memory holds one cache."""
    elements = h200.cache_elements(model, layout, B, S)
    assert not h200.large_moves(program.hlo, elements)
    assert h200.loop_bodies(program.hlo)
    cache = 2 * model.num_hidden_layers * elements * jnp.dtype(model.dtype).itemsize
    assert program.temporaries < cache / 4


@pytest.mark.parametrize("channels", [64, 32])
def test_decoding_writes_the_cache_in_place_on_cpu(channels):
    model = Decoder(512, 128, 256, 3, 4, 2, channels)
    assert_in_place(h200.decode_segment(model, single_device(), B, S), model, single_device())


def test_decoding_copies_no_experts_on_cpu():
    model = Decoder(512, 128, 256, 3, 4, 2, 64, num_experts=16, num_experts_per_tok=4, moe_intermediate_size=96)
    program = h200.decode_segment(model, single_device(), 32, 256)
    assert h200.loop_bodies(program.hlo)
    assert not h200.large_moves(program.hlo, model.expert_parameters(16) // 3 // model.num_hidden_layers)


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
    program = h200.compile_for(jax.jit(decode, donate_argnums=0), caches, q)
    assert len(h200.large_moves(program.hlo, math.prod(caches.shape[1:]))) > 1
    assert program.temporaries > 4 * math.prod(caches.shape)


@needs_compiler
def test_decoding_writes_the_cache_in_place_on_an_h200():
    model, layout = MODEL, h200.imagine()
    assert_in_place(h200.decode_segment(model, layout, B, S), model, layout)


@needs_compiler
@pytest.mark.parametrize("sizes", MESHES.values(), ids=MESHES)
def test_eight_h200s_gather_nothing_for_a_token(sizes):
    model, layout = FEW, h200.imagine(**sizes)
    program = h200.decode_segment(model, layout, B, S)
    assert_in_place(program, model, layout)
    sent = h200.collectives(program.hlo)
    assert not [each.line for each in sent if not each.op.startswith("all-reduce")]
    # Two of a layer, one of the embedding; four to draw: largest logit, masses of blocks, one block, one logit.
    assert len(sent) == (2 * model.num_hidden_layers + 5 if "tp" in sizes else 0)


@cache
def train_step(**sizes) -> h200.Program:
    layout = h200.imagine(**sizes)
    model = replace(FEW, remat="dots", mesh=layout.mesh, attention="plain")
    jaxtyping.config.update("jaxtyping_disable", True)  # a batch of shapes is no batch of arrays
    try:
        return h200.train_step(model, layout, ROWS, T)
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)


@needs_compiler
@pytest.mark.parametrize("sizes", [{}, *MESHES.values()], ids=["one", *MESHES])
def test_a_train_step_never_holds_the_logits_of_all_tokens(sizes):
    """Nor of more than a chunk of them; and eight devices send each other no logits, and the head's weight once."""
    program = train_step(**sizes)
    num_devices, vocabulary = math.prod(sizes.values()), MODEL.vocab_size
    largest = max(
        each.elements for lines in h200.computations(program.hlo).values() for each in lines if each.op not in h200.FREE
    )
    assert largest <= max(decoder.LOGIT_ELEMENTS, vocabulary * MODEL.hidden_size)
    assert ROWS * T * vocabulary > 2 * largest, "the rows of a device are too few to tell"
    gathered = [each.elements for each in h200.collectives(program.hlo)]
    assert max(gathered, default=0) < vocabulary * MODEL.hidden_size / num_devices / 4
