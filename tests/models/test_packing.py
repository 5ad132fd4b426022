"""Rows and their packed tokens: the same outputs and gradients, and as few tokens as there are."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import decoder
from models.architecture import Decoder
from models.checkpoint import load_model
from models.decoder import make_critic
from models.names import CRITIC, VALUE_HEAD, Params
from models.packing import Packing, pack, pack_rows, unpack
from tests.helpers import ROOT, assert_close, assert_leaves_close, gradient_depth, slow
from utils.batching import EMPTY, MicrobatchShape, RowSizes, choose_shapes, packed_tokens, plan_microbatches

FIXTURES = ROOT / "tests/fixtures"
GROUP_SIZE = 4
WIDTH = 64


def random_sizes(num_groups: int, seed: int = 0) -> RowSizes:
    """Returns the sizes of groups in a random order, prompts of 5 to 20 tokens; most completion tokens are targets."""
    rng = np.random.default_rng(seed)
    prompts = np.repeat(np.arange(num_groups), GROUP_SIZE)
    prompt_lengths = rng.integers(5, 21, num_groups)[prompts]
    lengths = prompt_lengths + rng.integers(1, 40, prompts.size)
    columns = np.arange(WIDTH)
    is_completion = (columns >= prompt_lengths[:, None]) & (columns < lengths[:, None])
    is_target = is_completion & (rng.random(is_completion.shape) < 0.8)
    order = rng.permutation(prompts.size)
    return RowSizes(prompts, prompt_lengths, lengths, is_target).select(order)


def tokens_of(sizes: RowSizes, vocabulary: int = 64) -> np.ndarray:
    """Returns rows that begin with the prompts of their numbers, padded with 0."""
    rng = np.random.default_rng(1)
    prompts = rng.integers(1, vocabulary, (sizes.prompts.max() + 1, WIDTH))
    completions = rng.integers(1, vocabulary, (sizes.prompts.size, WIDTH))
    columns = np.arange(WIDTH)
    tokens = np.where(columns < sizes.prompt_lengths[:, None], prompts[sizes.prompts], completions)
    return np.where(columns < sizes.lengths[:, None], tokens, 0).astype(np.int32)


@pytest.mark.parametrize("skips_padding", [True, False])
@pytest.mark.parametrize(("shards", "num_tokens"), [(1, 512), (4, 512), (1, 128), (4, 64)])
def test_microbatches_hold_every_row_once_and_every_token(shards, num_tokens, skips_padding):
    sizes = random_sizes(num_groups=12)
    shapes = choose_shapes(num_tokens, WIDTH, 48 // shards, skips_padding)
    plan = plan_microbatches(sizes, shapes, shards)
    rows = np.concatenate([part.rows for part in plan])
    assert sorted(rows[rows != EMPTY]) == list(range(sizes.prompts.size))
    num_packed = 0
    for rows, shape in plan:
        assert shape in shapes
        assert rows.size == shards * shape.num_rows
        part = sizes.select(rows)
        packing = pack_rows(part, shape, shards)
        prefixes = set()
        for shard, numbers in enumerate(np.split(np.arange(rows.size), shards)):
            for row in numbers:
                prompt = part.prompts[row], part.prompt_lengths[row]
                prefixes |= {(shard, prompt, column) for column in range(part.prompt_lengths[row] - 1)}
        expected = len(prefixes) + int((part.lengths - part.prompt_lengths).sum())
        assert packing.num_tokens == expected <= packing.indices.size == shards * shape.num_packed
        num_targets = part.is_target[:, 1:].reshape(shards, -1).sum(axis=1)
        assert (packing.num_targets == num_targets.max()).all(), "shards take equally many turns"
        num_packed += expected
    shared_prompts = (sizes.prompt_lengths - 1).sum() / GROUP_SIZE
    num_prompt_tokens = num_packed - (sizes.lengths - sizes.prompt_lengths).sum()
    assert shared_prompts <= num_prompt_tokens <= shared_prompts * (1 + shards * len(plan) / 6)  # bins may cut groups


def lognormal(num_groups: int, group_size: int, mean: float, sigma: float, limit: int) -> RowSizes:
    """Returns the sizes of groups whose completions end by chance, or at the limit; prompts of 45 to 200 tokens."""
    rng = np.random.default_rng(0)
    prompts = np.repeat(np.arange(num_groups), group_size)
    prompt_lengths = rng.integers(45, 200, num_groups)[prompts]
    lengths = prompt_lengths + rng.lognormal(np.log(mean), sigma, prompts.size).astype(int).clip(16, limit)
    return RowSizes(prompts, prompt_lengths, lengths, np.zeros((prompts.size, 1), bool))


@pytest.mark.parametrize(
    ("rows", "longest", "most_rows", "shards", "skips_padding", "num_shapes", "most_padding"),
    [
        ((16, 8, 280, 0.3, 400), 656, 128, 1, True, 2, 0.06),
        ((256, 8, 1500, 0.75, 8192), 8448, 256, 8, True, 2, 0.10),
        ((64, 8, 830, 0.8, 4096), 4352, 512, 1, False, 3, 0.05),
        ((64, 1, 30, 2.6, 8192), 8448, 64, 1, True, 2, 0.55),  # short rows, and a few that small shapes do not hold
    ],
)
def test_little_is_padding(rows, longest, most_rows, shards, skips_padding, num_shapes, most_padding):
    """Of 16,384 packed tokens, whatever the lengths; where attention skips padding, of rows at once six times as many
    columns."""
    shapes = choose_shapes(16384, longest, most_rows, skips_padding)
    assert len(shapes) == num_shapes
    sizes = lognormal(*rows)
    plan = plan_microbatches(sizes, shapes, shards)
    parts = [sizes.select(part[part != EMPTY]) for rows, _ in plan for part in np.split(rows, shards)]
    num_slots = shards * sum(shape.num_packed for _, shape in plan)
    assert 1 - sum(map(packed_tokens, parts)) / num_slots < most_padding


def test_shapes_follow_from_limits():
    assert choose_shapes(16384, 656, 512, True) == ((146, 672, 16384), (73, 672, 4096))
    assert choose_shapes(1024, 224, 64, False) == ((9, 224, 1024), (16, 128, 1024), (32, 64, 1024))
    assert choose_shapes(1024, 50, 4, False) == ((4, 64, 256),), "no more than an optimizer batch has"
    assert choose_shapes(100, 2000, 8, True) == ((1, 2016, 2016), (1, 2016, 512)), "any row fits"
    with pytest.raises(ValueError, match="a row has 57 tokens, more than the 32"):
        plan_microbatches(random_sizes(12), choose_shapes(64, 32, 4, True), 1)


def packing_of(sizes: RowSizes, shards: int) -> Packing:
    num_rows = sizes.prompts.size // shards
    return pack_rows(sizes, MicrobatchShape(num_rows, WIDTH, num_rows * WIDTH), shards)


@pytest.mark.parametrize("shards", [1, 2])
def test_unpacked_rows_are_those_that_were_packed(shards):
    """Values and gradients, against indexing in NumPy."""
    sizes = random_sizes(num_groups=4)
    packing = packing_of(sizes, shards)
    rng = np.random.default_rng(2)
    table = rng.standard_normal((64, WIDTH, 3)).astype(np.float32)  # of a token in a column
    rows = table[tokens_of(sizes), np.arange(WIDTH)]
    packed, pull = jax.vjp(partial(pack, packing=packing), rows)
    indices = np.asarray(packing.indices)
    flat = rows.reshape(shards, -1, 3)
    for shard in range(shards):
        is_token = indices[shard] < flat.shape[1]
        np.testing.assert_array_equal(packed[shard][is_token], flat[shard][indices[shard][is_token]])
        assert not np.any(packed[shard][~is_token])
    unpacked, pull_rows = jax.vjp(partial(unpack, packing=packing), packed)
    is_computed = np.arange(WIDTH) < sizes.lengths[:, None] - 1  # a last token's state has no target
    np.testing.assert_array_equal(unpacked[is_computed], rows[is_computed])
    direction = np.where(is_computed[..., None], rng.standard_normal(rows.shape), 0).astype(np.float32)
    (of_packed,) = pull_rows(jnp.asarray(direction))
    (of_rows,) = pull(of_packed)
    np.testing.assert_allclose(of_rows, sums_over_prompts(direction, sizes, shards), atol=1e-5)


def sums_over_prompts(direction: np.ndarray, sizes: RowSizes, shards: int) -> np.ndarray:
    """Returns the gradient of rows: that of a prompt is summed, in the first of a shard's rows that share it."""
    expected = np.zeros_like(direction)
    for shard in np.split(np.arange(len(direction)), shards):
        for row in shard:
            first = next(i for i in shard if sizes.prompts[i] == sizes.prompts[row])
            num_shared = sizes.prompt_lengths[row] - 1
            expected[first, :num_shared] += direction[row, :num_shared]
            expected[row, num_shared:] += direction[row, num_shared:]
    return expected


