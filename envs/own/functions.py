"""Rewards of users: functions of a completion and the columns of a row, and functions written for TRL or verl.

There are three forms. The names of their arguments tell which one a function has.

- Our own: `f(completion, **row)` returns a number, or parts that are added up.
- TRL's: `f(completions, prompts, ..., **columns)` gets all replies to a problem at once. It returns a number for each,
  or None if it does not apply.
- verl's: `f(data_source, solution_str, ground_truth, extra_info)` returns a number, or a dict whose "score" is the
  reward. Its form for batches has these names in plural.
"""

import contextlib
import dataclasses
import inspect
import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import NamedTuple

from envs.base import NOT_APPLICABLE, Changed, Env, Problem, Trial
from envs.data.files import JSON, RawRow
from envs.data.messages import get_column, has_column
from envs.own.adapters import Adapter, Played, call, parameters
from envs.own_code import Named, as_number, describe_function, load_object, read_names, wrong_return
from envs.tools.episode import ToolSettings
from utils.processes import Dead, Lane
from utils.settings.errors import UserError

LISTS = ("prompts", "completions", "completion_ids", "environments")  # arguments of TRL's form, beside columns
LOGGED = ("log_extra", "log_metric")  # functions that TRL gives, too
ONLY_TRL = "trainer_state"
VERL = ("solution_str", "predict_str", "model_output")  # names of the reply in verl
FROM_ROW = ("data_source", "ground_truth", "extra_info")  # arguments of verl's form
IMPORT_SECONDS = 60  # time limit for importing the file of a reward or of a class

Parts = dict[str, float]  # parts of a reply's reward; "return" is its value, if that is not their sum


class KeyColumns(NamedTuple):
    """Names of the columns of a row that have a meaning."""

    prompt: str = "prompt"
    answer: str = "answer"


@dataclass(frozen=True)
class Signature:
    """Properties of a reward that are known without running it."""

    name: str  # after the colon
    place: str  # its name in Python, the line and the file
    names: tuple[str, ...]  # names of arguments
    needed: tuple[str, ...]  # arguments without a default

    @property
    def form(self) -> str:
        """Returns its form: "own", "trl", "verl" or "verl batch"."""
        if set(VERL) & set(self.names):
            return "verl"
        if {f"{name}s" for name in VERL} & set(self.names):
            return "verl batch"
        others = set(LISTS) - {"prompts"}
        return "trl" if others & set(self.names) or self.names[:1] == ("prompts",) else "own"

    def check(self, row: RawRow, columns: KeyColumns, has_environments: bool) -> None:
        """Raises UserError if it takes no argument, or needs one that is neither the reply nor a column."""
        if not self.names:
            raise UserError(f"{self.place} takes no arguments: give it the completion, and the columns that it reads")
        lists = [name for name in LISTS if name != "environments" or has_environments]
        verl = [name for name in FROM_ROW if name != "ground_truth" or ground_truth(row, columns) is not None]
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
        raise UserError(f"{self.place} needs {unknown[0]!r}, which is not a column; there are {names}{remedy}")


