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
from dataclasses import dataclass
from pathlib import Path

from core.records import Progress
from envs.settings import RolloutSettings
from models.checkpoint import ROOT, find_local
from models.files import CARD, CARD_MARK
from utils.metrics.curves import Curves, format_point
from utils.metrics.jsonl import JSON
from utils.runs.origin import RunSegment, describe_segment, last_break, since
from utils.settings.arguments import Value
from utils.settings.checks import hide_passwords
from utils.settings.config import changed_options, options_of

GRPO, SFT, DPO = "core/grpo.py", "core/sft.py", "recipes/preferences/dpo.py"  # commands that train
METHODS = {  # command: its name in the title, tags, and the curve on which changes by --resume force are marked
    GRPO: ("reinforcement learning", ("grpo", "reinforcement-learning", "lmpo"), "env/return"),
    SFT: ("supervised fine-tuning", ("sft", "lmpo"), "data/loss"),
    DPO: ("preferences", ("dpo", "lmpo"), "data/loss"),
}
SCORES = ("correct_answer", "return")
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

```sh
{command}
```

{changes}## Held-out scores

{scores}
"""
TABLE = """\
Means with 95% intervals, sampled with the settings of the command:

| score | before | after |
|---|---|---|
"""
OLD_SCORES = "Scores up to step {} were measured with other data or settings and are omitted."
CHANGES = "These are the settings of the last steps. `--resume force` changed them on the way:\n\n```text\n{}\n```\n\n"
NO_SCORES = "None: the run was not evaluated on held-out problems."


@dataclass(frozen=True)
class ModelCard:
    """Facts about a run that hold for each model that it saves."""

    config_class: type
    settings: Mapping[str, Value]  # all options by name
    environments: Mapping[str, RolloutSettings]  # by role
    script: str = GRPO  # one of METHODS, or a command of a recipe, which trains as core/grpo.py does
    segments: Sequence[RunSegment] = ()  # what --resume force changed
    version: str = ""  # of lmpo when the run begins

    def render(self, progress: Progress, run: Curves) -> str:
        """Returns the card of the model after these steps, with the metrics that the run has logged."""
        method, tags, _ = METHODS.get(self.script, METHODS[GRPO])
        changes = "\n".join(map(describe_segment, self.segments))
        card = TEMPLATE.format(
            mark=CARD_MARK,
            metadata=self.metadata(tags),
            title=f"{self.environments['env'].name} by {method}, step {progress.step}",
            version=self.version,
            command=training_command(self.config_class, self.settings, self.script),
            changes=CHANGES.format(changes) if changes else "",
            scores=self.scores(run),
        )
        return hide_passwords(card)

    def metadata(self, tags: Sequence[str]) -> str:
        """Returns the front matter, as the hub defines it; a base in a local folder has the name on its card."""
        import yaml  # here, as in utils/settings/checks.py

        base_model = str(self.settings["model_dir"])
        metadata = find_origin(base_model)
        if HUB_ID.fullmatch(base_model) and not find_local(base_model):
            metadata["base_model"] = base_model
        metadata["library_name"] = "peft" if self.settings.get("lora_rank") else "transformers"
        metadata |= {"pipeline_tag": "text-generation", "tags": list(tags)}
        return yaml.safe_dump(metadata, sort_keys=False, allow_unicode=True)

    def scores(self, run: Curves) -> str:
        """Returns a table of the first and the last held-out scores since they are of the same, with their steps."""
        step = last_break(self.segments)
        run = since(run, step)
        played = self.environments.get("test_env")
        _, counts = run.get("test_env/num_tasks", ((), ()))
        of = f"{played.name} ({[math.nan, *counts][-1]:.0f} problems)" if played else ""
        names = {f"test_env/{score}": f"{of}: {score}" for score in SCORES} if played else {}
        names[LOSS] = f"loss of held-out {'pairs' if self.script == DPO else 'replies, nats a token'}"
        rows = []
        for name, shown in names.items():
            if name in run:
                steps, _ = run[name]
                first, last = (f"{format_point(run, name, i)} (step {steps[i]:.0f})" for i in (0, -1))
                rows.append(f"| {shown} | {first} | {last if len(steps) > 1 else 'not evaluated again'} |")
        parts = [TABLE + "\n".join(rows)] * bool(rows) + [OLD_SCORES.format(step)] * (step >= 0)
        return "\n\n".join(parts) or NO_SCORES


def training_command(config_class: type, settings: Mapping[str, Value], script: str = GRPO) -> str:
    """Returns a command that trains this model: options that differ from their defaults and change its results.

    Options of logging and of the machine are left out, and with them all that may hold an address or a password.
    """
    named = {"env_name", *changed_options(config_class, settings)}  # without it, models/tiny would train the demo
    options = [known for name, known in options_of(config_class).items() if name in named and not known.resumable]
    return shlex.join(["python", script, *(f"--{known.name}={settings[known.name]}" for known in options)])


def generation_settings(settings: Mapping[str, Value], max_new_tokens: int) -> dict[str, JSON]:
    """Returns how completions were sampled, in the names of generation_config.json; 0 is greedy, and top_k 0 is all."""
    limit = {"max_new_tokens": max_new_tokens}
    if settings["temperature"] == 0:
        return limit | {"do_sample": False}
    return limit | {"do_sample": True} | {name: settings[name] for name in DISTRIBUTION}


def find_origin(base_model: str) -> dict[str, JSON]:
    """Returns base and license that the base model's own card states, in the hub's fields; those that it states."""
    from huggingface_hub import metadata_load, try_to_load_from_cache  # here: errors of options come at once

    folder = find_local(base_model)
    file = folder / CARD if folder else try_to_load_from_cache(base_model, CARD)
    if not isinstance(file, str | Path) or not Path(file).is_file():
        return {}
    with contextlib.suppress(Exception):  # of YAML, for a card that is not as the hub defines it
        card = metadata_load(file) or {}
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
