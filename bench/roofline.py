"""How near sampling and training come to what a device can do, by limits of the same run, and where their time goes.

    python bench/roofline.py                                 # the small model, on a CPU
    python bench/roofline.py --shape Qwen2.5-0.5B --slots 512,1024,128 --pages 64,16 --stop_share 0.003
    python bench/roofline.py --kernels 1                     # on a CPU on one of its cores, since threads add up

The share of the roofline is the least seconds of the work over those that it took: see bench/limits.py. All rollouts
draw the same completions, as many as fill the most slots, with each number of slots and the first size of pages, then
with each other size and the first number of slots. --stop_share S makes completions end at random: so much of the
vocabulary are stop tokens, and to a random model all tokens are about equally likely, so that lengths are geometric
with mean 1 / S.

The profile is of a few segments from the second on, and of an update, by JAX's profiler. An operation is of the kind of
what it computes: a product of activations and weights, a product within rows (attention), a move (caches that are
written or gathered), or anything else: norms, rotations, softmax, drawing, losses, the optimizer. What is left waits.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    import utils.settings.packages  # noqa: F401 (says what to install)

import contextlib
import itertools
import os
import re
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import numpy as np
from jax.profiler import ProfileData
from jaxtyping import PyTree

from bench import hlo
from bench.common import ROOT, Figure, environment, make_prompts, report, seconds_of
from bench.limits import Limits, decode_seconds, measure_limits
from bench.train_step import BenchTraining, load_training, make_update, random_batch
from core.extensions.programs import page_programs
from core.records import Completions
from core.sampler import Sampler, make_sampler
from core.slots.table import page_tokens
from models.architecture import Decoder
from models.names import Params
from models.pages import Paging
from models.speed import training_flops
from models.tokenizer import load_tokenizer
from utils.batching import measure_rows
from utils.devices.compilation import Programs, compile_programs, shapes_of
from utils.devices.runtime import prepare, runs_on_cpu
from utils.devices.sharding import Layout
from utils.devices.startup import make_layout
from utils.settings.config import parse
from utils.settings.options import group, option

WEIGHTS, ATTENTION, MOVES, OTHERS = "products with weights", "products of attention", "moves", "everything else"
KINDS = WEIGHTS, ATTENTION, MOVES, OTHERS
MOVING = {"dynamic-update-slice", "scatter", "gather", "copy", "transpose", "concatenate", "pad"}
IN_ATTENTION = r"[bn]kq\w+(,|->)"  # models/attention.py's einsums
NESTING = ("while", "call", "conditional")  # their time is that of the operations in them
LIBRARIES = {"gemm|nvjet|cutlass|xmma": WEIGHTS, "fmha|cudnn|attend|attention|pallas": ATTENTION, "memcpy": MOVES}
NUM_TRACED = 4  # segments
Operation = tuple[str, str]  # its program, empty if the profiler does not name it, and its name


@dataclass(frozen=True)
class WorkConfig:
    """Roofline."""

    slots: str = option("", "Rows sampled at a time, with commas between; empty: all")
    pages: str = option("-1", "Sizes of pages of the cache, with commas between, as --page_size")
    stop_share: float = option(0.0, "Share of the vocabulary that ends a completion")
    kernels: bool = option(False, "Profile of a segment and an update")


@dataclass(frozen=True)
class Command(BenchTraining):
    """Roofline."""

    work: WorkConfig = group(WorkConfig)


class Rollout(NamedTuple):
    """What draws the same completions at every call, with so many slots."""

    name: str
    sampler: Sampler
    params: Params
    prompts: Sequence[list[int]]
    group_size: int

    def programs(self) -> Programs:
        """Returns the programs of draws over pages."""
        return page_programs(self.sampler, shapes_of(self.params), len(self.prompts) * self.group_size)

    def draw(self, sampler: Sampler) -> Completions:
        weights = sampler.load_weights(self.params)
        return sampler.generate(weights, self.prompts, np.arange(len(self.prompts)), self.group_size, jax.random.key(0))

    def measure(self, limits: Limits, repeats: int) -> tuple[Figure, ...]:
        """Returns the row of the table."""
        found = []
        seconds = statistics.median(seconds_of(lambda: found.append(self.draw(self.sampler)), repeats))
        drawn, layout = found[-1], self.sampler.layout
        rows = measure_rows(drawn.tokens, drawn.prompt_lengths, drawn.lengths, drawn.mask)
        share = decode_seconds(self.sampler.model, rows, limits) / layout.mesh.size / seconds
        num_tokens = int(drawn.mask.sum())
        occupancy = num_tokens / drawn.slot_steps.sum()
        return self.name, seconds, f"{num_tokens / seconds:,.0f}", f"{occupancy:.0%}", f"{share:.1%}"


def make_rollouts(config: Command, model: Decoder, params: Params, layout: Layout) -> list[Rollout]:
    """Returns a rollout for each number of slots and each size of pages."""
    work, group_size = config.work, config.update.group_size
    counts = [int(x) for x in work.slots.split(",") if x] or [config.update.groups_per_batch * group_size]
    sizes = list(map(int, work.pages.split(",")))
    num_prompts = max(*counts, config.update.groups_per_batch * group_size) // group_size
    prompts = make_prompts(model.vocab_size, num_prompts, config.bench.prompt_tokens)
    tokenizer = load_tokenizer(ROOT / "models/tiny")
    stop_ids = tuple(range(int(work.stop_share * model.vocab_size)))
    rollouts = []
    for slots, page in [*((slots, sizes[0]) for slots in counts), *((counts[0], page) for page in sizes[1:])]:
        sampler = make_sampler(config.sampling, model, tokenizer, layout, config.num_generation_tokens)
        sampler = replace(sampler, stop_ids=stop_ids, max_prompt_tokens=config.bench.prompt_tokens)
        paging = Paging(page, num_slots=slots)
        name = f"{num_prompts * group_size} rows, {slots} slots, pages of {page_tokens(page, layout)}"
        rollouts.append(Rollout(name, replace(sampler, paging=paging), params, prompts, group_size))
    return rollouts


def measure_update(config: Command, update: Callable[[], PyTree], model: Decoder, limits: Limits) -> tuple[Figure, ...]:
    """Returns the row of the table of an update from given rollouts of equal length."""
    seconds = statistics.median(seconds_of(update, config.bench.repeats))
    num_rows, prompt, completion = config.batch_size, config.bench.prompt_tokens, config.num_generation_tokens
    num_tokens = config.update.groups_per_batch * (prompt - 1) + num_rows * completion
    flops = training_flops(model, np.full(num_rows, prompt + completion), num_tokens, num_rows * completion)
    share = flops / limits.flops / jax.device_count() / seconds
    name = f"update of {num_rows} rows of {prompt + completion}"
    return name, seconds, f"{num_tokens / seconds:,.0f}", "", f"{share:.1%}"


class Operations(NamedTuple):
    """Seconds that operations took in a profile; seconds from the first to the last."""

    seconds: Counter[Operation]
    span: float


@contextlib.contextmanager
def tracing() -> Iterator[list[Operations]]:
    """Profiles the block; the list holds what ran behind it."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # calls of Python would wait for it
        with jax.profiler.trace(folder, profiler_options=options):
            yield found
            span = time.perf_counter() - start
        (file,) = Path(folder).rglob("*.xplane.pb")
        found.append(read_profile(ProfileData.from_file(str(file)), span))


