"""Divergences of two models' distributions in float64, from their definitions."""

import numpy as np
from jaxtyping import Float, Float64

Logits = Float[np.ndarray, "*B V"]


def log_softmax(x: Logits) -> Logits:
    shifted = x - x.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def divergence64(p: Logits, q: Logits, beta: float) -> tuple[Float64[np.ndarray, "*B"], Float64[np.ndarray, "*B V"]]:
    """Returns the divergence of logits, and its gradient with respect to those of p.

    beta 0: KL(q || p); 1: KL(p || q); between them: the generalized Jensen-Shannon divergence.
    """
    log_p = log_softmax(np.float64(p))
    log_q = log_softmax(np.float64(q))
    p = np.exp(log_p)
    q = np.exp(log_q)
    if beta == 0:
        return (q * (log_q - log_p)).sum(-1), p - q
    log_m = log_q if beta == 1 else np.log((1 - beta) * p + beta * q)
    of_p = (p * (log_p - log_m)).sum(-1)
    of_q = (q * (log_q - log_m)).sum(-1)
    share = 1 if beta == 1 else 1 - beta
    slope = p * share * (log_p - log_m - of_p[..., None])
    return share * of_p + (beta * of_q if beta < 1 else 0.0), slope
