"""Advantages, policy losses, KL, aggregation against plain float64 loops written from the formulas, not from the code.

Letters: N prompts, G rollouts of each, B = N G rows, T row length.
"""

import functools
import itertools
import math
import shlex
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from core.advantages import ADVANTAGES, ObjectiveConfig, compute_advantages
from core.config import Config
from core.extensions.notes import describe_objective
from core.learner import split_minibatches
from core.objectives import policy_loss, set_loss_denominators
from core.records import Batch
from core.terms.critic import value_loss
from core.terms.ratios import LOG_RATIOS, reduce_metrics
from models.distribution import TokenOutputs
from tests.helpers import ROOT, assert_close, slow
from tests.oracles.advantages import NOT_RELATIVE, flat, gae, mean, oracle_advantages
from tests.oracles.losses import LIMIT, ROLLOUTS, clip_range, oracle_loss, oracle_policy, slopes
from utils.batching import concatenate, select_rows
from utils.settings.config import make_config, options_of, parse

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")  # NumPy's, of groups without a graded rollout

N, G, T = 3, 4, 20
B = N * G
SURPRISE = 10.0  # nats of an unlikely token: exp makes their rounding that of the ratio, relative to it
objective_of = functools.partial(make_config, ObjectiveConfig)  # settings of flat options
OPTIONS = options_of(ObjectiveConfig)
CHOICES = {name: OPTIONS[name].choices for name in ("advantage", "objective", "loss_normalization")}
# See "Turns of episodes", and terms/test_reward_parts.py.
CHOICES["advantage"] = [name for name in CHOICES["advantage"] if name[:5] != "turn_" and name != "gdpo"]
LOSSES = [*itertools.product(CHOICES["objective"], CHOICES["loss_normalization"])]
REFUSES_NORMALIZATION = ("gae", "best_k")
KL = {
    "no KL": {},
    "KL in the loss": {"kl_coef": 0.1},
    "KL in the reward": {"kl_coef": 0.1, "kl_in": "reward"},
}


def random_batch(seed: int, rewards=None, group_size: int = G, most_rows: int = 1) -> Batch:
    """Ragged rows with masked (forced) tokens among the completion, and garbage wherever the mask is off.

    A rollout has one to `most_rows` rows.
    """
    rng = np.random.default_rng(seed)
    if rewards is None:
        rewards = np.concatenate([rng.choice([0, 0.1, 0.6, 1], G), [0.1] * G, rng.choice([0, 0.1, 0.6, 1], G)])
    rollout = np.repeat(np.arange(len(rewards)), np.resize(np.arange(most_rows, 0, -1), len(rewards)))
    rewards = np.asarray(rewards)[rollout]
    B = len(rewards)
    prompts = rng.integers(1, 5, B)
    lengths = prompts + rng.integers(1, LIMIT + 1, B)
    columns = np.arange(T)
    mask = (columns >= prompts[:, None]) & (columns < lengths[:, None]) & (rng.random((B, T)) < 0.9)
    mask[0] = False  # a row of forced tokens only
    old = -rng.exponential(1, (B, T))
    sampled = old + rng.normal(0, 0.4, (B, T))
    ref = old + rng.normal(0, 0.4, (B, T))

    def dirty(x):
        return np.where(mask, x, rng.normal(0, 100, (B, T))).astype(np.float32)

    return Batch(
        tokens=rng.integers(0, 50, (B, T)),
        mask=mask,
        sample_logprobs=dirty(sampled),
        rewards=np.float32(rewards),
        lengths=lengths,
        prompt_lengths=prompts,
        finished=rng.random(B) < 0.7,
        old_logprobs=dirty(old),
        ref_logprobs=dirty(ref),
        values=dirty(rng.normal(0.4, 0.5, (B, T))),
        rollout=rollout,
        group_size=group_size,
    )


