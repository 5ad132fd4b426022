"""Wordle: find a word of five letters; each guess is answered by a sign for each of its letters.

Source of the rules: Josh Wardle's game of 2021. The words are a selection of common English ones, made for this file.
"""

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from envs.base import Env, Episode, Problem, Step, check_choice, choose_split
from utils.settings.errors import UserError

WORDS = Path(__file__).with_name("wordle_words.txt")
WORD = re.compile(r"(?<![a-z])[a-z]{5}(?![a-z])")
PROMPTS = {
    "bare": "Guess the word.",
    "full": "I think of an English word of five letters. Guess it in at most {max_turns} turns: below each letter of a "
    "guess I write G where it is right, Y where the word has it at another place, - where it does not (a letter that "
    "a guess has twice gets a sign for each time that the word has it). Answer with one word only.",
}


class Wordle(Env):
    """Reward 1 for the word, minus `cost` for each wrong guess before it; 0 after `max_turns`.

    One in five words is for the test split, one in ten for the valid split. The prompt is the same for all.
    """

    splits = ("train", "valid", "test")
    num_eval_tasks = 0
    tokens_per_action = 512

    def __init__(
        self,
        split: str = "train",
        max_turns: int = 6,
        cost: float = 0.05,
        prompt: str = "full",
        tokens_per_turn: int = 16,
    ):
        check_choice("prompt", prompt, PROMPTS)
        if max_turns < 2:
            raise UserError("Wordle needs max_turns >= 2: correct --env_options")
        self.words = [word for word in WORDS.read_text(encoding="utf-8").split() if choose_split(word) == split]
        self.max_turns = max_turns
        self.cost = cost
        self.message = {"role": "user", "content": PROMPTS[prompt].format(max_turns=max_turns)}
        self.tokens_per_turn = tokens_per_turn
        self.num_tasks = len(self.words)

    def problem(self, index: int) -> Problem:
        return Problem([self.message], self.words[index])

    def episode(self, problem: Problem, seed: int) -> Episode:
        return WordleEpisode(problem.answer, self.cost)

    def examples(self, problem: Problem) -> dict[str, str]:
        return {"right": problem.answer, "wrong": problem.answer[1:] + problem.answer[0], "formless": "four"}

    def answer(self, text: str) -> str | None:
        return find_guess(text)


@dataclass(eq=False)
class WordleEpisode(Episode):
    """A game: the last word of five letters in a reply is the guess. Other replies use up a turn, too."""

    word: str
    cost: float
    num_guesses: int = 0

    def step(self, reply: str) -> Step:
        self.num_guesses += 1
        guess = find_guess(reply)
        if guess is None:
            return Step([{"role": "user", "content": "five letters?"}], info={"invalid": 1.0})
        if guess == self.word:
            reward = 1 - self.cost * (self.num_guesses - 1)
            return Step([], reward, done=True, info={"correct_answer": 1.0, "guesses": self.num_guesses})
        rows = (guess, feedback(guess, self.word))
        content = "\n".join(" ".join(row) for row in rows)
        return Step([{"role": "user", "content": content}])


def feedback(guess: str, word: str) -> str:
    """Returns a sign for each letter: G at its place, Y at another one, - not in the word.

    A letter of the word counts once: letters at their places take theirs first, then others from left to right.
    """
    signs = ["-"] * len(word)
    left = Counter(word)
    for i, letter in enumerate(guess):
        if letter == word[i]:
            signs[i] = "G"
            left[letter] -= 1
    for i, letter in enumerate(guess):
        if signs[i] == "-" and left[letter] > 0:
            signs[i] = "Y"
            left[letter] -= 1
    return "".join(signs)


def find_guess(text: str) -> str | None:
    """Returns the last word of five letters from a to z in a text, in lower case; None if there is none."""
    words = WORD.findall(text.lower())
    return words[-1] if words else None
