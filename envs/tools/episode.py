"""Tools in episodes: the calls of a reply are run, and their results are what the policy reads next.

A call is hostile input, and a tool is other people's code: neither raises out of an episode. What a tool does to its
process (hang, fork, fill the memory) ends that process: see envs/scoring/worker.py.
"""

import asyncio
import inspect
import json
import math
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from functools import cache
from itertools import islice
from typing import NamedTuple

from envs.base import DIALECTS, INLINE, Episode, Reply, Step, cut
from envs.data.rows import JSON

ToolFunction = Callable[..., object]
LastGrade = Callable[[str], Mapping[str, float]]  # grades the last reply: "return", "correct_answer" and more to log
ARGUMENTS = ("arguments", "parameters", "args", "kwargs", "input")  # keys of a call; Llama 3 writes "parameters"
LABELS = ("type", "id")  # keys that do not change what is run
MAX_CALL = 100_000  # characters of a call
MAX_ERROR = 200  # characters of the reason of an error


class ToolSettings(NamedTuple):
    """Limits of calls, and their price."""

    dialect: str = "qwen"
    max_calls: int = 16  # calls of an episode; further ones are errors
    max_result_characters: int = 2000
    error_reward: float = 0.0  # added for each call that fails
    call_cost: float = 0.0  # subtracted for each call


class CallError(ValueError):
    """Raised for a call that cannot be run."""


class ToolEpisode(Episode):
    """A conversation in which the policy calls tools, and which ends with its first reply without a call.

    That reply, or the last one before a limit, is graded, without calls: what a tool has returned, called again, is no
    answer. Tools may be coroutine functions.
    """

    def __init__(self, tools: Sequence[ToolFunction], settings: ToolSettings, grade: LastGrade):
        self.tools = {tool.__name__: tool for tool in tools}
        self.settings = settings
        self.grade = grade
        self.dialect = DIALECTS[settings.dialect]
        self.num_calls = 0  # calls that were run, with and without an error
        self.num_errors = 0  # errors of calls, run or not
        self.text = ""  # what the last reply says

    def act(self, reply: Reply) -> Step:
        self.text = self.without_calls(reply)
        if not reply.calls:
            return self.truncate()
        num_calls, num_errors = self.num_calls, self.num_errors
        messages = [self.message(reply, self.run(call)) for call in reply.calls]
        num_calls = self.num_calls - num_calls
        num_errors = self.num_errors - num_errors
        reward = num_errors * self.settings.error_reward - num_calls * self.settings.call_cost
        return Step(messages, reward, info={"tool_calls": num_calls, "tool_errors": num_errors})

    def truncate(self) -> Step:
        scores = {"tool_calls": 0.0, "tool_errors": 0.0, **self.grade(self.text)}
        reward = scores.pop("return")
        return Step([], reward, done=True, info=scores)

    def without_calls(self, reply: Reply) -> str:
        """Returns the text of a reply before its first call."""
        opening = self.dialect.opening
        if not reply.calls:
            return reply.text
        return reply.text.partition(opening)[0] if opening else ""

    def message(self, reply: Reply, result: str) -> dict[str, str]:
        """Returns the message with a result; behind an inline call that was not closed, it is a user's."""
        if not self.dialect.is_inline:
            return {"role": "tool", "content": result}
        role = INLINE if all(reply.calls) else "user"
        return {"role": role, "content": result}

    def run(self, call: str) -> str:
        """Returns the result of a call, or one line with an error."""
        try:
            return cut(str(self.result(call)), self.settings.max_result_characters)
        except BaseException as error:  # noqa: BLE001 (tools are other people's code, and may exit)
            self.num_errors += 1
            return str({"error": reason(error)})  # as TRL writes it; repr leaves no line break

    def result(self, call: str) -> object:
        """Returns the result of a call. Raises: CallError if it cannot be run, and whatever the tool raises."""
        if not call:
            raise CallError(f"the call is empty, or not closed by {self.dialect.closing}")
        if len(call) > MAX_CALL:
            raise CallError(f"the call has more than {MAX_CALL} characters")
        if self.num_calls >= self.settings.max_calls:
            raise CallError(f"no more than {self.settings.max_calls} calls are allowed: answer without one")
        if self.dialect.is_inline:
            tool, *_ = self.tools.values()
            arguments = inspect.signature(tool).bind(call)
        else:
            name, values = parse_call(call)
            if name not in self.tools:
                raise CallError(f"there is no tool {name[:50]!r}; there are {', '.join(self.tools)}")
            tool = self.tools[name]
            arguments = bind(tool, values)
        self.num_calls += 1
        return completed(tool(*arguments.args, **arguments.kwargs))


