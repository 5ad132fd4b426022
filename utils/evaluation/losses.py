"""Losses of held-out rows: their mean, its interval, and what is written of each."""

import numpy as np
from jaxtyping import Bool, Float


def row_sums(
    logprobs: Float[np.ndarray, "B T"], mask: Bool[np.ndarray, "B T"]
) -> tuple[Float[np.ndarray, "B"], Float[np.ndarray, "B"]]:
    """Returns the sum of -log p over the tokens of each row, and how many these are."""
    return -np.sum(logprobs, axis=1, where=mask, dtype=np.float64), mask.sum(axis=1, dtype=np.float64)


def row_losses(logprobs: Float[np.ndarray, "B T"], mask: Bool[np.ndarray, "B T"]) -> dict[str, np.ndarray]:
    """Returns the arrays of rollouts/held_out_rows_N.npz: the mean of -log p over the tokens of each row, and these."""
    sums, num_tokens = row_sums(logprobs, mask)
    return {"losses": np.float32(sums / np.maximum(num_tokens, 1)), "num_tokens": np.int32(num_tokens)}


def loss_metrics(logprobs: Float[np.ndarray, "B T"], mask: Bool[np.ndarray, "B T"]) -> dict[str, float]:
    """Returns the mean of -log p over the tokens of held-out rows, and the half-width of its 95% interval.

    Rows are what varies, so the error is that of a ratio of two sums over them; one row has none.
    Source: Cochran 1977, section 6.4.
    """
    sums, num_tokens = row_sums(logprobs, mask)
    loss = sums.sum() / num_tokens.sum()
    num_rows = len(sums)
    if num_rows == 1:
        return {"test_data/loss": float(loss)}
    error = np.sqrt(np.sum((sums - loss * num_tokens) ** 2) * num_rows / (num_rows - 1)) / num_tokens.sum()
    return {"test_data/loss": float(loss), "test_data/loss_ci": float(1.96 * error)}
