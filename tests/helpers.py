"""Shared by tests: a small random model, a tokenizer without files, runs, tolerances, Python on four devices."""

import json
import math
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import MappingProxyType

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from core import grpo
from core.config import Config
from core.sampler import Launched, Scheduler
from models.architecture import FULL, LINEAR, Decoder, DeltaShape, is_spec
from models.names import EMBED, HEAD, Params
from models.tokenizer import Tokenizer
from tests.kill_runs import arguments
from utils.devices.sharding import Layout
from utils.settings.config import parse
from utils.settings.errors import user_errors

ROOT = Path(__file__).resolve().parent.parent
TINY = ROOT / "models" / "tiny"
MODEL = Decoder(200, 32, 64, 2, 4, 2, 8, tie_word_embeddings=False, remat="none")  # a vocabulary of 200, width 32
SHAPE_OF_HYBRID = {"num_hidden_layers": 4, "layer_types": (LINEAR, LINEAR, LINEAR, FULL)}
SHAPE_OF_HYBRID |= {"delta": DeltaShape(2, 4, 8, 16, kernel=4), "output_gate": True, "partial_rotary_factor": 0.5}
# With a large epsilon: else the norm of an output of a head that is nearly 0 would multiply its rounding error.
HYBRID = replace(MODEL, rms_norm_eps=1.0, **SHAPE_OF_HYBRID)


def reading_script(script_of: Callable[[int], Sequence[int]]) -> Callable[[Scheduler, Launched], None]:
    """Returns a `Scheduler.end` in which row number i of a rollout draws the tokens `script_of(i)`, one by one."""
    end = Scheduler.end

    def end_script(scheduler: Scheduler, segment: Launched) -> None:
        columns = [np.zeros(x.shape, x.dtype) for x in segment.columns]
        num_steps = columns[0].shape[1]
        for row, lane in zip(segment.rows, segment.lanes, strict=True):
            num_drawn = int(scheduler.rows.mask[row].sum())
            text = [*script_of(scheduler.first_row + row)[num_drawn:], *[0] * num_steps]
            columns[0][lane] = text[:num_steps]
        end(scheduler, segment._replace(columns=tuple(columns)))

    return end_script


def train_here(folder: Path, **flags) -> int:
    """Runs core/grpo.py in this process; returns its exit status."""
    try:
        with user_errors():
            grpo.main(parse(Config, arguments(**flags, save_dir=folder)))
    except SystemExit as end:
        return end.code
    return 0


