"""Rewards of users: functions of a completion and the columns of a row, and functions written for TRL or verl.

There are three forms. The names of their arguments tell which one a function has.

- Our own: `f(completion, **row)` returns a number, or parts that are added up.
- TRL's: `f(completions, prompts, ..., **columns)` gets all replies to a problem at once. It returns a number for each,
  or None if it does not apply.
- verl's: `f(data_source, solution_str, ground_truth, extra_info)` returns a number, or a dict whose "score" is the
  reward. Its form for batches has these names in plural.
"""

import inspect
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

from envs.base import NOT_APPLICABLE, Changed, Env, Problem
from envs.data.files import JSON, RawRow
from envs.data.messages import CONVERSATIONS, PROMPTS, Columns, find_column
from envs.data.rows import first_of
from envs.own.adapters import Played, call, parameters
from envs.own_code import as_number, code_files, describe_function, load_object, read_names, wrong_return
from utils.settings.errors import UserError

LISTS = ("prompts", "completions", "completion_ids", "environments")  # arguments of TRL's form, beside columns
LOGGED = ("log_extra", "log_metric")  # functions that TRL gives, too
ONLY_TRL = "trainer_state"
VERL = ("solution_str", "predict_str", "model_output")  # names of the reply in verl
FROM_ROW = ("data_source", "ground_truth", "extra_info")  # arguments of verl's form
ITEMS = "a list with a number for each completion"

Parts = dict[str, float]  # parts of a reply's reward; "return" is its value, if that is not their sum


