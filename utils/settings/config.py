"""Settings: a frozen dataclass is the list of command-line options, their documentation, and what a preset may set.

    python core/grpo.py --config configs/countdown.py --lr 2e-6 --do_group_filter 0

It is composed of groups: frozen dataclasses that check themselves in __post_init__. A group may hold further groups.
Flags stay flat:

    @dataclass(frozen=True)
    class Config:
        sampling: SamplingConfig = group(SamplingConfig)  # --temperature sets config.sampling.temperature
        seed: int = option(0, "Seed of the order of the tasks and of sampling")

A script reads its own with `config = parse(Config, sys.argv[1:])`.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from utils.settings.arguments import BOOLEANS, GONE, WERE_ON, Assignment, Value, nearest, read_assignments
from utils.settings.errors import SET_BY, UserError, fail
from utils.settings.lmpo import Spelling
from utils.settings.options import OptionField

T = TypeVar("T")
HELP_FLAGS = {"-h", "--help", "--help=all", "--helpfull"}
ALL_HELP = {"all", "--help=all", "--helpfull"}  # of HELP_FLAGS, or after one


def options_of(config_class: type, path: str = "") -> dict[str, OptionField]:
    """Returns all options by name, groups included, in the order of the fields.

    `path`: of the group whose class this is; empty for the settings themselves.
    """
    options: dict[str, OptionField] = {}
    for field in dataclasses.fields(config_class):
        if group_class := field.metadata.get("group"):
            members = options_of(group_class, f"{path}.{field.name}".lstrip("."))
        else:
            members = {field.name: make_option(config_class, field, path)}
        for name, new in members.items():
            old = options.setdefault(name, new)
            places = f"{old.group or config_class.__name__} and {new.group or config_class.__name__}"
            assert old is new, f"--{name} is an option of both {places}"
    return options


def make_option(holder: type, field: dataclasses.Field, group_name: str) -> OptionField:
    """Describes a field of `holder`; a subclass that changes the default only keeps help, choices and marks."""
    name = field.name
    assert field.type in (bool, int, float, str), f"{name}: an option is a bool, int, float or str, not {field.type}"
    owners = [cls for cls in holder.__mro__ if name in getattr(cls, "__dataclass_fields__", ())]
    metadata = next(filter(None, (cls.__dataclass_fields__[name].metadata for cls in owners)), {})
    return OptionField(name, group_name, owners[-1], field.type, field.default, **metadata)


def classes_of(config_class: type) -> list[type]:
    """Returns the class and the classes of its groups, in the order of the fields."""
    groups = [field.metadata["group"] for field in dataclasses.fields(config_class) if "group" in field.metadata]
    return [config_class, *(cls for group in groups for cls in classes_of(group))]


def make_config(config_class: type[T], /, **options: Value) -> T:
    """Returns settings with these options, by their flat names.

    Raises: UserError for an unknown name, and what the classes raise when they check themselves.
    """
    known = options_of(config_class)
    for name, value in options.items():
        if name not in known:
            raise UserError(f"there is no option {name}{nearest(name, known)}")
        known[name].check(value)
    return compose(config_class, options)


def compose(config_class: type[T], options: Mapping[str, Value]) -> T:
    """Returns an instance with those of the options that it or one of its groups holds."""
    values: dict[str, object] = {}
    for field in dataclasses.fields(config_class):
        if group_class := field.metadata.get("group"):
            values[field.name] = compose(group_class, options)
        elif field.name in options:
            values[field.name] = options[field.name]
    return config_class(**values)


def with_options(config: T, /, **options: Value) -> T:
    """Returns a copy with these options changed, checked anew. Raises: as `make_config`."""
    return make_config(type(config), **(to_dict(config) | options))


def to_dict(config: object) -> dict[str, Value]:
    """Returns all options by name, ready for JSON, and accepted by `--config` when written to a file."""
    values = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        values |= to_dict(value) if "group" in field.metadata else {field.name: value}
    return values


def changed_options(config_class: type, settings: Mapping[str, Value]) -> dict[str, OptionField]:
    """Returns the options that have other values in the settings than their defaults."""
    return {name: known for name, known in options_of(config_class).items() if settings[name] != known.default}


def parse(
    config_class: type[T],
    argv: Sequence[str],
    description: str = "",
    aliases: Mapping[str, str] = {},
    spellings: Mapping[str, Spelling] = {},
    implied: Callable[[Mapping[str, Value]], Mapping[str, Value]] = lambda options: {},
) -> T:
    """Returns the settings of a command line (without the program's name).

    The command line beats the preset (`--config FILE`). The preset beats options that the set ones imply (`implied`),
    and these beat the defaults. `aliases` maps other accepted names to names of options,
    `spellings` are flags of another program. A group's `settle(options, presets)` may change options of a preset that
    do not fit those above it. What is unknown or malformed, and each ValueError of the class itself, ends the program
    with `fail`. With --help, the values that the command would use are printed instead.
    """
    known = options_of(config_class)
    is_help = bool(HELP_FLAGS & set(argv))
    words = [x for i, x in enumerate(argv) if x not in HELP_FLAGS and (x != "all" or argv[i - 1] not in HELP_FLAGS)]
    types = {name: option.type for name, option in known.items()} | dict.fromkeys(spellings, str)
    try:
        assignments = read_assignments(words, types, aliases)
        options = convert(assignments, known, spellings)
        presets = {assignment.name: assignment.preset for assignment in assignments}  # later ones win
        SET_BY.clear()
        SET_BY.update({name: preset for name, preset in presets.items() if preset})
        for group_class in classes_of(config_class):
            if settle := getattr(group_class, "settle", None):
                options |= settle(options, presets)
        options = {**implied(options), **options}
        if not is_help:
            return make_config(config_class, **options)
    except ValueError as error:
        fail(str(error))
    from utils.settings.help import print_help

    print_help(known.values(), classes_of(config_class), options, description, spellings, bool(ALL_HELP & set(argv)))
    raise SystemExit(0)


def convert(
    assignments: Iterable[Assignment], known: Mapping[str, OptionField], spellings: Mapping[str, Spelling]
) -> dict[str, Value]:
    """Returns the options that are set, each of its type, with the flags of another program rewritten to ours.

    Raises: UserError for an unknown name or value, and for a flag that contradicts an option that is set.
    """
    options, flags, rewritten = {}, {}, {}
    for name, value, source, _ in assignments:
        if name in spellings:
            if value != "":  # as in the config.json of old runs
                flags[name] = str(value).lower(), source
        elif name in known:
            options[name] = known[name].read(value, source)
        elif name not in GONE or bool(value) != (name in WERE_ON):  # a config.json may hold what changed nothing
            raise UserError(f"{source}: there is no option {name}{nearest(name, known)}")
    for flag, (switch, source) in flags.items():
        if switch not in BOOLEANS:
            raise UserError(f"{source}: {flag} must be one of 0, 1")
        option, on, off = spellings[flag]
        value = on if BOOLEANS[switch] else off
        current = options.get(option, known[option].default)
        if current not in (known[option].default, value) and value is not None:
            raise UserError(f"--{flag} {switch} contradicts --{option} {current}: remove one of them")
        rewritten |= {} if value is None else {option: value}
    return options | rewritten
