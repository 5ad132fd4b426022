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
import os
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from absl import flags

from utils.settings.arguments import GONE, Assignment, Value, nearest, read_assignments
from utils.settings.checks import check_number, check_password
from utils.settings.errors import SET_BY, UserError, fail, most_similar
from utils.settings.lmpo import Spelling, rewrite
from utils.settings.presets import list_presets

T = TypeVar("T")
PARSERS = {
    bool: flags.BooleanParser,
    int: flags.IntegerParser,
    float: flags.FloatParser,
    str: flags.ArgumentParser,
}  # fmt: skip
HELP_FLAGS = {"-h", "--help", "--help=all", "--helpfull"}
ALL_HELP = {"all", "--help=all", "--helpfull"}  # of HELP_FLAGS, or behind one
HELP_WIDTH = 79  # columns of --help
SYNTAX = "Options are written --name value or --name=value, bool ones also --name and --noname."
CONFIG_HELP = (
    "a preset: Python with get_config(), or YAML; of several the later one wins, and options win over presets; "
    "in configs/ (--help all: what each is): "
)


@dataclass(frozen=True)
class OptionField:
    """One command-line option.

    group is the path of the group that holds it, as "objective.kl" ("": the settings themselves). owner is the class
    that introduces it.
    """

    name: str
    group: str
    owner: type
    type: type
    default: Value
    help: str = ""
    choices: Sequence[str] | None = None
    resumable: bool = False
    essential: bool = False

    def read(self, assignment: Assignment) -> Value:
        """Returns a value in the option's type. Raises: UserError for one that it does not take."""
        name, value, source, _ = assignment
        is_text = self.type is str and not self.choices
        if is_text and not isinstance(value, str):  # YAML reads a bare `off` or `1` as something else
            raise UserError(f"{source}: {name} is text, so put the value into quotes")
        text = str(value) if isinstance(value, str | float | int) else ""  # no lists of a preset
        parser = flags.EnumParser(self.choices, case_sensitive=False) if self.choices else PARSERS[self.type]()
        try:
            return parser.parse(text)
        except ValueError:
            needs = f"one of {listed(self.choices)}" if self.choices else f"of type {self.type.__name__}"
            preset = f"{text.lower()}.py"
            hint = f"; --config configs/{preset} is a preset" if self.choices and preset in list_presets() else ""
            close = most_similar(text.lower(), filter(None, self.choices or ()))
            hint = f"; did you mean {close}?" if close and not hint else f"{hint}."
            raise UserError(f"{source}: {name} must be {needs}{hint}") from None

    def check(self, value: Value) -> None:
        """Raises UserError for a value that the option does not take, by its type, its choices or its size."""
        is_typed = type(value) is self.type or (self.type is float and type(value) is int)
        if not is_typed:
            raise UserError(
                f"--{self.name} must be of type {self.type.__name__}, and is a {type(value).__name__}: correct the "
                "value"
            )
        if self.choices and value not in self.choices:
            raise UserError(f"--{self.name} {value} must be one of {listed(self.choices)}")
        if self.type in (int, float):
            check_number(f"--{self.name}", value)


def listed(choices: Sequence[str]) -> str:
    """Returns choices with commas between; the empty one in words, at the end."""
    return ", ".join(filter(None, choices)) + (", or empty" if "" in choices else "")


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
    assert field.type in PARSERS, f"{name}: an option is a bool, int, float or str, not {field.type}"
    classes = filter(dataclasses.is_dataclass, holder.__mro__)
    owners = [cls for cls in classes if name in cls.__dataclass_fields__]
    metadata = [cls.__dataclass_fields__[name].metadata for cls in owners]
    documentation = next(filter(None, metadata), {})
    return OptionField(
        name=name, group=group_name, owner=owners[-1], type=field.type, default=field.default, **documentation
    )


def classes_of(config_class: type) -> list[type]:
    """Returns the class and the classes of its groups, in the order of the fields."""
    classes = [config_class]
    for field in dataclasses.fields(config_class):
        if "group" in field.metadata:
            classes += classes_of(field.metadata["group"])
    return classes