@dataclass(frozen=True)
class RewardFunction:
    """A function, or a coroutine function, of one of the forms."""

    function: Callable[..., object]
    name: str

    @cached_property
    def signature(self) -> Signature:
        taken = parameters(self.function)
        others = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        needed = [name for name, x in taken.items() if x.default is x.empty and x.kind not in others]
        return Signature(self.name, describe_function(self.function), tuple(taken), tuple(needed))

    def grade(self, plays: Sequence[Played], row: RawRow, columns: KeyColumns) -> list[Parts]:
        """Returns the parts of the reward of each reply to a problem.

        Raises: TypeError if it returns anything but finite numbers, one for each reply; and what it raises.
        """
        form = self.signature.form
        if form == "own":
            given = {column: value for column, value in row.items() if column not in ("completion", *LISTS)}
            returned = [call(partial(self.function, played.text), given) for played in plays]
            return [self.parts(value, "a number or a dict of numbers") for value in returned]
        if form == "verl":
            arguments = verl_arguments(row, columns)
            returned = [call(self.function, dict.fromkeys(VERL, played.text) | arguments) for played in plays]
            return [self.scored(value) for value in returned]
        if form == "verl batch":
            lists = {f"{name}s": [played.text for played in plays] for name in VERL}
            lists |= {f"{name}s": [value] * len(plays) for name, value in verl_arguments(row, columns).items()}
            return [self.scored(value) for value in self.items(call(self.function, lists), len(plays))]
        return self.call_lists(plays, row, columns)

    def call_lists(self, plays: Sequence[Played], row: RawRow, columns: KeyColumns) -> list[Parts]:
        """Returns the parts of a reward that gets lists, as in TRL; values that it logs are parts of their own."""
        row = {column: value for column, value in row.items() if column not in ("completion", *LISTS)}
        prompt = row.pop(columns.prompt, [])
        has_text = isinstance(prompt, str) and not plays[0].environment
        logged: list[Parts] = [{} for _ in plays]
        lists = {name: [value] * len(plays) for name, value in {**row, "prompts": prompt}.items()}
        replies = [[*played.messages] or [{"role": "assistant", "content": played.text}] for played in plays]
        lists["completions"] = [played.text for played in plays] if has_text else replies
        lists["completion_ids"] = [list(played.ids) for played in plays]
        if plays[0].environment:
            lists["environments"] = [played.environment for played in plays]
        repeated = lambda name, value: log_extra(logged, name, [value] * len(plays))  # noqa: E731
        lists |= {"log_extra": partial(log_extra, logged), "log_metric": repeated}
        values = self.items(call(self.function, lists), len(plays))
        parts = [{"return": math.nan, NOT_APPLICABLE: 1.0} if x is None else self.parts(x, ITEMS) for x in values]
        return [extra | part for extra, part in zip(logged, parts, strict=True)]

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


ITEMS = "a list with a number for each completion"


def log_extra(logged: list[Parts], column: str, values: Sequence[object]) -> None:
    """Logs the numbers among the values that TRL shows as a column beside completions."""
    for parts, value in zip(logged, values, strict=False):
        number = as_number(value)
        if number is not None:
            parts[column] = number


def verl_arguments(row: RawRow, columns: KeyColumns) -> dict[str, JSON]:
    """Returns the arguments that verl takes out of a row, and the row's own columns."""
    own = {"data_source": row.get("data_source") or "", "extra_info": row.get("extra_info") or {}}
    return {**row, **own, "ground_truth": ground_truth(row, columns)}


def ground_truth(row: RawRow, columns: KeyColumns) -> JSON:
    """Returns the reference of a row, as verl's files have it, or the answer; None if there is none."""
    names = filter(partial(has_column, row), ("ground_truth", "reward_model.ground_truth", columns.answer))
    return next((x for x in map(partial(get_column, row), names) if x is not None), None)


class RewardFunctions:
    """The functions of --reward, and their weights.

    Raises: UserError if a file or a name is not there, and if their numbers differ.
    """

    def __init__(self, value: str, weights: str = ""):
        self.named = read_names(value, "--reward", "function")
        names = [named.name for named in self.named]
        self.names = [named.name if names.count(named.name) == 1 else f"{named.file.stem}.{named.name}"
                      for named in self.named]  # fmt: skip
        try:
            self.weights = [float(weight) for weight in weights.split(",")] if weights else [1.0] * len(names)
        except ValueError:
            self.weights = []
        if len(self.weights) != len(names) or not all(map(math.isfinite, self.weights)):
            raise UserError(
                f"--reward_weights {weights}: give a number for each of the {len(names)} functions of --reward, "
                f"{', '.join(self.names)}, separated by commas"
            )

    @cached_property
    def functions(self) -> list[RewardFunction]:
        """The functions; their files are executed at the first access."""
        return [RewardFunction(load_object(named, "--reward", "function"), named.name) for named in self.named]

    @cached_property
    def signatures(self) -> list[Signature]:
        """Their signatures, as `try_import` found them, or by executing their files here."""
        found = [FOUND.get(version(named)) for named in self.named]
        return found if all(found) else [function.signature for function in self.functions]

    @property
    def takes_groups(self) -> bool:
        return any(signature.form in ("trl", "verl batch") for signature in self.signatures)

    @property
    def takes_ids(self) -> bool:
        return any("completion_ids" in signature.names for signature in self.signatures)

    def check(self, row: RawRow, columns: KeyColumns, has_environments: bool = False) -> None:
        """Raises UserError if one of them needs what is not there."""
        for signature in self.signatures:
            signature.check(row, columns, has_environments)

    def grade(self, plays: Sequence[Played], row: RawRow, columns: KeyColumns) -> list[Parts]:
        """Returns the rewards of replies to a problem: "return", the weighted sum, and the parts that are logged.

        These are the parts of each function and, if there are several, its value under its name. Functions that return
        None are left out of the sum; if all do, the return is NaN.

        Raises: whatever a function raises, and TypeError if two of them name a part alike.
        """
        graded = [function.grade(plays, row, columns) for function in self.functions]
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


