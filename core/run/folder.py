"""The folder of a run: its name, its lock, its copy in a bucket, and config.json and data.json.

config.json  data.json  metrics.jsonl  events.jsonl  programs.jsonl  report.html
rollouts/step_N.jsonl and .npz, held_out_N.jsonl and .npz
state/ (Orbax)  stepN/ and best/ (Hugging Face folders)
"""

import contextlib
import itertools
import os
import time
import weakref
from collections.abc import Mapping
from pathlib import Path

from core.run.card import find_version
from core.run.fingerprints import compare_processes
from models.checkpoint import find_adapters, find_local, resolve_model_dir
from models.tokenizer import date_prompts
from utils.devices.sharding import Layout
from utils.files import write_json
from utils.runs.lock import FolderLock
from utils.runs.origin import Origin, RunSegment, now, read_settings
from utils.settings.arguments import Value
from utils.settings.checks import hide_passwords
from utils.settings.config import changed_options, options_of, to_dict
from utils.settings.errors import UserError
from utils.settings.groups import TrainConfig
from utils.settings.presets import Preset, demo_of_tiny

OF_PROMPTS = "chat template, tokenizer and release of transformers"  # they make the tokens of prompts


class RunFolder:
    """A run folder, locked by this run. All processes call every method, the main one writes.

    Raises: UserError if the folder cannot be made, or is in use.
    """

    def __init__(self, config: TrainConfig, layout: Layout, name: str):
        self.config, self.layout, self.options = config.run, layout, options_of(type(config))
        self.model_dir, self.version = resolve_model_dir(config.model_dir), find_version()
        settings = to_dict(config) | {"model_dir": self.model_dir}
        self.settings = {name: hide_passwords(value) for name, value in settings.items()}  # they are written to files
        self.changed = list(changed_options(type(config), self.settings))
        save_dir = self.config.save_dir
        try:
            folder = save_dir or make_default_folder(name, layout)
            self.path = Path(os.path.expanduser(folder)).absolute()
            if is_bucket(folder):
                from utils.runs.bucket import Bucket, local_folder

                self.path = local_folder(folder)
            is_new = not save_dir or not self.path.exists()
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            reason = f"{error.filename} cannot be made ({error.strerror})"
            raise UserError(f"--save_dir: {reason}: name another folder") from error
        self.bucket = Bucket(folder, self.path) if is_bucket(folder) else None
        self.lock, problem = None, ""
        if layout.is_main:
            try:
                self.lock = FolderLock(self.path, is_new)
                # Released with the run, or with this object if the run fails before it begins.
                self.release = weakref.finalize(self, self.lock.release)
            except UserError as error:
                problem = str(error)
        if problem := layout.broadcast(problem):
            raise UserError(problem)
        if self.bucket:
            self.bucket.download()

    def compare(self, fingerprints: Mapping[str, str], is_resumed: bool) -> None:
        """Compares settings and data with those of the other processes, and of the run that is resumed.

        Raises: UserError naming those that differ; with --resume force, only if processes differ.
        """
        before, self.fingerprints = {}, dict(fingerprints)
        self.changes: list[str] = []  # by --resume force, in words
        if is_resumed:
            from utils.runs.resume import check_data, check_settings

            config_json = self.path / "config.json"
            _, before = read_settings(config_json)
            self.changes += check_settings(config_json, self.settings, self.config.resume, self.options)
        self.before = before | {"start": self.layout.broadcast(before.get("start") or now())}
        date_prompts(self.before["start"])  # so that a run continues with the prompts that it began with
        compare_processes(fingerprints, self.layout)
        if is_resumed:
            self.changes += check_data(self.path / "data.json", fingerprints, self.config.resume)

    def begin(self, resume_step: int, prompts: Mapping[str, str]) -> list[RunSegment]:
        """Writes config.json and data.json; `resume_step`: -1 for a new run; `prompts`: fingerprints of their tokens.

        Returns the segments of the run; the last one has the `changes`, if there are some.
        Raises: UserError if the run is resumed, and its prompts are now other tokens.
        """
        if resume_step >= 0:
            from utils.runs.resume import check_data

            self.changes += check_data(self.path / "data.json", prompts, self.config.resume, OF_PROMPTS)
        old = self.before.get("segments", [])  # of which a state may be damaged now
        segments = [segment | {"step": min(segment["step"], resume_step)} for segment in old]
        segments += [{"step": resume_step, "text": "; ".join(self.changes)}] if self.changes else []
        self.origin = Origin(self.version, self.layout.device_kinds, self.before | {"segments": segments})
        self.write_config()
        if self.layout.is_main:
            write_json(self.path / "data.json", self.fingerprints | dict(prompts))
        return segments

    def write_config(self, is_ended: bool = False) -> None:
        """Writes config.json: the settings, and under "run" the run's origin and times."""
        if self.layout.is_main:
            origin = self.origin.record(is_ended) | {"changed": self.changed}
            write_json(self.path / "config.json", self.settings | {"run": origin})

    def upload(self) -> None:
        """Copies new files to the bucket, if there is one."""
        if self.bucket and self.layout.is_main:
            self.bucket.upload()

    @property
    def is_lost(self) -> bool:
        """True if another run has taken the folder, since this one was silent for long."""
        return self.lock is not None and self.lock.is_lost

    def print(self, *lines: str) -> None:
        """Prints lines in the main process."""
        if self.layout.is_main and lines:
            print(*map(hide_passwords, lines), sep="\n", flush=True)


def is_bucket(name: str) -> bool:
    """True if a --save_dir names a bucket. Raises: UserError for another kind of address."""
    if "://" in name and not name.startswith(("gs://", "s3://")):
        raise UserError(f"--save_dir {name}: name a folder, or a bucket by gs:// or s3://")
    return "://" in name


def make_default_folder(name: str, layout: Layout) -> str:
    """Makes a new folder runs/<name>-<time>, with -2, -3, ... at its end if it exists; returns its name.

    Raises: OSError if it cannot be made.
    """
    folder, stem = "", f"runs/{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    for number in itertools.count(1) if layout.is_main else ():
        folder = f"{stem}-{number}" if number > 1 else stem
        with contextlib.suppress(FileExistsError):
            Path(folder).mkdir(parents=True)
            break
    return layout.broadcast(folder)


def settings_of_model(options: Mapping[str, Value], is_announced: bool = True) -> Preset:
    """Returns the settings that --model_dir implies: the demo's for models/tiny, their own for adapters.

    `is_announced`: the demo's are named on a line. Raises: as `settings_of_adapters`.
    """
    return settings_of_adapters(options) or demo_of_tiny(options, is_announced)


def settings_of_adapters(options: Mapping[str, Value]) -> Preset:
    """Returns the settings that --model_dir implies if it is a folder of adapters.

    --lora_rank 0 trains all parameters of the merged model. Raises: UserError if the options name other adapters
    than the folder's.
    """
    folder = find_local(resolve_model_dir(str(options["model_dir"]))) if "model_dir" in options else None
    adapters = find_adapters(folder) if folder else None
    if not adapters or options.get("lora_rank") == 0:
        return {}
    adapters.check_options(options)
    return adapters.options
