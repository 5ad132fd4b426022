"""The run folder: configuration, training state to resume from, models to use elsewhere, rollouts to look into.

config.json  data.json  metrics.jsonl  plot.png  report.html  rollouts/step_N.jsonl and .npz
state/ (Orbax)  stepN/ and best/ (Hugging Face folders)
"""

import contextlib
import itertools
import json
import os
import shutil
import signal
import sys
import time
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np
from etils import epath

from utils.devices.sharding import Layout, LayoutConfig
from utils.metrics.logger import Logger, forgiving_output
from utils.metrics.sinks import SinkConfig, open_sinks
from utils.reporting.page import write_report
from utils.reporting.plots import before_and_after, plot
from utils.runs.checkpoints import States, write_errors
from utils.runs.checks import check_folder, check_models, check_name
from utils.runs.fingerprints import Environment, compare_processes, compare_runs, fingerprint
from utils.runs.lock import FolderLock
from utils.runs.shutdown import Signals, Stop
from utils.settings.config import option, to_dict
from utils.settings.errors import UserError, user_errors
from utils.settings.lmpo import LmpoConfig
from utils.training.batching import concatenate


@dataclass(frozen=True)
class RunConfig(SinkConfig):
    """Run folder and logging."""

    save_dir: str = option(
        "", "run folder, also gs://... or s3://...; a run found there is resumed; empty: runs/<environment>-<time>"
    )  # fmt: skip
    resume: str = option(
        "auto", "a run found in --save_dir; auto: goes on unless settings have changed what it means, force: goes on "
        "even then, never: is left alone", ["auto", "force", "never"]
    )  # fmt: skip
    save_interval: int = option(20, "steps between saved models and states; 0: only at the end")
    save_best: bool = option(False, "keep the model with the best held-out return so far in best/, from step 0 on")
    keep: int = option(2, "training states kept")
    save_rollouts: str = option(
        "sample", "rollouts written per step; all: also their token ids, masks and returns", ["all", "sample", "none"]
    )
    sample_interval: int = option(10, "steps between example completions on the terminal; 0: none")

    def __post_init__(self):
        if self.save_interval < 0 or self.sample_interval < 0 or self.keep < 1:
            raise UserError("--save_interval and --sample_interval must not be negative, --keep at least 1")


MAY_CHANGE = {  # when a run goes on: where and how fast it runs, what it writes; all the rest is its meaning
    *(field.name for cls in (LayoutConfig, RunConfig, LmpoConfig) for field in fields(cls)),  # lmpo's set other fields
    "data_dir", "num_score_workers", "score_timeout", "max_error_share", "inference_batch_per_device",
    "tokens_per_microbatch", "use_remat", "remat", "unroll_layers", "attention", "max_skipped_updates", "test_interval",
    "test_greedy", "precompile", "profile",
}  # fmt: skip
LENGTH = {"max_steps", "num_epochs"}  # the same, but where the learning rate is on its way to 0 at the end


