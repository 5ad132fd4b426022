"""Guess: find a number in a range; each guess is answered with "higher" or "lower".

The best policy halves the range: its longest game takes log2(size + 1) guesses, rounded up.
"""

import random
import re
from dataclasses import dataclass
from typing import NamedTuple

from envs.base import Env, Episode, Problem, Step, check_choice, choose_split
from utils.settings.errors import UserError

NUMBER = re.compile(r"[0-9]{1,9}")
PROMPTS = {
    "bare": "Guess {low} to {high}.",
    "full": "I think of a whole number from {low} to {high}. Guess it in at most {max_turns} turns: after each guess I "
    "say whether my number is higher or lower. Answer with one number only.",
}
NUM_TASKS = {"train": 100_000, "test": 512}


class Secret(NamedTuple):
    """A number in a range."""

    low: int
    high: int
    number: int


@dataclass(eq=False)
class Guess(Env):
    """Reward 1 for the number, minus `cost` for each wrong guess before it; 0 after `max_turns`.

    One in five ranges is for the test split.
    """

    is_generated = True
    tokens_per_action = 256

    split: str = "train"
    max_number: int = 99
    min_size: int = 10
    max_size: int = 31  # numbers in a range; 31 numbers take at most 5 guesses
    max_turns: int = 5
    cost: float = 0.05
    prompt: str = "full"
    tokens_per_turn: int = 8

    def __post_init__(self):
        check_choice("prompt", self.prompt, PROMPTS)
        if not 2 <= self.min_size <= self.max_size <= self.max_number or self.max_turns < 2:
            raise UserError(
                "Guess needs 2 <= min_size <= max_size <= max_number, and max_turns >= 2: correct --env_options"
            )
        self.num_tasks = NUM_TASKS[self.split]
        self.problem(0)  # options that leave a split without a range fail here

    def problem(self, index: int) -> Problem:
        rng = random.Random(f"guess {self.split} {index}")  # seeded by the text's digest: the same in every process
        for _ in range(10_000):
            size = rng.randint(self.min_size, self.max_size)
            low = rng.randint(1, self.max_number - size + 1)
            high = low + size - 1
            if (choose_split(f"{low} {high}") == "test") == (self.split == "test"):
                number = rng.randint(low, high)
                prompt = PROMPTS[self.prompt].format(low=low, high=high, max_turns=self.max_turns)
                return Problem([{"role": "user", "content": prompt}], Secret(low, high, number))
        raise UserError(f"no range of Guess is left for the {self.split} split: raise max_number or max_size")

    def episode(self, problem: Problem, seed: int) -> Episode:
        secret = problem.answer
        return GuessEpisode(secret.low, secret.high, secret.number, self.cost)

    def examples(self, problem: Problem) -> dict[str, str]:
        number = problem.answer.number
        return {"right": str(number), "wrong": str(number + 1)}

    def answer(self, text: str) -> str | None:
        numbers = NUMBER.findall(text)
        return numbers[-1] if numbers else None


@dataclass(eq=False)
class GuessEpisode(Episode):
    """A game: the last number of a reply is the guess. The number is still from `low` to `high`."""

    low: int
    high: int
    number: int
    cost: float
    num_guesses: int = 0

    def step(self, reply: str) -> Step:
        self.num_guesses += 1
        numbers = NUMBER.findall(reply)
        if not numbers:
            return Step([{"role": "user", "content": "number?"}], info={"invalid": 1.0})
        guess = int(numbers[-1])
        if guess == self.number:
            reward = 1 - self.cost * (self.num_guesses - 1)
            return Step([], reward, done=True, info={"correct_answer": 1.0, "guesses": self.num_guesses})
        if self.number > guess:
            self.low = max(self.low, guess + 1)
            return Step([{"role": "user", "content": "higher"}])
        self.high = min(self.high, guess - 1)
        return Step([{"role": "user", "content": "lower"}])
