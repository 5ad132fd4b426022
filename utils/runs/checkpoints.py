"""Training states to go on from: written by Orbax in the background, whole or not at all, and checked when read."""

import contextlib
import json
import logging
import sys
import traceback
import zlib
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, Protocol

import jax
import orbax.checkpoint as ocp
from etils import epath

from utils.devices.sharding import Layout
from utils.settings.errors import UserError
from utils.training.state import fingerprint


class Unraisable(Protocol):
    """The fields that are read here of what sys.unraisablehook is called with."""

    exc_value: BaseException | None
    exc_traceback: TracebackType | None


class States:
    """The training states in a folder, by step; all processes call every method.

    Raises: OSError where one cannot be written; an error of the writing in the background is raised by a later call.
    """

    def __init__(self, folder: epath.PathLike, keep: int, layout: Layout):
        silence_orbax()
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, create=True, cleanup_tmp_directories=True)
        self.manager, self.layout = ocp.CheckpointManager(folder, options=options), layout

    @property
    def steps(self) -> list[int]:
        """Those that were written to the end, newest first."""
        return sorted(self.manager.all_steps(), reverse=True)

    def save(self, step: int, state: Any, progress: dict) -> None:
        """Starts to write a state and its progress (JSON values)."""
        progress = progress | {"checksum": self.checksum(state, progress)}
        args = ocp.args.Composite(state=ocp.args.StandardSave(state), progress=ocp.args.JsonSave(progress))
        with write_errors():
            self.manager.save(step, args=args)

    def check(self) -> None:
        """Raises what has gone wrong in the background."""
        with write_errors():
            self.manager.check_for_errors()

    def close(self) -> None:
        """Waits for what is still being written."""
        with write_errors():
            self.manager.wait_until_finished()
            self.manager.close()

    def restore(self, state: Any) -> tuple[Any, dict]:
        """The newest whole state, laid out as `state`, and the progress saved with it; `state` and {} without any.

        The arrays of `state` are gone where another is found: memory holds one. Damaged states are set aside, and told.

        Raises: UserError when there are states, and all of them are damaged.
        """
        damaged, steps = {}, self.steps
        abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
        if steps:
            jax.tree.map(lambda x: x.delete(), state)
        for step in steps:
            found, reason = self.read(step, abstract)
            if found:
                self.set_aside(damaged)
                return found
            damaged[step] = reason
        if damaged:
            told = "; ".join(f"step {step}: {reason}" for step, reason in damaged.items())
            raise UserError(f"none of the training states in {self.manager.directory} can be read ({told})")
        return state, {}

    def read(self, step: int, abstract: Any) -> tuple[tuple[Any, dict] | None, str]:
        """State and progress of a step, or None and why they cannot be used."""
        args = ocp.args.Composite(state=ocp.args.StandardRestore(abstract), progress=ocp.args.JsonRestore())
        restored, reason = None, "another process cannot read it"
        try:
            restored = self.manager.restore(step, args=args)
        except Exception as error:  # noqa: BLE001 (damage has many faces: tensorstore, JSON and the file system raise)
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        if not all(self.layout.on_all(restored is not None)):
            return None, reason
        progress = dict(restored.progress)
        if progress.pop("checksum", None) != self.checksum(restored.state, progress):
            return None, "its checksum is wrong"
        return (restored.state, progress), ""

    def set_aside(self, damaged: Mapping[int, str]) -> None:
        """Renames damaged states, since the run comes to those steps again, and says so."""
        for step, reason in damaged.items():
            folder, aside = (self.manager.directory / name for name in (str(step), f"{step}.damaged"))
            if self.layout.is_main:
                print(f"warning: the training state of step {step} is damaged and set aside ({reason})", flush=True)
                if aside.exists():
                    aside.rmtree()
                folder.rename(aside)
        if damaged:
            self.layout.broadcast("renamed")
            self.manager.reload()

    def checksum(self, state: Any, progress: dict) -> int:
        """One number of every bit of the state, on any mesh, and of the progress."""
        numbers = [int(x) for x in self.layout.fetch(fingerprint(state))]
        return zlib.crc32(json.dumps([numbers, progress], sort_keys=True).encode())


class LateCallbacks:
    """A sys.unraisablehook that drops the error of callbacks which come to an event loop after its end.

    When one of many writes fails, Orbax raises its error and closes its event loop; tensorstore still reports each of
    the other writes to it, from threads of its own. All other errors go to the hook that was there before.
    """

    def __init__(self, previous: Callable[[Unraisable], None]):
        self.previous = previous

    def __call__(self, unraisable: Unraisable) -> None:
        frames = traceback.extract_tb(unraisable.exc_traceback)
        names = [frame.name for frame in frames[-2:]]
        is_late = isinstance(unraisable.exc_value, RuntimeError) and names == ["call_soon_threadsafe", "_check_closed"]
        if not is_late:
            self.previous(unraisable)


def is_news(record: logging.LogRecord) -> bool:
    """False for what asyncio logs of Orbax's tasks that fail beside the first one, whose error Orbax raises."""
    text = record.getMessage()
    frames = traceback.extract_tb(record.exc_info[2]) if record.exc_info else []
    places = [text, *(frame.filename for frame in frames)]
    is_orbax = any("orbax/checkpoint" in place for place in places)
    return not (is_orbax and "exception was never retrieved" in text)


def silence_orbax() -> None:
    """Leaves the errors that Orbax raises, and drops the tracebacks that it prints besides."""
    logging.getLogger("absl").setLevel(logging.CRITICAL)  # the traceback of each error that it raises
    logging.getLogger("asyncio").addFilter(is_news)
    if not isinstance(sys.unraisablehook, LateCallbacks):
        sys.unraisablehook = LateCallbacks(sys.unraisablehook)


@contextlib.contextmanager
def write_errors() -> Iterator[None]:
    """Around what writes: whatever the libraries of storage raise there is an OSError of one line."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 (their errors have no type of their own)
        reason = " ".join(str(error).split())[:1000]  # paths first, the cause last
        raise OSError(f"the training state cannot be written ({type(error).__name__}: {reason})") from error
