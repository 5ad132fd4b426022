"""The chunked form of the gated delta rule, and its gradients, against the recurrence in float64.

Letters as in models/deltanet.py.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.deltanet import DeltaInputs, chunked_rule, invert_unit_lower, recurrent_rule
from tests.helpers import (
    assert_close,
    assert_leaves_close,
)
from tests.oracles.layers import recurrence

B, H, C, E = 2, 3, 8, 4


def inputs(num_tokens: int, alike: float = 0.0) -> DeltaInputs:
    """Random inputs: memories that last for 1 to 100 tokens; `alike`: the share of its keys that all tokens share."""
    rng = np.random.default_rng(num_tokens)
    q, k = rng.standard_normal((2, B, H, num_tokens, C))
    k = alike * k[:, :, :1] + (1 - alike) * k
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    v = rng.standard_normal((B, H, num_tokens, E))
    log_decay = -np.exp(rng.uniform(np.log(0.01), 0, (B, H, num_tokens)))
    beta = rng.uniform(0, 1, (B, H, num_tokens))
    return DeltaInputs(*map(np.float32, (q / C, k, v, log_decay, beta)))


def stepwise(x: DeltaInputs, memory: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The recurrent form, one call for each token."""

    def step(memory, token):
        out, memory = recurrent_rule(jax.tree.map(lambda x: x[:, :, None], token), memory)
        return memory, out[:, :, 0]

    memory, out = jax.lax.scan(step, memory, jax.tree.map(lambda x: jnp.moveaxis(x, 2, 0), x))
    return jnp.moveaxis(out, 0, 2), memory


def first_memory() -> np.ndarray:
    return np.float32(np.random.default_rng(1).standard_normal((B, H, C, E)))


CASES = [(150, 64, 0.0), (150, 64, 0.9), (64, 64, 0.0), (21, 8, 0.0), (5, 64, 0.5), (1, 64, 0.0)]


@pytest.mark.parametrize(("num_tokens", "chunk", "alike"), CASES)
def test_chunks_compute_the_recurrence(num_tokens, chunk, alike):
    x = inputs(num_tokens, alike)
    memory = first_memory()
    expected, last = recurrence(x, memory)
    for rule in (partial(chunked_rule, chunk=chunk), stepwise):
        out, found = jax.jit(rule)(x, memory)
        size = max(np.abs(memory).max(), np.abs(expected).max())
        assert_close(out, expected, num_tokens + C, size)
        assert_close(found, last, num_tokens + C, size)


@pytest.mark.parametrize(("num_tokens", "chunk", "alike"), CASES[:4])
def test_gradients_of_chunks_are_those_of_the_recurrence(num_tokens, chunk, alike):
    x = inputs(num_tokens, alike)
    memory = first_memory()
    rng = np.random.default_rng(2)
    of_outputs = np.float32(rng.standard_normal((B, H, num_tokens, E)))
    of_memory = np.float32(rng.standard_normal(memory.shape))

    def gradient(rule: Callable[..., tuple[jax.Array, jax.Array]]) -> tuple[DeltaInputs, jax.Array]:
        def pull_back(x: DeltaInputs, memory: jax.Array) -> tuple[DeltaInputs, jax.Array]:
            return jax.vjp(rule, x, memory)[1]((of_outputs, of_memory))

        return jax.jit(pull_back)(x, memory)

    found = gradient(partial(chunked_rule, chunk=chunk))
    expected = gradient(stepwise)
    assert_leaves_close(found, expected, 3 * (num_tokens + C) * C)


def test_decay_that_underflows_has_gradients():
    x = inputs(64)._replace(log_decay=np.full((B, H, 64), -50, np.float32))
    gradient = jax.jit(jax.grad(lambda x: chunked_rule(x, first_memory())[0].sum()))(x)
    assert all(np.isfinite(array).all() for array in gradient)


def test_unit_triangular_matrices_are_inverted():
    rng = np.random.default_rng(3)
    below = np.tril(rng.uniform(-1, 1, (2, 3, 32, 32)), -1) / 8
    found = jax.jit(invert_unit_lower)(np.float32(below))
    expected = np.linalg.inv(np.eye(32) + below)
    assert_close(found, expected, 32 * 5)
    ones = jnp.tril(jnp.ones((64, 64)), -1)  # of keys that are all the same: powers of it reach 10^17
    inverse = np.eye(64) - np.eye(64, k=-1)
    np.testing.assert_array_equal(invert_unit_lower(ones), inverse)


