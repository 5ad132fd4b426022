"""Classes of other trainers as episodes: those of TRL's `environment_factory`, and objects with `reset` and `step`.

Their methods may be coroutine functions. `reset` is called for the prompt and again for each episode of it, in other
processes: it must be a pure function of its arguments, and what an object does later one of its `reset` and the calls.
"""

import inspect
import json
import zlib
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import NamedTuple, Protocol, Self

from envs.base import Episode, Step
from envs.data import JSON, RawRow
from envs.gyms import call
from envs.tools import Tool, ToolEpisode, ToolSettings, completed

Messages = list[dict[str, str]]
Grade = Callable[[str], Mapping[str, float]]  # the last reply's "return", "correct_answer" and others


class Resettable(Protocol):
    """An object of another trainer."""

    def reset(self, **arguments: JSON) -> object:
        """Begins an episode; returns what the policy is to read first, in one of several forms."""


def has_steps(environment: Resettable) -> bool:
    """True if an object takes actions by `step`, else its public methods are tools."""
    return callable(getattr(environment, "step", None))


# TRL


def tool_methods(environment: Resettable) -> list[Tool]:
    """Returns the tools of an object: its public methods but `reset` and `get_reward`.

    Source: trl/trainer/grpo_trainer.py of TRL 1.16.
    """
    methods = inspect.getmembers(environment, inspect.ismethod)
    hidden = ("reset", "get_reward")
    return [method for name, method in methods if not name.startswith("_") and name not in hidden]


class MethodEpisode(ToolEpisode):
    """An object whose methods are tools. Its `get_reward`, if it has one, is added to the grade of the last reply."""

    def __init__(self, environment: Resettable, row: RawRow, settings: ToolSettings, grade: Grade):
        completed(environment.reset(**row))
        super().__init__(tool_methods(environment), settings)
        self.environment = environment
        self.grade = grade

    def final_reward(self, text: str) -> Mapping[str, float]:
        scores = dict(self.grade(text))
        if hasattr(self.environment, "get_reward"):
            reward = float(completed(self.environment.get_reward()))
            scores["get_reward"] = reward
            scores["return"] += reward
            scores["correct_answer"] = float(scores["return"] >= 1)
        return scores


# reset and step


class Answer(NamedTuple):
    """Answer of an object to an action."""

    observation: object
    reward: float | None
    is_done: bool

    @classmethod
    def read(cls, answer: object) -> Self:
        """Reads a tuple of four or five (Gym), a mapping (SkyRL-gym), or an object with attributes (OpenEnv)."""
        if isinstance(answer, tuple):
            observation, reward, *ends, _ = answer
            return cls(observation, reward, any(ends))
        if isinstance(answer, Mapping):
            return cls(answer["observations"], answer["reward"], answer["done"])
        return cls(answer.observation, answer.reward, answer.done)


class GymEpisode(Episode):
    """An object whose actions are replies. The grade of the last reply is added to the last reward.

    A return of 1 or more is correct.
    """

    def __init__(self, environment: Resettable, row: RawRow, grade: Grade):
        reset(environment, row)
        self.environment = environment
        self.grade = grade
        self.total = 0.0  # of rewards
        self.text = ""  # of the last reply

    def step(self, reply: str) -> Step:
        self.text = reply
        answer = Answer.read(completed(self.environment.step(reply)))
        reward = float(answer.reward or 0)
        self.total += reward
        if not answer.is_done:
            return Step(as_messages(answer.observation), reward)
        end = self.truncate()
        return end._replace(reward=reward + end.reward)

    def truncate(self) -> Step:
        scores = dict(self.grade(self.text))
        reward = scores.pop("return")
        scores["correct_answer"] = float(self.total + reward >= 1)
        if hasattr(self.environment, "close"):
            completed(self.environment.close())
        return Step([], reward, done=True, info=scores)


def reset(environment: Resettable, row: RawRow) -> object:
    """Returns the first observation: of the columns of a row that `reset` takes, and of a seed made from the row."""
    identity = json.dumps(row, sort_keys=True, default=str)
    seed = zlib.crc32(identity.encode())
    first = call(environment.reset, {"seed": seed, **row})
    if isinstance(first, tuple):
        observation, _ = first
        return observation
    return getattr(first, "observation", first)


def as_messages(observation: object) -> Messages:
    """Returns chat messages as they are, and anything else as the text of one message."""
    if isinstance(observation, list) and all(isinstance(message, Mapping) for message in observation):
        return [{"role": message["role"], "content": message["content"]} for message in observation]
    return [{"role": "user", "content": str(observation)}]


# both


@dataclass(frozen=True)
class Adapter:
    """Problems and episodes of the objects that a class, or another factory without arguments, makes."""

    factory: Callable[[], Resettable]
    settings: ToolSettings

    def traits(self) -> tuple[bool, bool]:
        """Returns if the policy calls methods of the objects, and if they pay rewards.

        Raises: AttributeError where they have no `reset`, and whatever their making raises.
        """
        environment = self.factory()
        if not callable(getattr(environment, "reset", None)):
            raise AttributeError("they have no method reset")
        has_tools = not has_steps(environment)
        pays = hasattr(environment, "get_reward") or not has_tools
        return has_tools, pays

    def prompt(self, messages: Messages, row: RawRow) -> tuple[Messages, tuple[Tool, ...]]:
        """Returns the messages of a row with the first observation behind them, and the tools that are announced."""
        environment = self.factory()
        row = deepcopy(row)  # the object may keep and change its lists
        if has_steps(environment):
            observed = as_messages(reset(environment, row))
            return extended(messages, observed, "\n"), ()
        text = completed(environment.reset(**row))
        observed = as_messages(text) if text is not None else []
        return extended(messages, observed, ""), tuple(tool_methods(environment))

    def episode(self, row: RawRow, grade: Grade) -> Episode:
        """Returns a new episode of a row."""
        environment = self.factory()
        row = deepcopy(row)
        if has_steps(environment):
            return GymEpisode(environment, row, grade)
        return MethodEpisode(environment, row, self.settings, grade)


def extended(messages: Messages, observed: Messages, separator: str) -> Messages:
    """Returns messages and others behind them; the first of these is joined to the last one where both are a user's."""
    if not observed:
        return messages
    last, first = messages[-1], observed[0]
    if not last["role"] == first["role"] == "user":
        return messages + observed
    content = last["content"] + separator + first["content"]
    return [*messages[:-1], {"role": "user", "content": content}, *observed[1:]]
