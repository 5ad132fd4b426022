"""Compiles the sampler and an update for accelerators on a machine without any, and reads what the compiler made.

    pip install --no-deps --target ~/compilers jax-cuda13-pjrt==0.10.2 jax-cuda13-plugin==0.10.2 nvidia-cudnn-cu13
    pip install --no-deps --target ~/compilers "libtpu==0.0.42.*"
    export PYTHONPATH=~/compilers JAX_PLATFORMS=cpu
    python bench/compiled.py --target v5e,v6e,v5p,h100,h200 --models 0.6B,1.7B,8B     # 8 devices of each
    python bench/compiled.py --target h200,v5p --models Llama-3.2-3B --devices 1
    python bench/compiled.py --target v5p --models Qwen3-30B-A3B --mesh fsdp=4,tp=2
    python bench/compiled.py --target v5e --models 1.7B --devices 32 --slices 2
    python bench/compiled.py --config configs/lora_8b.py --memory 23.7 --models 8B --devices 1 --layers 2,4
    python bench/compiled.py --target h200 --models 1.7B --devices 1 --teacher Qwen3-8B    # a shape too

Rollouts in the tables have as many pages as their rows need when all are as long as can be, each with pages of its own.

The wheels (130 and 200 MB) hold XLA's compilers for NVIDIA GPUs and for TPUs, of this version of JAX; attention on GPUs
needs cuDNN (900 MB unpacked), a mixture of experts there tokamax. Nothing is timed, and kernels of GPUs are not tuned:
a matrix product may be another one on the device. What can be read is memory, and what each iteration of a loop does:
copies, collectives, bytes. bench/test_compiled.py asserts it. A row takes minutes, most of them for rollouts on TPUs:
see --layers, which is wrong there if the keys of a layer fit into the memory of the chip.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    import utils.settings.packages  # noqa: F401 (says what to install)

import importlib.util
import json
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.extend import backend
from jax.sharding import AxisType, Mesh
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import PyTree

from bench import hlo
from bench.common import Figure, report, shape
from core import learner
from core.config import Config
from core.extensions import teacher as teachers
from core.extensions.programs import page_programs, update_programs
from core.extensions.teacher import TaughtLearner, second_layout
from core.learner import Learner
from core.sampler import Sampler, SamplingConfig, decode_pages
from core.slots.prefill import prefill_pages
from core.slots.table import PAGE
from models import architecture
from models.architecture import Decoder, Spec
from models.attention import SKIPPING
from models.checkpoint import is_merged
from models.decoder import head_name
from models.lora import adapter_table, quantize_layer
from models.memory import (
    BETWEEN,
    describe_rollout,
    fit_memory,
    measure_sizes,
    rows_that_fit,
    update_bytes,
)
from models.names import (
    EMBED,
    EXPERT,
    LAYERS,
    SCALE,
    TEACHER,
    Adapters,
    LayerParams,
    Params,
    Weights,
    dtype_of,
    make_policy,
)
from models.optimizers import make_optimizer
from models.pages import Paging
from models.speed import PEAKS, training_flops
from models.state import TrainState
from utils.batching import MicrobatchShape, bucket, choose_shapes
from utils.devices.compilation import Programs, with_shardings
from utils.devices.runtime import set_tpu_options
from utils.devices.sharding import MESH_AXES, Layout, bytes_on_device
from utils.devices.startup import arrange_devices, mesh_sizes, parse_mesh
from utils.settings.config import parse, with_options
from utils.settings.errors import UserError, user_errors
from utils.settings.options import group, option


class Cores(NamedTuple):
    """What XLA's compiler asks about a GPU besides its memory. Source: CUDA's table of compute capabilities."""

    capability: tuple[int, int]
    number: int
    lanes: int  # of float32 on each
    clock: float  # GHz
    threads: int  # of each
    shared: int  # bytes of memory that the threads of each share


class Target(NamedTuple):
    """An accelerator."""

    kind: str  # of device, as JAX names it: a row of PEAKS
    platform: str
    memory: int  # bytes that a program may use
    links: float  # bytes/s that it can send to others of its host or slice
    cores: Cores | None = None  # of a GPU
    cache: int = 0  # bytes of its L2
    num_axes: int = 0  # of the torus of a TPU slice
    devices_per_chip: int = 1  # that JAX shows


HOPPER = Cores((9, 0), 132, 128, 1.98, 2048, 228 << 10)
# memory: of GPUs what CUDA reports, of TPUs what the compiler allows; links: of GPUs NVLink 4 or PCIe, of TPUs all of a
# chip's, one way. Source: NVIDIA's data sheets and cloud.google.com/tpu/docs
TARGETS = {
    "h200": Target("NVIDIA H200", "cuda", 150754820096, 450e9, HOPPER, 62914560),
    "h100": Target("NVIDIA H100 80GB HBM3", "cuda", 84930000000, 450e9, HOPPER, 52428800),
    "l4": Target("NVIDIA L4", "cuda", int(22.0 * 2**30), 32e9, Cores((8, 9), 58, 128, 2.04, 1536, 100 << 10), 50331648),
    "t4": Target("Tesla T4", "cuda", int(14.56 * 2**30), 16e9, Cores((7, 5), 40, 64, 1.59, 1024, 64 << 10), 4194304),
    "v5e": Target("TPU v5 lite", "tpu", int(15.75 * 2**30), 200e9, num_axes=2),
    "v6e": Target("TPU v6 lite", "tpu", int(31.25 * 2**30), 400e9, num_axes=2),
    "v5p": Target("TPU v5", "tpu", int(95.74 * 2**30), 600e9, num_axes=3),
    "tpu7x": Target("TPU7x", "tpu", int(94.75 * 2**30), 300e9, num_axes=3, devices_per_chip=2),
}
GPU = """
platform_name: "CUDA"
device_description_str: "{kind}"
runtime_version {{ major: 13 }}
dnn_version_info {{ major: 9 minor: 15 }}
gpu_device_info {{
  driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0"
  cuda_compute_capability {{ major: {cores.capability[0]} minor: {cores.capability[1]} }}
  core_count: {cores.number} fpus_per_core: {cores.lanes} clock_rate_ghz: {cores.clock}
  device_memory_size: {memory} memory_bandwidth: {bandwidth} l2_cache_size: {cache}
  threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: {cores.threads}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_block_limit: 65536 registers_per_core_limit: 65536
  shared_memory_per_block: 49152 shared_memory_per_block_optin: {optin} shared_memory_per_core: {cores.shared}
}}
"""
SLICES = {  # chips of a TPU slice: its torus, by the number of axes
    2: {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 256: "16x16"},
    3: {1: "1x1x1", 4: "2x2x1", 8: "2x2x2", 16: "2x2x4", 32: "2x4x4", 64: "4x4x4"},
}
LIBTPU = {
    "TPU_SKIP_MDS_QUERY": "1",  # else libtpu asks Google's cloud which chips this machine has
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # else one process at a time
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",  # of no effect but that libtpu does not warn
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
}
PLUGINS = {"cuda": ("jax_plugins", "jax_plugins.xla_cuda13"), "tpu": ("libtpu",)}
CONFIG = Config()
GB = 1e9
GPUS_OF_A_HOST = 8
WEIGHT_PROGRAMS = ("decode_weights", "layer_adapters", "merge")
PAGE_PROGRAMS = (prefill_pages.__name__, decode_pages.__name__)
Bytes = dict[str, float]  # on one device, or that it sends, by the name of a column; some are numbers of something else


@dataclass(frozen=True)
class TableConfig:
    """Table."""

    target: str = option("h200", f"Accelerators, with commas between: {', '.join(TARGETS)}")
    models: str = option(
        "Qwen3-0.6B",
        "Names of shapes (bench/common.py, bench/shapes.json), of Qwen3 the sizes alone, with commas between",
    )
    devices: str = option("", "Numbers of devices, with commas between; empty: 8, or those of --mesh")
    slices: int = option(1, "TPU slices that the devices are of; GPUs are of hosts of 8")
    layers: str = option(
        "",
        "Two numbers of layers, from which rollouts and adapters' updates are extrapolated; empty: all are compiled",
    )
    memory: float = option(0.0, "GB of a device that programs may use; 0: those of the target")
    json: str = option("", "File for the figures; empty: not written")


@dataclass(frozen=True)
class TableSampling(SamplingConfig):
    """Sampling."""

    num_generation_tokens: int = 1024
    inference_batch_per_device: int = 64


@dataclass(frozen=True)
class Command(Config):
    """Programs of a run on accelerators."""

    table: TableConfig = group(TableConfig)
    sampling: TableSampling = group(TableSampling)


def has_compiler(target: str) -> bool:
    """True if XLA's compiler for this accelerator is installed."""
    return all(importlib.util.find_spec(name) for name in PLUGINS[TARGETS[target].platform])