class Rewarded(Changed):
    """An environment of one turn whose replies the user's rewards grade.

    Its own grader still counts correct answers, unless a reward has a part correct_answer, and its parts are logged.
    """

    def __init__(self, env: Env, rewards: RewardFunctions, code: tuple[Path, ...]):
        super().__init__(env)
        self.rewards, self.code = rewards, (*env.code, *code)
        self.truncation_penalty = 0.0
        self.takes_ids, self.takes_groups = rewards.takes_ids, rewards.takes_groups
        rewards.check(env.reward_row(env.problem(0)), KeyColumns())

    def trials(self, problem: Problem) -> list[Trial]:
        return []

    def score_group(self, problem: Problem, texts: Sequence[str]) -> list[dict[str, float]]:
        plays = [Played(text, getattr(text, "ids", ())) for text in texts]
        graded = self.rewards.grade(plays, self.reward_row(problem), KeyColumns())
        return [self.env.score(problem, text) | scores for text, scores in zip(texts, graded, strict=True)]


# a look at the files before they are needed

FOUND: dict[tuple[Named, int], Signature] = {}  # by a name, and when its file was changed


def version(named: Named) -> tuple[Named, int]:
    return named, named.file.stat().st_mtime_ns


def try_import(rewards: str, episode: str) -> None:
    """Executes the files of --reward and --episode in a process of their own, and notes the rewards' signatures.

    Raises: UserError if they fail, end the process, or take longer than IMPORT_SECONDS.
    """
    named = read_names(rewards, "--reward", "function") if rewards else []
    flags = " and ".join(filter(None, [rewards and f"--reward {rewards}", episode and f"--episode {episode}"]))
    if named and not episode and all(version(one) in FOUND for one in named):
        return
    lane = Lane("envs.own.functions:report", (rewards, episode))
    found = lane.answer(IMPORT_SECONDS)
    lane.close()  # with whatever the files have started
    if isinstance(found, Dead):
        late = f"takes longer than {IMPORT_SECONDS} seconds: move slow work into the first call"
        ended = f"{found.reason.replace('it ended its process', 'ends the process')}: remove the line that ends it"
        raise UserError(f"importing {flags} {late if found.is_late else ended}")
    error, *signatures = found
    if error:
        raise UserError(error)
    for one, (name, place, names, needed) in zip(named, signatures, strict=True):
        FOUND[version(one)] = Signature(name, place, tuple(names), tuple(needed))


def report(setup: tuple[str, str], _: Iterator[object]) -> Iterator[list[object]]:
    """Yields an error, or none and the signatures of rewards: what `try_import` reads."""
    rewards, episode = setup
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)  # what the files print, the run prints, too
    os.dup2(nothing, 2)
    try:
        signatures = RewardFunctions(rewards).signatures if rewards else []
        for named in read_names(episode, "--episode", "class") if episode else ():
            made = load_object(named, "--episode", "class")
            with contextlib.suppress(Exception):  # which the run meets, too
                Adapter(made, ToolSettings()).traits()
        yield ["", *map(dataclasses.astuple, signatures)]
    except UserError as error:
        yield [str(error)]
