"""Comparison of a run's settings and data with those of the run that it resumes."""

from collections.abc import Collection, Mapping
from pathlib import Path

from utils.metrics.jsonl import JSON, read_json
from utils.runs.origin import read_settings
from utils.settings.arguments import WERE_ON, Value
from utils.settings.config import OptionField
from utils.settings.errors import UserError

MOST_CHANGES = 5  # that a sentence names
LENGTH = {"max_steps", "num_epochs"}  # may change too, unless the learning rate is on its way to 0 at the end


def check_settings(
    file: Path, settings: Mapping[str, Value], resume: str, options: Mapping[str, OptionField]
) -> list[str]:
    """Compares the settings with those in `file`, of the run that is resumed; returns each change in words.

    Resumable `options` may differ: devices, speed and files of a run. All others change its results.

    Raises: UserError naming the settings that give the run another meaning, unless `resume` is "force".
    """
    if resume == "never":
        raise UserError(f"--resume never is given, but {file.parent} holds a run: name another --save_dir")
    before, _ = read_settings(file)
    if not before:
        return []
    free = LENGTH if settings["lr_schedule"] == "constant" else ()
    changes = changed_settings(before, settings, options, free)
    advice = "continue with the old ones, give --resume force, or name another --save_dir"
    if changes.keys() & LENGTH:
        advice += f" (--lr_schedule {settings['lr_schedule']} was computed for the run's original end)"
    lines = [f"--{name} is {new!r} now and was {old!r}" for name, (old, new) in changes.items()]
    gone = [name for name in sorted(before.keys() - settings.keys()) if bool(before[name]) != (name in WERE_ON)]
    lines += [f"{name} was {before[name]!r} and is not an option of this version" for name in gone]
    return refuse_changes(file.parent, "settings", lines, resume, advice)


def changed_settings(
    before: Mapping[str, JSON], settings: Mapping[str, Value], options: Mapping[str, OptionField], free: Collection[str]
) -> dict[str, list[JSON]]:
    """Returns the old and the new value of each setting that differs, but for resumable and `free` ones.

    A setting that `before` lacks had its default: the option is newer than the run.
    """
    old = {name: known.default for name, known in options.items()} | dict(before)
    return {
        name: [old[name], value]
        for name, value in settings.items()
        if name not in free and not options[name].resumable and comparable(old[name]) != comparable(value)
    }


def check_data(file: Path, fingerprints: Mapping[str, str], resume: str, old_ones: str = "data") -> list[str]:
    """Compares with the fingerprints in `file`, of the run that is resumed; returns each change in words.

    Environments that it lacks are new. `old_ones`: what is to be used again, in the advice.
    Raises: UserError naming what has changed, unless `resume` is "force".
    """
    old = read_json(file) if file.exists() else {}
    lines = [f"{name} is {new} and was {old[name]}" for name, new in fingerprints.items() if old.get(name, new) != new]
    advice = f"use the old {old_ones}, --resume force, or another --save_dir"
    return refuse_changes(file.parent, "data", lines, resume, advice)


def refuse_changes(folder: Path, noun: str, changes: list[str], resume: str, advice: str) -> list[str]:
    """Raises UserError if a run has changed since it was saved; prints and returns the changes under "force"."""
    rest = f"; and {len(changes) - MOST_CHANGES} more" if len(changes) > MOST_CHANGES else ""
    text = "; ".join(changes[:MOST_CHANGES]) + rest
    if changes and resume != "force":
        raise UserError(f"{folder} holds a run with other {noun}, {text}: {advice}")
    if changes:
        print(f"warning: the run continues with other {noun}:", text)
    return changes


def comparable(value: Value) -> Value:
    """Returns a setting as it is compared: a folder may be written with a slash at its end."""
    return value.rstrip("/") if isinstance(value, str) else value
