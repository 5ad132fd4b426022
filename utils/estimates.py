"""Estimates from samples of several tasks.

Letters: N tasks, G samples of each.
"""

from math import comb

import numpy as np
from jaxtyping import Bool, Float


def mean_and_ci(name: str, x: Float[np.ndarray, "N"]) -> dict[str, float]:
    """Mean over tasks and half the width of its 95% interval (normal approximation over tasks)."""
    return {name: float(x.mean()), f"{name}_ci": float(1.96 * x.std(ddof=1) / len(x) ** 0.5) if len(x) > 1 else 0.0}


def pass_at_k(correct: Bool[np.ndarray, "N G"], k: int) -> Float[np.ndarray, "N"]:
    """Unbiased chance that one of k samples is right, from G >= k samples. Source: arXiv 2107.03374, eq. 1."""
    total = correct.shape[1]
    return np.array([1 - comb(total - c, k) / comb(total, k) for c in correct.sum(axis=1).tolist()])
