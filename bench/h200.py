"""Reads what XLA makes of the sampler and the train step for NVIDIA H200s, on a machine without any.

    pip install --no-deps --target ~/h200 jax-cuda13-pjrt==0.10.2 jax-cuda13-plugin==0.10.2  # the version of jax
    PYTHONPATH=~/h200 JAX_PLATFORMS=cpu python bench/h200.py --shape Qwen3-0.6B

The two wheels (130 MB) hold XLA's compiler for GPUs; attention by cuDNN needs the libraries of nvidia-cudnn-cu13 too,
in LD_LIBRARY_PATH. Nothing is timed, and kernels are not tuned: a matrix product may be another one on the device.
What can be read is what happens in each iteration of a loop (copies, collectives) and the memory. tests/test_h200.py
asserts it.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import importlib.util
import math
import re
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import PyTree

from core import learner, sampling
from core.config import Config
from core.learner import Learner
from core.sampling import Sampler
from models import architecture
from models.architecture import Decoder, Spec
from models.names import Params
from utils.devices.compilation import Programs, with_shardings
from utils.devices.sharding import MESH_AXES, Layout
from utils.training.optimizers import make_optimizer
from utils.training.state import TrainState

# What the compiler asks about a device. Source: NVIDIA's data sheets, CUDA's table of compute capability 9.0
H200 = """
platform_name: "CUDA"
device_description_str: "NVIDIA H200"
runtime_version { major: 13 }
dnn_version_info { major: 9 minor: 15 }
gpu_device_info {
  cuda_compute_capability { major: 9 }
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  device_memory_size: 150754820096 memory_bandwidth: 4800000000000 l2_cache_size: 62914560
  threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_block_limit: 65536 registers_per_core_limit: 65536
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448 shared_memory_per_core: 233472
}
"""
FREE = {"parameter", "tuple", "get-tuple-element", "bitcast", "constant"}  # instructions that move no data
CONFIG = Config()
COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "reduce-scatter", "collective-permute")


def has_compiler() -> bool:
    """Whether XLA's compiler for GPUs is installed."""
    return importlib.util.find_spec("jax_plugins") is not None and bool(
        importlib.util.find_spec("jax_plugins.xla_cuda13")
    )


class Imagined(Layout):
    """A mesh of devices that are not there: arrays are put there as their shapes."""

    device_memory = 150754820096

    def put_array(self, x: ArrayLike) -> jax.ShapeDtypeStruct:
        x = np.asarray(x)
        return rows(self, *x.shape, dtype=jax.dtypes.canonicalize_dtype(x.dtype))


class ImaginedLearner(Learner):
    """A learner whose sums of gradients are shapes."""

    def zero_sums(self, params: Params) -> tuple[Params, jax.ShapeDtypeStruct]:
        dtype = self.config.memory.grad_dtype or "float32"
        grads = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype, sharding=x.sharding), params)
        return grads, self.layout.put(np.float32(0))


def imagine(**sizes: int) -> Imagined:
    """H200s in one host, laid out as a mesh of these sizes, for example fsdp=4, tp=2."""
    shape = [sizes.get(axis, 1) for axis in MESH_AXES]
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=H200, topology=f"1x1x{math.prod(shape)}"
    )
    return Imagined(Mesh(np.array(topology.devices).reshape(shape), MESH_AXES, axis_types=(AxisType.Auto,) * 3))


class Instruction(NamedTuple):
    """One line of optimised HLO: its operation, the name of what it calls, and the elements of its largest result."""

    op: str
    calls: str
    elements: int
    line: str


def computations(hlo: str) -> dict[str, list[Instruction]]:
    """The instructions of each computation of optimised HLO, by its name."""
    found = {}
    for name, body in re.findall(r"^(?:ENTRY )?%?([\w.\-]+) [^\n]*\{\n(.*?)\n\}", hlo, re.S | re.M):
        found[name] = [instruction for line in body.splitlines() if (instruction := read(line))]
    return found


def read(line: str) -> Instruction | None:
    match = re.match(r"\s*(?:ROOT )?%?[\w.\-]+ = (\(.*?\)|\S+) ([\w\-]+)\(", line)
    if not match:
        return None
    results, op = match.groups()
    sizes = [math.prod(int(n) for n in dims.split(",") if n) for dims in re.findall(r"\w+\[([\d,]*)\]", results)]
    calls = re.search(r"(?:calls|to_apply)=%?([\w.\-]+)", line)
    return Instruction(op, calls.group(1) if calls else "", max(sizes, default=0), line.strip())


def loop_bodies(hlo: str) -> dict[str, list[Instruction]]:
    """The computations that while loops repeat, by name."""
    found = computations(hlo)
    return {name: found[name] for name in dict.fromkeys(re.findall(r"body=%?([\w.\-]+)", hlo))}


