"""Metrics of the rollouts of a step, whether they are learnt from or not."""

import numpy as np

from core.records import NO_SIGNAL, Episodes


def rollout_metrics(episodes: Episodes, group_size: int) -> dict[str, float]:
    """Returns means over the rollouts that were graded, lengths, failures and times."""
    is_graded = ~episodes.failed
    num_graded = max(is_graded.sum(), 1)
    lengths = episodes.completion_lengths
    returns = np.where(is_graded, episodes.scores["return"], np.nan)
    groups = returns.reshape(-1, group_size)
    spreads = np.fmax.reduce(groups, axis=1) - np.fmin.reduce(groups, axis=1)
    has_signal = spreads > NO_SIGNAL
    finished = np.asarray(episodes.completions.finished)
    metrics = {
        "env/length": float(lengths.mean()),
        "env/finished": float(finished.mean()),
        "env/groups_without_signal": float((~has_signal).mean()),
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
    return metrics