def make_config(config_class: type[T], /, **options: Value) -> T:
    """Returns settings with these options, by their flat names.

    Raises: UserError for an unknown name, and what the classes raise when they check themselves.
    """
    known = options_of(config_class)
    for name, value in options.items():
        if name not in known:
            raise UserError(f"there is no option {name}{nearest(name, known)}")
        known[name].check(value)
        check_password(f"--{name}", value)
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
    with `fail`.
    """
    known = options_of(config_class)
    if HELP_FLAGS & set(argv):
        print_help(help_text(config_class, description, spellings, is_complete=bool(ALL_HELP & set(argv))))
        raise SystemExit(0)
    types = {name: option.type for name, option in known.items()} | dict.fromkeys(spellings, str)
    try:
        assignments = read_assignments(argv, types, aliases)
        options = convert(assignments, known, spellings)
        presets = {assignment.name: assignment.preset for assignment in assignments}  # later ones win
        SET_BY.clear()
        SET_BY.update({name: preset for name, preset in presets.items() if preset})
        for group_class in classes_of(config_class):
            if settle := getattr(group_class, "settle", None):
                options |= settle(options, presets)
        return make_config(config_class, **implied(options) | options)
    except ValueError as error:
        fail(str(error))


def convert(
    assignments: Iterable[Assignment], known: Mapping[str, OptionField], spellings: Mapping[str, Spelling]
) -> dict[str, Value]:
    """Returns the options that are set, each of its type, with the flags of another program rewritten to ours."""
    options, foreign = {}, []
    for assignment in assignments:
        name = assignment.name
        if name in spellings:
            foreign.append(assignment)
        elif name in known:
            options[name] = known[name].read(assignment)
        elif name not in GONE or assignment.value:  # in a config.json it may have been off
            raise UserError(f"{assignment.source}: there is no option {name}{nearest(name, known)}")
    defaults = {name: option.default for name, option in known.items()}
    return options | rewrite(foreign, spellings, options, defaults)


def print_help(text: str) -> None:
    """Prints a text whose reader may leave early."""
    try:
        print(text, flush=True)
    except BrokenPipeError:  # the reader may be `head`; what is still in the buffer goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def help_text(config_class: type, description: str, spellings: Mapping[str, Spelling], is_complete: bool) -> str:
    """Returns the essential options with type, default and meaning, then the names of the others, by class.

    is_complete: the others in full, too, and flags of another program.
    """
    lines = [*fit(description), *textwrap.wrap(SYNTAX, HELP_WIDTH), ""]
    presets = list_presets()
    lines += describe_flag("config FILE", CONFIG_HELP + ", ".join(presets))
    options = options_of(config_class).values()
    essential = [known for known in options if known.essential]
    lines += help_section("Options needed most often", essential)
    if not is_complete:
        lines += ["", "Further options, which --help all describes", ""]
    for owner in (cls for holder in classes_of(config_class) for cls in holder.__mro__):
        members = [known for known in options if known.owner is owner and not known.essential]
        section = help_section if is_complete else names_section
        title, *_ = (owner.__doc__ or owner.__name__).strip().splitlines()
        lines += section(title, members)
    if is_complete and spellings:
        lines += ["", "kvfrans/lmpo's spellings"]
        for flag, (name, on, off) in spellings.items():
            lines += describe_flag(f"{flag} 0 or 1", f"1: --{name} {on}, 0: --{name} {off}")
    if is_complete:
        lines += ["", "Presets in configs/"]
        for name, line in presets.items():
            lines += describe_flag(f"config configs/{name}", line)
    return "\n".join(lines).strip()


def help_section(title: str, options: Sequence[OptionField]) -> list[str]:
    lines = ["", title] if options else []
    for known in options:
        default = f"{known.type.__name__} = {known.default!r}"
        choices = " | ".join(filter(None, known.choices or []))
        text = f"{known.help} [{choices}]" if choices else known.help
        lines += describe_flag(f"{known.name} {default}", text)
    return lines


def names_section(title: str, options: Sequence[OptionField]) -> list[str]:
    names = " ".join(f"--{known.name}" for known in options)
    text = f"{title.removesuffix('.')}: {names}"
    lines = textwrap.wrap(text, HELP_WIDTH, initial_indent="  ", subsequent_indent=" " * 6, break_on_hyphens=False)
    return lines if options else []


def describe_flag(flag: str, text: str) -> list[str]:
    """Returns the lines of --help about one flag: its name, type and default, and its meaning below."""
    indent = " " * 6
    return [f"  --{flag}", *textwrap.wrap(text, HELP_WIDTH, initial_indent=indent, subsequent_indent=indent)]


def fit(description: str) -> list[str]:
    """Returns a docstring in lines of HELP_WIDTH; commands stay whole, behind their comment if both are too long."""
    lines = []
    for block in description.strip("\n").split("\n\n"):
        is_code = block.startswith(("    ", "python "))  # Python 3.13 removes the indentation of docstrings
        if not is_code:
            lines += textwrap.wrap(block, HELP_WIDTH, break_on_hyphens=False)
        for line in textwrap.indent(textwrap.dedent(block), "    ").splitlines() if is_code else ():
            command, _, comment = line.partition("  # ")
            lines += [f"    # {comment}", command.rstrip()] if comment and len(line) > HELP_WIDTH else [line]
        lines.append("")
    return lines
