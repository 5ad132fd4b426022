"""A run folder in a bucket (gs://, s3://), which cannot append to files: the run writes here, and is copied there."""

import shutil
from pathlib import Path

from etils import epath

from utils.runs.checkpoints import write_errors
from utils.settings.errors import UserError

NEEDED = ("config.json", "data.json", "metrics.jsonl", "events.jsonl", "wandb_id")  # to resume on another machine


class Bucket:
    """The copy in a bucket of a run folder on this machine."""

    def __init__(self, name: str, directory: Path):
        self.path, self.directory = epath.Path(name), directory
        self.uploaded: dict[Path, int] = {}  # time of the last change of each file that was copied

    def upload(self) -> None:
        """Copies files that are new or changed; a resumed run drops files unknown to its state."""
        for path in self.directory.rglob("*"):
            name, time_written = path.relative_to(self.directory), path.stat().st_mtime_ns
            is_hidden = name.parts[0].startswith(".")
            if path.is_file() and not is_hidden and self.uploaded.get(name) != time_written:
                with write_errors():
                    copy_file(path, self.path / str(name))
                self.uploaded[name] = time_written

    def remove(self, name: str) -> None:
        """Removes the copy of a folder."""
        with write_errors():
            if (self.path / name).exists():
                (self.path / name).rmtree()

    def download(self) -> None:
        """Copies the files needed to resume a run. Raises: UserError when the bucket cannot be read."""
        try:
            for name in NEEDED:
                if (self.path / name).exists():
                    copy_file(self.path / name, self.directory / name)
        except Exception as error:  # noqa: BLE001 (each storage library has errors of its own)
            raise UserError(
                f"--save_dir {self.path} cannot be read ({error}): correct the address or your access to it"
            ) from error


def local_folder(name: str) -> Path:
    """Returns the folder of a run on this machine: runs/gs/bucket/name for gs://bucket/name."""
    return (Path("runs") / name.replace("://", "/")).absolute()


def copy_file(source: epath.Path, target: epath.Path) -> None:
    """Copies a file between this machine and a bucket."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with source.open("rb") as reader, target.open("wb") as writer:
        shutil.copyfileobj(reader, writer, 2**24)
