"""Two settings compared over paired seeds: the difference with its interval, and how many seeds a claim needs.

    python bench/ab.py --config configs/demo.py --a "" --b "--lr 1e-3" --seeds 8
    python bench/ab.py --config configs/demo.py --a "" --b "" --seeds 16        # a setting against itself
    python bench/ab.py --runs_a runs/x/seed* --runs_b runs/y/seed*              # stored runs only

Options that --help does not list are options of core/grpo.py, for both sides. Both runs of a seed have the same
problems and the same random numbers. The same command again resumes: finished runs are read, not repeated.
"""

import argparse
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    import utils.settings.packages  # noqa: F401 (says what to install)

import numpy as np
from jaxtyping import Float
from scipy.stats import nct, t, ttest_ind, ttest_rel

from bench.common import ROOT, Figure, report
from core.config import Config
from core.run.folder import settings_of_model
from models.checkpoint import resolve_model_dir
from utils.evaluation.estimates import mean_over_runs
from utils.metrics.curves import by_steps, read_metrics
from utils.runs.origin import read_settings
from utils.runs.resume import check_settings
from utils.settings.config import options_of, parse, to_dict
from utils.settings.errors import UserError, user_errors
from utils.settings.lmpo import LMPO

LEVEL, POWER = 0.95, 0.8  # of intervals; chance that the interval of a true difference leaves out 0
FEWEST_SEEDS, MOST_SEEDS = 3, 1000
REPEATS = 10  # of a setting against itself
Scores = Float[np.ndarray, "n"]  # a run's last value of the metric, one of each seed


class Difference(NamedTuple):
    """Mean of b - a, the ends of its 95% interval, and the deviation of b - a of one seed."""

    mean: float
    low: float
    high: float
    deviation: float

    @property
    def verdict(self) -> str:
        return "b is higher" if self.low > 0 else "b is lower" if self.high < 0 else "no difference"


def compare(a: Scores, b: Scores, is_paired: bool) -> Difference:
    """Returns the difference of two sides with Student's interval over pairs, or with Welch's over unpaired runs."""
    mean = float(b.mean() - a.mean())
    variance = np.var(b - a, ddof=1) if is_paired else np.var(a, ddof=1) + np.var(b, ddof=1)
    if variance < 1e-24:  # all runs are equal, but for the rounding of their differences
        return Difference(mean, mean, mean, 0.0)
    test = ttest_rel(b, a) if is_paired else ttest_ind(b, a, equal_var=False)
    low, high = test.confidence_interval(LEVEL)
    return Difference(mean, float(low), float(high), float(variance**0.5))


def seeds_needed(size: float, deviation: float, is_paired: bool) -> int | None:
    """Returns the fewest seeds a side with which a true difference of this size is found in 80% of comparisons.

    `deviation` is that of b - a of one seed, or of two unpaired runs. None: more than MOST_SEEDS. The power is that of
    the two-sided t test at 5%, by the noncentral t distribution.
    Source: Cohen 1988, Statistical Power Analysis for the Behavioral Sciences, chapter 2.
    """
    if not deviation:
        return FEWEST_SEEDS
    seeds = np.arange(FEWEST_SEEDS, MOST_SEEDS + 1)
    freedom = seeds - 1 if is_paired else 2 * seeds - 2
    edge = t.ppf((1 + LEVEL) / 2, freedom)
    is_found = nct.sf(edge, freedom, abs(size) / deviation * seeds**0.5) >= POWER
    return int(seeds[is_found.argmax()]) if is_found.any() else None


def against_itself(scores: Scores) -> list[Difference]:
    """Returns differences of random halves of one setting's runs: other seeds on each side."""
    rng, half = np.random.default_rng(0), len(scores) // 2
    orders = [rng.permutation(scores) for _ in range(REPEATS)]
    return [compare(order[:half], order[half : 2 * half], is_paired=False) for order in orders]


