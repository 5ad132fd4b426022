"""Tokens do not depend on slots and pages, with all kinds of layers; the kernel; which rows are admitted."""

from collections import deque
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import core.sampler
import core.slots.table
import models.pages
from core.records import Completions
from core.sampler import Sampler, SamplingConfig
from core.slots.table import PageTable, chances_to_go_on
from models import decoder
from models.architecture import Decoder, DeltaShape
from models.attention import QuantizedKV, View
from models.distribution import Distribution
from models.memory import pages_that_fit
from models.pages import NOWHERE, Paging, page_bytes, triton
from utils.devices.sharding import single_device
from utils.settings.errors import UserError

LIMIT, LONGEST_PROMPT, G = 30, 40, 4
LAYOUT = single_device()
SIZES = {
    "vocab_size": 160,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "mesh": LAYOUT.mesh,
}
KINDS = {
    "full": {},
    "int8": {"kv_dtype": "int8"},
    "window": {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 7},
    "experts": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    },
    "states": {"layer_types": ("linear_attention", "full_attention"), "delta": DeltaShape(2, 4, 8, 8, 4)},
}
FEW = Paging(4, num_pages=20, num_slots=8)
KEY = jax.random.key(3)
rng = np.random.default_rng(0)
PROMPTS = [rng.integers(10, 160, n).tolist() for n in (1, 2, 9, 17, 33, 40)]
POSITIONS = np.arange(len(PROMPTS))


def sampler_of(kind: str, **settings: object) -> Sampler:
    model = Decoder(**SIZES | KINDS[kind])
    return Sampler(model, LIMIT, (0, 50, 100), layout=LAYOUT, max_prompt_tokens=LONGEST_PROMPT, **settings)


def params_of(model: Decoder) -> dict:
    return jax.tree.map(lambda x: 2 * x, decoder.init_params(model, jax.random.key(0)))


def weights_of(sampler: Sampler) -> dict:
    return sampler.load_weights(params_of(sampler.model))


teacher_forced = jax.jit(decoder.token_outputs, static_argnums=0)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("full", {}),
        ("full", {"distribution": Distribution(top_k=5)}),
        ("full", {"distribution": Distribution(temperature=0.7, top_p=0.8, min_p=0.01)}),
        ("full", {"force_answer_at": 15, "forced_answer": lambda reply: [7, 8, 9][: len(reply) % 4]}),
        ("int8", {}),
        ("window", {}),
        ("experts", {"distribution": Distribution(top_k=5)}),
        ("states", {}),
        ("states", {"force_answer_at": 15, "forced_answer": lambda reply: [7, 8, 9]}),
    ],
)
def test_tokens_do_not_depend_on_pages(kind, settings, monkeypatch):
    """With few pages rows are put aside, and what is computed at once is less than a row."""
    sampler = sampler_of(kind, **settings)
    weights = weights_of(sampler)
    expected = sampler.generate(weights, PROMPTS, POSITIONS, G, KEY)
    # What is computed at once is less than a row.
    monkeypatch.setattr(core.slots.table, "CHUNKS_ON_CPU", ((8, 16),))
    ended = deque([4] * 200)  # so short that too many rows are admitted
    found = replace(sampler, paging=replace(FEW, ended=ended)).generate(weights, PROMPTS, POSITIONS, G, KEY)
    assert_same(found, expected, atol=1e-2 if kind == "int8" else 3e-5)
    assert not expected.num_recomputed.any()
    assert found.num_recomputed.any()
    if kind != "int8" and sampler.distribution.is_whole:
        logprobs, *_ = teacher_forced(sampler.model, params_of(sampler.model), found.tokens)
        np.testing.assert_allclose(found.logprobs, np.where(found.mask, logprobs, 0), atol=3e-5)