def new_logprobs(batch: Batch, config: ObjectiveConfig, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Log-probabilities of the updated policy, kept away from the kinks and jumps of the loss, and entropies."""
    rng = np.random.default_rng(seed)
    mask = batch.mask
    old = np.float64(batch.old_logprobs)
    sampled = np.float64(batch.sample_logprobs)
    log_ratio = rng.uniform(-0.9, 0.95, mask.shape)
    near = np.array(True)
    while near.any():
        log_ratio += 0.03 * near
        if config.policy.objective == "gspo":
            where = np.exp((log_ratio * mask).sum(axis=1, keepdims=True) / np.maximum(mask.sum(axis=1)[:, None], 1))
        elif config.policy.objective == "dppo":
            where = 1 + np.exp(np.where(mask, old + log_ratio, 0)) - np.exp(np.where(mask, sampled, 0))
        else:
            where = np.exp(log_ratio)
        kinks = (*clip_range(flat(config)), config.policy.dual_clip, 2.0)
        near = mask & np.any([np.abs(where - kink) < 0.01 for kink in kinks], axis=0)
        near = near | (near.any(axis=1, keepdims=True) if config.policy.objective == "gspo" else False)
    entropy = rng.uniform(0, 4, mask.shape)
    garbage = rng.normal(0, 100, mask.shape)
    return np.float32(np.where(mask, old + log_ratio, garbage)), np.float32(np.where(mask, entropy, garbage))


@functools.cache
def credited(config: ObjectiveConfig, seed: int) -> tuple[Batch, np.ndarray]:
    """A batch of the rows that stay, with its advantages, and what these should be."""
    batch = compute_advantages(random_batch(seed), config)
    expected, keep, _ = oracle_advantages(random_batch(seed), flat(config))
    rows = np.flatnonzero(keep)
    assert batch.rollout.tolist() == rows.tolist()
    assert_close(batch.advantages, expected[rows], B * T, SURPRISE)
    return replace(batch, returns=None), expected[rows]


def check_loss(config: ObjectiveConfig, cases: list[tuple[Batch, np.ndarray]], seed: int) -> None:
    """Values against the oracle, gradients against its central differences, for batches and their advantages.

    One call for all of them: each row is divided by the denominators of its own batch. Not compiled, as the operations
    are the same in all of these tests. The loss is linear in a row's weight, so its slope there is the row's part.
    """
    inputs, expected = [], []
    for batch, a in cases:
        new, entropy = new_logprobs(batch, config, seed)
        inputs.append((new, entropy, set_loss_denominators(batch, ROLLOUTS, LIMIT, config.policy)))
        rows = oracle_loss(new, new, entropy, a, batch, flat(config)).sum(axis=1)
        by_entropy = -config.policy.entropy_coef * batch.mask / batch.mask.sum()
        expected.append((slopes(oracle_loss, new, entropy, a, batch, flat(config)), by_entropy, rows))
    (new, entropy, batch), expected = concatenate(inputs), concatenate(expected)

    def loss(new, entropy, weight):
        weighted = replace(batch, denominator=batch.denominator / weight, num_tokens=batch.num_tokens / weight)
        return policy_loss(TokenOutputs(new, entropy), weighted, config.loss)[0]

    value, found = jax.value_and_grad(loss, argnums=(0, 1, 2))(new, entropy, jnp.ones(len(new)))
    for x, y, what in zip(found, expected, ("by log-probabilities", "by entropy", "value of each row"), strict=True):
        assert_close(x, y, B * T, SURPRISE * np.abs(y).max(), err_msg=what)
    assert_close(value, math.fsum(expected[2]), B * T, SURPRISE * np.abs(expected[2]).sum())


def learn(new, entropy, batch: Batch, config: ObjectiveConfig):
    """The gradient and the metrics of a (micro-)batch."""
    outputs = TokenOutputs(jnp.asarray(new), jnp.asarray(entropy))
    grad, metrics = jax.grad(policy_loss, has_aux=True)(outputs, batch, config.loss)
    return grad.logprobs, metrics


# Values and gradients


CROSSED = [(loss, kl) for loss in LOSSES for kl in KL]
QUICK = [(loss, kl) for loss, kl in CROSSED if kl == "no KL" or loss == LOSSES[0]]


@pytest.mark.parametrize("case", [*QUICK, *slow(*(case for case in CROSSED if case not in QUICK))], ids=str)
def test_value_and_gradient(case):
    """For every advantage, the random batch having a group without signal."""
    (objective, normalization), kl = case
    cases = [credited(objective_of(advantage=advantage, **KL[kl]), seed=1) for advantage in CHOICES["advantage"]]
    flags = {"clip_epsilon_high": 0.28, "entropy_coef": 0.01} | KL[kl]
    config = objective_of(objective=objective, advantage="group_mean", loss_normalization=normalization, **flags)
    check_loss(config, cases, seed=1)


ADVANTAGE_FLAGS = [
    {},
    {"do_group_filter": False},
    {"do_global_normalization": True},
    {"do_global_normalization": True, "do_group_filter": False},
    {"negative_advantage_multiplier": 0.0},
    {"negative_advantage_multiplier": 0.3},
    {"do_global_normalization": True, "negative_advantage_multiplier": 2.0},
    {"do_truncation_filter": True},
    {"do_truncation_filter": True, "do_group_filter": False, "do_global_normalization": True},
    {"best_k": 1, "gamma": 0.9, "gae_lambda": 0.7},
    {"best_k": 3, "gamma": 0.5, "gae_lambda": 0.0},
    {"kl_coef": 0.3, "kl_in": "reward", "gamma": 0.9},
    {"kl_coef": 0.3, "kl_in": "reward", "do_truncation_filter": True, "do_global_normalization": True},
]
LOSS_FLAGS = [
    {"clip_epsilon": 0.1},
    {"clip_epsilon": 0.0, "clip_epsilon_high": 0.5, "objective": "ppo_all_clip"},
    {"dual_clip": 1.5},
    {"dual_clip": 1.1, "clip_epsilon_high": 0.3},
    {"clip_epsilon": 3e-4, "clip_epsilon_high": 4e-4, "objective": "gspo", "loss_normalization": "sequence_mean"},
    {"clip_epsilon": 1.0, "clip_epsilon_high": 4.0, "objective": "cispo"},
    {"clip_epsilon": 0.05, "clip_epsilon_high": 0.1, "objective": "dppo"},
    {"do_mask_importance_ratio": True, "kl_coef": 0.1},
    {"do_mask_inference_ratio": True, "kl_coef": 0.1, "objective": "reinforce"},
    {"importance_correction": "mask", "importance_floor": 0.7, "importance_cap": 1.5, "kl_coef": 0.1},
    {"importance_correction": "mask", "importance_floor": 0.5, "importance_cap": 5.0, "importance_level": "sequence"},
    {"importance_correction": "truncate", "importance_cap": 1.5, "kl_coef": 0.1, "objective": "gspo"},
    {"importance_correction": "truncate", "importance_cap": 1.5, "importance_level": "sequence", "objective": "cispo"},
    {"off_policy_mask": 0.05, "kl_coef": 0.1},
    {"entropy_coef": 0.0, "kl_coef": 1.0, "loss_normalization": "constant"},
]
TWO = ("group_zscore", "gae")  # advantages


def in_words(flags) -> str:
    return ",".join(f"{name}={value}" for name, value in flags.items()) or "none"


@pytest.mark.parametrize("normalization", CHOICES["loss_normalization"])
def test_value_and_gradient_without_the_rows_that_leave(normalization):
    cases = [credited(objective_of(**flags), seed=2) for flags in ADVANTAGE_FLAGS]
    assert len({len(a) for _, a in cases}) > 2
    check_loss(objective_of(loss_normalization=normalization), cases, seed=2)


@pytest.mark.parametrize("flags", LOSS_FLAGS, ids=in_words)
def test_value_and_gradient_under_flags(flags):
    check_loss(objective_of(**flags), [credited(objective_of(advantage=name), seed=3) for name in TWO], seed=3)


ICEPOP = {"importance_correction": "mask", "importance_floor": 0.5, "importance_cap": 5.0}
MASKED = [  # probabilities of two tokens of a completion: sampled, old, new; advantage; the tokens that are left out
    ({"do_mask_inference_ratio": True}, [0.4, 0.1], [0.1, 0.4], [0.1, 0.4], 1.0, [True, False]),
    ({"do_mask_importance_ratio": True}, [0.1, 0.2], [0.1, 0.2], [0.3, 0.1], 1.0, [True, False]),
    ({"importance_correction": "mask"}, [0.1, 0.4], [0.3, 0.1], [0.3, 0.1], 1.0, [True, False]),
    (ICEPOP, [0.4, 0.3], [0.1, 0.2], [0.1, 0.2], 1.0, [True, False]),
    ({"off_policy_mask": 0.5}, [0.4, 0.2], [0.4, 0.2], [0.1, 0.2], -1.0, [True, True]),  # mean of log 4 and 0: 0.69
    ({"off_policy_mask": 0.7}, [0.4, 0.2], [0.4, 0.2], [0.1, 0.2], -1.0, [False, False]),
    ({"off_policy_mask": 0.5}, [0.4, 0.2], [0.4, 0.2], [0.1, 0.2], 1.0, [False, False]),
    ({"off_policy_mask": 0.5}, [0.1, 0.2], [0.4, 0.2], [0.4, 0.2], -1.0, [False, False]),
    ({"off_policy_mask": 0.5}, [0.4, 0.2], [0.1, 0.2], [0.1, 0.2], -1.0, [True, True]),  # by the sampler alone
]


@pytest.mark.parametrize("row", range(len(MASKED)))
def test_masks_leave_out_the_policy_loss_of_tokens(row):
    flags, *probabilities, advantage, left_out = MASKED[row]
    sampled, old, new = np.log(np.float32([probabilities])).transpose(1, 0, 2)
    batch = Batch(
        tokens=np.zeros((1, 2), int),
        mask=np.ones((1, 2), bool),
        sample_logprobs=sampled,
        rewards=np.zeros(1),
        lengths=np.array([2]),
        prompt_lengths=np.array([0]),
        old_logprobs=old,
        advantages=np.full((1, 2), advantage),
    )
    config = objective_of(objective="reinforce", **flags)
    grad, metrics = learn(new, np.zeros((1, 2)), set_loss_denominators(batch, 1, LIMIT, config.policy), config)
    assert (grad == 0).tolist() == [left_out]
    assert metrics["masked_fraction"] == np.mean(left_out)


# What leaves the batch


SIX_GROUPS = {
    "advantage": "group_mean",
    "objective": "reinforce",
    "entropy_coef": 0.0,
    "groups_per_batch": 6,
    "group_size": G,
    "ppo_minibatch": 8,
}


@pytest.mark.parametrize("do_truncation_filter", [False, True])
@pytest.mark.parametrize("do_group_filter", [False, True])
@pytest.mark.parametrize("normalization", CHOICES["loss_normalization"])
@pytest.mark.parametrize("most_rows", [1, 2])
def test_the_gradient_of_a_step(most_rows, normalization, do_group_filter, do_truncation_filter):
    """For -A log p, summed over a step's minibatches of 8 rollouts; `constant` is Dr. GRPO's, whatever has left."""
    filters = {"do_group_filter": do_group_filter, "do_truncation_filter": do_truncation_filter}
    config = make_config(Config, **SIX_GROUPS, **filters, loss_normalization=normalization)
    rewards = np.ravel([[0, 1, 1, 0], [1, 1, 1, 1], [0, 0, 0, 1], [0, 0, 0, 0], [1, 1, 0, 1], [0.1] * 4])
    batch = random_batch(8, rewards, most_rows=most_rows)
    batch = replace(batch, old_logprobs=None, values=None, ref_logprobs=None)
    batch.tokens[:] = np.arange(len(batch))[:, None]  # which say the row that they are from
    found, expected = np.zeros((2, *batch.mask.shape))
    sizes = []
    for minibatch in split_minibatches(compute_advantages(batch, config.objective), config, 1, 0):
        rows, rollouts = minibatch.tokens[:, 0], {*minibatch.rollout.tolist()}
        sizes.append(len(rollouts))
        found[rows] = gradient_of_minibatch(minibatch, config)
        for row in rows:
            rollout = batch.rollout[row]
            group = rewards[rollout // G * G : rollout // G * G + G]
            divisors = {
                "constant": 8 * LIMIT,
                "token_mean": batch.mask[rows].sum(),
                "sequence_mean": len(rollouts) * max(1, batch.mask[batch.rollout == rollout].sum()),
            }
            expected[row] = -(rewards[rollout] - mean(group)) / divisors[normalization] * batch.mask[row]
    leaves = np.repeat(np.ptp(rewards.reshape(-1, G), axis=1) == 0, G) & do_group_filter
    leaves |= np.isin(np.arange(6 * G), batch.rollout[~batch.finished]) & do_truncation_filter
    num_rollouts = 6 * G - leaves.sum()
    assert sum(sizes) == num_rollouts
    assert len(sizes) == math.ceil(num_rollouts / 8)
    assert_close(found, expected, B * T)


def gradient_of_minibatch(minibatch: Batch, config: Config) -> jax.Array:
    """Returns the gradient of its rows, in a shape of 16 rows of which the last ones are filled up."""
    num_rows = len(minibatch.rewards)
    piece = set_loss_denominators(minibatch, config.minibatch_size, LIMIT, config.objective.policy)
    piece = select_rows(piece, np.resize(np.arange(num_rows), 16))
    piece.mask[num_rows:] = False
    zeros = np.zeros(piece.mask.shape)
    return learn(zeros - 1, zeros, piece, config.objective)[0][:num_rows]


# Advantages

REWARDS = [
    [0.1, 1.0, 0.0, 0.1],
    [0.1, 0.1, 0.1, 0.1],
    [0.3, 0.3, 0.9, 0.2],
    [0.0, 0.0, 0.0, 0.0],
    [-1.0, 0.3, 0.3, 0.2],
    [0.5, 0.5, 0.5, 0.9],
]


@pytest.mark.parametrize("flags", ADVANTAGE_FLAGS, ids=in_words)
@pytest.mark.parametrize("advantage", CHOICES["advantage"])
@pytest.mark.parametrize("most_rows", [1, 3])
def test_advantages(most_rows, advantage, flags):
    """Of rollouts of a row each, and of one to three: rows share what their rollout gets, which counts once."""
    if advantage in REFUSES_NORMALIZATION and "do_global_normalization" in flags:
        return
    config = objective_of(advantage=advantage, **flags)
    batch = random_batch(4, np.ravel(REWARDS), most_rows=most_rows)
    found = compute_advantages(batch, config)
    expected, keep, signal = oracle_advantages(batch, flat(config))
    rows = np.flatnonzero(keep)
    np.testing.assert_array_equal(found.tokens, batch.tokens[rows])
    assert_close(found.advantages, expected[rows], B * T, SURPRISE)
    has_signal = np.array(signal)[rows]
    assert not found.advantages[~has_signal].any()
    assert not found.advantages[~found.mask].any(), "exactly 0"
    assert (found.returns is not None) == (advantage == "gae")
    if advantage == "gae":
        returns = (gae(batch, flat(config)) + batch.values)[rows]
        assert_close(found.returns[found.mask], returns[found.mask], 4 * T, SURPRISE)


@pytest.mark.parametrize(
    ("gamma", "gae_lambda"),
    [(1.0, 0.95), (1.0, 1.0), (0.9, 0.8), (0.7, 0.0)],
)
@pytest.mark.parametrize("kl", ["no KL", "KL in the reward"])
def test_generalized_advantages(gamma, gae_lambda, kl):
    """Of single replies, and of episodes that are rewarded on the way."""
    config = objective_of(advantage="gae", gamma=gamma, gae_lambda=gae_lambda, **KL[kl])
    batch = random_batch(5)
    rng = np.random.default_rng(5)
    rewards = np.float32(batch.mask * rng.choice([0, 0, 0, 0.5, -1], batch.mask.shape))
    for case in (batch, replace(batch, token_rewards=rewards)):
        found = ADVANTAGES["gae"](case.rewards.reshape(-1, G), case, config)
        assert_close(found, gae(case, flat(config)), 4 * T, SURPRISE)


def in_sequence(*parts: float) -> np.float32:
    total = np.float32(0)
    for part in parts:
        total += np.float32(part)
    return total


NEARLY_EQUAL = {  # rewards whose float32 deviation is above 0 on some backends, though they are one number
    "seven times 0.1": [0.1] * 7,
    "eight times 0.95": [0.95] * 8,
    "sums in different order": [in_sequence(0.1, 0.2, 0.3), in_sequence(0.3, 0.2, 0.1)] * 4,
    "sums of many parts": [in_sequence(*[0.1] * 10), 1.0] * 4,
}


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"do_group_filter": False},
        {"do_group_filter": False, "do_global_normalization": True},
    ],
    ids=in_words,
)
@pytest.mark.parametrize("advantage", [name for name in CHOICES["advantage"] if name not in NOT_RELATIVE])
def test_equal_rewards_carry_no_signal(advantage, flags):
    """Nor do they reach the advantages of other groups through the normalization over the batch."""
    if advantage in REFUSES_NORMALIZATION and "do_global_normalization" in flags:
        return
    if advantage == "best_k" and "do_group_filter" in flags:
        return  # imitates such groups
    config = objective_of(advantage=advantage, **flags)
    for name, rewards in NEARLY_EQUAL.items():
        G = len(rewards)
        batch = random_batch(6, rewards + [*range(G)], G)
        found = compute_advantages(batch, config)
        expected, keep, signal = oracle_advantages(batch, flat(config))
        rows = np.flatnonzero(keep)
        assert signal == [False] * G + [True] * G
        assert found.rollout.tolist() == rows.tolist()
        assert not found.advantages[rows < G].any(), f"exactly 0 for {name}"
        assert_close(found.advantages, expected[rows], B * T, SURPRISE, err_msg=name)


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"do_group_filter": False},
        {"do_global_normalization": True},
    ],
    ids=in_words,
)
@pytest.mark.parametrize("advantage", CHOICES["advantage"])
def test_a_rollout_whose_grader_failed_leaves_its_group(advantage, flags):
    """The others are valued as if it had never been sampled."""
    if advantage in REFUSES_NORMALIZATION and "do_global_normalization" in flags:
        return
    config = objective_of(advantage=advantage, best_k=2, **flags)
    rewards = np.float32([0, 1, 0.1, 1, 0.1, 0.6, 0, 1, 1, 0, 0, 0.6])
    failed = np.array([1, 4, 11])
    batch = random_batch(7, rewards)
    batch.rewards[failed] = np.nan
    others = np.setdiff1d(np.arange(len(rewards)), failed)
    found = compute_advantages(batch, config)
    expected = compute_advantages(replace(select_rows(batch, others), group_size=G - 1), config)
    assert np.isfinite(found.advantages).all()
    assert found.rollout.tolist() == expected.rollout.tolist()
    assert_close(found.advantages, expected.advantages, B * T, SURPRISE)


def test_group_leaves_if_a_failed_grader_makes_it_nan(monkeypatch):
    mine = lambda rewards, batch, config: rewards - rewards.mean(axis=1, keepdims=True)  # noqa: E731
    # An advantage of a user.
    monkeypatch.setitem(ADVANTAGES, "rloo", mine)
    batch = random_batch(0, np.float32([0, 1, 1, 0, np.nan, 1, 0, 0]))
    found = compute_advantages(batch, objective_of(advantage="rloo"))
    assert found.rollout.tolist() == [0, 1, 2, 3]
    assert np.isfinite(found.advantages).all()


def test_an_advantage_of_ones_own_has_the_filter(monkeypatch):
    """A function and its name in the table are enough."""

    def half_of_group_mean(rewards, batch, config):
        return 0.5 * (rewards - rewards.mean(axis=1, keepdims=True)) + 1

    # An advantage of a user.
    monkeypatch.setitem(ADVANTAGES, "mine", half_of_group_mean)
    batch = random_batch(6, np.ravel([[1, 1, 1, 1], [0, 1, 0, 1]]))
    for do_group_filter in (True, False):
        config = ObjectiveConfig(advantage="mine", do_group_filter=do_group_filter)
        found = compute_advantages(batch, config)
        assert found.rollout.tolist() == [*range(4 if do_group_filter else 0, 8)]
        assert not found.advantages[found.rollout < 4].any()
        assert found.advantages[found.rollout >= 4].any()
        assert "; A = mine" in describe_objective(config)


# The value loss


@pytest.mark.parametrize("value_clip", [0.2, 0.0, 0.5])
def test_value_loss(value_clip):
    config = objective_of(advantage="gae", value_clip=value_clip)
    batch = random_batch(7)
    rng = np.random.default_rng(7)
    returns = np.float32(gae(batch, flat(config)) + batch.values)
    batch = set_loss_denominators(replace(batch, returns=returns), ROLLOUTS, LIMIT, config.policy)
    values = np.float32(batch.values + rng.uniform(-0.8, 0.8, batch.mask.shape))
    num_tokens = int(batch.mask.sum())
    expected = np.zeros(batch.mask.shape)
    sides = set()

    def oracle(v, i, t):
        old = float(batch.values[i, t])
        R = float(returns[i, t])
        clipped = min(max(v, old - value_clip), old + value_clip) if value_clip else v
        return 0.5 * max((v - R) ** 2, (clipped - R) ** 2) / num_tokens

    value, grad = jax.value_and_grad(value_loss)(jnp.asarray(values), batch, value_clip)
    assert_close(value, math.fsum(oracle(float(values[i, t]), i, t) for i, t in np.argwhere(batch.mask)), B * T)
    for i, t in np.argwhere(batch.mask):
        v = float(values[i, t])
        expected[i, t] = (oracle(v + 1e-5, i, t) - oracle(v - 1e-5, i, t)) / 2e-5
        sides.add((v > batch.values[i, t], abs(expected[i, t]) < 1e-12))
    assert len(sides) == (4 if value_clip else 2), "above and below, clipped and not"
    assert_close(grad, expected, B * T)


# Metrics


@pytest.mark.parametrize("objective", ["ppo", "ppo_all_clip", "reinforce", "cispo", "gspo", "sapo"])
def test_without_old_logprobs_the_ratio_is_one(objective):
    """And all of these have the same gradient (dppo's ratio is to the sampler)."""
    config = objective_of(objective=objective, entropy_coef=0.0)
    batch, _ = credited(objective_of(advantage="gae"), 3)
    batch = set_loss_denominators(batch, ROLLOUTS, LIMIT, config.policy)
    for old in (None, batch.old_logprobs):
        grad, metrics = learn(batch.old_logprobs, np.zeros(batch.mask.shape), replace(batch, old_logprobs=old), config)
        assert_close(grad, -batch.advantages / batch.mask.sum(), B * T)
        assert metrics["approx_kl"] == 0
        assert_close(metrics["importance_ratio"], 1, B * T)


def test_countdown_recipe_has_the_scaled_gradient_of_lmpo():
    """kvfrans/lmpo: means over all columns, also of the entropy: the token mean times the share of trained columns."""
    script = (ROOT / "runs" / "countdown.sh").read_text().replace("\\\n", " ")
    flags = shlex.split(script.partition("core/grpo.py")[2])
    config = parse(Config, flags[: flags.index("$@")]).objective
    batch = set_loss_denominators(credited(config, 1)[0], ROLLOUTS, LIMIT, config.policy)
    new, entropy = new_logprobs(batch, config, 4)
    mask, a, low, high = batch.mask, batch.advantages, *clip_range(flat(config))
    old = jnp.where(mask, batch.old_logprobs, new)

    def lmpo(new, entropy):
        ratio = jnp.exp(new - old)
        losses = jnp.maximum(-a * ratio, -a * jnp.clip(ratio, low, high))
        mean_entropy = jnp.sum(entropy * mask) / mask.sum()
        return jnp.mean(losses * mask) - config.policy.entropy_coef * jnp.mean(mean_entropy * mask)

    def ours(new, entropy):
        return policy_loss(TokenOutputs(new, entropy), batch, config.loss)[0]

    for found, expected in zip(*(jax.grad(loss, argnums=(0, 1))(new, entropy) for loss in (ours, lmpo)), strict=True):
        assert_close(found, expected / mask.mean(), B * T, SURPRISE * np.abs(expected).max())


def k3(x: np.ndarray) -> np.ndarray:
    return np.exp(-x) + x - 1


def metrics_of_ratios(log_ratio: np.ndarray) -> dict[str, float]:
    """Returns the metrics of p / p_old."""
    ratio = np.exp(log_ratio)
    return {
        "approx_kl": k3(-log_ratio).mean(),
        "importance_ratio": ratio.mean(),
        "importance_ratio_magnitude": np.abs(ratio - 1).mean(),
        "importance_ratio_max": ratio.max(),
        "importance_ratio_min": ratio.min(),
    }


def metrics_of_recomputation(old: np.ndarray, sampled: np.ndarray) -> dict[str, float]:
    """Returns the metrics of p_old / p_sample."""
    log_w = old - sampled
    w = np.exp(log_w)
    found = {
        "prob_diff": np.abs(np.exp(old) - np.exp(sampled)).mean(),
        "logprob_diff": np.abs(log_w).mean(),
        "logprob_diff_max": np.abs(log_w).max(),
        "kl": k3(-log_w).mean(),
        "ratio": w.mean(),
        "effective_sample_share": w.mean() ** 2 / (w**2).mean(),
    }
    return {f"inference_recompute/{name}": x for name, x in found.items()}


def assert_distribution(histogram: np.ndarray, quantile: float, log_ratio: np.ndarray) -> None:
    expected = np.quantile(np.exp(log_ratio), 0.99, method="inverted_cdf")
    assert quantile == pytest.approx(expected, rel=0.006)
    edges = [-np.inf, *(LOG_RATIOS[1:] - 0.005), np.inf]
    counts = np.histogram(log_ratio, edges)[0] / len(log_ratio)
    assert_close(histogram, counts, B * T, 1.0)


@pytest.mark.parametrize("kl", KL)
@pytest.mark.parametrize("objective", CHOICES["objective"])
def test_metrics(objective, kl):
    config = objective_of(objective=objective, clip_epsilon_high=0.28, **KL[kl])
    batch = credited(objective_of(do_group_filter=False, **KL[kl]), seed=1)[0]
    new, entropy = new_logprobs(batch, config, 4)
    batch = set_loss_denominators(batch, ROLLOUTS, LIMIT, config.policy)
    found = reduce_metrics([learn(new, entropy, batch, config)[1]])
    mask = batch.mask
    a = np.float64(batch.advantages)
    p, old, sampled = (np.float64(x)[mask] for x in (new, batch.old_logprobs, batch.sample_logprobs))
    slope = slopes(oracle_policy, new, a, batch, flat(config))
    loss = oracle_loss(new, new, entropy, a, batch, flat(config)).sum()
    expected = metrics_of_ratios(p - old) | metrics_of_recomputation(old, sampled)
    expected |= {
        "loss": loss,
        "policy_loss": loss - oracle_loss(new, new, entropy, 0 * a, batch, flat(config)).sum(),
        "entropy": entropy[mask].mean(),
        "entropy_loss": -config.policy.entropy_coef * entropy[mask].mean(),
        "clip_fraction": ((slope == 0) & (a != 0))[mask].mean(),
        "masked_fraction": 0.0,
        "logprob": p.mean(),
    }
    if config.kl.kl_coef:
        x = p - np.float64(batch.ref_logprobs)[mask]
        expected["kl"] = k3(x).mean()
    assert_distribution(found.pop("importance_ratio_histogram"), found.pop("importance_ratio_q99"), p - old)
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        assert_close(found[name], x, B * T, SURPRISE * max(1, abs(x)), err_msg=name)
    clips = objective in ("ppo", "ppo_all_clip", "gspo", "dppo")  # the others keep a gradient everywhere
    assert 0.1 < expected["clip_fraction"] < 0.9 if clips else expected["clip_fraction"] == 0


@pytest.mark.parametrize(("objective", "normalization"), LOSSES)
def test_the_cut_into_micro_batches_changes_nothing(objective, normalization):
    losses = {"loss_normalization": normalization, "kl_coef": 0.1, "entropy_coef": 0.1}
    config = objective_of(objective=objective, advantage="gae", **losses)
    batch = set_loss_denominators(credited(objective_of(advantage="gae"), seed=1)[0], ROLLOUTS, LIMIT, config.policy)
    batch = replace(batch, returns=gae(batch, flat(config)))
    new, entropy = new_logprobs(batch, config, 5)
    values = np.float32(batch.values + 0.1)
    expected_grad, whole = learn(new, entropy, batch, config)
    whole["value/loss"] = value_loss(values, batch, 0.2)
    for cuts in ([4], [4, 8]):
        grad, parts = np.zeros(new.shape), []
        for rows in np.split(np.random.default_rng(5).permutation(B), cuts):
            grad[rows], metrics = learn(new[rows], entropy[rows], select_rows(batch, rows), config)
            parts.append(metrics | {"value/loss": value_loss(values[rows], select_rows(batch, rows), 0.2)})
        assert_close(grad, expected_grad, B * T, SURPRISE * np.abs(expected_grad).max())
        assert_sums(whole, parts)


def assert_sums(whole: dict[str, np.ndarray], parts: list[dict[str, np.ndarray]]) -> None:
    """The contract of a metric: those of micro-batches add up to that of the batch, or have its extremes."""
    for name, x in reduce_metrics([whole]).items():
        assert_close(reduce_metrics(parts)[name], x, B * T, SURPRISE * max(1, np.max(np.abs(x))), err_msg=name)


# Settings


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"clip_epsilon": -0.1}, "--clip_epsilon"),
        ({"clip_epsilon_high": -0.5}, "--clip_epsilon_high"),
        ({"dual_clip": 1.0}, "--dual_clip"),
        ({"importance_cap": 0.0}, "--importance_cap"),
        ({"importance_floor": -0.1, "importance_correction": "mask"}, "must be from 0 to --importance_cap"),
        ({"importance_floor": 2.1, "importance_correction": "mask"}, "must be from 0 to --importance_cap"),
        ({"importance_floor": 0.5}, "--importance_floor has no effect"),
        ({"off_policy_mask": -0.1}, "--off_policy_mask"),
        ({"gamma": 1.1}, "--gamma"),
        ({"gae_lambda": -0.1}, "--gae_lambda"),
        ({"value_clip": -0.2}, "--value_clip"),
        ({"kl_coef": -0.1}, "--kl_coef"),
        ({"best_k": 0}, "--best_k"),
        ({"objective": "dppo", "importance_correction": "mask"}, "--importance_correction"),
        ({"advantage": "turn_mean", "kl_in": "reward", "kl_coef": 0.1}, "--advantage turn_mean works without"),
        ({"advantage": "turn_zscore", "do_global_normalization": True}, "--advantage turn_zscore works without"),
        ({"advantage": "gae", "do_global_normalization": True}, "--do_global_normalization"),
        ({"advantage": "best_k", "do_global_normalization": True}, "--do_global_normalization"),
    ],
    ids=lambda x: in_words(x) if isinstance(x, dict) else "",
)
def test_refusals_name_the_flag(flags, named):
    with pytest.raises(ValueError, match=named):
        objective_of(**flags)


