"""Compiles the programs of a run before its first step, and clears them before Linux's limit on memory mappings."""

import contextlib
from collections.abc import Callable, Generator
from pathlib import Path

import jax
from jaxtyping import PyTree

# Yields jitted functions with their arguments, or shapes of them, and is sent the shapes of what they return.
Programs = Generator[tuple[Callable, tuple], PyTree, None]

MAPS = Path("/proc/self/maps")  # a line for each memory mapping of this process
MOST_MAPS = Path("/proc/sys/vm/max_map_count")


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


def forget_programs() -> bool:
    """Forgets all compiled programs where they have most of the memory mappings that Linux allows a process.

    Those that are needed again come from the compilation cache. XLA takes three mappings for each kernel of a program
    on a CPU, up to 500 for a program, and crashes where there are none left, usually of 65,530: a step may still add a
    quarter.
    """
    with contextlib.suppress(OSError, ValueError):  # not on Linux
        num_maps = MAPS.read_bytes().count(b"\n")
        if num_maps > int(MOST_MAPS.read_text()) * 3 // 4:
            jax.clear_caches()
            return True
    return False
