"""Shared by benchmarks: named shapes and random models, the work, medians with spread, tables, JSON."""

import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TextIO

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float, PyTree

from models.architecture import Decoder
from models.checkpoint import read_config, save_model
from models.decoder import init_params
from models.families import text_config
from models.files import CONFIG
from models.tokenizer import GENERATION_CONFIG, load_tokenizer
from utils.files import write_json
from utils.metrics.jsonl import JSON, read_json
from utils.runs.origin import find_cpu
from utils.settings.options import option

ROOT = Path(__file__).resolve().parent.parent
SHAPES = {  # vocabulary, width, MLP, layers, query heads, key heads, channels of a head
    "tiny": (512, 64, 128, 2, 4, 2, 16),  # to see that a command works
    "small": (4096, 256, 768, 8, 8, 4, 32),
    "small_vocab": (151936, 256, 768, 8, 8, 4, 32),
    "Qwen3-0.6B": (151936, 1024, 3072, 28, 16, 8, 128),
    "Qwen3-1.7B": (151936, 2048, 6144, 28, 16, 8, 128),
    "Qwen3-4B": (151936, 2560, 9728, 36, 32, 8, 128),
    "Qwen3-8B": (151936, 4096, 12288, 36, 32, 8, 128),
    "Qwen3-14B": (151936, 5120, 17408, 40, 40, 8, 128),
    "Qwen3-32B": (151936, 5120, 25600, 64, 64, 8, 128),
}
UNTIED = ("Qwen3-8B", "Qwen3-14B", "Qwen3-32B")
# config.json of published models, without fields that are not read. Sources: their pages on the hub; of Qwen3.5-4B
# slime's scripts/models/qwen3.5-4B.sh, and transformers' defaults for the sizes of its DeltaNets.
PUBLISHED = ROOT / "bench/shapes.json"


Figure = str | float
Setting = bool | float | str | Mesh | None  # a field of Decoder


@dataclass(frozen=True)
class BenchConfig:
    """Benchmark."""

    shape: str = option("small", "Shape of a random model", [*SHAPES, "Qwen2.5-0.5B"])
    prompt_tokens: int = option(64, "Tokens of each prompt")
    repeats: int = option(5, "Timed runs, after one that compiles; medians are reported")
    json: str = option("", "File for the figures; empty: not written")


def shape(name: str, **more: Setting) -> Decoder:
    """Returns the architecture of a named shape, or of a published model."""
    if name not in SHAPES:
        config = text_config(read_json(PUBLISHED)[name], PUBLISHED)
        return Decoder(**read_config(config, PUBLISHED), **more)
    vocabulary, width, mlp, layers, heads, key_heads, channels = SHAPES[name]
    tied = name not in UNTIED
    return Decoder(vocabulary, width, mlp, layers, heads, key_heads, channels, tie_word_embeddings=tied, **more)


def write_random_model(name: str, folder: str | Path, stop_share: float = 0.0) -> str:
    """Returns a folder with a random model of a named shape and the tokenizer of models/tiny; written if not there.

    So much of the vocabulary ends a completion besides: the ids below.
    """
    folder = Path(folder) / name
    if not (folder / CONFIG).is_file():
        folder.parent.mkdir(parents=True, exist_ok=True)
        model = shape(name)
        params = jax.jit(init_params, static_argnums=0)(model, jax.random.key(0))
        save_model(folder, model, params, load_tokenizer(ROOT / "models/tiny"))
        generation = read_json(folder / GENERATION_CONFIG)
        num_stops = int(stop_share * model.vocab_size)
        stops = [*generation["eos_token_id"], *range(model.vocab_size - num_stops, model.vocab_size)]
        write_json(folder / GENERATION_CONFIG, generation | {"eos_token_id": stops})
    return str(folder)


def make_prompts(vocabulary: int, groups: int, num_tokens: int) -> list[list[int]]:
    """Returns random prompts, the same in every process, without ids below 10, which special tokens tend to have."""
    return np.random.default_rng(0).integers(10, vocabulary, (groups, num_tokens)).tolist()


def rounds_of(runs: Sequence[Callable[[], PyTree]], repeats: int) -> Float[np.ndarray, "runs rounds 2"]:
    """Returns wall-clock and CPU seconds of calls in interleaved rounds, after one of each that compiles."""
    for run in runs:
        jax.block_until_ready(run())
    times = np.zeros((len(runs), repeats, 2))
    for round_number in range(repeats):
        for i, run in enumerate(runs):
            start = time.perf_counter(), time.process_time()
            jax.block_until_ready(run())
            end = time.perf_counter(), time.process_time()
            times[i, round_number] = np.subtract(end, start)
    return times


def seconds_of(run: Callable[[], PyTree], repeats: int) -> list[float]:
    """Returns wall-clock seconds of each call, after one that compiles."""
    return rounds_of([run], repeats)[0, :, 0].tolist()


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Returns median and range of measurements, as text."""
    median = statistics.median(values)
    low = min(values)
    high = max(values)
    return f"{median:.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"


def environment(*packages: str) -> dict[str, str | int]:
    """Returns device, threads and versions that figures come from."""
    facts = {
        "device": f"{jax.devices()[0].device_kind} x {jax.device_count()}",
        "cpu": find_cpu(),
        "threads": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
    }
    for name in ("jax", "jaxlib", *packages):
        try:
            facts[name] = version(name)
        except PackageNotFoundError:
            facts[name] = "absent"
    return facts


def format_figure(x: Figure) -> str:
    """Returns a cell of a table: four digits of a number that is not whole."""
    if isinstance(x, str):
        return x
    return f"{x:,}" if isinstance(x, int) else f"{x:,.4g}"


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[Figure]]) -> list[str]:
    """Returns the lines of a Markdown table."""
    cells = [[format_figure(x) for x in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    rule = ["-" * width for width in widths]
    lines = []
    for row in (columns, rule, *cells):
        padded = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("| " + " | ".join(padded) + " |")
    return lines


def run_command(script: str, options: Mapping[str, object], out: TextIO | None = None) -> None:
    """Prints the command line of a script of this repository, and runs it; with `out`, what it prints goes there."""
    flags = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    line = [sys.executable, script, *flags]
    print(shlex.join(line[1:]), flush=True)
    subprocess.run(line, cwd=ROOT, check=True, stdout=out, stderr=out)


def report(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[Figure]],
    machine: Mapping[str, Figure],
    file: str = "",
    **more: JSON,
) -> None:
    """Prints a Markdown table below what it was measured on; with `file`, writes all of it as JSON too."""
    facts = ", ".join(f"{name} {value}" for name, value in machine.items())
    print(f"\n{title}\n{facts}\n")
    print(*markdown_table(columns, rows), sep="\n")
    if file:
        objects = [dict(zip(columns, row, strict=True)) for row in rows]
        content = {"title": title, "environment": machine, "rows": objects} | more
        Path(file).expanduser().write_text(json.dumps(content, indent=2) + "\n")
