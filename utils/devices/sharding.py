"""Where arrays live: the mesh, and the only code that knows of processes and devices.

Mesh axes: `data` holds copies of the parameters, `fsdp` cuts them (and rows of the batch), `tp` cuts heads and MLPs.
"""

import contextlib
import json
import math
import os
import resource
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils, multihost_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from utils.devices.runtime import prepare
from utils.settings.config import option
from utils.settings.errors import UserError, describe_error

MESH_AXES = ("data", "fsdp", "tp")
ROWS = ("data", "fsdp")
SHARDINGS = {  # devices on each axis, -1: all that are left
    "dp": {"data": -1}, "fsdp": {"fsdp": -1}, "tp": {"tp": -1}, "fsdp_tp": {"fsdp": -1, "tp": 2}
}  # fmt: skip
LOGICAL_TO_MESH = {
    "rows": ROWS, "vocab": "tp", "heads": "tp", "kv_heads": "tp", "mlp": "tp", "embed": "fsdp", "layers": None
}  # fmt: skip
PLATFORMS = {"cpu": "cpu", "gpu": "cuda", "cuda": "cuda", "tpu": "tpu"}  # --device_type: JAX's name for it
INSTALL = {"cuda": 'pip install "jax[cuda13]" for an NVIDIA GPU', "tpu": 'pip install "jax[tpu]" on a TPU host'}
HEARTBEAT_TIMEOUT = 30  # seconds without a sign of life after which a process counts as dead, and ends the job
SHUTDOWN_TIMEOUT = 3600  # seconds that a process waits at its end for the main one, which may still be writing


@dataclass(frozen=True)
class LayoutConfig:
    """Devices and processes."""

    sharding: str = option("fsdp", "how parameters are cut, on each slice or host of GPUs; dp: copies", list(SHARDINGS))
    mesh: str = option("", "devices per axis, fsdp=4,tp=2; data=-1,fsdp=8: copies on groups of 8; empty: by --sharding")
    device_type: str = option("", "cpu, gpu (an NVIDIA one, also: cuda) or tpu; empty: the best one there is")
    coordinator_address: str = option("", "host:port of process 0; empty: one process, or what the cluster says")
    num_processes: int = option(-1, "processes in all; -1: what the cluster says")
    process_id: int = option(-1, "number of this process; -1: what the cluster says")


