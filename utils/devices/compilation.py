"""Compiles every program of a run before its first step: minutes at its start, and no step waits for the compiler."""

from collections.abc import Callable, Generator

import jax
from jaxtyping import PyTree

# Yields jitted functions with their arguments, or shapes of them, and is sent the shapes of what they return.
Programs = Generator[tuple[Callable, tuple], PyTree, None]


def compile_programs(programs: Programs) -> None:
    """Compiles programs for the shapes of their arguments; calls with such arguments find them compiled."""
    results = None
    while True:
        try:
            function, arguments = programs.send(results)
        except StopIteration:
            return
        lowered = function.lower(*arguments)
        results = with_shardings(lowered.out_info, lowered.compile().output_shardings)


def with_shardings(shapes: PyTree, shardings: PyTree) -> PyTree:
    """Returns shapes that are laid out on devices."""

    def lay_out(x: jax.ShapeDtypeStruct, sharding: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return jax.tree.map(lay_out, shapes, shardings)


def shapes_of(arrays: PyTree, memory_kind: str = "") -> PyTree:
    """Returns the shapes of arrays, laid out as they are, or so in another kind of memory."""

    def shape_of(x: jax.Array) -> jax.ShapeDtypeStruct:
        sharding = x.sharding.with_memory_kind(memory_kind) if memory_kind else x.sharding
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return jax.tree.map(shape_of, arrays)
