"""Uniform problems and problems by bins, with refill and without: rollouts until 60% of held-out problems are solved.

    python bench/task_sampling.py --dir runs/task_sampling    # 40 runs, about 20 minutes on two cores

The mixture has Countdown problems of 2, 3 and 6 numbers, a third of each. models/tiny has seen three numbers only: it
solves a fifth of these, and none of the others. Held out are problems of three numbers. All runs begin with the same
weights, and those of a seed have the same random numbers. The same command again reads the runs that have ended.
"""

import argparse
import runpy
import sys
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    import utils.settings.packages  # noqa: F401 (says what to install)

import numpy as np

from bench.ab import compare, describe_origin
from bench.common import ROOT, Figure, report, train
from utils.evaluation.estimates import mean_over_runs
from utils.metrics.curves import Curves, read_metrics

DEMO = runpy.run_path(str(ROOT / "configs" / "demo.py"))["get_config"]()
GOAL, SCORE, ROLLOUTS = 0.6, "test_env/correct_answer", "rollout/total_rollouts"
MOST_STEPS = 60
NUM_ROLLOUTS = 3_800  # at which scores are compared, too; chosen after seeds 0 to 2, before the others
PLAYED = {
    "config": "configs/demo.py",
    "env_options": f"{DEMO['env_options']},mixture=2+3+6",
    "test_env_name": f"{DEMO['test_env_name']}(mixture=)",
    "lr_schedule": "constant",
    "max_steps": MOST_STEPS,
    "test_interval": 4,
    "num_eval_tasks": 256,
    "num_eval_samples": 1,
    "save_interval": 0,
    "save_rollouts": "none",
    "stop_at": f"{SCORE}>={GOAL}",
}
ARMS = {
    "uniform": {},
    "bins": {"task_sampling": "bins"},
    "uniform, refill": {"max_resampling": 4},
    "bins, refill": {"max_resampling": 4, "task_sampling": "bins"},
}
SHORT = {"max_steps": 1, "groups_per_batch": 4, "group_size": 2, "ppo_minibatch": 0, "num_eval_tasks": 4}


def describe_run(seed: int, name: str, run: Curves) -> list[Figure]:
    """Returns the row of a run: its rollouts, its steps, and its last score."""
    (_, scores), (_, rollouts) = run[SCORE], run[ROLLOUTS]
    mark = "" if scores[-1] >= GOAL else " without reaching it"
    seconds = run["times/run"][1][-1]
    return [str(seed), name, f"{rollouts[-1]:,.0f}{mark}", str(len(rollouts)), f"{scores[-1]:.3f}", f"{seconds:.0f}"]


def compare_arms(a: str, b: str, rollouts: Mapping[str, Sequence[float]]) -> list[Figure]:
    """Returns the row of a comparison: the paired difference of rollouts, and their ratio, with 95% intervals."""
    x, y = (np.array(rollouts[name], float) for name in (a, b))
    found, ratio = compare(x, y, is_paired=True), mean_over_runs("log", np.log(y / x))
    low, high = np.exp(ratio["log"] + np.array([-1, 1]) * ratio.get("log_ci", np.nan))
    difference = f"{found.mean:+,.0f} [{found.low:+,.0f}, {found.high:+,.0f}]"
    return [f"{b} / {a}", difference, f"{np.exp(ratio['log']):.2f} [{low:.2f}, {high:.2f}]"]


def score_at(run: Curves, num_rollouts: int) -> float:
    """Returns the held-out score after so many rollouts, interpolated between evaluations; the last one if it ends."""
    (steps, scores), (updates, rollouts) = run[SCORE], run[ROLLOUTS]
    return float(np.interp(num_rollouts, np.interp(steps, [0, *updates], [0, *rollouts]), scores))


def compare_scores(a: str, b: str, scores: Mapping[str, Sequence[float]]) -> list[Figure]:
    """Returns the row of a comparison: the difference of each seed, and the mean with its 95% interval."""
    x, y = (np.array(scores[name]) for name in (a, b))
    found = compare(x, y, is_paired=True)
    each = ", ".join(f"{difference:+.3f}" for difference in y - x)
    return [f"{b} - {a}", each, f"{found.mean:+.3f} [{found.low:+.3f}, {found.high:+.3f}]"]


def main() -> None:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form, allow_abbrev=False)
    parser.add_argument("--dir", type=Path, default="runs/task_sampling", help="folder of the runs")
    parser.add_argument("--seeds", type=int, default=10, help="number of seeds: 0, 1, ...")
    parser.add_argument("--short", action="store_true", help="one small step of each run, to try the command")
    parser.add_argument("--json", default="", help="file for the figures; empty: not written")
    options = parser.parse_args()
    folder = options.dir.resolve()
    rollouts: dict[str, list[float]] = {name: [] for name in ARMS}
    scores: dict[str, list[float]] = {name: [] for name in ARMS}
    rows, folders = [], []
    for seed in range(options.seeds):
        for name, own in ARMS.items():
            folders.append(folder / f"{name.replace(', ', '_')}_{seed}")
            train(folders[-1], PLAYED | own | {"seed": seed} | (SHORT if options.short else {}))
            run = read_metrics(folders[-1] / "metrics.jsonl")
            rollouts[name].append(float(run[ROLLOUTS][1][-1]))
            scores[name].append(score_at(run, NUM_ROLLOUTS))
            rows.append(describe_run(seed, name, run))
    machine = describe_origin(folders)
    title = f"Rollouts until {GOAL:.0%} of held-out problems are solved, or until step {MOST_STEPS}"
    report(title, ("seed", "problems", "rollouts", "steps", "last score", "s"), rows, machine)
    pairs = [*combinations(ARMS, 2)]
    rows = [compare_arms(a, b, rollouts) for a, b in pairs]
    report("Paired by seed", ("runs", "rollouts", "ratio"), rows, machine, options.json, scores=rollouts)
    rows = [compare_scores(a, b, scores) for a, b in pairs]
    report(f"Scores after {NUM_ROLLOUTS:,} rollouts", ("runs", "by seed", "mean"), rows, machine)


if __name__ == "__main__":
    main()
