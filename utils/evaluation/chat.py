"""Chat on the terminal with a model that was just trained."""

from collections.abc import Callable

import numpy as np
from jaxtyping import Int

from utils.metrics.logger import printable

Message = dict[str, str]
Tokens = Int[np.ndarray, "B A"]
ShowText = Callable[[str], None]  # called with all of a reply so far
MakeReply = Callable[[list[Message], ShowText], str]


class StreamPrinter:
    """Prints a text that grows, without the end that may still change: the bytes of half a character."""

    def __init__(self):
        self.shown = ""

    def __call__(self, text: str) -> None:
        text = text.rstrip("\ufffd")
        if text.startswith(self.shown):
            print(printable(text[len(self.shown) :], max_chars=len(text)), end="", flush=True)
            self.shown = text


def converse(reply: MakeReply) -> None:
    """Reads messages until the end of input, and prints the replies as they grow."""
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
        stream = StreamPrinter()
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
