"""Updates against one plain gradient, the collection of batches, evaluation, and runs as a user starts and kills them.

Letters: N prompts, G rollouts of each, B = N G rows, T row length.
"""

import itertools
import json
import subprocess
import sys
import zlib
from collections.abc import Mapping
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from chex import assert_trees_all_close
from jaxtyping import Float, Int
from safetensors.numpy import load_file

from core import grpo, records
from core import learner as learner_module
from core.advantages import compute_advantages
from core.config import Config
from core.extensions.notes import describe_objective
from core.extensions.programs import zero_batch
from core.grpo import collect, groups_with_signal, make_batch, num_groups_to_sample, task_numbers
from core.learner import Learner, Update, apply_gradients, split_minibatches
from core.objectives import policy_loss, set_loss_denominators
from core.records import Batch, Episodes
from core.rollout import RolloutWorker, evaluate
from core.run.metrics import batch_metrics, rollout_metrics
from core.sampler import Sampler
from envs import make_env, parse_options
from envs.base import Env, Problem
from envs.scoring.helper import ScorerSettings
from envs.scoring.scorer import Failure, Scorer
from models import decoder
from models.distribution import Distribution
from models.names import Array
from models.optimizers import OptimizerConfig, make_optimizer, schedule
from models.state import TrainState, init_state
from tests.helpers import (
    MODEL,
    ROOT,
    Letters,
    assert_close,
    depth,
    gradient_depth,
    on_four_devices,
    on_layout,
    random_params,
    rounding,
    slow,
)
from tests.kill_runs import reproducible
from utils.batching import MicrobatchShape, concatenate, group_counts, select_rows
from utils.devices import startup
from utils.devices.sharding import Layout, single_device
from utils.devices.startup import DeviceConfig, make_layout
from utils.evaluation.estimates import pass_at_k
from utils.settings.config import make_config, parse, with_options
from utils.settings.errors import user_errors
from utils.settings.lmpo import LMPO

G = 4
CONFIG = make_config(
    Config,
    advantage="group_mean",
    entropy_coef=0.02,
    temperature=0.8,
    groups_per_batch=2,
    group_size=G,
    ppo_minibatch=4,
    ppo_epochs=2,
    num_generation_tokens=50,
    max_resampling=3.0,
)
DISTRIBUTION = CONFIG.sampling.distribution
SGD, NO_STEPS = optax.sgd(1.0), optax.sgd(0.0)

SCORES = depth(MODEL, 64)  # operations of a log-probability
GRADIENT = gradient_depth(MODEL, 64, 8 * 64)
SURPRISE = 20.0  # nats of an unlikely token


teacher_forced = jax.jit(decoder.score_tokens, static_argnums=(0, 3))


