"""Metrics of the ratios of a token's probabilities, and how metrics of micro-batches become those of a batch.

B rows, T row length, R bins of log ratios.
"""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float

from core.records import Batch, token_mean
from models.names import Array

LOG_RATIOS = np.linspace(-1.0, 1.0, 201)  # centers of the histogram of log ratios, from which a quantile is read


def ratio_metrics(logprobs: Float[Array, "B T"], batch: Batch) -> dict[str, Array]:
    """Returns metrics of the ratio of new to old probability; approx_kl is the estimate k3 of KL(old || new)."""
    log_ratio = logprobs - batch.old_logprobs
    ratio = jnp.exp(log_ratio)
    return {
        "approx_kl": token_mean((ratio - 1) - log_ratio, batch),
        "importance_ratio": token_mean(ratio, batch),
        "importance_ratio_magnitude": token_mean(jnp.abs(ratio - 1), batch),
        "importance_ratio_max": ratio.max(where=batch.mask, initial=0.0),
        "importance_ratio_min": ratio.min(where=batch.mask, initial=jnp.inf),
        "importance_ratio_histogram": histogram(log_ratio, batch.mask) / batch.num_tokens[0],
    }


def sampler_metrics(batch: Batch) -> dict[str, Array]:
    """Returns metrics of the ratio of old to sampled probability; the KL is the estimate k3 of KL(sampled || old)."""
    log_ratio = batch.old_logprobs - batch.sample_logprobs
    ratio = jnp.exp(log_ratio)
    names = {
        "prob_diff": token_mean(jnp.abs(jnp.exp(batch.old_logprobs) - jnp.exp(batch.sample_logprobs)), batch),
        "logprob_diff": token_mean(jnp.abs(log_ratio), batch),
        "logprob_diff_max": jnp.abs(log_ratio).max(),
        "kl": token_mean((ratio - 1) - log_ratio, batch),
        "ratio": token_mean(ratio, batch),
        "ratio_squared": token_mean(ratio**2, batch),
    }
    return {f"inference_recompute/{name}": value for name, value in names.items()}


def histogram(log_ratio: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> Float[Array, "R"]:
    """Returns how many tokens are nearest to each of LOG_RATIOS. Unlike quantiles, these counts can be summed."""
    num_bins = len(LOG_RATIOS)
    width = LOG_RATIOS[1] - LOG_RATIOS[0]
    nearest = jnp.round((log_ratio - LOG_RATIOS[0]) / width)
    bins = jnp.clip(nearest, 0, num_bins - 1).astype(jnp.int32)
    counts = mask.astype(jnp.float32)
    return jnp.zeros(num_bins).at[bins].add(counts)


def reduce_metrics(parts: Sequence[dict[str, Array]]) -> dict[str, float | np.ndarray]:
    """Returns the metrics of an optimizer batch from those of its micro-batches, by their names: see `policy_loss`.

    Tests compare them for micro-batches of different sizes. A metric that is the mean of a micro-batch fails there.
    """
    reductions = {"max": np.nanmax, "min": np.nanmin}
    metrics = {}
    for name in parts[0]:
        kind = name.rpartition("_")[2]
        x = reductions.get(kind, np.sum)([part[name] for part in parts], axis=0)
        assert kind == "histogram" or not x.shape, f"{name} {x.shape} is not a number: reduce it, or name it _histogram"
        metrics[name] = x if kind == "histogram" else float(x)
    counts = metrics["importance_ratio_histogram"]
    squared = metrics.pop("inference_recompute/ratio_squared")
    quantile = np.searchsorted(np.cumsum(counts), 0.99 * counts.sum())
    quantile = min(quantile, len(LOG_RATIOS) - 1)
    metrics["importance_ratio_q99"] = float(np.exp(LOG_RATIOS[quantile]))
    ratio = metrics["inference_recompute/ratio"]
    metrics["inference_recompute/effective_sample_share"] = ratio**2 / max(squared, 1e-30)
    return metrics
