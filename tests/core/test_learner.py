"""Updates against one plain gradient, and what an update and a step do with their batch.

Letters: G rollouts of a prompt, B rows, T row length.
"""

from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import optax
import pytest
from jaxtyping import Float, Int

from core import learner as learner_module
from core import records
from core.extensions.programs import zero_batch
from core.objectives import policy_loss, set_loss_denominators
from core.records import Batch
from models.distribution import Distribution
from models.names import Array
from tests.helpers import MODEL, assert_close, random_params, slow
from tests.learning import (
    CONFIG,
    DISTRIBUTION,
    GRADIENT,
    NO_STEPS,
    SCORES,
    SURPRISE,
    G,
    assert_same_gradient,
    first_state,
    make_learner,
    random_batch,
    teacher_forced,
    train_step,
    update,
    with_reference,
)
from tests.oracles.gradient import plain_gradient
from tests.playing import COLLECT, collect_batch, make_worker
from tests.processes import on_four_devices
from utils.batching import MicrobatchShape, concatenate, select_rows
from utils.devices.startup import DeviceConfig, make_layout
from utils.settings.config import with_options


def with_garbage(batch: Batch) -> Batch:
    """More padding, and anything in it but in the mask."""
    rng = np.random.default_rng(1)
    batch = jax.tree.map(lambda x: np.pad(x, ((0, 0), (0, 30))) if x.ndim == 2 else x, batch)
    padding = np.arange(90) >= batch.lengths[:, None]
    noise = {name: rng.normal(0, 50, padding.shape) for name in ("old_logprobs", "sample_logprobs")}
    noise["tokens"] = rng.integers(0, MODEL.vocab_size, padding.shape)
    arrays = {name: (getattr(batch, name), x) for name, x in noise.items()}
    return replace(batch, **{name: np.where(padding, x, old).astype(old.dtype) for name, (old, x) in arrays.items()})


CHANGES = {
    "micro-batches": lambda batch: batch,
    "other order": lambda batch: jax.tree.map(lambda x: x[::-1], batch),
    "more padding": with_garbage,
}


@pytest.mark.parametrize("change", ["more padding", *slow("micro-batches", "other order")])
def test_an_update_does_not_depend_on_how_the_batch_is_cut(change):
    gradient, metrics = update(CHANGES[change](random_batch()))
    assert_same_gradient(gradient, plain_gradient(random_params(), random_batch()))
    assert_close(metrics["grad_norm"], optax.tree.norm(gradient), GRADIENT)
    assert 0.2 < metrics["clip_fraction"] < 0.8
    assert metrics["inference_recompute/ratio"] != 1


def test_extras_reach_the_distribution_beside_their_tokens(monkeypatch):
    """Temperatures of rows and of tokens, through micro-batches, packing and chunks of the head; padding is 1."""
    outputs = Distribution.outputs

    def with_temperatures(self, logits, tokens, support=None, extras=None):
        return outputs(self, logits / (extras["of_row"] * extras["of_token"])[..., None], tokens, support)

    rng = np.random.default_rng(3)
    batch = random_batch()
    # A distribution that reads extras, a few tokens at a time.
    monkeypatch.setattr(Distribution, "outputs", with_temperatures)
    monkeypatch.setattr("models.logits.LOGIT_ELEMENTS", 15 * MODEL.vocab_size)
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
    # A fork declares its extras here.
    monkeypatch.setattr(records, "EXTRAS", {"of_row": Int[Array, "B"], "of_token": Float[Array, "B T"]})
    zeros, _ = zero_batch(make_learner(), MicrobatchShape(8, 64, 256))
    found = {name: (x.shape, x.dtype.name) for name, x in zeros.extras.items()}
    assert found == {"of_row": ((len(zeros),), "int32"), "of_token": ((len(zeros), 64), "float32")}