class RewardFunction:
    """A function, or a coroutine function, of one of the forms: "own", "trl", "verl" or "verl batch"."""

    def __init__(self, function: Callable[..., object], columns: Columns):
        self.function, self.columns = function, columns
        taken = parameters(function)
        others = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        self.names = tuple(taken)  # of its arguments
        self.needed = [name for name, x in taken.items() if x.default is x.empty and x.kind not in others]
        if taken.keys() & {*VERL}:
            self.form = "verl"
        elif taken.keys() & {f"{name}s" for name in VERL}:
            self.form = "verl batch"
        else:
            is_trl = taken.keys() & {*LISTS} - {"prompts"} or self.names[:1] == ("prompts",)
            self.form = "trl" if is_trl else "own"

    def check(self, row: RawRow, has_environments: bool) -> None:
        """Raises UserError if it takes no argument, or needs one that is neither the reply nor a column."""
        place = describe_function(self.function)
        if not self.names:
            raise UserError(f"{place} takes no arguments: give it the completion, and the columns that it reads")
        lists = [name for name in LISTS if name != "environments" or has_environments]
        verl = [name for name in FROM_ROW if name != "ground_truth" or self.ground_truth(row) is not None]
        given = {
            "own": {*self.names[:1]},
            "trl": {*lists, *LOGGED},
            "verl": {*VERL, *verl},
            "verl batch": {f"{name}s" for name in (*VERL, *verl)},
        }[self.form]
        unknown = [name for name in self.needed if name not in given and name not in row]
        if not unknown:
            return
        remedies = {
            "environments": ": name their class by --episode FILE.py:CLASS",
            ONLY_TRL: f": TRL alone has a trainer; give the argument a default, {ONLY_TRL}=None",
            "ground_truth": ": name the one with the answer by --env_options answer=COLUMN",
        }
        names = ", ".join(map(repr, row))[:200]
        remedy = remedies.get(unknown[0]) or remedies.get(unknown[0].removesuffix("s"), "")
        raise UserError(f"{place} needs {unknown[0]!r}, which is not a column; there are {names}{remedy}")

    def grade(self, plays: Sequence[Played], row: RawRow) -> list[Parts]:
        """Returns the parts of the reward of each reply to a problem. Raises: TypeError for anything but numbers."""
        if self.form == "own":
            given = {column: value for column, value in row.items() if column not in ("completion", *LISTS)}
            returned = [call(partial(self.function, played.text), given) for played in plays]
            return [self.parts(value, "a number or a dict of numbers") for value in returned]
        if self.form == "trl":
            return self.call_lists(plays, row)
        own = {"data_source": row.get("data_source") or "", "extra_info": row.get("extra_info") or {}}
        given = {**row, **own, "ground_truth": self.ground_truth(row)}
        if self.form == "verl":
            returned = [call(self.function, dict.fromkeys(VERL, played.text) | given) for played in plays]
        else:
            lists = {f"{name}s": [value] * len(plays) for name, value in given.items()}
            lists |= {f"{name}s": [played.text for played in plays] for name in VERL}
            returned = self.items(call(self.function, lists), len(plays))
        return [self.scored(value) for value in returned]

    def call_lists(self, plays: Sequence[Played], row: RawRow) -> list[Parts]:
        """Returns the parts of a reward that gets lists, as in TRL; values that it logs are parts of their own."""
        row = {column: value for column, value in row.items() if column not in ("completion", *LISTS)}
        named = self.columns.messages or self.columns.prompt
        prompt = row.pop(named or first_of((*PROMPTS, *CONVERSATIONS), row), [])
        has_text = isinstance(prompt, str) and not plays[0].environment
        logged: list[Parts] = [{} for _ in plays]

        def log_extra(column: str, values: Sequence[object]) -> None:
            for parts, number in zip(logged, map(as_number, values), strict=False):
                parts |= {} if number is None else {column: number}

        lists = {name: [value] * len(plays) for name, value in {**row, "prompts": prompt}.items()}
        replies = [[*played.messages] or [{"role": "assistant", "content": played.text}] for played in plays]
        lists["completions"] = [played.text for played in plays] if has_text else replies
        lists["completion_ids"] = [list(played.ids) for played in plays]
        if plays[0].environment:
            lists["environments"] = [played.environment for played in plays]
        lists["log_extra"] = log_extra
        lists["log_metric"] = lambda name, value: log_extra(name, [value] * len(plays))
        values = self.items(call(self.function, lists), len(plays))
        parts = [{"return": math.nan, NOT_APPLICABLE: 1.0} if x is None else self.parts(x, ITEMS) for x in values]
        return [extra | part for extra, part in zip(logged, parts, strict=True)]

    def ground_truth(self, row: RawRow) -> JSON:
        """Returns the reference of a row, as verl's files have it, or the answer; None if there is none."""
        names = ("ground_truth", "reward_model.ground_truth", self.columns.answer or "answer")
        return next((x for x in map(partial(find_column, row), names) if x is not None), None)

    def items(self, returned: object, count: int) -> list[object]:
        """Returns the values in a list, an array, a tensor or another series. Raises: TypeError for a wrong number."""
        values = returned.tolist() if callable(getattr(returned, "tolist", None)) else returned
        if isinstance(values, Iterable) and not isinstance(values, str | bytes | Mapping):
            values = list(itertools.islice(values, count + 1))
            if len(values) == count:
                return values
        raise wrong_return(self.function, returned, f"{ITEMS}, which are {count} here")

    def parts(self, value: object, form: str) -> Parts:
        """Returns the numbers that it returned for a reply."""
        parts = value if isinstance(value, Mapping) else {"return": value}
        numbers = {name: as_number(part) for name, part in parts.items()}
        if None in numbers.values() or not numbers:
            raise wrong_return(self.function, value, form)
        return numbers

    def scored(self, value: object) -> Parts:
        """Returns the reward as verl reads it: a dict's "score", or a list's first item; other numbers are logged."""
        if isinstance(value, list | tuple) and value:
            value = value[0]
        form = 'a number, or a dict with a "score"'
        if not isinstance(value, Mapping):
            return self.parts(value, form)
        numbers = {name: as_number(part) for name, part in value.items()}
        if numbers.get("score") is None:
            raise wrong_return(self.function, value, form)
        others = {name: number for name, number in numbers.items() if number is not None and name != "score"}
        return others | {"return": numbers["score"]}


