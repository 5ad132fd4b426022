"""The run folder: configuration, training state to resume from, models to use elsewhere, rollouts to look into.

config.json  data.json  metrics.jsonl  events.jsonl  report.html
rollouts/step_N.jsonl and .npz, held_out_N.jsonl and .npz
state/ (Orbax)  stepN/ and best/ (Hugging Face folders)
"""

import contextlib
import itertools
import json
import os
import shlex
import shutil
import signal
import sys
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Protocol, Self

import jax
import numpy as np

from core.records import Batch, Episodes, Progress
from core.run.card import GRPO, ModelCard, generation_settings
from core.run.fingerprints import (
    compare_processes,
    compare_runs,
    fingerprint_code,
    fingerprint_env,
    fingerprint_prompts,
)
from core.run.rollouts import NUM_GROUPS, rollout_arrays, rollout_rows, score_arrays, transcript
from envs.base import Env, Problem
from envs.scoring.scorer import Scorer
from envs.scoring.shaping import reward_names
from envs.settings import EnvConfig, RolloutSettings, as_held_out, code_settings, describe_environments
from models.architecture import Decoder
from models.checkpoint import find_local, find_model, model_steps, resolve_model_dir, save_model
from models.memory import gigabytes
from models.names import CRITIC, LAYERS, Adapters, Params
from models.peft import read_adapters, save_adapters
from models.state import TrainState
from models.tokenizer import Tokenizer, date_prompts
from utils.devices.compilation import Compiler, Programs, forget_programs
from utils.devices.compile_log import Compilations, compile_metrics, describe_programs
from utils.devices.sharding import Layout
from utils.files import replacing, skipping_damage, write_json
from utils.metrics.curves import read_metrics
from utils.metrics.jsonl import JSON, json_value
from utils.metrics.logger import Logger, lossy_output
from utils.metrics.sinks import open_sinks
from utils.metrics.terminal import waiting
from utils.reporting.page import held_out_scores, judge_segment, write_report
from utils.reporting.verdict import made_no_update
from utils.runs.bucket import Bucket, is_bucket, local_folder
from utils.runs.checkpoints import NUM_STATES, CheckpointManager
from utils.runs.checks import check_folder, check_models, check_name, describe_others
from utils.runs.lock import FolderLock
from utils.runs.origin import Origin, read_settings, start_of
from utils.runs.resume import check_settings
from utils.runs.segments import add_segment, describe_segment
from utils.runs.shutdown import Signals, Stop
from utils.runs.stopping import STOPPED, check_rules, metric_names, parse_rules
from utils.settings.arguments import Value
from utils.settings.checks import hide_passwords
from utils.settings.config import changed_options, options_of, to_dict
from utils.settings.errors import UserError, counted, describe_file_error
from utils.settings.groups import RunConfig
from utils.settings.presets import Preset, demo_of_tiny

PHASES = {  # phases of a step, and the names shown while they run
    "rollout": "rollouts", "logprobs": "log-probabilities", "data": "rows", "update": "updating"
}  # fmt: skip
FIRST = ("rollout", "data")  # phases that a step begins with
CPU_PRESET = "configs/cpu.py"
MANY_TOKENS_ON_CPU = 1 << 18  # tokens of a step: minutes of sampling for models/tiny on two cores
DRAWING_INTERVAL = 60  # seconds at least between two versions of report.html
NUM_HELD_OUT = 32  # held-out problems whose rollouts are written
SCORED = ("data", "env", "held_out", "sampling", "eval", "rewards")  # groups of options that change what scores mean
SELECTION_SCORE = "test_env/return"  # score by which --save_best chooses


OF_PROMPTS = "chat template, tokenizer and release of transformers"  # make the tokens of prompts


class EnvironmentWorker(AbstractContextManager, Protocol):
    """Plays an environment, and ends with the run: RolloutWorker of core/rollout.py."""

    name: str
    env: Env
    scorer: Scorer

    def encode(self, problem: Problem) -> list[int]: ...


class RunSettings(Protocol):
    """Settings of a training run: composed groups; this file reads one of them."""

    model_dir: str
    run: RunConfig


