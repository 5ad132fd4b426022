"""Start of a process: its options of devices, the other processes of the job, and the mesh over all devices."""

import contextlib
import gc
import math
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from utils.devices.runtime import prepare
from utils.devices.sharding import MESH_AXES, Layout
from utils.settings.errors import UserError, counted, describe_error, refuse
from utils.settings.options import option

SHARDINGS = {  # devices on each axis, -1: all that are left
    "dp": {"data": -1}, "fsdp": {"fsdp": -1}, "tp": {"tp": -1}, "fsdp_tp": {"fsdp": -1, "tp": 2}
}  # fmt: skip
CUDA = 'pip install "jax[cuda13]" for an NVIDIA GPU'
INSTALL = {"gpu": CUDA, "cuda": CUDA, "tpu": 'pip install "jax[tpu]" on a TPU host'}  # by name in JAX_PLATFORMS
PROCESS = {"num_processes": "JAX_NUM_PROCESSES", "process_id": "JAX_PROCESS_ID"}  # JAX itself reads the address only
HEARTBEAT_TIMEOUT = 30  # seconds without a sign of life after which a process counts as dead, and ends the job
SHUTDOWN_TIMEOUT = 3600  # seconds that a process waits at its end for the main one, which may still be writing


@dataclass(frozen=True)
class DeviceConfig:
    """Devices."""

    sharding: str = option(
        "fsdp",
        "How weights and training state are sharded over the devices of each slice or GPU host; fsdp: every array; tp: "
        "heads and MLPs; fsdp_tp: both; dp: not at all, each device has a copy",
        list(SHARDINGS),
        resumable=True,
    )
    mesh: str = option(
        "",
        "Mesh of devices as axis=size with commas between, as in fsdp=4,tp=2; data=-1,fsdp=8: copies on groups of 8 "
        "devices; with --ahead 1: of the first devices, which train while all others sample; empty: by --sharding",
        resumable=True,
    )
    rollout_tp: int = option(
        0,
        "Number of devices that share a copy of the weights for sampling, sharded as tp shards them: the mesh's tp, or "
        "tp times fsdp, or a divisor of fsdp if tp is 1; tokens differ by rounding only; 0: as few as leave "
        "room for rows",
        resumable=True,
    )


def make_layout(config: DeviceConfig, model_dir: str = "") -> Layout:
    """Joins the other processes, if there are some, and lays all devices out as a mesh; `model_dir`: see `prepare`.

    Raises: UserError when there is no device of JAX_PLATFORMS, or the mesh does not fit the devices.
    """
    return make_layouts(config, is_ahead=False, model_dir=model_dir)[0]


def make_layouts(config: DeviceConfig, is_ahead: bool, model_dir: str = "") -> tuple[Layout, Layout]:
    """Returns the meshes that train and that sample rollouts: the same one, unless several devices sample ahead.

    Then the devices of --mesh, the first ones, train: programs that two threads launch on the same devices could begin
    in another order on each of them, and wait for one another forever. Raises: UserError as `make_layout`, and if
    rollouts cannot be sampled ahead on these devices.
    """
    devices, num_processes = join_devices(model_dir), jax.process_count()
    num_devices, num_training = len(devices), math.prod(parse_mesh(config.mesh).values()) if config.mesh else 0
    if not is_ahead:
        return (arrange_mesh(config, devices),) * 2
    refuse([
        (num_processes > 1, f"--ahead 1 works in a single process only, and there are {num_processes}: remove it"),
        (num_devices > 1 and not 0 < num_training < num_devices,
         f"--ahead 1 on {num_devices} devices needs a --mesh of 1 to {num_devices - 1}, which train while the others "
         f"sample: give one, such as fsdp={num_devices // 2}"),
        (num_training and num_devices == 1,
         "--mesh with --ahead 1 leaves other devices to sample, and there is one device: remove it"),
    ])  # fmt: skip
    if num_devices == 1:
        return (arrange_mesh(config, devices),) * 2
    layout, others = arrange_mesh(config, devices[:num_training]), devices[num_training:]
    tp = config.rollout_tp or layout.mesh.shape["tp"]
    if len(others) % tp:
        raise UserError(
            f"--mesh {config.mesh} leaves {counted(len(others), 'device')} to sample, no multiple of the tp={tp} of "
            f"{'--rollout_tp' if config.rollout_tp else '--mesh'}: give sizes that leave a multiple of it"
        )
    return layout, arrange_mesh(replace(config, mesh=f"data={len(others) // tp},tp={tp}"), others)