@dataclass(frozen=True)
class Layout:
    """A mesh, and how arrays are put on it and brought back. All processes call every method with equal arguments."""

    mesh: Mesh

    def describe(self, params: Any) -> str:
        """Devices, mesh, and what each device holds of the parameters, in words."""
        devices, count = self.mesh.devices.flat, jax.process_count()
        text = f"{devices[0].device_kind} x {len(devices)}" + f" of {count} processes" * (count > 1)
        axes = ", ".join(f"{axis}={size}" for axis, size in self.mesh.shape.items() if size > 1)
        held = sum(x.addressable_data(0).nbytes for x in jax.tree.leaves(params))
        return text + f" ({axes}; {held / 1e6:,.0f} MB of parameters on each)" * bool(axes)

    def check(self, params: Any) -> None:
        """Raises UserError when an axis of the mesh cuts no parameter: then they would be whole on its devices."""
        used = {name for x in jax.tree.leaves(params) for name in x.sharding.spec}
        for axis in {"fsdp", "tp"} - used:
            if (size := self.mesh.shape[axis]) > 1:
                raise UserError(
                    f"--mesh {axis}={size} cuts no parameter of this model, since none of their sizes is a multiple of "
                    f"{size}: choose a divisor, and --mesh data=... for the other devices"
                )

    @property
    def row_shards(self) -> int:
        """Pieces into which the rows of a batch are cut; batches are a multiple of it."""
        return num_shards(self.mesh, "rows")

    @property
    def is_cpu(self) -> bool:
        return self.mesh.devices.flat[0].platform == "cpu"

    @property
    def device_memory(self) -> int:
        """Bytes that JAX may use on each device; on CPU, each device's share of the machine's."""
        stats = self.mesh.local_devices[0].memory_stats() or {}
        machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return stats.get("bytes_limit", machine // len(self.mesh.local_devices))

    @property
    def peak_memory(self) -> int:
        """Bytes in use at most so far, on the fullest device of this process; on CPU, of the process itself."""
        peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in self.mesh.local_devices]
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        return max(filter(None, peaks), default=resident)

    @property
    def is_main(self) -> bool:
        """Whether this process is the one that writes files."""
        return is_main_process()

    def sharding(self, shape: tuple[int, ...], axes: tuple[str | None, ...], rollout: bool = False) -> NamedSharding:
        """The sharding of a parameter with these logical axes; a dimension that does not divide is not cut.

        For `rollout` weights fsdp is left out: cut weights would be gathered again for every token.
        """
        return cut(self.mesh, shape, [None if rollout and axis == "embed" else axis for axis in axes])

    @property
    def rows(self) -> NamedSharding:
        """The sharding of arrays whose first dimension is rows of a batch."""
        return NamedSharding(self.mesh, PartitionSpec(ROWS))

    @property
    def replicated(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec())

    def put(self, tree: Any) -> Any:
        """Host arrays, equal on all processes, to device arrays cut by rows (scalars are replicated)."""

        def put(x):
            x = np.asarray(x)
            sharding = self.rows if x.ndim else self.replicated
            return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

        return jax.tree.map(put, tree)

    def fetch(self, tree: Any) -> Any:
        """Device arrays to full host arrays on every process."""

        def fetch(x):
            if isinstance(x, jax.Array) and not x.is_fully_addressable:
                x = copy_to_all(x, self.replicated).addressable_data(0)
            return np.asarray(x)

        return jax.tree.map(fetch, tree)

    def part(self, num_items: int) -> range:
        """The share of this process."""
        count, me = jax.process_count(), jax.process_index()
        return range(num_items * me // count, num_items * (me + 1) // count)

    def share(self, work: Callable[[range], list], num_items: int) -> list:
        """Each process does its share of `num_items` with `work(range) -> list` (JSON values); all get all results."""
        if jax.process_count() == 1:
            return work(range(num_items))
        mine = json.dumps(work(self.part(num_items))).encode()
        sizes = multihost_utils.process_allgather(np.int64(len(mine)))
        padded = np.frombuffer(mine.ljust(int(sizes.max()), b" "), np.uint8)
        return [item for part in multihost_utils.process_allgather(padded) for item in json.loads(part.tobytes())]

    def on_all(self, value: int) -> list[int]:
        """The numbers (or truth values) of all processes, each at least once."""
        return self.share(lambda mine: [value] * len(mine), self.mesh.size)

    def total(self, value: int) -> int:
        """Returns the sum of the processes' numbers."""
        if jax.process_count() == 1:
            return value
        return int(multihost_utils.process_allgather(np.int64(value)).sum())

    def broadcast(self, value: str) -> str:
        """Process 0's text, on every process."""
        if jax.process_count() == 1:
            return value
        padded = np.frombuffer(value.encode().ljust(4096), np.uint8)
        return multihost_utils.broadcast_one_to_all(padded).tobytes().decode().rstrip()


def is_main_process() -> bool:
    """Whether this is the one process that speaks and writes files."""
    return jax.process_index() == 0


def bytes_on_device(tree: Any) -> int:
    """Bytes that each device holds of the arrays of a pytree, or would hold of shapes with shardings."""
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def on_each(mesh: Mesh | None, f: Callable, weights: Any, rows: Any) -> Any:
    """f(weights, rows) where each device has its rows and whole weights (but for `tp`), inside of jit.

    Weights are gathered once for all of f, and their gradients summed once: XLA by itself does either in every
    iteration of a loop in f.
    """
    if mesh is None or all(mesh.shape[axis] == 1 for axis in ROWS):
        return f(weights, rows)
    in_specs = PartitionSpec(), PartitionSpec(ROWS)
    return jax.shard_map(
        f, mesh=mesh, in_specs=in_specs, out_specs=in_specs[1], axis_names=set(ROWS), check_vma=False
    )(weights, rows)


def num_shards(mesh: Mesh | AbstractMesh, axis: str | None) -> int:
    """Into how many pieces a logical axis is cut."""
    names = LOGICAL_TO_MESH[axis] if axis else None
    return math.prod(mesh.shape[name] for name in ([names] if isinstance(names, str) else names or ()))


def cut(mesh: Mesh | AbstractMesh, shape: tuple[int, ...], axes: Sequence[str | None]) -> NamedSharding:
    """The sharding of an array with these logical axes; a dimension that does not divide stays whole."""
    fit = [axis if size % num_shards(mesh, axis) == 0 else None for axis, size in zip(axes, shape, strict=False)]
    return NamedSharding(mesh, PartitionSpec(*(LOGICAL_TO_MESH[axis] if axis else None for axis in fit)))


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Inside of jit: `x` cut along these logical axes (of its first dimensions), where the arguments are on a mesh.

    Left to itself, the compiler gathers the batch and cuts the products by the weights' fsdp: each device computes the
    attention and the logits of all rows.
    """
    mesh = jax.typeof(x).sharding.mesh
    if AxisType.Manual in mesh.axis_types:  # inside of `on_each`
        axes = [None if axis == "rows" else axis for axis in axes]
    return x if mesh.empty else jax.lax.with_sharding_constraint(x, cut(mesh, x.shape, axes))


@partial(jax.jit, static_argnums=1)
def copy_to_all(x: jax.Array, replicated: NamedSharding) -> jax.Array:
    return jax.lax.with_sharding_constraint(x, replicated)


def make_layout(config: LayoutConfig) -> Layout:
    """Joins the other processes, where there are some, and lays all devices out as a mesh.

    Raises: UserError when there is no device of the type, or the mesh does not fit the devices.
    """
    prepare()
    if config.device_type:
        jax.config.update("jax_platforms", platform_of(config.device_type))
    join(config)
    devices = find_devices(config.device_type)
    sizes = mesh_sizes(config, len(devices), len(slices_of(devices)))
    return Layout(Mesh(arrange(sizes, devices), MESH_AXES, axis_types=(AxisType.Auto,) * 3))


def platform_of(device_type: str) -> str:
    """JAX's name for a --device_type. Raises UserError for one that is not supported."""
    if device_type not in PLATFORMS:
        apple = "; JAX has no complete backend for Apple's GPUs, so take cpu" if device_type in ("mps", "metal") else ""
        raise UserError(f"--device_type {device_type} is not supported, {', '.join(PLATFORMS)} are{apple}")
    return PLATFORMS[device_type]


def find_devices(device_type: str) -> list[jax.Device]:
    """All devices that JAX uses. Raises UserError when there are none of the type that was asked for."""
    try:
        return jax.devices()
    except (RuntimeError, AssertionError) as error:
        asked = jax.config.jax_platforms
        jax.config.update("jax_platforms", "")
        there = ", ".join(sorted({device.platform for device in jax.devices()}))
        option = f"--device_type {device_type}" if device_type else f"JAX_PLATFORMS={asked}"
        advice = f": {INSTALL[asked]}, or leave --device_type empty" if asked in INSTALL else ""
        message = f"{option}: JAX finds no such device here ({describe_error(error)}), but {there}{advice}"
        raise UserError(message) from error


def join(config: LayoutConfig) -> None:
    """Joins the other processes of the job: those of the flags, or those that JAX finds out from the cluster.

    Raises: UserError when the flags leave something open that no cluster tells.
    """
    flags = {"coordinator_address": config.coordinator_address or None}
    flags |= {name: getattr(config, name) for name in ("num_processes", "process_id") if getattr(config, name) >= 0}
    num_started, num_here = started_processes()
    on_tpu = "TPU_ML_PLATFORM" in os.environ and config.device_type in ("", "tpu")  # set by JAX where it finds chips
    if len(flags) == 1 and not config.coordinator_address and num_started == 1 and not on_tpu:
        return
    if num_here == 1:
        flags["local_device_ids"] = []  # all devices of the host; JAX gives a process of Slurm or Open MPI only one
    timeouts = {"heartbeat_timeout_seconds": HEARTBEAT_TIMEOUT, "shutdown_timeout_seconds": SHUTDOWN_TIMEOUT}
    try:
        jax.distributed.initialize(**flags, **timeouts)
    except ValueError as error:
        message = f"{error} Give --coordinator_address host:port, --num_processes and --process_id, or start the "
        raise UserError(message + "processes by srun, mpirun or Kubernetes") from None


def started_processes() -> tuple[int, int]:
    """Processes that a launcher started in all (1: there is none), and on this host (0: it does not say)."""
    env = os.environ
    if "SLURM_PROCID" in env:  # by srun; `salloc` and `sbatch` alone set it only for a single task
        total = int(env.get("SLURM_STEP_NUM_TASKS", 1))
        return total, int(total == int(env.get("SLURM_STEP_NUM_NODES", 0)))
    if "OMPI_COMM_WORLD_SIZE" in env:
        return int(env["OMPI_COMM_WORLD_SIZE"]), int(env["OMPI_COMM_WORLD_LOCAL_SIZE"])
    return (2 if "JOB_COMPLETION_INDEX" in env else 1), 0  # of an indexed Kubernetes job; JAX asks how many there are


@contextlib.contextmanager
def ending_together() -> Iterator[None]:
    """Around a whole program: what ends one of several processes ends all of them.

    Leaving in the ordinary way would wait for the others, which wait for this one. It leaves at once; where that breaks
    no connection of the others, JAX's runtime ends them after `HEARTBEAT_TIMEOUT` seconds.
    """
    try:
        yield
    except BaseException as error:
        if not jax.distributed.is_initialized() or isinstance(error, SystemExit) and not error.code:
            raise
        if not isinstance(error, SystemExit):
            traceback.print_exc()
        print(f"process {jax.process_index()} of {jax.process_count()} ends, and so do the others", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1)


def mesh_sizes(config: LayoutConfig, num_devices: int, num_slices: int) -> dict[str, int]:
    """Devices on each axis: of --mesh, else of --sharding within a slice, with a copy in each slice.

    Slices are joined by a slower network: hosts with GPUs, or TPU slices.
    """
    try:
        given = {axis: int(size) for axis, _, size in (part.partition("=") for part in config.mesh.split(",") if part)}
    except ValueError:
        raise UserError(f"--mesh {config.mesh!r} is not like fsdp=4,tp=2") from None
    if unknown := set(given) - set(MESH_AXES):
        raise UserError(f"--mesh has no axis {', '.join(unknown)}: its axes are {', '.join(MESH_AXES)}")
    flag = f"--mesh {config.mesh}" if given else f"--sharding {config.sharding}"
    given = given or {"data": num_slices} | SHARDINGS[config.sharding]
    free = [axis for axis, size in given.items() if size == -1]
    fixed = int(np.prod([size for size in given.values() if size != -1]))
    sizes = dict.fromkeys(MESH_AXES, 1) | given | {axis: num_devices // max(1, fixed) for axis in free[:1]}
    if fixed < 1 or len(free) > 1 or int(np.prod(list(sizes.values()))) != num_devices:
        raise UserError(f"{flag} makes {sizes}, but there are {num_devices} devices")
    return sizes


def slices_of(devices: Sequence[jax.Device]) -> dict[int, list[jax.Device]]:
    """The devices of each slice."""
    slices = {}
    for device in devices:
        slices.setdefault(getattr(device, "slice_index", 0), []).append(device)
    return slices


def arrange(sizes: dict[str, int], devices: Sequence[jax.Device]) -> np.ndarray:
    """The devices as an array of these sizes: slices along the first axis that they divide, neighbours along the last.

    Raises: UserError when an axis would have to cross slices unevenly.
    """
    count = len(slices_of(devices))
    across = next((axis for axis, size in sizes.items() if size % count == 0), None)
    if across is None:
        raise UserError(f"--mesh {sizes}: one of its sizes must be a multiple of the {count} slices or hosts")
    outer = [count if axis == across else 1 for axis in sizes]
    inner = [size // n for size, n in zip(sizes.values(), outer, strict=True)]
    split = dict(allow_split_physical_axes=True)  # where the physical mesh of a TPU slice has other sizes
    if count == 1:
        return mesh_utils.create_device_mesh(inner, devices, **split)
    return mesh_utils.create_hybrid_device_mesh(inner, outer, devices, **split)


def single_device() -> Layout:
    """Everything on the first device."""
    return Layout(Mesh(np.array(jax.local_devices()[:1]).reshape(1, 1, 1), MESH_AXES, axis_types=(AxisType.Auto,) * 3))