def random_batch() -> Batch:
    """Ragged rows off the policy, of two prompts: many of their ratios are clipped."""
    rng = np.random.default_rng(0)
    B, T = 2 * G, 60
    prompts = np.repeat([6, 7], G)
    # In micro-batches of 128 tokens: two rows of up to 64 at a time, or four of up to 32, the last ones filled up.
    lengths = prompts + np.array([1, 50, 12, 47, 49, 5, 44, 48])
    columns = np.arange(T)
    mask = (columns >= prompts[:, None]) & (columns < lengths[:, None])
    mask[1, 20:23] = False  # forced tokens
    tokens = np.where(columns < lengths[:, None], rng.integers(0, MODEL.vocab_size, (B, T)), 0).astype(np.int32)
    tokens = np.where(columns < prompts[:, None], tokens[np.arange(B) // G * G], tokens)
    true = np.asarray(teacher_forced(MODEL, random_params(), tokens, DISTRIBUTION)[0])
    old = np.where(mask, true + rng.normal(0, 0.31, (B, T)), 0).astype(np.float32)
    rewards = np.float32([0, 1, 0.1, 0.1, 1, 1, 0, 0])
    batch = Batch(tokens, mask, np.where(mask, true, 0), rewards, lengths, prompts, old_logprobs=old, group_size=G)
    return compute_advantages(batch, CONFIG.objective)


@jax.jit
def plain_gradient(params, batch: Batch):
    """Of the clipped loss with entropy bonus, token mean, all rows at once."""

    def loss(params):
        temperature = CONFIG.sampling.temperature
        if batch.extras:
            temperature = (batch.extras["of_row"][:, None] * batch.extras["of_token"])[:, 1:, None]
        logprobs = jax.nn.log_softmax(decoder.logits(MODEL, params, batch.tokens)[:, :-1] / temperature)
        entropy = -(jnp.exp(logprobs) * logprobs).sum(-1)
        chosen = jnp.take_along_axis(logprobs, batch.tokens[:, 1:, None], axis=-1)[..., 0]
        mask, a = batch.mask[:, 1:], batch.advantages[:, 1:]
        ratio = jnp.exp(jnp.where(mask, chosen - batch.old_logprobs[:, 1:], 0))
        surrogate = jnp.minimum(ratio * a, jnp.clip(ratio, 0.8, 1.2) * a)
        return -jnp.sum((surrogate + CONFIG.objective.entropy_coef * entropy) * mask) / mask.sum()

    return jax.grad(loss)(params)


def make_learner(
    config: Config = CONFIG, optimizer=SGD, layout: Layout | None = None, tokens_per_microbatch: int = 128, **options
) -> Learner:
    layout = layout or single_device()
    config = with_options(config, **options)
    model = replace(MODEL, mesh=layout.mesh)
    num_tokens = config.sampling.num_generation_tokens
    return Learner(model, optimizer, layout, config, num_tokens, tokens_per_microbatch)


def first_state(learner: Learner) -> TrainState:
    return init_state(on_layout(learner.layout), learner.optimizer)


def update(batch: Batch, **options) -> tuple[dict, dict]:
    """The gradient and the metrics of one update, by plain descent with rate 1."""
    learner = make_learner(**options)
    state, update = learner.update(first_state(learner), batch, fraction_done=0.0)
    return jax.tree.map(lambda old, new: old - np.asarray(new), random_params(), state.params), learner.read(update)


def train_step(
    learner: Learner, state: TrainState, batch: Batch, step: int = 1, progress: float = 0.0
) -> tuple[TrainState, dict, list[Update]]:
    """A step of training after its rollouts, as in core/grpo.py."""
    config, updates = learner.config, []
    batch = compute_advantages(learner.score(state, batch)[1], config.objective)
    for epoch in range(config.update.ppo_epochs):
        minibatches = split_minibatches(batch, config, step, epoch)
        for minibatch in minibatches:
            state, update = learner.update(state, minibatch, progress)
            updates.append(update)
        if learner.policy_moved_too_far(updates[-len(minibatches) :]):
            break
    return state, learner.metrics(updates) | batch_metrics(batch), updates


def assert_same_gradient(found, expected) -> None:
    largest = max(np.abs(x).max() for x in jax.tree.leaves(expected))
    assert largest > 0.1
    assert_trees_all_close(found, expected, rtol=0, atol=rounding(GRADIENT, largest))


def with_garbage(batch: Batch) -> Batch:
    """More padding, and anything in it but in the mask."""
    rng = np.random.default_rng(1)
    batch = jax.tree.map(lambda x: np.pad(x, ((0, 0), (0, 30))) if x.ndim == 2 else x, batch)
    padding = np.arange(90) >= batch.lengths[:, None]
    noise = {name: rng.normal(0, 50, padding.shape) for name in ("old_logprobs", "sample_logprobs")}
    noise["tokens"] = rng.integers(0, MODEL.vocab_size, padding.shape)
    return replace(
        batch,
        **{
            name: np.where(padding, x, getattr(batch, name)).astype(getattr(batch, name).dtype)
            for name, x in noise.items()
        },
    )


CHANGES = {
    "micro-batches": lambda batch: batch,
    "other order": lambda batch: jax.tree.map(lambda x: x[::-1], batch),
    "more padding": with_garbage,
}


@pytest.mark.parametrize("change", ["more padding", *slow("micro-batches", "other order")])
def test_an_update_does_not_depend_on_how_the_batch_is_cut(change):
    gradient, metrics = update(CHANGES[change](random_batch()))
    assert_same_gradient(gradient, plain_gradient(random_params(), random_batch()))
    norm = optax.tree.norm(gradient)
    assert_close(metrics["grad_norm"], norm, GRADIENT)
    assert 0.2 < metrics["clip_fraction"] < 0.8
    assert metrics["inference_recompute/ratio"] != 1


def test_extras_reach_the_distribution_in_the_place_of_their_tokens(monkeypatch):
    """Temperatures of rows and of tokens, through micro-batches, packing and chunks of the head; padding is 1."""
    score = Distribution.score

    def with_temperatures(self, logits, tokens, support=None, extras=None):
        return score(self, logits / (extras["of_row"] * extras["of_token"])[..., None], tokens, support)

    rng = np.random.default_rng(3)
    batch = random_batch()
    monkeypatch.setattr(Distribution, "score", with_temperatures)
    monkeypatch.setattr(decoder, "LOGIT_ELEMENTS", 15 * MODEL.vocab_size)
    extras = {"of_row": rng.uniform(0.7, 1.5, 8), "of_token": rng.uniform(0.7, 1.5, batch.tokens.shape)}
    batch = replace(batch, extras=jax.tree.map(np.float32, extras))
    gradient, _ = update(batch, temperature=1.0)
    assert_same_gradient(gradient, plain_gradient(random_params(), batch))


def test_extras_are_1_in_padding_and_known_ahead(monkeypatch):
    batch = replace(random_batch(), extras={"of_row": np.full(8, 2), "of_token": np.full((8, 60), 2)})
    joined = concatenate([batch, select_rows(batch, np.arange(8), 64)]).extras
    assert joined["of_row"].tolist() == [2] * 16
    assert (joined["of_token"][:, :60] == 2).all()
    assert (joined["of_token"][:, 60:] == 1).all()
    monkeypatch.setattr(records, "EXTRAS", {"of_row": Int[Array, "B"], "of_token": Float[Array, "B T"]})
    zeros, _ = zero_batch(make_learner(), MicrobatchShape(8, 64, 256))
    found = {name: (x.shape, x.dtype.name) for name, x in zeros.extras.items()}
    B = len(zeros)
    assert found == {"of_row": ((B,), "int32"), "of_token": ((B, 64), "float32")}


def test_another_coefficient_compiles_nothing():
    """And the gradient is that of the loss with this constant in it."""
    base = {
        "kl_coef": 0.1,
        "entropy_coef": 0.02,
        "clip_epsilon": 0.2,
        "clip_epsilon_high": 0.3,
    }
    changes = [{name: 2 * value} for name, value in base.items()]
    learner = make_learner(**base)
    state = replace(first_state(learner), extra={"ema": np.ones(3)})
    state, _ = learner.update(state, with_reference(random_batch()), 0.0)
    assert state.extra["ema"].tolist() == [1, 1, 1]  # it lives across updates, and is no part of them
    before = learner_module.accumulate._cache_size()
    found = [update(with_reference(random_batch()), **base | change)[0] for change in changes]
    assert learner_module.accumulate._cache_size() == before
    tokens = random_batch().tokens
    scores, pull_back = jax.vjp(lambda params: teacher_forced(MODEL, params, tokens, DISTRIBUTION), random_params())
    pull_back = jax.jit(pull_back)
    for change, gradient in zip(changes, found, strict=True):
        loss = replace(CONFIG.objective, **base | change)
        batch = set_loss_denominators(with_reference(random_batch()), 4, 50, loss)
        of_scores = jax.grad(lambda scores, batch=batch, loss=loss: policy_loss(scores, batch, loss)[0])(scores)
        assert_same_gradient(gradient, *pull_back(of_scores))


CUT = {"kl_coef": 0.1, "clip_epsilon": 0.25}  # a ratio of the batch lies within 1e-6 of 1.2
FAMILY = {  # losses that look beyond their own token: at rows, at the whole batch, at other models
    "gspo": CUT
    | {
        "objective": "gspo",
        "loss_normalization": "sequence_mean",
        "importance_correction": "mask",
    },
    "cispo": CUT
    | {
        "objective": "cispo",
        "loss_normalization": "constant",
        "importance_correction": "truncate",
        "importance_level": "sequence",
        "entropy_coef": 0.0,
    },
    "dppo": CUT | {"objective": "dppo"},
}


def with_reference(batch: Batch) -> Batch:
    rng = np.random.default_rng(2)
    noise = [np.where(batch.mask, rng.normal(0, 0.2, batch.mask.shape), 0).astype(np.float32) for _ in range(2)]
    return replace(batch, ref_logprobs=batch.old_logprobs + noise[0], sample_logprobs=batch.old_logprobs + noise[1])


@pytest.mark.parametrize("name", ["cispo", *slow("gspo", "dppo")])
def test_other_objectives_do_not_depend_on_how_the_batch_is_cut(name):
    whole, metrics = update(with_reference(random_batch()), tokens_per_microbatch=4096, **FAMILY[name])
    cut = jax.tree.map(lambda batch: batch[::-1], with_garbage(with_reference(random_batch())))
    gradient, metrics_of_cut = update(cut, tokens_per_microbatch=128, **FAMILY[name])
    assert_same_gradient(gradient, whole)
    for metric in metrics.keys() - {"speed/padding", "speed/flops", "importance_ratio_histogram"}:  # bins jump
        value = metrics[metric]
        assert_close(metrics_of_cut[metric], value, GRADIENT, max(abs(value), SURPRISE), err_msg=metric)


def test_a_row_has_the_same_gradient_whatever_leaves_the_batch(monkeypatch):
    """By `constant`, which is Dr. GRPO's: rollouts of a full minibatch times the completion limit."""
    batch, seen = with_reference(random_batch()), []

    def spy(batch, num_rollouts, num_generation_tokens, config):
        seen.append((num_rollouts, num_generation_tokens))
        return set_loss_denominators(batch, num_rollouts, num_generation_tokens, config)

    monkeypatch.setattr("core.learner.set_loss_denominators", spy)
    parts = [update(select_rows(batch, rows), **FAMILY["cispo"])[0] for rows in np.split(np.arange(2 * G), [3])]
    assert_same_gradient(jax.tree.map(np.add, *parts), update(batch, **FAMILY["cispo"])[0])
    assert seen == [(4, 50)] * 3


def updates_on_four_devices(file: str, names: tuple[str, ...]) -> None:
    layout = make_layout(DeviceConfig(mesh="fsdp=2,tp=2"))
    found = {"ppo": update(random_batch(), layout=layout, tokens_per_microbatch=256)[0]}
    for name in names:
        found[name] = update(with_reference(random_batch()), layout=layout, tokens_per_microbatch=256, **FAMILY[name])[
            0
        ]
    arrays = {f"{name} {i}": x for name, tree in found.items() for i, x in enumerate(jax.tree.leaves(tree))}
    np.savez(file, **arrays)


@pytest.mark.slow
@pytest.mark.parametrize("names", [(), ("cispo",), ("gspo",)], ids=str)
def test_an_update_does_not_depend_on_the_devices(names, tmp_path):
    on_four_devices(__file__, f"updates_on_four_devices({str(tmp_path / 'gradients.npz')!r}, {names})")
    expected = {"ppo": plain_gradient(random_params(), random_batch())}
    for name in names:
        expected[name] = update(with_reference(random_batch()), tokens_per_microbatch=256, **FAMILY[name])[0]
    with np.load(tmp_path / "gradients.npz") as arrays:
        for name, gradient in expected.items():
            found = [x for key, x in arrays.items() if key.startswith(f"{name} ")]
            assert_same_gradient(found, jax.tree.leaves(gradient))


def true_logprobs(batch: Batch) -> np.ndarray:
    return np.asarray(teacher_forced(MODEL, random_params(), batch.tokens, DISTRIBUTION)[0])


def assert_ratio_is_one(metrics) -> None:
    """Up to the rounding of the log-probabilities that it is made from, and of (ratio - 1) - log ratio."""
    assert_close(metrics["importance_ratio"], 1, SCORES, SURPRISE / 0.6)
    assert_close(metrics["approx_kl"], 0, 2, size=1)


def test_before_the_first_update_the_ratio_is_one():
    learner = make_learner(optimizer=NO_STEPS)
    _, metrics, _ = train_step(learner, first_state(learner), replace(random_batch(), old_logprobs=None))
    assert metrics["num_updates"] == 4
    assert_ratio_is_one(metrics)


@pytest.mark.parametrize("cut", [{"top_k": 8}, *slow({"top_p": 0.9}, {"min_p": 0.05})], ids=str)
def test_before_the_first_update_the_ratio_is_one_under_truncated_sampling(cut):
    """Whether the old log-probabilities are recomputed or the sampler's."""
    for from_sampler in (False, True):
        config = with_options(COLLECT, temperature=0.6, do_inference_logprobs=from_sampler, **cut)
        batch, *_ = collect_batch(make_worker(12, distribution=config.sampling.distribution), config)
        learner = make_learner(config, NO_STEPS)
        _, metrics, _ = train_step(learner, first_state(learner), batch)
        assert_ratio_is_one(metrics)
        assert_close(metrics["inference_recompute/logprob_diff_max"], 0, SCORES, SURPRISE / 0.6)
        assert metrics["grad_norm"] > 0.01
    whole = learner.token_scores(random_params(), replace(batch, support=None)).logprobs
    assert np.abs(whole - batch.sample_logprobs)[batch.mask].max() > 0.01, "without the support it would not be"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, true_logprobs),
        ({"ppo_minibatch": 0, "ppo_epochs": 1}, None),  # the update's own
        ({"do_inference_logprobs": True}, lambda batch: batch.sample_logprobs),
    ],
)
def test_old_logprobs(flags, expected):
    batch = replace(random_batch(), old_logprobs=None)
    _, scored = make_learner(**flags).score(SimpleNamespace(params=random_params()), batch)
    if expected is None:
        assert scored.old_logprobs is None
    else:
        assert_close(scored.old_logprobs[scored.mask], expected(batch)[batch.mask], SCORES)


