"""Reads and makes JSON without numbers that it lacks: whole files, and files of lines."""

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from utils.settings.errors import UserError

JSON = str | int | float | bool | None | list["JSON"] | dict[str, "JSON"]
JSONRow = dict[str, object]  # an object of a file of JSON lines
Loggable = JSON | np.ndarray | np.generic  # arrays of JAX, too


def parse_json(text: bytes) -> JSON:
    """Returns the value of JSON text, with null for numbers that are not finite. Raises: ValueError."""
    return json.loads(text.decode(), parse_constant=finite, parse_float=finite)


def finite(number: str) -> float | None:
    """Returns the number, None for NaN and infinity, which browsers and other readers of JSON refuse."""
    value = float(number)
    return value if math.isfinite(value) else None


def read_json(path: str | Path) -> dict[str, JSON]:
    """Returns the object in a file. Raises: UserError naming the file and what is wrong in it; OSError."""
    with open(path, "rb") as file:
        text = file.read()
    try:
        return dict(parse_json(text))
    except (ValueError, TypeError) as error:
        raise UserError(f"{path} is not JSON with names and values ({error}): correct it, or copy it again") from error


def read_lines(path: str | Path, key: str = "") -> Iterator[tuple[bytes, dict[str, JSON]]]:
    """Yields each line of a file with one object a line: as it is written (with its end), and the object.

    Lines that are no object with `key` are skipped with a warning; silently, the half line that a kill leaves at the
    end. Raises: OSError.
    """
    damaged: list[int] = []
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            try:
                value = parse_json(line)
            except ValueError:
                value = None
            if isinstance(value, dict) and (not key or key in value):
                yield line, value
            elif line.endswith(b"\n"):
                damaged.append(number)
    if damaged:
        print(f"warning: {path}: {len(damaged)} damaged lines skipped (line {damaged[0]})", file=sys.stderr)


def json_value(value: Loggable) -> JSON:
    """Returns a value in types that JSON has; NaN and infinity, which it lacks, become None."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [json_value(item) for item in value]
    is_not_finite = isinstance(value, float) and not math.isfinite(value)
    return None if is_not_finite else value
