"""Compiles core/minimal.py for Qwen3-8B on eight H200, on a machine without any: memory, and what is sent.

    python bench/minimal_compiled.py

First run the commands that bench/compiled.py names for NVIDIA's GPUs. This takes minutes, most of them for `sample`.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    import utils.settings.packages  # noqa: F401 (says what to install)

import argparse
from collections.abc import Iterator

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from bench import hlo
from bench.common import SHAPES, report
from bench.compiled import GB, compile_for, gpu_topology
from core import minimal
from utils.devices.compilation import with_shardings
from utils.devices.sharding import bytes_on_device

V, D, F, L, H, K, C = SHAPES["Qwen3-8B"]
TENSORS = {
    "model.embed_tokens": (V, D), "model.norm": (D,), "lm_head": (V, D), "mlp.gate_proj": (L, F, D),
    "mlp.up_proj": (L, F, D), "mlp.down_proj": (L, D, F), "self_attn.q_proj": (L, H * C, D),
    "self_attn.k_proj": (L, K * C, D), "self_attn.v_proj": (L, K * C, D), "self_attn.o_proj": (L, D, H * C),
    "self_attn.q_norm": (L, C), "self_attn.k_norm": (L, C), "input_layernorm": (L, D),
    "post_attention_layernorm": (L, D),
}  # fmt: skip
MODEL = minimal.Model(L, K, C, 1e6, 1e-6, False, (151645,), "bfloat16")
SETTINGS = minimal.Settings(dtype="bfloat16", prompt_length=512, num_generation_tokens=1024)
NUM_DEVICES, NUM_SAMPLED, ROWS = 8, 256, PartitionSpec("devices")


def shape(dtype: str, *sizes: int, spec: PartitionSpec = ROWS) -> jax.ShapeDtypeStruct:
    """Returns an array on the devices as its shape, by default with rows on each."""
    return jax.ShapeDtypeStruct(sizes, dtype, sharding=NamedSharding(jax.sharding.get_mesh(), spec))


def lay_out(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Returns a parameter or a moment, on the devices as load_params puts it there."""
    return shape(x.dtype, *x.shape, spec=minimal.spec(x) if x.shape else PartitionSpec())


def programs() -> Iterator[tuple]:
    """Yields the functions of a step, and their arguments."""
    tensors = {f"{name}.weight": jax.ShapeDtypeStruct(sizes, "float32") for name, sizes in TENSORS.items()}
    params = {name: lay_out(x) for name, x in tensors.items()}
    params["layers"] = {name: params.pop(name) for name, x in tensors.items() if x.shape[0] == L}
    P, A, B = SETTINGS.prompt_length, SETTINGS.num_generation_tokens, SETTINGS.rows_per_microbatch * NUM_DEVICES
    prompts = shape("int32", NUM_SAMPLED, P), shape("int32", NUM_SAMPLED)
    yield minimal.sample, SETTINGS, MODEL, params, *prompts, lay_out(jax.eval_shape(jax.random.key, 0))
    columns = shape("bool", B, A), shape("float32", B, A)
    batch = minimal.Batch(shape("int32", B, P + A), shape("int32", B), *columns, shape("float32", B))
    yield minimal.token_logprobs, SETTINGS, MODEL, params, batch
    yield minimal.add_gradients, SETTINGS, MODEL, params, params, batch, B * A
    optimizer = minimal.make_optimizer(SETTINGS)
    state = jax.tree.map(lay_out, jax.eval_shape(optimizer.init, params))
    yield minimal.apply_gradients, optimizer, params, state, params


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    table, devices = [], np.array(gpu_topology("h200", NUM_DEVICES, 1).devices)
    with jax.set_mesh(Mesh(devices, ("devices",), axis_types=(AxisType.Auto,))):
        for function, *arguments in programs():
            program = compile_for(function, *arguments)
            memory, transfers = program.compiled.memory_analysis(), hlo.transfers(program.hlo, [0] * NUM_DEVICES)
            sent = [sum(x.sent for x in transfers if x.kind == kind) for kind in hlo.COLLECTIVES]
            figures = memory.argument_size_in_bytes, memory.temp_size_in_bytes, program.peak, *sent
            table.append([program.function, *(round(x / GB, 1) for x in figures)])
    title = "Qwen3-8B on eight H200, GB of a device"
    report(title, ("program", "arguments", "temporaries", "peak", *hlo.COLLECTIVES), table, {"jax": jax.__version__})
    _, state, _ = with_shardings(program.compiled.out_info, program.compiled.output_shardings)  # of apply_gradients
    print(f"\nA device holds {bytes_on_device(state) / GB:.1f} GB of moments after a step")
