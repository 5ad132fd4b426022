"""Every preset on the demo's task with equal samples: learning curves and a table.

    python bench/objectives.py --dir runs/objectives            # an hour on two cores; run it again to go on
    python bench/objectives.py --dir runs/objectives --draw     # objectives.png and the table, from what is there

Each step samples 256 completions (16 prompts x 16; sil 8 x 32) and takes four updates, each of a quarter of what is
learnt from. All else is the preset's or, where that is silent, the demo's; `OWN` holds the exceptions.
"""

import argparse
import json
import os
import runpy
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import numpy as np
from matplotlib.figure import Figure

from utils.reporting.plots import COLOURS, read_metrics

ROOT = Path(__file__).resolve().parent.parent
PRESETS = {  # seeds of each
    **dict.fromkeys(("grpo", "drgrpo", "ppo", "sil", "nanochat", "cispo"), (0, 1, 2)),
    **dict.fromkeys(("dapo", "gspo", "rloo", "reinforce", "reinforce++", "reinforce++_baseline"), (0,)),
    **dict.fromkeys(("maxrl", "sapo", "dppo"), (0,)),
}
STEPS = 16
DEMO = runpy.run_path(str(ROOT / "configs" / "demo.py"))["get_config"]()
COMMON = {
    "env_name": "countdown", "env_options": DEMO["env_options"], "test_env_name": "countdown-test", "num_epochs": 0,
    "groups_per_batch": 16, "group_size": 16, "max_resampling": 1, "ppo_minibatch": 64, "entropy_coef": 0,
    "num_generation_tokens": 192, "max_steps": STEPS, "test_interval": 4, "num_eval_tasks": 512, "num_eval_samples": 1,
    "test_greedy": 0, "save_interval": 4, "sample_interval": 0, "save_rollouts": "none", "wandb_mode": "disabled",
}  # fmt: skip
OWN = {
    "ppo": {"critic_lr": 2e-3},
    "sil": {"groups_per_batch": 8, "group_size": 32, "ppo_minibatch": 4},
    "nanochat": {"init_lr_frac": 0.3, "embedding_lr": 8e-4, "lr": 0.002},  # steps as large as the others' AdamW
}
SCORE = "test_env/correct_answer"


def command(preset: str, seed: int, folder: Path) -> list[str]:
    """The command line of one run."""
    flags = COMMON | OWN.get(preset, {}) | {"seed": seed, "save_dir": folder}
    configs = ["--config", "configs/demo.py", "--config", f"configs/{preset}.py"]
    return [
        sys.executable,
        "core/grpo.py",
        *configs,
        *(str(x) for item in flags.items() for x in (f"--{item[0]}", item[1])),
    ]


def run_all(directory: Path, names: Sequence[str], jobs: int) -> None:
    """Runs what is not finished, so many at a time, each on its share of the cores."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    places = Queue()
    for i in range(jobs):
        places.put(set(cores[i::jobs]))

    def run(preset: str, seed: int) -> None:
        folder = directory / f"{preset}-{seed}"
        if (folder / f"step{STEPS}").exists():
            return
        folder.mkdir(parents=True, exist_ok=True)
        mine = places.get()
        with (folder / "log.txt").open("a") as log:
            process = subprocess.Popen(command(preset, seed, folder), cwd=ROOT, stdout=log, stderr=log)
            if mine:
                os.sched_setaffinity(process.pid, mine)
            status = process.wait()
        places.put(mine)
        print(f"{folder.name}: {'done' if status == 0 else f'exit status {status}, see {folder}/log.txt'}", flush=True)

    with ThreadPoolExecutor(jobs) as pool:
        for i in range(3):  # first one seed of each
            for preset in names:
                for seed in PRESETS[preset][i : i + 1]:
                    pool.submit(run, preset, seed)


def finished(directory: Path) -> dict[str, list[dict]]:
    """What each finished run logged, by preset."""
    found = {}
    for preset, seeds in PRESETS.items():
        folders = [directory / f"{preset}-{seed}" for seed in seeds]
        runs = [read_metrics(folder / "metrics.jsonl") for folder in folders if (folder / f"step{STEPS}").exists()]
        found |= {preset: runs} if runs else {}
    return found


def table(runs: dict[str, list[dict]]) -> str:
    """A row for each preset: held-out score before and after (± one standard error over problems), length, time."""
    lines = ["| preset | held out, before | after | tokens | KL of a step | minutes |", "|---|---|---|---|---|---|"]
    for preset, logs in sorted(runs.items(), key=lambda item: -np.mean([log[SCORE][1][-1] for log in item[1]])):
        first, last = (np.array([log[SCORE][1][i] for log in logs]) for i in (0, -1))
        error = np.mean([log[f"{SCORE}_ci"][1][-1] for log in logs]) / 1.96
        spread = f" ({', '.join(f'{score:.3f}' for score in last)})" if len(logs) > 1 else ""
        length = np.mean([log["test_env/length"][1][-1] for log in logs])
        kl = np.mean([log["approx_kl"][1].mean() for log in logs])
        minutes = np.mean([log["times/run"][1][-1] for log in logs]) / 60
        scores = f"{first.mean():.3f} | **{last.mean():.3f}** ± {error:.3f}{spread}"
        lines.append(f"| `{preset}` | {scores} | {length:.0f} | {kl:.1e} | {minutes:.1f} |")
    return "\n".join(lines)


def draw(runs: dict[str, list[dict]], out: Path, title: str = "preset (seeds)") -> None:
    """Held-out score and training return by step; means over seeds, with their range."""
    figure = Figure(figsize=(12, 5), layout="constrained")
    panels = figure.subplots(1, 2)
    for i, (preset, logs) in enumerate(runs.items()):
        look = {"color": COLOURS[i % len(COLOURS)], "linestyle": "-" if i < len(COLOURS) else "--"}
        for panel, metric in zip(panels, (SCORE, "env/correct_answer"), strict=True):
            steps, scores = logs[0][metric][0], np.array([log[metric][1] for log in logs])
            if metric != SCORE:  # a running mean over five steps
                scores = np.array([np.convolve(row, np.ones(5) / 5, "valid") for row in scores])
                steps = steps[2:-2]
            panel.plot(steps, scores.mean(axis=0), label=f"{preset} ({len(logs)})", linewidth=1.6, **look)
            if len(logs) > 1:
                panel.fill_between(steps, scores.min(axis=0), scores.max(axis=0), color=look["color"], alpha=0.12)
    for panel, problems in zip(panels, ("held out (512 problems)", "training batch, mean of 5 steps"), strict=True):
        panel.set(title=f"Correct answers, {problems}", xlabel="steps of 256 completions", ylim=(0, None))
        panel.grid(alpha=0.3)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right upper", title=title)
    figure.savefig(out, dpi=100)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--presets", default=",".join(PRESETS), help="comma-separated")
    parser.add_argument("--draw", action="store_true", help="run nothing, draw and print what is there")
    args = parser.parse_args()
    args.dir.mkdir(parents=True, exist_ok=True)
    if not args.draw:
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(args.dir.resolve() / "compiled"))
        run_all(args.dir.resolve(), args.presets.split(","), args.jobs)
    runs = finished(args.dir)
    draw(runs, args.dir / "objectives.png")
    print(table(runs))
    (args.dir / "commands.json").write_text(
        json.dumps({name: " ".join(command(name, PRESETS[name][0], Path("RUN"))[1:]) for name in PRESETS}, indent=2)
    )


if __name__ == "__main__":
    main()
