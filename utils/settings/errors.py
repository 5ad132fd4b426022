"""Errors of the user, the end of a command that has one, and words for messages.

Imports nothing, so that everything may import it.
"""

import contextlib
import difflib
import re
import signal
import sys
from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec
from typing import NoReturn

MAX_MESSAGE = 4000  # characters of an error message
SET_BY: dict[str, str] = {}  # the file (a preset, a run's config.json) that set an option: `fail` names it


class UserError(ValueError):
    """Raised for what the user can change: the message is one sentence on what is wrong and what to do."""


def fail(message: str) -> NoReturn:
    """Prints one sentence on stderr and ends the program with exit status 2, without a traceback.

    Names and values in it may come from foreign files: control characters become "\\ufffd", and
    the message is cut after MAX_MESSAGE characters.
    """
    named = {name: SET_BY[name] for name in re.findall(r"--(\w+)", message) if SET_BY.get(name, message) not in message}
    if named:
        sets = {file: ", ".join(f"--{name}" for name in named if named[name] == file) for file in named.values()}
        message = f"{message.rstrip('.')} ({'; '.join(f'{file} sets {names}' for file, names in sets.items())})"
    shown = "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in message[:MAX_MESSAGE])
    print(f"error: {shown}", file=sys.stderr)
    raise SystemExit(2)


def refuse(mistakes: Sequence[tuple[bool, str]]) -> None:
    """Raises UserError for the first of the mistakes that was made."""
    for is_wrong, message in mistakes:
        if is_wrong:
            raise UserError(message)


def check_installed(package: str, purpose: str, install: str = "-r requirements.txt") -> None:
    """Raises UserError, with pip's line, if a package is missing that not all commands need."""
    if not is_installed(package):
        raise UserError(f"{purpose} needs {package}, which is not installed: `pip install {install}`")


def is_installed(package: str) -> bool:
    """True if there is a package of this name, which is not imported."""
    return sys.modules.get(package) is not None or find_spec(package) is not None


def on_one_line(text: str) -> str:
    """Returns a text from elsewhere without its control characters and line breaks."""
    return "".join(filter(str.isprintable, text))


def counted(number: int, noun: str) -> str:
    """Returns a number of things in words: 1 step, 1,000 steps."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def most_similar(name: str, names: Iterable[str]) -> str:
    """Returns the one of these names that is most like an unknown one; empty if none is like it."""
    close = difflib.get_close_matches(name, list(names), n=1)
    return close[0] if close else ""


def describe_error(error: BaseException) -> str:
    """Returns an exception of a library in one line: its type, and the first 200 characters of its message."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}".removesuffix(": ")


def describe_file_error(error: OSError) -> str:
    """Returns the file and what is wrong with it, without the number of the system's error."""
    return f"{error.filename}: {error.strerror}" if error.filename else error.strerror or str(error)


def shorten(value: object, width: int = 160) -> str:
    """Returns the repr of a value, cut to `width` characters."""
    text = repr(value)
    return text if len(text) <= width else f"{text[: width - 3]}..."


@contextlib.contextmanager
def user_errors() -> Iterator[None]:
    """Ends the program with one sentence on a UserError, on an OSError (of reading or writing a file) or on Ctrl-C."""
    with contextlib.suppress(AttributeError):  # a stream of a notebook or a test
        sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a character shows "?"
    try:
        yield
    except UserError as error:
        fail(str(error.with_traceback(None)))  # with its frames it would keep the lock of a run's folder
    except OSError as error:
        fail(describe_file_error(error.with_traceback(None)))
    except KeyboardInterrupt:
        print("stopped by Ctrl-C", file=sys.stderr)
        raise SystemExit(128 + signal.SIGINT) from None
