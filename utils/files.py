"""Writes files whole or not at all, and reads arrays of numbers."""

import contextlib
import json
import os
import shutil
import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

import numpy as np

from utils.settings.errors import UserError, describe_error, describe_file_error

NUMBERS = "biuf"  # kinds of data types


@contextlib.contextmanager
def replacing(path: str | Path) -> Iterator[BinaryIO]:
    """Yields a new file, which takes the place of `path` at the end of the block: at every moment there is a whole one.

    What the name stood for before, by a link perhaps, stays as it is. Raises: OSError.
    """
    draft = Path(f"{path}.new")
    remove(draft)
    try:
        with draft.open("xb") as file:
            yield file
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)  # a full disk keeps its last bytes for metrics and states
        raise


def remove(path: Path) -> None:
    """Removes a file, or a folder or link of its name."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def skipping_damage() -> Iterator[None]:
    """Prints a warning for a file that cannot be read in the block, and goes on behind it."""
    try:
        yield
    except UserError as error:
        print(f"warning: {error}", file=sys.stderr)
    except OSError as error:
        print(f"warning: {describe_file_error(error)}", file=sys.stderr)


def read_arrays(path: str | Path, needed: Collection[str] = ()) -> dict[str, np.ndarray]:
    """Returns the arrays of numbers of an .npz file by name.

    Raises: UserError naming the file and what is wrong with it, a `needed` array that is not there too; OSError.
    """
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = dict(archive)
        if wrong := [name for name, x in arrays.items() if x.dtype.kind not in NUMBERS]:
            raise ValueError(f"{wrong[0]} is of type {arrays[wrong[0]].dtype}, and numbers are read")
    except OSError:
        raise
    except Exception as error:  # of zipfile, zlib and NumPy, which raise twenty kinds for damage
        raise UserError(f"{path} is not a whole .npz file ({describe_error(error)}): copy it again") from error
    for name in needed:
        if name not in arrays:
            raise UserError(f"{path} has no array {name}: copy it again")
    return arrays


def write_json(path: Path, value: Mapping[str, object]) -> None:
    with replacing(path) as file:
        file.write(json.dumps(value, indent=2).encode() + b"\n")