class Run:
    """A run folder; all processes call every method, the main one writes.

    A bucket (gs://, s3://) cannot append to files: there the training state is written to it by Orbax, and everything
    else to runs/gs/..., from which the bucket gets what is new whenever a state is saved.

    As a context manager, around all that may run long, it ends the run: `reached` says what there is to save. A signal
    or a failure to write ends it with the newest state saved, in one sentence.

    Raises: OSError when the folder cannot be made or written, UserError when it holds a run that must not go on.
    """

    def __init__(self, config: RunConfig, layout: Layout):
        check_name(config.save_dir)
        name = config.save_dir or make_default_folder(config.env_name, layout)
        self.bucket, self.uploaded = epath.Path(name) if is_bucket(name) else None, {}
        self.directory = local_folder(name)
        self.config, self.layout, self.signals = config, layout, Signals()
        self.fingerprints: dict[str, str] = {}  # of the environments, by name
        self.newest: tuple[int, Any, dict] | None = None  # step, state, progress: what is lost if it is not saved
        self.next_drawing = 0.0  # of plot.png and report.html, by the clock
        is_new = not config.save_dir or not self.directory.exists()
        self.directory.mkdir(parents=True, exist_ok=True)
        check_folder(self.directory)
        self.lock = take_lock(self.directory, is_new, layout)
        if self.lock:  # it ends with the run, or, where that fails before it begins, with this object
            self.release = weakref.finalize(self, self.lock.release)
        if self.bucket:
            self.download()
        self.states = States((self.bucket or self.directory) / "state", config.keep, layout)
        if self.states.steps:
            check_settings(self.directory / "config.json", to_dict(config), config.resume)

    def check_data(self, envs: Mapping[str, Environment]) -> None:
        """Raises UserError when processes see different problems, or others than the run before them did."""
        self.fingerprints = {name: fingerprint(env) for name, env in envs.items()}
        compare_processes(self.fingerprints, self.layout)
        if self.states.steps:
            compare_runs(self.directory / "data.json", self.fingerprints, self.config.resume)

    def reached(self, step: int, state: Any, progress: dict, is_due: bool) -> None:
        """Tells what there is to save, and saves it in the background when it is due; draws then, and now and then.

        Raises: OSError when an earlier save has failed, or another run has taken the folder.
        """
        self.newest = (step, state, progress)
        if self.lock and self.lock.is_lost:
            self.newest = None
            raise OSError(f"another process has taken {self.directory}, after a long silence of this one")
        self.states.check()
        if is_due or time.monotonic() > self.next_drawing:
            self.draw()
        if is_due:
            self.save()

    def save(self) -> None:
        """Writes the newest state in the background; what is half-written is never gone on from."""
        newest, self.newest = self.newest, None
        self.upload()
        self.states.save(*newest)

    def upload(self) -> None:
        """Copies what is new to the bucket; a resumed run drops what its state does not know of."""
        for path in self.directory.rglob("*") if self.bucket and self.layout.is_main else ():
            name, time_written = path.relative_to(self.directory), path.stat().st_mtime_ns
            if path.is_file() and name.parts[0][0] != "." and self.uploaded.get(name) != time_written:
                with write_errors():
                    copy(path, self.bucket / str(name))
                self.uploaded[name] = time_written

    def download(self) -> None:
        """Gets what a run in the bucket needs to go on: perhaps this machine has never seen it.

        Raises: UserError when the bucket cannot be read.
        """
        try:
            for name in ("config.json", "data.json", "metrics.jsonl", "wandb_id", "mlflow_run_id"):
                if (self.bucket / name).exists():
                    copy(self.bucket / name, self.directory / name)
        except Exception as error:  # noqa: BLE001 (each storage library has errors of its own)
            raise UserError(f"--save_dir {self.bucket} cannot be read ({error})") from error

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """Around what may be abandoned half-way, while the newest state stands: a signal ends the run here.

        Several processes must stop at the same place: they finish this and the step.
        """
        if asked := max(self.layout.on_all(self.signals.received or 0)):
            self.signals.received = signal.Signals(asked)
            raise Stop
        with contextlib.nullcontext() if self.layout.mesh.is_multi_process else self.signals.raising():
            yield

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            if self.lock:
                stack.callback(self.release)
            stack.enter_context(forgiving_output())
            stack.enter_context(self.signals)
            self.stack = stack.pop_all()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, _) -> None:
        """Saves what is not saved yet and waits for it.

        Raises: SystemExit after a signal (status 128 + its number) or a failure to write (status 1).
        """
        with self.stack:
            try:
                # After an error, the others may not come along to save; within an update, the arrays are given away.
                together = kind in (None, Stop) or not self.layout.mesh.is_multi_process
                if self.newest and together and not any(x.is_deleted() for x in jax.tree.leaves(self.newest[1])):
                    self.save()
                self.states.close()
                if kind is Stop:
                    self.layout.broadcast("saved")  # before one leaves, which would end the others
            except OSError as failure:
                error = error if kind and kind is not Stop else failure
            steps = self.states.steps
            saved = f"step {steps[0]} is saved: the same command goes on from there" if steps else "no step is saved"
            if isinstance(error, OSError):
                print(f"error: {str(error).rstrip('.')}; {saved}", file=sys.stderr)
                raise SystemExit(1) from error
            if isinstance(error, Stop):
                if self.layout.is_main:
                    print(f"stopped by {self.signals.received.name}; {saved}")
                raise SystemExit(128 + self.signals.received)

    def write_rollouts(self, step: int, rows: list[dict], played: list) -> None:
        """Writes one JSON object per rollout: of all, with the arrays of all, or of the first two groups."""
        if not self.layout.is_main or self.config.save_rollouts == "none":
            return
        folder = self.directory / "rollouts"
        folder.mkdir(exist_ok=True)
        if self.config.save_rollouts == "all":
            np.savez_compressed(folder / f"step_{step}.npz", **rollout_arrays(played, self.config.group_size))
        else:
            rows = [row for row in rows if row["group"] < 2]
        lines = (json.dumps(row, default=plain) + "\n" for row in rows)
        (folder / f"step_{step}.jsonl").write_text("".join(lines))

    def write_bad_batch(self, batch: Any) -> None:
        """Writes a batch whose loss or gradient was not finite to bad_batches/, where it can be looked at."""
        if not self.layout.is_main:
            return
        folder = self.directory / "bad_batches"
        folder.mkdir(exist_ok=True)
        path = folder / f"{len(list(folder.iterdir()))}.npz"
        arrays = {name: x for name, x in vars(batch).items() if isinstance(x, np.ndarray)}
        np.savez(path, **arrays)
        print(f"warning: an update was skipped, since its loss or gradient is not finite; its batch: {path}")

    def start_logger(self, resume_step: int) -> Logger:
        """Writes config.json and data.json; returns the logger, which drops what was logged after `resume_step`."""
        settings, is_main = to_dict(self.config), self.layout.is_main
        with user_errors():
            check_models(self.directory, resume_step)
            if is_main:
                write_json(self.directory / "config.json", settings)
                write_json(self.directory / "data.json", self.fingerprints)
            sinks = open_sinks(self.config, self.directory, settings, resume_step) if is_main else []
            return Logger(self.directory, enabled=is_main, resume_step=resume_step, sinks=sinks)

    def draw(self) -> None:
        """Draws plot.png and report.html anew, and says when it is worth it again: it may cost a run a hundredth."""
        clock = time.monotonic()
        self.next_drawing = clock + 60
        if not self.layout.is_main:
            return
        try:
            plot(self.directory / "metrics.jsonl", self.directory / "plot.png")
            write_report([self.directory], self.directory / "report.html")
        except Exception as error:  # noqa: BLE001 (pictures can be drawn later, and must not stop a run)
            print(f"warning: plot.png and report.html are not drawn ({type(error).__name__}: {error})", flush=True)
        self.next_drawing = max(self.next_drawing, clock + 100 * (time.monotonic() - clock))

    def before_and_after(self) -> str:
        """The first and the last held-out scores, as a table."""
        return before_and_after(self.directory / "metrics.jsonl") if self.layout.is_main else ""

    def profiled(self, wanted: bool) -> contextlib.AbstractContextManager:
        """Traces what happens inside, when --profile asks for it and the step is past compilation."""
        tracing = self.config.profile and wanted
        return jax.profiler.trace(str(self.directory / "profile")) if tracing else contextlib.nullcontext()