class Run:
    """A run folder; all processes call every method, the main one writes.

    As a context manager (`start`), around all that may run long, it ends the run. After a signal or a failure to write,
    the newest state is saved and one sentence is printed.

    Raises: OSError when the folder cannot be written. UserError when it cannot be made, or holds a run that must not be
    resumed, or when processes read different problems.
    """

    command = GRPO
    curve = "env/return"  # of the report, on which changes by --resume force are marked

    def __init__(self, settings: RunSettings, layout: Layout, environments: Mapping[str, RolloutSettings]):
        self.config, self.layout, self.signals = settings.run, layout, Signals()
        self.model_dir = resolve_model_dir(settings.model_dir)
        options = to_dict(settings) | {"model_dir": self.model_dir}
        self.settings = {name: hide_passwords(value) for name, value in options.items()}  # they are written to files
        self.changed = list(changed_options(type(settings), self.settings))
        self.environments = environments
        self.card = ModelCard(type(settings), self.settings, environments, self.command)
        save_dir = self.config.save_dir
        check_name(save_dir)
        try:
            folder = save_dir or make_default_folder(environments["env"].name, layout)
            self.directory = local_folder(folder)
            is_new = not save_dir or not self.directory.exists()
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            reason = f"{error.filename} cannot be made ({error.strerror})"
            raise UserError(f"--save_dir: {reason}: name another folder") from error
        self.bucket = Bucket(folder, self.directory) if is_bucket(folder) else None
        check_folder(self.directory)
        if layout.is_main and not is_new and (note := describe_others(self.directory)):
            print(note)
        self.lock = take_lock(self.directory, is_new, layout)
        if self.lock:  # released with the run, or with this object if the run fails before it begins
            self.release = weakref.finalize(self, self.lock.release)
        if self.bucket:
            self.bucket.download()
        state_folder = self.bucket.path if self.bucket else self.directory
        self.checkpoints = CheckpointManager(state_folder / "state", layout)
        before = {}
        if self.checkpoints.steps:
            with skipping_damage():
                _, before = read_settings(self.directory / "config.json")
        self.before = before | {"start": layout.broadcast(start_of(before))}
        date_prompts(self.before["start"])  # so that a run continues with the prompts that it began with
        self.fingerprints = self.fingerprint()
        self.new_settings: dict[str, list[JSON]] = {}  # old and new values of settings that --resume force changes
        self.new_data: dict[str, list[JSON]] = {}
        options = options_of(type(settings))
        if self.checkpoints.steps:
            file = self.directory / "config.json"
            self.new_settings = check_settings(file, self.settings, self.config.resume, options)
        self.rules = parse_rules(self.config.stop_at)
        self.keeps_best = self.config.save_best or bool(self.rules)  # by SELECTION_SCORE
        self.keeps_scores = not any(options[name].group in SCORED for name in self.new_settings)
        compare_processes(self.fingerprints, layout)
        if self.checkpoints.steps:
            self.new_data = compare_runs(self.directory / "data.json", self.fingerprints, self.config.resume)
        self.resumed: Progress | None = None
        self.left_rule = ""  # rule that ended the run before, and that --stop_at does not have now
        self.newest: tuple[TrainState, Progress] | None = None  # lost if it is not saved
        self.num_steps = 0  # of this process
        self.ahead: list[dict] = []  # programs that were compiled ahead, until the first metrics count them
        self.times: dict[str, float] = {}  # seconds of the phases of a step
        self.step_start = 0.0  # by the clock
        self.next_drawing = 0.0  # by the clock
        self.logger: Logger | None = None  # in the main process
        self.stack, self.trace = contextlib.ExitStack(), contextlib.ExitStack()  # trace: of jax.profiler

    def fingerprint(self) -> dict[str, str]:
        """Returns fingerprints of the data and of the user's code, by name."""
        found: dict[str, str] = {}
        for played in self.environments.values():
            found |= {played.label: fingerprint_env(played.env)} | fingerprint_code(played.env)
        return found

    def fingerprint_prompts(self) -> dict[str, str]:
        """Returns fingerprints of the prompts that the model reads, by name."""
        return {f"tokens of {x.name}'s prompts": fingerprint_prompts(x.env, x.encode) for x in self.workers}

    def restore(self, state: TrainState) -> tuple[TrainState, Progress]:
        """Returns the newest whole state and its progress; `state` and the beginning if there is none.

        Raises: UserError if the disk has no room for one save.
        """
        self.check_disk(state)
        state, saved = self.checkpoints.restore(state)
        if not saved:
            return state, Progress()
        memory = saved.pop("memory", {})
        if (rule := memory.get(STOPPED)) and rule not in map(str, self.rules):
            del memory[STOPPED]
            self.left_rule = rule
        self.resumed = Progress(**saved, memory=memory)
        return state, self.resumed

    def check_disk(self, state: TrainState) -> None:
        """Measures the bytes of a save. Raises: UserError, in every process, if the disk has no room for it."""
        arrays = [x for name, x in state.params.items() if name != CRITIC]
        self.model_bytes = sum(x.nbytes for x in jax.tree.leaves(arrays))
        self.state_bytes = 0 if self.bucket else sum(x.nbytes for x in jax.tree.leaves(state))
        free, problem = shutil.disk_usage(self.directory).free, ""
        if self.layout.is_main and self.model_bytes + self.state_bytes > free:
            what = f"a model of {gigabytes(self.model_bytes)} GB and a state of {gigabytes(self.state_bytes)} GB"
            problem = f"the disk of {self.directory} has {gigabytes(free)} GB free, and each save writes {what}"
        if problem := self.layout.broadcast(problem):
            raise UserError(f"{problem}: free space, or name a --save_dir on another disk")

    def start(self, model: Decoder, tokenizer: Tokenizer, workers: Iterable[EnvironmentWorker]) -> Self:
        """Writes config.json and data.json, and opens the log; returns the run to be entered. `workers` end with it.

        Raises: UserError if the run is resumed, and its prompts are now other tokens.
        """
        self.model, self.tokenizer, self.workers = model, tokenizer, list(workers)
        if self.rules:
            self.check_rules()
        prompts = self.fingerprint_prompts()
        if self.resumed:
            self.new_data |= compare_runs(self.directory / "data.json", prompts, self.config.resume, OF_PROMPTS)
        self.fingerprints |= prompts
        adapters = read_adapters(find_model(self.model_dir))
        base = adapters.base if adapters else self.model_dir
        folder = find_local(base)
        self.base = str(folder.absolute()) if folder else base  # PEFT looks in the working directory only
        is_main = self.layout.is_main
        resume_step = self.resumed.step if self.resumed else -1
        check_models(self.directory, resume_step)
        is_comparable = self.keeps_scores and not self.new_data
        old, changes = self.before.get("segments", []), (self.new_settings, self.new_data)
        segments = add_segment(old, resume_step, *changes, is_comparable)
        self.origin = Origin(self.card.version, self.layout.device_kinds, self.before | {"segments": segments})
        self.card = replace(self.card, segments=segments)
        if is_main:
            self.write_config()
            write_json(self.directory / "data.json", self.fingerprints)
            self.logger = Logger(
                self.directory,
                resume_step=resume_step,
                num_steps=self.last_step,
                test_interval=self.settings.get("test_interval", 0),
                sinks=open_sinks(self.config, self.directory, self.settings, resume_step),
            )
            if len(segments) > len(old):
                self.logger.note(resume_step, self.curve, f"--resume force: {describe_segment(segments[-1])}")
        self.compilations = Compilations(self.directory / "programs.jsonl" if is_main else None)
        return self

    def check_rules(self) -> None:
        """Raises UserError for a rule of --stop_at on a metric that the run does not log."""
        roles = {settings.label: role for role, settings in self.environments.items()}
        parts, open_roles = {}, set()
        for worker in self.workers:
            parts[roles[worker.name]] = reward_names(worker.scorer.parts, worker.env)
            if worker.env.has_turns:
                open_roles |= {roles[worker.name], "stop"}
            if self.settings.get("task_sampling") == "bins":
                open_roles |= {f"bins/{name}" for name in worker.env.bins()}
        check_rules(self.rules, metric_names(self.settings, parts), open_roles)

    def met_rule(self, progress: Progress, metrics: Mapping[str, JSON]) -> str:
        """Returns the first rule of --stop_at that ends the run at this step; empty if none does."""
        if not self.rules:
            return ""
        totals = {"rollout/total_rollouts": progress.num_rollouts, "times/run": self.origin.seconds}
        rule = next((str(rule) for rule in self.rules if rule.is_met(progress.step, totals | metrics)), "")
        return self.layout.broadcast(rule)  # processes differ in times

    def stopped(self, progress: Progress, metrics: Mapping[str, JSON]) -> Progress:
        """Returns the progress, marked as ended if a rule of --stop_at ends the run at its step."""
        rule = self.met_rule(progress, metrics)
        if rule and self.logger:
            self.logger.note(progress.step, self.curve, f"--stop_at {rule} ended the run")
        return replace(progress, memory=progress.memory | {STOPPED: rule}) if rule else progress

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            if self.logger:
                stack.enter_context(self.logger)
            stack.enter_context(self.compilations)
            if self.lock:
                stack.callback(self.release)
            stack.enter_context(lossy_output())
            stack.enter_context(self.signals)
            stack.enter_context(self.trace)
            self.stack = stack.pop_all()
        for worker in self.workers:
            self.stack.enter_context(worker)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, _) -> None:
        """Saves the newest state if it is not saved, and waits for it.

        Raises: SystemExit after a signal (status 128 + its number) or a failure to write (status 1). After a UserError
        it raises another one, which adds what is saved.
        """
        with self.stack:
            is_stopped = kind is Stop
            try:
                # After an error, the other processes may not come here to save.
                can_save = is_stopped or kind is None or not self.layout.mesh.is_multi_process
                saved = self.save_newest() if can_save else None
                self.checkpoints.close()
                if saved:  # behind the state, which nothing can replace
                    self.save_step(*saved)
                self.print(*self.compilations.take_late())
                if is_stopped or kind is None:
                    self.write_config(is_ended=True)
                    self.draw()
                    self.upload()
                if is_stopped:
                    self.layout.broadcast("saved")  # before one process leaves, which would end the others
            except OSError as failure:
                error = error if kind and not is_stopped else failure
            self.exit_on(error)

    def exit_on(self, error: BaseException | None) -> None:
        """Prints how the run ended, and the files that are saved. Raises: SystemExit, see __exit__."""
        steps = self.checkpoints.steps
        saved = f"step {steps[0]} is saved: {self.resuming_command} goes on from there" if steps else "no step is saved"
        if isinstance(error, OSError):
            print(f"error: {describe_file_error(error).rstrip('.')}; {saved}", file=sys.stderr)
            raise SystemExit(1) from error
        if isinstance(error, UserError) and steps:
            raise UserError(f"{str(error).rstrip('.')}; {saved}") from error
        if isinstance(error, Stop):
            if self.layout.is_main:
                print(f"stopped by {self.stopped_by}; {saved}")
                if steps and (model := self.directory / f"step{steps[0]}").is_dir():
                    print(f"model: {model}")
            raise SystemExit(128 + self.signals.received)

    @property
    def resuming_command(self) -> str:
        """Returns the command that resumes the run, in words if it is the one that began it."""
        if self.config.save_dir:
            return "the same command"
        folder, command = str(self.directory), os.path.abspath(sys.argv[0])
        arguments = [python_command(), command, "--config", f"{folder}/config.json", "--save_dir", folder]
        arguments += ["--resume", "auto"] if self.config.resume == "never" else []
        return f"`{shlex.join([*arguments, *words_of(code_settings(self.settings))])}`"

    @property
    def stopped_by(self) -> str:
        """Returns the name of the signal that ended the run."""
        return self.signals.received.name

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Times a phase of a step, and shows on the terminal that it is waited for.

        A signal ends the run at once in the first phase, in which the newest state is whole; in others after the step.
        """
        clock = time.perf_counter()
        if name in FIRST:
            self.step_start = clock
            if self.config.profile and self.num_steps == 2:  # the third step, which is past compilation
                self.trace.enter_context(jax.profiler.trace(str(self.directory / "profile")))
        can_stop = self.stoppable() if name in FIRST else contextlib.nullcontext()
        with can_stop, waiting(PHASES[name]):
            yield
        self.times[f"times/{name}"] = time.perf_counter() - clock

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """Surrounds the evaluation before the first step, which a signal ends at once."""
        with self.stoppable(), waiting("held-out problems before training"):
            yield

    @contextlib.contextmanager
    def stoppable(self) -> Iterator[None]:
        """Lets a signal end the run at any moment inside, since the newest state is whole.

        Several processes must stop at the same place: they finish this and the step.
        """
        received = max(self.layout.gather_values(self.signals.received or 0))
        if received:
            self.signals.received = signal.Signals(received)
            raise Stop
        with contextlib.nullcontext() if self.layout.mesh.is_multi_process else self.signals.raising():
            yield

    def save_model(self, name: str, params: Params | Adapters, progress: Progress) -> None:
        """Writes a Hugging Face folder of this name: its template has the prompts of training, its card the scores.

        For adapters it is a PEFT folder, which names their base.
        """
        layout, card = self.layout, ""
        if layout.is_main:
            card = self.card.render(progress, read_metrics(self.directory / "metrics.jsonl"))
        folder, tokenizer = self.directory / name, self.saved_tokenizer()
        if LAYERS in params:
            save_model(folder, self.model, params, tokenizer, layout.fetch, layout.is_main, card)
        else:
            save_adapters(folder, self.model, params, tokenizer, self.base, layout.fetch, layout.is_main, card)

    def save_step(self, state: TrainState, progress: Progress) -> None:
        """Writes the model of a step to stepN/; --keep sets how many models of earlier steps stay."""
        self.save_model(f"step{progress.step}", state.params, progress)
        if not self.layout.is_main or not self.config.keep:
            return
        steps = [step for step in model_steps(self.directory) if step <= progress.step]
        for step in steps[: -self.config.keep]:
            shutil.rmtree(self.directory / f"step{step}")
            if self.bucket:
                self.bucket.remove(f"step{step}")

    def saved_tokenizer(self) -> Tokenizer:
        """Returns the tokenizer of saved models, with the prompts and sampling settings of training."""
        played = self.environments["env"]
        problem = played.env.problem(0)
        sampling = generation_settings(self.settings, played.max_new_tokens)
        tokenizer = self.tokenizer.with_generation(sampling, self.settings["stop_strings"])
        return tokenizer if problem.plain else tokenizer.with_training_prompts(problem.thinking, problem.prefix)

    @property
    def last_step(self) -> int:
        """Returns the steps of the run; 0 if they are not known."""
        return 0 if self.settings.get("num_epochs") else self.settings.get("max_steps", 0)

    @property
    def notes(self) -> list[str]:
        """Returns the lines printed at the start: work, environments, rows they left out, and the run folder."""
        verb = "writing to"
        if self.resumed:
            rule = self.resumed.memory.get(STOPPED, "")
            is_finished = rule or 0 < self.last_step <= self.resumed.step
            verb = f"{'finished' if is_finished else 'resuming'} at step {self.resumed.step}"
            verb += f" by --stop_at {rule} (leave the rule out to continue)" * bool(rule)
            verb += f", at which --stop_at {self.left_rule} had ended the run," * bool(self.left_rule) + " in"
        environments = describe_environments(self.environments.values())
        place = f"{verb} {self.directory}"
        if not (self.directory / "report.html").exists():
            place += "; report.html is there after the first step"
        return [*self.describe_work(), *environments, *self.describe_saves(), place]

    def describe_work(self) -> list[str]:
        """Returns the steps, rollouts and tokens of the run in a line, and on CPUs advice if there are many."""
        num_prompts, group_size = self.settings["groups_per_batch"], self.settings["group_size"]
        num_rollouts = num_prompts * group_size
        num_tokens = num_rollouts * self.environments["env"].max_new_tokens
        rollouts = f"{counted(num_rollouts, 'rollout')} ({counted(num_prompts, 'prompt')} x {group_size})"
        steps = counted(self.settings["max_steps"], "step")
        lines = [f"{steps} of {rollouts}, up to {num_tokens:,} tokens a step"]
        if self.layout.is_cpu and num_tokens >= MANY_TOKENS_ON_CPU:
            lines.append(f"such steps take long on a CPU: --config {CPU_PRESET} makes them smaller, and fewer")
        return lines

    def describe_saves(self) -> list[str]:
        """Returns a line if the disk has no room for all that the run will save, and one if --keep removes models."""
        lines = []
        steps, keep = model_steps(self.directory), self.config.keep
        if keep and len(steps) > keep:
            removed = counted(len(steps) - keep, "model")
            lines.append(f"--keep {keep}: the next save removes {removed}, from step{steps[0]} on")
        done, interval = self.resumed.step if self.resumed else 0, self.config.save_interval
        num_models = max(1, -(-(self.last_step - done) // interval)) if interval else 1
        num_models = min(num_models, keep + 1) if keep else num_models
        num_bytes = num_models * self.model_bytes + (NUM_STATES + 1) * self.state_bytes
        free = shutil.disk_usage(self.directory).free
        if num_bytes > free:
            models = f"{counted(num_models, 'model')} of {gigabytes(self.model_bytes)} GB"
            states = f"{NUM_STATES + 1} states of {gigabytes(self.state_bytes)} GB"
            advice = "give --keep N or a larger --save_interval"
            what = f"{models} and {states}, and {gigabytes(free)} GB are free"
            lines.append(f"warning: the disk of {self.directory} has no room for {what}: {advice}")
        return lines

    def write_config(self, is_ended: bool = False) -> None:
        """Writes config.json: the settings, and under "run" the run's origin and times."""
        if self.layout.is_main:
            origin = self.origin.record(is_ended)
            write_json(self.directory / "config.json", self.settings | {"run": origin | {"changed": self.changed}})

    def print(self, *lines: str) -> None:
        """Prints lines in the main process."""
        if self.layout.is_main and lines:
            print(*map(hide_passwords, lines), sep="\n", flush=True)

    def log(self, step: int, metrics: dict[str, float | list[float]]) -> None:
        """Logs the metrics of a step, and prints some of them."""
        if self.logger:
            self.logger.log(step, metrics)
            self.logger.line(step, metrics)

    def compile(self, lists: Sequence[Programs], are_all: bool) -> None:
        """Compiles the programs of the run ahead of its steps, and prints how many they are and how long that took.

        `are_all`: no other is needed, so that a later step warns of each that it compiles.
        """
        clock = time.perf_counter()
        with waiting("programs"):
            notes = Compiler(lists).wait()
        self.print(*notes)
        self.compilations.are_all_known = are_all and not notes
        self.ahead += self.compilations.take_programs()
        self.print(describe_programs(self.ahead, time.perf_counter() - clock))

    def compile_metrics(self) -> dict[str, float]:
        """Returns the metrics of the programs since the last call; prints those that are compiled too late."""
        self.print(*self.compilations.take_late())
        ahead, self.ahead = self.ahead, []
        return compile_metrics(self.compilations.take_programs(), ahead)

    def log_start(
        self, metrics: dict[str, float], examples: Episodes | None, state: TrainState, progress: Progress
    ) -> Progress:
        """Logs the evaluation before the first step; returns the progress with its score as the best one."""
        metrics |= self.compile_metrics()
        self.log(0, metrics)
        if examples is not None:
            self.write_held_out(0, examples)
        if self.keeps_best and SELECTION_SCORE in metrics:
            self.save_model("best", state.params, progress)
        return self.stopped(replace(progress, best=metrics.get(SELECTION_SCORE)), metrics)

    def end_step(
        self,
        progress: Progress,
        state: TrainState,
        metrics: dict[str, float | list[float]],
        episodes: Episodes | None,
        batch: Batch,
        is_last: bool,
    ) -> Progress:
        """Logs a step, writes its rollouts (None: it has none), and saves models and state if they are due.

        Returns the progress. Raises: OSError when an earlier save has failed, or another run has taken the folder.
        """
        step = progress.step
        self.trace.close()
        metrics |= self.compile_metrics()
        if episodes is not None:
            metrics["rollout/total_rollouts"] = progress.num_rollouts
        metrics["times/step"] = time.perf_counter() - self.step_start - metrics.get("times/test", 0.0)
        metrics["times/run"] = self.origin.seconds
        metrics["memory/peak_gb"] = self.layout.peak_memory / 1e9
        self.log(step, metrics)
        progress = self.stopped(progress, metrics)
        is_last = is_last or STOPPED in progress.memory
        if episodes is not None:
            self.write_rollouts(step, episodes, batch, is_last)
        score = metrics.get(SELECTION_SCORE)
        is_best = score is not None and (progress.best is None or score > progress.best)
        if self.keeps_best and is_best:
            progress = replace(progress, best=score)
            self.save_model("best", state.params, progress)
        is_saved = is_last or is_due(step, self.config.save_interval)
        if is_saved:
            self.save_step(state, progress)
        if self.layout.is_cpu and forget_programs():
            self.print(f"step {step}: there were too many compiled programs for this process; it loads them as needed")
            self.compilations.are_all_known = False
        self.num_steps += 1
        self.compilations.num_steps = self.num_steps
        memory = json.loads(json.dumps(progress.memory))  # a copy, which the loop cannot change before it is saved
        assert memory == progress.memory, "Progress.memory must be as JSON returns it: names are text, values finite"
        self.newest = state, replace(progress, memory=memory)
        if self.lock and self.lock.is_lost:
            self.newest = None
            raise OSError(
                f"another process has taken {self.directory}, since this one was silent for long: end one of the two"
            )
        self.checkpoints.check_errors()
        if not is_last and (is_saved or time.monotonic() > self.next_drawing):
            self.write_config()
            self.draw()
        if is_saved:
            self.save_newest()
        return progress

    def save_newest(self) -> tuple[TrainState, Progress] | None:
        """Writes the newest state in the background, if there is one; a run never resumes from half of one.

        Returns it; None if there is none.
        """
        newest, self.newest = self.newest, None
        if newest is None:
            return None
        state, progress = newest
        if any(x.is_deleted() for x in jax.tree.leaves(state)):
            return None  # donated to an update that did not end
        self.upload()
        saved = asdict(progress)
        if not progress.memory:
            del saved["memory"]  # as states of before have it
        self.checkpoints.save(progress.step, state, saved)
        return newest

    def upload(self) -> None:
        """Copies new files to the bucket, if there is one."""
        if self.bucket and self.layout.is_main:
            self.bucket.upload()

    def write_rollouts(self, step: int, episodes: Episodes, batch: Batch, is_last: bool) -> None:
        """Writes one JSON object per rollout, of all with their arrays or of two groups; prints an example when due."""
        if not self.layout.is_main:
            return
        group_size = self.settings["group_size"]
        rows = rollout_rows(episodes, group_size, self.tokenizer, batch)
        first_rows = [row for row in rows if row["group"] < NUM_GROUPS]
        if is_last or self.num_steps == 0 or is_due(step, self.settings["test_interval"]):
            self.print_rollout(f"step {step}", episodes)
            self.logger.rollouts(step, first_rows)
        if self.config.save_rollouts == "none":
            return
        folder = self.directory / "rollouts"
        folder.mkdir(exist_ok=True)
        if self.config.save_rollouts == "all":
            write_arrays(folder / f"step_{step}.npz", rollout_arrays(episodes, group_size))
            first_rows = rows
        write_rows(folder / f"step_{step}.jsonl", first_rows)

    def print_rollout(self, where: str, episodes: Episodes) -> None:
        """Prints the first of these rollouts: prompt, completion and reward."""
        prompt = episodes.completions.tokens[0, : episodes.completions.prompt_lengths[0]]
        self.logger.sample(where, self.tokenizer.decode(prompt), transcript(episodes, 0), episodes.scores["return"][0])

    def write_held_out(self, step: int, episodes: Episodes) -> None:
        """Prints a rollout, and writes scores of the held-out problems (always the same) and rollouts of the first."""
        if not self.layout.is_main:
            return
        self.print_rollout(f"step {step}, held out", episodes)
        if self.config.save_rollouts == "none":
            return
        rows = rollout_rows(episodes, self.settings["num_eval_samples"], self.tokenizer, num_groups=NUM_HELD_OUT)
        folder = self.directory / "rollouts"
        folder.mkdir(exist_ok=True)
        write_rows(folder / f"held_out_{step}.jsonl", [row for row in rows if row["group"] < NUM_HELD_OUT])
        write_arrays(folder / f"held_out_{step}.npz", score_arrays(episodes))

    def write_losses(self, step: int, arrays: Mapping[str, np.ndarray]) -> None:
        """Writes the losses of held-out rows (the same at each evaluation): see `row_losses`."""
        if not arrays or not self.layout.is_main or self.config.save_rollouts == "none":
            return
        folder = self.directory / "rollouts"
        folder.mkdir(exist_ok=True)
        write_arrays(folder / f"held_out_rows_{step}.npz", arrays)

    def write_bad_batch(self, batch: Batch) -> None:
        """Writes a batch whose loss or gradient was not finite to bad_batches/, for inspection."""
        if not self.layout.is_main:
            return
        folder = self.directory / "bad_batches"
        folder.mkdir(exist_ok=True)
        path = folder / f"{len(list(folder.iterdir()))}.npz"
        arrays = vars(batch) | batch.extras
        write_arrays(path, {name: x for name, x in arrays.items() if isinstance(x, np.ndarray)})
        text = f"an update was skipped, since its loss or gradient is not finite; its batch: {path}"
        self.logger.warn(self.logger.step + 1, "loss", text)

    def draw(self) -> None:
        """Draws report.html anew, so seldom that it costs a run a hundredth of its time at most."""
        clock = time.monotonic()
        self.next_drawing = clock + DRAWING_INTERVAL
        if not self.layout.is_main:
            return
        try:
            write_report([self.directory], self.directory / "report.html")
        except Exception as error:  # noqa: BLE001 (it can be drawn later, and must not stop a run)
            print(f"warning: report.html is not drawn ({type(error).__name__}: {error})", flush=True)
        self.next_drawing = max(self.next_drawing, clock + 100 * (time.monotonic() - clock))

    def print_summary(self, progress: Progress, state: TrainState) -> None:
        """Prints the report's verdict, and the paths of model and report; writes a model that is missing."""
        is_saved = (self.directory / f"step{progress.step}").is_dir()
        if not any(self.layout.gather_values(is_saved)):  # of a run that was stopped or whose model was removed
            self.save_step(state, progress)
        if self.layout.is_main:
            metrics = read_metrics(self.directory / "metrics.jsonl")
            scores = held_out_scores(self.directory / "rollouts")
            verdict = judge_segment(metrics, scores, self.card.segments)["text"]
            if rule := progress.memory.get(STOPPED):
                verdict += f" --stop_at {rule} ended the run at step {progress.step}."
            self.print(verdict)
            if made_no_update(metrics):
                self.print(f"no update was made: the saved model is {self.model_dir}, unchanged")
        model = str(self.directory / f"step{progress.step}")
        self.print(f"model: {model}", f"curves and completions: {self.directory / 'report.html'}")
        self.print(*next_commands(model, self.settings))


