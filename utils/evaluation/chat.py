"""A conversation on the terminal with a model that was just trained."""

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np

from utils.metrics.logger import printable

Message = dict[str, str]


class Stream:
    """Prints a text that grows, without the end that may still change: half a character is shown as a blot."""

    def __init__(self):
        self.shown = ""

    def __call__(self, text: str) -> None:
        text = text.rstrip("\ufffd")
        if text.startswith(self.shown):
            print(printable(text[len(self.shown) :], max_chars=len(text)), end="", flush=True)
            self.shown = text


def chat(sampler: Any, params: Any, key: Any, thinking: bool) -> None:
    """A conversation with the model of a sampler, streamed as often as the sampler's segments end."""
    draws, tokenizer = count(), sampler.tokenizer

    def reply(messages: list[Message], show: Callable[[str], None]) -> str:
        def watch(first, tokens, t, lengths):
            show(tokenizer.decode(tokens[0, : sampler.end_of(tokens[0], 0, t) or t]))

        prompt = tokenizer.chat(messages, thinking)
        r = replace(sampler, watch=watch)(params, [prompt], np.array([next(draws)]), 1, key)
        return tokenizer.decode(r.tokens[0, len(prompt) : r.lengths[0]])

    converse(reply)


def converse(reply: Callable[[list[Message], Callable[[str], None]], str]) -> None:
    """Talks until the end of input; `reply(messages, show)` calls `show` with the text so far and returns all of it."""
    print("Ctrl-D ends the conversation, /new begins another, Ctrl-C stops a reply.")
    messages: list[Message] = []
    while True:
        try:
            text = input("\n> ").strip()
        except (EOFError, KeyboardInterrupt):
            return print()
        if text == "/new":
            messages = []
        if not text or text == "/new":
            continue
        messages.append({"role": "user", "content": text})
        stream = Stream()
        try:
            answer = reply(messages, stream)
            stream(answer)
            print()
        except KeyboardInterrupt:
            answer = stream.shown
            print(" [stopped]")
        except ValueError as error:  # too long a conversation
            print(f"{error}; /new begins another")
            messages.pop()
            continue
        messages.append({"role": "assistant", "content": answer})
