"""Chat on the terminal with a model that was just trained."""

import contextlib
import signal
from types import FrameType

from core.chat.models import ChatModel
from models.messages import Message
from utils.metrics.logger import printable
from utils.metrics.terminal import waiting

HELP = """\
/new               begins another conversation
/help              shows this
/quit, exit        ends, as Ctrl-D does; Ctrl-C stops a reply"""
ENDS = ("/quit", "/exit", "exit", "quit")


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


def converse(model: ChatModel) -> None:
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
                print(HELP)
            elif text:
                messages = answer(model, [*messages, {"role": "user", "content": text}], interrupts)


def answer(model: ChatModel, messages: list[Message], interrupts: Interrupts) -> list[Message]:
    """Prints the reply to the last message; returns the conversation, without that message if there is no reply."""
    stream = StreamPrinter()
    with contextlib.ExitStack() as stack:
        stack.enter_context(waiting("sampling"))  # which also shows what is compiled

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
