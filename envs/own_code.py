"""Python files of the user: the functions and classes that FILE.py:NAME names, and the modules beside them.

The folder of such a file is the last entry of `sys.path`, so installed modules come before those beside the file.
"""

import ast
import contextlib
import importlib
import inspect
import math
import os
import re
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial, partialmethod
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import NamedTuple, SupportsFloat

from utils.settings.errors import UserError, most_similar

ROOT = Path(__file__).resolve().parents[1]
LOADED: dict[Path, tuple[str, int]] = {}  # by file: the module's name, and when the file was changed
LMPO = ("core", "envs", "models", "recipes", "utils")

# Environment variables that rewards and classes of the user see. Also: what is named REWARD_..., and as ... alone.
PASSED = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|TERM|LANG|LANGUAGE|LC_[A-Z]+|TZ|TMPDIR|TMP|TEMP|PYTHON[A-Z]+|VIRTUAL_ENV"
    r"|CONDA_PREFIX|LD_LIBRARY_PATH|DYLD_\w+_PATH|XDG_\w+_HOME|(OMP|MKL|OPENBLAS|NUMEXPR)_NUM_THREADS"
    r"|CUDA_VISIBLE_DEVICES|CUDA_HOME|HF_(HOME|HUB_CACHE|HUB_OFFLINE|DATASETS_CACHE|DATASETS_OFFLINE|ENDPOINT)"
    r"|SSL_CERT_(FILE|DIR)|REQUESTS_CA_BUNDLE|CURL_CA_BUNDLE|((https?|all|no)_proxy|(HTTPS?|ALL|NO)_PROXY)|REWARD_\w+"
)
NAMED = "REWARD_"
LOGIN = re.compile(r"://[^/\s]*@")  # of an address with a password


def passed_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that code of the user sees: those that programs need, and what is named REWARD_...

    REWARD_NAME is also passed as NAME, for libraries that read it. Addresses with a password are not passed.
    """
    passed = {name: value for name, value in variables.items() if PASSED.fullmatch(name)}
    passed = {name: x for name, x in passed.items() if name.startswith(NAMED) or not LOGIN.search(x)}
    named = {name.removeprefix(NAMED): x for name, x in passed.items() if name.startswith(NAMED)}
    return named | passed


@contextlib.contextmanager
def with_passed_variables() -> Iterator[None]:
    """Runs code of the user with the variables that it may see."""
    before = dict(os.environ)
    hidden = before.keys() - passed_variables(before)
    for name in hidden:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update({name: before[name] for name in hidden})


# what is named


class Named(NamedTuple):
    """One name of a file."""

    file: Path
    name: str


def read_names(value: str, flag: str, kind: str) -> list[Named]:
    """Returns what FILE.py:NAME,NAME,OTHER.py:NAME names, in order: a name alone is one of the file before it.

    Raises: UserError if a file is not there, or none of its names (of a `kind`: function or class) is given.
    """
    found: list[Named] = []
    for item in map(str.strip, value.split(",")):
        path, _, name = item.rpartition(":")
        file = Path(os.path.expanduser(path)) if path else found[-1].file if found else Path(item)
        if file.is_file() and name and not (Path(name).is_file() and "." in name):
            found.append(Named(file, name))
            continue
        raise UserError(f"{flag} {value}: {how_to_name(item, kind)}")
    repeated = [named.name for i, named in enumerate(found) if named in found[:i]]
    if repeated:
        raise UserError(f"{flag} {value} names {repeated[0]} twice: leave one out")
    return found


def how_to_name(item: str, kind: str) -> str:
    """Returns how to write an item that is not FILE.py:NAME, judged by the files that exist."""
    path, _, _ = item.rpartition(":")
    file, module, attribute = Path(os.path.expanduser(path or item.lstrip(":"))), *item.rpartition(".")[::2]
    beside = Path(*module.split(".")).with_suffix(".py") if module else file
    if file.is_file():
        names = defined_names(file)
        every = f" (it has {', '.join(names)})" if names else ""
        return f"name a {kind} of {file} behind a colon, as in {file}:{names[0] if names else kind.upper()}{every}"
    if not path and beside.is_file():
        return f"write {beside}:{attribute}"
    what = f"FILE.py:{kind.upper()}"
    if not path and is_dotted(item):
        return f"write {what}, with a file that has the line `from {module} import {attribute}`"
    return f"write {what}, with a file that is there: there is no {path or item}"


def is_dotted(name: str) -> bool:
    """True for a name as package.module.function."""
    return "." in name and not name.endswith(".py") and all(map(str.isidentifier, name.split(".")))


def defined_names(file: Path) -> list[str]:
    """Returns the names of functions, classes and objects that a file defines, those without an underscore."""
    names = []
    for node in getattr(parsed(file), "body", ()):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.append(name)
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call() | ast.Lambda()):
                names.append(name)
    return [name for name in names if not name.startswith("_")]


def parsed(file: Path) -> ast.AST | None:
    """Returns the syntax of a file; None if it has none."""
    try:
        return ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def code_files(value: str) -> tuple[Path, ...]:
    """Returns the files that FILE.py:NAME,... names, and behind them the modules beside them that they import."""
    named = [Path(os.path.expanduser(item.rpartition(":")[0])) for item in value.split(",") if ":" in item]
    files = list(dict.fromkeys(named))
    folders = {file: file.parent for file in files}
    for file in files:  # which grows
        for found in imported_files(file, folders[file]):
            if found not in folders:
                folders[found] = folders[file]
                files.append(found)
    return tuple(files)


def imported_files(file: Path, folder: Path) -> Iterator[Path]:
    """Yields the modules under a folder that a file imports, in its functions too; none of this repository's."""
    for node in ast.walk(parsed(file) or ast.Module([], [])):
        names, base = [], folder
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module or ''}.{alias.name}".strip(".") for alias in node.names]
            base = file.parents[min(node.level, len(file.parents)) - 1] if node.level else folder
        for parts in (name.split(".") for name in names):
            if base.resolve() == ROOT and parts[0] in LMPO:
                continue
            paths = [base.joinpath(*parts[:end]) for end in range(1, len(parts) + 1)]
            for path in paths:
                found = path.with_name(path.name + ".py"), path / "__init__.py"
                yield from filter(Path.is_file, found)