def join_devices(model_dir: str = "") -> list[jax.Device]:
    """Joins the other processes, if there are some, and returns all devices."""
    prepare(model_dir)
    join_processes()
    return find_devices()


def arrange_mesh(config: DeviceConfig, devices: Sequence[jax.Device]) -> Layout:
    """Returns these devices as a mesh. Raises: UserError when it does not fit them."""
    sizes = mesh_sizes(config, len(devices), count_slices(devices))
    return Layout(Mesh(arrange_devices(sizes, devices), MESH_AXES, axis_types=(AxisType.Auto,) * 3))


def find_devices() -> list[jax.Device]:
    """Returns all devices that JAX uses. Raises UserError when there are none of those that JAX_PLATFORMS names."""
    try:
        return jax.devices()
    except (RuntimeError, AssertionError) as error:
        platform = jax.config.jax_platforms
        jax.config.update("jax_platforms", "")
        available = ", ".join(sorted({device.platform for device in jax.devices()}))
        advice = f": {INSTALL[platform]}, or leave it out" if platform in INSTALL else ""
        raise UserError(
            f"JAX_PLATFORMS={platform}: JAX finds no such device here ({describe_error(error)}), but "
            f"{available}{advice}"
        ) from error


@cache
def join_processes() -> None:
    """Joins the other processes of the job, which JAX finds in its own variables or in the cluster's, once.

    A TPU host outside of a cluster is alone. Raises: UserError if the variables do not give all that is needed.
    """
    named = {name: os.environ[variable] for name, variable in PROCESS.items() if os.environ.get(variable)}
    num_started, num_here = started_processes()
    on_tpu = "TPU_ML_PLATFORM" in os.environ and "tpu" in (jax.config.jax_platforms or "tpu")  # JAX finds chips
    has_others = bool(named or os.environ.get("JAX_COORDINATOR_ADDRESS")) or num_started > 1
    if not has_others and not on_tpu:
        return
    # All devices of the host; JAX gives a process of Slurm or Open MPI only one.
    own_devices = {"local_device_ids": []} if num_here == 1 else {}
    try:
        jax.distributed.initialize(
            **{name: int(text) for name, text in named.items()},
            **own_devices,
            heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT,
            shutdown_timeout_seconds=SHUTDOWN_TIMEOUT,
        )
    except (ValueError, OSError) as error:  # OSError: Google's metadata server is not there to be asked
        reason = describe_error(error).rstrip(".")
        advice = "set JAX_COORDINATOR_ADDRESS to host:port of process 0, JAX_NUM_PROCESSES and JAX_PROCESS_ID"
        if has_others:
            raise UserError(f"{reason}: {advice}, or start the processes by srun, mpirun or Kubernetes") from None
        print(f"one process, since no cluster is found ({reason}); on several hosts, {advice}", file=sys.stderr)


def started_processes() -> tuple[int, int]:
    """Returns how many processes a launcher started in all (1: no launcher), and on this host (0: not known)."""
    env = os.environ
    if "SLURM_PROCID" in env:  # by srun; `salloc` and `sbatch` alone set it only for a single task
        total = int(env.get("SLURM_STEP_NUM_TASKS", 1))
        num_nodes = int(env.get("SLURM_STEP_NUM_NODES", 0))
        return total, int(total == num_nodes)
    if "OMPI_COMM_WORLD_SIZE" in env:
        return int(env["OMPI_COMM_WORLD_SIZE"]), int(env["OMPI_COMM_WORLD_LOCAL_SIZE"])
    if "JOB_COMPLETION_INDEX" in env:  # of an indexed Kubernetes job; JAX asks how many there are
        return 2, 0
    return 1, 0