def write_one_layer(folder: Path) -> Path:
    """Writes models/tiny with the first of its layers, for tests that do not read what it computes; returns the folder.

    Its programs compile in a third of the time.
    """
    shutil.copytree(TINY, folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    tensors = load_file(folder / "model.safetensors")
    is_left_out = re.compile(r"model\.layers\.[1-9]")
    save_file({name: x for name, x in tensors.items() if not is_left_out.match(name)}, folder / "model.safetensors")
    return folder


def read_jsonl(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_jsonl(file: Path, rows: list[dict]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def random_tokens(vocab_size: int, *shape: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.integers(0, vocab_size, shape).astype(np.int32)


def slow(*cases) -> list:
    """Returns cases of a parametrized test that `make test-all` runs."""
    return [pytest.param(case, marks=pytest.mark.slow) for case in cases]


@cache
def random_params(model: Decoder = MODEL) -> dict:
    """Parameters large enough that tokens differ in probability; on the host, where jit cannot take them away."""
    rng = np.random.default_rng(0)

    def draw(path, spec) -> np.ndarray:
        is_gain = "norm" in path[-1].key
        return np.float32(rng.uniform(0.5, 1.5, spec.shape) if is_gain else rng.normal(0, 0.4, spec.shape))

    params = jax.tree.map_with_path(draw, model.parameter_table(), is_leaf=is_spec)
    params[HEAD if HEAD in params else EMBED][0] *= 1.5  # id 0, which also fills the padding, is drawn often
    return params


def on_layout(layout: Layout, model: Decoder = MODEL) -> dict:
    """The same parameters, laid out on the devices."""
    shardings = jax.tree.map(lambda spec: layout.sharding(*spec), model.parameter_table(), is_leaf=is_spec)
    return jax.device_put(random_params(model), shardings)


class Letters(Tokenizer):
    """A tokenizer of characters: id i is chr(i), except for `words`."""

    stop_ids = (3,)
    pad_id = 0
    template = "its own"

    def __init__(self, words: Mapping[int, str] = MappingProxyType({})):
        vars(self)["words"] = dict(words)

    def decode(self, ids) -> str:
        return "".join(self.words.get(int(i), chr(int(i))) for i in ids)

    def encode(self, text: str) -> list[int]:
        ids = []
        while text:
            i, word = next(((i, w) for i, w in self.words.items() if text.startswith(w)), (ord(text[0]), text[0]))
            ids, text = [*ids, i], text[len(word) :]
        return ids

    def encode_behind(self, before: str, text: str) -> list[int]:
        return self.encode(text)

    def chat(self, messages, thinking: bool = False, prefix: str = "", plain: bool = False, tools=()) -> list[int]:
        return self.encode(messages[-1]["content"] + prefix)


# Tolerances

EPS = float(np.finfo(np.float32).eps)


def rounding(num_operations: int, size: float = 1.0) -> float:
    """Returns how far float32 may take a number of this size through so many operations, one after the other.

    Each multiplies by 1 + d with |d| <= u = eps / 2. Another order of a sum, or fused products on another CPU, draws
    other d. After n of them the result is off by at most n u; by more than 6 sqrt(n) u with probability 4e-8 only, as
    roundings hardly know of each other. Source: Higham and Mary, SIAM J. Sci. Comput. 41 (2019), A2815, theorem 2.4.

    A sum of n terms counts as n operations, and `size` is then that of the largest sum of sizes on the way: of logits,
    for log-probabilities. Where small errors grow (exp of a large number, division by a small one), the caller
    multiplies `size` by how much.
    """
    return 6 * math.sqrt(num_operations) * EPS / 2 * size


def assert_close(found, expected, num_operations: int, size: float | None = None, err_msg: str = "") -> None:
    """Asserts that arrays differ by `rounding` only; `size` is by default that of the largest number of `expected`."""
    size = float(np.abs(expected).max(initial=0)) if size is None else size
    np.testing.assert_allclose(found, expected, rtol=0, atol=rounding(num_operations, size), err_msg=err_msg)


def assert_leaves_close(found: Params, expected: Params, num_operations: int, size: float | None = None) -> None:
    """Asserts that the arrays of two trees differ by `rounding` only."""
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert_close(x, y, num_operations, size)


def depth(model: Decoder, num_columns: int) -> int:
    """Returns the operations on the longest way through the model: terms of its sums, of one after the other."""
    D = model.hidden_size
    heads = model.num_attention_heads * model.head_dim
    attention = 2 * D + 2 * model.head_dim + 2 * num_columns + heads  # norm, projection, norm, scores, softmax, values
    mlp = 2 * D + model.intermediate_size
    if model.num_experts:  # norm, router, softmax, projection, sums over the width of an expert and over experts
        mlp = 3 * D + 2 * model.num_experts + model.moe_intermediate_size
    total = model.num_hidden_layers * (attention + mlp) + 2 * D + model.vocab_size  # then norm, head, softmax
    if model.delta:  # for each token a product of the state with its key, and the state's update
        total += model.kinds.count(LINEAR) * num_columns * (model.delta.key_channels + 3)
    return total


def gradient_depth(model: Decoder, num_columns: int, num_tokens: int) -> int:
    """Returns the operations of a gradient: forward, twice as many backward, and a sum over the tokens of a batch."""
    return 3 * depth(model, num_columns) + num_tokens