def large_moves(hlo: str, num_elements: int) -> list[str]:
    """What each iteration of a loop writes in pieces of at least `num_elements`: all but updates in place."""
    found, moves = computations(hlo), []

    def is_update(instruction: Instruction) -> bool:
        if instruction.op in ("fusion", "call"):
            inner = [each for each in found[instruction.calls] if each.elements >= num_elements]
            return all(is_update(each) for each in inner if each.op not in FREE)
        return instruction.op == "dynamic-update-slice"

    for name, body in loop_bodies(hlo).items():
        for each in body:
            if each.elements >= num_elements and each.op not in {*FREE, "while"} and not is_update(each):
                moves.append(f"{name}: {each.line[:160]}")
    return moves


def collectives(hlo: str) -> list[Instruction]:
    """What devices send each other in each iteration of a loop."""
    lines = (each for body in loop_bodies(hlo).values() for each in body)
    return [each for each in lines if each.op.startswith(COLLECTIVES) and not each.op.endswith("-done")]


class Program(NamedTuple):
    """A compiled program; sizes are bytes of one device."""

    compiled: jax.stages.Compiled
    seconds: float

    @property
    def hlo(self) -> str:
        return self.compiled.as_text()

    @property
    def peak(self) -> int:
        """Bytes that are in use at once: arguments, results that do not take their place, and temporaries."""
        m = self.compiled.memory_analysis()
        return m.argument_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes + m.temp_size_in_bytes

    @property
    def temporaries(self) -> int:
        return self.compiled.memory_analysis().temp_size_in_bytes


def compile_for(function: Callable, *arguments: PyTree) -> Program:
    """Compiles a jitted function for shapes that lie on the devices of an imagined layout."""
    clock = time.perf_counter()
    compiled = function.lower(*arguments).compile(compiler_options={"xla_gpu_autotune_level": 0})
    return Program(compiled, time.perf_counter() - clock)


def compile_one(programs: Programs, function: Callable) -> Program:
    """Returns the first program of a function; those before it are compiled too, for the layout of their results."""
    results = None
    while True:
        next_function, arguments = programs.send(results)
        program = compile_for(next_function, *arguments)
        if next_function is function:
            return program
        results = with_shardings(program.compiled.out_info, program.compiled.output_shardings)


def parameter_shapes(model: Decoder, layout: Layout) -> Params:
    """Returns the parameters of a model, as shapes laid out on the devices."""

    def shape(spec: Spec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(spec.shape, "float32", sharding=layout.sharding(*spec))

    return jax.tree.map(shape, model.parameter_table(), is_leaf=architecture.is_spec)


def rows(layout: Layout, *shape: int, dtype: DTypeLike = jnp.int32) -> jax.ShapeDtypeStruct:
    """An array as Layout.put lays it out."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=layout.rows if shape else layout.replicated)


def cache_elements(model: Decoder, layout: Layout, num_slots: int, width: int) -> int:
    """Elements that one device holds of the keys of a layer."""
    heads = model.num_key_value_heads // layout.mesh.shape["tp"]
    return num_slots // layout.row_shards * heads * width * model.head_dim


def decode_segment(model: Decoder, layout: Layout, num_slots: int, width: int, group_size: int = 4) -> Program:
    """Compiles a segment of `width` steps and columns as the sampler runs it."""
    sampler = Sampler(model, width, (0,), segment=width, prompt_columns=64, layout=layout)
    num_prompts = num_slots // group_size
    num_prompts *= sampler.num_chains(num_prompts)  # each chain has a program of so many slots
    programs = sampler.programs(parameter_shapes(model, layout), num_prompts, group_size)
    return compile_one(programs, sampling.decode_segment)


def train_step(model: Decoder, layout: Layout, num_rows: int, width: int, config: Config = CONFIG) -> Program:
    """Compiles the gradient of a micro-batch of so many rows on each device, added up."""
    programs = learner_programs(model, layout, num_rows, width, config)
    return compile_one(programs, learner.accumulate)


def apply_gradients(model: Decoder, layout: Layout, config: Config = CONFIG) -> Program:
    """Compiles an optimiser step."""
    programs = dict(learner_programs(model, layout, 1, 32, config))
    return compile_for(learner.apply_gradients, *programs[learner.apply_gradients])


def learner_programs(model: Decoder, layout: Layout, num_rows: int, width: int, config: Config) -> Programs:
    """Yields the programs of training on rows of `width` columns, so many on each device."""
    optimizer = make_optimizer(config.optimizer)
    state = state_shapes(model, layout, config)
    imagined = ImaginedLearner(model, optimizer, layout, config, width, num_rows * width, has_fixed_shapes=True)
    return imagined.programs(state, width)


def state_shapes(model: Decoder, layout: Layout, config: Config) -> TrainState:
    """Returns the training state as shapes, moments laid out like their parameters."""
    params = parameter_shapes(model, layout)

    def shape(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        same = [param.sharding for param in jax.tree.leaves(params) if param.shape == x.shape]
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=same[0] if same else layout.replicated)

    opt_state = jax.tree.map(shape, jax.eval_shape(make_optimizer(config.optimizer).init, params))
    return TrainState(params, opt_state, rows(layout), rows(layout))
