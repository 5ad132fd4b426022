"""Where the time of a rollout and of an update goes on a core of a CPU: operations of the compiled programs, by kind.

    python bench/shares.py
    python bench/shares.py --model_dir models/tiny --groups_per_batch 32 --num_generation_tokens 96

Both run once under JAX's profiler, on one core, since the time of an operation that several threads compute is counted
once. An operation is of the kind of what it computes, as XLA's programs have it: a product of activations and weights,
a product within rows (attention), a move (caches that are written or gathered), or anything else: norms, rotations,
softmax, drawing, losses, the optimiser. What is left is the time of the host, and of the profiler.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    import utils.settings.packages  # noqa: F401 (says what to install)

import contextlib
import os
import re
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from unittest import mock

import jax
import numpy as np
from jax.profiler import ProfileData
from jaxtyping import PyTree

from bench import hlo
from bench.common import Figure, environment, make_prompts, report
from bench.rollout import make_rollout
from bench.train_step import BenchTraining, load_training, make_update, random_batch
from core import learner
from core import sampler as sampling
from core.sampler import Sampler
from models import cache
from utils.devices.runtime import prepare
from utils.devices.startup import make_layout
from utils.settings.config import parse

WEIGHTS, ATTENTION, MOVES, OTHERS = "products with weights", "products of attention", "moves", "everything else"
HOST = "host"
KINDS = WEIGHTS, ATTENTION, MOVES, OTHERS, HOST
MOVING = {"dynamic-update-slice", "scatter", "gather", "copy", "transpose", "concatenate", "pad"}
FUNCTIONS = [(sampling, name) for name in ("prefill", "decode_segment", "decode_weights")]
FUNCTIONS += [(cache, "gather_cache")]
FUNCTIONS += [(learner, name) for name in ("score", "accumulate", "apply_gradients")]
NESTING = ("while", "call", "conditional")  # their time is that of the operations in them


class Recorder:
    """A jitted function that keeps the HLO of each program it runs."""

    def __init__(self, function: Callable):
        self.function = function
        self.texts: dict[str, str] = {}

    def __call__(self, *arguments: PyTree, **options: PyTree) -> PyTree:
        shapes = str(jax.tree.map(np.shape, (arguments, options)))
        if shapes not in self.texts:
            self.texts[shapes] = self.function.lower(*arguments, **options).compile().as_text()
        return self.function(*arguments, **options)


@contextlib.contextmanager
def recording() -> Iterator[dict[str, Recorder]]:
    """Puts recorders in the place of the jitted functions, for the time of the block."""
    recorders = {name: Recorder(getattr(module, name)) for module, name in FUNCTIONS}
    with contextlib.ExitStack() as stack:
        for module, name in FUNCTIONS:
            stack.enter_context(mock.patch.object(module, name, recorders[name]))
        yield recorders


def kinds_of(text: str) -> dict[str, str]:
    """Returns the kind of each instruction of a program, by its name."""
    parsed = hlo.computations(text)
    return {line.name: kind_of(line, parsed) for lines in parsed.values() for line in lines}


def kind_of(line: hlo.Instruction, parsed: hlo.Computations) -> str:
    """Returns the kind of an instruction, of a fusion that of its largest work."""
    inner = [line, *instructions_in(line, parsed)]
    products = [each.line for each in inner if each.op == "dot" or "matmul" in each.op]
    if products:
        is_batched = any(re.search(r"lhs_batch_dims=\{\d", product) for product in products)
        return ATTENTION if is_batched else WEIGHTS
    computing = {each.op for each in inner} - hlo.FREE - {"fusion"}
    return MOVES if computing & MOVING and len(inner) <= 8 else OTHERS


def instructions_in(line: hlo.Instruction, parsed: hlo.Computations) -> Iterator[hlo.Instruction]:
    """Yields the instructions of the fusion that an instruction runs, and of those within it."""
    for each in parsed.get(line.calls, ()):
        yield each
        yield from instructions_in(each, parsed)


def measure(run: Callable[[], PyTree]) -> tuple[float, Counter[str]]:
    """Returns the seconds of one call, and of them those of each kind."""
    with recording() as recorders:
        for _ in range(2):
            jax.block_until_ready(run())
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            start = time.perf_counter()
            jax.block_until_ready(run())
            seconds = time.perf_counter() - start
        (file,) = Path(folder).rglob("*.xplane.pb")
        profile = ProfileData.from_file(str(file))
    kinds: dict[tuple[str, str], str] = {}
    for name, recorder in recorders.items():
        for text in recorder.texts.values():
            kinds |= {(f"jit_{name}", op): kind for op, kind in kinds_of(text).items()}
    spent: Counter[str] = Counter()
    for event in (event for plane in profile.planes for line in plane.lines for event in line.events):
        stats = dict(event.stats)
        if "hlo_op" in stats and not event.name.startswith(NESTING):
            spent[kinds.get((stats["hlo_module"], event.name), OTHERS)] += event.duration_ns / 1e9
    spent[HOST] = seconds - spent.total()
    return seconds, spent


def main(config: BenchTraining) -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # before JAX makes its threads
    prepare()
    layout = make_layout(config.devices)
    model, params = load_training(config, layout)
    prompts = make_prompts(model.vocab_size, config.update.groups_per_batch, config.bench.prompt_tokens)
    sampler = Sampler(model, config.num_generation_tokens, (), layout=layout)
    works = {
        "rollout": make_rollout(sampler, params, prompts, config.update.group_size),
        "update": make_update(config, model, params, layout, random_batch(config, model.vocab_size)),
    }
    table: list[tuple[Figure, ...]] = []
    for name, run in works.items():
        seconds, spent = measure(run)
        table.append((name, seconds, *(f"{spent[kind] / seconds:.0%}" for kind in KINDS)))
    title = f"Shares of a core's time, {config.model_name}, {model.dtype}"
    columns = ("work", "seconds", *KINDS)
    report(title, columns, table, environment(), config.bench.json)


if __name__ == "__main__":
    main(parse(BenchTraining, sys.argv[1:], __doc__))
