"""Classes as users of other trainers write them, and an environment with hostile tools: tests/envs/test_tools.py."""

import asyncio
import os
import random
import secrets
from pathlib import Path
from types import SimpleNamespace


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


class Increment:
    """Draws what it asks for, and is paid by a function of the object."""

    def reset(self, **row) -> str:
        self.count, self.target = 0, random.randint(1, 6)
        return f"Increment by {self.target}"

    def increment(self, step: int) -> int:
        """
        Adds to the count.

        Args:
            step: Number to add.
        """
        self.count += step
        return self.count


class Paid(Increment):
    def get_reward(self) -> float:
        return 0.25


def environment_rewards(environments, **kwargs):
    return [1 / (1 + environment.target) for environment in environments]


async def later_rewards(completions, **kwargs):
    await asyncio.sleep(0)
    return [2.0] * len(completions)


def lengths(completion_ids, **kwargs):
    return [float(len(ids)) for ids in completion_ids]


def first_prompts(prompts, answer, **kwargs):
    return [float(bool(prompt and row)) for prompt, row in zip(prompts, answer, strict=True)]


def none(completions, **kwargs):
    return [None] * len(completions)


def conversations(prompts, completions, environments):
    ((first, one, other, last),) = completions
    assert first["tool_calls"][0]["function"] == {"name": "increment", "arguments": {"step": 2}}
    assert (one["role"], one["name"], one["content"], other["role"]) == ("tool", "increment", "2", "tool")
    assert last == {"role": "assistant", "content": "c"}
    return [float(len(completions[0]))]


def of_class(environments, **kwargs):
    return [float(isinstance(environment, Increment)) for environment in environments]


class Minefield:
    """Gym: draws its mine at the first step, as GEM's Minesweeper does."""

    def reset(self, seed: int) -> tuple[str, dict]:
        self.target, self.mine, self.left = random.randint(1, 6), None, 3
        return f"Target {self.target}", {}

    def step(self, action: str) -> tuple:
        self.mine = self.mine or random.random()
        self.left -= 1
        return f"mine at {self.mine}, noise {random.random()}", 0.0, self.left == 0, False, {}


class Elsewhere:
    """Gym: a server that draws the number that it shows."""

    def reset(self) -> tuple[str, dict]:
        self.number = secrets.randbelow(10**9)
        return f"pid {os.getpid()} number {self.number}", {}

    def step(self, action: str) -> tuple:
        return f"{self.number} again", 0.0, False, {}


class Session:
    """Client of a server: a file for each session, empty where it is closed."""

    def __init__(self):
        self.file = Path(os.environ["REWARD_SESSIONS"], f"{os.getpid()} {secrets.token_hex(8)}")
        self.file.write_text("open")

    def reset(self, **row):
        self.is_reset = True

    def close(self):
        self.file.write_text("")

    def get_reward(self) -> float:
        return 1.0


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


class AsyncCountdown(Countdown):
    async def step(self, action: str) -> tuple:
        return super().step(action)


class Numbers(Countdown):
    """Gymnasium: numbered actions."""

    action_space = SimpleNamespace(n=3, shape=(), sample=None)


class NeedsArguments:
    def __init__(self, url: str):
        pass


class Untyped(Waiting):
    def guess(self, word):
        pass


def reward(completion: str, target: int, **row) -> float:
    return 0.25 * (str(target) in completion)
