"""Training state: parameters, optimiser state and step."""

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Int, PyTree, UInt

from models.names import Adapters, Array, Params


@struct.dataclass
class TrainState:
    """Parameters and the optimiser's state; donated to each update, which replaces it."""

    params: Params | Adapters  # that are trained
    opt_state: PyTree
    step: Int[Array, ""]  # optimiser steps taken
    num_skipped: Int[Array, ""]  # updates in a row that were not finite


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


@jax.jit
def fingerprint(state: PyTree) -> list[UInt[Array, ""]]:
    """Returns a number for each array, which changes with any bit of it, and is the same on every mesh.

    The sum, modulo 2^32, of all elements' bits mixed with their place: one wrong element always shows, more of them but
    once in 4 billion. Source: the mixing of MurmurHash3's 32-bit finaliser.
    """

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
