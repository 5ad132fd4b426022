"""Advantages, policy losses and aggregation against plain float64 loops written from the formulas, not from the code.

Letters: N prompts, G rollouts of each, B = N G rows, T row length.
"""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from core.objectives import Batch, ObjectiveConfig, advantages, normalize, policy_loss

N, G, T, LIMIT = 3, 4, 20, 16  # LIMIT: num_generation_tokens
B = N * G
CHOICES = {name: ObjectiveConfig.__dataclass_fields__[name].metadata["choices"] for name in
           ("advantage", "objective", "loss_normalization")}  # fmt: skip


def random_batch(seed: int, rewards=None) -> Batch:
    """Ragged rows with masked (forced) tokens among the completion, garbage in the padding, ratios from 0.4 to 2.6."""
    rng = np.random.default_rng(seed)
    prompts = rng.integers(1, 5, B)
    lengths = prompts + rng.integers(1, LIMIT + 1, B)
    columns = np.arange(T)
    mask = (columns >= prompts[:, None]) & (columns < lengths[:, None]) & (rng.random((B, T)) < 0.9)
    mask[0] = False  # a row of forced tokens only
    old = rng.normal(-2, 1, (B, T)).astype(np.float32)
    return Batch(
        tokens=rng.integers(0, 50, (B, T)), mask=mask, sample_logprobs=old + rng.normal(0, 0.4, (B, T)),
        rewards=np.float32(rng.choice([0, 0.1, 0.6, 1], B) if rewards is None else rewards),
        lengths=lengths, prompt_lengths=prompts, old_logprobs=old, group_size=G,
    )  # fmt: skip


