"""Malformed model folders and data files: each ends in one sentence that names the file."""

import contextlib
import gzip
import importlib.util
import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import ml_dtypes
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from safetensors.numpy import load_file, save_file

from core import eval as evaluation
from core import grpo, sampling, sft
from core.config import Config
from core.sampling import SamplingCommand
from core.sft import SFTConfig
from envs import make_env
from models.checkpoint import load_model
from utils.settings.config import parse
from utils.settings.errors import user_errors

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "tests/fixtures/qwen3-tied"
Edit = Callable[[Path], None]


def outcome(load: Callable[[], None]) -> str:
    """The line that a command prints for a call that fails; empty for one that does not."""
    printed = io.StringIO()
    with contextlib.redirect_stderr(printed):
        try:
            with user_errors():
                load()
        except SystemExit as end:
            assert end.code == 2
    line = printed.getvalue()
    assert line.count("\n") <= 1
    assert len(line) < 1500, line
    return line


# Model folders


def replace(name: str, content: str) -> Edit:
    return lambda folder: (folder / name).write_text(content)


def update(name: str, **fields) -> Edit:
    def edit(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(content | fields))

    return edit


def index(content: object) -> Edit:
    """Moves the weights to a shard, and writes an index with this content."""

    def edit(folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
        (folder / "model.safetensors.index.json").write_text(json.dumps(content))

    return edit


def spoil(name: str, value: float, dtype: type = np.float32) -> Edit:
    """Puts one value into a tensor, once it has another type."""

    def edit(folder: Path) -> None:
        arrays = dict(load_file(folder / "model.safetensors"))
        arrays[name] = arrays[name].astype(dtype)
        arrays[name].flat[-1] = value
        save_file(arrays, folder / "model.safetensors")

    return edit


CONFIG, TOKENIZER, TOKENIZER_CONFIG = "config.json", "tokenizer.json", "tokenizer_config.json"
NORM = "model.layers.1.input_layernorm.weight"
EMBED = "model.embed_tokens.weight"
FIELDS = {  # values of another type or size
    "vocab_size": ("79", 0),
    "num_attention_heads": (0, "4", 3),
    "rope_parameters": ("x", {"rope_type": {}}),
    "layer_types": (5, [5]),
    "dtype": ("int8",),
    "quantization_config": ({"bits": 4},),
    "hidden_size": (None,),
}
MODELS: dict[str, Edit] = {
    **{f"half of {name}": replace(name, '{"a": ') for name in (CONFIG, TOKENIZER, "generation_config.json")},
    **{f"{name} {value!r:.30}": update(CONFIG, **{name: value}) for name in FIELDS for value in FIELDS[name]},
    "list": replace(CONFIG, "[]"),
    "template of no syntax": replace("chat_template.jinja", "{% if %}"),
    "template zero": replace("chat_template.jinja", "{{ 1 / 0 }}"),
    "index without weight_map": index({}),
    "index of a missing file": index({"weight_map": {NORM: "x.safetensors"}}),
    "weights of text": replace("model.safetensors", "x" * 1000),
    "one weight of int32": spoil(NORM, 1, np.int32),
    "nan of bfloat16": spoil(EMBED, np.nan, ml_dtypes.bfloat16),
    "minus infinity of float16": spoil(NORM, -np.inf, np.float16),
    "above float32": spoil(NORM, 1e300, np.float64),
    "tokenizer of other ids": update(TOKENIZER, model={"type": "BPE", "merges": [], "vocab": {"a": 10**5}}),
    "more tokens in the config": update(TOKENIZER_CONFIG, added_tokens_decoder={"500": {"content": "<x>"}}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("models") / "model"


@pytest.mark.parametrize("name", MODELS)
def test_a_malformed_model_folder_ends_in_one_sentence(name, folder):
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(MODEL, folder)
    MODELS[name](folder)
    line = outcome(lambda: load_model(folder))
    assert line.startswith("error: ")
    assert str(folder) in line, line or "it was loaded"


# Data files

ROWS = [{"prompt": f"What is {i} + {i}?", "answer": str(2 * i)} for i in range(30)]
JSONL = "".join(json.dumps(row) + "\n" for row in ROWS)
CSV = "prompt,answer\n" + "".join(f"{row['prompt']},{row['answer']}\n" for row in ROWS)


def parquet(rows: list[dict]) -> bytes:
    out = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), out)
    return out.getvalue()


KINDS = {"jsonl": JSONL.encode(), "json": json.dumps(ROWS).encode(), "csv": CSV.encode()}
KINDS |= {"jsonl.gz": gzip.compress(KINDS["jsonl"]), "parquet": parquet(ROWS)}


def rows_with(line: str) -> bytes:
    """The rows with a line between the third and the fourth."""
    lines = JSONL.splitlines(keepends=True)
    return "".join([*lines[:3], line + "\n", *lines[3:]]).encode("utf-8", "surrogateescape")


LINES = {
    "half": '{"prompt": "x',
    "list": "[1, 2]",
    "nested": "[" * 100_000,
    "no answer": '{"prompt": "x"}',
    "messages": '{"prompt": [{"role": "king", "content": "x"}], "answer": "5"}',
    "latin-1": '{"prompt": "\udce9", "answer": "5"}',
}
# name: ending, content, what the sentence names, problems left with skip_bad_rows=true (0: it is refused all the same)
DATA = {
    **{f"{kind} empty": (kind, b"", "", 0) for kind in KINDS},
    **{f"{kind} garbage": (kind, np.random.default_rng(0).bytes(1000), "", 0) for kind in KINDS},
    **{f"{kind} cut": (kind, x[: len(x) // 2], "", 15 * (kind in ("jsonl", "csv"))) for kind, x in KINDS.items()},
    **{f"line {name}": ("jsonl", rows_with(line), ":4 ", 30) for name, line in LINES.items()},
    "CSV too many": ("csv", CSV.encode() + b"x,5,6\n", ":32 ", 30),
    "CSV open quote": ("csv", CSV.encode() + b'"x,5\n', ":32 ", 0),
    "CSV other columns": ("csv", CSV.replace("prompt,answer", "q,a").encode(), "'q', 'a'", 0),
    "JSON list of lists": ("json", b"[[1], [2]]", ", row 1", 0),
    "parquet without a column": ("parquet", parquet([{"prompt": "x"}]), "'prompt'", 0),
}


@pytest.mark.parametrize("name", DATA)
def test_a_malformed_data_file_ends_in_one_sentence(name, tmp_path):
    ending, content, place, num_left = DATA[name]
    file = tmp_path / f"rows.{ending}"
    notes = []
    file.write_bytes(content)
    line = outcome(lambda: make_env("dataset", path=str(file)))
    assert line.startswith("error: ")
    assert str(file) in line
    assert place in line, line or "it was loaded"
    line = outcome(lambda: notes.append(make_env("dataset", path=str(file), skip_bad_rows=True).note))
    if num_left:
        assert notes
        assert notes[0].startswith(f"dataset: {num_left} problems of "), line or notes
    else:
        assert line.startswith("error: ")
        assert str(file) in line, line or notes


def test_long_fields_of_csv_are_read(tmp_path):
    file = tmp_path / "rows.csv"
    file.write_text(CSV + f'"{"two lines" * 100_000}\n",5\n')  # above the 128 KB of Python's default
    assert make_env("dataset", path=str(file)).note.startswith("dataset: 31 problems")


# Positions

COMMANDS = {  # that are asked for more tokens than a model of 48 positions has; what each says to do
    "grpo": (grpo.main, partial(parse, Config), "--env_name countdown", "a prompt with its", "lower --num_gen"),
    "sft": (sft.main, partial(parse, SFTConfig), "--data ROWS", "a row", "lower --max_length"),
    "eval": (evaluation.main, evaluation.parse_command, "--env_name countdown", "a prompt with its compl", "lower --n"),
    "chat": (sampling.main, partial(parse, SamplingCommand), "--prompts ROWS", "a prompt with its", "lower --num_gen"),
}


@pytest.fixture
def few_positions(tmp_path):
    """models/tiny with 48 positions, and rows for it."""
    shutil.copytree(ROOT / "models/tiny", tmp_path / "model")
    config = json.loads((tmp_path / "model/config.json").read_text())
    (tmp_path / "model/config.json").write_text(json.dumps(config | {"max_position_embeddings": 48}))
    texts = [f"Row {i}. " + "word " * (60 if i % 2 else 1) for i in range(40)]
    rows = [{"prompt": text, "completion": text, "answer": "5"} for text in texts]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "model"


@pytest.mark.parametrize("name", COMMANDS)
def test_more_tokens_than_positions_end_a_command(name, few_positions, tmp_path):
    main, read, options, what, remedy = COMMANDS[name]
    argv = ["--model_dir", str(few_positions), *options.replace("ROWS", f"{tmp_path}/rows.jsonl").split()]
    argv += [] if name in ("eval", "chat") else ["--save_dir", str(tmp_path / "run")]
    argv += [] if name == "sft" else ["--num_generation_tokens", "60"]
    line = outcome(lambda: main(read(argv)))
    assert line.startswith(f"error: {what}")
    assert "the model has 48 positions" in line
    assert remedy in line, line


def test_prompts_without_room_for_a_completion_are_left_out(few_positions, tmp_path, capsys):
    options = ["--env_name", "dataset", "--env_options", f"path={tmp_path}/rows.jsonl", "--num_generation_tokens", "20"]
    argv = ["--model_dir", str(few_positions), *options, "--show", "1"]
    assert not outcome(lambda: evaluation.main(evaluation.parse_command(argv)))
    printed = capsys.readouterr().out
    assert "of more than 28 tokens skipped" in printed
    assert "prompts of at most 28 tokens, as the model has 48 positions" in printed


# Whole commands

slow = partial(pytest.param, marks=pytest.mark.slow)  # each command takes four CPU seconds for its imports
HAS_ACCELERATOR = any(map(importlib.util.find_spec, ("jax_plugins", "libtpu")))


def command(script: str, *options: str, **env: str) -> str:
    """The last line on stderr of a command that must fail with a sentence."""
    line = [sys.executable, script, *options]
    done = subprocess.run(line, cwd=ROOT, env=os.environ | env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr, done.stderr
    return done.stderr.splitlines()[-1]


@pytest.mark.skipif(HAS_ACCELERATOR, reason="an accelerator may be there")
@pytest.mark.parametrize("platform", ["gpu", *map(slow, ("cuda", "tpu", "nonesuch"))])
def test_a_device_that_is_not_there_is_named(platform):
    package = {"gpu": "cuda13", "cuda": "cuda13", "tpu": "tpu"}.get(platform)
    advice = f': pip install "jax[{package}]"' if package else ""
    line = command("core/sampling.py", JAX_PLATFORMS=platform)
    assert line.startswith(f"error: JAX_PLATFORMS={platform}: JAX finds no such device here")
    assert f"but cpu{advice}" in line


@pytest.mark.slow
@pytest.mark.parametrize("script", ["core/grpo.py", "core/eval.py", "core/sampling.py"])
def test_commands_end_in_one_sentence(script, tmp_path):
    shutil.copytree(MODEL, tmp_path / "model")
    MODELS["template zero"](tmp_path / "model")
    line = command(script, "--model_dir", str(tmp_path / "model"))
    assert line.startswith(f"error: {tmp_path / 'model'}: the model's chat template fails (")
