"""Training states to resume from: written by Orbax in the background, whole or not at all, and checked when read."""

import contextlib
import json
import logging
import sys
import zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import jax
from etils import epath
from jaxtyping import PyTree

from utils.devices.compilation import shapes_of
from utils.devices.memory import fingerprint
from utils.devices.sharding import Layout
from utils.metrics.jsonl import JSON
from utils.settings.errors import UserError, describe_error

if TYPE_CHECKING:
    import orbax.checkpoint as ocp

SavedProgress = dict[str, JSON]  # of a run: step, cursor and the like
NUM_STATES = 2  # kept, the latest


class CheckpointManager:
    """The training states in a folder, by step; all processes call every method.

    Raises: OSError if one cannot be written; an error of the writing in the background is raised by a later call.
    """

    def __init__(self, folder: epath.PathLike, layout: Layout):
        self.folder = epath.Path(folder)
        self.layout = layout
        self.manager: ocp.CheckpointManager | None = None
        if self.folder.exists() or layout.mesh.is_multi_process:
            self.open()

    def open(self) -> None:
        """Makes Orbax's manager and the folder, if there is none yet; processes wait for one another."""
        if self.manager:
            return
        import orbax.checkpoint as ocp  # here: neither an error of the options nor the first step waits for it

        for name in ("absl", "asyncio"):  # which print the tracebacks of errors that Orbax raises as well
            logging.getLogger(name).setLevel(logging.CRITICAL)
        hook, told = sys.unraisablehook, ("Event loop is closed", "Encountered error while reading array")
        sys.unraisablehook = lambda x: None if str(x.exc_value).startswith(told) else hook(x)  # reads that Orbax left
        # Of an array that several devices hold, each would write a slice, which XLA compiles for each shape.
        handler = ocp.type_handlers.ArrayHandler(use_replica_parallel=self.layout.mesh.is_multi_process)
        ocp.type_handlers.register_type_handler(jax.Array, handler, override=True)
        options = ocp.CheckpointManagerOptions(max_to_keep=NUM_STATES, create=True, cleanup_tmp_directories=True)
        self.manager = ocp.CheckpointManager(self.folder, options=options)

    @property
    def steps(self) -> list[int]:
        """Returns the steps whose states were written completely, newest first."""
        return sorted(self.manager.all_steps(), reverse=True) if self.manager else []

    def save(self, step: int, state: PyTree, progress: SavedProgress) -> None:
        """Starts to write a state and its progress."""
        import orbax.checkpoint as ocp

        progress = progress | {"checksum": self.checksum(state, progress)}
        args = ocp.args.Composite(state=ocp.args.StandardSave(state), progress=ocp.args.JsonSave(progress))
        with write_errors():
            self.open()
            self.manager.save(step, args=args)

    def check_errors(self) -> None:
        """Raises the OSError of a write in the background that has failed."""
        with write_errors():
            if self.manager:
                self.manager.check_for_errors()

    def wait(self) -> None:
        """Waits for the writes in the background."""
        with write_errors():
            if self.manager:
                self.manager.wait_until_finished()

    def close(self) -> None:
        """Waits for the writes in the background, and ends."""
        with write_errors():
            if self.manager:
                self.manager.close()

    def restore(self, state: PyTree) -> tuple[PyTree, SavedProgress]:
        """Returns the newest whole state, laid out as `state`, and its progress; `state` and {} if there is none.

        The arrays of `state` are deleted if another is restored, since memory holds one. Damaged states are renamed,
        with a warning.

        Raises: UserError when there are states, and all of them are damaged.
        """
        steps, abstract, reasons = self.steps, shapes_of(state), {}
        if not steps:
            return state, {}
        jax.tree.map(lambda x: x.delete(), state)
        for step in steps:
            try:
                found = self.read_step(step, abstract)
            except UserError as error:
                reasons[step] = str(error)
                continue
            for damaged, reason in reasons.items():
                self.set_aside(damaged, reason)
            return found
        text = "; ".join(f"step {step}: {reason}" for step, reason in reasons.items())
        raise UserError(
            f"none of the training states in {self.manager.directory} can be read ({text}): name another --save_dir"
        )

    def read_step(self, step: int, abstract: PyTree) -> tuple[PyTree, SavedProgress]:
        """Returns the state and the progress of a step. Raises: UserError, in all processes, if they are damaged."""
        import orbax.checkpoint as ocp

        args = ocp.args.Composite(state=ocp.args.StandardRestore(abstract), progress=ocp.args.JsonRestore())
        restored, reason = None, "another process cannot read it"
        try:
            restored = self.manager.restore(step, args=args)
        except Exception as error:  # noqa: BLE001 (tensorstore, JSON and the file system raise for damage)
            reason = describe_error(error)
        if not all(self.layout.gather_values(restored is not None)):
            raise UserError(reason)
        progress = dict(restored.progress)
        if progress.pop("checksum", None) != self.checksum(restored.state, progress):
            raise UserError("its checksum is wrong")
        return restored.state, progress

    def set_aside(self, step: int, reason: str) -> None:
        """Renames a damaged state, since the run reaches its step again, and prints a warning."""
        aside = self.manager.directory / f"{step}.damaged"
        if self.layout.is_main:
            print(f"warning: the training state of step {step} is damaged and set aside ({reason})", flush=True)
            if aside.exists():
                aside.rmtree()
            (self.manager.directory / str(step)).rename(aside)
        self.layout.broadcast("renamed")
        self.manager.reload()

    def checksum(self, state: PyTree, progress: SavedProgress) -> int:
        """Returns a number that depends on every bit of the state, the same on any mesh, and on the progress."""
        numbers = [int(x) for x in self.layout.fetch(fingerprint(state))]
        text = json.dumps([numbers, progress], sort_keys=True)
        return zlib.crc32(text.encode())


@contextlib.contextmanager
def write_errors() -> Iterator[None]:
    """Turns the errors of storage libraries in the block into an OSError of one line."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 (their errors have no type of their own)
        reason = " ".join(str(error).split())[:1000]  # paths first, the cause last
        raise OSError(f"the training state cannot be written ({type(error).__name__}: {reason})") from error
