"""Runs of three steps over the features, whose bits a commit that moves code must not change.

    python tests/test_golden.py                  # makes golden.json anew, for a commit that means to change bits
    python tests/test_golden.py --commit main~1  # runs that commit too, on this CPU, and prints every difference

golden.json holds digests of drawn tokens, of metrics without times, and of the training state. They are of one kind of
CPU and one release of jaxlib, elsewhere bits differ: there the test is skipped, and --commit is what compares.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

if __name__ == "__main__":  # this repository, wherever the command is given
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import jaxlib
import numpy as np
import pytest

from tests.kill_runs import QUICK, ROOT, arguments, checksum, records

STORED = Path(__file__).parent / "golden.json"
FIXTURES = Path("tests/fixtures")
SMALL = {
    "groups_per_batch": 4, "group_size": 4, "ppo_minibatch": 8, "max_steps": 3, "save_interval": 1, "test_interval": 2,
    "num_eval_tasks": 4, "save_rollouts": "all", "num_score_workers": 1,
}  # fmt: skip
TOKENS = {"tokens_per_microbatch": 1024}
DEMO = {"config": "configs/demo.py", "num_generation_tokens": 64, "lr_schedule": "constant"} | TOKENS | SMALL
POEM = {"env_name": "poem", "num_generation_tokens": 24, "lr": 1e-3, "adam_eps": 1e-2} | SMALL
GAMES = {"config": "recipes/games/preset.py", "num_eval_samples": 2} | TOKENS | SMALL
CALCULATOR = {
    "env_name": "calculator", "test_env_name": "calculator-test",
    "env_options": "prompt=bare,dialect=python,max_number=50,max_operations=2",
}  # fmt: skip
CASES = {
    "demo": DEMO,
    "corrected": DEMO | {"kl_coef": 0.05, "ppo_epochs": 2, "importance_correction": "mask", "off_policy_mask": 0.5},
    "truncated": DEMO | {"top_k": 20, "top_p": 0.95, "temperature": 0.8, "advantage": "rloo"},
    "critic": DEMO | {"config": "configs/demo.py,configs/ppo.py", "kl_coef": 0.01, "kl_in": "reward"},
    "dapo": DEMO | {"config": "configs/demo.py,configs/dapo.py", "group_size": 4, "max_resampling": 3.0},
    "forced": DEMO | {"force_answer_at": 12, "objective": "gspo", "loss_normalization": "sequence_mean"},
    "lora": DEMO | {"lora_rank": 4, "lora_merge": "never", "lr": 6e-3},
    "lora_experts": POEM | {"model_dir": FIXTURES / "qwen3moe-tied", "lora_rank": 2},
    "hybrid": POEM | {"model_dir": FIXTURES / "qwen3_5-tied", "objective": "cispo"},
    "windows": POEM | {"model_dir": FIXTURES / "gemma3-tied", "optimizer": "muon"},
    "ahead": DEMO | {"ahead": 1},
    "turns": GAMES | {"advantage": "turn_mean", "lr_schedule": "constant"},
    "calculator": GAMES | CALCULATOR,
    "population": DEMO | {"population": "seed=0,1", "lora_rank": 2, "max_steps": 2},
}
RESUMED = ("demo", "critic", "lora", "ahead", "turns")  # these are stopped after a step and go on
LATENCIES = ("turns", "calculator")  # sampler's log-probabilities depend there on when the environment answers


def play(case: str, folder: Path, root: Path = ROOT) -> dict[str, dict]:
    """Runs a case by the code in `root`; returns tokens, metrics and the state's checksum of each of its runs."""
    flags = CASES[case] | {"save_dir": folder}
    presets = flags.pop("config", "")
    command = "extras/population.py" if "population" in flags else "core/grpo.py"
    configs = [word for preset in presets.split(",") if preset for word in ("--config", preset)]
    stops = [1, flags["max_steps"]] if case in RESUMED else [flags["max_steps"]]
    cache = os.environ.get("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".jax_cache"))
    for stop in stops:
        argv = [*configs, *arguments(**flags | {"max_steps": stop})]
        env = os.environ | QUICK | {"JAX_COMPILATION_CACHE_DIR": cache}
        env["JAX_PLATFORMS"] = "cpu"
        env.pop("XLA_FLAGS", None)  # those of the tests compile other programs
        done = subprocess.run([sys.executable, command, *argv], cwd=root, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    runs = [path.parent for path in sorted(folder.glob("**/metrics.jsonl"))]
    return {str(run.relative_to(folder)): outcome(run, flags["max_steps"], case in LATENCIES) for run in runs}


def outcome(run: Path, num_steps: int, has_latencies: bool) -> dict[str, dict]:
    tokens = {}
    for file in sorted((run / "rollouts").glob("step_*.npz")):
        arrays = np.load(file)
        tokens[file.stem] = digest([arrays["tokens"].tolist(), arrays["mask"].tolist()])
    metrics = {}
    for record in records(run):
        kept = {k: v for k, v in record.items() if not (has_latencies and k.startswith("inference_recompute"))}
        metrics[str(record["global_step"])] = kept
    return {"tokens": tokens, "metrics": metrics, "state": {str(num_steps): checksum(run, num_steps)}}


def digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]


def digests(runs: dict[str, dict]) -> dict[str, dict]:
    """Returns the runs of a case with a digest in place of each part: what golden.json holds."""
    return {name: {part: digest(value) for part, value in parts.items()} for name, parts in runs.items()}


def machine() -> str:
    """Returns the CPU's name and jaxlib's release."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    facts = dict(line.split("\t: ", 1) for line in lines[:30] if "\t: " in line)
    facts = {name.strip(): value for name, value in facts.items()}
    names = "vendor_id", "cpu family", "model"
    return " ".join([*(facts.get(name, "?") for name in names), "jaxlib", jaxlib.__version__])


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_bits_are_those_of_the_stored_runs(case, tmp_path):
    stored = json.loads(STORED.read_text())
    if stored["machine"] != machine():
        pytest.skip(f"golden.json is of {stored['machine']}, this is {machine()}")
    assert digests(play(case, tmp_path)) == stored["cases"][case]


def compare(commit: str, cases: list[str]) -> int:
    """Runs the cases by a commit and by this tree; prints what differs, and returns how many values do."""
    num_different = 0
    with tempfile.TemporaryDirectory() as folder:
        other = Path(folder) / "other"
        subprocess.run(["git", "worktree", "add", "-q", "--detach", other, commit], cwd=ROOT, check=True)
        try:
            for case in cases:
                before, after = (
                    play(case, Path(folder) / name / case, root) for name, root in (("before", other), ("after", ROOT))
                )
                lines = differences(before, after)
                num_different += len(lines)
                print(case, "is equal" if not lines else "differs:", *lines, sep="\n    " if lines else " ", flush=True)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", other], cwd=ROOT, check=True)
    return num_different


def differences(before: object, after: object, path: str = "") -> list[str]:
    """Returns a line for each leaf of two trees of dictionaries that differs."""
    if isinstance(before, dict) and isinstance(after, dict):
        names = [*before, *(name for name in after if name not in before)]
        pairs = [(name, before.get(name, "-"), after.get(name, "-")) for name in names]
        return [line for name, a, b in pairs for line in differences(a, b, f"{path}/{name}")]
    return [] if before == after else [f"{path}: {before} -> {after}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", help="commit to compare with; without it golden.json is made anew")
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    options = parser.parse_args()
    if options.commit:
        sys.exit(f"{num} values differ" if (num := compare(options.commit, options.cases)) else 0)
    with tempfile.TemporaryDirectory() as folder:
        cases = {case: digests(play(case, Path(folder) / case)) for case in CASES}
    STORED.write_text(json.dumps({"machine": machine(), "cases": cases}, indent=1) + "\n")


if __name__ == "__main__":
    main()
