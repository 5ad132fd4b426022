"""What the benchmarks share: named shapes and random models, the work, medians with spread, tables, JSON."""

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import jax
import numpy as np

from models.checkpoint import CONFIG, load_model, read_config, read_json, save_model
from models.qwen3 import Qwen, init_params
from models.tokenizer import load_tokenizer
from utils.settings.config import option

ROOT = Path(__file__).resolve().parent.parent
SHAPES = {  # vocabulary, width, MLP, layers, query heads, key heads, channels of a head
    "small": (4096, 256, 768, 8, 8, 4, 32),
    "small_vocab": (151936, 256, 768, 8, 8, 4, 32),
    "Qwen3-0.6B": (151936, 1024, 3072, 28, 16, 8, 128),
    "Qwen3-1.7B": (151936, 2048, 6144, 28, 16, 8, 128),
    "Qwen3-4B": (151936, 2560, 9728, 36, 32, 8, 128),
    "Qwen3-8B": (151936, 4096, 12288, 36, 32, 8, 128),
}


@dataclass(frozen=True)
class BenchConfig:
    """Benchmark."""

    shape: str = option("small", "random model of this shape", list(SHAPES))
    model_dir: str = option("", "Hugging Face folder of a model to measure instead of a random one")
    groups_per_batch: int = option(8, "prompts")
    group_size: int = option(8, "completions of each prompt")
    prompt_tokens: int = option(64, "tokens of each prompt")
    num_generation_tokens: int = option(128, "tokens of each completion")
    repeats: int = option(5, "timed runs, after one that compiles; medians are reported")
    json: str = option("", "file for the figures")


def shape(name: str, **more) -> Qwen:
    """The architecture of a named shape."""
    vocabulary, width, mlp, layers, heads, key_heads, channels = SHAPES[name]
    tied = name != "Qwen3-8B"
    return Qwen(vocabulary, width, mlp, layers, heads, key_heads, channels, tie_word_embeddings=tied, **more)


def load(config: BenchConfig, layout=None, dtype: str = "", **more) -> tuple[Qwen, dict]:
    """The model to measure, and its parameters; `dtype` as load_model's."""
    if config.model_dir:
        return load_model(config.model_dir, layout, dtype, **more)[:2]
    dtype = dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")
    model = shape(config.shape, dtype=dtype, mesh=layout.mesh if layout else None, **more)
    specs = jax.tree.map(lambda s: layout.sharding(*s), model.table(), is_leaf=lambda x: hasattr(x, "axes")) if layout \
        else None  # fmt: skip
    return model, jax.jit(init_params, static_argnums=0, out_shardings=specs)(model, jax.random.key(0))


def read_shape(folder: str | Path) -> Qwen:
    """The architecture of a Hugging Face folder."""
    file = Path(folder).expanduser() / CONFIG
    return Qwen(**read_config(read_json(file), file))


def write_random_model(name: str, folder: str | Path) -> str:
    """A Hugging Face folder with a random model of a named shape and the tokenizer of models/tiny; kept if there."""
    folder = Path(folder) / name
    if not (folder / CONFIG).is_file():
        folder.parent.mkdir(parents=True, exist_ok=True)
        model = shape(name)
        save_model(folder, model, init_params(model, jax.random.key(0)), load_tokenizer(ROOT / "models/tiny"))
    return str(folder)


def make_prompts(vocabulary: int, groups: int, num_tokens: int) -> list[list[int]]:
    """Random prompts, the same in every process; ids below 10, where special tokens tend to stand, are left out."""
    return np.random.default_rng(0).integers(10, vocabulary, (groups, num_tokens)).tolist()


def seconds_of(run: Callable, repeats: int) -> list[float]:
    """Wall-clock seconds of each call, after one that compiles."""
    jax.block_until_ready(run())
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - start)
    return times


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Median and range of some measurements."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def environment(*packages: str) -> dict[str, str | int]:
    """Where figures come from: device, threads and versions."""
    found = {"device": f"{jax.devices()[0].device_kind} x {jax.device_count()}", "machine": platform.machine()}
    found |= {"threads": len(os.sched_getaffinity(0)), "python": platform.python_version()}
    for name in ("jax", "jaxlib", *packages):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "absent"
    return found


def report(title: str, columns: Sequence[str], rows: Sequence[Sequence], where: dict, file: str = "", **more) -> None:
    """Prints a Markdown table below what it was measured on; with `file`, writes all of it as JSON too."""
    cells = [[x if isinstance(x, str) else f"{x:,.4g}" for x in row] for row in rows]
    widths = [max(len(row[i]) for row in (columns, *cells)) for i in range(len(columns))]
    print(f"\n{title}\n" + ", ".join(f"{name} {value}" for name, value in where.items()) + "\n")
    for row in (columns, ["-" * width for width in widths], *cells):
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |")
    if file:
        found = {"title": title, "environment": where, "rows": [dict(zip(columns, row, strict=True)) for row in rows]}
        Path(file).expanduser().write_text(json.dumps(found | more, indent=2) + "\n")
