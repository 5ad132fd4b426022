"""Fields of dataclasses that are command-line options: what the files that read settings declare (see config.py)."""

import dataclasses
from collections.abc import Sequence
from typing import TypeVar

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
