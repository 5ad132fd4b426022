"""Rows and their packed tokens: the same scores and gradients, and as few tokens as there are."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from core.config import Config
from core.learner import make_learner
from models import decoder
from models.checkpoint import load_model
from models.decoder import make_critic
from models.names import CRITIC, VALUE_HEAD
from models.packing import Packing, pack, pack_rows, unpack
from tests.helpers import MODEL, ROOT, assert_close, gradient_depth, on_layout, slow
from utils.batching import EMPTY, ONE_SHAPE, RowSizes, few_widths, plan_microbatches
from utils.devices.sharding import Layout, single_device

FIXTURES = ROOT / "tests/fixtures"
GROUP_SIZE = 4
WIDTH = 64


def random_sizes(num_groups: int, seed: int = 0) -> RowSizes:
    """Returns the sizes of groups in a random order, prompts of 5 to 20 tokens; most completion tokens are scored."""
    rng = np.random.default_rng(seed)
    prompts = np.repeat(np.arange(num_groups), GROUP_SIZE)
    prompt_lengths = rng.integers(5, 21, num_groups)[prompts]
    lengths = prompt_lengths + rng.integers(1, 40, prompts.size)
    columns = np.arange(WIDTH)
    is_completion = (columns >= prompt_lengths[:, None]) & (columns < lengths[:, None])
    scored = is_completion & (rng.random(is_completion.shape) < 0.8)
    order = rng.permutation(prompts.size)
    return RowSizes(prompts, prompt_lengths, lengths, scored).select(order)


def tokens_of(sizes: RowSizes, width: int, vocabulary: int = 64) -> np.ndarray:
    """Returns rows that begin with the prompts of their numbers, padded with 0."""
    rng = np.random.default_rng(1)
    prompts = rng.integers(1, vocabulary, (sizes.prompts.max() + 1, width))
    completions = rng.integers(1, vocabulary, (sizes.prompts.size, width))
    columns = np.arange(width)
    tokens = np.where(columns < sizes.prompt_lengths[:, None], prompts[sizes.prompts], completions)
    return np.where(columns < sizes.lengths[:, None], tokens, 0).astype(np.int32)


@pytest.mark.parametrize("attention_cost", [0.0, 1.0])  # prompt by prompt; by length
@pytest.mark.parametrize(("shards", "num_columns"), [(1, 512), (4, 512), (1, 128), (4, 64)])
def test_microbatches_hold_every_row_once_and_every_token(shards, num_columns, attention_cost):
    sizes = random_sizes(num_groups=12)
    plan = plan_microbatches(sizes, num_columns, shards, sizes.prompts.size, attention_cost)
    rows = np.concatenate([part.rows for part in plan])
    assert sorted(rows[rows != EMPTY]) == list(range(sizes.prompts.size))
    num_tokens = 0
    for rows, *shape in plan:
        part = sizes.select(rows)
        packing = pack_rows(part, *shape, shards)
        prefixes = set()
        for shard, numbers in enumerate(np.split(np.arange(rows.size), shards)):
            for row in numbers:
                prompt = part.prompts[row], part.prompt_lengths[row]
                prefixes |= {(shard, prompt, column) for column in range(part.prompt_lengths[row] - 1)}
        expected = len(prefixes) + int((part.lengths - part.prompt_lengths).sum())
        assert packing.num_tokens == expected
        assert len(rows) * shape[0] <= num_columns * shards and packing.num_slots <= len(rows) * shape[0]
        num_tokens += expected
    whole_prompts = (sizes.prompt_lengths - 1).sum()
    shared_prompts = whole_prompts / GROUP_SIZE
    num_completion_tokens = (sizes.lengths - sizes.prompt_lengths).sum()
    cuts_groups = attention_cost or num_columns < GROUP_SIZE * WIDTH
    most = whole_prompts if cuts_groups else shared_prompts * (1 + shards / 2)  # shards may cut groups
    assert shared_prompts <= num_tokens - num_completion_tokens <= most


@pytest.mark.parametrize(
    ("longest", "widths"),
    [
        (40, {64}),
        (224, {64, 128, 192, 224}),
        (320, {96, 192, 288, 320}),
        (448, {64, 128, 256, 384, 448}),
        (1280, {160, 320, 640, 960, 1280}),
        (8448, {1056, 2112, 4224, 6336, 8448}),
    ],
)
def test_rows_have_few_widths(longest, widths):
    lengths = range(1, longest + 1)
    found = [few_widths(length, longest) for length in lengths]
    assert set(found) == widths
    assert all(width >= length for width, length in zip(found, lengths, strict=True))
    assert few_widths(longest + 1, longest) > longest


@pytest.mark.parametrize(
    ("max_rows", "num_packed"), [(8, 256), (16, 128), (48, 160)], ids=["few", "several", "many"]
)
def test_micro_batches_of_a_width_have_one_shape(max_rows, num_packed):
    shapes = {}
    for seed in range(5):
        for part in plan_microbatches(random_sizes(12, seed), 256, 2, max_rows, longest=240, fractions=ONE_SHAPE):
            shape = part.rows.size, part.num_scored, part.num_packed
            assert shapes.setdefault(part.width, shape) == shape
    assert shapes == {64: (8, num_packed, num_packed)}


def test_a_micro_batch_that_is_hardly_filled_has_the_shape_of_a_full_one():
    shapes = set()
    for num_groups in (1, 5, 12):
        prompts = np.repeat(np.arange(num_groups), GROUP_SIZE)
        lengths = np.full(prompts.size, 25)
        scored = np.repeat(np.arange(25)[None] >= 10, prompts.size, axis=0)
        sizes = RowSizes(prompts, lengths - 15, lengths, scored)
        shapes |= {part[1:] for part in plan_microbatches(sizes, 256, 1, 48, longest=240)}
    assert shapes == {(64, 160, 160)}


def test_accelerators_have_two_packings_of_a_width(monkeypatch):
    monkeypatch.setattr(Layout, "is_cpu", False)
    layout = single_device()
    learner, _ = make_learner(Config(), MODEL, on_layout(layout, MODEL), layout, num_generation_tokens=64)
    shapes = set()
    for seed in range(20):
        settings = 2048, 1, 48, 0.0, 64, learner.fractions
        shapes |= {(part.num_packed, part.width) for part in plan_microbatches(random_sizes(12, seed), *settings)}
    assert {num_packed for num_packed, _ in shapes} <= {512, 1024}


def packing_of(sizes: RowSizes, width: int, shards: int) -> Packing:
    num_tokens = sizes.prompts.size * width // shards
    num_scored = max(int(scored.sum()) for scored in np.split(sizes.scored, shards))
    return pack_rows(sizes, width, num_scored, num_tokens, shards)


@pytest.mark.parametrize("shards", [1, 2])
def test_unpacked_rows_are_those_that_were_packed(shards):
    """Values and gradients, against indexing in NumPy."""
    sizes, width = random_sizes(num_groups=4), WIDTH
    tokens = tokens_of(sizes, width)
    packing = packing_of(sizes, width, shards)
    rng = np.random.default_rng(2)
    table = rng.standard_normal((64, width, 3)).astype(np.float32)  # of a token in a column
    rows = table[tokens, np.arange(width)]
    packed, pull = jax.vjp(partial(pack, packing=packing), rows)
    indices = np.asarray(packing.indices)
    flat = rows.reshape(shards, -1, 3)
    for shard in range(shards):
        is_token = indices[shard] < flat.shape[1]
        np.testing.assert_array_equal(packed[shard][is_token], flat[shard][indices[shard][is_token]])
        assert not np.any(packed[shard][~is_token])
    unpacked, pull_rows = jax.vjp(partial(unpack, packing=packing), packed)
    is_computed = np.arange(width) < sizes.lengths[:, None] - 1  # a last token's state scores none
    np.testing.assert_array_equal(unpacked[is_computed], rows[is_computed])
    direction = np.where(is_computed[..., None], rng.standard_normal(rows.shape), 0).astype(np.float32)
    (of_packed,) = pull_rows(jnp.asarray(direction))
    (of_rows,) = pull(of_packed)
    expected = np.zeros_like(direction)
    for shard in np.split(np.arange(len(rows)), shards):
        for row in shard:
            first = next(i for i in shard if sizes.prompts[i] == sizes.prompts[row])
            num_shared = sizes.prompt_lengths[row] - 1
            expected[first, :num_shared] += direction[row, :num_shared]
            expected[row, num_shared:] += direction[row, num_shared:]
    np.testing.assert_allclose(of_rows, expected, atol=1e-5)


LOOPS = ["qwen3-tied", "qwen3moe-tied", "qwen3_5-tied"]
UNROLLED = [f"{name} unrolled" for name in LOOPS]
MODELS = [LOOPS[1], UNROLLED[0], *slow(LOOPS[0], LOOPS[2], *UNROLLED[1:], "gemma3-tied", "qwen3-tied critic")]


@pytest.mark.parametrize("case", MODELS)
def test_packed_tokens_have_the_scores_and_gradients_of_rows(case):
    """Full attention, a mixture with recorded experts, a hybrid, windows, a critic; the last layer of scored tokens."""
    name, _, variant = case.partition(" ")
    model, params, _ = load_model(FIXTURES / name, unroll=variant == "unrolled")
    if variant == "critic":
        params |= {CRITIC: make_critic(model, params)}
        params[CRITIC][VALUE_HEAD] += 0.1
    sizes, width = random_sizes(num_groups=2), WIDTH
    tokens = tokens_of(sizes, width, model.vocab_size)
    rng = np.random.default_rng(3)
    routes = None
    if model.num_experts:
        experts = np.tile(np.arange(1, model.num_experts + 1), (*tokens.shape, model.num_hidden_layers, 1))
        some = rng.permuted(experts, axis=-1)[..., : model.num_experts_per_tok]
        routes = np.where(sizes.scored[..., None, None], some, 0).astype(np.int16)
    weights = np.where(sizes.scored, rng.standard_normal(tokens.shape), 0).astype(np.float32)

    @partial(jax.jit, static_argnums=2)
    def gradient(params, packing, is_packed):
        def loss(params):
            packed = packing if is_packed else None
            scores = decoder.score_tokens(model, params, tokens, routes=routes, packing=packed)
            total = sum(x for x in scores if x is not None)
            return jnp.sum(weights * total), scores.logprobs

        (_, logprobs), grads = jax.value_and_grad(loss, has_aux=True)(params)
        return logprobs, grads

    logprobs, expected = gradient(params, None, False)
    found_logprobs, found = gradient(params, packing_of(sizes, width, 2), True)
    depth = gradient_depth(model, width, tokens.size)
    assert_close(found_logprobs[sizes.scored], logprobs[sizes.scored], depth, 20.0)
    size = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(expected))
    assert size > 0.1
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert_close(x, y, depth, size)
