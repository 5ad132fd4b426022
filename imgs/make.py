"""Draws the pictures of README.md from recorded runs; those that are not named stay as they are.

    python imgs/make.py --demo runs/demo-0 runs/demo-1 runs/demo-2    # make demo SEED=0, 1, 2
    python imgs/make.py --smollm runs/smollm-0 runs/smollm-1 runs/smollm-2    # runs/smollm.sh --seed 0, 1, 2
    python imgs/make.py --guess runs/guess-0 runs/guess-1 runs/guess-2    # recipes/games/run.sh --seed 0, 1, 2
    python imgs/make.py --games runs/guess runs/calculator runs/gridworld    # GAME=guess, ... recipes/games/run.sh
    python imgs/make.py --lora runs/lora --lora_smollm runs/smollm    # adapters, full training: docs/lab
    python imgs/make.py --ladder runs/ladder    # SEED=0, 1, 2 runs/ladder.sh
    python imgs/make.py --gsm8k docs/lab/runs/coder-0.5b_gsm8k_h100
    python imgs/make.py --report runs/demo-0    # with Chromium, chromedriver, selenium
"""

import argparse
import io
import json
import shutil
import sys
import tempfile
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import numpy as np

from bench import objectives
from extras import compare
from utils.metrics.curves import COLORS, read_metrics
from utils.reporting.page import label_runs, write_report

HERE = Path(__file__).resolve().parent
RUNGS = ("models/tiny", "SFT", "IPO", "RLOO")
RANKS = ("full", "rank1", "rank4", "rank16")
WIDTH, HEIGHT, SCALE = 700, 1050, 1.5  # of each half of the report's picture, CSS pixels
BLUE = "#0969da"  # on white and on black
ROLLOUTS = """
const group = document.getElementById("group");
group.value = "7";  // a problem that takes a longer search after training
group.dispatchEvent(new Event("input", { bubbles: true }));
document.getElementById("rollouts-title").scrollIntoView();
"""


def photograph(run: Path, out: Path) -> None:
    """Draws the report: its top on the left, its rollouts on the right."""
    from PIL import Image
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    for argument in ("--headless=new", "--no-sandbox", "--hide-scrollbars"):
        options.add_argument(argument)
    width, height = int(WIDTH * SCALE), int(HEIGHT * SCALE)
    picture = Image.new("RGB", (2 * width, height))
    with tempfile.TemporaryDirectory() as folder:
        write_report([run], Path(folder) / "report.html")
        with webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver"))) as page:
            metrics = {"width": WIDTH, "height": HEIGHT, "deviceScaleFactor": SCALE, "mobile": False}
            page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
            page.get((Path(folder) / "report.html").as_uri())
            for i in range(2):
                picture.paste(Image.open(io.BytesIO(page.get_screenshot_as_png())), (i * width, 0))
                page.execute_script(ROLLOUTS)
    picture.quantize(256, Image.Quantize.MAXCOVERAGE).save(out, optimize=True)  # a third of the bytes


def draw_ladder(folder: Path, out: Path) -> None:
    """Draws the held-out scores of each rung of runs/ladder.sh, a line for each seed, with their 95% intervals."""
    figure = compare.make_figure(figsize=(7, 3.5), dpi=100)
    axis = figure.subplots()
    for number, file in enumerate(sorted(folder.glob("seed*/scores.json"))):
        ipo, *others, rloo = json.loads(file.read_text())
        rows = [*others, ipo, rloo]
        scores, low, high = ([row[f"correct_answer{end}"] for row in rows] for end in ("", "_low", "_high"))
        errors = np.subtract(scores, low), np.subtract(high, scores)
        places = np.arange(len(rows)) + 0.06 * (number - 1)
        axis.errorbar(places, scores, errors, fmt="o:", color=COLORS[number], capsize=3, label=file.parent.name)
    axis.set_xticks(range(len(RUNGS)), RUNGS)
    axis.set_title("Correct answers of held-out problems", loc="left", fontsize=10)
    axis.set_ylim(0)
    axis.legend(frameon=False)
    figure.savefig(out)


def draw_gsm8k(run: Path, out: Path) -> None:
    """Draws a run's held-out score by step, with its 95% intervals and the seconds since the start."""
    curves = read_metrics(run / "metrics.jsonl")
    steps, scores = curves["test_env/correct_answer"]
    low, high = (curves[f"test_env/correct_answer{end}"][1] for end in ("_low", "_high"))
    seconds = dict(zip(*curves["times/run"], strict=True))
    figure = compare.make_figure(figsize=(7, 3.5), dpi=100)
    axis = figure.subplots()
    errors = np.subtract(scores, low), np.subtract(high, scores)
    axis.errorbar(steps, scores, errors, fmt="o-", color=BLUE, capsize=3)
    axis.set_xticks(steps, [f"step {step:.0f}\n{seconds.get(step, 0):.0f} s" for step in steps])
    axis.set_title("GSM8K, 1,319 test problems: correct answers by step", loc="left", fontsize=10)
    axis.set_ylim(0)
    figure.savefig(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--demo", nargs="+", metavar="RUN", help="runs of the demo, for demo.png")
    parser.add_argument("--smollm", nargs="+", metavar="RUN", help="runs of runs/smollm.sh, for smollm.png")
    parser.add_argument("--guess", nargs="+", metavar="RUN", help="runs of guess, recipes/games/run.sh, for guess.png")
    parser.add_argument("--games", nargs="+", metavar="RUN", help="runs of games, recipes/games/run.sh, for games.png")
    parser.add_argument("--lora", type=Path, metavar="FOLDER", help="runs in full, rank1, rank4, rank16, for lora.png")
    parser.add_argument("--lora_smollm", type=Path, metavar="FOLDER", help="the same of SmolLM2, for lora_smollm.png")
    parser.add_argument("--ladder", type=Path, metavar="FOLDER", help="the folder of runs/ladder.sh, for ladder.png")
    parser.add_argument("--gsm8k", type=Path, metavar="RUN", help="a run of GSM8K, for gsm8k.png")
    parser.add_argument("--report", type=Path, metavar="RUN", help="a run, for report.png")
    args = parser.parse_args()
    for name in ("demo", "smollm", "guess", "games"):
        if folders := getattr(args, name):
            runs = {label: read_metrics(file) for label, file in label_runs(folders).items()}
            compare.plot_runs(runs, HERE / f"{name}.png")
    for name in ("lora", "lora_smollm"):
        if folder := getattr(args, name):
            files = {rank: sorted(folder.glob(f"{rank}/seed=*/metrics.jsonl")) for rank in RANKS}
            runs = {rank: list(map(read_metrics, found)) for rank, found in files.items() if found}
            objectives.draw(runs, HERE / f"{name}.png", "trained (seeds)")
    if args.ladder:
        draw_ladder(args.ladder, HERE / "ladder.png")
    if args.gsm8k:
        draw_gsm8k(args.gsm8k, HERE / "gsm8k.png")
    if args.report:
        photograph(args.report, HERE / "report.png")


if __name__ == "__main__":
    main()
