"""Runs that others have made: which settings of a run folder may be taken over without asking.

Settings can run code with the rights of the user: files of Python, and the code of a model if the sandbox is off. Runs
that this user has trained, with these files as they are, are in the user's own list, which no download can change. For
all other runs, such settings must be named on the command line.
"""

import contextlib
import hashlib
import itertools
import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple

from envs.own_code import code_files
from envs.settings import CODE, option_values
from models.checkpoint import find_local
from utils.runs.origin import read_settings
from utils.settings.arguments import Value
from utils.settings.errors import UserError

OWN = "lmpo/own_runs"  # a line for each such setting of a run, in the folder of the user's states


class Setting(NamedTuple):
    """A setting that runs code: the flag, the option of an environment that it sets, and the option's value."""

    flag: str
    option: str
    value: str


def find_run(model_dir: str) -> tuple[str, dict[str, Value]]:
    """Returns the folder and the settings of the first run that one of the models is of; both empty without any.

    The config.json of a run records its origin, and the run holds the model. Raises: UserError if that file is damaged.
    """
    folders = filter(None, [find_local(name.strip()) for name in model_dir.split(",")])
    for path in [path for folder in folders for path in (folder, folder.absolute().parent)]:
        if (path / "best").is_dir() or any(path.glob("step*/")):
            settings, origin = read_settings(path / "config.json")
            if "env_name" in settings and origin:
                return str(path), settings
    return "", {}


def settings_with_code(settings: Mapping[str, Value]) -> list[Setting]:
    """Returns the settings that execute files, or a model's code outside of the sandbox."""
    found = itertools.starmap(Setting, option_values(settings))
    return [x for x in found if x.option in CODE and x.value not in ("", CODE[x.option])]


def check_code(run: str | Path, settings: Mapping[str, Value], taken: Collection[str]) -> None:
    """Raises UserError if one of the settings that are `taken` over executes code, and the run is not the user's."""
    for setting in settings_with_code(settings):
        flag, option, value = setting
        if flag in taken and fingerprint(run, setting) not in own_runs():
            raise UserError(
                f"{run} sets {option}={value}, which runs code with your rights, and this machine has no record that "
                f"you trained the run with that code: if you trust the code, add --{flag} {str(settings[flag])!r}"
            )


def remember_code(run: Path, settings: Mapping[str, Value]) -> None:
    """Records that the user has trained a run with these settings, if they execute code."""
    lines = [fingerprint(run, setting) + "\n" for setting in settings_with_code(settings)]
    if lines:
        with contextlib.suppress(OSError):  # they have to be named then
            own_file().parent.mkdir(parents=True, exist_ok=True)
            with own_file().open("a") as file:
                file.writelines(lines)


def own_file() -> Path:
    """Returns the user's own list."""
    return Path(os.path.expanduser(os.environ.get("XDG_STATE_HOME") or "~/.local/state")) / OWN


def own_runs() -> set[str]:
    """Returns the fingerprints of the settings with which this user has trained runs."""
    try:
        return set(own_file().read_text().split())
    except (OSError, ValueError):
        return set()


def fingerprint(run: str | Path, setting: Setting) -> str:
    """Returns a digest of a run's folder, a setting with code, and the content of its files."""
    parts = [str(Path(run).resolve()), setting.option, setting.value]
    with contextlib.suppress(OSError, ValueError):
        parts += [hashlib.sha256(file.read_bytes()).hexdigest() for file in code_files(setting.value)]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
