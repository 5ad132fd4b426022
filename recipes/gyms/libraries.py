"""Classes as other libraries have them, and their names in the form of a user's file: recipes/gyms/test_gyms.py."""

from types import SimpleNamespace
from typing import Generic, TypeVar

import numpy as np
import pydantic

from recipes.gyms.gyms import as_gym


class Arena:
    """TextArena: the game of one player; its own class is wrapped by the library."""

    def reset(self, num_players: int, seed: int | None = None):
        assert num_players == 1
        self.left, self.said = 2, [(-1, f"Seed {seed}, 2 left.", None)]

    def step(self, action: str) -> tuple[bool, dict]:
        self.left -= 1
        self.said = [(0, action, None), (-1, f"{self.left} left.", None), (-1, 7, None)]
        return self.left == 0, {}

    def get_observation(self):
        return 0, self.said

    def close(self):
        return {0: 0.75 if self.left == 0 else 0.0}, {}


class Wrapped:
    def __init__(self):
        self.env = Arena()

    def __getattr__(self, name: str):
        return getattr(self.env, name)

    def get_observation(self):
        raise AssertionError("it repeats the game")


class Lake:
    """Gymnasium: numbered actions, and a board in colors."""

    action_space = SimpleNamespace(n=np.int64(3), start=np.int64(1), shape=(), sample=None)
    render_mode = "ansi"

    def reset(self, *, seed=None, options=None):
        self.cell = 0
        return 0, {}

    def step(self, action: int):
        assert type(action) is int
        self.cell += action
        return self.cell, 0.5, self.cell >= 4, False, {}

    def render(self) -> str:
        return f"(Down)\n\x1b[41m{self.cell}\x1b[0m"

    def close(self):
        pass


class Table(Lake):
    """An observation of several numbers, and nothing to render as text."""

    render_mode = None

    def step(self, action: int):
        _, *others = super().step(action)
        return (np.int64(7), np.array([1, 2]), self.cell), *others


class Boxed(Lake):
    action_space = SimpleNamespace(sample=None, shape=(2,))


class Say(pydantic.BaseModel):
    """OpenEnv: an action."""

    message: str
    metadata: dict = {}


class Move(pydantic.BaseModel, extra="forbid"):
    x: int
    fast: bool = False


class Seen(pydantic.BaseModel):
    """OpenEnv: an observation."""

    text: str | None = None
    length: int | None = None
    done: bool = False
    reward: bool | float | None = None
    metadata: dict = {}


class Echoes:
    """An environment of OpenEnv in process."""

    def reset(self, seed: int | None = None, episode_id: str | None = None):
        return Seen(text="Ready")

    def step(self, action: Say, timeout_s: float | None = None) -> Seen:
        return Seen(text=action.message, length=len(action.message), reward=True, done=action.message == "end")

    def close(self):
        pass


class Moves(Echoes):
    def step(self, action: Move) -> Seen:
        return Seen(text=f"{action.x} {action.fast}", reward=0.25, done=action.x > 5)


Action = TypeVar("Action")
Seeing = TypeVar("Seeing")


class Client(Generic[Action, Seeing]):
    """A client of OpenEnv, whose class says the class of its actions; `sync` returns it in another object."""

    def reset(self, **arguments):
        return SimpleNamespace(observation=Seen(text=f"{sorted(arguments)}"), reward=None, done=False)

    def step(self, action: Action, **arguments) -> SimpleNamespace:
        seen = Echoes().step(self.read(action))
        return SimpleNamespace(observation=self.show(seen), reward=seen.reward, done=seen.done)

    def close(self):
        pass


class EchoClient(Client[Say, Seen]):
    def read(self, action: Say) -> Say:
        assert type(action) is Say
        return action

    def show(self, seen: Seen) -> Seen:
        return seen


class SyncClient:
    def __init__(self):
        self.async_client = EchoClient()

    def __getattr__(self, name: str):
        return getattr(self.async_client, name)

    def reset(self, **arguments):
        return self.async_client.reset(**arguments)

    def step(self, action, **arguments):
        return self.async_client.step(action, **arguments)


class DictClient(Client[dict[str, object], dict[str, object]]):
    def read(self, action: dict) -> Say:
        return Say(**action)

    def show(self, seen: Seen) -> dict:
        return seen.model_dump()


class ToolClient(EchoClient):
    def call_tool(self, name: str):
        pass


class Sky:
    """SkyRL-gym: a row makes it, and `init` gets the prompt."""

    def __init__(self, env_config=None, extras=None):
        self.target = extras["target"]

    def init(self, prompt):
        return [*prompt, {"role": "user", "content": "Begin."}], {}

    def step(self, action: str):
        done = str(self.target) in action
        said = [] if done else [{"role": "user", "content": "No."}]
        return {"observations": said, "reward": float(done), "done": done, "metadata": {}}

    def close(self):
        pass


arena, lake, table, boxed = map(as_gym, (Wrapped, Lake, Table, Boxed))
echoes, moves, echo_client, sync_client = map(as_gym, (Echoes, Moves, EchoClient, SyncClient))
dict_client, tool_client, sky = map(as_gym, (DictClient, ToolClient, Sky))