def read_profile(profile: ProfileData, span: float) -> Operations:
    """Returns the operations of a profile: kernels of the device, of a CPU the operations of programs."""
    seconds, ends = Counter(), []
    on_device = [plane for plane in profile.planes if plane.name.startswith(("/device:GPU", "/device:TPU"))]
    for line in (line for plane in on_device or profile.planes for line in plane.lines):
        for event in line.events if not on_device or line.name.startswith(("Stream", "XLA Ops")) else ():
            stats = dict(event.stats)
            if (on_device or "hlo_op" in stats) and not event.name.startswith(NESTING):
                operation = stats.get("hlo_module", ""), stats.get("hlo_op", event.name)
                seconds[operation] += event.duration_ns / 1e9
                ends += [event.start_ns, event.start_ns + event.duration_ns]
    return Operations(seconds, (max(ends) - min(ends)) / 1e9 if on_device and ends else span)


def trace_segments(rollout: Rollout) -> Operations:
    """Returns what ran from the end of the first segment to that of the last of those that are traced."""
    stack, found, numbers = contextlib.ExitStack(), [], itertools.count()

    def on_segment(*_: object) -> None:
        number = next(numbers)
        if number == 0:
            found.append(stack.enter_context(tracing()))
        if number == NUM_TRACED:
            stack.close()

    with stack:
        rollout.draw(replace(rollout.sampler, on_segment=on_segment))
    return found[0][0]