@contextlib.contextmanager
def ending_together() -> Iterator[None]:
    """Ends all processes of a job when the block, a whole program, ends one of them by an error.

    Leaving in the ordinary way would wait for the others, which wait for this one. It leaves at once; if that breaks
    no connection of the others, JAX's runtime ends them after `HEARTBEAT_TIMEOUT` seconds. Garbage collections pass
    over what was imported until here.
    """
    gc.freeze()
    gc.enable()  # commands disable it while they import
    try:
        yield
    except BaseException as error:
        is_exit = isinstance(error, SystemExit)
        if (is_exit and not error.code) or not jax.distributed.is_initialized():
            raise
        if not is_exit:
            traceback.print_exc()
        print(f"process {jax.process_index()} of {jax.process_count()} ends, and so do the others", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(error.code if is_exit and isinstance(error.code, int) else 1)


def mesh_sizes(config: DeviceConfig, num_devices: int, num_slices: int) -> dict[str, int]:
    """Returns the devices on each axis: by --mesh if it is given; if not, by --sharding, with a copy in each slice.

    Raises: UserError for a mesh that cannot be read or does not fit the devices.
    """
    asked = parse_mesh(config.mesh)
    flag = f"--mesh {config.mesh}"
    if not asked:
        asked = {"data": num_slices} | SHARDINGS[config.sharding]
        flag = f"--sharding {config.sharding}"
    free_axes = [axis for axis, size in asked.items() if size == -1]
    num_fixed = math.prod(size for size in asked.values() if size != -1)
    sizes = dict.fromkeys(MESH_AXES, 1) | asked
    if free_axes:
        sizes[free_axes[0]] = num_devices // max(1, num_fixed)
    if num_fixed < 1 or len(free_axes) > 1 or math.prod(sizes.values()) != num_devices:
        raise UserError(
            f"{flag} makes {sizes}, but JAX finds {counted(num_devices, 'device')}: give sizes whose product is that "
            "number"
        )
    return sizes


def parse_mesh(text: str) -> dict[str, int]:
    """Returns the sizes in "fsdp=4,tp=2" by axis. Raises UserError for another form or an unknown axis."""
    sizes = {}
    for item in filter(None, text.split(",")):
        axis, _, size = item.partition("=")
        try:
            sizes[axis] = int(size)
        except ValueError:
            raise UserError(f"--mesh {text!r} has another form: write it like fsdp=4,tp=2") from None
    if unknown := set(sizes) - set(MESH_AXES):
        raise UserError(f"--mesh has no axis {', '.join(unknown)}: use its axes {', '.join(MESH_AXES)}")
    return sizes


def count_slices(devices: Sequence[jax.Device]) -> int:
    return len({getattr(device, "slice_index", 0) for device in devices})


def arrange_devices(sizes: dict[str, int], devices: Sequence[jax.Device]) -> np.ndarray:
    """Returns the devices in these sizes: slices along the first axis that they divide, neighbors along the last.

    Raises: UserError when an axis would have to cross slices unevenly.
    """
    count = count_slices(devices)
    across = next((axis for axis, size in sizes.items() if size % count == 0), None)
    if across is None:
        raise UserError(
            f"--mesh {sizes} has no size that is a multiple of the {count} slices or hosts: change one of its sizes"
        )
    outer = [count if axis == across else 1 for axis in sizes]
    inner = [size // n for size, n in zip(sizes.values(), outer, strict=True)]
    # Axes are split if the physical mesh of a TPU slice has other sizes.
    if count == 1:
        return mesh_utils.create_device_mesh(inner, devices, allow_split_physical_axes=True)
    return mesh_utils.create_hybrid_device_mesh(inner, outer, devices, allow_split_physical_axes=True)