@dataclass(frozen=True)
class Imagined(Layout):
    """A mesh of devices that are not there: arrays are put there as their shapes."""

    target: Target

    @property
    def device_memory(self) -> int:
        """Returns the bytes that a program may use on each device."""
        return self.target.memory

    @property
    def slices(self) -> list[int]:
        """Returns the slice of each TPU or the host of each GPU, in the order of the mesh."""
        is_gpu = self.target.platform == "cuda"
        devices = self.mesh.devices.flat
        return [device.id // GPUS_OF_A_HOST if is_gpu else getattr(device, "slice_index", 0) for device in devices]

    def put(self, tree: PyTree) -> PyTree:
        def put_array(x: ArrayLike) -> jax.ShapeDtypeStruct:
            x = np.asarray(x)
            return rows(self, *x.shape, dtype=jax.dtypes.canonicalize_dtype(x.dtype))

        return jax.tree.map(put_array, tree)


def imagine(target: str, memory: float = 0.0, num_slices: int = 1, **sizes: int) -> Imagined:
    """Returns accelerators of hosts or slices as a mesh of these sizes, for example fsdp=4, tp=2.

    `memory`: GB of each; 0: those of the target.

    Raises: UserError for a number of TPUs that is no slice.
    """
    sizes = dict.fromkeys(MESH_AXES, 1) | sizes
    found = TARGETS[target]
    topology = gpu_topology if found.platform == "cuda" else tpu_topology
    devices = topology(target, math.prod(sizes.values()), num_slices).devices
    if found.platform == "cuda":
        backend.get_default_device = lambda: devices[0]  # tokamax asks it which kernels there are
    found = found._replace(memory=int(memory * GB) or found.memory)
    return Imagined(Mesh(arrange_devices(sizes, devices), MESH_AXES, axis_types=(AxisType.Auto,) * 3), found)


def gpu_topology(target: str, num_devices: int, num_hosts: int) -> topologies.TopologyDescription:
    """Returns the GPUs of hosts."""
    gpu = TARGETS[target]
    optin = gpu.cores.shared - (1024 if gpu.cores.capability >= (8, 0) else 0)  # of which CUDA takes a part itself
    facts = gpu._asdict() | {"bandwidth": int(PEAKS[gpu.kind][1]), "optin": optin}
    config = GPU.format(**facts)
    topology = f"{num_hosts}x1x{num_devices // num_hosts}"
    return topologies.get_topology_desc(platform="cuda", target_config=config, topology=topology)


def tpu_topology(target: str, num_devices: int, num_slices: int) -> topologies.TopologyDescription:
    """Returns the chips of TPU slices. Raises UserError for a number of devices that is none."""
    tpu = TARGETS[target]
    num_chips = num_devices // num_slices // tpu.devices_per_chip
    torus = SLICES[tpu.num_axes].get(num_chips)
    if torus is None:
        sizes = ", ".join(str(size * tpu.devices_per_chip) for size in SLICES[tpu.num_axes])
        raise UserError(f"the mesh has {num_devices} devices, a slice of {target} has {sizes}")
    os.environ.update(LIBTPU | os.environ)
    set_tpu_options()
    more = {"chips_per_host_bounds": (1, 1, 1)} if num_chips == 1 else {}
    if num_slices > 1:
        more["num_slices"] = num_slices
    return topologies.get_topology_desc(platform="tpu", topology_name=f"{target}:{torus}", **more)


class Program(NamedTuple):
    """A compiled program; sizes are bytes of one device."""

    function: str
    compiled: jax.stages.Compiled
    arguments: tuple[PyTree, ...]
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
    def added(self) -> int:
        """Bytes of the peak that are no arguments."""
        return self.peak - self.compiled.memory_analysis().argument_size_in_bytes

    @property
    def temporaries(self) -> int:
        return self.compiled.memory_analysis().temp_size_in_bytes


def compile_for(function: Callable, *arguments: PyTree) -> Program:
    """Compiles a jitted function for shapes that lie on the devices of an imagined layout."""
    clock = time.perf_counter()
    shardings = [getattr(x, "sharding", None) for x in jax.tree.leaves(arguments)]
    devices = next((x.device_set for x in shardings if isinstance(x, jax.sharding.Sharding)), jax.devices())
    platform = next(iter(devices)).platform
    options = {"xla_gpu_autotune_level": 0} if platform == "gpu" else None  # tuning needs the device
    compiled = function.lower(*arguments).compile(compiler_options=options)
    return Program(function.__name__, compiled, arguments, time.perf_counter() - clock)


def compile_until(programs: Programs, function: Callable) -> Iterator[Program]:
    """Yields compiled programs, the last of them the first one of a function."""
    results = None
    while True:
        next_function, arguments = programs.send(results)
        program = compile_for(next_function, *arguments)
        yield program
        if next_function is function:
            return
        results = with_shardings(program.compiled.out_info, program.compiled.output_shardings)


def shaped(layout: Layout, spec: Spec, dtype: str = "float32", rollout: bool = False) -> jax.ShapeDtypeStruct:
    """Returns a parameter as its shape laid out on the devices; `rollout`: as sampling lays it out."""
    return jax.ShapeDtypeStruct(spec.shape, dtype, sharding=layout.sharding(*spec, rollout=rollout))


def parameter_shapes(model: Decoder, layout: Layout, dtype: str = "float32") -> Params:
    """Returns the parameters of a model."""
    table = model.parameter_table()
    return jax.tree.map(lambda spec: shaped(layout, spec, dtype), table, is_leaf=architecture.is_spec)


def trained_shapes(model: Decoder, layout: Layout, config: Config) -> Params | Adapters:
    """Returns what is trained: adapters, or all parameters."""
    if not config.lora.lora_rank:
        return parameter_shapes(model, layout)
    table = adapter_table(model, config.lora.lora_rank)
    return {name: shaped(layout, spec, rollout=True) for name, spec in table.items()}


def base_shapes(model: Decoder, layout: Layout, config: Config) -> Weights:
    """Returns the base below adapters; empty if all parameters are trained."""
    if not config.lora.lora_rank:
        return {}

    def lay_out(path: tuple, spec: Spec) -> jax.ShapeDtypeStruct:
        return shaped(layout, spec, dtype_of(path[-1].key, model.dtype), rollout=True)

    base = jax.tree.map_with_path(lay_out, model.weights_table(), is_leaf=architecture.is_spec)
    if config.lora.base_dtype != "int8":
        return base
    return base | {LAYERS: [quantized_shapes(layout, layer) for layer in base[LAYERS]]}


def quantized_shapes(layout: Layout, layer: LayerParams) -> LayerParams:
    """Returns the shapes of a layer of int8: matrices where they were, scales on every device."""
    shapes = jax.eval_shape(quantize_layer, layer)
    places = {name: layout.replicated if name.endswith(SCALE) else layer[name].sharding for name in shapes}
    return {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=places[name]) for name, x in shapes.items()}


