"""Python files of the user: the functions and classes that FILE.py:NAME names, and the modules beside them.

A file imports the modules of its folder as under `python FILE.py`, a utils.py too. These modules belong to a package of
their own, so none takes the name of one of this repository's. Only imports in such files look into the folder first.
The package's name contains the folder, so a process that a reward spawns finds its functions, too.
"""

import ast
import builtins
import contextlib
import inspect
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial, partialmethod
from importlib import import_module
from importlib.machinery import FrozenImporter, ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import NamedTuple, SupportsFloat

from utils.settings.errors import UserError, most_similar

ROOT = Path(__file__).resolve().parents[1]
__path__ = []  # the packages of folders are inside of this module
PACKAGE = f"{__name__}.folder_"  # and the folder in hexadecimal digits
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
    try:
        module = load_module(file.absolute())
    except (Exception, SystemExit) as error:
        reason = re.sub(rf"{re.escape(PACKAGE)}[0-9a-f]*\.?", "", f"{type(error).__name__}: {error}")
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
    """Returns the module in a file; it is executed again if the file has changed."""
    name = f"{package_of(str(path.parent))}.{path.stem.replace('.', '_')}"
    if OwnLoader.loaded.get(name) == (str(path), path.stat().st_mtime_ns):
        return sys.modules[name]
    spec = spec_from_file_location(name, path, loader=OwnLoader(name, str(path)))
    module = module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses look up the annotations of their fields
    with with_passed_variables():
        spec.loader.exec_module(module)
    return module


def package_of(folder: str) -> str:
    """Returns the name of the package of the modules in a folder."""
    return import_module(PACKAGE + folder.encode().hex()).__name__


class OwnLoader(SourceFileLoader):
    """Executes a module of the user's, whose imports look into its folder first."""

    loaded: dict[str, tuple[str, int]] = {}  # by name: the file, and when it was changed

    def exec_module(self, module: ModuleType) -> None:
        modified = os.stat(self.path).st_mtime_ns
        depth = PACKAGE.count(".") + 1
        package = ".".join(module.__name__.split(".")[:depth])
        module.__dict__["__builtins__"] = {**vars(builtins), "__import__": partial(import_beside, package)}
        super().exec_module(module)
        self.loaded[module.__name__] = self.path, modified


class OwnFinder:
    """Finds the modules inside of packages of the user's, for `sys.meta_path`."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if not name.startswith(PACKAGE):
            return None
        folder, _, module = name.removeprefix(PACKAGE).partition(".")
        if not module:
            spec = ModuleSpec(name, None, is_package=True)
            spec.submodule_search_locations = [bytes.fromhex(folder).decode()]
            return spec
        spec = PathFinder.find_spec(name, path, target)
        if spec and type(spec.loader) is SourceFileLoader:
            spec.loader = OwnLoader(name, spec.origin)
        return spec


if OwnFinder not in sys.meta_path:
    sys.meta_path.insert(0, OwnFinder)


def import_beside(
    package: str,
    name: str,
    globals: Mapping[str, object] | None = None,
    locals: Mapping[str, object] | None = None,
    fromlist: Sequence[str] = (),
    level: int = 0,
) -> ModuleType:
    """Imports as `__import__` does, from the folder of a package if it has a module of this name."""
    first = name.partition(".")[0]
    if level or not is_beside(first, sys.modules[package].__path__):
        return builtins.__import__(name, globals, locals, fromlist, level)
    module = builtins.__import__(f"{package}.{name}", globals, locals, fromlist)
    return module if fromlist else sys.modules[f"{package}.{first}"]


def is_beside(name: str, folders: Sequence[str]) -> bool:
    """True if a folder has a module of this name, and it is not the one that every import finds.

    A folder that is a package itself comes last: its own files import its modules by relative names.
    """
    if name in sys.builtin_module_names or FrozenImporter.find_spec(name):
        return False
    spec = PathFinder.find_spec(name, folders)
    if spec is None:
        return False
    try:
        usual = find_spec(name)
    except ValueError:  # a module without a specification, as __main__
        return False
    if usual is None:
        return True
    is_same = usual.origin and spec.origin and os.path.realpath(usual.origin) == os.path.realpath(spec.origin)
    is_of_package = any(Path(folder, "__init__.py").is_file() for folder in folders) and name not in LMPO
    return spec.origin is not None and not is_same and not is_of_package  # a folder without __init__.py comes last


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