def test_another_coefficient_compiles_nothing():
    """And the gradient is that of the loss with this constant in it."""
    base = {"kl_coef": 0.1, "entropy_coef": 0.02, "clip_epsilon": 0.2, "clip_epsilon_high": 0.3}
    changes = [{name: 2 * value} for name, value in base.items()]
    learner = make_learner(**base)
    state = replace(first_state(learner), extra={"ema": np.ones(3)})
    state, _ = learner.update(state, with_reference(random_batch()), 0.0)
    assert state.extra["ema"].tolist() == [1, 1, 1]  # it lives across updates, and is no part of them
    before = learner_module.accumulate._cache_size()
    found = [update(with_reference(random_batch()), **base | change)[0] for change in changes]
    assert learner_module.accumulate._cache_size() == before
    tokens = random_batch().tokens
    outputs, pull_back = jax.vjp(lambda params: teacher_forced(MODEL, params, tokens, DISTRIBUTION), random_params())
    pull_back = jax.jit(pull_back)
    for change, gradient in zip(changes, found, strict=True):
        objective = with_options(CONFIG.objective, **base | change)
        batch = set_loss_denominators(with_reference(random_batch()), 4, 50, objective.policy)
        loss = objective.loss
        of_outputs = jax.grad(lambda outputs, batch=batch, loss=loss: policy_loss(outputs, batch, loss)[0])(outputs)
        assert_same_gradient(gradient, *pull_back(of_outputs))


CUT = {"kl_coef": 0.1, "clip_epsilon": 0.25}  # a ratio of the batch lies within 1e-6 of 1.2
FAMILY = {  # losses that look beyond their own token: at rows, at the whole batch, at other models
    "gspo": CUT
    | {"objective": "gspo", "loss_normalization": "sequence_mean", "importance_correction": "mask"},
    "cispo": CUT
    | {"objective": "cispo", "loss_normalization": "constant", "entropy_coef": 0.0}
    | {"importance_correction": "truncate", "importance_level": "sequence"},
    "dppo": CUT | {"objective": "dppo"},
}


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
    batch = with_reference(random_batch())
    seen = []

    def spy(batch, num_rollouts, num_generation_tokens, config):
        seen.append((num_rollouts, num_generation_tokens))
        return set_loss_denominators(batch, num_rollouts, num_generation_tokens, config)

    # Keeps what the denominators are made from.
    monkeypatch.setattr("core.learner.set_loss_denominators", spy)
    parts = [update(select_rows(batch, rows), **FAMILY["cispo"])[0] for rows in np.split(np.arange(2 * G), [3])]
    assert_same_gradient(jax.tree.map(np.add, *parts), update(batch, **FAMILY["cispo"])[0])
    assert seen == [(4, 50)] * 3


def updates_on_four_devices(file: str, names: tuple[str, ...]) -> None:
    layout = make_layout(DeviceConfig(mesh="fsdp=2,tp=2"))
    on_devices = {"layout": layout, "tokens_per_microbatch": 256}
    found = {name: update(with_reference(random_batch()), **on_devices, **FAMILY[name])[0] for name in names}
    found["ppo"], _ = update(random_batch(), **on_devices)
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


def test_first_ratio_is_one_and_metrics_of_a_step_are_means_over_its_updates():
    learner = make_learner(optimizer=NO_STEPS)
    _, metrics, _ = train_step(learner, first_state(learner), replace(random_batch(), old_logprobs=None))
    assert_ratio_is_one(metrics)
    learner = make_learner()
    _, metrics, updates = train_step(learner, first_state(learner), replace(random_batch(), old_logprobs=None))
    assert len(updates) == metrics["num_updates"] == len(metrics["updates/approx_kl"]) == 4
    assert metrics["approx_kl"] == pytest.approx(np.mean(metrics["updates/approx_kl"]))


