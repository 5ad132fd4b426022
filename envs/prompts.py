"""Prompts of an environment in tokens: their lengths, and which are short enough."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
from jaxtyping import Int

from envs.base import Env, Problem
from utils.settings.errors import UserError, counted

MAX_MEASURED = 1000  # prompts whose lengths are counted, spread over the environment
MAX_MADE_UP = 10_000  # problems that are all made in order to measure them
Encode = Callable[[Problem], list[int]]  # returns the prompt of a problem, token ids
Tasks = Int[np.ndarray, "N"]  # numbers of problems


def find_tasks(
    name: str, env: Env, encode: Encode, limit: int, remedy: str = "raise --prompt_length"
) -> tuple[Tasks | None, str]:
    """Returns the problems with prompts of at most `limit` tokens (None: all), and which have more; or UserError."""
    tasks = tasks_that_fit(env, encode, limit)
    if tasks is None or tasks.size == env.num_tasks:
        return tasks, ""
    if not tasks.size:
        shortest = min(prompt_lengths(env, encode))
        advice = f"the shortest has {shortest}: {remedy}"
        raise UserError(f"all prompts of {name} have more than {limit} tokens, {advice}")
    dropped = counted(env.num_tasks - tasks.size, "prompt")
    first = np.setdiff1d(np.arange(env.num_tasks), tasks)[0]
    return tasks, f"{name}: {dropped} of more than {limit} tokens skipped, from problem {first} on"


def prompt_lengths(env: Env, encode: Encode) -> list[int]:
    """Returns the tokens of all prompts, or of MAX_MEASURED spread over the environment."""
    tasks = np.linspace(0, env.num_tasks - 1, min(MAX_MEASURED, env.num_tasks)).astype(int)
    return [len(encode(env.problem(task))) for task in np.unique(tasks).tolist()]


def tasks_that_fit(env: Env, encode: Encode, limit: int) -> Tasks | None:
    """Returns the numbers of the problems whose prompts have at most `limit` tokens; None: all of a large environment.

    Of more than MAX_MADE_UP generated problems, others than a sample are measured only if a part of it is too long.
    """
    if env.is_generated and env.num_tasks > MAX_MADE_UP:
        sample = prompt_lengths(env, encode)
        if max(sample) <= limit:
            return None
        if min(sample) > limit:
            return np.array([], int)
    bound = TokenBound(encode)
    is_short = np.zeros(env.num_tasks, bool)
    for task in range(env.num_tasks):
        problem = env.problem(task)
        try:
            is_short[task] = bound(problem) <= limit or len(encode(problem)) <= limit
        except UserError as error:  # of the chat template
            raise UserError(f"{problem.place}: {error}" if problem.place else str(error)) from error
    return np.flatnonzero(is_short)


class TokenBound:
    """An upper bound on the tokens of a prompt, in about 10 microseconds; tokenizing takes 400.

    Byte-level tokenizers split a text before each space and merge within these pieces only. So a text has at most the
    tokens of its pieces, each tokenized once at most. The chat template's own tokens are measured once, too. Messages
    with other keys than role and content have no bound.
    """

    def __init__(self, encode: Encode):
        self.encode = encode
        self.words: dict[str, int] = {}  # tokens of a word with the space before it; 0: seen once
        self.template_tokens: dict[tuple[tuple[str, ...], bool, bool], int] = {}  # by roles, thinking and plain

    def __call__(self, problem: Problem) -> float:
        is_plain = all(message.keys() <= {"role", "content"} for message in problem.messages)
        if not is_plain or any(isinstance(tool, Mapping) for tool in problem.tools):  # calls, schemas of a row
            return math.inf
        roles = tuple(message["role"] for message in problem.messages)
        style = (roles, problem.thinking, problem.plain)
        if style not in self.template_tokens:
            messages = [{"role": role, "content": "x"} for role in roles]
            self.template_tokens[style] = len(self.encode(replace(problem, messages=messages, prefix="")))
        num_tokens = self.template_tokens[style] + len(problem.prefix.encode())
        for message in problem.messages:
            first_word, *words = message["content"].split(" ")
            num_tokens += len(first_word.encode()) + sum(self.words.get(word) or self.measure(word) for word in words)
        return num_tokens

    def measure(self, word: str) -> int:
        """Returns the bytes of a word when it is first seen, as most words are once; then its tokens."""
        if word not in self.words:
            self.words[word] = 0
            return len(word.encode()) + 1
        self.words[word] = len(self.encode(Problem([{"role": "user", "content": " " + word}], plain=True)))
        return self.words[word]
