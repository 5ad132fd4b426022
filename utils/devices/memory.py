"""Kinds of memory that arrays are in, and the fingerprint of their bits."""

from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import ArrayLike
from jaxtyping import PyTree, UInt

from utils.devices.threads import LAUNCHING
from utils.settings.errors import UserError

DEVICE, HOST = "device", "pinned_host"  # as JAX names them
STRIDE = 0x9E3779B1  # of an element's index in its fingerprint
CHUNK = 1 << 16  # elements


def check_offload(mesh: Mesh) -> None:
    """Raises UserError if the devices cannot reach memory of the host."""
    device = mesh.local_devices[0]
    if HOST not in {memory.kind for memory in device.addressable_memories()}:
        raise UserError(
            f"--offload needs memory of the kind {HOST}, which {device.device_kind} does not have: remove it"
        )


def in_memory(kind: str, tree: PyTree, keep: bool = False) -> PyTree:
    """Returns arrays in this kind of memory; those that were moved are deleted if they are not to be kept.

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


def host_views(tree: PyTree) -> PyTree:
    """Returns arrays that a single CPU holds as NumPy arrays, which no program slices; others as they are."""

    def view(x: ArrayLike) -> ArrayLike:
        devices = x.sharding.device_set if isinstance(x, jax.Array) else ()
        return np.asarray(x) if [device.platform for device in devices] == ["cpu"] else x

    return jax.tree.map(view, tree)


def fingerprint(state: PyTree) -> list[UInt[jax.Array | np.ndarray, ""]]:
    """Returns a number for each array; it changes with any bit, and is the same on every mesh.

    The sum, modulo 2^32, of all elements' bits mixed with their index: one wrong element always shows, more of them but
    once in 4 billion. Source: the mixing of MurmurHash3's 32-bit finalizer.
    """
    arrays = jax.tree.leaves(host_views(in_memory(DEVICE, state, keep=True)))
    if all(isinstance(x, np.ndarray) for x in arrays):
        return [mix_on_host(x) for x in arrays]
    with LAUNCHING:  # a thread may sample from weights in the state
        return [number for arrays in by_mesh(map(jnp.asarray, arrays)) for number in mix_bits(arrays)]


def by_mesh(arrays: Iterable[jax.Array | jax.ShapeDtypeStruct]) -> list[list[jax.Array | jax.ShapeDtypeStruct]]:
    """Returns the arrays on the same devices, which one program may read."""
    parts: dict[frozenset[jax.Device], list] = {}
    for x in arrays:
        parts.setdefault(frozenset(x.sharding.device_set), []).append(x)
    return list(parts.values())


def mix_on_host(x: np.ndarray) -> UInt[np.ndarray, ""]:
    """Computes a number of `fingerprint` without a program, in parts that stay in the processor's cache."""
    bits = x.reshape(-1).view(f"uint{8 * x.dtype.itemsize}")
    total = np.zeros((), np.uint32)
    for start in range(0, bits.size, CHUNK):
        chunk = bits[start : start + CHUNK].astype(np.uint32)
        total += mixed(chunk + np.arange(start, start + chunk.size).astype(np.uint32) * np.uint32(STRIDE))
    return total


@jax.jit
def mix_bits(state: PyTree) -> list[UInt[jax.Array, ""]]:
    """Computes the numbers of `fingerprint` on devices."""

    def number(x: jax.Array) -> jax.Array:
        x = jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}").astype(jnp.uint32)
        stride = STRIDE
        for axis in reversed(range(x.ndim)):
            x += jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis) * jnp.uint32(stride)
            stride = stride * x.shape[axis] % 2**32
        return mixed(x)

    return [number(x) for x in jax.tree.leaves(state)]


def mixed(x: UInt[ArrayLike, "..."]) -> UInt[ArrayLike, ""]:
    """Returns the sum of mixed bits."""
    x = (x ^ x >> 16) * np.uint32(0x85EBCA6B)
    x = (x ^ x >> 13) * np.uint32(0xC2B2AE35)
    return (x ^ x >> 16).sum(dtype=np.uint32)
