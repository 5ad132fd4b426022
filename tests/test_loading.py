"""Malformed model folders and data files: each ends in one sentence that names the file, within seconds.

The tables hold the damage; the functions that load are those of the commands, and a few rows run a whole command.
"""

import contextlib
import io
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from models.checkpoint import load_model
from utils.config import user_errors

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "tests/fixtures/qwen3-tied"
SLOW = 5  # CPU seconds
NESTED = "[" * 100_000
Edit = Callable[[Path], None]


def outcome(load: Callable[[], None]) -> str:
    """The line that a command prints for a call that fails; empty for one that does not. It must not take long."""
    start, printed = time.process_time(), io.StringIO()
    with contextlib.redirect_stderr(printed):
        try:
            with user_errors():
                load()
        except SystemExit as end:
            assert end.code == 2
    assert time.process_time() - start < SLOW
    line = printed.getvalue()
    assert line.count("\n") <= 1 and len(line) < 1500, line
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


def cast(dtype: type) -> Edit:
    return tensors(lambda arrays: arrays.update({name: x.astype(dtype) for name, x in arrays.items()}))


def spoil(name: str, value: float, dtype: type = np.float32) -> Edit:
    """Puts one value into a tensor, once it has another type."""

    def edit_all(arrays: dict) -> None:
        arrays[name] = arrays[name].astype(dtype)
        arrays[name].flat[-1] = value

    return tensors(edit_all)