def test_log_probabilities_need_one_shape_of_each_width(monkeypatch):
    """If attention skips padding there are two of one width, for rows that are left: gradients alone use the second."""
    learner, batch = make_learner(), random_batch()
    assert learner.shapes_without_gradients == learner.shapes
    # As if the kernel of this CPU skipped padding, as that of GPUs does.
    monkeypatch.setattr(learner_module, "SKIPPING", ("plain",))
    assert len(learner.shapes) == 2
    assert learner.shapes_without_gradients == learner.shapes[:1]
    found = learner.compute_outputs(random_params(), batch).logprobs
    assert_close(found[batch.mask], true_logprobs(batch)[batch.mask], SCORES)


@pytest.mark.parametrize("cut", [{"top_k": 8}, *slow({"top_p": 0.9}, {"min_p": 0.05})], ids=str)
def test_first_ratio_is_one_if_sampling_is_truncated(cut):
    """Whether the old log-probabilities are recomputed or the sampler's."""
    for from_sampler in (False, True):
        config = with_options(COLLECT, temperature=0.6, do_inference_logprobs=from_sampler, **cut)
        batch, *_ = collect_batch(make_worker(12, distribution=config.sampling.distribution), config)
        learner = make_learner(config, NO_STEPS)
        _, metrics, _ = train_step(learner, first_state(learner), batch)
        assert_ratio_is_one(metrics)
        assert_close(metrics["inference_recompute/logprob_diff_max"], 0, SCORES, SURPRISE / 0.6)
        assert metrics["grad_norm"] > 0.01
    whole = learner.compute_outputs(random_params(), replace(batch, support=None)).logprobs
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
    _, computed = make_learner(**flags).add_logprobs(SimpleNamespace(params=random_params()), batch)
    if expected is None:
        assert computed.old_logprobs is None
    else:
        assert_close(computed.old_logprobs[computed.mask], expected(batch)[batch.mask], SCORES)


def test_the_best_of_each_group_are_learned_from_alone():
    learner = make_learner(advantage="best_k", best_k=1, objective="reinforce", ppo_minibatch=2, ppo_epochs=1)
    _, metrics, updates = train_step(learner, first_state(learner), replace(random_batch(), old_logprobs=None))
    assert metrics["num_rows"] == 2
    assert metrics["num_updates"] == len(updates) == 1
    minibatch = updates[0].minibatch
    assert sorted(minibatch.lengths.tolist()) == sorted(random_batch().lengths[[1, 4]].tolist())
    assert (minibatch.advantages[minibatch.mask] == 1).all()


def test_update_that_is_not_finite_is_skipped_and_ends_the_run():
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
    assert int(state.num_skipped) == 0
    assert int(state.step) == 2, "one that is finite ends the row"
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
    paused = replace(learner, reference=reference, config=with_options(learner.config, kl_coef=0.0))
    assert paused.add_logprobs(first_state(learner), batch)[1].ref_logprobs is not None, "a schedule passes through 0"


@pytest.mark.parametrize(("lr_schedule", "num_live", "expected"), [("linear", 8, 6), ("cosine", 4, 3)])
def test_learning_rate_does_not_depend_on_the_updates_made(lr_schedule, num_live, expected):
    """Groups that are dropped make updates fewer, not the schedule longer."""
    learner = make_learner(optimizer=optax.sgd(0.1), lr_schedule=lr_schedule, ppo_epochs=3)
    batch = replace(random_batch(), old_logprobs=None)
    batch.rewards[num_live:] = 0.0  # the second group has no signal
    state, rates = first_state(learner), []
    for step in range(1, 4):
        state, metrics, updates = train_step(learner, state, batch, step, (step - 1) / 3)
        rates.append([float(update.metrics["lr_multiplier"]) for update in updates])
        assert metrics["lr"] == pytest.approx(learner.config.optimizer.lr * np.mean(rates[-1]))
    assert [*map(len, rates)] == 3 * [expected]
    last = {"linear": 1 / 3, "cosine": (1 + np.cos(np.pi * 2 / 3)) / 2}[lr_schedule]
    assert rates[-1][-1] == pytest.approx(last)
    assert rates[0][0] == 1
