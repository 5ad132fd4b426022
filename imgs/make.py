"""Draws the pictures of README.md from recorded runs; those that are not named stay as they are.

    python imgs/make.py --demo runs/demo-0 runs/demo-1 runs/demo-2    # make demo SEED=0, 1, 2
    python imgs/make.py --smollm runs/smollm-0 runs/smollm-1 runs/smollm-2    # runs/smollm.sh --seed 0, 1, 2
    python imgs/make.py --guess runs/guess-0 runs/guess-1 runs/guess-2    # runs/games.sh --seed 0, 1, 2
    python imgs/make.py --games runs/tictactoe runs/calculator runs/gridworld    # GAME=tictactoe, ... runs/games.sh
    python imgs/make.py --lora runs/lora --lora_smollm runs/smollm    # adapters beside full training: docs/lora.md
    python imgs/make.py --objectives runs/objectives                  # python bench/objectives.py --dir runs/objectives
    python imgs/make.py --report runs/demo-0    # with Chromium, chromedriver, selenium
"""

import argparse
import io
import shutil
import sys
import tempfile
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from bench import objectives
from utils.reporting import plots
from utils.reporting.page import label_runs, write_report

HERE = Path(__file__).resolve().parent
RANKS = ("full", "rank1", "rank4", "rank16")
WIDTHS, HEIGHT = (1000, 1000, 400), 900  # of the parts of the report's picture, pixels
NIGHT = """
  document.getElementById("theme").click();
  document.getElementById("rollouts-title").scrollIntoView();
"""


def photograph(run: Path, out: Path) -> None:
    """Draws the report side by side: its top by day, its rollouts by night, and its top on a phone."""
    from PIL import Image
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    for argument in ("--headless=new", "--no-sandbox", "--hide-scrollbars"):
        options.add_argument(argument)
    picture = Image.new("RGB", (sum(WIDTHS), HEIGHT))
    with tempfile.TemporaryDirectory() as folder:
        write_report([run], Path(folder) / "report.html")
        with webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver"))) as page:
            for i, width in enumerate(WIDTHS):
                metrics = {"width": width, "height": HEIGHT, "deviceScaleFactor": 1, "mobile": False}
                page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
                page.get((Path(folder) / "report.html").as_uri())
                if i == 1:
                    page.execute_script(NIGHT)
                picture.paste(Image.open(io.BytesIO(page.get_screenshot_as_png())), (sum(WIDTHS[:i]), 0))
    picture.quantize(256).save(out, optimize=True)  # a third of the bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--demo", nargs="+", metavar="RUN", help="runs of the demo, for demo.png")
    parser.add_argument("--smollm", nargs="+", metavar="RUN", help="runs of runs/smollm.sh, for smollm.png")
    parser.add_argument("--guess", nargs="+", metavar="RUN", help="runs of guess by runs/games.sh, for guess.png")
    parser.add_argument("--games", nargs="+", metavar="RUN", help="runs of other games by runs/games.sh, for games.png")
    parser.add_argument("--lora", type=Path, metavar="FOLDER", help="runs in full, rank1, rank4, rank16, for lora.png")
    parser.add_argument("--lora_smollm", type=Path, metavar="FOLDER", help="the same of SmolLM2, for lora_smollm.png")
    parser.add_argument("--objectives", type=Path, metavar="FOLDER", help="runs of bench/objectives.py")
    parser.add_argument("--report", type=Path, metavar="RUN", help="a run, for report.png")
    args = parser.parse_args()
    for name in ("demo", "smollm", "guess", "games"):
        if folders := getattr(args, name):
            runs = {label: plots.read_metrics(file) for label, file in label_runs(folders).items()}
            plots.plot_runs(runs, HERE / f"{name}.png")
    for name in ("lora", "lora_smollm"):
        if folder := getattr(args, name):
            files = {rank: sorted(folder.glob(f"{rank}/seed=*/metrics.jsonl")) for rank in RANKS}
            runs = {rank: list(map(plots.read_metrics, found)) for rank, found in files.items() if found}
            objectives.draw(runs, HERE / f"{name}.png", "trained (seeds)")
    if args.objectives:
        objectives.draw(objectives.read_runs(args.objectives), HERE / "objectives.png")
    if args.report:
        photograph(args.report, HERE / "report.png")


if __name__ == "__main__":
    main()
