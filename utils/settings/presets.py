"""Presets: files of options, as Python with get_config(), YAML or JSON."""

import os
import runpy
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

from utils.settings.checks import read_yaml
from utils.settings.errors import UserError, describe_error, most_similar

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "configs"
DEMO = "configs/demo.py"
TINY = "models/tiny"  # the model of the demo, and the default
Preset: TypeAlias = dict[str, object]  # values by name of option, as the file has them


def list_presets() -> dict[str, str]:
    """Returns the first line of each preset in configs/, its description, by the name of its file."""
    lines = {path.name: path.read_text(encoding="utf-8").partition("\n")[0] for path in sorted(FOLDER.glob("*.py"))}
    return {name: line.strip('"') for name, line in lines.items()}


def read_preset(path: str) -> Preset:
    """Returns the options in a file, which may also be named as from the folder of this repository.

    Raises: UserError when there is no such file, or it holds no names and values.
    """
    file = find_file(path)
    if file.suffix == ".py":
        return run_file(file, path)
    preset = to_mapping(read_yaml(file, path) or {}, path)
    options, _ = split_origin(preset)
    return expand_data_block(options, file)


def demo_of_tiny(options: Mapping[str, object], is_announced: bool = True) -> Preset:
    """Returns the demo's options if no environment is named for models/tiny, which has learned no other."""
    if Path(str(options.get("model_dir", TINY))) != Path(TINY) or "env_name" in options:
        return {}
    if is_announced:
        print(f"{TINY} without --env_name: the defaults are those of --config {DEMO} (--help: the options)")
    return read_preset(DEMO)


def split_origin(settings: Mapping[str, object]) -> tuple[Preset, Preset]:
    """Returns the options in a config.json, and its `run`: the origin of the run."""
    options = dict(settings)
    origin = options.pop("run", None)
    return options, origin if isinstance(origin, dict) else {}


def find_file(path: str) -> Path:
    for candidate in (Path(os.path.expanduser(path)), ROOT / path):
        if candidate.is_file():
            return candidate
    close = most_similar(Path(path).stem, [name.removesuffix(".py") for name in list_presets()])
    hint = f"; did you mean configs/{close}.py?" if close else "."
    raise UserError(f"there is no preset {path} (looked here and in {ROOT}){hint}")


def run_file(file: Path, path: str) -> Preset:
    """Returns the result of a Python file's get_config()."""
    try:
        get_config = runpy.run_path(str(file)).get("get_config")
        if not callable(get_config):
            raise UserError(f"{path} defines no get_config(): write def get_config(): return {{...}}, with options")
        return to_mapping(get_config(), path)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [error.lineno] if isinstance(error, SyntaxError) else []
        lines += [frame.lineno for frame in reversed(frames) if frame.filename == str(file)]
        place = f"{path}, line {lines[0]}" if lines else path
        raise UserError(f"{place}: {describe_error(error)}") from error


def to_mapping(preset: object, path: str) -> Preset:
    if hasattr(preset, "to_dict"):  # an ml_collections.ConfigDict, which is no Mapping
        preset = preset.to_dict()
    if isinstance(preset, Mapping):
        return dict(preset)
    raise UserError(f"{path} must hold names and values, not a {type(preset).__name__}: correct it")


def expand_data_block(preset: Preset, file: Path) -> Preset:
    """Replaces policy-gradients' block `data: {size, specs}` by the environment reasoning_gym."""
    block = preset.get("data")
    if not isinstance(block, Mapping) or "specs" not in block:
        return preset
    env_options = f"datasets={file.resolve()}"  # the environment reads the block from the file
    if "env_options" in preset:
        env_options += f",{preset['env_options']}"
    expanded = {name: value for name, value in preset.items() if name != "data"}
    return expanded | {"env_name": "reasoning_gym", "env_options": env_options}