class Side(NamedTuple):
    """A setting: its options behind those of both sides, and the folder of its runs."""

    options: list[str]
    folder: Path

    def arguments(self, seed: int) -> list[str]:
        return [*self.options, "--seed", str(seed), "--save_dir", str(self.folder / f"seed{seed}")]

    def run(self, seed: int, metric: str) -> Path:
        """Returns the folder of a seed's run; runs or resumes it if it has not reached its last step.

        Raises: UserError if the folder holds a run with other settings, or the run fails.
        """
        folder = self.folder / f"seed{seed}"
        config = parse(Config, self.arguments(seed), spellings=LMPO, implied=settings_of_model)
        if (folder / "config.json").is_file():
            settings = to_dict(config) | {"model_dir": resolve_model_dir(config.model_dir)}
            check_settings(folder / "config.json", settings, "auto", options_of(Config))
            if config.max_steps in by_steps(read_metrics(folder / "metrics.jsonl"), metric):
                return folder
        clock = time.monotonic()
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / f"seed{seed}.txt").open("a") as out:
            command = [sys.executable, "core/grpo.py", *self.arguments(seed)]
            status = subprocess.run(command, cwd=ROOT, stdout=out, stderr=out).returncode
        if status:
            raise UserError(f"the run in {folder} ended with status {status}: read {out.name}, then repeat the command")
        print(f"{folder}: {time.monotonic() - clock:.0f} s", flush=True)
        return folder


def folder_name(options: str) -> str:
    """Returns a name for a side's folder: its options without characters that a file name should not have."""
    return re.sub(r"(?:[^\w.=,+-]|--)+", "=", options).strip("=") or "base"


def read_scores(folders: Sequence[Path], metric: str) -> dict[int, float]:
    """Returns each run's last value of the metric, by the run's seed. Raises: UserError if a run has none."""
    scores = {}
    for folder in folders:
        values = by_steps(read_metrics(folder / "metrics.jsonl"), metric)
        settings, _ = read_settings(folder / "config.json")
        if not values or "seed" not in settings:
            raise UserError(
                f"{folder} has no value of {metric}, or no seed: name folders of finished runs, or --metric"
            )
        scores[settings["seed"]] = values[max(values)]
    return scores


def describe_origin(folders: Sequence[Path]) -> dict[str, str]:
    """Returns the commits and CPUs of runs."""
    origins = [read_settings(folder / "config.json")[1] for folder in folders]
    return {name: "; ".join(sorted({str(x.get(name)) for x in origins})) for name in ("lmpo", "cpu")}


def difference_row(name: str, found: Difference, sizes: Sequence[float], is_paired: bool) -> list[Figure]:
    """Returns the row of a comparison: difference, interval, verdict, deviation, seeds for each size of a claim."""
    seeds = [seeds_needed(size, found.deviation, is_paired) or f"> {MOST_SEEDS:,}" for size in (found.mean, *sizes)]
    interval = f"[{found.low:+.3f}, {found.high:+.3f}]"
    return [name, f"{found.mean:+.3f}", interval, found.verdict, f"{found.deviation:.3f}", *seeds]


def print_comparison(
    a: dict[int, float], b: dict[int, float], sizes: Sequence[float], machine: dict[str, str], file: str
) -> None:
    """Prints the scores of each seed, and both comparisons."""
    seeds = sorted(a.keys() & b.keys())
    if max(len(seeds), min(len(a), len(b))) < FEWEST_SEEDS:
        raise UserError(f"an interval needs {FEWEST_SEEDS} runs a side, and there are fewer: raise --seeds")
    rows = [[str(seed), f"{a[seed]:.3f}", f"{b[seed]:.3f}", f"{b[seed] - a[seed]:+.3f}"] for seed in seeds]
    sides = [mean_over_runs("mean", np.array(list(side.values()))) for side in (a, b)]
    means = [f"{side['mean']:.3f} ± {side.get('mean_ci', np.nan):.3f}" for side in sides]
    report("Last score of each run", ("seed", "a", "b", "b - a"), [*rows, ["mean", *means, ""]], machine)
    needed = ("seeds for it", *(f"for {size:g}" for size in sizes))
    unpaired = compare(np.array(list(a.values())), np.array(list(b.values())), is_paired=False)
    rows = [difference_row(f"unpaired, {len(a)} and {len(b)}", unpaired, sizes, is_paired=False)]
    if len(seeds) >= FEWEST_SEEDS:
        x, y = (np.array([side[seed] for seed in seeds]) for side in (a, b))
        paired = compare(x, y, is_paired=True)
        rows.insert(0, difference_row(f"paired, {len(seeds)}", paired, sizes, is_paired=True))
    title = f"Difference, and the seeds a side with which {POWER:.0%} of comparisons find a true one of this size"
    columns = ("runs", "b - a", "95% interval", "verdict", "deviation", *needed)
    report(title, columns, rows, machine, file, scores={"a": a, "b": b})


