"""Fixtures and shared data: what transformers says of small models, and what other people's tokenizers do."""

from collections.abc import Mapping
from functools import cache

import jax
import numpy as np
import pytest

from models import decoder
from models.checkpoint import load_model, split_tensor
from models.names import LAYERS, Params
from tests.helpers import read_jsonl
from tests.kill_runs import ROOT

FIXTURES = ROOT / "tests" / "fixtures"
DATA = ROOT.parent / "shared" / "data"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="the Qwen3 tokenizer (12 MB) is not part of the repository")
logits = jax.jit(decoder.logits, static_argnums=0)
load = cache(load_model)


def expected_of(name: str) -> dict[str, np.ndarray]:
    with np.load(FIXTURES / name / "expected.npz") as arrays:
        return dict(arrays)


def select_tensor(layers_with: Mapping[str, list[int]], params: Params, name: str) -> jax.Array:
    """Returns the array of a tensor's name; a layer's or an expert's is sliced from the array of all that have one."""
    if not name.startswith(f"{LAYERS}."):
        return params[name]
    layer, name, expert = split_tensor(name)
    return params[LAYERS][name][layers_with[name].index(layer), *expert]


def rows(name: str) -> list[dict]:
    return read_jsonl(DATA / "qwen3-tokenizer-vectors" / name)
