"""A look at an environment before anything is trained on it: prompts as the model sees them, references, rewards."""

from collections.abc import Callable
from typing import Any

import numpy as np

MAX_MEASURED = 1000  # prompts whose lengths are counted, spread over the environment


def show(env: Any, encode: Callable[[Any], list[int]], decode: Callable[[list[int]], str], count: int) -> str:
    """The first `count` problems with what example replies score, and the distribution of prompt lengths in tokens.

    `encode` gives the prompt of a problem as token ids, `decode` the text of ids, special tokens included.
    """
    lines = [env.note] if env.note else []
    for index in range(min(count, env.num_tasks)):
        problem = env.problem(index)
        lines += [f"======== problem {index}", decode(encode(problem)), f"-------- reference {shorten(problem.answer)}"]
        for name, reply in {**env.examples(problem), "empty": ""}.items():
            scores = env.score(problem, problem.prefix + reply)
            parts = ", ".join(f"{part} {value:g}" for part, value in scores.items())
            lines.append(f"{name:>10} {shorten(reply)}\n{'':>10} {parts}")
    lengths = prompt_lengths(env, encode)
    quantiles = ", ".join(f"{q}% {int(np.percentile(lengths, q))}" for q in (5, 50, 95, 99))
    return "\n".join([*lines, f"======== prompts: {env.num_tasks:,}; tokens: {quantiles}, longest {max(lengths)}"])


def prompt_lengths(env: Any, encode: Callable[[Any], list[int]], tasks: np.ndarray | None = None) -> list[int]:
    """Tokens of the prompts of an environment, or of these tasks; of MAX_MEASURED where all would be too many."""
    if tasks is None:
        tasks = np.unique(np.linspace(0, env.num_tasks - 1, min(MAX_MEASURED, env.num_tasks)).astype(int))
    return [len(encode(env.problem(int(i)))) for i in tasks]


def shorten(value: Any, width: int = 160) -> str:
    text = repr(value)
    return text if len(text) <= width else text[: width - 3] + "..."


def tasks_that_fit(env: Any, encode: Callable[[Any], list[int]], limit: int) -> np.ndarray:
    """The numbers of the problems whose prompts have at most `limit` tokens."""
    fits = [fits_in(env.problem(i), encode, limit) for i in range(env.num_tasks)]
    return np.flatnonzero(fits)


def fits_in(problem: Any, encode: Callable[[Any], list[int]], limit: int) -> bool:
    """Whether a prompt has at most `limit` tokens; a token is a byte at least, so most need no counting."""
    num_bytes = sum(len(message["content"].encode()) for message in problem.messages) + len(problem.prefix.encode())
    return num_bytes + 20 * len(problem.messages) + 20 <= limit or len(encode(problem)) <= limit
