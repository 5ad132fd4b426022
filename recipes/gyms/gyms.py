"""Environments of other libraries as objects with `reset` and `step` on texts, which `--episode FILE.py:NAME` plays.

`as_gym` recognizes TextArena, Gymnasium's environments with numbered actions, OpenEnv's clients and environments, and
SkyRL-gym, by their attributes. GEM's environments have that form already. None of the libraries is imported.
"""

import inspect
import json
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, get_args, get_origin

from envs.data.rows import JSON
from envs.own.adapters import call, parameters
from envs.tools.episode import completed
from utils.settings.errors import describe_error

Transition = tuple[object, float | None, bool, Mapping]  # observation, reward, end of the episode, facts
NUMBER = re.compile(r"\d{1,9}")
NOT_SHOWN = ("done", "reward", "metadata")  # fields of OpenEnv's observations


class TextArena:
    """TextArena with one player.

    The library's wrappers repeat the game in each observation; here the row holds it already.
    """

    def __init__(self, environment: Any):
        self.environment = environment

    def reset(self, seed: int) -> str:
        self.environment.reset(num_players=1, seed=seed)
        return self.observation()

    def step(self, action: str) -> Transition:
        is_done, info = self.environment.step(action)
        if not is_done:
            return self.observation(), 0.0, False, info
        rewards, info = self.environment.close()
        return "", (rewards or {}).get(0, 0.0), True, info

    def observation(self) -> str:
        """Returns the game's messages since the last turn."""
        game = self.environment
        while "env" in vars(game):
            game = game.env
        player, messages = game.get_observation()
        return "\n".join(str(text) for sender, text, *_ in messages if sender != player)


class Numbered:
    """Gymnasium with numbered actions: the last number of a reply is the action.

    An observation is the text of `render` if that is text, with colors in brackets, behind their codes.
    """

    def __init__(self, environment: Any):
        self.environment = environment
        self.close = environment.close

    def reset(self, seed: int) -> str:
        observation, _ = self.environment.reset(seed=seed)
        return self.shown(observation)

    def step(self, action: str) -> tuple:
        space = self.environment.action_space
        first = int(getattr(space, "start", 0))
        last = first + int(space.n) - 1
        numbers = NUMBER.findall(action)
        if not numbers or not first <= int(numbers[-1]) <= last:
            return refusal(f"an action is a number from {first} to {last}")
        observation, *others = self.environment.step(int(numbers[-1]))
        return self.shown(observation), *others

    def shown(self, observation: object) -> str:
        """Returns an observation as text."""
        if getattr(self.environment, "render_mode", "") == "ansi":
            return self.environment.render().replace("\x1b[0m", "]").replace("\x1b", "")
        parts = observation if isinstance(observation, tuple) else (observation,)
        return ", ".join(str(getattr(part, "tolist", lambda part=part: part)()) for part in parts)


class Typed:
    """OpenEnv: actions and observations are objects with fields, or dicts.

    If the action has one field, or one required field, the reply fills it. Otherwise the reply is a JSON object.
    """

    def __init__(self, environment: Any, action_class: type):
        self.environment = environment
        self.close = environment.close
        self.action_class = action_class

    def reset(self, **arguments: JSON) -> str:
        return shown_fields(call(self.environment.reset, arguments))

    def step(self, action: str) -> Transition:
        try:
            made = self.action(action)
        except ValueError as error:
            return refusal(describe_error(error))
        answer = completed(self.environment.step(made))
        return shown_fields(answer), answer.reward, bool(answer.done), {}

    def action(self, reply: str) -> object:
        """Returns the action that a reply stands for. Raises: ValueError if it stands for none."""
        fields = getattr(self.action_class, "model_fields", {})
        names = [name for name in fields if name not in NOT_SHOWN]
        required = [name for name in names if fields[name].is_required()]
        if len(names) == 1 or len(required) == 1 and not reply.lstrip().startswith("{"):
            (name,) = required or names
            is_text = fields[name].annotation is str
            return self.action_class(**{name: reply if is_text else reply.strip()})
        try:
            return self.action_class(**json.loads(reply))
        except (TypeError, RecursionError) as error:
            raise ValueError("an action is a JSON object") from error


class SkyRL:
    """SkyRL-gym: an object is made of a row, and `init` begins its episode with the messages of the prompt."""

    def __init__(self, make: Callable[..., Any]):
        self.make = make
        self.environment: Any = None

    def reset(self, seed: int, **row: JSON) -> object:
        if self.environment:
            self.close()
        self.environment = self.make(extras=row)
        prompt = row.get("prompt", [])
        prompt = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        messages, _ = self.environment.init(prompt)
        if messages[: len(prompt)] != prompt:
            raise ValueError("`init` changes the prompt of the row")
        return messages[len(prompt) :]

    def step(self, action: str) -> Mapping[str, object]:
        return self.environment.step(action)

    def close(self) -> None:
        self.environment.close()


def as_gym(factory: Callable[[], Any]) -> Callable[[], Any]:
    """Returns a factory of objects with `reset` and `step` on texts, for one whose objects have another interface."""
    if "extras" in parameters(factory):
        return partial(SkyRL, factory)
    return lambda: adapted(factory())


def adapted(environment: Any) -> Any:
    """Returns an object of another library with `reset` and `step` on texts, and any other object as it is.

    Raises: TypeError if a reply cannot stand for an action.
    """
    if not hasattr(environment, "step"):
        return environment
    if hasattr(environment, "get_observation"):
        return TextArena(environment)
    space = getattr(environment, "action_space", None)
    if hasattr(space, "n") and space.shape == ():
        return Numbered(environment)
    if hasattr(space, "sample") and not hasattr(space, "characters"):
        raise TypeError(f"its actions are {space}, and a reply is a text or a number")
    client = getattr(environment, "async_client", environment)  # OpenEnv's in sync mode holds the other
    if hasattr(client, "call_tool") or hasattr(client, "get_callables"):
        raise TypeError("its actions are calls of tools: write a class with a method for each, which calls it")
    action = action_class(type(client))
    return environment if action is None else Typed(environment, action)


def action_class(cls: type) -> type | None:
    """Returns the class of OpenEnv's actions: the annotation in `step`, or the first argument of a generic base."""
    try:
        _, action, *_ = inspect.signature(cls.step, eval_str=True).parameters.values()
    except (AttributeError, NameError, ValueError):  # `step` is no method, or its annotations cannot be read
        return None
    generics = [get_args(base)[:1] for holder in cls.__mro__ for base in vars(holder).get("__orig_bases__", ())]
    for found in (action.annotation, *(base for first in generics for base in first)):
        if hasattr(found, "model_fields"):
            return found
        if get_origin(found) is dict:
            return dict
    return None


def shown_fields(answer: object) -> str:
    """Returns the observation in OpenEnv's response: the only field that is set, or all set fields as JSON."""
    observation = answer if hasattr(answer, "model_dump") else answer.observation
    fields = observation.model_dump() if hasattr(observation, "model_dump") else observation
    fields = {name: value for name, value in fields.items() if name not in NOT_SHOWN and value is not None}
    if len(fields) == 1:
        return str(*fields.values())
    return json.dumps(fields, default=str, ensure_ascii=False) if fields else ""


def refusal(reason: str) -> Transition:
    """Returns the response to a reply that stands for no action, in the words of a failed call."""
    return str({"error": reason}), 0.0, False, {}
