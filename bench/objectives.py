"""Every preset on the demo's task with equal samples, as adapters of one population: learning curves and a table.

    python bench/objectives.py --dir runs/objectives            # rates of 16 presets, then 16 presets x 3 seeds
    python bench/objectives.py --dir runs/objectives --draw     # objectives.png and both tables, from what is there
    python bench/objectives.py --dir runs/objectives --rates rates.json    # rates that are known, by preset

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
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import numpy as np

from bench.ab import compare, describe_origin
from bench.common import ROOT, Figure, report, run_command
from envs import make_env
from envs.settings import parse_options
from extras.compare import make_figure
from utils.metrics.curves import COLORS, WINDOW, Curves, read_metrics, running_mean

PRESETS = (
    "grpo", "drgrpo", "dapo", "gspo", "luspo", "cispo", "rloo", "reinforce", "reinforce++", "reinforce++_baseline",
    "policy_gradients", "sil", "nanochat", "maxrl", "sapo", "dppo",
)  # fmt: skip
RATES = ("3e-4", "1e-3", "3e-3", "1e-2")
SEEDS = (0, 1, 2)
GRID_SEED = 3  # of the runs that choose rates
FOUR_UPDATES = {"ppo_minibatch": 64, "lr_schedule": "constant"}  # over the demo's options; a preset's own win
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
    """Writes what all runs share, each preset at each rate, and the problems for validation as a data set."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "demo.json").write_text(json.dumps(DEMO | FOUR_UPDATES))
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
    of_all = {"population": members, "config": folder.parent / "presets" / "demo.json"} | FLAGS
    run_command("extras/population.py", {**of_all, **options, "save_dir": folder})


def folder_of(folder: Path, preset: str, rate: str, seed: int) -> Path:
    return folder / f"seed={seed}_config={preset}-{rate}"


def read_runs(folder: Path, rates: Mapping[str, str], seeds: Sequence[int]) -> Runs:
    """Returns what the members logged."""

    def read(preset: str, seed: int) -> Curves:
        return read_metrics(folder_of(folder, preset, rates[preset], seed) / "metrics.jsonl")

    return {preset: [read(preset, seed) for seed in seeds] for preset in PRESETS}


def read_grid(folder: Path, rates: Sequence[str]) -> Mapping[str, Mapping[str, float]]:
    """Returns the validation score of each preset after training, by rate."""
    runs = {rate: read_runs(folder, dict.fromkeys(PRESETS, rate), [GRID_SEED]) for rate in rates}
    return {preset: {rate: runs[rate][preset][0][SCORE][1][-1] for rate in rates} for preset in PRESETS}


def describe_preset(preset: str, rate: str, runs: Runs) -> list[Figure]:
    """Returns the row of a preset: means over seeds, and the difference to grpo with its interval over pairs."""
    logs, last = runs[preset], {name: np.array([log[SCORE][1][-1] for log in runs[name]]) for name in ("grpo", preset)}
    before = np.mean([log[SCORE][1][0] for log in logs])
    found = compare(last["grpo"], last[preset], is_paired=True)
    length = np.mean([log["test_env/length"][1][-1] for log in logs])
    kl = np.mean([np.nanmean(log["approx_kl"][1]) for log in logs])
    of_seeds = ", ".join(f"{score:.3f}" for score in last[preset])
    difference = "" if preset == "grpo" else f"{found.mean:+.3f} [{found.low:+.3f}, {found.high:+.3f}]"
    scores = [f"{before:.3f}", f"{last[preset].mean():.3f}", of_seeds, difference]
    return [preset, rate, *scores, f"{length:.0f}", f"{kl:.1e}"]


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
    parser.add_argument("--rates", type=Path, help="JSON file: the rate of each preset, so that no grid is run")
    parser.add_argument("--seeds", type=int, nargs="*", default=SEEDS, help="seeds of the second population")
    parser.add_argument("--draw", action="store_true", help="run nothing, draw and print what is there")
    parser.add_argument("--short", action="store_true", help="one rate, one seed, two tiny steps, to see that it works")
    args = parser.parse_args()
    folder = args.dir.resolve()
    rates, seeds, short = (RATES[:1], SEEDS[:1], SHORT) if args.short else (RATES, args.seeds, {})
    if not args.draw:
        write_presets(folder / "presets")
    if not args.draw and not args.rates:
        validation = {"test_env_name": f"countdown34-test(data_dir={folder}/presets/validation,prompt=bare)"}
        presets = [f"{preset}-{rate}" for preset in PRESETS for rate in rates]
        run_population(folder / "grid", presets, [GRID_SEED], GRID | validation | short)
    grid = {} if args.rates else read_grid(folder / "grid", rates)
    chosen = {preset: max(scores, key=scores.get) for preset, scores in grid.items()}
    chosen = chosen or json.loads(args.rates.read_text())
    if not args.draw:
        presets = [f"{preset}-{rate}" for preset, rate in chosen.items()]
        run_population(folder / "table", presets, seeds, TABLE | short)
    runs = read_runs(folder / "table", chosen, seeds)
    draw(runs, folder / "objectives.png")
    machine = describe_origin([folder_of(folder / "table", *chosen_one, seeds[0]) for chosen_one in chosen.items()])
    rows = [[preset, *(f"{score:.3f}" for score in scores.values()), chosen[preset]] for preset, scores in grid.items()]
    if rows:
        report("Scores on problems for validation, by rate", ("preset", *rates, "chosen"), rows, machine)
    rows = [describe_preset(preset, chosen[preset], runs) for preset in PRESETS]
    columns = ("preset", "rate", "before", "after", "of seeds", "minus grpo, 95%", "tokens", "KL of a step")
    report("Held-out scores at these rates", columns, sorted(rows, key=lambda row: row[3], reverse=True), machine)
    seconds = max(log["times/run"][1][-1] for logs in runs.values() for log in logs)
    print(f"{seconds / 60:.0f} minutes for those of the table")


if __name__ == "__main__":
    main()