def test_the_best_of_each_group_are_learnt_from_alone():
    learner = make_learner(
        advantage="best_k",
        best_k=1,
        objective="reinforce",
        ppo_minibatch=2,
        ppo_epochs=1,
    )
    _, metrics, updates = train_step(learner, first_state(learner), replace(random_batch(), old_logprobs=None))
    assert metrics["num_rows"] == 2
    assert metrics["num_updates"] == len(updates) == 1
    minibatch = updates[0].minibatch
    assert sorted(minibatch.lengths.tolist()) == sorted(random_batch().lengths[[1, 4]].tolist())
    assert (minibatch.advantages[minibatch.mask] == 1).all()


def test_epochs_end_when_the_policy_has_moved_far_enough():
    for target, epochs in ((0.0, 2), (1e-6, 1), (1e6, 2)):
        learner = make_learner(target_kl=target)
        _, metrics, updates = train_step(learner, first_state(learner), replace(random_batch(), old_logprobs=None))
        assert len(updates) == metrics["num_updates"] == len(metrics["updates/approx_kl"]) == 2 * epochs
        assert metrics["approx_kl"] == pytest.approx(np.mean(metrics["updates/approx_kl"]))


def test_an_update_that_is_not_finite_is_skipped_kept_and_ends_the_run_when_it_comes_again():
    skipped = []
    learner = make_learner(do_inference_logprobs=True, ppo_epochs=1)
    learner = replace(learner, on_skipped=skipped.append)
    batch = random_batch()
    bad = replace(batch, sample_logprobs=np.where(batch.mask, -1e4, 0).astype(np.float32))  # the ratio is infinite
    state, _, updates = train_step(learner, first_state(learner), bad, step=1)
    assert len(skipped) == len(updates) == 2
    assert int(state.num_skipped) == 2
    assert (skipped[0].tokens == updates[0].minibatch.tokens).all()
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, state.params), random_params())
    state, *_ = train_step(learner, state, batch, step=2)
    assert int(state.num_skipped) == 0 and int(state.step) == 2, "one that is finite ends the row"
    state, *_ = train_step(learner, state, bad, step=3)
    with pytest.raises(FloatingPointError, match="3 updates in a row .* lower --lr"):
        train_step(learner, state, bad, step=4)


