"""Classes of other trainers as episodes: for TRL's `environment_factory`, and objects with `reset` and `step`.

An object plays an episode in one process, and is then reset for another. Its methods may be coroutine functions. Before
each call the generators of `random`, NumPy and torch are seeded, so that an episode can be played again, and `reset`
gets the same random numbers for all samples of a group.
"""

import contextlib
import inspect
import math
import random
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from envs.base import Episode, Problem, Reply, Step, limited
from envs.data.messages import Message
from envs.data.rows import JSON
from envs.own_code import as_number, wrong_return
from envs.tools.calls import CallError, parse_call
from envs.tools.episode import LastGrade, ToolEpisode, ToolFunction, ToolSettings, completed

STEP_FORM = "(observation, reward, done, info), the five values of Gym, or a mapping of observations, reward and done"
MALFORMED = (AttributeError, KeyError, TypeError, ValueError)  # raised while a returned value is taken apart
Resettable = Any  # an object of another trainer: its `reset` begins an episode, and returns its opening


class Played(NamedTuple):
    """A reply, or an episode at its end."""

    text: str  # the last reply
    ids: Sequence[int] = ()  # tokens of all turns of the policy
    messages: list[Message] = ()  # messages of an episode after the prompt, as TRL writes them
    environment: Resettable | None = None


Grade = Callable[[Played], Mapping[str, float]]  # "return", "correct_answer" and others


def tool_methods(environment: Resettable) -> list[ToolFunction]:
    """Returns the tools of an object: its public methods except `reset` and `get_reward`, as in TRL 1.16's trainer."""
    methods = inspect.getmembers(environment, inspect.ismethod)
    hidden = ("reset", "get_reward")
    return [method for name, method in methods if not name.startswith("_") and name not in hidden]


def grade_by_both(environment: Resettable, grade: LastGrade, text: str) -> Mapping[str, float]:
    """Returns the grade of the last reply; the object's own `get_reward`, if it has one, is added."""
    scores = dict(grade(text))
    if hasattr(environment, "get_reward"):
        returned = completed(environment.get_reward())
        reward = as_number(returned)
        if reward is None:
            raise wrong_return(environment.get_reward, returned, "a number")
        scores["get_reward"] = reward
        scores["return"] = reward + (0 if math.isnan(scores["return"]) else scores["return"])
        scores["correct_answer"] = float(scores["return"] >= 1)
    return scores


def read_step(returned: object) -> tuple[object, float, bool]:
    """Returns observation, reward and end from Gym's four or five values, or a mapping. Raises: one of MALFORMED."""
    if isinstance(returned, tuple):
        observation, reward, end, *others, _ = returned
        ends = [end, *others]
    else:
        observation, reward, ends = returned["observations"], returned["reward"], [returned["done"]]
    number = as_number(reward or 0.0)
    if number is None or len(ends) > 2 or not all(end in (True, False) for end in ends):
        raise ValueError("the reward is not a number, or the end is neither true nor false")
    return observation, number, any(ends)


class GymEpisode(Episode):
    """An object whose actions are replies; the grade of the last reply is added to the last reward."""

    def __init__(self, environment: Resettable, grade: LastGrade):
        self.environment, self.grade = environment, grade
        self.total = 0.0  # sum of rewards
        self.text = ""  # text of the last reply

    def step(self, reply: str) -> Step:
        self.text = reply
        returned = completed(self.environment.step(reply))
        try:
            observation, reward, is_done = read_step(returned)
            messages = [] if is_done else as_messages(observation)
        except MALFORMED as error:
            raise wrong_return(self.environment.step, returned, STEP_FORM) from error
        self.total += reward
        if not is_done:
            return Step(messages, reward)
        end = self.truncate()
        return end._replace(reward=reward + end.reward)

    def truncate(self) -> Step:
        scores = dict(self.grade(self.text))
        reward = scores.pop("return")
        reward = 0.0 if math.isnan(reward) else reward  # the steps pay
        scores["correct_answer"] = float(self.total + reward >= 1)
        return Step([], reward, done=True, info=scores)


def as_messages(observation: object) -> list[Message]:
    """Returns chat messages as they are, and anything else as the text of one message."""
    if isinstance(observation, list) and all(isinstance(message, Mapping) for message in observation):
        return [{"role": message["role"], "content": message["content"]} for message in observation]
    return [{"role": "user", "content": str(observation)}]


