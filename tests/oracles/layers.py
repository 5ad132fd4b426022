"""Layers token by token, and Muon's matrices by singular values."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from models.deltanet import DeltaInputs
from models.experts import Experts
from models.names import Array

# Letters: H heads, C channels of keys, E of values; N tokens, k experts of each.
Memory = Float[np.ndarray, "B H C E"]


def recurrence(x: DeltaInputs, memory: Memory) -> tuple[Float[np.ndarray, "B H T E"], Memory]:
    """Returns the outputs of the gated delta rule and its last memory, by the definition, in float64."""
    q, k, v, log_decay, beta = map(np.float64, x)
    memory = np.float64(memory)
    outputs = []
    for t in range(q.shape[2]):
        memory = memory * np.exp(log_decay[:, :, t])[..., None, None]
        correction = v[:, :, t] - np.einsum("bhce,bhc->bhe", memory, k[:, :, t])
        memory = memory + np.einsum("bh,bhc,bhe->bhce", beta[:, :, t], k[:, :, t], correction)
        outputs.append(np.einsum("bhce,bhc->bhe", memory, q[:, :, t]))
    return np.stack(outputs, axis=2), memory


def expert(token: Float[Array, "D"], matrices: Experts, i: int) -> Float[Array, "D"]:
    """Returns the output of one expert for one token: SiLU of the gate, times up, through down."""
    gate = token @ matrices.gate[i].T
    hidden = gate / (1 + jnp.exp(-gate)) * (token @ matrices.up[i].T)
    return hidden @ matrices.down[i]


def loop_over_tokens(normalize: bool, chosen: Int[np.ndarray, "N k"]) -> Callable[..., jax.Array]:
    """Returns a function of router, matrices and tokens: a mixture, one token and one expert after the other."""

    def f(router: Float[Array, "D E"], matrices: Experts, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        outputs = []
        for token, ids in zip(x.reshape(-1, x.shape[-1]), chosen, strict=True):
            probs = jnp.exp(token @ router) / jnp.exp(token @ router).sum()
            output = sum(probs[i] * expert(token, matrices, i) for i in ids)
            outputs.append(output / probs[ids].sum() if normalize else output)
        return jnp.stack(outputs).reshape(x.shape)

    return f


def orthogonalized(x: Float[np.ndarray, "M N"]) -> Float[np.ndarray, "M N"]:
    """Returns Newton-Schulz as a polynomial of the singular values. Source: kellerjordan.github.io/posts/muon."""
    u, s, v = np.linalg.svd(x, full_matrices=False)
    s = s / np.linalg.norm(s)
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u * s @ v