class Teacher(NamedTuple):
    """A teacher's model, its weights, and its head as updates of the policy read it."""

    model: Decoder
    params: Params
    head: jax.ShapeDtypeStruct

    @property
    def arrays(self) -> PyTree:
        return self.params, self.head

    @property
    def planned(self) -> PyTree:
        """Returns what the plan at the start counts."""
        return self.arrays, second_layout(self.model, self.head)


def teacher_of(model: Decoder, layout: Layout, config: Config) -> Teacher | None:
    """Returns the teacher as shapes laid out on the devices; None: there is none."""
    if not config.distill.teacher:
        return None
    teacher = shape(config.distill.teacher, dtype=model.dtype, mesh=layout.mesh)
    params = parameter_shapes(teacher, layout, model.dtype)
    head = params[head_name(teacher)]
    copied = teachers.copied_head(head, model.vocab_size, layout)
    head = head if copied is None else copied
    return Teacher(teacher, params, head)


def rows(layout: Layout, *sizes: int, dtype: DTypeLike = jnp.int32) -> jax.ShapeDtypeStruct:
    """Returns the shape of an array as Layout.put lays it out."""
    return jax.ShapeDtypeStruct(sizes, dtype, sharding=layout.rows if sizes else layout.replicated)


def sampling_programs(
    config: Config, model: Decoder, layout: Layout, num_slots: int, rollout: Layout | None = None
) -> Iterator[Program]:
    """Compiles what a rollout runs over pages for rows that are as long as can be, up to a segment of all slots.

    `rollout`: the mesh that samples; None: the one that trains.
    """
    paging = Paging(PAGE, num_slots=num_slots)
    limits = config.sampling.num_generation_tokens, (0,)
    sampler = Sampler(model, *limits, paging=paging, max_prompt_tokens=config.sampling.prompt_length, layout=layout)
    policy = make_policy(base_shapes(model, layout, config), trained_shapes(model, layout, config))
    programs = page_programs(sampler.on(rollout or layout), policy, num_slots)
    return compile_until(programs, decode_pages)


