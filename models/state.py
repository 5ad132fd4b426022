"""Training state: parameters, optimizer state and step."""

from dataclasses import dataclass, field, replace
from typing import Self

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Int, PyTree

from models.names import Adapters, Array, Params


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """Parameters and the optimizer's state; donated to each update, which replaces it."""

    params: Params | Adapters  # trained parameters
    opt_state: PyTree
    step: Int[Array, ""]  # optimizer steps taken
    num_skipped: Int[Array, ""]  # updates in a row that were not finite
    extra: dict[str, PyTree] = field(default_factory=dict)  # arrays kept across steps: saved, not part of updates

    @property
    def trained(self) -> Self:
        """The part that updates replace."""
        return replace(self, extra={})


def init_state(params: Params | Adapters, optimizer: optax.GradientTransformation) -> TrainState:
    """Returns the state at step 0 in the layout of an update: moments like their parameters, the rest on every device.

    The shardings equal those that an update returns; with others, the second update would compile anew.
    """
    mesh = getattr(jax.tree.leaves(params)[0].sharding, "mesh", None)

    def begin(params: Params | Adapters) -> tuple[PyTree, Int[Array, ""], Int[Array, ""]]:
        return optimizer.init(params), jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32)

    # With several devices outside of jit, which would put the moments of all parameters on one of them.
    init = jax.jit(begin) if mesh is None or mesh.size == 1 else begin
    opt_state, step, num_skipped = init(params)
    state = TrainState(params, opt_state, step, num_skipped)
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