def test_the_kl_is_that_to_the_reference():
    learner = make_learner(kl_coef=0.1, ppo_epochs=1, ppo_minibatch=0)
    reference = jax.tree.map(lambda x: 1.1 * x, random_params())
    _, metrics, _ = train_step(replace(learner, reference=reference), first_state(learner), random_batch())
    batch = random_batch()
    other = np.asarray(teacher_forced(MODEL, reference, batch.tokens, DISTRIBUTION)[0], np.float64)
    x = (true_logprobs(batch) - other)[batch.mask]
    assert_close(metrics["kl"], np.mean(np.exp(-x) + x - 1), SCORES, SURPRISE * np.exp(-x).mean())
    _, metrics, _ = train_step(replace(learner, reference=random_params()), first_state(learner), random_batch())
    assert_close(metrics["kl"], 0, 2, size=1)  # exp(-x) + x - 1


# The optimizer


def step(config: OptimizerConfig, gradient: float, model=MODEL) -> tuple[dict, dict]:
    """Parameters before and after one update with the same gradient everywhere, by name."""
    params = random_params(model)
    optimizer = make_optimizer(config)
    grads = jax.tree.map(lambda x: jnp.full(x.shape, gradient), params)
    state = init_state(jax.tree.map(jnp.array, params), optimizer)
    state, _ = apply_gradients(optimizer, config.warmup_steps, state, grads)

    def by_name(tree):
        return {jax.tree_util.keystr(path): np.asarray(x) for path, x in jax.tree.leaves_with_path(tree)}

    return by_name(params), by_name(state.params)


def test_a_frozen_vocabulary_stays_as_it_is():
    before, after = step(
        OptimizerConfig(
            lr=0.1,
            weight_decay=0.1,
            train_vocab=False,
        ),
        1.0,
    )
    for name, x in before.items():
        assert (x == after[name]).all() == ("embed" in name or "lm_head" in name), name
    before, after = step(OptimizerConfig(lr=0.1, weight_decay=0.1), 1.0)
    assert not any((x == after[name]).any() for name, x in before.items())


def test_weight_decay_spares_norms_and_biases():
    before, after = step(OptimizerConfig(lr=0.1, weight_decay=0.5), 0.0, replace(MODEL, qkv_bias=True))
    assert len(before) == 17
    for name, x in before.items():
        factor = 1.0 if "norm" in name or "bias" in name else 0.95
        np.testing.assert_allclose(after[name], factor * x, rtol=rounding(4) if factor < 1 else 0, err_msg=name)


@pytest.mark.parametrize(
    ("lr_schedule", "warmup_steps", "expected"),
    [
        ("constant", 0, [1, 1, 1, 1, 1, 1, 1, 1]),
        ("constant", 4, [0.25, 0.5, 0.75, 1, 1, 1, 1, 1]),
        ("linear", 0, [1, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125]),
        ("linear", 4, [0.25, 0.4375, 0.5625, 0.625, 0.5, 0.375, 0.25, 0.125]),  # warm-up x schedule
        ("cosine", 0, [(1 + np.cos(np.pi * i / 8)) / 2 for i in range(8)]),
    ],
)
def test_learning_rates(lr_schedule, warmup_steps, expected):
    config = OptimizerConfig(lr_schedule=lr_schedule, warmup_steps=warmup_steps)
    state = init_state({"x": jnp.zeros(2)}, SGD)
    multipliers = []
    for i in range(8):
        gradient = {"x": jnp.ones(2)}
        factor = np.float32(schedule(config, i / 8))
        state, metrics = apply_gradients(SGD, warmup_steps, state, gradient, factor=factor)
        multipliers.append(float(metrics["lr_multiplier"]))
    assert_close(multipliers, expected, 3)
    assert_close(state.params["x"], -np.sum(expected), 8 * 3)


