"""Checks of what comes from outside: numbers, passwords, text, YAML."""

import re
from pathlib import Path
from typing import TypeVar

from utils.settings.errors import UserError

HIDDEN = "***"  # stands for a password
KEYS = "password|passwd|pwd|token|secret|api_?key|access_?key|signature"
PASSWORD = re.compile(rf"(://[^\s:/?#@]*:)(?!\d+/)[^\s,]+(?=@)|([?&][\w-]*(?:{KEYS})=)[^\s&,]+", re.IGNORECASE)
T = TypeVar("T")


def check_number(name: str, value: float) -> None:
    """Raises UserError for a number of a setting that arrays cannot hold.

    These are integers beyond 32 bits, NaN, infinity, and fractions that are infinite or 0 in float32. JAX would take
    the lowest 32 bits of an integer, so that two seeds would be one.
    """
    size = abs(value)
    if type(value) is int and size >= 2**31:
        raise UserError(f"{name} is an integer of more than 32 bits: give one between -{2**31 - 1:,} and {2**31 - 1:,}")
    if type(value) is float and size and not 2.0**-126 <= size < 2.0**128:
        raise UserError(f"{name} is {value:g}, which float32 cannot hold: give 0, or 1.2e-38 to 3.4e38")


def hide_passwords(value: T) -> T:
    """Returns a text with HIDDEN for the passwords of addresses in it (scheme://user:password@host, ?token=...)."""
    return PASSWORD.sub(rf"\1\2{HIDDEN}", value) if isinstance(value, str) else value


def check_password(name: str, value: object) -> None:
    """Raises UserError for a setting whose password was hidden when it was written."""
    if isinstance(value, str) and HIDDEN in value and hide_passwords(value) == value and PASSWORD.search(value):
        raise UserError(f"{name} has {HIDDEN} for a password, which is never written down: give the address again")


def read_yaml(file: Path, name: str) -> object:
    """Returns the value of a file of YAML or JSON; `name`: of it in errors. Raises: UserError for anything else."""
    import yaml  # here: it takes a quarter of the time in which a command finds a wrong option

    try:
        return yaml.safe_load(file.read_bytes().decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise UserError(f"{name} is not UTF-8 ({error.reason} at byte {error.start}): convert it") from error
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
        raise UserError(f"{name} is not YAML ({' '.join(str(error).split())}): correct it") from error