def print_against_itself(scores: dict[int, float], machine: dict[str, str], file: str) -> None:
    """Prints what comparisons of random halves of one setting's runs find."""
    if len(scores) < 2 * FEWEST_SEEDS:
        raise UserError(f"a setting against itself needs {2 * FEWEST_SEEDS} runs, not {len(scores)}: raise --seeds")
    found = against_itself(np.array(list(scores.values())))
    rows = [[i + 1, f"{x.mean:+.3f}", f"[{x.low:+.3f}, {x.high:+.3f}]", x.verdict] for i, x in enumerate(found)]
    title = f"A setting against itself: random halves of {len(scores)} runs"
    report(title, ("repeat", "b - a", "95% interval", "verdict"), rows, machine, file)
    print(f"\nno difference in {sum(x.verdict == 'no difference' for x in found)} of {len(found)}")


def main(argv: Sequence[str] | None = None) -> None:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form, allow_abbrev=False)
    parser.add_argument("--a", default="", help="options of side a")
    parser.add_argument("--b", default="", help="options of side b")
    parser.add_argument("--seeds", type=int, default=8, help="number of seeds a side: 0, 1, ...")
    parser.add_argument("--dir", type=Path, default="runs/ab", help="folder of the runs")
    parser.add_argument("--runs_a", type=Path, nargs="+", help="folders of stored runs; nothing is run")
    parser.add_argument("--runs_b", type=Path, nargs="+", help="stored runs of side b")
    parser.add_argument("--metric", default="test_env/correct_answer", help="metric to compare: its last value")
    parser.add_argument("--claims", default="0.01,0.02,0.05", help="sizes of differences, with commas between")
    parser.add_argument("--json", default="", help="file for the figures; empty: not written")
    options, both = parser.parse_known_args(argv)
    if bool(options.runs_a) != bool(options.runs_b) or options.runs_a and both:
        raise UserError("stored runs have two sides and no options: give --runs_a and --runs_b, and leave out others")
    folders = [options.runs_a, options.runs_b]
    if not options.runs_a:
        root = options.dir.resolve()
        sides = [Side([*both, *shlex.split(text)], root / folder_name(text)) for text in (options.a, options.b)]
        for side in sides:  # a mistake in an option of either side is found before the first run
            parse(Config, side.arguments(0), spellings=LMPO, implied=settings_of_model)
        fewest = FEWEST_SEEDS * (2 if sides[0].folder == sides[1].folder else 1)
        if options.seeds < fewest:
            raise UserError(f"--seeds {options.seeds} is too few for an interval: give {fewest} or more")
        found = [[side.run(seed, options.metric) for side in sides] for seed in range(options.seeds)]
        folders = list(zip(*found, strict=True))
    a, b = (read_scores(side, options.metric) for side in folders)
    machine = describe_origin([*folders[0], *folders[1]])
    if set(folders[0]) == set(folders[1]):
        print_against_itself(a, machine, options.json)
    else:
        sizes = [float(x) for x in options.claims.split(",")]
        print_comparison(a, b, sizes, machine, options.json)


if __name__ == "__main__":
    with user_errors():
        main()