def parse_call(text: str) -> tuple[str, dict[str, JSON]]:
    """Returns the name and the arguments of a call in JSON, as in {"name": "add", "arguments": {"a": 1}}.

    The arguments may stand under any of ARGUMENTS, and the whole call under "function".
    Raises: CallError for anything else, with the keys that are not read. Also for a name that comes twice in an object,
    and for numbers that are not finite.
    """
    try:
        call = json.loads(
            text, object_pairs_hook=unique_object, parse_float=finite_number, parse_constant=finite_number
        )
    except CallError:
        raise
    except (ValueError, RecursionError) as error:
        raise CallError(f"the call is not JSON: {reason(error)}") from error
    if isinstance(call, dict) and isinstance(call.get("function"), dict):  # as in messages of transformers and OpenAI
        call = {key: value for key, value in call.items() if key != "function"} | call["function"]
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        keys = f", but has {quoted(call)}" if isinstance(call, dict) else ""
        raise CallError(f'the call is not an object with "name" and "arguments"{keys}')
    others = [key for key in call if key not in ("name", *ARGUMENTS, *LABELS)]
    if others:
        raise CallError(f'the call has {quoted(others)}, which is not read: put what the tool takes into "arguments"')
    given = [key for key in ARGUMENTS if key in call]
    if len(given) > 1:
        raise CallError(f'the call has {quoted(given)}: give its arguments once, as "arguments"')
    arguments = call[given[0]] if given else {}
    if not isinstance(arguments, dict):
        raise CallError(f"the {given[0]} are not an object")
    return call["name"], arguments


def quoted(keys: Iterable[str]) -> str:
    """Returns the first three keys of an object for a message."""
    return ", ".join(json.dumps(key[:30]) for key in islice(keys, 3))


def unique_object(pairs: list[tuple[str, JSON]]) -> dict[str, JSON]:
    """Returns a JSON object. Raises: CallError if a name comes twice."""
    names = dict(pairs)
    if len(names) < len(pairs):
        raise CallError("the call has a name twice in one object")
    return names


def finite_number(text: str) -> float:
    """Returns a number with a point or an exponent. Raises: CallError for NaN, Infinity and what is too large."""
    number = float(text)
    if not math.isfinite(number):
        raise CallError(f"the call has {text[:20]}, which is no finite number")
    return number


def bind(tool: ToolFunction, values: Mapping[str, JSON]) -> inspect.BoundArguments:
    """Returns the arguments of a tool. Raises: CallError for arguments that the tool does not take."""
    try:
        return inspect.signature(tool).bind(**values)
    except TypeError as error:
        raise CallError(f"{tool.__name__}: {error}") from error


def completed(value: object) -> object:
    """Returns a value; a coroutine is run to its result."""
    return event_loop().run_until_complete(value) if isinstance(value, Coroutine) else value


@cache
def event_loop() -> asyncio.AbstractEventLoop:
    """Returns the event loop of this process: a connection that one call opens also serves the next."""
    return asyncio.new_event_loop()


def reason(error: BaseException) -> str:
    """Returns the message of an error; its type if it has no message or cannot be printed."""
    try:
        text = str(error) or type(error).__name__
    except BaseException:  # noqa: BLE001
        text = type(error).__name__
    return text[:MAX_ERROR]
