"""Formulas of advantages and losses; core/extensions/notes.py prints them with the numbers of the settings."""

from collections.abc import Callable
from typing import TypeVar

Function = TypeVar("Function", bound=Callable)


def formula(text: str) -> Callable[[Function], Function]:
    """Attaches the formula that a run prints; fields: {low}, {high}, {fall}, {rise}, {dual_clip}, {config.<option>}."""

    def attach(function: Function) -> Function:
        function.formula = text
        return function

    return attach