class ObjectEpisode(Episode):
    """An episode that an object plays; the object goes back into the pool at its end, and is closed elsewhere."""

    def __init__(self, adapter: "Adapter", environment: Resettable, problem: Problem, seed: int, grade: Grade):
        self.adapter, self.environment = adapter, environment
        self.seeds = problem.seed, seed
        self.turns: list[Message] = []
        self.ids: list[int] = []  # token ids of the policy's turns
        self.is_over = False
        seed_generators(problem.seed)
        row = deepcopy(problem.answer)  # the object may keep and change its lists

        def grade_last(text: str) -> Mapping[str, float]:
            return grade(Played(text, self.ids, self.turns, environment))

        if has_steps := callable(getattr(environment, "step", None)):
            first = call(environment.reset, {"seed": zlib.crc32(str(problem.seed).encode()), **row})
            self.player = GymEpisode(environment, grade_last)
        else:
            first = completed(environment.reset(**row))
            tools = tool_methods(environment)
            self.player = ToolEpisode(tools, adapter.settings, partial(grade_by_both, environment, grade_last))
        try:
            if not has_steps:
                said = [] if first is None else as_messages(first)
            elif isinstance(first, tuple):
                observation, _ = first
                said = as_messages(observation)
            else:
                said = as_messages(first)
        except MALFORMED as error:
            form = "an observation, or (observation, info)" if has_steps else "text, None, or a list of messages"
            raise wrong_return(environment.reset, first, form) from error
        said, before = limited(Step(said)).messages, problem.messages
        if said and before[-1]["role"] == said[0]["role"] == "user":  # they are one message
            said[0]["content"] = before[-1]["content"] + "\n" * has_steps + said[0]["content"]
            before = before[:-1]
        self.opening = before + said

    def step(self, reply: str) -> Step:
        return self.act(Reply(reply))

    def act(self, reply: Reply) -> Step:
        seed_generators(*self.seeds, len(self.turns))
        calls = list(map(as_call, reply.calls))
        self.turns.append({"role": "assistant", "content": reply.text} | ({"tool_calls": calls} if calls else {}))
        self.ids += getattr(reply.text, "ids", ())
        step = self.player.act(reply)
        names = [{"name": call["function"]["name"]} for call in calls] or [{}] * len(step.messages)
        self.turns += [{**message, **name} for message, name in zip(step.messages, names, strict=False)]
        self.is_over = step.done
        return step

    def truncate(self) -> Step:
        seed_generators(*self.seeds, len(self.turns))
        step = self.player.truncate()
        self.is_over = True
        return step

    def close(self) -> None:
        if self.is_over:
            self.adapter.idle.append(self.environment)
        else:
            close(self.environment)


def as_call(text: str) -> dict[str, JSON]:
    """Returns a call in the form of transformers' messages; a malformed call has neither name nor arguments."""
    try:
        name, arguments = parse_call(text)
    except CallError:
        name, arguments = "", {}
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def seed_generators(*address: int) -> None:
    """Seeds the global generators of those modules that are there, by a digest of the address."""
    seed = zlib.crc32(str(address).encode())
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)


def close(environment: Resettable) -> None:
    """Closes an object if it can be closed; its errors are ignored."""
    with contextlib.suppress(Exception):
        if callable(getattr(environment, "close", None)):
            completed(environment.close())


@dataclass(frozen=True)
class Adapter:
    """Episodes of the objects that a class, or another factory without arguments, makes; ended ones wait in a pool."""

    factory: Callable[[], Resettable]
    settings: ToolSettings
    idle: list[Resettable] = field(default_factory=list)  # the pool

    def traits(self) -> tuple[bool, Sequence[ToolFunction], bool]:
        """Returns whether new objects have `step`, the tools of those that do not, and whether they pay rewards.

        Raises: AttributeError or TypeError for objects that cannot be played; errors of the constructor.
        """
        environment = self.factory()
        self.idle.append(environment)
        if not callable(getattr(environment, "reset", None)):
            raise AttributeError("they have no method reset")
        space = getattr(environment, "action_space", None)
        if hasattr(environment, "get_observation") or hasattr(space, "sample") and not hasattr(space, "characters"):
            raise TypeError("their actions are not texts: use as_gym(CLASS), see recipes/gyms/README.md")
        if callable(getattr(environment, "step", None)):
            return True, (), True
        return False, tuple(tool_methods(environment)), hasattr(environment, "get_reward")

    def episode(self, problem: Problem, seed: int, grade: Grade) -> Episode:
        """Returns a new episode of a problem, whose answer is a row."""
        environment = self.idle.pop() if self.idle else self.factory()
        try:
            return ObjectEpisode(self, environment, problem, seed, grade)
        except BaseException:
            close(environment)
            raise

    def close(self) -> None:
        """Closes the objects of the pool."""
        while self.idle:
            close(self.idle.pop())


def call(function: Callable[..., object], arguments: Mapping[str, JSON]) -> object:
    """Calls a function with the arguments that it takes, and returns its result."""
    taken = parameters(function)
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values())
    return completed(function(**{name: value for name, value in arguments.items() if takes_all or name in taken}))


def parameters(function: Callable[..., object]) -> Mapping[str, inspect.Parameter]:
    """Returns the parameters of a function or a class; none if Python cannot read them."""
    try:
        return inspect.signature(function).parameters
    except ValueError:
        return {}
