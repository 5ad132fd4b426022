"""Settings: a frozen dataclass is the list of command-line options, their documentation, and what a preset may set.

    python core/grpo.py --config configs/countdown.py --lr 2e-6 --do_group_filter 0

A script reads its own with `config, explicit = parse(Config, sys.argv[1:])`.
"""

import dataclasses
import difflib
import os
import runpy
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from absl import flags

from utils.settings.errors import UserError, fail

Config = TypeVar("Config")
ROOT = Path(__file__).resolve().parents[2]
BOOLEANS = ("0", "1", "true", "false")


def option(default: bool | int | float | str, help: str, choices: Sequence[str] | None = None) -> Any:
    """A field of a settings dataclass: its default, what it does (with its unit), and the values it may have."""
    return dataclasses.field(default=default, metadata={"help": help, "choices": choices})


def to_dict(config: Any) -> dict[str, Any]:
    """All settings by name, ready for JSON, and accepted by `--config` when written to a file."""
    return dataclasses.asdict(config)


def parse(
    config_class: type[Config],
    argv: Sequence[str],
    description: str = "",
    aliases: Mapping[str, str] = {},
    default_preset: str | None = None,
) -> tuple[Config, set[str]]:
    """The settings of a command line (without the program's name), and the names that it or its preset set explicitly.

    The command line beats the preset (`--config FILE`), and the preset beats the defaults. An empty command line means
    `--config default_preset` where there is one. `aliases` maps other accepted spellings to names of fields. What is
    unknown or malformed, and each ValueError of the class itself, ends the program with `fail`.
    """
    values = make_flags(config_class)
    if {"-h", "--help", "--helpfull"} & set(argv):
        try:
            print(help_text(config_class, description), flush=True)
        except BrokenPipeError:  # the reader may be `head`; what is still in the buffer goes nowhere
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(0)
    if default_preset and not argv:
        print(f"No options given: using --config {default_preset} (--help lists all options).")
        argv = ["--config", default_preset]
    try:
        assignments = read_arguments(argv, values, aliases)
        presets = [path for name, path in assignments if name == "config"]
        for path in presets:
            for name, value in read_preset(path).items():
                assign(values, aliases.get(name, name), value, f"{name}={value!r} in {path}")
        for name, value in assignments:
            if name != "config":
                assign(values, name, value, f"--{name}={value}")
        explicit = {name for name in values if values[name].present}
        return config_class(**{name: values[name].value for name in explicit}), explicit
    except ValueError as error:
        fail(str(error))


def make_flags(config_class: type) -> flags.FlagValues:
    """One absl flag for each field, apart from the flags of absl, jax and others that live in `absl.flags.FLAGS`."""
    parsers = {
        bool: flags.BooleanParser, int: flags.IntegerParser, float: flags.FloatParser, str: flags.ArgumentParser
    }  # fmt: skip
    values = flags.FlagValues()
    for field in dataclasses.fields(config_class):
        assert field.type in parsers, f"{field.name}: a setting is a bool, int, float or str, not {field.type}"
        help, choices = documentation(config_class, field.name)
        parser = flags.EnumParser(choices, case_sensitive=False) if choices else parsers[field.type]()
        flags.DEFINE(parser, field.name, field.default, help, flag_values=values)
    return values


def documentation(config_class: type, name: str) -> tuple[str, Sequence[str] | None]:
    """Help and choices of a field; a subclass may give the field another default (`lr: float = 1e-5`) and keep both."""
    fields = [vars(cls).get("__dataclass_fields__", {}).get(name) for cls in config_class.__mro__]
    metadata = next((field.metadata for field in fields if field and field.metadata), {})
    return metadata.get("help", ""), metadata.get("choices")


def read_arguments(argv: Sequence[str], values: flags.FlagValues, aliases: Mapping[str, str]) -> list[tuple[str, str]]:
    """Split a command line into names and values.

    absl could, but knows neither lmpo's `--do_group_filter 0` for a boolean nor dashes for underscores.
    """
    found, rest = [], list(argv)
    while rest:
        argument = rest.pop(0)
        if not argument.startswith("-"):
            raise UserError(f"{argument!r} belongs to no option: options are written --name value.")
        name, equals, value = argument.lstrip("-").partition("=")
        name = name.replace("-", "_")
        name = aliases.get(name, name)
        if name not in values and name.startswith("no") and is_boolean(values, name[2:]):
            name, equals, value = name[2:], "=", "false"
        if name != "config" and name not in values:
            raise UserError(f"there is no option --{name}{nearest(name, ['config', *values])}")
        if not equals and is_boolean(values, name):
            value = rest.pop(0) if rest and rest[0].lower() in BOOLEANS else "true"
        elif not equals:
            if not rest or rest[0].startswith("--"):
                raise UserError(f"--{name} needs a value.")
            value = rest.pop(0)
        found.append((name, value))
    return found