@pytest.mark.parametrize(
    ("flags", "is_same"),
    [
        ({"gamma": 0.9, "gae_lambda": 0.5, "loss_normalization": "constant"}, True),
        ({"clip_epsilon": 0.1, "clip_epsilon_high": 0.3, "entropy_coef": 0.1, "kl_coef": 0.2}, True),
        ({"kl_coef": 0.0}, False),
        ({"value_clip": 0.1}, False),
        ({"importance_correction": "mask"}, False),
    ],
    ids=lambda x: in_words(x) if isinstance(x, dict) else "",
)
def test_settings_of_the_host_and_coefficients_share_a_program(flags, is_same):
    structures = [jax.tree.structure(objective_of(**{"kl_coef": 0.1} | x).loss) for x in ({}, flags)]
    assert (structures[0] == structures[1]) == is_same


# Turns of episodes


def episode_batch(lengths: list[list[int]], rewards: list[list[float]], group_size: int) -> tuple[Batch, np.ndarray]:
    """Episodes of turns with so many tokens and such rewards, a token said behind each; the turn's number by token."""
    B = len(lengths)
    T = 2 + max(sum(turns) + len(turns) for turns in lengths)
    mask = np.zeros((B, T), bool)
    by_token = np.zeros((B, T), np.float32)
    turn_of = np.full((B, T), -1)
    for row, turns in enumerate(lengths):
        column = 2
        for number, length in enumerate(turns):
            mask[row, column : column + length] = True
            turn_of[row, column : column + length] = number
            by_token[row, column + length - 1] = rewards[row][number]
            column += length + 1
    zeros = np.zeros((B, T), np.float32)
    batch = Batch(
        tokens=zeros,
        mask=mask,
        sample_logprobs=zeros,
        rewards=by_token.sum(1),
        lengths=mask.sum(1) + 2,
        prompt_lengths=np.full(B, 2),
        finished=np.ones(B, bool),
        rollout=np.arange(B),
        token_rewards=by_token,
        group_size=group_size,
    )
    return batch, turn_of


