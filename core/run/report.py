"""The report of a run, and what it prints at its start and end: steps, the verdict, commands for the model."""

import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from core.records import Progress
from core.run.folder import RunFolder
from core.run.stop import STOPPED
from envs.settings import EnvConfig, as_held_out, code_settings
from utils.metrics.curves import read_metrics
from utils.reporting.page import held_out_scores, judge_segment, write_report
from utils.reporting.verdict import made_no_update
from utils.runs.origin import RunSegment
from utils.settings.arguments import Value
from utils.settings.config import options_of
from utils.settings.errors import counted

PYTHON = "python" if shutil.which("python") == sys.executable else sys.executable  # as a shell finds it
MANY_TOKENS_ON_CPU = 1 << 18  # tokens of a step: minutes of sampling for models/tiny on two cores


def describe_steps(folder: RunFolder, max_new_tokens: int) -> list[str]:
    """Returns the steps, rollouts and tokens of the run in a line, and on CPUs advice if there are many."""
    settings = folder.settings
    num_prompts, group_size = settings["groups_per_batch"], settings["group_size"]
    num_tokens = num_prompts * group_size * max_new_tokens
    rollouts = f"{counted(num_prompts * group_size, 'rollout')} ({counted(num_prompts, 'prompt')} x {group_size})"
    steps = counted(settings["max_steps"], "step")
    lines = [f"{steps} of {rollouts}, up to {num_tokens:,} tokens a step"]
    if folder.layout.is_cpu and num_tokens >= MANY_TOKENS_ON_CPU:
        lines.append("such steps take long on a CPU: --config configs/cpu.py makes them smaller, and fewer")
    return lines


def draw_report(folder: Path) -> None:
    """Draws report.html anew."""
    try:
        write_report([folder], folder / "report.html")
    except Exception as error:  # noqa: BLE001 (it can be written later, and must not stop a run)
        print(f"warning: report.html was not written ({type(error).__name__}: {error})", flush=True)


def describe_end(folder: RunFolder, progress: Progress, segments: Sequence[RunSegment]) -> list[str]:
    """Returns the report's verdict, the paths of model and report, and commands for the model."""
    metrics, model = read_metrics(folder.path / "metrics.jsonl"), str(folder.path / f"step{progress.step}")
    lines = [judge_segment(metrics, held_out_scores(folder.path / "rollouts"), segments)["text"]]
    if rule := progress.memory.get(STOPPED):
        lines[0] += f" --stop_at {rule} ended the run at step {progress.step}."
    if made_no_update(metrics):
        lines.append(f"no update was made: the saved model is {folder.model_dir}, unchanged")
    lines += [f"model: {model}", f"curves and completions: {folder.path / 'report.html'}"]
    return [*lines, *next_commands(model, folder.settings)]


def next_commands(model: str, settings: Mapping[str, Value]) -> list[str]:
    """Returns commands for a trained model: a chat, and its scores.

    A run without an environment has no scores: core/eval.py would take its default environment.
    """
    root = Path(os.path.relpath(Path(__file__).parents[2]))
    commands = {"chat:": ("core/sampling.py", "--ckpt_dir", model)}
    if settings["env_name"]:
        played = {name: value for name, value in as_held_out(settings).items() if name in options_of(EnvConfig)}
        commands["evaluate:"] = ("core/eval.py", "--model_dir", model, *words_of(code_settings(played)))
    lines = {name: shlex.join([PYTHON, str(root / file), *rest]) for name, (file, *rest) in commands.items()}
    return [f"{name:<14}{line}" for name, line in lines.items()]


def resuming_command(folder: RunFolder) -> str:
    """Returns the command that resumes the run, in words if it is the one that began it."""
    if folder.config.save_dir:
        return "the same command"
    path = str(folder.path)
    arguments = [PYTHON, os.path.abspath(sys.argv[0]), "--config", f"{path}/config.json", "--save_dir", path]
    arguments += ["--resume", "auto"] if folder.config.resume == "never" else []
    return f"`{shlex.join([*arguments, *words_of(code_settings(folder.settings))])}`"


def words_of(settings: Mapping[str, str]) -> list[str]:
    """Returns settings as words of a command."""
    return [word for name, value in settings.items() for word in (f"--{name}", value)]
