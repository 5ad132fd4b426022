"""Writes files whole or not at all, and never through a link to what is not the run's."""

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, TextIO


@contextlib.contextmanager
def replacing(path: str | Path) -> Iterator[BinaryIO]:
    """Yields a new file, which takes the place of `path` at the end of the block: at every moment there is a whole one.

    What the name stood for before, by a link perhaps, stays as it is. Raises: OSError.
    """
    draft = Path(f"{path}.new")
    draft.unlink(missing_ok=True)
    try:
        with draft.open("xb") as file:
            yield file
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)  # a full disk keeps its last bytes for metrics and states
        raise


def write_json(path: Path, value: Mapping[str, object]) -> None:
    """Writes indented JSON."""
    with replacing(path) as file:
        file.write(json.dumps(value, indent=2).encode() + b"\n")


def open_log(path: Path) -> TextIO:
    """Opens a file to append lines to. One that has other names too is copied first, and theirs stays as it is."""
    if path.exists() and path.stat().st_nlink > 1:
        content = path.read_bytes()
        with replacing(path) as file:
            file.write(content)
    return path.open("a")
