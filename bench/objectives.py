"""Every preset on the demo's task with equal samples, as adapters of one population: learning curves and a table.

    python bench/objectives.py --dir runs/objectives            # rates of 16 presets, then 16 presets x 3 seeds
    python bench/objectives.py --dir runs/objectives --draw     # objectives.png and both tables, from what is there

Each step samples 256 completions (16 prompts x 16) and takes four updates, each of a quarter of the rows trained on
(sil and nanochat one, of all of it; policy_gradients one of every 8 completions). All else is the preset's or, if
that is silent, the demo's. `ppo` is missing: its critic is a second model, which adapters have no room for.

A first population chooses the rate of each preset: the one of RATES with the best score on problems for validation,
trained with a seed of its own. The demo's task leaves no sets of numbers for a valid split. So these are the
problems of the test split behind the 512 that the table is about.
"""

import argparse
import json
import runpy
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import numpy as np

from envs import make_env
from envs.settings import parse_options
from utils.metrics.curves import WINDOW, Curves, read_metrics, running_mean
from utils.reporting.plots import COLORS, make_figure

ROOT = Path(__file__).resolve().parent.parent
PRESETS = (
    "grpo", "drgrpo", "dapo", "gspo", "luspo", "cispo", "rloo", "reinforce", "reinforce++", "reinforce++_baseline",
    "policy_gradients", "sil", "nanochat", "maxrl", "sapo", "dppo",
)  # fmt: skip
RATES = ("3e-4", "1e-3", "3e-3", "1e-2")
SEEDS = (0, 1, 2)
GRID_SEED = 3  # of the runs that choose rates
FOUR_UPDATES = "ppo_minibatch: 64\nlr_schedule: constant\n"  # a preset, which that of sil comes behind
DEMO = runpy.run_path(str(ROOT / "configs" / "demo.py"))["get_config"]()
SAME = (
    "env_name", "env_options", "num_generation_tokens", "force_answer_at", "groups_per_batch", "group_size",
    "max_resampling", "entropy_coef",
)  # fmt: skip
FLAGS = {name: DEMO[name] for name in SAME} | {  # so that presets change the objective only
    "temperature": 1, "top_p": 1, "top_k": 0, "lora_rank": 4, "num_epochs": 0, "max_steps": 16, "save_interval": 0,
    "save_rollouts": "none", "inference_batch_per_device": 2048,
}  # fmt: skip
TABLE = {name: DEMO[name] for name in ("test_env_name", "num_eval_tasks")} | {"num_eval_samples": 1, "test_interval": 8}
GRID = {"test_env_name": "countdown34-test", "num_eval_tasks": 0, "num_eval_samples": 2, "test_interval": 16}
SHORT = {
    "groups_per_batch": 2, "group_size": 2, "max_steps": 2, "test_interval": 1, "num_eval_tasks": 2, "ppo_minibatch": 0,
    "num_generation_tokens": 32, "force_answer_at": 8, "max_resampling": 1,
}  # fmt: skip
SCORE = "test_env/correct_answer"
Runs = Mapping[str, Sequence[Curves]]  # by preset, one of each seed


