"""Problems by bins: --task_sampling bins samples those bins more often whose groups are likely to have signal.

Each bin has counts of solved rollouts S and of all rollouts N, which fade. A pass rate is sampled from their posterior
(Thompson sampling); a bin's weight is the chance that a group of it has signal.
Source: marin-community/marin, PR 8769. N groups, G rollouts of each, K bins, M groups that a step may need.
"""

from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float, Int

from core.config import Config
from core.records import Episodes, Progress
from core.rollout import RolloutWorker
from utils.settings.errors import UserError

FADING = 0.95  # factor of the counts in each step
REVERSION = 2.0  # rollouts that each step adds to the counts of each bin, half of them solved
FLOOR = 0.05  # least share of the groups that go to all bins alike
STREAM = 60  # sets these random numbers apart from others of (seed, step)
MEMORY = "bins"  # in Progress.memory, by bin: solved rollouts, rollouts, groups so far


@dataclass(frozen=True)
class TaskBins:
    """The tasks of each bin, and what chooses among them."""

    tasks: dict[str, Int[np.ndarray, "_"]]  # by name
    seed: int
    group_size: int
    max_groups: int

    def choose(
        self, progress: Progress
    ) -> tuple[Int[np.ndarray, "M"], Int[np.ndarray, "M"], Float[np.ndarray, "K"]]:
        """Returns the tasks of the step after `progress`, as many as it can need, their bins and the bins' weights."""
        counts = progress.memory.get(MEMORY, {})
        solved, rollouts, starts = np.array([counts.get(name, (0.0, 0.0, 0)) for name in self.tasks]).T
        rng = np.random.default_rng((self.seed, progress.step + 1, STREAM))
        weights = bin_weights(rng.beta(1 + solved, 1 + rollouts - solved), self.group_size)
        bins = rng.choice(len(self.tasks), size=self.max_groups, p=weights)
        tasks = np.empty_like(bins)
        for number, own in enumerate(self.tasks.values()):
            is_own = bins == number
            epoch, offset = divmod(int(starts[number]), len(own))
            order = np.concatenate([self.order(own, epoch), self.order(own, epoch + 1)])
            tasks[is_own] = order[offset : offset + is_own.sum()]
        return tasks, bins, weights

    def order(self, own: Int[np.ndarray, "n"], epoch: int) -> Int[np.ndarray, "n"]:
        """Returns the tasks of a bin in the random order of an epoch.

        Tasks change places only within parts of n - `max_groups` + 1, so a task comes again after `max_groups` - 1
        others or more: never twice in a step, even one that begins a new epoch.
        """
        width = len(own) - self.max_groups + 1
        all_epochs = np.random.default_rng((self.seed, 0, STREAM)).permutation(own)
        rng = np.random.default_rng((self.seed, epoch))
        return np.concatenate([rng.permutation(all_epochs[i : i + width]) for i in range(0, len(own), width)])

    def count(self, episodes: Episodes, before: Progress, cursor: int) -> Episodes:
        """Returns the episodes with the new counts of each bin, and metrics of it. `cursor`: after the step.

        Groups after the last one that the batch needs come again in the next step, and are not counted.
        """
        _, bins, weights = self.choose(before)
        num_groups, shape = cursor - before.cursor, (-1, self.group_size)
        is_graded = ~(episodes.failed | np.isnan(episodes.scores["return"])).reshape(shape)[:num_groups]
        is_solved = (episodes.scores["correct_answer"].reshape(shape)[:num_groups] > 0) & is_graded
        old, new, metrics = before.memory.get(MEMORY, {}), {}, {}
        for number, name in enumerate(self.tasks):
            is_own = bins[:num_groups] == number
            solved, rollouts, start = old.get(name, (0.0, 0.0, 0))
            num_solved, num_graded = int(is_solved[is_own].sum()), int(is_graded[is_own].sum())
            new[name] = [
                FADING * solved + num_solved + REVERSION / 2,
                FADING * rollouts + num_graded + REVERSION,
                int(start + is_own.sum()),
            ]
            metrics[f"bins/{name}/weight"] = float(weights[number])
            if num_graded:
                metrics[f"bins/{name}/pass_rate"] = num_solved / num_graded
                metrics[f"bins/{name}/informative"] = float(episodes.has_signal[:num_groups][is_own].mean())
        return replace(episodes, metrics=episodes.metrics | metrics, memory={MEMORY: new})


def bin_weights(pass_rates: Float[np.ndarray, "K"], group_size: int) -> Float[np.ndarray, "K"]:
    """Returns each bin's share of the groups: the chance that a group has signal, normalized, at least FLOOR / K."""
    signal = 1 - pass_rates**group_size - (1 - pass_rates) ** group_size
    weights = np.maximum(signal / signal.sum(), FLOOR / len(signal))
    return weights / weights.sum()


def make_bins(config: Config, worker: RolloutWorker) -> TaskBins:
    """Returns the bins of an environment.

    Raises: UserError if the environment has none, or only one, or one that is smaller than a step.
    """
    names = np.array(worker.env.bins())
    if worker.fitting_ids is not None and len(names):
        names = names[worker.fitting_ids]
    tasks = {str(name): np.flatnonzero(names == name) for name in np.unique(names)}
    if len(tasks) < 2:
        found = f"the one bin {next(iter(tasks))}" if tasks else "no bins"
        raise UserError(
            f"--task_sampling bins: {worker.name} has {found}: give an environment with several, or --task_sampling "
            "uniform"
        )
    max_groups, smallest = config.update.max_groups, min(tasks, key=lambda name: len(tasks[name]))
    if len(tasks[smallest]) < max_groups:
        raise UserError(
            f"--task_sampling bins: bin {smallest} of {worker.name} has {len(tasks[smallest])} problems, and a step "
            f"may need {max_groups}: give larger bins, or lower --groups_per_batch or --max_resampling"
        )
    return TaskBins(tasks, config.seed, config.update.group_size, max_groups)
