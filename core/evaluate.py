"""Scores a policy on problems of an environment: mean@n, pass@k, maj@k with 95% intervals.

N tasks, G samples of each.
"""

import time
from collections.abc import Mapping

import jax
import numpy as np
from jaxtyping import Float

from core.config import EvalConfig
from core.records import Episodes
from core.rollout import RolloutWorker
from models.names import Params
from utils.evaluation.estimates import mean_and_ci, task_estimates

Estimates = dict[str, Float[np.ndarray, "N"]]  # of each task, whose means are the metrics


def evaluate(
    worker: RolloutWorker, params: Params, num_tasks: int, num_samples: int, seed: int = 0
) -> tuple[dict[str, float], Episodes, Estimates]:
    """Scores on the first problems: means over tasks, and half-widths of their 95% intervals (`_ci`).

    `num_tasks`: how many; 0: all, -1: as many as the environment suggests.
    """
    tasks = np.arange(worker.num_eval_tasks(num_tasks))
    episodes = worker.play(worker.load_weights(params), tasks, num_samples, jax.random.key(seed))
    scores = {name: x.reshape(len(tasks), num_samples) for name, x in episodes.scores.items()}
    answers = [worker.env.answer(text) for text in episodes.texts]
    estimates = task_estimates(scores, answers)
    metrics = {"num_tasks": len(tasks), "num_samples": num_samples}
    for name, x in estimates.items():
        metrics |= mean_and_ci(name, x)
    metrics["length"] = float(episodes.completion_lengths.mean())
    metrics["finished"] = float(episodes.completions.finished.mean())
    if episodes.failed.any():
        metrics["reward_failures"] = int(episodes.failed.sum())
    return metrics, episodes, estimates


def evaluate_held_out(
    workers: Mapping[str, RolloutWorker], params: Params, config: EvalConfig, seed: int
) -> tuple[dict[str, float], Episodes]:
    """Returns the scores on held-out problems under the names of the log, and the episodes of the first environment.

    The names are "test_env/..." and "valid_env/...", and "times/test" for the seconds that it took.
    """
    clock = time.perf_counter()
    metrics = {}
    examples = None
    for role, worker in workers.items():
        scores, episodes, _ = evaluate(worker, params, config.num_eval_tasks, config.num_eval_samples, seed)
        metrics |= {f"{role}/{name}": value for name, value in scores.items()}
        examples = examples or episodes
    metrics["times/test"] = time.perf_counter() - clock
    return metrics, examples
