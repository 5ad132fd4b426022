"""Python files of the user: the functions and classes that FILE.py:NAME names. Their folder is last in `sys.path`."""

import importlib
import inspect
import math
import os
import re
import sys
import zlib
from collections.abc import Callable
from functools import partial, partialmethod
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import NamedTuple, SupportsFloat

from utils.processes import ROOT
from utils.settings.errors import UserError, most_similar

LOADED: dict[Path, tuple[str, int]] = {}  # by file: the module's name, and when the file was changed
LMPO = ("core", "envs", "models", "recipes", "utils")


class Named(NamedTuple):
    """One name of a file."""

    file: Path
    name: str


def read_names(value: str, flag: str, kind: str) -> list[Named]:
    """Returns what FILE.py:NAME,NAME,OTHER.py:NAME names, in order: a name alone is one of the file before it.

    Raises: UserError if a file or the name of a function or class (`kind`) is missing.
    """
    found: list[Named] = []
    for item in map(str.strip, value.split(",")):
        path, _, name = item.rpartition(":")
        file = Path(os.path.expanduser(path)) if path else found[-1].file if found else Path(item)
        if not file.is_file():
            raise UserError(f"{flag} {value}: write FILE.py:{kind.upper()}; there is no file {path or item}")
        if not name or (Path(name).is_file() and "." in name):
            raise UserError(f"{flag} {value}: name a {kind} of {file} after a colon, as in {file}:{kind.upper()}")
        if Named(file, name) in found:
            raise UserError(f"{flag} {value} names {name} twice: remove one")
        found.append(Named(file, name))
    return found


def code_files(value: str) -> tuple[Path, ...]:
    """Returns the files that FILE.py:NAME,... names; a resumed run compares them, and not what they import."""
    files = (Path(os.path.expanduser(item.rpartition(":")[0])) for item in value.split(",") if ":" in item)
    return tuple(dict.fromkeys(files))


def load_object(named: Named, flag: str, kind: str) -> Callable[..., object]:
    """Returns a function or class (`kind`) of a file. Raises: UserError when the file fails, or lacks it."""
    file, name = named
    try:
        module = load_module(file.absolute())
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise UserError(f"{flag} {file}:{name}: {file} fails with {type(error).__name__}: {error}") from error
    found = getattr(module, name, None)
    if not callable(found):
        own = [known for known, x in vars(module).items() if getattr(x, "__module__", "") == module.__name__]
        close = most_similar(name, own)
        hint = f" (did you mean {close}?)" if close else ""
        raise UserError(f"{flag} {file}:{name}: {file} has no {kind} {name}, only {', '.join(own) or 'none'}{hint}")
    if kind == "function" and isinstance(found, type):
        raise UserError(
            f"{flag} {file}:{name}: {name} is a class: add a line `reward = {name}()` to {file}, and name {file}:reward"
        )
    return found


def load_module(path: Path) -> ModuleType:
    """Returns the module in a file, under the file's name if it is free; it is executed again if the file has changed.

    Raises: UserError if it imports a module beside it that has the name of another one, as of a package of ours.
    """
    modified = path.stat().st_mtime_ns
    if path in LOADED and LOADED[path][1] == modified:
        return sys.modules[LOADED[path][0]]
    # The folder from which the file imports: its own, or the one that holds its outermost package.
    root = next(folder for folder in path.parents if not (folder / "__init__.py").is_file())
    if str(root) not in sys.path:
        sys.path.append(str(root))
    importlib.invalidate_caches()
    for first in re.findall(r"^\s*(?:from|import)\s+(\w+)", path.read_text(encoding="utf-8"), re.MULTILINE):
        places = root / f"{first}.py", root / first / "__init__.py", *[root / first] * (first in LMPO)
        neighbor = next(filter(Path.exists, places), None)
        if neighbor and root.resolve() != ROOT and Path(str(find_spec(first).origin)).resolve() != neighbor.resolve():
            raise UserError(f"{path} imports {neighbor}, and another module has this name: rename it")
    name = ".".join(path.relative_to(root).with_suffix("").parts)
    spec = None if "." in path.stem else find_spec(name)
    if not (spec and spec.origin == str(path)):
        name = f"{path.stem}_{zlib.crc32(bytes(path))}"
        spec = spec_from_file_location(name, path)
    if name not in sys.modules or path in LOADED:  # else a module beside it has imported it
        sys.modules[name] = module_from_spec(spec)  # where dataclasses look up the annotations of their fields
        spec.loader.exec_module(sys.modules[name])
    LOADED[path] = name, modified
    return sys.modules[name]


def describe_function(function: Callable) -> str:
    """Returns the name, file and first line of a function, or of the `__call__` of an object."""
    while isinstance(function, partial | partialmethod):
        function = function.func
    function = inspect.unwrap(function)
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    if code is None:  # written in C
        return f"{getattr(function, '__name__', type(function).__name__)}()"
    return f"{code.co_name}() in line {code.co_firstlineno} of {code.co_filename}"


def wrong_return(function: Callable, value: object, form: str) -> TypeError:
    """Returns the error for the user's code that returned a value of another form than required."""
    return TypeError(f"{describe_function(function)} returned {value!r:.200}: return {form}")


def as_number(value: object) -> float | None:
    """Returns a finite number as one of Python's; None for anything else."""
    try:
        number = float(value) if isinstance(value, SupportsFloat) and not getattr(value, "shape", ()) else math.nan
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None