def make_default_folder(env_name: str, layout: Layout) -> str:
    """Makes a new folder runs/<environment>-<time>, with -2, -3, ... at its end where it exists; returns its name.

    Raises: OSError where it cannot be made.
    """
    name = f"runs/{env_name}-{time.strftime('%Y%m%d-%H%M%S')}"
    if not layout.is_main:
        return layout.broadcast("")
    for number in itertools.count(1):
        folder = f"{name}-{number}" if number > 1 else name
        with contextlib.suppress(FileExistsError):
            Path(folder).mkdir(parents=True)
            return layout.broadcast(folder)


def take_lock(folder: Path, is_new: bool, layout: Layout) -> FolderLock | None:
    """Locks the run folder in the main process, for all.

    Raises: UserError in every process when another run holds it.
    """
    lock, problem = None, ""
    if layout.is_main:
        try:
            lock = FolderLock(folder, is_new)
        except ValueError as error:
            problem = str(error)
    if problem := layout.broadcast(problem):
        raise UserError(problem)
    return lock


def write_json(file: Path, value: Mapping[str, Any]) -> None:
    """Writes a JSON file, whole or not at all."""
    draft = file.with_name(file.name + ".new")
    draft.write_text(json.dumps(value, indent=2) + "\n")
    os.replace(draft, file)


def is_bucket(name: str) -> bool:
    return "://" in name


def local_folder(name: str) -> Path:
    """The folder of a run on this machine: the one of that name, or runs/gs/bucket/name for gs://bucket/name."""
    return (Path("runs") / name.replace("://", "/") if is_bucket(name) else Path(name).expanduser()).absolute()