class RewardFunctions:
    """The functions of --reward, and their weights. Raises: UserError for missing ones."""

    def __init__(self, value: str, weights: str = "", columns: Columns = Columns()):  # noqa: B008 (frozen)
        named = read_names(value, "--reward", "function")
        names = [one.name for one in named]
        self.names = [one.name if names.count(one.name) == 1 else f"{one.file.stem}.{one.name}" for one in named]
        try:
            self.weights = [float(weight) for weight in weights.split(",")] if weights else [1.0] * len(names)
        except ValueError:
            self.weights = []
        if len(self.weights) != len(names) or not all(map(math.isfinite, self.weights)):
            raise UserError(
                f"--reward_weights {weights}: give a number for each of the {len(names)} functions of --reward, "
                f"{', '.join(self.names)}, separated by commas"
            )

        self.functions = [RewardFunction(load_object(one, "--reward", "function"), columns) for one in named]
        self.takes_groups = any(function.form in ("trl", "verl batch") for function in self.functions)
        self.takes_ids = any("completion_ids" in function.names for function in self.functions)

    def check(self, row: RawRow, has_environments: bool = False) -> None:
        """Raises UserError if one of them needs what is not there."""
        for function in self.functions:
            function.check(row, has_environments)

    def grade(self, plays: Sequence[Played], row: RawRow) -> list[Parts]:
        """Returns the rewards of replies to a problem: "return", the weighted sum, and each part to be logged.

        Functions that return None are left out of the sum; if all do, it is NaN. Raises: what a function raises;
        TypeError if two name a part alike.
        """
        graded = [function.grade(plays, row) for function in self.functions]
        return [self.combined(parts) for parts in zip(*graded, strict=True)]

    def combined(self, graded: Sequence[Parts]) -> Parts:
        """Returns the weighted sum of the functions' values for a reply, and all parts."""
        weighted, scores = [], {}
        for name, weight, parts in zip(self.names, self.weights, graded, strict=True):
            value = parts["return"] if "return" in parts else sum(parts.values())
            weighted += [] if math.isnan(value) else [weight * value]
            named = parts if len(self.names) == 1 else {name: value, **parts}
            twice = scores.keys() & named.keys() - {"return", NOT_APPLICABLE}
            if twice:
                raise TypeError(f"two rewards have a part {min(twice)!r}: give one of them another name")
            scores |= named
        return scores | {"return": sum(weighted) if weighted else math.nan}


def is_correct(value: float) -> float:
    """Returns 1.0 for a return of 1 or more, 0.0 for a lower one, NaN for none."""
    return value if math.isnan(value) else float(value >= 1)


def with_rewards(env: Env, name: str, reward: str = "", reward_weights: str = "") -> Env:
    """Returns an environment graded by the user's rewards. Raises: UserError for one of several turns."""
    if env.max_turns > 1:
        raise UserError(
            f"--reward {reward} grades single replies, and an episode of {name} has its own rewards, turn by turn: "
            "give --reward with an environment of one turn, or with dataset and --episode"
        )
    return Rewarded(env, RewardFunctions(reward, reward_weights), code_files(reward))


class Rewarded(Changed):
    """An environment of one turn whose replies the user's rewards grade; its own grader counts correct answers."""

    def __init__(self, env: Env, rewards: RewardFunctions, code: tuple[Path, ...]):
        super().__init__(env)
        self.rewards, self.code = rewards, (*env.code, *code)
        self.truncation_penalty = 0.0
        self.takes_ids, self.takes_groups = rewards.takes_ids, rewards.takes_groups
        rewards.check(env.reward_row(env.problem(0)))

    def trials(self, problem: Problem) -> list[str]:
        return []

    def score_group(self, problem: Problem, texts: Sequence[str]) -> list[dict[str, float]]:
        plays = [Played(text, getattr(text, "ids", ())) for text in texts]
        graded = self.rewards.grade(plays, self.reward_row(problem))
        return [self.env.score(problem, text) | scores for text, scores in zip(texts, graded, strict=True)]