def link(name: str, target: str) -> Edit:
    def edit(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(target)

    return edit


def pipe(name: str) -> Edit:
    def edit(folder: Path) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return edit


def add_token(**fields) -> Edit:
    def edit(folder: Path) -> None:
        file = folder / "tokenizer.json"
        content = json.loads(file.read_text())
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        content["added_tokens"].append({"id": 100, "content": "<x>", "special": True} | flags | fields)
        file.write_text(json.dumps(content))

    return edit


CONFIG, TOKENIZER = "config.json", "tokenizer.json"
TOKENIZER_CONFIG, GENERATION, INDEX = "tokenizer_config.json", "generation_config.json", "model.safetensors.index.json"
BPE = {"type": "BPE", "merges": []}
NORM, EMBED = "model.layers.1.input_layernorm.weight", "model.embed_tokens.weight"
CONTENTS = {
    "empty": "", "list": "[]", "null": "null", "number": "5", "text": '"x"', "half": '{"a": ', "nested": NESTED,
    "latin-1": b'{"a": "\xe9"}', "zeros": b"\0" * 1000, "long number": '{"a": ' + "9" * 5000 + "}",
}  # fmt: skip
FIELDS = {
    "architectures": ([], "Qwen3ForCausalLM", [5], {}, ["\x1b[2J" * 999]),
    "vocab_size": ("79", 79.5, 0, -1, 10**30, True, [79]),
    "hidden_size": ("32", 0, 32.5, {}),
    "intermediate_size": ("40", -40, 10**12),
    "num_hidden_layers": (0, 10**9, "2", 1.5, 10**400),
    "num_attention_heads": (0, "4", 3, [4]),
    "num_key_value_heads": (0, 3, "2"),
    "head_dim": (0, 7, "8", 10**9),
    "rms_norm_eps": ("x", 0, -1, float("nan"), float("inf")),
    "rope_scaling": ([], "linear", 5),
    "rope_parameters": ("x", {"rope_theta": "x"}, {"rope_theta": -1}, {"rope_type": {}}, {"rope_type": ["x"]}),
    "layer_types": (5, "full_attention", {}, [[]], [5]),
    "tie_word_embeddings": ("true", 2, []),
    "max_position_embeddings": ("x", 0),
    "hidden_act": (5, []),
    "dtype": (5, "int8", "x"),
    "quantization_config": ("x", {"bits": 4}),
}
TEMPLATES = {
    "syntax": "{% if %}",
    "unclosed": "{% for message in messages %}",
    "unknown filter": "{{ messages | nonesuch }}",
    "exception": "{{ raise_exception('no') }}",
    "undefined": "{{ messages.a.b.c }}",
    "type": "{{ 1 + 'a' }}",
    "zero": "{{ 1 / 0 }}",
    "sandbox": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "repeated": "{{ 'a' * 10**9 }}",
    "repeated later": "{{ messages[0].role * 1000000000 }}",
    "filter": "{{ 'a' | center(10**9) }}",
    "flood": "{{ 'a' * 10**7 }}",
    "doubled": "{% set n = namespace(s='a') %}{% for i in range(40) %}{% set n.s = n.s + n.s %}{% endfor %}",
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "range": "{{ range(10**9) | list }}",
}
MODELS: dict[str, Edit] = {
    **{f"{CONFIG} {kind}": replace(CONFIG, content) for kind, content in CONTENTS.items()},
    **{f"{TOKENIZER} {kind}": replace(TOKENIZER, content) for kind, content in CONTENTS.items()},
    **{f"{TOKENIZER_CONFIG} {kind}": replace(TOKENIZER_CONFIG, content) for kind, content in CONTENTS.items()},
    **{f"{GENERATION} {kind}": replace(GENERATION, content) for kind, content in CONTENTS.items()},
    **{f"{INDEX} {kind}": index_file(content) for kind, content in CONTENTS.items()},
    **{f"{name} {value!r:.30}": update(CONFIG, **{name: value}) for name in FIELDS for value in FIELDS[name]},
    **{f"no {name}": update(CONFIG, **{name: None}) for name in ("architectures", "vocab_size", "hidden_size")},
    **{f"template {kind}": replace("chat_template.jinja", text) for kind, text in TEMPLATES.items()},
    "template in the config": update(TOKENIZER_CONFIG, chat_template="{{ 1 / 0 }}"),
    "template of no text": update(TOKENIZER_CONFIG, chat_template=5),
    "index without weight_map": index_file("{}"),
    "index of a list": index([]),
    "index of nothing": index({}),
    "index of integers": index({NORM: 1}),
    "index of objects": index({NORM: {}}),
    "index above": index({NORM: "../model.safetensors"}),
    "index absolute": index({NORM: "/etc/passwd"}),
    "index of a subfolder": index({NORM: "a/b.safetensors"}),
    "index of another file": index({NORM: "config.json"}),
    "index of a missing file": index({NORM: "x.safetensors"}),
    "index with an escape": index({NORM: "\x1b]0;x\x07.safetensors"}),
    "index with a zero": index({NORM: "\0.safetensors"}),
    "weights empty": replace("model.safetensors", b""),
    "weights of text": replace("model.safetensors", "x" * 1000),
    "weights with a long header": replace("model.safetensors", b"\xff" * 8 + b"{}"),
    "weights with a nested header": replace("model.safetensors", (10**5).to_bytes(8, "little") + NESTED.encode()),
    "weights of a pickle": replace("model.safetensors", b"\x80\x04cos\nsystem\n(S'false'\ntR."),
    "weights are a pipe": pipe("model.safetensors"),
    "weights are a device": link("model.safetensors", "/dev/zero"),
    "weights are a loop": link("model.safetensors", "model.safetensors"),
    "config is a pipe": pipe(CONFIG),
    **{f"weights of {dtype.__name__}": cast(dtype) for dtype in (np.int8, np.int32, np.int64, np.uint8, np.bool_)},
    "one weight of int32": tensors(lambda arrays: arrays.update({NORM: arrays[NORM].astype(np.int32)})),
    "nan": spoil(NORM, np.nan),
    "nan of bfloat16": spoil(EMBED, np.nan, ml_dtypes.bfloat16),
    "infinity": spoil(EMBED, np.inf),
    "minus infinity of float16": spoil(NORM, -np.inf, np.float16),
    "above float32": spoil(NORM, 1e300, np.float64),
    "tokenizer without added_tokens": replace(TOKENIZER, '{"version": "1.0"}'),
    "tokenizer without a model": update(TOKENIZER, model=None),
    "tokenizer of another type": update(TOKENIZER, model={"type": "Nonesuch"}),
    "tokenizer without vocabulary": update(TOKENIZER, added_tokens=[], model=BPE | {"vocab": {}}),
    "tokenizer of other ids": update(TOKENIZER, model=BPE | {"vocab": {"a": 10**5}}),
    "tokenizer of minus ids": update(TOKENIZER, model=BPE | {"vocab": {"a": -1}}),
    "tokenizer with a nested decoder": update(TOKENIZER, decoder=json.loads("[" * 500 + "]" * 500)),
    "tokenizer is a link": link(TOKENIZER, "/etc/passwd"),
    "vocab.json is a link": link("vocab.json", "/etc/passwd"),
    "merges.txt is a link": link("merges.txt", "/etc/passwd"),
    "added token beyond": add_token(),
    "added token far beyond": add_token(id=2**31),
    "added token of text": add_token(id="x"),
    "added token below zero": add_token(id=-1),
    "more tokens in the config": update(TOKENIZER_CONFIG, added_tokens_decoder={"500": {"content": "<x>"}}),
    "eos token that is new": update(TOKENIZER_CONFIG, eos_token="<nonesuch>"),
    "pad token that is new": update(TOKENIZER_CONFIG, pad_token="<nonesuch>"),
    "eos token that is a number": update(TOKENIZER_CONFIG, eos_token=5),
    "tokenizer class": update(TOKENIZER_CONFIG, tokenizer_class=["x"]),
    **{
        f"eos_token_id {value!r}": update(GENERATION, eos_token_id=value)
        for value in ("x", ["x"], [[0]], {}, 79, [0, 10**9], -1, 0.5, True, "")
    },
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
    assert line.startswith("error: ") and str(folder) in line, line or "it was loaded"