def train_step(model: Decoder, layout: Layout, num_rows: int, width: int, config: Config = CONFIG) -> Program:
    """Compiles the gradient of a micro-batch of full rows, added up; rows are those of each device."""
    return gradient(model, layout, MicrobatchShape(num_rows, width, num_rows * width), config)


def gradient(model: Decoder, layout: Layout, shape_of_rows: MicrobatchShape, config: Config = CONFIG) -> Program:
    """Compiles the gradient of a micro-batch of this shape, added up."""
    programs = learner_programs(model, layout, shape_of_rows, config)
    return list(compile_until(programs, learner.accumulate))[-1]


def apply_gradients(model: Decoder, layout: Layout, config: Config = CONFIG) -> Program:
    """Compiles an optimizer step."""
    programs = dict(learner_programs(model, layout, MicrobatchShape(1, 32, 32), config))
    return compile_for(learner.apply_gradients, *programs[learner.apply_gradients])


def learner_programs(model: Decoder, layout: Layout, shape_of_rows: MicrobatchShape, config: Config) -> Programs:
    """Yields the programs of training on micro-batches of this shape."""
    optimizer = make_optimizer(config.optimizer)
    state = state_shapes(model, layout, config)
    base = base_shapes(model, layout, config)
    num_tokens = shape_of_rows.width - config.sampling.prompt_length  # so that rows have this width
    settings = model, optimizer, layout, config, num_tokens, shape_of_rows.num_packed
    teacher = teacher_of(model, layout, config)
    if not teacher:
        return update_programs(Learner(*settings, base=base), state, shape_of_rows)
    of_teacher = Learner(teacher.model, *settings[1:])
    learner = TaughtLearner(*settings, base=base, beside={TEACHER: teacher.head}, teacher=of_teacher)
    return update_programs(learner, state, shape_of_rows)