def new_logprobs(batch: Batch, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Log-probabilities of the updated policy, kept away from the kinks of clipping, and entropies."""
    rng = np.random.default_rng(seed)
    log_ratio = rng.uniform(-0.9, 0.95, batch.mask.shape)
    for kink in (0.8, 1.28, 1.2, 2.0):
        log_ratio += 0.02 * (np.abs(log_ratio - math.log(kink)) < 0.01)
    return batch.old_logprobs + log_ratio, rng.uniform(0, 4, batch.mask.shape)


def mean(x) -> float:
    return math.fsum(x) / len(x)


def deviation(x) -> float:
    return math.sqrt(mean([(v - mean(x)) ** 2 for v in x]))


def oracle_advantages(rewards, config: ObjectiveConfig, G: int = G) -> tuple[list[float], list[bool]]:
    """One advantage a row, and which rows stay. OBJECTIVES: a group with max - min <= 1e-6 has no signal."""
    out, keep, signal = [], [], []
    for n in range(len(rewards) // G):
        group = [float(r) for r in rewards[n * G : n * G + G]]
        has_signal = max(group) - min(group) > 1e-6
        for r in group:
            if config.advantage == "reinforce":
                a, has_signal = r, True
            elif not has_signal:
                a = 0.0
            elif config.advantage == "group_mean":
                a = r - mean(group)
            else:
                assert config.advantage == "group_zscore"
                a = (r - mean(group)) / deviation(group)
            out.append(a)
            signal.append(has_signal)
            keep.append(has_signal or not config.do_group_filter)
    if config.do_global_normalization:
        kept = [a for a, k in zip(out, keep, strict=True) if k]
        out = [(a - mean(kept)) / deviation(kept) for a in out]
    if config.do_clip_advantages:
        out = [max(a, 0.0) for a in out]
    out = [a * config.negative_advantage_multiplier if a < 0 else a for a in out]
    return [a if s else 0.0 for a, s in zip(out, signal, strict=True)], keep


def oracle_loss(logprobs, entropy, batch: Batch, config: ObjectiveConfig) -> float:
    """The loss of a whole optimiser batch, one token at a time."""
    low = 1 - config.clip_epsilon
    high = 1 + (config.clip_epsilon if config.clip_epsilon_high < 0 else config.clip_epsilon_high)
    num_tokens = int(batch.mask.sum())
    loss = 0.0
    for i in range(len(logprobs)):
        row_tokens = int(batch.mask[i].sum())
        weight = {
            "token_mean": 1 / num_tokens,
            "sequence_mean": 1 / (len(logprobs) * max(row_tokens, 1)),
            "constant": 1 / (len(logprobs) * LIMIT),
        }[config.loss_normalization]
        for t in np.flatnonzero(batch.mask[i]):
            new, old, sampled = float(logprobs[i, t]), float(batch.old_logprobs[i, t]), batch.sample_logprobs[i, t]
            a, ratio = float(batch.advantages[i, t]), math.exp(new - old)
            clipped = min(max(ratio, low), high)
            token = {
                "ppo": max(-ratio * a, -clipped * a),
                "ppo_all_clip": -clipped * a,
                "reinforce": -a * new,
            }[config.objective]
            if config.do_mask_importance_ratio and ratio > 2:
                token = 0.0
            if config.do_mask_inference_ratio and math.exp(old - float(sampled)) > 2:
                token = 0.0
            loss += token * weight - config.entropy_coef * float(entropy[i, t]) / num_tokens
    return loss


def check_loss(config: ObjectiveConfig, seed: int) -> None:
    """Value against the oracle, gradient against its central differences."""
    batch = random_batch(seed)
    batch = batch.replace(advantages=np.asarray(advantages(batch, config)[0]))
    logprobs, entropy = new_logprobs(batch, seed)

    def loss(logprobs, entropy):  # not compiled: the operations are the same in all of these tests
        return policy_loss(logprobs, entropy, normalize(batch, LIMIT, config), config)[0]

    value, grads = jax.value_and_grad(loss, argnums=(0, 1))(jnp.float32(logprobs), jnp.float32(entropy))
    assert abs(value - oracle_loss(logprobs, entropy, batch, config)) < 1e-5
    expected = np.zeros((B, T))  # the oracle does not read what is not masked
    for i, t in np.argwhere(batch.mask):
        step = np.zeros((B, T))
        step[i, t] = 1e-4
        above, below = (oracle_loss(logprobs + d, entropy, batch, config) for d in (step, -step))
        expected[i, t] = (above - below) / 2e-4
    np.testing.assert_allclose(grads[0], expected, atol=1e-5)
    np.testing.assert_allclose(grads[1], -config.entropy_coef * batch.mask / batch.mask.sum(), atol=1e-8)


@pytest.mark.parametrize(("advantage", "objective", "normalization"), [*itertools.product(*CHOICES.values())])
def test_value_and_gradient(advantage, objective, normalization):
    config = ObjectiveConfig(advantage, objective, normalization, clip_epsilon_high=0.28, entropy_coef=0.01)
    check_loss(config, seed=1)


FLAGS = [
    {"do_global_normalization": True},
    {"do_global_normalization": True, "do_group_filter": False},
    {"do_global_normalization": True, "advantage": "reinforce"},
    {"do_clip_advantages": True},
    {"negative_advantage_multiplier": 0.3},
    {"do_global_normalization": True, "do_clip_advantages": True, "negative_advantage_multiplier": 2.0},
    {"do_mask_importance_ratio": True},
    {"do_mask_inference_ratio": True, "objective": "reinforce"},
    {"clip_epsilon": 0.1},
    {"clip_epsilon": 0.0, "clip_epsilon_high": 0.5, "objective": "ppo_all_clip"},
    {"entropy_coef": 0.0},
]


@pytest.mark.parametrize("flags", FLAGS, ids=lambda flags: ",".join(flags))
def test_value_and_gradient_under_flags(flags):
    check_loss(ObjectiveConfig(**flags), seed=2)


def rewarded(rewards, group_size: int) -> Batch:
    """Rows of which only the rewards and the mask matter."""
    B = len(rewards)
    mask = np.random.default_rng(0).random((B, T)) < 0.5
    mask[:, 0] = True
    return Batch(np.zeros((B, T), int), mask, np.zeros((B, T)), rewards, *np.full((2, B), T), group_size=group_size)


REWARDS = np.float32([0.1, 1.0, 0.0, 0.1] + [0.1] * 4 + [0.3, 0.3, 0.9, 0.2] + [0.0] * 4)  # groups 1 and 3 are equal


@pytest.mark.parametrize("flags", [{}, *FLAGS], ids=lambda flags: ",".join(flags) or "none")
@pytest.mark.parametrize("advantage", CHOICES["advantage"])
def test_advantages(advantage, flags):
    config = ObjectiveConfig(**{"advantage": advantage, "do_group_filter": True} | flags)
    batch = rewarded(REWARDS, G)
    found, keep = advantages(batch, config)
    expected, expected_keep = oracle_advantages(REWARDS, config)
    np.testing.assert_allclose(found, batch.mask * np.array(expected)[:, None], atol=1e-5)
    assert keep.tolist() == expected_keep


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


@pytest.mark.parametrize("name", NEARLY_EQUAL)
@pytest.mark.parametrize("flags", [{}, {"do_global_normalization": True}], ids=["", "global"])
@pytest.mark.parametrize("do_group_filter", [False, True])
@pytest.mark.parametrize("advantage", [name for name in CHOICES["advantage"] if name != "reinforce"])
def test_equal_rewards_carry_no_signal(advantage, do_group_filter, flags, name):
    """Nor do they reach the advantages of other groups through the normalisation over the batch."""
    config = ObjectiveConfig(advantage, do_group_filter=do_group_filter, **flags)
    G = len(NEARLY_EQUAL[name])
    rewards = np.float32(NEARLY_EQUAL[name] + [*range(G)])
    found, keep = jax.jit(advantages, static_argnums=1)(rewarded(rewards, G), config)
    expected, expected_keep = oracle_advantages(rewards, config, G)
    assert not found[:G].any(), "exactly 0"
    np.testing.assert_allclose(found[:, 0], expected, atol=1e-5)
    assert keep.tolist() == expected_keep == [not do_group_filter] * G + [True] * G


def test_without_old_logprobs_the_ratio_is_one():
    config, batch = ObjectiveConfig(entropy_coef=0.0), random_batch(3)
    batch = normalize(batch.replace(advantages=advantages(batch, config)[0]), LIMIT, config)
    logprobs = jnp.asarray(batch.old_logprobs)
    for old in (None, logprobs):
        grad, metrics = jax.grad(policy_loss, has_aux=True)(
            logprobs, 0 * logprobs, batch.replace(old_logprobs=old), config
        )
        np.testing.assert_allclose(grad, -batch.advantages / batch.mask.sum(), atol=1e-7)
        assert metrics["approx_kl"] == 0 and abs(metrics["importance_ratio"] - 1) < 1e-6


def test_metrics():
    config, batch = ObjectiveConfig(clip_epsilon_high=0.28), random_batch(4)
    logprobs, entropy = new_logprobs(batch, 4)
    batch = normalize(batch.replace(advantages=advantages(batch, config)[0]), LIMIT, config)
    _, found = policy_loss(jnp.float32(logprobs), jnp.float32(entropy), batch, config)
    mask, a = batch.mask, np.asarray(batch.advantages, np.float64)[batch.mask]
    log_ratio, sample_ratio = (logprobs - batch.old_logprobs)[mask], (batch.old_logprobs - batch.sample_logprobs)[mask]
    clipped = [r > 1.28 if x > 0 else r < 0.8 if x < 0 else False for r, x in zip(np.exp(log_ratio), a, strict=True)]
    expected = {
        "entropy": entropy[mask].mean(),
        "approx_kl": (np.exp(log_ratio) - 1 - log_ratio).mean(),
        "clip_fraction": np.mean(clipped),
        "importance_ratio": np.exp(log_ratio).mean(),
        "inference_recompute/logprob_diff": np.abs(sample_ratio).mean(),
        "inference_recompute/ratio": np.exp(sample_ratio).mean(),
    }
    assert {name: float(found[name]) for name in expected} == pytest.approx(expected, abs=1e-5)
