"""Writes files whole or not at all, and never through a link to what is not the run's; reads arrays of others."""

import contextlib
import io
import json
import math
import os
import shutil
import sys
import zipfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, TextIO

import numpy as np

from utils.settings.checks import open_file
from utils.settings.errors import UserError, describe_error, describe_file_error

MAX_ARRAYS = 1 << 30  # bytes
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

    Raises: UserError naming the file, the array and what is wrong with it. Also for more than MAX_ARRAYS bytes, and for
    a `needed` array that is not there; OSError.
    """
    arrays, name = {}, ""
    with open_file(path) as file:
        try:
            archive = zipfile.ZipFile(file)
            sizes = {info.filename: info.file_size for info in archive.infolist()}
            if (total := sum(sizes.values())) > MAX_ARRAYS:
                raise ValueError(f"its arrays have {total:,} bytes, more than the {MAX_ARRAYS:,} that are read")
            for name in sizes:
                arrays[name.removesuffix(".npy")] = parse_array(archive.read(name))
        except Exception as error:  # noqa: BLE001 (of zipfile, zlib and NumPy, which raise twenty kinds for damage)
            reason = error if type(error) is ValueError else describe_error(error)
            array = f"{name.removesuffix('.npy')}: " if name else ""
            raise UserError(f"{path} is not a whole .npz file ({array}{reason}): copy it again") from error
    for name in needed:
        if name not in arrays:
            raise UserError(f"{path} has no array {name}: copy it again")
    return arrays


def parse_array(content: bytes) -> np.ndarray:
    """Returns the array of an .npy file. Raises: ValueError for another size than it claims, or no numbers."""
    file = io.BytesIO(content)
    version = np.lib.format.read_magic(file)
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    shape, _, dtype = readers[version](file)
    size = len(content) - file.tell()
    if dtype.kind not in NUMBERS:
        raise ValueError(f"its type is {dtype}, and numbers are read")
    if math.prod(shape) * dtype.itemsize != size:
        raise ValueError(f"it has {size:,} bytes, and its shape is {shape}")
    file.seek(0)
    return np.lib.format.read_array(file, allow_pickle=False)


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