@pytest.mark.parametrize("length", [9, 12, 17, 30])
def test_forced_answer_is_longer_than_a_segment(length):
    """It is whole, up to the limit of a completion, also if its row is put aside."""
    answer = list(range(60, 60 + length))
    sampler = replace(sampler_of("full", force_answer_at=17, forced_answer=lambda reply: answer), stop_ids=())
    found = [
        replace(sampler, paging=paging).generate(weights_of(sampler), PROMPTS, POSITIONS, G, KEY)
        for paging in (Paging(), replace(FEW, ended=deque()))
    ]
    assert_same(*found[::-1], atol=3e-5)
    for row, start in enumerate(found[0].prompt_lengths + LIMIT - 17):
        written = found[0].tokens[row, start : start + 17]
        assert written[:length].tolist() == answer[:17]
        assert found[0].mask[row, start : start + 17].tolist() == [False] * min(length, 17) + [True] * (17 - length)


def assert_same(found: Completions, expected: Completions, atol: float) -> None:
    """A number of an int8 cache is rounded up in one program and down in another: `atol` of log-probabilities."""
    for name in ("tokens", "mask", "lengths", "finished"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name), name)
    is_drawn = expected.mask[..., None]
    if expected.routes is not None:  # those of forced tokens are not recorded
        routes = [r.routes * is_drawn[..., None] for r in (found, expected)]
        np.testing.assert_array_equal(*routes)
    np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=atol)
    if expected.support is not None:
        ids = [np.sort(r.support * is_drawn, axis=-1) for r in (found, expected)]  # equal ones may change places
        np.testing.assert_array_equal(*ids)


