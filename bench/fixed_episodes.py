"""Episodes that all have as many turns and tokens, for bench/peers.py. The processes that play them import no JAX."""

import random

from envs.base import Env, Episode, Problem, Step

LETTERS = "abcefu"  # to models/tiny and to Qwen3 each is one token, with a space before it and without


class FixedEpisodes(Env):
    """Prompts and observations of letters, a token each; every episode ends with turn number `num_turns`.

    Nothing is put around them, as by a chat template, but for a newline before and behind an observation.
    """

    is_generated = True
    num_tasks = 10_000

    def __init__(self, split: str = "train", num_turns: int = 4, prompt_tokens: int = 64, observation_tokens: int = 16):
        self.num_turns = num_turns
        self.max_turns = num_turns + 1  # so that one turn is an episode, too
        self.prompt_tokens = prompt_tokens
        self.observation = random_letters("observation", observation_tokens - 2)

    def problem(self, index: int) -> Problem:
        prompt = random_letters(f"problem {index}", self.prompt_tokens)
        return Problem([{"role": "user", "content": prompt}], plain=True)

    def episode(self, problem: Problem, seed: int) -> Episode:
        return FixedEpisode(self.num_turns, self.observation)


class FixedEpisode(Episode):
    """Says the same to every turn; rewards differ with the text, so that each group has something to learn from."""

    def __init__(self, num_turns: int, observation: str):
        self.num_left = num_turns
        self.observation = observation

    def step(self, reply: str) -> Step:
        self.num_left -= 1
        messages = [{"role": "user", "content": self.observation}]
        return Step(messages, reward=len(reply) / 1000, done=not self.num_left)


def random_letters(seed: str, number: int) -> str:
    """Returns letters by the text's digest, the same in every process."""
    return " ".join(random.Random(seed).choices(LETTERS, k=number))
