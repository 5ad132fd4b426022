"""A look at an environment before anything is trained on it: prompts as the model sees them, references, rewards."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from jaxtyping import Int

from envs.base import Env, Problem
from utils.metrics.logger import printable

MAX_MEASURED = 1000  # prompts whose lengths are counted, spread over the environment
MAX_MADE_UP = 10_000  # problems that are all made in order to measure them

Encode = Callable[[Problem], list[int]]  # the prompt of a problem, token ids


def show(env: Env, encode: Encode, decode: Callable[[list[int]], str], count: int) -> str:
    """The first `count` problems with what example replies score, and the distribution of prompt lengths in tokens.

    `decode` gives the text of ids, special tokens included. Control characters of the data are dropped.
    """
    lines = [env.note] if env.note else []
    for index in range(min(count, env.num_tasks)):
        problem = env.problem(index)
        lines += [f"======== problem {index}", decode(encode(problem)), f"-------- reference {shorten(problem.answer)}"]
        for name, reply in {**env.examples(problem), "empty": ""}.items():
            scores = env.score(problem, problem.prefix + reply.removeprefix(problem.prefix))
            parts = ", ".join(f"{part} {value:g}" for part, value in scores.items())
            lines.append(f"{name:>10} {shorten(reply)}\n{'':>10} {parts}")
    lengths = prompt_lengths(env, encode)
    quantiles = ", ".join(f"{q}% {int(np.percentile(lengths, q))}" for q in (5, 50, 95, 99))
    lines.append(f"======== prompts: {env.num_tasks:,}; tokens: {quantiles}, longest {max(lengths)}")
    text = "\n".join(lines)
    return printable(text, max_chars=len(text))  # rows of a data set may hold sequences that a terminal obeys


def prompt_lengths(env: Env, encode: Encode, tasks: Int[np.ndarray, "N"] | None = None) -> list[int]:
    """Tokens of the prompts of an environment, or of these tasks; of MAX_MEASURED where all would be too many."""
    if tasks is None:
        tasks = np.unique(np.linspace(0, env.num_tasks - 1, min(MAX_MEASURED, env.num_tasks)).astype(int))
    return [len(encode(env.problem(int(i)))) for i in tasks]


def shorten(value: Any, width: int = 160) -> str:
    text = repr(value)
    return text if len(text) <= width else text[: width - 3] + "..."


def tasks_that_fit(env: Env, encode: Encode, limit: int) -> Int[np.ndarray, "N"] | None:
    """Returns the numbers of the problems whose prompts have at most `limit` tokens; None: all of a large environment.

    Rows of files are all measured, whatever their number. Where problems are made up, of more than MAX_MADE_UP a sample
    of them is measured first, and the others only where a part of the sample is too long.
    """
    if env.is_generated and env.num_tasks > MAX_MADE_UP:
        sample = prompt_lengths(env, encode)
        if max(sample) <= limit:
            return None
        if min(sample) > limit:
            return np.array([], int)
    bound = TokenBound(encode)
    problems = (env.problem(i) for i in range(env.num_tasks))
    fits = [bound(problem) <= limit or len(encode(problem)) <= limit for problem in problems]
    return np.flatnonzero(fits)


class TokenBound:
    """An upper bound on the tokens of a prompt, in about 10 microseconds where tokenising takes 400.

    Byte-level tokenizers split a text before each space and merge within these pieces only. So a text has at most the
    tokens of its pieces, each tokenised once at most. The chat template's own tokens are measured once, too.
    """

    def __init__(self, encode: Encode):
        self.encode = encode
        self.word_tokens = WordTokens(encode)
        self.template_tokens: dict[tuple, int] = {}  # by roles, thinking and plain

    def __call__(self, problem: Problem) -> int:
        roles = tuple(message["role"] for message in problem.messages)
        style = (roles, problem.thinking, problem.plain)
        if style not in self.template_tokens:
            messages = [{"role": role, "content": "x"} for role in roles]
            self.template_tokens[style] = len(self.encode(replace(problem, messages=messages, prefix="")))
        num_tokens = self.template_tokens[style] + len(problem.prefix.encode())
        for message in problem.messages:
            first, *words = message["content"].split(" ")
            num_tokens += len(first.encode()) + sum(map(self.word_tokens.__getitem__, words))
        return num_tokens


class WordTokens(dict[str, int]):
    """At most how many tokens a word has, with the space before it.

    A word that is met for the first time counts by its bytes, since most words of a data set stand in it once.
    """

    def __init__(self, encode: Encode):
        super().__init__()
        self.encode = encode
        self.met: set[str] = set()

    def __missing__(self, word: str) -> int:
        if word not in self.met:
            self.met.add(word)
            return len(word.encode()) + 1
        self[word] = len(self.encode(Problem([{"role": "user", "content": " " + word}], plain=True)))
        return self[word]