# loading


def load_object(named: Named, flag: str, kind: str) -> Callable[..., object]:
    """Returns a function or class (`kind`) of a file, the same to all who load it.

    Raises: UserError when the file fails, or has none of this name.
    """
    file, name = named
    check_neighbors(file.absolute())
    try:
        module = load_module(file.absolute())
    except (Exception, SystemExit) as error:
        reason = f"{type(error).__name__}: {error}"
        raise UserError(f"{flag} {file}:{name}: {file} fails with {reason}{variable_note(reason)}") from error
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


def variable_note(error: str) -> str:
    """Returns how the variable of the environment that an error names reaches the code of the user."""
    kept = passed_variables(os.environ)
    missing = [name for name in os.environ if name not in kept and re.search(rf"\b{re.escape(name)}\b", error)]
    return f" (rewards see no {missing[0]}, unless its value is in {NAMED}{missing[0]})" if missing else ""


def load_module(path: Path) -> ModuleType:
    """Returns the module in a file, which imports those beside it; it is executed again if the file has changed.

    It has the name of its file, so that processes that it spawns find its functions, unless another module has it.
    """
    modified = path.stat().st_mtime_ns
    if path in LOADED and LOADED[path][1] == modified:
        return sys.modules[LOADED[path][0]]
    root = import_root(path)
    if str(root) not in sys.path:
        sys.path.append(str(root))
    name = ".".join(path.relative_to(root).with_suffix("").parts)
    with with_passed_variables():
        importlib.invalidate_caches()
        spec = find_spec(name)
        if not (spec and spec.origin == str(path)):
            name = f"{path.stem}_{zlib.crc32(bytes(path))}"
            spec = spec_from_file_location(name, path)
        if name not in sys.modules or path in LOADED:  # else a module beside it has imported it
            sys.modules[name] = module_from_spec(spec)  # where dataclasses look up the annotations of their fields
            spec.loader.exec_module(sys.modules[name])
    LOADED[path] = name, modified
    return sys.modules[name]


def import_root(path: Path) -> Path:
    """Returns the folder from which a file imports: its own, or the one that holds its outermost package."""
    return next(folder for folder in path.parents if not (folder / "__init__.py").is_file())


def check_neighbors(path: Path) -> None:
    """Raises UserError if a file imports a module beside it that has the name of a package of ours."""
    root = import_root(path)
    for file in code_files(f"{path}:"):
        first = file.relative_to(root).parts[0] if file.is_relative_to(root) else ""
        if file != path and first.removesuffix(".py") in LMPO:
            raise UserError(f"{path} imports {root / first}, and a package of lmpo has this name: rename it")


# what it returns


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
