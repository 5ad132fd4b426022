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
NESTED = "[" * 100_000
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


def replace(name: str, content: str | bytes) -> Edit:
    return lambda folder: (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def update(name: str, **fields) -> Edit:
    def edit(folder: Path) -> None:
        file = folder / name
        file.write_text(json.dumps(json.loads(file.read_text()) | fields))

    return edit


def index_file(content: str | bytes) -> Edit:
    """Moves the weights to a shard, and writes an index with this content."""

    def edit(folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
        replace(INDEX, content)(folder)

    return edit


def index(names: object) -> Edit:
    return index_file(json.dumps({"weight_map": names}))


def tensors(edit_all: Callable[[dict], None]) -> Edit:
    def edit(folder: Path) -> None:
        arrays = dict(load_file(folder / "model.safetensors"))
        edit_all(arrays)
        save_file(arrays, folder / "model.safetensors")

    return edit


def spoil(name: str, value: float, dtype: type = np.float32) -> Edit:
    """Puts one value into a tensor, once it has another type."""

    def edit_all(arrays: dict) -> None:
        arrays[name] = arrays[name].astype(dtype)
        arrays[name].flat[-1] = value

    return tensors(edit_all)


def add_token(**fields) -> Edit:
    def edit(folder: Path) -> None:
        file = folder / "tokenizer.json"
        content = json.loads(file.read_text())
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        content["added_tokens"].append({"id": 100, "content": "<x>", "special": True} | flags | fields)
        file.write_text(json.dumps(content))

    return edit


CONFIG, TOKENIZER, TOKENIZER_CONFIG = "config.json", "tokenizer.json", "tokenizer_config.json"
GENERATION, INDEX = "generation_config.json", "model.safetensors.index.json"
FILES = CONFIG, TOKENIZER, TOKENIZER_CONFIG, GENERATION
BPE = {"type": "BPE", "merges": []}
NORM = "model.layers.1.input_layernorm.weight"
EMBED = "model.embed_tokens.weight"
CONTENTS = {"empty": "", "list": "[]", "half": '{"a": ', "nested": NESTED, "latin-1": b'{"a": "\xe9"}'}
FIELDS = {  # values of another type or size
    "vocab_size": ("79", 79.5, 0, -1, [79]),
    "num_attention_heads": (0, "4", 3, [4]),
    "head_dim": (0, 7, "8"),
    "rope_scaling": ("linear", 5),
    "rope_parameters": ("x", {"rope_type": {}}),
    "layer_types": (5, "full_attention", [[]], [5]),
    "dtype": (5, "int8", "x"),
    "quantization_config": ("x", {"bits": 4}),
}
TEMPLATES = {
    "syntax": "{% if %}",
    "zero": "{{ 1 / 0 }}",
    "sandbox": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
}
MODELS: dict[str, Edit] = {
    **{f"{name} {kind}": replace(name, CONTENTS[kind]) for name in FILES for kind in CONTENTS},
    **{f"{INDEX} {kind}": index_file(content) for kind, content in CONTENTS.items()},
    **{f"{name} {value!r:.30}": update(CONFIG, **{name: value}) for name in FIELDS for value in FIELDS[name]},
    **{f"no {name}": update(CONFIG, **{name: None}) for name in ("architectures", "vocab_size", "hidden_size")},
    **{f"template {kind}": replace("chat_template.jinja", text) for kind, text in TEMPLATES.items()},
    "template in the config": update(TOKENIZER_CONFIG, chat_template="{{ 1 / 0 }}"),
    "template of no text": update(TOKENIZER_CONFIG, chat_template=5),
    "index without weight_map": index_file("{}"),
    "index of nothing": index({}),
    "index of a missing file": index({NORM: "x.safetensors"}),
    "weights empty": replace("model.safetensors", b""),
    "weights of text": replace("model.safetensors", "x" * 1000),
    "weights with a long header": replace("model.safetensors", b"\xff" * 8 + b"{}"),
    "one weight of int32": tensors(lambda arrays: arrays.update({NORM: arrays[NORM].astype(np.int32)})),
    "nan": spoil(NORM, np.nan),
    "nan of bfloat16": spoil(EMBED, np.nan, ml_dtypes.bfloat16),
    "infinity": spoil(EMBED, np.inf),
    "minus infinity of float16": spoil(NORM, -np.inf, np.float16),
    "above float32": spoil(NORM, 1e300, np.float64),
    "tokenizer without added_tokens": replace(TOKENIZER, '{"version": "1.0"}'),
    "tokenizer without a model": update(TOKENIZER, model=None),
    "tokenizer of another type": update(TOKENIZER, model={"type": "Nonesuch"}),
    "tokenizer of other ids": update(TOKENIZER, model=BPE | {"vocab": {"a": 10**5}}),
    "added token beyond": add_token(),
    "added token of text": add_token(id="x"),
    "more tokens in the config": update(TOKENIZER_CONFIG, added_tokens_decoder={"500": {"content": "<x>"}}),
    "eos token that is new": update(TOKENIZER_CONFIG, eos_token="<nonesuch>"),
    "eos token that is a number": update(TOKENIZER_CONFIG, eos_token=5),
    "tokenizer class": update(TOKENIZER_CONFIG, tokenizer_class=["x"]),
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
KINDS |= {f"{kind}.gz": gzip.compress(content) for kind, content in KINDS.items()} | {"parquet": parquet(ROWS)}
DAMAGES = {
    "empty": lambda content: b"",
    "cut": lambda content: content[: len(content) // 2],
    "garbage": lambda content: np.random.default_rng(0).bytes(1000),
    "zeros": lambda content: b"\0" * 1000,
    "zeros at the end": lambda content: content + b"\0" * 1000,
    "spoiled": lambda content: content[:100] + b"\xff\xfe\x00\x22" + content[104:],
}


def rows_with(line: str, kind: str = "jsonl") -> bytes:
    """The rows with a line between the third and the fourth."""
    lines = (JSONL if kind == "jsonl" else CSV).splitlines(keepends=True)
    place = 3 if kind == "jsonl" else 4
    return "".join([*lines[:place], line + "\n", *lines[place:]]).encode("utf-8", "surrogateescape")


JSONL_LINES = {
    "half": '{"prompt": "x',
    "list": "[1, 2]",
    "nested": NESTED,
    "no answer": '{"prompt": "x"}',
    "number": '{"prompt": 5, "answer": "5"}',
    "messages": '{"prompt": [{"role": "king", "content": "x"}], "answer": "5"}',
    "messages of a role": '{"prompt": [{"role": "user"}], "answer": "5"}',
    "surrogate": '{"prompt": "a\\ud800b", "answer": "5"}',
    "latin-1": '{"prompt": "\udce9", "answer": "5"}',
    "zeros": "\0" * 1000,
}
CSV_LINES = {"latin-1": "\udce9,5", "zeros": "\0" * 1000, "too few": "x", "too many": "x,5,6"}
DAMAGED = [
    (kind, name, damage)
    for kind in KINDS
    for name, damage in DAMAGES.items()
    if name != "zeros at the end" or not kind.endswith(".gz")  # which is allowed there
]
LEFT_OF = {"cut": 15, "zeros at the end": 30, "spoiled": 29}
LEFT = {(kind, name): num_left for kind in ("jsonl", "csv") for name, num_left in LEFT_OF.items()}
# name: ending, content, what the sentence names, problems left with skip_bad_rows=true (0: it is refused all the same)
DATA = {
    **{f"{kind} {name}": (kind, damage(KINDS[kind]), "", LEFT.get((kind, name), 0)) for kind, name, damage in DAMAGED},
    **{f"line {name}": ("jsonl", rows_with(line), ":4 ", 30) for name, line in JSONL_LINES.items()},
    **{f"line of CSV {name}": ("csv", rows_with(line, "csv"), ":5 ", 30) for name, line in CSV_LINES.items()},
    "CSV open quote": ("csv", rows_with('"x,5', "csv"), ":5 ", 0),
    "CSV quote in a quote": ("csv", rows_with('"a"b",5', "csv"), ":5 ", 0),
    "CSV quote closed elsewhere": ("csv", rows_with('"x,5\ny"z,5', "csv"), ":5 ", 0),
    "CSV other columns": ("csv", CSV.replace("prompt,answer", "q,a").encode(), "'q', 'a'", 0),
    "CSV utf-16": ("csv", CSV.encode("utf-16"), "", 0),
    "JSONL utf-16": ("jsonl", JSONL.encode("utf-16"), "", 0),
    "JSONL other columns": ("jsonl", JSONL.replace("answer", "solution").encode(), "'prompt', 'solution'", 0),
    "JSON nested": ("json", NESTED.encode(), "", 0),
    "JSON object": ("json", b'{"a": 1, "b": []}', "", 0),
    "JSON list of lists": ("json", b"[[1], [2]]", ", row 1", 0),
    "JSON surrogate": ("json", rb'[{"prompt": "\ud800", "answer": "5"}]', ", row 1", 0),
    "gz with a wrong sum": ("jsonl.gz", KINDS["jsonl.gz"][:-8] + b"\0" * 8, "", 0),
    "gz with a tail": ("jsonl.gz", KINDS["jsonl.gz"] + b"tail", "", 0),
    "parquet without a column": ("parquet", parquet([{"prompt": "x"}]), "'prompt'", 0),
    "parquet of bytes that are no text": ("parquet", parquet([{"prompt": b"\xff", "answer": b"5"}]), ", row 1", 0),
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
