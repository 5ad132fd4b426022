"""Fixtures and shared data: what transformers says of small models, and what other people's tokenizers do."""

from collections.abc import Mapping, Sequence
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from core.slots.prefill import prefill_pages
from models import decoder
from models.architecture import Decoder
from models.checkpoint import load_model, split_tensor
from models.names import LAYERS, Params, Weights
from models.pages import Pages, State, begin, end, new_state, page_attention
from tests.helpers import read_jsonl
from tests.kill_runs import ROOT
from utils.devices.sharding import single_device

FIXTURES = ROOT / "tests" / "fixtures"
DATA = ROOT.parent / "shared" / "data"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="the Qwen3 tokenizer (12 MB) is not part of the repository")
logits = jax.jit(decoder.logits, static_argnums=0)
load = cache(load_model)


def expected_of(name: str) -> dict[str, np.ndarray]:
    with np.load(FIXTURES / name / "expected.npz") as arrays:
        return dict(arrays)


def fill_pages(model: Decoder, weights: Weights, prompts: Sequence, num_tokens: int) -> tuple[State, Pages]:
    """Returns the cache of all tokens of prompts but the last, with room for more, and the pages of the next token."""
    lengths, page, layout = np.array([len(prompt) for prompt in prompts], np.int32), 8, single_device()
    width = -(-(lengths.max() + num_tokens) // page)
    table = np.arange(len(prompts) * width, dtype=np.int32).reshape(len(prompts), width)
    tokens = np.zeros((len(prompts), lengths.max() - 1), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt) - 1] = prompt[:-1]
    pages = Pages(table, np.arange(len(prompts), dtype=np.int32), np.zeros_like(lengths), lengths - 1)
    state = new_state(model, layout, table.size, page, len(prompts))
    state = prefill_pages(model, weights, state, *layout.put((pages, tokens)), None)
    return state, layout.put(pages._replace(columns=lengths - 1, counts=np.ones_like(lengths)))


@partial(jax.jit, static_argnums=0)
def decode_one(
    model: Decoder, weights: Weights, state: State, pages: Pages, tokens: jax.Array
) -> tuple[jax.Array, State]:
    """Returns the logits [B, V] after a new token of each row, and the cache with it."""
    before, cache = map(list, zip(*begin(model, state, pages, 1), strict=True))
    attention = partial(page_attention, model=model, pages=pages, number=jnp.int32(0))
    hidden, cache, _ = decoder.decode_states(model, weights, before, cache, tokens[:, None], pages.columns, attention)
    return decoder.head(model, weights, hidden[:, -1]), end(model, state, cache, pages)


def select_tensor(layers_with: Mapping[str, list[int]], params: Params, name: str) -> jax.Array:
    """Returns the array of a tensor's name; a layer's or an expert's is sliced from the array of all that have one."""
    if not name.startswith(f"{LAYERS}."):
        return params[name]
    layer, name, expert = split_tensor(name)
    return params[LAYERS][name][layers_with[name].index(layer), *expert]


def rows(name: str) -> list[dict]:
    return read_jsonl(DATA / "qwen3-tokenizer-vectors" / name)