def copy(source: Any, target: Any) -> None:
    """Copies a file between this machine and a bucket."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with source.open("rb") as reader, target.open("wb") as writer:
        shutil.copyfileobj(reader, writer, 2**24)


def check_settings(file: Path, settings: Mapping[str, Any], resume: str) -> None:
    """Compares the settings with those in `file`, of the run that is to go on.

    Raises: UserError naming the settings that give the run another meaning, unless `resume` is "force".
    """
    if resume == "never":
        raise UserError(f"--resume never, but {file.parent} holds a run: name another --save_dir")
    try:
        before = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        before = error
    if not isinstance(before, dict):
        reason = before if isinstance(before, Exception) else f"{file} holds no names and values"
        print(f"warning: the settings are not compared with those of the run before ({reason})")
        return
    free = MAY_CHANGE | (LENGTH if settings["lr_schedule"] == "constant" else set())
    told = [
        f"--{name} is {value!r} now and was {before[name]!r}"
        for name, value in settings.items()
        if name in before and name not in free and clean(before[name]) != clean(value)
    ]
    if told and resume != "force":
        raise UserError(
            f"{file.parent} holds a run with other settings: {'; '.join(told)}; go on with the old ones, with --resume "
            "force, or with another --save_dir"
        )
    if told:
        print("warning: the run goes on with other settings:", "; ".join(told))


def clean(value: Any) -> Any:
    """A setting as it is compared: a folder may be written with a slash at its end."""
    return value.rstrip("/") if isinstance(value, str) else value


def plain(value: Any) -> Any:
    """NumPy values as JSON knows them."""
    return np.asarray(value).tolist()


def describe_play(played: list, group_size: int) -> dict[str, float]:
    """Returns means over all rollouts of a step that were graded, whether they are learnt from or not."""
    metrics, graded = {}, np.concatenate([~e.failed for e in played])
    for name in sorted(set().union(*(e.scores for e in played))):
        parts = [e.scores.get(name, np.zeros(len(e.ids))) for e in played]
        metrics[f"env/{name}"] = float(np.concatenate(parts)[graded].sum() / max(graded.sum(), 1))
    lengths = np.concatenate([e.rollouts.lengths - e.rollouts.prompt_lengths for e in played])
    returns = np.concatenate([e.scores["return"] for e in played])
    groups = np.where(graded, returns, np.nan).reshape(-1, group_size)
    spreads = np.fmax.reduce(groups, axis=1) - np.fmin.reduce(groups, axis=1)  # of rollouts that were graded
    for name in played[0].failures:
        metrics[f"env/{name}"] = sum(e.failures[name] for e in played)
    times = {f"times/{name}": sum(e.times[name] for e in played) for name in played[0].times}
    return metrics | times | {
        "env/length": float(lengths.mean()),
        "env/finished": float(np.concatenate([e.rollouts.finished for e in played]).mean()),
        "env/groups_without_signal": float((~(spreads > 1e-6)).mean()),
        "rollout/num_rollouts": len(lengths),
        "rollout/tokens_per_second": float(lengths.sum() / times["times/rollout"]),
    }  # fmt: skip


def rollout_rows(played: list, group_size: int, tokenizer: Any = None, learnt: Any = None) -> list[dict]:
    """What rollouts/step_N.jsonl holds of each rollout.

    With a tokenizer also what report.html colours, for the first two groups only, since it is long: prompt, tokens and
    their log-probabilities; and of rows that are in the batch `learnt`, their advantage and what else it knows of them.
    """
    rows, learnt_rows = [], {} if learnt is None else {identity(learnt, i): i for i in range(len(learnt.lengths))}
    for e in played:
        r = e.rollouts
        for i, text in enumerate(e.texts):
            scores = {name: x[i] for name, x in e.scores.items()}
            completion = {"length": r.lengths[i] - r.prompt_lengths[i], "finished": r.finished[i]}
            row = {"group": len(rows) // group_size, "task": e.ids[i], "text": text} | scores | completion
            row |= {"reward_failed": True} if e.failed[i] else {}
            if tokenizer and row["group"] < 2:
                row |= token_fields(r, i, tokenizer, learnt, learnt_rows.get(identity(r, i)))
            rows.append(row)
    return rows


def rollout_arrays(played: list, group_size: int) -> dict[str, np.ndarray]:
    """The arrays of rollouts/step_N.npz: B rollouts in the order of step_N.jsonl, T columns.

    tokens          int32 [B, T]    prompt, completion, padding
    mask            bool [B, T]     tokens that the policy chose: the completion without forced tokens
    logprobs        float32 [B, T]  of the completion's tokens under the distribution they were drawn from, nats
    lengths, prompt_lengths  int32 [B]  tokens of prompt and completion, and of the prompt
    finished        bool [B]        ended by a stop token or string
    failed          bool [B]        the reward failed: its scores are 0 and mean nothing
    tasks, groups   int32 [B]       number of the problem; rollouts of one prompt share the number of their group
    returns         float32 [B]     what training maximises; scores/NAME: each part of it
    """
    rollouts = concatenate([episodes.rollouts.replace(support=None) for episodes in played])
    names = sorted(set().union(*(episodes.scores for episodes in played)))
    arrays = {
        "tokens": np.asarray(rollouts.tokens, np.int32),
        "mask": np.asarray(rollouts.mask, bool),
        "logprobs": np.asarray(rollouts.logprobs, np.float32),
        "lengths": np.asarray(rollouts.lengths, np.int32),
        "prompt_lengths": np.asarray(rollouts.prompt_lengths, np.int32),
        "finished": np.asarray(rollouts.finished, bool),
        "failed": np.concatenate([episodes.failed for episodes in played]),
        "tasks": np.concatenate([episodes.ids for episodes in played]).astype(np.int32),
    }
    arrays["groups"] = np.arange(len(arrays["tasks"]), dtype=np.int32) // group_size
    for name in names:
        parts = [episodes.scores.get(name, np.zeros(len(episodes.ids), np.float32)) for episodes in played]
        arrays[f"scores/{name}"] = np.concatenate(parts).astype(np.float32)
    arrays["returns"] = arrays.pop("scores/return")
    return arrays


def identity(rollouts: Any, i: int) -> bytes:
    """The tokens of a row, by which it is found again in a batch whose rows were chosen and cut to another width."""
    return np.asarray(rollouts.tokens[i, : rollouts.lengths[i]], np.int32).tobytes()


def token_fields(rollouts: Any, i: int, tokenizer: Any, learnt: Any, row: int | None) -> dict[str, Any]:
    """The fields of rollout `i` that speak of single tokens; it is `row` of the batch `learnt` (None: not in it)."""
    start, end = int(rollouts.prompt_lengths[i]), int(rollouts.lengths[i])
    ids, columns = rollouts.tokens[i].tolist(), slice(start, end)
    fields = {"prompt": tokenizer.hf.decode(ids[:start]), "tokens": token_texts(tokenizer, ids[columns])}
    lists = {"logprobs": rollouts.logprobs[i]}
    if row is not None:
        known = {"advantage": learnt.advantages, "old_logprobs": learnt.old_logprobs, "entropies": learnt.entropies}
        lists |= {name: x[row] for name, x in known.items() if x is not None}
    lists = {name: np.round(np.asarray(x[columns], float), 4) + 0.0 for name, x in lists.items()}  # + 0.0: no "-0.0"
    if "advantage" in lists and not np.ptp(lists["advantage"]):
        lists["advantage"] = lists["advantage"][0]  # one for the completion
    return fields | lists


def token_texts(tokenizer: Any, ids: list[int]) -> list[str]:
    """The text of each token; a character that several tokens spell stands with the last of them."""
    texts, pending = [], []
    for place, token in enumerate(ids, 1):
        pending.append(token)
        text = tokenizer.hf.decode(pending)
        is_whole = not text.endswith("\ufffd") or len(pending) == 8 or place == len(ids)  # 8: no character, wrong bytes
        texts.append(text if is_whole else "")
        pending = [] if is_whole else pending
    return texts


def example(episodes, tokenizer) -> tuple[str, str, float]:
    """Prompt, completion and return of the first rollout."""
    r = episodes.rollouts
    return tokenizer.decode(r.tokens[0, : r.prompt_lengths[0]]), episodes.texts[0], episodes.scores["return"][0]


def is_due(step: int, interval: int) -> bool:
    """Whether something that happens every `interval` steps (0: never) happens now."""
    return interval > 0 and step % interval == 0
