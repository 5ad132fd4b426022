"""Checks before training that the run can write to its folder."""

import os
import re
from pathlib import Path

from utils.settings.errors import UserError

BUCKETS = ("gs://", "s3://")
FOLDERS = ("state", "rollouts", "bad_batches")
FILES = ("config.json", "data.json", "metrics.jsonl", "events.jsonl", "programs.jsonl", "report.html")


def check_name(save_dir: str) -> None:
    """Raises UserError for a --save_dir that nothing can be written to: an unknown kind of address, no UTF-8."""
    if "://" in save_dir and not save_dir.startswith(BUCKETS):
        raise UserError(
            f"--save_dir {save_dir} is no address that can be written: name a folder, or a bucket by "
            f"{' or '.join(BUCKETS)}"
        )
    try:
        str(Path(save_dir).absolute()).encode()
    except UnicodeEncodeError as error:
        raise UserError(f"--save_dir: its path {error.object!a} is not UTF-8: name another folder") from None


def check_folder(directory: Path) -> None:
    """Raises UserError naming an entry of a run folder that is in the way of files or folders of the run.

    Links are, since what the run writes would go through them; Orbax takes states beside a link for another format's.
    """
    for path in directory.rglob("*"):
        is_kept_by_wandb = "wandb" in path.relative_to(directory).parts[:-1]
        if path.is_symlink() and not is_kept_by_wandb:
            raise UserError(obstacle_message(path, "is a link"))
    for path in (directory / name for name in (*FOLDERS, *FILES)):
        is_right = path.is_dir() if path.name in FOLDERS else path.is_file()
        if os.path.lexists(path) and not is_right:
            raise UserError(obstacle_message(path, f"is not a {'folder' if path.name in FOLDERS else 'file'}"))


def describe_others(directory: Path) -> str:
    """Returns a line on a folder that holds other files and no run: a run's files would stand among them."""
    entries = [path.name for path in sorted(directory.iterdir()) if not path.name.startswith(".")]
    if not entries or {*entries} & {*FOLDERS, *FILES}:
        return ""
    named = ", ".join(entries[:3])
    return f"--save_dir {directory} holds other files ({named}): those of the run are written beside them"


def check_models(directory: Path, resume_step: int) -> None:
    """Raises UserError naming an entry that is in the way of models of later steps than `resume_step`."""
    for path in directory.iterdir():
        step = re.fullmatch(r"step(\d+)", path.name)
        is_later = step is not None and int(step[1]) > resume_step
        if not is_later and path.name != "best":
            continue
        if not path.is_dir():
            raise UserError(obstacle_message(path, "is not a folder"))
        for entry in path.iterdir():
            if entry.is_dir():
                raise UserError(obstacle_message(entry, "is a folder within that of a model"))


def obstacle_message(path: Path, reason: str) -> str:
    """Returns the sentence for a path that the run cannot write to."""
    return f"{path} {reason}, and is in the way of what this run writes: move it, or name another --save_dir"
