"""Classes as users of other trainers write them, and an environment with hostile tools; for tests/test_tools.py."""

import asyncio
from types import SimpleNamespace

from envs.base import Env, Episode, Problem
from envs.tools import ToolEpisode, ToolSettings
from tests.hostile import Hostile


class Counter:
    """A class of TRL's `environment_factory`: the counter is to reach the target of the row."""

    def reset(self, target: int, **row) -> str:
        self.value = 0
        self.target = target
        return f"Reach {target}."

    def add(self, amount: int) -> int:
        """
        Adds to the counter.

        Args:
            amount: Number to add.
        """
        self.value += amount
        return self.value

    def take(self, amount: int) -> int:
        """
        Takes from the counter.

        Args:
            amount: Number to take.
        """
        if amount > self.value:
            raise ValueError(f"there are only {self.value}")
        return self.add(-amount)

    def get_reward(self) -> float:
        return float(self.value == self.target)

    def _hidden(self):
        raise AssertionError


class Waiting:
    """Coroutine functions, and no text before the first turn."""

    async def reset(self, target: int, **row) -> None:
        self.value = target

    async def look(self) -> str:
        """Shows the number."""
        await asyncio.sleep(0)
        return f"it is {self.value}"

    async def get_reward(self) -> float:
        return 0.5


class Unpaid:
    """No `get_reward`: the last reply is graded otherwise."""

    def reset(self, targets: list[int], **row) -> str:
        return f"Targets {targets.pop()}{targets}."

    def echo(self, text: str) -> str:
        """
        Returns the text.

        Args:
            text: Any text.
        """
        return text


class Broken(Counter):
    def get_reward(self) -> float:
        raise ValueError("nothing is paid")


class Countdown:
    """Gym: so many steps to 0, each of which pays 0.5; `answer` makes what a step returns."""

    def reset(self, seed: int, target: int) -> tuple[str, dict]:
        self.left = target
        return f"{target} left, seed {seed}", {}

    def step(self, action: str) -> tuple:
        self.left -= len(action)
        return self.answer(f"{self.left} left", 0.5, self.left <= 0)

    def answer(self, observation, reward, done):
        return observation, reward, done, {}


class Countdown5(Countdown):
    def answer(self, observation, reward, done):
        return observation, reward, False, done, {}


class SkyCountdown(Countdown):
    def answer(self, observation, reward, done):
        messages = [] if done else [{"role": "user", "content": observation}]
        return {"observations": messages, "reward": reward, "done": done, "metadata": {}}


class OpenCountdown(Countdown):
    """OpenEnv's client; it is closed at the end."""

    closed = 0

    def reset(self, **arguments):
        observation, _ = super().reset(arguments["seed"], arguments["target"])
        return self.answer(observation, None, False)

    def answer(self, observation, reward, done):
        return SimpleNamespace(observation=observation, reward=reward, done=done)

    def close(self):
        OpenCountdown.closed += 1


class AsyncCountdown(Countdown):
    async def step(self, action: str) -> tuple:
        return super().step(action)


class NeedsArguments:
    def __init__(self, url: str):
        pass


class Untyped(Waiting):
    def guess(self, word):
        pass


def reward(completion: str, target: int, **row) -> float:
    return 0.25 * (str(target) in completion)


class HostileTools(Env):
    """A tool that does what tests/hostile.py does; a reply without a call pays 1."""

    num_tasks = 10
    max_turns = 3
    dialect = "qwen"

    def problem(self, index: int) -> Problem:
        return Problem([{"role": "user", "content": "?"}], index)

    def episode(self, problem: Problem, seed: int) -> Episode:
        return HostileEpisode(problem)


class HostileEpisode(ToolEpisode):
    def __init__(self, problem: Problem):
        super().__init__([self.misbehave], ToolSettings())
        self.problem = problem

    def misbehave(self, way: str) -> dict:
        if way == "half":
            return "\ud800"
        return Hostile().score(self.problem, way)

    def final_reward(self, text):
        return {"return": 1.0, "correct_answer": 1.0}


def make() -> Env:
    return HostileTools()
