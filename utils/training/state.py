"""Training state: parameters, optimiser state and step."""

from dataclasses import dataclass, field, replace
from typing import Self

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Int, PyTree, UInt

from models.names import Adapters, Array, Params
from utils.settings.errors import UserError

DEVICE, HOST = "device", "pinned_host"  # kinds of memory, as JAX names them


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """Parameters and the optimiser's state; donated to each update, which replaces it."""

    params: Params | Adapters  # that are trained
    opt_state: PyTree
    step: Int[Array, ""]  # optimiser steps taken
    num_skipped: Int[Array, ""]  # updates in a row that were not finite
    extra: dict[str, PyTree] = field(default_factory=dict)  # arrays that live across steps: saved, no part of updates

    @property
    def trained(self) -> Self:
        """The part that updates replace."""
        return replace(self, extra={})


def init_state(params: Params | Adapters, optimizer: optax.GradientTransformation) -> TrainState:
    """Returns the state at step 0 in the layout of an update: moments like their parameters, the rest on every device.

    With other shardings than those of an update's results, the second update would compile anew.
    """
    # Outside of jit, which would put the moments of all parameters on one device.
    opt_state = optimizer.init(params)
    state = TrainState(params, opt_state, step=jnp.zeros((), jnp.int32), num_skipped=jnp.zeros((), jnp.int32))
    mesh = getattr(jax.tree.leaves(params)[0].sharding, "mesh", None)
    if mesh is None:
        return state

    def lay_out(x: Array) -> Array:
        axes = getattr(x.sharding, "spec", ())
        spec = [axis if axis and mesh.shape[axis] > 1 else None for axis in axes]
        while spec and spec[-1] is None:
            spec.pop()
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        return jax.device_put(x, sharding)  # parameters are not copied

    return jax.tree.map(lay_out, state)


def check_offload(mesh: Mesh) -> None:
    """Raises UserError where the devices cannot reach memory of the host."""
    device = mesh.local_devices[0]
    if HOST not in {memory.kind for memory in device.addressable_memories()}:
        raise UserError(f"--offload needs memory of the kind {HOST}, which {device.device_kind} has not: leave it out")


def in_memory(kind: str, tree: PyTree, keep: bool = False) -> PyTree:
    """Returns arrays in this kind of memory; those that were moved are deleted where they are not to be kept.

    One after the other: JAX cannot donate an array to another kind of memory.
    """

    def move(x: Array) -> Array:
        if x.sharding.memory_kind == kind:
            return x
        moved = jax.device_put(x, x.sharding.with_memory_kind(kind))
        if not keep:
            jax.block_until_ready(moved)
            x.delete()
        return moved

    return jax.tree.map(move, tree)


def fingerprint(state: PyTree) -> list[UInt[Array, ""]]:
    """Returns a number for each array; it changes with any bit, and is the same on every mesh.

    The sum, modulo 2^32, of all elements' bits mixed with their place: one wrong element always shows, more of them but
    once in 4 billion. Source: the mixing of MurmurHash3's 32-bit finaliser.
    """
    by_mesh: dict[frozenset[jax.Device], list[Array]] = {}
    for x in jax.tree.leaves(in_memory(DEVICE, state, keep=True)):
        by_mesh.setdefault(frozenset(x.sharding.device_set), []).append(x)
    return [number for arrays in by_mesh.values() for number in mix_bits(arrays)]


@jax.jit
def mix_bits(state: PyTree) -> list[UInt[Array, ""]]:
    """Computes the numbers of `fingerprint`."""

    def mixed(x: Array) -> Array:
        x = jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}").astype(jnp.uint32)
        stride = 0x9E3779B1
        for axis in reversed(range(x.ndim)):
            x += jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis) * jnp.uint32(stride)
            stride = stride * x.shape[axis] % 2**32
        x = (x ^ x >> 16) * jnp.uint32(0x85EBCA6B)
        x = (x ^ x >> 13) * jnp.uint32(0xC2B2AE35)
        return (x ^ x >> 16).sum(dtype=jnp.uint32)

    return [mixed(x) for x in jax.tree.leaves(state)]