@pytest.mark.parametrize(
    ("lr_schedule", "num_live", "is_early_end", "expected"),
    [("constant", 8, False, 6), ("linear", 8, True, 2), ("linear", 4, False, 3), ("cosine", 4, True, 2)],
)
def test_the_learning_rate_does_not_depend_on_how_many_updates_were_made(lr_schedule, num_live, is_early_end, expected):
    """Groups that are dropped and epochs that --target_kl ends make updates fewer, not the schedule longer."""
    target_kl = 1e-9 if is_early_end else 0.0
    learner = make_learner(
        optimizer=optax.sgd(0.1),
        lr_schedule=lr_schedule,
        ppo_epochs=3,
        target_kl=target_kl,
    )
    batch = replace(random_batch(), old_logprobs=None)
    batch.rewards[num_live:] = 0.0  # the second group has no signal
    state, rates = first_state(learner), []
    for step in range(1, 4):
        state, metrics, updates = train_step(learner, state, batch, step, (step - 1) / 3)
        rates.append([float(update.metrics["lr_multiplier"]) for update in updates])
        assert metrics["lr"] == pytest.approx(learner.config.optimizer.lr * np.mean(rates[-1]))
    assert [*map(len, rates)] == 3 * [expected]
    last = {
        "constant": 1,
        "linear": 1 / 3,
        "cosine": (1 + np.cos(np.pi * 2 / 3)) / 2,
    }[lr_schedule]
    assert rates[-1][-1] == pytest.approx(last)
    assert rates[0][0] == 1


# Collecting and evaluating


class Digest(Env):
    """Rewards as if drawn at random from 0, 1/4, ..., 1, by task and text; every third task always pays 0.1."""

    def __init__(self, num_tasks: int):
        self.num_tasks = num_tasks

    def problem(self, index: int) -> Problem:
        return Problem([{"role": "user", "content": "abcdefghijk"[: 1 + index % 11]}], index)

    def score(self, problem: Problem, text: str) -> dict[str, float]:
        share = 0.1 if problem.answer % 3 == 0 else zlib.crc32(f"{problem.answer} {text}".encode()) % 5 / 4
        return {"return": share, "correct_answer": float(share > 0.5)}


class HereScorer(Scorer):
    """Scores without worker processes."""

    def __init__(self, env: Env):
        self.env, self.num_failures, self.failures_file = env, 0, None
        self.settings = ScorerSettings("", {}, 0, 0.0, max_error_share=0.5)
        self.unfinished, self.is_closed = {}, False

    def send(self, jobs):
        self.unfinished |= jobs

    def receive(self, wakeup=None):
        jobs, self.unfinished = self.unfinished, {}
        return dict(zip(jobs, self.request_outcomes([*jobs.values()]), strict=True))

    def request_outcomes(self, jobs):
        return [self.env.score(self.env.problem(i), text) for i, text in jobs]


WHOLE = Distribution()
COLLECT = with_options(CONFIG, groups_per_batch=4)


def make_worker(num_tasks: int, rows_per_call: int = 64, distribution: Distribution = WHOLE) -> RolloutWorker:
    env = Digest(num_tasks)
    sampler = Sampler(MODEL, 6, (3,), distribution)
    return RolloutWorker(env, "digest", Letters(), sampler, HereScorer(env), single_device(), rows_per_call)


def collect_batch(worker: RolloutWorker, config: Config, cursor: int = 0) -> tuple[Batch, Episodes, int]:
    """The batch of a step, all of its episodes, and the number of the next task."""
    weights = worker.load_weights(random_params())
    episodes, cursor = collect(worker, weights, config, step=1, cursor=cursor)
    return make_batch(episodes, config), episodes, cursor


def rows_of(batch: Batch) -> list[tuple]:
    """What is in a batch, comparable."""
    parts = zip(batch.tokens, batch.mask, batch.rewards, batch.lengths, strict=True)
    return [(*t[:end], *m[:end], r) for t, m, r, end in parts]


def test_the_order_of_tasks_is_a_function_of_seed_and_epoch():
    epochs = task_numbers(5, 10, np.arange(30)).reshape(3, 10)
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs.tolist())
    assert len({tuple(epoch) for epoch in [*epochs.tolist(), task_numbers(6, 10, np.arange(10)).tolist()]}) == 4
    assert task_numbers(5, 10, 7 + np.arange(16)).tolist() == epochs.ravel()[7:23].tolist()


def test_a_batch_is_filled_with_groups_that_have_signal():
    batch, episodes, cursor = collect_batch(make_worker(12), COLLECT, cursor=3)
    ids = episodes.task_ids[::G]
    assert ids.tolist() == task_numbers(COLLECT.seed, 12, 3 + np.arange(len(ids))).tolist()
    assert (batch.rewards == episodes.scores["return"][batch.row]).all()
    returns = episodes.scores["return"].reshape(-1, G)
    has_signal = np.ptp(returns, axis=1) > 1e-6
    with_signal = returns[has_signal]
    assert not has_signal[:4].all()
    assert (batch.rewards.reshape(4, G) == with_signal[:4]).all()
    assert cursor == 3 + np.flatnonzero(has_signal)[3] + 1, "the next step goes on behind the last task that was needed"


def test_a_step_without_signal_has_no_batch():
    batch, episodes, cursor = collect_batch(make_worker(1), COLLECT)
    assert len(batch) == 0
    assert len(episodes) == 3 * 4 * G == cursor * G


def test_refilling_draws_about_what_is_missing():
    """Simulated: a draw at a time, groups with signal by chance; a whole second draw would throw half of it away."""
    rng = np.random.default_rng(0)
    for probability, most in ((0.95, 1.2), (0.9, 1.3), (0.5, 2.4), (0.1, 12)):
        for largest in (256, 64, 7):
            num_played, missing, share = 0, 256, 1.0
            while missing > 0:
                size = num_groups_to_sample(missing, share, largest)
                assert size in group_counts(largest)
                num_played += size
                missing -= int(rng.binomial(size, probability))
                share = (256 - missing) / num_played
            assert num_played <= most * 256, (probability, largest)


