"""Compiles the programs of a run before its first step, and clears them before Linux's limit on memory mappings."""

import contextlib
import os
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Lock

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike
from jaxtyping import PyTree

from utils.settings.errors import describe_error

# Yields jitted functions with their arguments, or shapes of them, and is sent the shapes of what they return.
Programs = Generator[tuple[Callable, tuple], PyTree, None]

MAPS = Path("/proc/self/maps")  # a line for each memory mapping of this process
MOST_MAPS = Path("/proc/sys/vm/max_map_count")


def compile_programs(lists: Sequence[Programs]) -> list[str]:
    """Compiles programs for the shapes of their arguments, side by side; calls with such arguments find them compiled.

    Each list is traced in a thread, since on several devices it waits for how results are laid out. XLA compiles in as
    many threads as there are cores. Several processes compile one program after the other, in the same order: on GPUs
    they share the tuning of kernels, and wait for one another. Returns a note on each list that ended early: what
    cannot be compiled raises its error when it is called, with what to do about it.
    """
    is_alone, lock = jax.process_count() == 1, Lock()
    started: dict[tuple, tuple[jax.stages.Traced, Future]] = {}  # by function and shapes
    tracers = ThreadPoolExecutor(max(1, len(lists)) if is_alone else 1, "tracing")
    pool = ThreadPoolExecutor(os.cpu_count() or 1 if is_alone else 1, "XLA")

    def compile_list(programs: Programs) -> str:
        results = None
        while True:
            try:
                function, arguments = programs.send(results)
                results = begin(function, shapes_of(arguments))
            except StopIteration:
                return ""
            except Exception as error:  # noqa: BLE001 (of a changed loss or sampler, say, whose arguments are not listed)
                return f"note: some programs are compiled when they are first called: {describe_error(error)}"

    def begin(function: Callable, arguments: tuple) -> PyTree:
        """Begins to compile a program, unless it has begun; returns the shapes of its results."""
        leaves, tree = jax.tree.flatten(arguments)
        key = function, tree, *leaves
        with lock:
            if key not in started:
                traced = function.trace(*arguments)
                started[key] = traced, pool.submit(lambda: traced.lower().compile())
            traced, compiled = started[key]
        sharding = next((x.sharding for x in leaves if isinstance(x, jax.ShapeDtypeStruct) and x.sharding), None)
        if sharding is None or len(sharding.device_set) > 1:  # the compiler chooses how results are laid out
            return with_shardings(traced.out_info, compiled.result().output_shardings)
        whole = NamedSharding(sharding.mesh, PartitionSpec())
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), traced.out_info)

    with pool, tracers:
        return list(filter(None, tracers.map(compile_list, lists)))


def with_shardings(shapes: PyTree, shardings: PyTree) -> PyTree:
    """Returns shapes that are laid out on devices."""
    return jax.tree.map(lambda x, own: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=own), shapes, shardings)


def shapes_of(tree: PyTree, memory_kind: str = "") -> PyTree:
    """Returns the shapes of arrays, laid out as they are, or so in another kind of memory; other leaves as they are."""

    def shape_of(x: ArrayLike) -> ArrayLike | jax.ShapeDtypeStruct:
        if isinstance(x, np.ndarray):
            return jax.ShapeDtypeStruct(x.shape, x.dtype)
        if not isinstance(x, jax.Array | jax.ShapeDtypeStruct):
            return x
        sharding = x.sharding.with_memory_kind(memory_kind) if memory_kind else x.sharding
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return jax.tree.map(shape_of, tree)


def forget_programs() -> bool:
    """Drops all compiled programs if they have most of the memory mappings that Linux allows a process.

    Programs that are needed again come from the compilation cache. On a CPU, XLA takes three mappings for each kernel
    of a program, up to 500 for a program. It crashes if none are left of usually 65,530, and a step may add a quarter.
    """
    with contextlib.suppress(OSError, ValueError):  # not on Linux
        num_maps = MAPS.read_bytes().count(b"\n")
        if num_maps > int(MOST_MAPS.read_text()) * 3 // 4:
            jax.clear_caches()
            return True
    return False
