"""The model card of a saved model: README.md of its folder, as the Hugging Face hub shows it.

Its text comes from the settings, the environments' names and options, and the metrics: never from completions.
"""

import contextlib
import math
import re
import shlex
import subprocess
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from core.records import Progress
from envs.settings import RolloutSettings
from models.checkpoint import ROOT, find_local
from models.files import CARD, CARD_MARK
from utils.metrics.curves import Curves, by_steps, format_point
from utils.metrics.jsonl import JSON
from utils.runs.segments import RunSegment, describe_segment, last_break, since
from utils.settings.arguments import Value
from utils.settings.checks import hide_passwords, load_yaml
from utils.settings.config import changed_options

GRPO, SFT, DPO = "core/grpo.py", "core/sft.py", "recipes/preferences/dpo.py"  # commands that train
METHODS = {  # command: its name in the title, and tags
    GRPO: ("reinforcement learning", ("grpo", "reinforcement-learning", "lmpo")),
    SFT: ("supervised fine-tuning", ("sft", "lmpo")),
    DPO: ("preferences", ("dpo", "lmpo")),
}
SCORES = ("correct_answer", "return")
COUNTS = ("num_tasks", "num_samples")
LOSS = "test_data/loss"  # metric of core/sft.py and of preferences
DISTRIBUTION = ("temperature", "top_k", "top_p", "min_p")
ORIGIN = ("base_model", "license", "license_name", "license_link")
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
TEMPLATE = """\
---
{mark}
{metadata}---

# {title}

Trained with lmpo, {version}. The command, with all options that change the result:

{command}
{changes}
{settings}

## Held-out scores

{scores}
"""
TABLE = """\
Sampled with the settings above; means over problems with 95% intervals.

| environment | problems | samples of each | score | before | after |
|---|---|---|---|---|---|
"""
OLD_SCORES = "Scores up to step {} are of other data or settings, and left out."
CHANGES = """
These are the settings of the last steps. `--resume force` changed them on the way:

{}
"""
NO_SCORES = "None: the run was not evaluated on held-out problems."


@dataclass(frozen=True)
class ModelCard:
    """Facts about a run that hold for each model that it saves."""

    config_class: type
    settings: Mapping[str, Value]  # all options by name
    environments: Mapping[str, RolloutSettings]  # by role
    script: str = GRPO  # one of METHODS
    segments: Sequence[RunSegment] = ()  # what --resume force changed
    version: str = field(default_factory=lambda: find_version())  # version of lmpo when the run begins

    @property
    def method(self) -> tuple[str, tuple[str, ...]]:
        """Returns the method of the script, and its tags; commands of recipes train as core/grpo.py does."""
        return METHODS.get(self.script, METHODS[GRPO])

    def render(self, progress: Progress, run: Curves) -> str:
        """Returns the card of the model after these steps, with the metrics that the run has logged."""
        name, changes = self.environments["env"].name, "\n".join(map(describe_segment, self.segments))
        card = TEMPLATE.format(
            mark=CARD_MARK,
            metadata=to_yaml(self.metadata()),
            title=f"{name} by {self.method[0]}, step {progress.step}",
            version=self.version,
            command=fenced("sh", training_command(self.config_class, self.settings, self.script)),
            changes=CHANGES.format(fenced("text", changes)) if changes else "",
            settings=fenced("yaml", to_yaml(self.facts(progress))),
            scores=self.scores(run),
        )
        return hide_passwords(card)

    def metadata(self) -> dict[str, JSON]:
        """Returns the front matter, as the hub defines it; a base in a local folder has the name on its card."""
        _, tags = self.method
        library = "peft" if self.settings.get("lora_rank") else "transformers"
        metadata = {"library_name": library, "pipeline_tag": "text-generation", "tags": list(tags)}
        base_model = str(self.settings["model_dir"])
        is_hub_id = HUB_ID.fullmatch(base_model) and not find_local(base_model)
        base = {"base_model": base_model} if is_hub_id else {}
        return find_origin(base_model) | base | metadata

    def facts(self, progress: Progress) -> dict[str, JSON]:
        """Returns the base, steps and sampling of the run, and how training and evaluations are played."""
        facts = {
            "base_model": self.settings["model_dir"],
            "steps": progress.step,
            **({"completions": progress.num_rollouts} if progress.num_rollouts else {}),
            "sampling": {name: self.settings[name] for name in (*DISTRIBUTION, "stop_strings")},
        }
        for role, played in self.environments.items():
            problem = played.env.problem(0)
            facts[role] = {
                "name": played.name,
                "options": dict(played.options),
                "num_generation_tokens": played.max_new_tokens,
                "force_answer_at": played.force_answer_at,
                "thinking": problem.thinking,
                "prefix": problem.prefix,
                "plain": problem.plain,
            }
        return facts

    def scores(self, run: Curves) -> str:
        """Returns a table of the first and the last held-out scores since they are of the same, with their steps."""
        step = last_break(self.segments)
        run = {name: series for name, series in since(run, step).items() if len(series[0])}
        rows, played = [], self.environments.get("test_env")
        for score in SCORES:
            name = f"test_env/{score}"
            if not played or name not in run:
                continue
            steps, _ = run[name]
            counts = [by_steps(run, f"test_env/{count}").get(steps[-1], math.nan) for count in COUNTS]
            cells = [played.name, *(f"{count:.0f}" for count in counts), score, *both_ends(run, name)]
            rows.append(f"| {' | '.join(cells)} |")
        parts = [TABLE + "\n".join(rows)] if rows else []
        if LOSS in run:
            before, after = both_ends(run, LOSS)
            what = "pairs" if self.script == DPO else "replies, nats a token"
            parts.append(f"Loss of held-out {what}, with its 95% interval: {before}, then {after}.")
        if step >= 0:
            parts = [*parts, OLD_SCORES.format(step)]
        return "\n\n".join(parts) or NO_SCORES


