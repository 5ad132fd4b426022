"""Options: fields of dataclasses, as the files that read settings declare them (see config.py)."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from utils.settings.arguments import BOOLEANS, Value
from utils.settings.checks import check_number
from utils.settings.errors import UserError, most_similar
from utils.settings.presets import list_presets

T = TypeVar("T")
Default = TypeVar("Default", bool, int, float, str)


def option(
    default: Default,
    help: str,
    choices: Sequence[str] | None = None,
    *,
    resumable: bool = False,
    essential: bool = False,
) -> Default:
    """Returns a dataclass field that is an option: its default, its meaning with its unit, and the values it may have.

    resumable: it may change when a run is resumed; essential: --help describes it, and names the others only.
    """
    metadata = {"help": help, "choices": choices, "resumable": resumable, "essential": essential}
    return dataclasses.field(default=default, metadata=metadata)


def group(cls: type[T]) -> T:
    """Returns a dataclass field that holds a group of options; their names are unique over all groups."""
    return dataclasses.field(default_factory=cls, metadata={"group": cls})


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

    def read(self, value: object, source: str) -> Value:
        """Returns a value of a preset or a command line in the option's type. Raises: UserError."""
        if self.type is str and not self.choices:
            if isinstance(value, str):
                return value
            raise UserError(f"{source}: {self.name} is text, so put the value into quotes")  # YAML reads `off` as False
        text = str(value).lower() if isinstance(value, str | float | int) else ""  # no lists of a preset
        try:
            if self.choices:
                return next(choice for choice in self.choices if choice.lower() == text)
            return BOOLEANS[text] if self.type is bool else self.type(text)
        except (StopIteration, KeyError, ValueError):
            hint = "."
            if self.choices and f"{text}.py" in list_presets():
                hint = f"; --config configs/{text}.py is a preset"
            elif close := most_similar(text, filter(None, self.choices or ())):
                hint = f"; did you mean {close}?"
            needs = f"one of {listed(self.choices)}" if self.choices else f"of type {self.type.__name__}"
            raise UserError(f"{source}: {self.name} must be {needs}{hint}") from None

    def check(self, value: Value) -> None:
        """Raises UserError for a value that the option does not take, by its type, its choices or its size."""
        if type(value) is not self.type and (self.type, type(value)) != (float, int):
            kinds = self.type.__name__, type(value).__name__
            raise UserError("--{} must be of type {}, and is a {}: correct the value".format(self.name, *kinds))
        if self.choices and value not in self.choices:
            raise UserError(f"--{self.name} {value} must be one of {listed(self.choices)}")
        if self.type in (int, float):
            check_number(f"--{self.name}", value)


def listed(choices: Sequence[str]) -> str:
    """Returns choices with commas between; the empty one in words, at the end."""
    return ", ".join(filter(None, choices)) + (", or empty" if "" in choices else "")
