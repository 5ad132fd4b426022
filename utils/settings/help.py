"""--help: the options of a command, each with the value that the command would use."""

import os
import sys
import textwrap
from collections.abc import Collection, Mapping, Sequence

from utils.settings.arguments import Value
from utils.settings.lmpo import Spelling
from utils.settings.options import OptionField
from utils.settings.presets import list_presets

WIDTH = 79  # columns
SYNTAX = "Options are written --name value or --name=value, bool ones also --name and --noname."
CONFIG = (
    "a preset: Python with get_config(), or YAML; later ones override earlier ones, and options override both; "
    "in configs/ (--help all: what each is): "
)


def print_help(
    options: Collection[OptionField],
    classes: Sequence[type],
    values: Mapping[str, Value],
    description: str,
    spellings: Mapping[str, Spelling],
    is_complete: bool,
) -> None:
    """Prints the essential options with type, value and meaning, then the names of the others, by class.

    `values`: those that are not the defaults. is_complete: the others in full, and flags of another program.
    """
    presets = list_presets()
    lines = [description.strip(), "", *textwrap.wrap(SYNTAX, WIDTH), ""]
    lines += describe("config FILE", CONFIG + ", ".join(presets))
    lines += section("Options needed most often", [known for known in options if known.essential], values)
    if not is_complete:
        lines += ["", "Further options, which --help all describes", ""]
    for owner in (cls for holder in classes for cls in holder.__mro__):
        title = (owner.__doc__ or owner.__name__).strip().splitlines()[0]
        members = [known for known in options if known.owner is owner and not known.essential]
        if is_complete:
            lines += section(title, members, values)
        elif members:
            names = " ".join(f"--{known.name}" for known in members)
            lines += wrap(f"{title.removesuffix('.')}: {names}", "  ")
    if is_complete:
        lines += ["", "kvfrans/lmpo's spellings"] if spellings else []
        for flag, (name, on, off) in spellings.items():
            switched_off = "no change" if off is None else f"--{name} {off}"
            lines += describe(f"{flag} 0 or 1", f"1: --{name} {on}, 0: {switched_off}")
        lines += ["", "Presets in configs/"]
        for name, line in presets.items():
            lines += describe(f"config configs/{name}", line)
    try:
        print("\n".join(lines).strip(), flush=True)
    except BrokenPipeError:  # the reader may be `head`; what is still in the buffer goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def section(title: str, options: Sequence[OptionField], values: Mapping[str, Value]) -> list[str]:
    lines = ["", title] if options else []
    for known in options:
        choices = " | ".join(filter(None, known.choices or []))
        value = f"{known.type.__name__} = {values.get(known.name, known.default)!r}"
        lines += describe(f"{known.name} {value}", f"{known.help} [{choices}]" if choices else known.help)
    return lines


def describe(flag: str, text: str) -> list[str]:
    """Returns the lines about one flag: its name, type and value, and its meaning below."""
    return [f"  --{flag}", *wrap(text, " " * 6)]


def wrap(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=" " * 6, break_on_hyphens=False)
