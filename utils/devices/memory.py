"""Kinds of memory that arrays are in, and the fingerprint of their bits."""

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import PyTree, UInt

from utils.settings.errors import UserError

DEVICE, HOST = "device", "pinned_host"  # as JAX names them


def check_offload(mesh: Mesh) -> None:
    """Raises UserError where the devices cannot reach memory of the host."""
    device = mesh.local_devices[0]
    if HOST not in {memory.kind for memory in device.addressable_memories()}:
        raise UserError(f"--offload needs memory of the kind {HOST}, which {device.device_kind} has not: leave it out")


def in_memory(kind: str, tree: PyTree, keep: bool = False) -> PyTree:
    """Returns arrays in this kind of memory; those that were moved are deleted where they are not to be kept.

    One after the other: JAX cannot donate an array to another kind of memory.
    """

    def move(x: jax.Array) -> jax.Array:
        if x.sharding.memory_kind == kind:
            return x
        moved = jax.device_put(x, x.sharding.with_memory_kind(kind))
        if not keep:
            jax.block_until_ready(moved)
            x.delete()
        return moved

    return jax.tree.map(move, tree)


def fingerprint(state: PyTree) -> list[UInt[jax.Array, ""]]:
    """Returns a number for each array; it changes with any bit, and is the same on every mesh.

    The sum, modulo 2^32, of all elements' bits mixed with their index: one wrong element always shows, more of them but
    once in 4 billion. Source: the mixing of MurmurHash3's 32-bit finaliser.
    """
    by_mesh: dict[frozenset[jax.Device], list[jax.Array]] = {}
    for x in jax.tree.leaves(in_memory(DEVICE, state, keep=True)):
        by_mesh.setdefault(frozenset(x.sharding.device_set), []).append(x)
    return [number for arrays in by_mesh.values() for number in mix_bits(arrays)]


@jax.jit
def mix_bits(state: PyTree) -> list[UInt[jax.Array, ""]]:
    """Computes the numbers of `fingerprint`."""

    def mixed(x: jax.Array) -> jax.Array:
        x = jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}").astype(jnp.uint32)
        stride = 0x9E3779B1
        for axis in reversed(range(x.ndim)):
            x += jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis) * jnp.uint32(stride)
            stride = stride * x.shape[axis] % 2**32
        x = (x ^ x >> 16) * jnp.uint32(0x85EBCA6B)
        x = (x ^ x >> 13) * jnp.uint32(0xC2B2AE35)
        return (x ^ x >> 16).sum(dtype=jnp.uint32)

    return [mixed(x) for x in jax.tree.leaves(state)]