def programs() -> dict[str, str]:
    """Returns the optimized HLO of the programs of this process, by name: the longest of each."""
    texts = {}
    for executable in jax.devices()[0].client.live_executables():
        for module in executable.hlo_modules():
            text = module.to_string()
            texts[module.name] = max(texts.get(module.name, ""), text, key=len)
    return texts


def kinds_of(text: str) -> dict[str, str]:
    """Returns the kind of each instruction of a program, by its name."""
    parsed = hlo.computations(text)
    return {line.name: kind_of(line, parsed) for lines in parsed.values() for line in lines}


def kind_of(line: hlo.Instruction, parsed: hlo.Computations) -> str:
    """Returns the kind of an instruction, of a fusion that of its largest work."""
    if line.op == "custom-call":
        return kind_of_kernel(line.line)
    inner = [line, *instructions_in(line, parsed)]
    products = [each.line for each in inner if each.op == "dot" or "matmul" in each.op]
    if products:
        return ATTENTION if any(re.search(IN_ATTENTION, product) for product in products) else WEIGHTS
    computing = {each.op for each in inner} - hlo.FREE - {"fusion"}
    return MOVES if computing & MOVING and len(inner) <= 8 else OTHERS


def instructions_in(line: hlo.Instruction, parsed: hlo.Computations) -> Iterator[hlo.Instruction]:
    """Yields the instructions of the fusion that an instruction runs, and of those within it."""
    for each in parsed.get(line.calls, ()):
        yield each
        yield from instructions_in(each, parsed)


def kind_of_kernel(name: str) -> str:
    """Returns the kind of a kernel that XLA does not make, by words in its name."""
    return next((kind for words, kind in LIBRARIES.items() if re.search(words, name, re.I)), OTHERS)


def report_profile(works: Mapping[str, Operations]) -> None:
    """Prints kernels of a token's step, and shares of the time by kind."""
    kinds = {}
    print()
    for program, text in programs().items():
        for name, kind in kinds_of(text).items():
            kinds |= {(program, name): kind, ("", re.sub(r"\W", "_", name)): kind}
        if "decode" in program and hlo.loop_bodies(text):
            print(f"{program}: {hlo.step_kernels(text)} kernels (instructions on a CPU) in a token's step")
    table = []
    for work, found in works.items():
        spent = Counter()
        for operation, seconds in found.seconds.items():
            spent[kinds.get(operation) or kind_of_kernel(operation[1])] += seconds
        shares = [spent[kind] / found.span for kind in KINDS]
        table.append((work, found.span * 1e3, *(f"{share:.0%}" for share in (*shares, 1 - sum(shares)))))
    report("Where the time goes", ("work", "ms", *KINDS, "waits"), table, environment())


def main(config: Command) -> None:
    has_profile = config.work.kernels
    if has_profile and runs_on_cpu():
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # before JAX makes its threads
    prepare()
    layout = make_layout(config.devices)
    model, params = load_training(config, layout)
    if layout.mesh.size == 1:  # as a run's state lays parameters out
        params = jax.device_put(params, layout.replicated)
    limits = measure_limits(layout.mesh.local_devices[0], model.dtype)
    print(f"limits: {limits.describe()}", flush=True)
    table, profiles = [], {}
    rollouts = make_rollouts(config, model, params, layout)
    with contextlib.suppress(KeyboardInterrupt):  # what was measured until then is printed
        clock = time.perf_counter()
        print(*compile_programs([x.programs() for x in rollouts]), sep="\n")
        print(f"programs of rollouts compiled side by side in {time.perf_counter() - clock:.0f} s", flush=True)
        for rollout in rollouts:
            table.append(rollout.measure(limits, config.bench.repeats))
            print(*table[-1], sep="  ", flush=True)
            if has_profile and not profiles:
                profiles[f"{NUM_TRACED * rollout.sampler.sizes().steps} steps"] = trace_segments(rollout)
        update = make_update(config, model, params, layout, random_batch(config, model.vocab_size))
        table.append(measure_update(config, update, model, limits))
        if has_profile:
            with tracing() as traced:
                jax.block_until_ready(update())
            profiles["update"] = traced[0]
    columns = ("work", "seconds", "tokens/s", "occupancy", "of the roofline")
    title = f"Roofline, {config.model_name}, {model.dtype}: median of {config.bench.repeats}"
    report(title, columns, table, environment() | {"limits": limits.describe()}, config.bench.json)
    if profiles:
        report_profile(profiles)


if __name__ == "__main__":
    main(parse(Command, sys.argv[1:], __doc__))