def state_shapes(model: Decoder, layout: Layout, config: Config) -> TrainState:
    """Returns the training state as shapes, moments laid out like their parameters."""
    params = trained_shapes(model, layout, config)
    parameters = {path: x for path, x in jax.tree.leaves_with_path(params)}

    def lay_out(path: tuple, x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        suffixes = (path[i:] for i in range(len(path)))
        parameter = next((parameters[suffix] for suffix in suffixes if suffix in parameters), None)
        is_moment = parameter is not None and parameter.shape == x.shape
        sharding = parameter.sharding if is_moment else layout.replicated
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    opt_state = jax.eval_shape(make_optimizer(config.optimizer).init, params)
    return TrainState(params, jax.tree.map_with_path(lay_out, opt_state), rows(layout), rows(layout))


def held_state(state: TrainState, config: Config) -> PyTree:
    """Returns what a device holds of the state between updates."""
    return state.params if config.memory.offload else state


def row_length(config: Config) -> int:
    """Returns the columns of the longest row."""
    return bucket(config.sampling.prompt_length + config.sampling.num_generation_tokens)


def measure_training(config: Command, layout: Imagined, num_tokens: int, model: Decoder) -> Bytes:
    """Compiles an update with micro-batches of `num_tokens`: memory, what it sends, and FLOPs of a micro-batch."""
    state = state_shapes(model, layout, config)
    base, teacher = base_shapes(model, layout, config), teacher_of(model, layout, config)
    width = row_length(config)
    most_rows = -(-config.minibatch_size // layout.row_shards)
    largest = choose_shapes(num_tokens, width, most_rows, model.kernel in SKIPPING)[0]
    update = gradient(model, layout, largest, config)
    *_, batch, packing, _, beside = update.arguments
    lengths = np.full(largest.num_packed // width, width)
    sizes = measure_sizes(config.memory, model, layout, state, (base, teacher and teacher.arrays), width)
    planned = measure_sizes(config.memory, model, layout, state, (base, teacher and teacher.planned), width)
    of_teacher = bytes_on_device(teacher.arrays) if teacher else 0
    held = bytes_on_device(held_state(state, config)) - bytes_on_device(state.params)
    flops = training_flops(model, lengths, largest.num_packed, largest.num_packed) / layout.mesh.shape["tp"]
    found = {
        "held": sizes.held,
        "update": held + of_teacher - bytes_on_device(beside) + update.peak,
        "estimated": update_bytes(planned, model, model.remat, largest),
        "optimizer": bytes_on_device(base) + of_teacher + apply_gradients(model, layout, config).peak,
        "FLOPs": flops,
    }
    if teacher:
        arguments = teacher.model, teacher.params, batch.tokens, packing
        found["teacher scores"] = sizes.held + compile_for(teachers.hidden_states, *arguments).added
    return found | measure_communication(model, layout, update.hlo)


def measure_communication(model: Decoder, layout: Imagined, text: str) -> Bytes:
    """Returns what a device sends for a micro-batch, as rings move it, and how often, by the kind of a collective.

    `text`: the program of the gradient. Other slices get at least the sum of the gradients.
    """
    slices = layout.slices
    transfers = hlo.transfers(text, slices)
    found = {kind: sum(x.sent for x in transfers if x.kind == kind) for kind in hlo.COLLECTIVES}
    found |= {times_of(kind): sum(x.times for x in transfers if x.kind == kind) for kind in hlo.COLLECTIVES}
    num_others = len(set(slices)) - 1
    return found | {
        "sent": sum(x.sent for x in transfers),
        "FSDP's minimum": hlo.fsdp_minimum(model.num_parameters, layout.mesh.shape, jnp.dtype(model.dtype).itemsize),
        "to other slices": sum(x.crossing(slices) for x in transfers),
        "their minimum": 2 * 4 * model.num_parameters * num_others / len(slices),
    }


def times_of(kind: str) -> str:
    """Returns the name under which the number of collectives of a kind is found."""
    return f"number of {kind}"


def measure_rollout(config: Command, trained: Imagined, layout: Imagined, model: Decoder) -> Bytes:
    """Compiles the programs of a rollout on the mesh that samples, and reads its last decode segment.

    Its memory is what is added to the training state; a base that is sampled from itself is part of it.
    """
    num_slots = config.sampling.inference_batch_per_device * layout.row_shards
    programs = list(sampling_programs(config, model, trained, num_slots, layout))
    text = programs[-1].hlo
    step = max(hlo.loop_traffic(text, layout.target.cache).values(), key=lambda part: part.num_bytes)
    sent = hlo.collectives(text)
    least, least_experts = least_bytes(model, layout, programs[-1])
    return {
        "making weights": sum(program.added for program in programs if program.function in WEIGHT_PROGRAMS),
        "sampling": max(program.peak for program in programs if program.function in PAGE_PROGRAMS),
        "decode step": step.num_bytes,
        "at least": least,
        "of experts": expert_bytes(model, layout, text, step),
        "experts at least": least_experts,
        "collectives": len(sent),
        "they return": sum(line.num_bytes for line in sent),
    }


def least_bytes(model: Decoder, layout: Layout, program: Program) -> tuple[float, float]:
    """Returns the bytes that a decode step must read and, for states, write; and those of experts among them.

    Experts as many as the rows of a device choose if all are equally likely.
    """
    weights, state, *_, keys = program.arguments[4:]
    num_rows = len(keys) // layout.row_shards
    num_bytes = bytes_on_device((weights, state))
    if not model.tie_word_embeddings:
        num_bytes -= bytes_on_device(weights[EMBED])
    num_bytes += num_rows * model.state_bytes // layout.mesh.shape["tp"]
    if not model.num_experts:
        return num_bytes, 0
    share = 1 - (1 - model.num_experts_per_tok / model.num_experts) ** num_rows
    whole = bytes_on_device([[x for name, x in layer.items() if EXPERT in name] for layer in weights[LAYERS]])
    return num_bytes - whole + share * whole, share * whole


def expert_bytes(model: Decoder, layout: Layout, text: str, step: hlo.Traffic) -> int:
    """Returns the bytes that a decode step reads of the matrices of experts, which have a size of their own."""
    size = model.expert_parameters(model.num_experts) // (3 * model.num_hidden_layers) // layout.mesh.shape["tp"]
    lines = (line for body in hlo.computations(text).values() for line in body)
    elements = {line.name: line.elements for line in lines}
    return sum(num_bytes for name, num_bytes in step.read.items() if size and elements.get(name) == size)


def with_layers(model: Decoder, num_layers: int) -> Decoder:
    """Returns the architecture with the first layers only."""
    return replace(model, num_hidden_layers=num_layers, layer_types=model.layer_types[:num_layers])


def extrapolate(config: Command, model: Decoder, measure: Callable[[Decoder], Bytes]) -> Bytes:
    """Returns what a model needs; with --layers extrapolated from two numbers of layers, which are alike."""
    depths = [int(depth) for depth in filter(None, config.table.layers.split(","))]
    if not depths:
        return measure(model)
    few, more = (measure(with_layers(model, depth)) for depth in depths)
    factor = (model.num_hidden_layers - depths[0]) / (depths[1] - depths[0])
    return jax.tree.map(lambda a, b: a + factor * (b - a), few, more)


class Run(NamedTuple):
    """Settings that a run would choose on these devices."""

    model: Decoder
    layout: Imagined
    rollout: Imagined  # the mesh that samples
    state: TrainState
    base: Weights
    tokens: int  # of a micro-batch
    rows: int  # sampled at a time on each device


def plan_run(config: Command, target: str, name: str, num_devices: int) -> Run:
    """Returns what a run of a model would choose, and prints what it would say."""
    is_gpu = TARGETS[target].platform == "cuda"
    num_slices = max(1, num_devices // GPUS_OF_A_HOST) if is_gpu else config.table.slices  # that a slower network joins
    sizes = mesh_sizes(config.devices, num_devices, num_slices)
    layout = imagine(target, config.table.memory, num_slices, **sizes)
    dtype = config.compute.dtype or "bfloat16"
    model = shape(name, dtype=dtype, mesh=layout.mesh, lora_rank=config.lora.lora_rank)
    state = state_shapes(model, layout, config)
    base = base_shapes(model, layout, config)
    model = replace(model, merges_adapters=bool(base) and is_merged(config.lora, base, layout))
    num_asked = config.sampling.inference_batch_per_device
    teacher = teacher_of(model, layout, config)
    held = base, teacher and teacher.planned
    rows = row_length(config), -(-config.minibatch_size // layout.row_shards)
    settings = *rows, num_asked, BETWEEN, config.devices.rollout_tp
    plan = fit_memory(config.memory, model, layout, state, held, *settings)
    print(*plan.notes, *describe_rollout(model, layout, plan.sampling_room.layout), sep="\n")
    rollout, num_bytes = plan.sampling_room
    most_rows = rows_that_fit(num_bytes, model, rollout, row_length(config))
    whole_groups = most_rows // config.update.group_size * config.update.group_size
    num_rows = min(num_asked or whole_groups, whole_groups)
    model = replace(model, remat=plan.remat)
    return Run(model, layout, rollout, state, base, plan.tokens_per_microbatch, num_rows)


def table_row(config: Command, target: str, name: str, num_devices: int) -> dict[str, Figure]:
    """Returns a row of the table, for the settings that a run would choose on these devices."""
    run = plan_run(config, target, name, num_devices)
    mesh = [f"{axis}={size}" for axis, size in run.layout.mesh.shape.items() if size > 1]
    row = {
        "model": " from ".join(filter(None, (name, config.distill.teacher))),
        "devices": f"{num_devices} {target}",
        "mesh": ",".join(mesh),
        "--remat": run.model.remat,
        "tokens": run.tokens,
        "rows": run.rows,
        "there are": run.layout.target.memory / GB,
    }
    measure = partial(measure_training, config, run.layout, run.tokens)
    # All parameters are trained in a loop over layers, which compiles quickly; layers below adapters are a list.
    training = extrapolate(config, run.model, measure) if run.base else measure(run.model)
    row |= {name: x / GB for name, x in training.items() if name in (*MEMORY, *SENT)}
    for kind in filter(training.get, hlo.COLLECTIVES):
        row[kind] = f"{training[times_of(kind)]:,.0f}: {training[kind] / GB:.3g}"
    if training["FSDP's minimum"]:
        row["sent / minimum"] = training["sent"] / training["FSDP's minimum"]
    if not run.base:  # adapters need fewer products
        row["MFU at most"] = largest_mfu(training["FLOPs"], training["sent"], run)
    return row | rollout_figures(config, run, training["held"]) if run.rows else row


def largest_mfu(flops: float, num_bytes: float, run: Run) -> float:
    """Returns the MFU if products run at the peak and all links send at once, and the shorter of both is hidden.

    Products that --remat full computes again take time, and are not counted.
    """
    target = run.layout.target
    num_passes = 4 if run.model.remat == "full" else 3  # of equal work: forward, backward, and forward again
    peak = PEAKS[target.kind][0]
    seconds = max(num_passes / 3 * flops / peak, num_bytes / target.links)
    return flops / peak / seconds


def rollout_figures(config: Command, run: Run, held: float) -> dict[str, Figure]:
    """Returns the columns of sampling: its memory with all that is held, and what a decode step moves."""
    config = with_options(config, inference_batch_per_device=run.rows)
    found = extrapolate(config, run.model, partial(measure_rollout, config, run.layout, run.rollout))
    beside = bytes_on_device(held_state(run.state, config))
    if run.model.merges_adapters:
        beside += bytes_on_device(run.base)
    if teacher := teacher_of(run.model, run.layout, config):
        beside += bytes_on_device(teacher.arrays)
    found["making weights"] += held
    found["sampling"] += beside
    per_row = found["decode step"] * run.rollout.mesh.shape["tp"] / run.rows  # of all devices that sample it together
    more = {
        "collectives": found["collectives"],
        "ratio": found["decode step"] / found["at least"],
        "tokens/s at most": round(PEAKS[run.layout.target.kind][1] / per_row),
    }
    return {name: x / GB for name, x in found.items()} | more


SETTING = ("model", "devices", "mesh", "--remat", "tokens")
MEMORY = (
    "rows", "held", "teacher scores", "update", "estimated", "optimizer", "making weights", "sampling", "there are",
)  # fmt: skip
DECODE = (
    "rows", "decode step", "at least", "ratio", "of experts", "experts at least", "collectives", "they return",
    "tokens/s at most",
)  # fmt: skip
SENT = ("sent", "FSDP's minimum", "to other slices", "their minimum")
UPDATE = (*hlo.COLLECTIVES, *SENT, "sent / minimum", "MFU at most")
PARTS = {
    "memory": SETTING + MEMORY,
    "what a decode step reads and writes, and its collectives": SETTING[:3] + DECODE,
    "what an update sends for a micro-batch, number of collectives and GB": SETTING + UPDATE,
}


def main(config: Command) -> None:
    asked = config.devices.mesh
    default = str(math.prod(parse_mesh(asked).values())) if asked else "8"
    table = []
    for size in config.table.models.split(","):
        name = size if "-" in size else f"Qwen3-{size}"
        for target in config.table.target.split(","):
            for num_devices in (config.table.devices or default).split(","):
                try:
                    table.append(table_row(config, target, name, int(num_devices)))
                except jax.errors.JaxRuntimeError as error:
                    if "RESOURCE_EXHAUSTED" not in str(error):
                        raise
                    print(str(error).splitlines()[0])
                    table.append({"model": name, "devices": f"{num_devices} {target}", "mesh": "does not fit"})
                print(table[-1], flush=True)
    facts = {"jax": jax.__version__}
    print(f"\nGB of one device; rows of {row_length(config)} tokens")
    for title, columns in PARTS.items():
        rows = [[row.get(column, "") for column in columns] for row in table]
        report(title, columns, rows, facts)
    if config.table.json:
        content = {"title": "compiled programs", "environment": facts, "rows": table}
        Path(config.table.json).expanduser().write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    with user_errors():
        main(parse(Command, sys.argv[1:], __doc__))