def next_commands(model: str, settings: Mapping[str, Value]) -> list[str]:
    """Returns commands for a trained model: a chat, and its scores.

    A run without an environment has no scores: core/eval.py would take its default environment.
    """
    root = Path(os.path.relpath(Path(__file__).parents[2]))
    commands = {"chat:": ("core/sampling.py", "--ckpt_dir", model)}
    if settings["env_name"]:
        played = {name: value for name, value in as_held_out(settings).items() if name in options_of(EnvConfig)}
        commands["evaluate:"] = ("core/eval.py", "--model_dir", model, *words_of(code_settings(played)))
    lines = {name: [python_command(), str(root / file), *rest] for name, (file, *rest) in commands.items()}
    return [f"{name:<14}{shlex.join(line)}" for name, line in lines.items()]


def words_of(settings: Mapping[str, str]) -> list[str]:
    """Returns settings as words of a command."""
    return [word for name, value in settings.items() for word in (f"--{name}", value)]


def python_command() -> str:
    """Returns the Python of this process, as a shell finds it."""
    return "python" if shutil.which("python") == sys.executable else sys.executable


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
    adapters = read_adapters(folder) if folder else None
    if not adapters or options.get("lora_rank") == 0:
        return {}
    adapters.check_options(options)
    return adapters.options


def make_default_folder(name: str, layout: Layout) -> str:
    """Makes a new folder runs/<name>-<time>, with -2, -3, ... at its end if it exists; returns its name.

    Raises: OSError if it cannot be made.
    """
    stem = f"runs/{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    if not layout.is_main:
        return layout.broadcast("")
    for number in itertools.count(1):
        folder = f"{stem}-{number}" if number > 1 else stem
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
        except UserError as error:
            problem = str(error)
    problem = layout.broadcast(problem)
    if problem:
        raise UserError(problem)
    return lock


def write_rows(file: Path, rows: Iterable[Mapping[str, object]]) -> None:
    """Writes one JSON object a line."""
    lines = [json.dumps(row, default=json_value) + "\n" for row in rows]
    with replacing(file) as new:
        new.write("".join(lines).encode())


def write_arrays(file: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes arrays by name, compressed."""
    with replacing(file) as new:
        np.savez_compressed(new, **arrays)


def is_due(step: int, interval: int) -> bool:
    """True if something that happens every `interval` steps (0: never) happens now."""
    return interval > 0 and step % interval == 0