def test_calls_are_as_few_as_rows_allow_and_about_equal():
    for num_prompts, most in itertools.product(range(1, 70), (1, 3, 8, 64)):
        per_call = make_worker(num_prompts, most * G).prompts_per_call(num_prompts, G)
        num_calls = -(-num_prompts // most)
        assert per_call <= most
        assert -(-num_prompts // per_call) == num_calls
        assert per_call < num_prompts / num_calls + 1
    assert make_worker(12, rows_per_call=0).prompts_per_call(12, G) == 12


@pytest.mark.parametrize("max_resampling", [1.0, 3.0])
def test_a_batch_does_not_depend_on_how_many_rows_are_sampled_at_a_time(max_resampling):
    config = with_options(COLLECT, max_resampling=max_resampling)
    found = [collect_batch(make_worker(12, rows), config) for rows in (64, 2 * G, 3 * G)]
    for batch, _, cursor in found[1:]:
        assert rows_of(batch) == rows_of(found[0][0])
        assert cursor == found[0][2]


def test_a_task_that_comes_twice_in_a_step_is_played_anew():
    batch, *_ = collect_batch(make_worker(3), with_options(COLLECT, do_group_filter=False))
    rows = rows_of(batch)
    assert len({tuple(rows[i : i + G]) for i in range(0, len(rows), G)}) == 4


def test_scores_do_not_depend_on_the_rows_sampled_at_a_time():
    found = [evaluate(make_worker(7, rows), random_params(), 4, 4, seed=3)[0] for rows in (64, 8, 1)]
    assert found[0] == found[1] == found[2]


def test_scores_are_those_of_the_completions():
    metrics, episodes, _ = evaluate(make_worker(7), random_params(), 4, 4, seed=3)
    env, r = Digest(7), episodes.completions
    returns = np.zeros((4, 4))
    for row in range(16):
        text = "".join(map(chr, r.tokens[row, r.prompt_lengths[row] : r.lengths[row]]))
        returns[row // 4, row % 4] = env.score(env.problem(row // 4), text)["return"]
    expected = {
        "return": returns.mean(),
        "correct_answer": (returns > 0.5).mean(),
        "best_of_4": returns.max(1).mean(),
    }
    pairs = [(row[i] > 0.5) | (row[j] > 0.5) for row in returns for i, j in combinations(range(4), 2)]
    expected |= {"pass@2": np.mean(pairs), "pass@4": (returns.max(1) > 0.5).mean()}
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)
    assert metrics["return_low"] < metrics["return"] < metrics["return_high"]
    assert (metrics["num_tasks"], metrics["num_samples"]) == (4, 4)


def test_episodes_mark_the_rows_whose_scoring_failed(monkeypatch):
    def has_no_score(text: str) -> bool:
        return zlib.crc32(text.encode()) % 3 == 0

    def request_outcomes(self, jobs):
        failure = Failure("reward_errors", "of a test")
        return [failure if has_no_score(text) else {"return": 0.5} for _, text in jobs]

    monkeypatch.setattr(HereScorer, "request_outcomes", request_outcomes)
    monkeypatch.setattr(Layout, "share", lambda self, work, n, group=1: json.loads(json.dumps(work(range(n)))))
    _, episodes, _ = evaluate(make_worker(7), random_params(), 4, 4, seed=3)
    expected = np.array([has_no_score(text) for text in episodes.texts])
    assert 0 < expected.sum() < 16
    assert episodes.failed.tolist() == expected.tolist()
    assert episodes.scores["return"].tolist() == np.where(expected, 0, 0.5).tolist()
    assert episodes.failures == {"reward_timeouts": 0, "reward_errors": expected.sum()}


def test_a_failed_grader_is_no_reward_of_zero():
    """The sample is not learned from, and a group with fewer than two graded samples is replaced by another one."""

    def request_outcomes(self, jobs):
        scores = HereScorer.request_outcomes(self, jobs)
        failure = Failure("reward_timeouts", "of a test")
        is_failing = [i % 4 == 1 or zlib.crc32(text.encode()) % 4 == 0 for i, text in jobs]
        return [failure if fails else score for fails, score in zip(is_failing, scores, strict=True)]

    worker = make_worker(12)
    worker = replace(worker, scorer=type("Failing", (HereScorer,), {"request_outcomes": request_outcomes})(worker.env))
    worker.scorer.settings = worker.scorer.settings._replace(max_error_share=1.0)
    batch, episodes, _ = collect_batch(worker, COLLECT)
    failed = episodes.failed
    returns = episodes.scores["return"]
    metrics = rollout_metrics(replace(episodes, has_signal=groups_with_signal(episodes, COLLECT)))
    assert metrics["env/reward_timeouts"] == failed.sum() > 0
    assert metrics["env/return"] == pytest.approx(returns[~failed].mean(), rel=1e-5)
    graded = np.isfinite(batch.rewards).reshape(-1, G)
    assert not graded.all()
    assert (graded.sum(axis=1) >= 2).all()
    learner = make_learner(ppo_minibatch=0, ppo_epochs=1)
    _, metrics, updates = train_step(learner, first_state(learner), batch)
    assert np.isfinite(metrics["loss"])
    assert np.isfinite(updates[0].minibatch.rewards).all()
    assert metrics["num_rows"] == graded.sum()


def test_pass_at_k_is_the_mean_over_all_subsets():
    rng = np.random.default_rng(0)
    correct = np.concatenate([rng.random((6, 7)) < 0.3, np.zeros((1, 7), bool), np.ones((1, 7), bool)])
    for k in range(1, 8):
        expected = [np.mean([any(row[i] for i in some) for some in combinations(range(7), k)]) for row in correct]
        np.testing.assert_allclose(pass_at_k(correct, k), expected)


# Runs

FLAGS = {
    "model_dir": ROOT / "tests" / "fixtures" / "qwen3-tied",
    "env_name": "poem",
    "groups_per_batch": 2,
    "group_size": 4,
    "ppo_minibatch": 4,
    "num_generation_tokens": 12,
    "tokens_per_microbatch": 192,
    "max_steps": 10,
    "save_interval": 4,
    "lr": 1e-3,
    "test_env_name": "poem-test",
    "test_interval": 4,
    "num_eval_tasks": 2,
    "num_eval_samples": 4,
    "do_group_filter": 0,
    "num_score_workers": 1,
}


def arguments(**flags) -> list[str]:
    return [word for name, value in flags.items() for word in (f"--{name}", str(value))]


def train(*argv: str) -> None:
    """The command, in this process."""
    with user_errors():
        grpo.main(parse(Config, argv, spellings=LMPO))


def lines(folder: Path) -> list[dict]:
    """metrics.jsonl, but for what the clock decides."""
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [reproducible(record) for record in records]


def test_steps_without_signal_change_nothing(tmp_path):
    flags = {
        "env_name": "countdown",
        "env_options": "prompt=bare,truncation_penalty=0",
        "weight_decay": 0.5,
    }
    flags |= {
        "max_steps": 2,
        "do_group_filter": 1,
        "test_env_name": "",
        "save_dir": tmp_path,
    }
    train(*arguments(**FLAGS | flags))
    assert [line["env/groups_without_signal"] for line in lines(tmp_path)] == [1.0, 1.0]
    assert not any("loss" in line for line in lines(tmp_path))
    before, after = (load_file(folder / "model.safetensors") for folder in (FLAGS["model_dir"], tmp_path / "step2"))
    assert before.keys() == after.keys()
    assert all((x == after[name]).all() for name, x in before.items())


RUNS = {
    "ppo": {"critic_lr": 1e-3},
    "reinforce++": {"kl_coef": 0.1},
    "nanochat": {
        "env_options": "",
        "num_epochs": 0,
        "num_eval_tasks": 2,
        "groups_per_batch": 4,
        "group_size": 8,
        "num_generation_tokens": 24,
        "top_k": 75,
        "temperature": 3,
        "seed": 4,
    },
}


@pytest.mark.parametrize("name", slow("reinforce++", "ppo", "nanochat"))
def test_presets_train(name, tmp_path):
    """With a critic, with a reference, with another optimizer and truncated sampling; the model saved is the policy."""
    flags = (
        FLAGS
        | {
            "max_steps": 3,
            "test_env_name": "",
            "save_dir": tmp_path,
        }
        | RUNS[name]
    )
    train("--config", f"configs/{name}.py", *arguments(**flags))
    records = lines(tmp_path)
    assert len(records) == 3
    assert all(np.isfinite(r["loss"]) and r["grad_norm"] > 0 for r in records)
    assert ("value/explained_variance" in records[0]) == (name == "ppo")
    assert ("kl" in records[0]) == ("+" in name)
    before, after = (load_file(folder / "model.safetensors") for folder in (FLAGS["model_dir"], tmp_path / "step3"))
    assert before.keys() == after.keys()
    assert any((x != after[tensor]).any() for tensor, x in before.items())
    more = flags | {"max_steps": 4, "resume": "force"}  # forced, since some learning rates end with the steps
    train("--config", f"configs/{name}.py", *arguments(**more))  # goes on where that ended
    assert [record["global_step"] for record in lines(tmp_path)] == [1, 2, 3, 4]


def test_an_epoch_is_every_problem_once_and_best_is_the_model_of_the_best_score(tmp_path, monkeypatch):
    scores = iter([0.0, -0.4, -0.1, -0.2, 0.0])  # of the untrained model, and after each step
    evaluate_held_out = grpo.evaluate_held_out

    def scripted(*arguments):
        metrics, episodes = evaluate_held_out(*arguments)
        return metrics | {"test_env/return": next(scores)}, episodes

    monkeypatch.setattr(grpo, "evaluate_held_out", scripted)
    subjects = tmp_path / "subjects.txt"
    subjects.write_text("\n".join("abcdefghijklmno"))
    options = {
        "env_options": f"subjects_file={subjects}",
        "num_epochs": 1,
        "groups_per_batch": 4,
        "save_best": 1,
    }
    options |= {
        "lr_schedule": "linear",
        "max_steps": 10000,
        "test_interval": 1,
        "test_env_name": "poem-test",
    }
    train(*arguments(**FLAGS | options | {"save_dir": tmp_path / "run", "save_rollouts": "all"}))
    files = sorted((tmp_path / "run" / "rollouts").glob("step_*.jsonl"))
    steps = [[json.loads(line) for line in file.open()] for file in files]
    rollouts = [row for rows in steps for row in rows]
    num_tasks = len({row["task"] for row in rollouts})
    records = [record for record in lines(tmp_path / "run") if record["global_step"]]
    assert len(records) == -(-num_tasks // 4)
    assert {row["task"] for row in rollouts} == {*range(num_tasks)}
    shares = [1 - 4 * i / num_tasks for i in range(len(records))]
    assert [record["lr"] / FLAGS["lr"] for record in records] == pytest.approx(shares), "by problems"
    for file, rows in zip(files, steps, strict=True):
        check_arrays(np.load(file.with_suffix(".npz"), allow_pickle=False), rows)
    folders = FLAGS["model_dir"], tmp_path / "run" / "best"
    untrained, best = (load_file(folder / "model.safetensors") for folder in folders)
    assert all((x == best[name]).all() for name, x in untrained.items()), "a score of 0, before the first step"


def check_arrays(arrays: Mapping[str, np.ndarray], rows: list[dict]) -> None:
    """rollouts/step_N.npz holds what step_N.jsonl says, and the tokens."""
    tokens = arrays["tokens"]
    starts = arrays["prompt_lengths"]
    ends = arrays["lengths"]
    is_completion = (np.arange(tokens.shape[1]) >= starts[:, None]) & (np.arange(tokens.shape[1]) < ends[:, None])
    same = {
        "tasks": "task",
        "groups": "group",
        "finished": "finished",
        "returns": "return",
    }
    for array, field in same.items():
        np.testing.assert_array_equal(arrays[array], np.array([row[field] for row in rows]).astype(arrays[array].dtype))
    assert (ends - starts).tolist() == [row["length"] for row in rows]
    assert (arrays["mask"] == is_completion).all()
    assert not arrays["failed"].any()
    assert (arrays["logprobs"][is_completion] < 0).all()
    assert not arrays["logprobs"][~is_completion].any()
    parts = {"scores/" + field for field in rows[0]} & arrays.keys()
    assert "scores/correct_answer" in parts
    assert tokens.dtype == np.int32
    assert len(tokens) == len(rows)
    _, first = np.unique(arrays["groups"], return_index=True)
    assert all((tokens[i, : starts[i]] == tokens[j, : starts[j]]).all() for i in first for j in (i, i + 1))
    for i, row in enumerate(rows):
        if "logprobs" in row:
            np.testing.assert_allclose(arrays["logprobs"][i, starts[i] : ends[i]], row["logprobs"], atol=6e-5)


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.py")), ids=lambda path: path.stem)
def test_presets_are_valid_and_say_what_they_maximize(path, monkeypatch):
    monkeypatch.setattr(startup, "find_devices", lambda: [SimpleNamespace(device_kind="NVIDIA L4")])
    config = parse(Config, ["--config", str(path)])
    assert describe_objective(config.objective).startswith("minimize ")


THEIRS = {  # policy-gradients' configs/grpo.yaml and ppo.yaml; Adam is torch's: betas 0.9, 0.999, no decay
    "grpo": {"prompts_per_step": 4, "num_rollouts": 8, "size": 3000, "updates": 4},
    "ppo": {
        "prompts_per_step": 16,
        "num_rollouts": 1,
        "size": 15000,
        "gamma": 0.99,
        "lam": 0.95,
        "updates": 2,
    },
}


@pytest.mark.parametrize("loss", THEIRS)
def test_the_presets_of_policy_gradients_are_its_files(loss):
    """train_batch_size 2 x batch_acc 4 are the eight completions of an update; one pass over `size` problems."""
    theirs = THEIRS[loss]
    files = ["configs/policy_gradients.py", *["configs/policy_gradients_ppo.py"] * (loss == "ppo")]
    config = parse(Config, [word for file in files for word in ("--config", file)])
    update = config.update
    optimizer = config.optimizer
    objective = config.objective
    assert (update.groups_per_batch, update.group_size) == (theirs["prompts_per_step"], theirs["num_rollouts"])
    assert (config.minibatch_size, config.updates_per_step, config.num_epochs) == (2 * 4, theirs["updates"], 1)
    assert (optimizer.b1, optimizer.b2, optimizer.adam_eps, optimizer.weight_decay) == (0.9, 0.999, 1e-8, 0)
    assert optimizer.lr == 5e-6
    assert not objective.do_group_filter
    assert not objective.kl_coef
    if loss == "ppo":
        assert (objective.gamma, objective.gae_lambda, optimizer.critic_lr) == (theirs["gamma"], theirs["lam"], 5e-6)
    pytest.importorskip("reasoning_gym")
    env = make_env(config.env.env_name, **parse_options(config.env.env_options))
    assert env.num_tasks == theirs["size"]
    words = [env.problem(index).answer[1]["metadata"]["word"] for index in range(50)]
    assert {3, 10} <= {*map(len, words)} <= {*range(3, 11)}


def test_a_preset_has_its_own_row_of_the_table_behind_any_other():
    """Advantage, loss, aggregation and clip range are its own, whatever a preset before it has set."""

    def row(*paths: Path) -> tuple:
        objective = parse(Config, [word for path in paths for word in ("--config", str(path))]).objective
        clip = objective.clip_range if objective.objective in CLIPS else ()
        return objective.advantage, objective.objective, objective.loss_normalization, clip

    CLIPS = ("ppo", "ppo_all_clip", "cispo", "gspo", "dppo")
    methods = [path for path in (ROOT / "configs").glob("*.py") if '"objective"' in path.read_text()]
    assert len(methods) >= 16
    for before, path in itertools.permutations(methods, 2):
        assert row(before, path) == row(path), f"{path.stem} behind {before.stem}"


MISTAKES = [
    ({"group_size": 1}, "raise --group_size above 1"),
    ({"ppo_minibatch": 3}, "--ppo_minibatch 3 does not divide"),
    ({"temperature": 0}, "give one above 0 for training"),
    ({"advantage": "best_k", "best_k": 5}, "--best_k 5 is more than --group_size 4"),
    ({"kl_coef": 0.1, "kl_estimator": "k1"}, "--kl_estimator k1 in the loss"),
    ({"do_group_normalization": 0, "advantage": "group_mean"}, "contradicts --advantage group_mean"),
    ({"env_name": "cuntdown"}, "there is no environment 'cuntdown' (did you mean countdown?): choose one of countdown"),
    ({"env_options": "color=red"}, "no option 'color'"),
    ({"model_dir": "/nowhere/model"}, "there is no folder /nowhere/model"),
    ({"num_generation_tokens": -5}, "--num_generation_tokens must be at least 1"),
    ({"test_env_name": "countdown-tset"}, "did you mean countdown-test?"),
    ({"force_answer_at": 12}, "--force_answer_at 12 must be below the 12 tokens"),
    ({"mesh": "fsdp=3"}, "--mesh fsdp=3 makes"),
    ({"seed": -1}, "--seed must not be negative"),
    ({"save_best": 1, "test_env_name": ""}, "--save_best needs held-out scores"),
]


@pytest.mark.parametrize(("flags", "words"), MISTAKES, ids=lambda x: " ".join(x) if isinstance(x, dict) else "")
def test_a_mistake_ends_with_one_sentence(flags, words, tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        train(*arguments(**FLAGS | {"save_dir": tmp_path} | flags))
    error = capsys.readouterr().err
    assert end.value.code == 2
    assert error.startswith("error: ")
    assert words in error
    assert error.count("\n") == 1


def test_the_command_from_another_folder(tmp_path):
    command = [sys.executable, ROOT / "core" / "grpo.py", "--env_name", "nowhere"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "there is no environment 'nowhere'" in done.stderr
    assert not list(tmp_path.iterdir())


def test_lmpos_switches_come_before_the_checks():
    argv = arguments(do_group_normalization=0, group_size=1, groups_per_batch=64)
    config = parse(Config, argv, spellings=LMPO)
    assert (config.objective.advantage, config.batch_size) == ("reinforce", 64)
