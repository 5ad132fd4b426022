"""Metrics of the rollouts of a step, whether they are trained on or not."""

import numpy as np
from jaxtyping import Bool

from core.records import Episodes


def rollout_metrics(episodes: Episodes, has_signal: Bool[np.ndarray, "N"]) -> dict[str, float]:
    """Returns means over the rollouts that were graded, lengths, failures and times; `has_signal`: of each group."""
    is_graded = ~episodes.failed
    num_graded = max(is_graded.sum(), 1)
    lengths = episodes.completion_lengths
    returns = np.where(is_graded, episodes.scores["return"], np.nan)
    metrics = {
        "env/length": float(lengths.mean()),
        "env/finished": float(np.mean(episodes.completions.finished)),
        "env/groups_without_signal": 1 - float(np.mean(has_signal)),
        "env/return_spread": float(np.fmax.reduce(returns) - np.fmin.reduce(returns)),
        "rollout/num_rollouts": len(episodes),
        "rollout/tokens_per_second": float(lengths.sum() / episodes.times["rollout"]),
    }
    for name, x in episodes.scores.items():
        metrics.setdefault(f"env/{name}", float(x[is_graded].sum() / num_graded))
    for reason in sorted({*episodes.stops}):
        metrics[f"stop/{reason}"] = episodes.stops.count(reason) / len(episodes)
    for kind, count in episodes.failures.items():
        metrics[f"env/{kind}"] = count
    for name, seconds in episodes.times.items():
        metrics[f"times/{name}"] = seconds
    return metrics | episodes.metrics
