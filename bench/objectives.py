"""Every preset on the demo's task with equal samples, as adapters of one population: learning curves and a table.

    python bench/objectives.py --dir runs/objectives            # 15 presets x 3 seeds
    python bench/objectives.py --dir runs/objectives --draw     # objectives.png and the table, from what is there

Each step samples 256 completions (16 prompts x 16) and takes four updates, each of a quarter of the rows trained on
(sil and nanochat one, of all of it; policy_gradients one of every 8 completions). All else is the preset's or, if
that is silent, the demo's. `ppo` is missing: its critic is a second model, which adapters have no room for.
"""

import argparse
import runpy
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import numpy as np

from utils.metrics.curves import WINDOW, Curves, read_metrics, running_mean
from utils.reporting.plots import COLORS, make_figure

ROOT = Path(__file__).resolve().parent.parent
PRESETS = (
    "grpo", "drgrpo", "dapo", "gspo", "cispo", "rloo", "reinforce", "reinforce++", "reinforce++_baseline",
    "policy_gradients", "sil", "nanochat", "maxrl", "sapo", "dppo",
)  # fmt: skip
SEEDS = (0, 1, 2)
FOUR_UPDATES = "ppo_minibatch: 64\nlr_schedule: constant\n"  # a preset, which that of sil comes behind
DEMO = runpy.run_path(str(ROOT / "configs" / "demo.py"))["get_config"]()
SAME = (
    "env_name", "env_options", "test_env_name", "num_generation_tokens", "force_answer_at", "groups_per_batch",
    "group_size", "max_resampling", "entropy_coef", "num_eval_tasks",
)  # fmt: skip
FLAGS = {name: DEMO[name] for name in SAME} | {  # so that presets change the objective only
    "temperature": 1, "top_p": 1, "top_k": 0, "lora_rank": 4, "lr": 3e-3,
    "num_epochs": 0, "max_steps": 16, "test_interval": 8, "num_eval_samples": 1, "save_interval": 0,
    "save_rollouts": "none", "inference_batch_per_device": 2048,
}  # fmt: skip
SHORT = {
    "groups_per_batch": 2, "group_size": 2, "max_steps": 2, "test_interval": 1, "num_eval_tasks": 2, "ppo_minibatch": 0,
    "num_generation_tokens": 32, "force_answer_at": 8, "max_resampling": 1,
}  # fmt: skip
SCORE = "test_env/correct_answer"
Runs = Mapping[str, Sequence[Curves]]  # by preset, one of each seed


def command(folder: Path, options: Mapping[str, object]) -> list[str]:
    """Returns the command line of the population, with `options` besides those that all comparisons share."""
    presets = ",".join(f"configs/{preset}.py" for preset in PRESETS)
    seeds = ",".join(map(str, SEEDS))
    flags = [str(x) for name, value in (FLAGS | options).items() for x in (f"--{name}", value)]
    return [
        *(sys.executable, "extras/population.py", "--population", f"seed={seeds};config={presets}"),
        *("--config", "configs/demo.py", "--config", str(folder / "four_updates.yaml")),
        *(*flags, "--save_dir", str(folder)),
    ]


def read_runs(folder: Path) -> Runs:
    """Returns what the members logged."""

    def read(preset: str, seed: int) -> Curves:
        return read_metrics(folder / f"seed={seed}_config={preset}" / "metrics.jsonl")

    return {preset: [read(preset, seed) for seed in SEEDS] for preset in PRESETS}


def table(runs: Runs) -> str:
    """Returns a row for each preset: means over seeds; of the held-out scores a run's standard error over problems."""
    lines = ["| preset | held out, before | after | of seeds | tokens | KL of a step |", "|---|---|---|---|---|---|"]
    for preset, logs in sorted(runs.items(), key=lambda item: -np.mean([log[SCORE][1][-1] for log in item[1]])):
        first, last = (np.array([log[SCORE][1][i] for log in logs]) for i in (0, -1))
        error = np.mean([log[f"{SCORE}_ci"][1][-1] for log in logs]) / 1.96
        length = np.mean([log["test_env/length"][1][-1] for log in logs])
        kl = np.mean([np.nanmean(log["approx_kl"][1]) for log in logs])
        of_seeds = ", ".join(f"{score:.3f}" for score in last)
        scores = f"{first.mean():.3f} | **{last.mean():.3f}** | {of_seeds}, each ± {error:.3f}"
        lines.append(f"| `{preset}` | {scores} | {length:.0f} | {kl:.1e} |")
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
    parser.add_argument("--dir", type=Path, required=True, help="folder of the population")
    parser.add_argument("--draw", action="store_true", help="run nothing, draw and print what is there")
    parser.add_argument("--short", action="store_true", help="two tiny steps of each run, to see that all works")
    args = parser.parse_args()
    folder = args.dir.resolve()
    if not args.draw:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "four_updates.yaml").write_text(FOUR_UPDATES)
        line = command(folder, SHORT if args.short else {})
        print(shlex.join(line[1:]))
        subprocess.run(line, cwd=ROOT, check=True)
    runs = read_runs(folder)
    draw(runs, folder / "objectives.png")
    print(table(runs))
    seconds = max(log["times/run"][1][-1] for logs in runs.values() for log in logs)
    print(f"{seconds / 60:.0f} minutes for all of them")


if __name__ == "__main__":
    main()
