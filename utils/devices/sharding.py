"""The mesh of devices: how arrays are sharded over it, and how processes exchange values.

Mesh axes: `data` holds copies of the parameters; `fsdp` shards them, and rows of the batch; `tp` shards heads and MLPs,
each expert's too. So all devices have the same work, however many tokens an expert gets.
"""

import json
import math
import os
import resource
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import PyTree

from utils.devices.threads import between_turns
from utils.metrics.jsonl import JSON
from utils.settings.errors import UserError

MESH_AXES = ("data", "fsdp", "tp")
ROWS = ("data", "fsdp")
CHAIN_BYTES = 1 << 27  # of weights: models with fewer are computed faster by two threads than by one on a CPU
LOGICAL_TO_MESH = {
    "rows": ROWS, "vocab": "tp", "heads": "tp", "kv_heads": "tp", "mlp": "tp", "embed": "fsdp", "layers": None,
    "experts": None,
}  # fmt: skip


@dataclass(frozen=True)
class Layout:
    """A mesh; puts arrays on it and fetches them. All processes call every method with equal arguments."""

    mesh: Mesh

    @property
    def device_kinds(self) -> str:
        """Kind and number of the devices, in words."""
        processes = f" of {jax.process_count()} processes" if jax.process_count() > 1 else ""
        return f"{self.mesh.devices.flat[0].device_kind} x {self.mesh.size}{processes}"

    def describe_devices(self, params: PyTree) -> str:
        """Returns devices, mesh, and the size of the parameters on each device, in words."""
        axes = ", ".join(f"{axis}={size}" for axis, size in self.mesh.shape.items() if size > 1)
        size = f"{bytes_on_device(params) / 1e6:,.0f} MB of parameters on each"
        return f"{self.device_kinds} ({axes}; {size})" if axes else self.device_kinds

    def check_mesh_axes(self, params: PyTree, axes: Sequence[str] = ("fsdp", "tp")) -> None:
        """Raises UserError when one of these axes shards no parameter: then they would be whole on its devices."""
        used = {axis for x in jax.tree.leaves(params) for axis in x.sharding.spec}
        for axis in set(axes) - used:
            if (size := self.mesh.shape[axis]) > 1:
                raise UserError(
                    f"--mesh {axis}={size} shards no parameter of this model, because none has a size divisible by "
                    f"{size}: give {axis} a smaller divisor, and the remaining devices to --mesh data=..."
                )

    @property
    def row_shards(self) -> int:
        """Returns the number of shards of a batch's rows; batches are a multiple of it."""
        return num_shards(self.mesh, "rows")

    @property
    def is_cpu(self) -> bool:
        return self.mesh.devices.flat[0].platform == "cpu"

    @property
    def is_single_cpu(self) -> bool:
        """True if the host's own processor is the only device."""
        return self.is_cpu and self.mesh.size == 1

    def num_chains(self, num_parameters: int) -> int:
        """Returns how many programs of a model to run at the same time, each in a thread: 2 of a small one on a CPU.

        Its products are too small for several cores: in two chains a rollout takes a quarter less time, and an update
        13% to 27% less. Weights that are larger than the CPU's cache would be read twice as often.
        """
        has_cores = self.is_single_cpu and (os.cpu_count() or 1) > 1
        return 2 if has_cores and 4 * num_parameters < CHAIN_BYTES else 1

    @property
    def device_memory(self) -> int:
        """Returns the bytes that JAX may use on each device; on CPU, each device's share of the machine's."""
        stats = self.mesh.local_devices[0].memory_stats() or {}
        return stats.get("bytes_limit", self.host_memory // len(self.mesh.local_devices))

    @property
    def host_memory(self) -> int:
        """Returns the bytes of this machine's memory."""
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    @property
    def peak_memory(self) -> int:
        """Returns the peak of bytes in use, on the fullest device of this process; on CPU, by the process itself."""
        peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use", 0) for device in self.mesh.local_devices]
        unit = 1 if sys.platform == "darwin" else 1024
        return max(peaks) or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

    @property
    def is_main(self) -> bool:
        """True if this process is the one that writes files."""
        return jax.process_index() == 0

    def sharding(self, shape: tuple[int, ...], axes: tuple[str | None, ...], rollout: bool = False) -> NamedSharding:
        """Returns the sharding of a parameter with these logical axes; a dimension that does not divide stays whole.

        For `rollout` weights fsdp is left out: sharded weights would be gathered again for every token.
        """
        return sharding_of(self.mesh, shape, [None if rollout and axis == "embed" else axis for axis in axes])

    def with_tp(self, size: int) -> Self:
        """Returns the same devices in the same order, `size` of them along tp: more are taken from fsdp."""
        devices = self.mesh.devices.reshape(self.mesh.shape["data"], -1, size)
        return replace(self, mesh=Mesh(devices, MESH_AXES, axis_types=self.mesh.axis_types))

    @property
    def rows(self) -> NamedSharding:
        """Returns the sharding of arrays whose first dimension is rows of a batch."""
        return NamedSharding(self.mesh, PartitionSpec(ROWS))

    @property
    def replicated(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec())

    def receive(self, tree: PyTree) -> PyTree:
        """Returns parameters of another mesh on this one, sharded along axes of the same names if these divide them."""

        def move(x: jax.Array) -> jax.Array:
            names = zip(x.sharding.spec, x.shape, strict=False)
            spec = [name if name and size % self.mesh.shape[name] == 0 else None for name, size in names]
            return jax.device_put(x, NamedSharding(self.mesh, PartitionSpec(*spec)))

        return jax.tree.map(move, tree)

    def put(self, tree: PyTree) -> PyTree:
        """Returns host arrays, equal on all processes, as device arrays: by rows if these divide, otherwise whole."""

        def put_array(x: ArrayLike) -> jax.Array:
            x = np.asarray(x)
            return jax.make_array_from_callback(x.shape, self.sharding(x.shape, ("rows",)), lambda index: x[index])

        return jax.tree.map(put_array, tree)

    def fetch(self, tree: PyTree) -> PyTree:
        """Returns device arrays as whole host arrays, on every process; of what no device holds whole, by a program."""
        with between_turns():
            jax.block_until_ready(tree)
        leaves, structure = jax.tree.flatten(tree)
        arrays = {i: x for i, x in enumerate(leaves) if isinstance(x, jax.Array)}
        parted = {i: x for i, x in arrays.items() if not (x.is_fully_addressable or x.is_fully_replicated)}
        if parted:  # all at once, by a function with a name: a lambda would be compiled for each call
            leaves = (dict(enumerate(leaves)) | jax.jit(dict, out_shardings=self.replicated)(parted)).values()
        return jax.tree.unflatten(structure, map(np.asarray, leaves))

    def process_share(self, num_items: int, group_size: int = 1) -> range:
        """Returns the items that this process works on: whole groups."""
        index, groups = jax.process_index(), num_items // group_size
        return range(*(groups * i // jax.process_count() * group_size for i in (index, index + 1)))

    def share(self, work: Callable[[range], list[JSON]], num_items: int, group_size: int = 1) -> list[JSON]:
        """Returns the results of `work` for all items; each process does its share, and all get all results."""
        if jax.process_count() == 1:
            return work(range(num_items))
        text = json.dumps(work(self.process_share(num_items, group_size))).encode()
        size = int(multihost_utils.process_allgather(np.int64(len(text))).max())
        rows = multihost_utils.process_allgather(np.frombuffer(text.ljust(size, b" "), np.uint8))
        return [result for row in rows for result in json.loads(row.tobytes())]

    def gather_values(self, value: JSON) -> list[JSON]:
        """Returns the values of all processes, in their order."""
        return self.share(lambda _: [value], jax.process_count())

    def broadcast(self, value: str) -> str:
        """Returns the text of process 0, on every process."""
        return self.gather_values(value)[0]


def bytes_on_device(tree: PyTree) -> int:
    """Returns the bytes that each device holds of the arrays of a pytree, or would hold of shapes with shardings.

    An array that stands there twice is held once.
    """
    arrays = {id(x): x for x in jax.tree.leaves(tree)}.values()
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in arrays)


def on_each(
    mesh: Mesh | None, f: Callable[[PyTree, PyTree], PyTree], weights: PyTree, rows: PyTree, table: PyTree = None
) -> PyTree:
    """Returns f(weights, rows) under shard_map, on each device's rows and its fsdp shard of the weights, inside of jit.

    f calls `gather` when it needs a weight whole. Left to itself XLA chooses when weights are gathered and gradients
    summed: for TPU it keeps running sums in bfloat16, and it summed the gradient of the head whole on every device.
    Rows that do not divide are filled up with zeros. `tp` is left to XLA.

    `table`: shapes and logical axes of the weights; None: they are whole.
    """
    shards = 1 if mesh is None else num_shards(mesh, "rows")
    if shards == 1:
        return f(weights, rows)

    def fill_up(x: jax.Array) -> jax.Array:
        return jnp.pad(x, [(0, -len(x) % shards), *[(0, 0)] * (x.ndim - 1)]) if len(x) % shards else x

    def cut(spec: tuple[tuple[int, ...], tuple[str | None, ...]]) -> PartitionSpec:
        names = sharding_of(mesh, *spec).spec
        return PartitionSpec(*(name if name == "fsdp" else None for name in names))

    cuts = PartitionSpec() if table is None else jax.tree.map(cut, table, is_leaf=lambda x: isinstance(x, tuple))
    num_rows = len(jax.tree.leaves(rows)[0])
    by_rows = PartitionSpec(ROWS)
    mapped = jax.shard_map(
        f,
        mesh=mesh,
        in_specs=(cuts, by_rows),
        out_specs=by_rows,
        axis_names=set(ROWS),
        check_vma=False,
    )
    found = mapped(weights, jax.tree.map(fill_up, rows))
    return jax.tree.map(lambda x: x[:num_rows], found) if num_rows % shards else found


def is_on_each() -> bool:
    """True inside of `on_each` on a mesh that cuts rows."""
    return "fsdp" in jax.sharding.get_abstract_mesh().manual_axes


def gather(x: jax.Array, shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
    """Returns a whole float32 weight of this shape that fsdp shards, rounded to this dtype, inside of `on_each`.

    It is sent in that dtype, and is then float32 again, so that gradients are summed in float32; each device keeps its
    part of their sum. A whole weight stays as it is.
    """
    is_cut = [size != whole for size, whole in zip(x.shape, shape, strict=True)]
    return gather_along(x, is_cut.index(True), dtype) if any(is_cut) else x


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def gather_along(x: jax.Array, axis: int, dtype: DTypeLike) -> jax.Array:
    """Returns a float32 weight whole that fsdp cuts along an axis, rounded to this dtype."""
    return jax.lax.all_gather(x.astype(dtype), "fsdp", axis=axis, tiled=True).astype(x.dtype)


gather_along.defvjp(
    lambda x, axis, dtype: (gather_along(x, axis, dtype), None),
    # This device's part of the sum of all devices' gradients.
    lambda axis, dtype, _, gradient: (jax.lax.psum_scatter(gradient, "fsdp", scatter_dimension=axis, tiled=True),),
)


def look_up(x: jax.Array, ids: jax.Array, width: int, dtype: DTypeLike) -> jax.Array:
    """Returns the rows of a matrix with these ids, rounded to this dtype, also inside of `on_each`.

    If fsdp shards its `width` columns, a device reads its part of the rows of all devices, and sends each device's
    rows. That is fewer bytes than the whole matrix has, and gradients are added up on the device that keeps them.
    """
    if x.shape[1] == width:
        return x[ids].astype(dtype)
    ids = jax.lax.all_gather(ids, "fsdp")
    parts = x[ids].astype(dtype)
    return jax.lax.all_to_all(parts, "fsdp", split_axis=0, concat_axis=parts.ndim - 1, tiled=True)[0]


def on_devices(mesh: Mesh, f: Callable[..., PyTree], in_specs: PyTree, out_specs: PyTree) -> Callable[..., PyTree]:
    """Returns f of each device's parts of its arguments, for what XLA cannot partition, also inside of `on_each`.

    There rows are sharded already.
    """
    axis_names = set(MESH_AXES)
    if is_on_each():
        mesh = jax.sharding.get_abstract_mesh()
        axis_names = {"tp"}
        in_specs, out_specs = jax.tree.map(
            lambda spec: PartitionSpec(*(None if name == ROWS else name for name in spec)),
            (in_specs, out_specs),
            is_leaf=lambda x: isinstance(x, PartitionSpec),
        )
    return jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names=axis_names, check_vma=False)


def num_shards(mesh: Mesh | AbstractMesh, axis: str | None) -> int:
    """Returns the number of shards of a logical axis."""
    names = LOGICAL_TO_MESH.get(axis) or ()
    return math.prod(mesh.shape[name] for name in ([names] if isinstance(names, str) else names))


def sharding_of(mesh: Mesh | AbstractMesh, shape: Sequence[int], axes: Sequence[str | None]) -> NamedSharding:
    """Returns the sharding of an array with these logical axes; a dimension that does not divide stays whole."""
    sizes = zip(axes, shape, strict=False)
    names = [None if size % num_shards(mesh, axis) else LOGICAL_TO_MESH.get(axis) for axis, size in sizes]
    return NamedSharding(mesh, PartitionSpec(*names))


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Returns `x` sharded along these logical axes (of its first dimensions), inside of jit; as it is without a mesh.

    Left to itself, the compiler gathers the batch, and each device computes the attention and the logits of all rows.
    """
    mesh = jax.typeof(x).sharding.mesh
    if AxisType.Manual in mesh.axis_types:  # inside of `on_each`
        axes = [None if axis == "rows" else axis for axis in axes]
    if mesh.empty:
        return x
    return jax.lax.with_sharding_constraint(x, sharding_of(mesh, x.shape, axes))


def single_device(platform: str | None = None) -> Layout:
    """Returns a mesh of the first device alone, of this platform if one is named."""
    device = np.array(jax.local_devices(backend=platform)[:1])
    mesh = Mesh(device.reshape(1, 1, 1), MESH_AXES, axis_types=(AxisType.Auto,) * 3)
    return Layout(mesh)


def zeros_of(params: PyTree, dtype: str) -> PyTree:
    """Returns zeros of this type, laid out as the parameters are."""
    leaves, tree = jax.tree.flatten(params)
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for x in leaves]
    return jax.tree.unflatten(tree, zeros(tuple(shapes), dtype))


@partial(jax.jit, static_argnums=(0, 1))
def zeros(shapes: Sequence[jax.ShapeDtypeStruct], dtype: str) -> list[jax.Array]:
    """Returns zeros of this type, laid out as the shapes are: as one program, not one for each array."""
    return [jax.lax.with_sharding_constraint(jnp.zeros(x.shape, dtype), x.sharding) for x in shapes]
