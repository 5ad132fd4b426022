"""Starts, kills and compares small runs: metrics but for times, parameters and optimizer state."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

ROOT = Path(__file__).resolve().parent.parent
QUICK = {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}  # compilation would be nearly all of the time
FLAGS = {
    "model_dir": ROOT / "tests" / "fixtures" / "qwen3-tied",
    "env_name": "poem",
    "groups_per_batch": 2,
    "group_size": 4,
    "ppo_minibatch": 4,
    "num_generation_tokens": 24,
    "tokens_per_microbatch": 256,
    "max_steps": 20,
    "save_interval": 2,
    "lr": 1e-3,
    "test_env_name": "poem-test",
    "test_interval": 4,
    "num_eval_tasks": 2,
    "num_eval_samples": 4,
    "do_group_filter": 0,
    "num_score_workers": 1,
    # Steps of Adam that follow the size of the gradient: with its own epsilon, the sign of a rounding error is one.
    "adam_eps": 1e-2,
}
HALF_WRITTEN = {"state": "state/*.orbax-checkpoint-tmp*", "model": ".step*.new"}


def virtual_devices(number: int) -> dict[str, str]:
    """Returns the environment of a process that sees so many CPU devices, besides the user's own flags."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={number}"
    return {"XLA_FLAGS": flags.strip(), "JAX_PLATFORMS": "cpu"}


def arguments(**flags) -> list[str]:
    return [word for name, value in flags.items() for word in (f"--{name}", str(value))]


def start(
    argv: list[str], env: dict[str, str] | None = None, script: str = "core/grpo.py", **options
) -> subprocess.Popen:
    command = [sys.executable, str(ROOT / script), *argv]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, env=QUICK | os.environ | (env or {}), **pipes | options)


def reproducible(metrics: dict) -> dict:
    """What equal runs agree on, on any devices: all but what was measured, and what pages of a cache make anew."""
    measured = ("times/", "speed/", "compile/", "memory/", "rollout/recomputed")
    return {k: v for k, v in metrics.items() if not k.startswith(measured) and "per_second" not in k}


def records(folder: Path) -> list[dict]:
    """metrics.jsonl, but for what the clock decides and for half a line at its end."""
    text = (folder / "metrics.jsonl").read_text() if (folder / "metrics.jsonl").exists() else ""
    found = map(json.loads, text[: text.rfind("\n") + 1].splitlines())
    return [reproducible(record) for record in found]


def reached(folder: Path) -> int:
    return max((r["global_step"] for r in records(folder)), default=-1)


def checksum(folder: Path, step: int) -> int:
    """That of the training state: all bits of parameters and optimizer, and the progress."""
    (file,) = (path for path in (folder / "state" / str(step) / "progress").iterdir() if path.name == "metadata")
    return json.loads(file.read_text())["checksum"]


def half_written(folder: Path, except_for: Collection = ()) -> dict[tuple[str, int], str]:
    """What is being written, or was when a try was killed: (name, inode) -> kind."""
    found = {}
    for kind, pattern in HALF_WRITTEN.items():
        for path in folder.glob(pattern):
            with contextlib.suppress(FileNotFoundError):
                found[path.name, path.stat().st_ino] = kind
    return {key: kind for key, kind in found.items() if key not in except_for}


def kill_at(process: subprocess.Popen, folder: Path, moment: str, steps: int, delay: float, how=signal.SIGKILL) -> str:
    """Kills the run while it writes a "state" or a "model", or `delay` seconds after it is `steps` on ("step").

    Returns what was half-written then; "finished" where the run was quicker.
    """
    goal = reached(folder) + steps
    old = half_written(folder).keys()
    deadline = time.monotonic() + 300
    while process.poll() is None and time.monotonic() < deadline:
        if moment == "step" and reached(folder) >= goal:
            time.sleep(delay)
            break
        if moment in half_written(folder, except_for=old).values():
            break
        time.sleep(0.0005)
    if process.poll() is not None:
        return "finished"
    process.send_signal(how)
    process.wait()
    return ", ".join(name for name, _ in half_written(folder, except_for=old)) or "nothing"


def finish(argv: list[str], env: dict[str, str] | None = None) -> None:
    process = start(argv, env)
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output


def difference(found: Path, expected: Path, step: int) -> float:
    """The largest difference of metrics and of parameters, relative to 1 + their size."""
    worst = 0.0
    pairs = list(zip(records(found), records(expected), strict=True))
    models = [load_file(folder / f"step{step}" / "model.safetensors") for folder in (found, expected)]
    for a, b in [*pairs, tuple(models)]:
        assert a.keys() == b.keys()
        for name in a:
            x, y = (np.asarray(each[name], float) for each in (a, b))
            worst = max(worst, float(np.max(np.abs(x - y) / (1 + np.abs(y)), initial=0)))
    return worst