def read_preset(path: str) -> dict[str, Any]:
    """The settings in a Python file with `get_config()` or in a YAML (or JSON) file, as written there."""
    candidates = [Path(path).expanduser(), ROOT / path]
    file = next((candidate for candidate in candidates if candidate.is_file()), None)
    if file is None:
        raise UserError(f"there is no preset {path} (looked here and in {ROOT}).")
    if file.suffix == ".py":
        names = runpy.run_path(str(file))
        if "get_config" not in names:
            raise UserError(f"{path} defines no get_config().")
        preset = names["get_config"]()
    else:
        import yaml

        try:
            preset = yaml.safe_load(file.read_text()) or {}
        except yaml.YAMLError as error:
            raise UserError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(preset, Mapping):
        try:
            preset = preset.to_dict()  # an ml_collections.ConfigDict
        except AttributeError:
            raise UserError(f"{path} must hold names and values, not a {type(preset).__name__}.") from None
    return with_data_block(dict(preset), file) if file.suffix != ".py" else dict(preset)


def with_data_block(preset: dict[str, Any], file: Path) -> dict[str, Any]:
    """Returns the settings with policy-gradients' block `data: {size, specs}` as the environment reasoning_gym."""
    block = preset.get("data")
    if not isinstance(block, Mapping) or "specs" not in block:
        return preset
    others = {name: value for name, value in preset.items() if name != "data"}
    options = f"datasets={file.resolve()}"  # the environment reads the block from the file
    if "env_options" in others:
        options = f"{options},{others['env_options']}"
    return others | {"env_name": "reasoning_gym", "env_options": options}


def assign(values: flags.FlagValues, name: str, value: Any, source: str) -> None:
    """Set one flag, converting the value by its type; `source` is how the user wrote it."""
    if name not in values:
        raise UserError(f"{source}: there is no option {name}{nearest(name, values)}")
    flag = values[name]
    kind = "text" if flag.flag_type() == "string" else flag.flag_type()
    if kind == "text" and not isinstance(value, str):  # YAML reads a bare `off` or `1` as something else
        raise UserError(f"{source}: {name} is text; put the value into quotes.")
    try:
        flag.parse(str(value))
    except flags.IllegalFlagValueError:
        choices = getattr(flag.parser, "enum_values", None)
        needs = f"must be one of {', '.join(choices)}" if choices else f"must be of type {kind}"
        raise UserError(f"{source}: {name} {needs}.") from None


def is_boolean(values: flags.FlagValues, name: str) -> bool:
    """Whether there is such a flag and it is a switch."""
    return name in values and values[name].flag_type() == "bool"


def nearest(name: str, known: Sequence[str]) -> str:
    """The end of a sentence about an unknown name."""
    close = difflib.get_close_matches(str(name), list(known), n=1)
    return f"; did you mean {close[0]}?" if close else " (--help lists all options)."


def help_text(config_class: type, description: str) -> str:
    """Every option with its type, default and meaning, under the class that introduces it."""
    fields = {field.name: field for field in dataclasses.fields(config_class)}
    owner = {name: cls for cls in config_class.__mro__ for name in vars(cls).get("__annotations__", {})}
    presets = ", ".join(sorted(path.name for path in (ROOT / "configs").glob("*.py")))
    lines = [
        description.strip(), "", "Options are written --name value or --name=value, bool ones also --name and "
        "--noname.", "", "  --config FILE", *indented(
            "a preset: Python with get_config(), or YAML; of several the later one wins, and options win over "
            f"presets; in configs/: {presets}"
        ),
    ]  # fmt: skip
    for cls in config_class.__mro__:
        own = [field for field in fields.values() if owner[field.name] is cls]
        lines += ["", (cls.__doc__ or cls.__name__).strip().splitlines()[0]] if own else []
        for field in own:
            lines.append(f"  --{field.name} {field.type.__name__} = {field.default!r}")
            help, choices = documentation(config_class, field.name)
            help += f" [{' | '.join(filter(None, choices))}]" if choices else ""
            lines += indented(help)
    return "\n".join(lines).strip()


def indented(text: str) -> list[str]:
    return textwrap.wrap(text, 100, initial_indent=" " * 6, subsequent_indent=" " * 6)