def attention_in_float64(q, keys, values, columns, scale, window):
    out = np.zeros_like(q)
    num_groups = q.shape[2] // keys.shape[2]
    for row, token, head in np.ndindex(q.shape[:3]):
        column = columns[row] + token
        seen = slice(max(0, column - window + 1) if window else 0, column + 1)
        scores = keys[row, seen, head // num_groups] @ q[row, token, head] * scale
        mass = np.exp(scores - scores.max())
        out[row, token, head] = mass / mass.sum() @ values[row, seen, head // num_groups]
    return out


@pytest.mark.parametrize("is_int8", [False, True])
@pytest.mark.parametrize(
    ("num_tokens", "num_heads", "num_key_heads", "window"),
    [
        (1, 7, 1, 0),
        (1, 4, 2, 5),
        (9, 4, 2, 0),
        (20, 6, 2, 11),
    ],
)
def test_the_kernel_attends_to_pages(num_tokens, num_heads, num_key_heads, window, is_int8):
    rng = np.random.default_rng(num_tokens)
    num_rows = 3
    page = 8
    width = 6
    channels = 16
    table = rng.permutation(num_rows * width + 2)[: num_rows * width].reshape(num_rows, width).astype(np.int32)
    columns = np.array([0, 13, width * page - num_tokens - 1], np.int32)
    pool = rng.normal(size=(num_rows * width + 2, page, 2 * num_key_heads, channels))
    scale = np.abs(pool).max(-1, keepdims=True) / 127
    integers = np.round(pool / scale)
    stored = QuantizedKV(jnp.int8(integers), jnp.float32(scale)) if is_int8 else jnp.float32(pool)
    pool = integers * np.float32(scale) if is_int8 else pool
    rows = pool[table].reshape(num_rows, width * page, num_key_heads, 2, channels)
    q = rng.normal(size=(num_rows, num_tokens, num_heads, channels))
    found = triton(jnp.float32(q), stored, table, columns, View(0.3, window), interpret=True)
    expected = attention_in_float64(q, rows[..., 0, :], rows[..., 1, :], columns, 0.3, window)
    np.testing.assert_allclose(found, expected, atol=2e-6)


@pytest.mark.parametrize("share_idle", [0.0, 0.7])
def test_a_page_has_one_row_or_the_rows_of_a_prompt(share_idle):
    """Rows come, wait and go at random; every page is free, or a prompt's, or one row's; nobody waits for idle rows."""
    rng = np.random.default_rng(0)
    prompts = np.repeat(np.arange(10), 4)
    num_pages = 20
    num_shared = (prompts % 3).astype(int)
    table = PageTable(2, 8, num_pages, 12, 8, prompts, 8 * num_shared + 1)
    length, num_aside, num_yielded = np.ones(40, int), 0, 0
    while any(shard.resident or shard.waiting for shard in table.shards):
        needed = num_shared + length
        num_aside += len(table.reserve(needed))
        is_idle = rng.random(40) < share_idle
        num_yielded += len(table.admit(~is_idle, is_idle, needed, (length + 2.0)[:, None])[2])
        for number, shard in enumerate(table.shards):
            own = [table.table[table.slots[row], num_shared[row] : table.num_pages[row]] for row in shard.resident]
            held = [x for part in own for x in part] + [x for prompt in shard.prompts.values() for x in prompt.pages]
            assert sorted([*held, *shard.pages]) == list(range(num_pages))
            assert {table.shard_of_row[row] for row in shard.resident} <= {number}
            assert all(table.num_pages[row] >= needed[row] for row in shard.resident)
            wants_to_go_on = [row for row in [*shard.resident, *shard.waiting] if not is_idle[row]]
            assert not wants_to_go_on or any(not is_idle[row] for row in shard.resident), "somebody always goes on"
        for row in np.flatnonzero((table.slots >= 0) & ~is_idle).tolist():
            length[row] += rng.integers(0, 3)
            if rng.random() < 0.05 or length[row] > 9:
                table.drop(row)
    assert (num_yielded if share_idle else num_aside) > 5
    assert (table.table == NOWHERE).all()


def test_chances_are_the_shares_of_rows_that_went_on():
    lengths = np.random.default_rng(0).geometric(0.01, 4000).clip(max=1000)
    for num_drawn in (0, 125, 250):
        (chances,), num_more = chances_to_go_on(lengths, np.array([num_drawn]), 1000)
        expected = [np.mean(lengths[lengths >= num_drawn] >= num_drawn + n) for n in num_more]
        np.testing.assert_allclose(chances, expected, atol=0.02)
    (chances,), num_more = chances_to_go_on([], np.array([0]), 1000)
    np.testing.assert_allclose(chances, 1 - num_more / 1000, atol=1e-6, err_msg="nothing is known")


def test_pages_for_not_one_row_are_refused():
    model = Decoder(**SIZES)
    paging = Paging(16)
    room = 100 * page_bytes(model, 16) + 4 * 12 * model.vocab_size
    fitting = pages_that_fit(room, model, LAYOUT, paging, 1600, 512)
    assert (fitting.num_pages, fitting.num_slots) == (100, 4)
    with pytest.raises(UserError, match="one row of 1,700 tokens"):
        pages_that_fit(room, model, LAYOUT, paging, 1700, 512)


def test_a_size_of_pages_is_a_power_of_two():
    with pytest.raises(UserError, match="a power of two from 8 to 256"):
        SamplingConfig(page_size=24)


@pytest.mark.parametrize("kind", ["full", "int8", "window"])
def test_tokens_by_the_kernel_are_the_same(kind, monkeypatch):
    """In few pages, prompts and the rows that share them in one call; the kernel is interpreted."""
    sampler = sampler_of(kind, segment=8)
    sampler = replace(sampler, model=replace(sampler.model, rope_theta=1e4))  # programs of its own
    weights = weights_of(sampler)
    expected = sampler.generate(weights, PROMPTS[2:], POSITIONS[2:], 2, KEY)
    sampler = replace(sampler, model=replace(sampler.model, remat="none"))
    for module in (models.pages, core.sampler):
        # The kernel of GPUs, which is interpreted on a CPU.
        monkeypatch.setattr(module, "paged_kernel", lambda model: "triton")
    # What is computed at once is less than a row.
    monkeypatch.setitem(models.pages.KERNELS, "triton", partial(triton, interpret=True))
    monkeypatch.setattr(core.slots.table, "CHUNKS_ON_CPU", ((8, 16),))
    few = replace(sampler, paging=replace(FEW, ended=deque([4] * 200)))
    found = few.generate(weights, PROMPTS[2:], POSITIONS[2:], 2, KEY)
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=1e-2 if kind == "int8" else 3e-5)
    assert found.num_recomputed.sum()