def both_ends(run: Curves, name: str) -> list[str]:
    """Returns the first and the last value of a metric as text, with their steps."""
    steps, _ = run[name]
    first, last = (f"{format_point(run, name, index)} (step {steps[index]:.0f})" for index in (0, -1))
    return [first, last if len(steps) > 1 else "not evaluated again"]


def training_command(config_class: type, settings: Mapping[str, Value], script: str = GRPO) -> str:
    """Returns a command that trains this model: options that differ from their defaults and change its results.

    Options of logging and of the machine are left out, and with them all that may hold an address or a password.
    """
    words = ["python", script]
    for name, known in changed_options(config_class, settings).items():
        if not known.resumable:
            words.append(f"--{name}={settings[name]}")
    return shlex.join(words)


def generation_settings(settings: Mapping[str, Value], max_new_tokens: int) -> dict[str, JSON]:
    """Returns how completions were sampled, in the names of generation_config.json; 0 is greedy, and top_k 0 is all."""
    limit = {"max_new_tokens": max_new_tokens}
    if settings["temperature"] == 0:
        return limit | {"do_sample": False}
    return limit | {"do_sample": True} | {name: settings[name] for name in DISTRIBUTION}


def find_origin(base_model: str) -> dict[str, JSON]:
    """Returns base and license that the base model's own card states, in the hub's fields; those that it states."""
    from huggingface_hub import try_to_load_from_cache  # here: so that errors of options are printed at once

    folder = find_local(base_model)
    with contextlib.suppress(OSError, ValueError, TypeError):
        file = folder / CARD if folder else try_to_load_from_cache(base_model, CARD)
        _, metadata, _ = re.split(r"^---\s*$", Path(file).read_text(), maxsplit=2, flags=re.MULTILINE)
        card = dict(load_yaml(metadata, CARD))
        return {name: card[name] for name in ORIGIN if isinstance(card.get(name), str)}
    return {}


def find_version() -> str:
    """Returns the version of lmpo and, in a git checkout, the commit: with "-dirty" if files have changed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    version = f"version {project['version']}"
    if not (ROOT / ".git").exists():  # git would look for a repository in the folders above
        return version
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        commit = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=10, check=True).stdout
        version += f", commit {commit.strip()}"
    return version


def fenced(language: str, text: str) -> str:
    """Returns a code block of Markdown, whose fence is longer than any row of backticks in the text."""
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"


def to_yaml(value: Mapping[str, JSON]) -> str:
    """Returns a value as YAML, in the order of its keys."""
    import yaml  # here, as in utils/settings/checks.py

    return yaml.safe_dump(dict(value), sort_keys=False, allow_unicode=True)
