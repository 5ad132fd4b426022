"""Metrics of the rollouts of a step, whether they are trained on or not, and of its speed."""

import math
from collections.abc import Mapping

import numpy as np
from jaxtyping import Bool, Float

from core.records import Batch, Episodes
from models.speed import PEAKS
from utils.devices.sharding import Layout


def rollout_metrics(episodes: Episodes) -> dict[str, float]:
    """Returns means over the rollouts that were graded and have the reward, lengths, failures and times."""
    is_graded = ~episodes.failed
    lengths = episodes.completion_lengths
    returns = np.where(is_graded, episodes.scores["return"], np.nan)
    metrics = {
        "env/length": float(lengths.mean()),
        "env/finished": float(np.mean(episodes.finished)),
        "env/groups_without_signal": 1 - float(np.mean(episodes.has_signal)),
        "env/return_spread": float(np.fmax.reduce(returns) - np.fmin.reduce(returns)),
        "rollout/num_rollouts": len(episodes),
    }
    if np.any(episodes.completions.slot_steps):  # stored rollouts were not sampled here
        metrics["rollout/tokens_per_second"] = float(lengths.sum() / episodes.times["rollout"])
    for name, x in episodes.scores.items():
        is_there = is_graded & ~np.isnan(x)
        metrics.setdefault(f"env/{name}", float(x[is_there].sum() / is_there.sum()) if is_there.any() else math.nan)
    for reason in sorted({*episodes.stops}):
        metrics[f"stop/{reason}"] = episodes.stops.count(reason) / len(episodes)
    for kind, count in episodes.failures.items():
        metrics[f"env/{kind}"] = count
    for name, seconds in episodes.times.items():
        metrics[f"times/{name}"] = seconds
    if num_segments := episodes.load.get("segments"):
        names = episodes.load.keys() - {"segments"}
        metrics |= {f"speed/{name}": episodes.load[name] / num_segments for name in sorted(names)}
        metrics["rollout/recomputed"] = int(episodes.completions.num_recomputed.sum())
    return metrics | episodes.metrics


def batch_metrics(batch: Batch) -> dict[str, float]:
    """Returns means over the tokens that are trained on, and the shares of variance that a critic's values explain."""
    metrics = {"num_rows": len(batch)}
    advantages = batch.advantages[batch.mask] if len(batch) else np.zeros(0)
    if advantages.size:
        metrics |= {
            "advantage/mean": float(advantages.mean()),
            "advantage/magnitude": float(np.abs(advantages).mean()),
            "advantage/max": float(advantages.max()),
            "advantage/min": float(advantages.min()),
            "tokens_per_rollout": advantages.size / len(batch.first_rows),
        }
    if len(batch) and batch.returns is not None:
        for name, targets in {"": batch.returns, "_of_reward": batch.rewards[:, None]}.items():
            explained = explained_variance(targets, batch.values, batch.mask)
            metrics[f"value/explained_variance{name}"] = explained
    return metrics


def speed_metrics(layout: Layout, episodes: Episodes, metrics: Mapping[str, float]) -> dict[str, float]:
    """Returns the rates of a step; `mfu` is by the nominal rate of the devices.

    Work is that of the tokens that are there, without padding and recomputation.
    """
    speed, slot_steps = {}, np.sum(episodes.completions.slot_steps)
    if slot_steps:
        speed["speed/occupancy"] = float(episodes.completion_lengths.sum() / slot_steps)
    if metrics.get("num_updates"):
        flops = metrics["num_updates"] * metrics["speed/flops"] / metrics["times/update"]
        speed["speed/update_tflops"] = flops / 1e12
        device_kind = layout.mesh.devices.flat[0].device_kind
        if device_kind in PEAKS:
            speed["speed/mfu"] = flops / layout.mesh.size / PEAKS[device_kind][0]
    return speed


def explained_variance(
    targets: Float[np.ndarray, "B #T"],
    values: Float[np.ndarray, "B T"],
    mask: Bool[np.ndarray, "B T"],
) -> float:
    """Returns 1 - Var(target - value) / Var(target): 1 for a perfect critic, 0 for a constant one or equal targets."""
    targets = np.broadcast_to(targets, mask.shape)[mask]
    variance = targets.var()
    is_constant = not variance > 1e-12
    if is_constant:
        return 0.0
    residuals = targets - values[mask]
    return float(1 - residuals.var() / variance)