LOOPS = ["qwen3-tied", "qwen3moe-tied", "qwen3_5-tied"]
UNROLLED = [f"{name} unrolled" for name in LOOPS]
MODELS = [LOOPS[1], UNROLLED[0], *slow(LOOPS[0], LOOPS[2], *UNROLLED[1:], "gemma3-tied", "qwen3-tied critic")]


def load_variant(name: str, variant: str) -> tuple[Decoder, Params]:
    """Loads a fixture; "unrolled": without a loop over its layers, "critic": with one."""
    model, params, _ = load_model(FIXTURES / name, unroll=variant == "unrolled")
    if variant == "critic":
        params |= {CRITIC: make_critic(model, params)}
        params[CRITIC][VALUE_HEAD] += 0.1
    return model, params


def random_experts(model: Decoder, is_target: np.ndarray) -> np.ndarray:
    """Returns recorded experts of target tokens, counted from 1; 0 elsewhere."""
    experts = np.tile(np.arange(1, model.num_experts + 1), (*is_target.shape, model.num_hidden_layers, 1))
    some = np.random.default_rng(4).permuted(experts, axis=-1)[..., : model.num_experts_per_tok]
    return np.where(is_target[..., None, None], some, 0).astype(np.int16)


@pytest.mark.parametrize("case", MODELS)
def test_packed_tokens_have_the_scores_and_gradients_of_rows(case):
    """Full attention, a mixture with recorded experts, a hybrid, windows, a critic; the last layer of target tokens."""
    name, _, variant = case.partition(" ")
    model, params = load_variant(name, variant)
    sizes = random_sizes(num_groups=2)
    tokens = tokens_of(sizes, model.vocab_size)
    rng = np.random.default_rng(3)
    routes = random_experts(model, sizes.is_target) if model.num_experts else None
    weights = np.where(sizes.is_target, rng.standard_normal(tokens.shape), 0).astype(np.float32)

    @partial(jax.jit, static_argnums=2)
    def gradient(params, packing, is_packed):
        def loss(params):
            packed = packing if is_packed else None
            outputs = decoder.token_outputs(model, params, tokens, routes=routes, packing=packed)
            total = sum(x for x in outputs if x is not None)
            return jnp.sum(weights * total), outputs.logprobs

        (_, logprobs), grads = jax.value_and_grad(loss, has_aux=True)(params)
        return logprobs, grads

    logprobs, expected = gradient(params, None, False)
    found_logprobs, found = gradient(params, packing_of(sizes, 2), True)
    depth = gradient_depth(model, WIDTH, tokens.size)
    assert_close(found_logprobs[sizes.is_target], logprobs[sizes.is_target], depth, 20.0)
    size = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(expected))
    assert size > 0.1
    assert_leaves_close(found, expected, depth, size)
