"""Rewards of users: functions of a completion and the columns of a row, and functions written for TRL."""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import SupportsFloat

from envs.data.rows import RawRow
from envs.tools.adapters import Played
from envs.tools.gyms import call
from utils.settings.errors import UserError

LISTS = ("prompts", "completions", "completion_ids", "environments")  # arguments of TRL's, beside columns
NOT_APPLICABLE = "not_applicable"  # part that counts replies to which a function says None


@dataclass(frozen=True)
class RewardFunction:
    """A function, or a coroutine function, of one of two forms.

    Of the project's own: `f(completion, **row)` returns a number, or parts that are added up. Of TRL's:
    `f(completions, prompts, ..., **columns)` returns a list with a number, or with None where it does not apply, which
    is left out of the sum.
    """

    function: Callable[..., object]

    @cached_property
    def parameters(self) -> Mapping[str, inspect.Parameter]:
        return inspect.signature(self.function).parameters

    @property
    def name(self) -> str:
        return getattr(self.function, "__name__", type(self.function).__name__)

    @property
    def takes_lists(self) -> bool:
        """True if it has TRL's form."""
        others = set(LISTS) - {"prompts"}
        return not others.isdisjoint(self.parameters) or next(iter(self.parameters), "") == "prompts"

    def check(self, row: RawRow, has_environments: bool) -> None:
        """Raises UserError where it needs an argument that is neither the reply nor a column."""
        lists = [name for name in LISTS if name != "environments" or has_environments]
        given = {*lists, *row} if self.takes_lists else {next(iter(self.parameters), ""), *row}
        needed = [name for name, parameter in self.parameters.items() if is_required(parameter)]
        unknown = [name for name in needed if name not in given]
        if unknown:
            columns = ", ".join(map(repr, row))[:200]
            remedy = ": name their class by --episode FILE.py:CLASS" if "environments" in unknown else ""
            name = describe_function(self.function)
            raise UserError(f"{name} needs {unknown[0]!r}, which is no column: there are {columns}{remedy}")

    def parts(self, played: Played, row: RawRow, prompt_column: str) -> dict[str, float]:
        """Returns the parts of the reward. Raises: TypeError where it returns anything but finite numbers."""
        returned = self.call(played, row, prompt_column)
        value = returned
        if self.takes_lists and isinstance(returned, Sequence) and len(returned) == 1:
            value = returned[0]
            if value is None:
                return {"return": 0.0, NOT_APPLICABLE: 1.0}
        parts = value if isinstance(value, Mapping) else {"return": value}
        if all(isinstance(part, SupportsFloat) and math.isfinite(part) for part in parts.values()):
            return {name: float(part) for name, part in parts.items()}
        form = "a list with a number for each completion" if self.takes_lists else "a number or a dict of numbers"
        raise TypeError(f"{describe_function(self.function)} returned {returned!r:.200}: return {form}")

    def call(self, played: Played, row: RawRow, prompt_column: str) -> object:
        """Returns what it returns for the arguments that it takes: those that it names, or all under `**row`."""
        row = {column: value for column, value in row.items() if column not in ("completion", *LISTS)}
        if not self.takes_lists:
            return call(partial(self.function, played.text), row)
        prompt = row.pop(prompt_column, [])
        given = {"prompts": prompt, "completions": played.text, "completion_ids": list(played.ids)}
        if not isinstance(prompt, str) or played.environment:
            given["completions"] = played.messages or [{"role": "assistant", "content": played.text}]
        if played.environment:
            given["environments"] = played.environment
        lists = {name: [value] for name, value in {**row, **given}.items()}
        return call(self.function, lists)


def is_required(parameter: inspect.Parameter) -> bool:
    """True for a parameter that a call must give by its name or place."""
    is_one = parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    return is_one and parameter.default is parameter.empty


def describe_function(function: Callable) -> str:
    """Returns the name of a function, its file and the line where it begins; of an object, those of its `__call__`."""
    function = inspect.unwrap(function)
    code = getattr(function, "__code__", None) or type(function).__call__.__code__
    return f"{code.co_name}() in line {code.co_firstlineno} of {code.co_filename}"
