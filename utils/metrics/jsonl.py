"""Reads JSON that a full disk, a bad block or another program may have damaged: whole files, and files of lines."""

import json
import math
import sys
from pathlib import Path

import numpy as np

JSON = str | int | float | bool | None | list["JSON"] | dict[str, "JSON"]
Value = JSON | np.ndarray | np.generic  # arrays of JAX, too


def parse_json(text: bytes) -> JSON:
    """Returns the value of JSON text, with null for numbers that are not finite.

    Raises: ValueError for everything that is not JSON in UTF-8, nesting that is too deep included.
    """
    try:
        return json.loads(text.decode(), parse_constant=finite, parse_float=finite)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def finite(number: str) -> float | None:
    """Returns the number, None for NaN and infinity, which browsers and other readers of JSON do not know."""
    value = float(number)
    return value if math.isfinite(value) else None


def read_lines(path: str | Path, key: str = "") -> list[tuple[bytes, dict[str, JSON]]]:
    """Returns each line of a file with one object a line: as it is written (with its end), and the object.

    Damaged lines are skipped with a warning: no object, or no integer under `key` (empty: not asked for). The half line
    that a killed process leaves at the end is skipped silently.

    Raises: OSError.
    """
    lines = Path(path).read_bytes().splitlines(keepends=True)
    rows: list[tuple[bytes, dict[str, JSON]]] = []
    damaged: list[int] = []
    for number, line in enumerate(lines, 1):
        try:
            value = parse_json(line)
        except ValueError:
            value = None
        if isinstance(value, dict) and (not key or type(value.get(key)) is int):
            rows.append((line, value))
        elif number < len(lines) or line.endswith(b"\n"):
            damaged.append(number)
    if damaged:
        count = f"{len(damaged)} damaged lines" if len(damaged) > 1 else "a damaged line"
        print(f"warning: {path}: {count} skipped (line {damaged[0]})", file=sys.stderr)
    return rows


def json_value(value: Value) -> JSON:
    """Returns a value in types that JSON has; NaN and infinity, which it lacks, become None."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [json_value(item) for item in value]
    is_not_finite = isinstance(value, float) and not math.isfinite(value)
    return None if is_not_finite else value
