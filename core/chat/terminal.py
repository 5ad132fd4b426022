"""Chat on the terminal with a model that was just trained."""

import contextlib
import signal
from collections.abc import Callable
from types import FrameType
from typing import Protocol

from models.messages import Message
from utils.metrics.logger import printable
from utils.metrics.terminal import waiting
from utils.settings.errors import UserError

ShowText = Callable[[str], None]  # called with all of a reply so far; what it raises ends the reply
HELP = """\
/new               begins another conversation
/set               shows the settings of sampling, /set temperature 0.7 changes one
/help              shows this
/quit, exit        ends, as Ctrl-D does; Ctrl-C stops a reply"""
ENDS = ("/quit", "/exit", "exit", "quit")


class Model(Protocol):
    """A model to chat with; ChatModel of core/chat/models.py documents its methods."""

    name: str

    def reply(self, messages: list[Message], show_text: ShowText) -> str: ...
    def change(self, name: str, value: str) -> None: ...
    def describe(self) -> str: ...


class Stopped(Exception):
    """Raised in a reply that the user has stopped."""


class StreamPrinter:
    """Prints a text that grows, without the end that may still change: the bytes of half a character."""

    def __init__(self):
        self.shown = ""

    def __call__(self, text: str) -> None:
        text = text.rstrip("\ufffd")
        if text.startswith(self.shown):
            print(printable(text[len(self.shown) :], max_chars=len(text)), end="", flush=True)
            self.shown = text


class Interrupts:
    """Ctrl-C: an empty line while a line is read; otherwise it is remembered in `requested`.

    So nothing ends in the middle of a compilation, whose threads would still run when Python ends.
    """

    def __init__(self):
        self.is_reading = False
        self.requested = False

    def __enter__(self) -> "Interrupts":
        self.previous = signal.signal(signal.SIGINT, self.handle)
        return self

    def __exit__(self, *_) -> None:
        signal.signal(signal.SIGINT, self.previous)

    def handle(self, number: int, frame: FrameType | None) -> None:
        if self.is_reading:
            self.is_reading = False
            raise KeyboardInterrupt
        if not self.requested:
            print(" [stopping]", end="", flush=True)
        self.requested = True

    def read_line(self) -> str:
        """Returns a line of input. Raises: EOFError."""
        try:
            self.is_reading = True
            return input("> ").strip()
        except KeyboardInterrupt:
            print()
            return ""
        except UnicodeDecodeError as error:
            print(f"this line cannot be read: {error}")
            return ""
        finally:
            self.is_reading = False
            self.requested = False


def converse(model: Model) -> None:
    """Reads messages until the end of input, and prints the replies as they grow."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 (gives `input` editing and history; not on every system)
    print(f"{HELP}\n")
    messages: list[Message] = []
    with Interrupts() as interrupts:
        while True:
            try:
                text = interrupts.read_line()
            except EOFError:
                return print()
            if text in ENDS:
                return
            if text == "/new":
                messages = []
            elif text.startswith("/"):
                print(run_command(model, text))
            elif text:
                messages = answer(model, [*messages, {"role": "user", "content": text}], interrupts)


def run_command(model: Model, text: str) -> str:
    """Changes a setting, if that is the command; returns what to print."""
    name, *arguments = text.split()
    if name == "/help":
        return HELP
    if name != "/set" or len(arguments) not in (0, 2):
        return f"{text}: there is no such command\n{HELP}"
    try:
        if arguments:
            setting, value = arguments
            model.change(setting, value)
    except UserError as error:
        return str(error)
    return model.describe()


def answer(model: Model, messages: list[Message], interrupts: Interrupts) -> list[Message]:
    """Prints the reply to the last message; returns the conversation, without that message if there is no reply."""
    stream = StreamPrinter()
    with contextlib.ExitStack() as stack:
        stack.enter_context(waiting("drawing"))  # which also shows what is compiled

        def show_text(text: str) -> None:
            stack.close()
            stream(text)
            if interrupts.requested:
                raise Stopped

        try:
            stream(model.reply(messages, show_text))
        except Stopped:
            print(" [stopped]", end="")
        except ValueError as error:  # the conversation is too long
            print(f"{error}; /new begins another")
            return messages[:-1]
    print("\n")
    reply = {"role": "assistant", "content": stream.shown}
    return [*messages, reply] if stream.shown else messages[:-1]
