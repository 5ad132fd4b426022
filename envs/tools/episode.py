"""Tools in episodes: the calls of a reply are run, and their results are what the policy reads next.

Calls are adversarial, and tools are other people's code: neither raises out of an episode. What a tool does to its
process (hang, fork, fill the memory) ends that process: see envs/scoring/worker.py.
"""

import asyncio
import inspect
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import cache
from typing import NamedTuple

from envs.base import DIALECTS, INLINE, Episode, Reply, Step, cut
from envs.tools.calls import MAX_CALL, CallError, parse_call, reason

ToolFunction = Callable[..., object]
LastGrade = Callable[[str], Mapping[str, float]]  # grades the last reply: "return", "correct_answer" and more to log


class ToolSettings(NamedTuple):
    """Limits of calls, and their price."""

    dialect: str = "qwen"
    max_calls: int = 16  # calls of an episode; further ones are errors
    max_result_characters: int = 2000
    error_reward: float = 0.0  # added for each call that fails
    call_cost: float = 0.0  # subtracted for each call


class ToolEpisode(Episode):
    """A conversation in which the policy calls tools, and which ends with its first reply without a call.

    That reply, or the last one before a limit without its calls, is graded. Tools may be coroutine functions.
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
        self.text = reply.text
        if not reply.calls:
            return self.truncate()
        opening = self.dialect.opening
        self.text = reply.text.partition(opening)[0] if opening else ""
        role = "tool"
        if self.dialect.is_inline:
            role = INLINE if all(reply.calls) else "user"  # an inline call was not closed
        num_calls, num_errors = self.num_calls, self.num_errors
        messages = [{"role": role, "content": self.run(call)} for call in reply.calls]
        num_calls = self.num_calls - num_calls
        num_errors = self.num_errors - num_errors
        reward = num_errors * self.settings.error_reward - num_calls * self.settings.call_cost
        return Step(messages, reward, info={"tool_calls": num_calls, "tool_errors": num_errors})

    def truncate(self) -> Step:
        scores = {"tool_calls": 0.0, "tool_errors": 0.0, **self.grade(self.text)}
        reward = scores.pop("return")
        return Step([], reward, done=True, info=scores)

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
            try:
                arguments = inspect.signature(tool).bind(**values)
            except TypeError as error:
                raise CallError(f"{name}: {error}") from error
        self.num_calls += 1
        return completed(tool(*arguments.args, **arguments.kwargs))


def completed(value: object) -> object:
    """Returns a value; a coroutine is run to its result."""
    return event_loop().run_until_complete(value) if isinstance(value, Coroutine) else value


@cache
def event_loop() -> asyncio.AbstractEventLoop:
    """Returns the event loop of this process: a connection that one call opens also serves the next."""
    return asyncio.new_event_loop()