def write_presets(folder: Path) -> None:
    """Writes each preset at each rate, and the problems for validation as a data set."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "four_updates.yaml").write_text(FOUR_UPDATES)
    for preset in PRESETS:
        options = runpy.run_path(str(ROOT / "configs" / f"{preset}.py"))["get_config"]()
        for rate in RATES:
            rates = dict.fromkeys(("lr", "matrix_lr") if "matrix_lr" in options else ("lr",), float(rate))
            (folder / f"{preset}-{rate}.json").write_text(json.dumps(options | rates))
    env = make_env("countdown-test", **parse_options(DEMO["env_options"], "--env_options"))
    problems = env.instances[DEMO["num_eval_tasks"] :]
    rows = [json.dumps({"nums": numbers, "target": target}) for numbers, target in problems]
    (folder / "validation").mkdir(exist_ok=True)
    (folder / "validation" / "test.jsonl").write_text("\n".join(rows) + "\n")


def run_population(folder: Path, presets: Sequence[str], seeds: Sequence[int], options: Mapping[str, object]) -> None:
    """Trains each preset with each seed, with `options` besides those that all comparisons share."""
    configs = ",".join(f"{folder.parent}/presets/{preset}.json" for preset in presets)
    members = f"seed={','.join(map(str, seeds))};config={configs}"
    flags = [str(x) for name, value in (FLAGS | options).items() for x in (f"--{name}", value)]
    presets_of_all = ("configs/demo.py", str(folder.parent / "presets" / "four_updates.yaml"))
    line = [sys.executable, "extras/population.py", "--population", members]
    line += [x for preset in presets_of_all for x in ("--config", preset)] + [*flags, "--save_dir", str(folder)]
    print(shlex.join(line[1:]), flush=True)
    subprocess.run(line, cwd=ROOT, check=True)


def read_runs(folder: Path, rates: Mapping[str, str], seeds: Sequence[int]) -> Runs:
    """Returns what the members logged."""

    def read(preset: str, seed: int) -> Curves:
        return read_metrics(folder / f"seed={seed}_config={preset}-{rates[preset]}" / "metrics.jsonl")

    return {preset: [read(preset, seed) for seed in seeds] for preset in PRESETS}


def read_grid(folder: Path, rates: Sequence[str]) -> Mapping[str, Mapping[str, float]]:
    """Returns the validation score of each preset after training, by rate."""
    runs = {rate: read_runs(folder, dict.fromkeys(PRESETS, rate), [GRID_SEED]) for rate in rates}
    return {preset: {rate: runs[rate][preset][0][SCORE][1][-1] for rate in rates} for preset in PRESETS}


def grid_table(scores: Mapping[str, Mapping[str, float]], rates: Sequence[str]) -> str:
    """Returns a row of validation scores for each preset."""
    lines = ["| preset | " + " | ".join(rates) + " |", "|---" * (1 + len(rates)) + "|"]
    for preset, by_rate in scores.items():
        best = max(by_rate, key=by_rate.get)
        cells = [f"**{score:.3f}**" if rate == best else f"{score:.3f}" for rate, score in by_rate.items()]
        lines.append(f"| `{preset}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def table(runs: Runs, rates: Mapping[str, str]) -> str:
    """Returns a row for each preset: means over seeds; of the held-out scores a run's standard error over problems."""
    lines = ["| preset | rate | held out, before | after | of seeds | tokens | KL of a step |", "|---" * 7 + "|"]
    for preset, logs in sorted(runs.items(), key=lambda item: -np.mean([log[SCORE][1][-1] for log in item[1]])):
        first, last = (np.array([log[SCORE][1][i] for log in logs]) for i in (0, -1))
        error = np.mean([log[f"{SCORE}_ci"][1][-1] for log in logs]) / 1.96
        length = np.mean([log["test_env/length"][1][-1] for log in logs])
        kl = np.mean([np.nanmean(log["approx_kl"][1]) for log in logs])
        of_seeds = ", ".join(f"{score:.3f}" for score in last)
        scores = f"{first.mean():.3f} | **{last.mean():.3f}** | {of_seeds}, each ± {error:.3f}"
        lines.append(f"| `{preset}` | {rates[preset]} | {scores} | {length:.0f} | {kl:.1e} |")
    return "\n".join(lines)


def draw(runs: Runs, out: Path, title: str = "preset (seeds)") -> None:
    """Draws held-out score and training return by step: means over seeds, with their range."""
    figure = make_figure(figsize=(12, 5))
    panels = figure.subplots(1, 2)
    for i, (preset, logs) in enumerate(runs.items()):
        look = {"color": COLORS[i % len(COLORS)], "linestyle": "-" if i < len(COLORS) else "--"}
        for panel, metric in zip(panels, (SCORE, "env/correct_answer"), strict=True):
            steps, scores = logs[0][metric][0], np.array([log[metric][1] for log in logs])
            if metric != SCORE:
                scores = np.array([running_mean(row) for row in scores])
            panel.plot(steps, scores.mean(axis=0), label=f"{preset} ({len(logs)})", linewidth=1.6, **look)
            if len(logs) > 1:
                panel.fill_between(steps, scores.min(axis=0), scores.max(axis=0), color=look["color"], alpha=0.12)
    log = next(iter(runs.values()))[0]
    num_problems, num_rollouts = (int(log[name][1][-1]) for name in ("test_env/num_tasks", "rollout/num_rollouts"))
    titles = f"held out ({num_problems} problems)", f"training batch, mean of {WINDOW} steps"
    for panel, problems in zip(panels, titles, strict=True):
        panel.set(title=f"Correct answers, {problems}", xlabel=f"steps of {num_rollouts} completions", ylim=(0, None))
        panel.grid(alpha=0.3)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right upper", title=title)
    figure.savefig(out, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=Path, required=True, help="folder of both populations")
    parser.add_argument("--draw", action="store_true", help="run nothing, draw and print what is there")
    parser.add_argument("--short", action="store_true", help="one rate, one seed, two tiny steps, to see that it works")
    args = parser.parse_args()
    folder = args.dir.resolve()
    rates, seeds, short = (RATES[:1], SEEDS[:1], SHORT) if args.short else (RATES, SEEDS, {})
    if not args.draw:
        write_presets(folder / "presets")
        validation = {"test_env_options": f"data_dir={folder}/presets/validation,prompt=bare"}
        presets = [f"{preset}-{rate}" for preset in PRESETS for rate in rates]
        run_population(folder / "grid", presets, [GRID_SEED], GRID | validation | short)
    grid = read_grid(folder / "grid", rates)
    chosen = {preset: max(scores, key=scores.get) for preset, scores in grid.items()}
    if not args.draw:
        presets = [f"{preset}-{rate}" for preset, rate in chosen.items()]
        run_population(folder / "table", presets, seeds, TABLE | short)
    runs = read_runs(folder / "table", chosen, seeds)
    draw(runs, folder / "objectives.png")
    print(grid_table(grid, rates))
    print(table(runs, chosen))
    seconds = max(log["times/run"][1][-1] for logs in runs.values() for log in logs)
    print(f"{seconds / 60:.0f} minutes for those of the table")


if __name__ == "__main__":
    main()