@pytest.mark.parametrize("flags", [{}, {"do_group_filter": False}], ids=in_words)
@pytest.mark.parametrize("advantage", ["turn_zscore", "turn_mean"])
def test_turns_of_equal_rewards_carry_no_signal(advantage, flags):
    """Whatever other turns of the group are worth, and whatever single bits their float32 means are off by."""
    config = objective_of(advantage=advantage, **flags)
    for name, equal in NEARLY_EQUAL.items():
        G = len(equal)
        second = equal if name != "sums of many parts" else equal[: G // 2]  # the others have no such turn
        rewards = [[float(i % 2), *second[i : i + 1]] for i in range(G)]
        batch, turn_of = episode_batch([[2] * len(turns) for turns in rewards], rewards, G)
        found = compute_advantages(batch, config)
        assert found.rollout.tolist() == [*range(G)]
        assert not found.advantages[turn_of == 1].any(), f"exactly 0 for {name}"
        assert found.advantages[turn_of == 0].any()


def test_sums_of_turns_are_equal_in_any_order():
    """Also large ones, whose float32 sums differ by more than what counts as equal."""
    parts = [300.1, 0.7, 200.2, 7.3, 100.6]
    assert np.ptp([in_sequence(*parts), in_sequence(*parts[::-1])]) > 1e-6
    rewards = [[0.0, *parts, 0.0], [1.0, *parts[::-1], 0.0]] * 4
    batch, turn_of = episode_batch([[1] * 7] * 8, rewards, group_size=8)
    found = compute_advantages(batch, objective_of(advantage="turn_zscore"))
    assert not found.advantages[(turn_of == 1) | (turn_of == 6)].any()
    assert found.advantages[turn_of == 2].all()


@pytest.mark.parametrize("advantage", ["turn_mean", "turn_zscore"])
def test_turns_are_compared_by_their_rewards_to_go(advantage):
    """Against loops over groups and turns in float64; one grader failed, one row is dropped and stays in its group."""
    rng = np.random.default_rng(0)
    lengths = [[2, 1], [1, 3, 2], [4], [1, 1, 1], [2, 2], [3, 1, 2], [2], [1, 2]]  # tokens of turns, two groups of 4
    rewards = [[float(x) for x in rng.integers(0, 3, len(turns))] for turns in lengths]
    rewards[5] = [np.nan] * 3
    batch, turn_of = episode_batch(lengths, rewards, group_size=4)
    batch = replace(batch, finished=np.arange(8) != 1)
    found = compute_advantages(batch, objective_of(advantage=advantage, do_truncation_filter=True))
    assert found.rollout.tolist() == [0, 2, 3, 4, 6, 7]
    assert found.token_rewards is None

    to_go = [[sum(row[number:]) for number in range(len(row))] for row in rewards]
    for row, advantages in zip(found.rollout, found.advantages, strict=True):
        group = range(row // 4 * 4, row // 4 * 4 + 4)
        for number in range(len(lengths[row])):
            others = np.array([to_go[i][number] for i in group if len(to_go[i]) > number and i != 5])
            centered = to_go[row][number] - others.mean()
            spread = others.std() if others.std() > 0 else 1.0
            expected = {"turn_mean": centered, "turn_zscore": centered / spread}[advantage]
            np.testing.assert_allclose(advantages[turn_of[row] == number], expected, rtol=1e-5, atol=1e-6)
        assert not advantages[turn_of[row] < 0].any()
