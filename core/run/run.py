"""A run: its folder, states, log and ends, in the order in which they begin, save and end."""

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Self

from core.records import Batch, Episodes, Progress
from core.rollout import RolloutWorker
from core.run.card import GRPO, METHODS, ModelCard
from core.run.fingerprints import fingerprint_code, fingerprint_env, fingerprint_prompts
from core.run.folder import RunFolder
from core.run.log import FIRST, Log
from core.run.report import describe_end, draw_report, resuming_command
from core.run.states import States, saved_tokenizer
from core.run.stop import STOPPED, Stopping, parse_rules
from envs.settings import RolloutSettings, describe_environments
from models.architecture import Decoder
from models.state import TrainState
from models.tokenizer import Tokenizer
from utils.devices.sharding import Layout
from utils.metrics.logger import lossy_output
from utils.metrics.terminal import waiting
from utils.runs.origin import describe_segment
from utils.runs.shutdown import Stop
from utils.settings.errors import UserError, describe_file_error
from utils.settings.groups import TrainConfig

Evaluate = Callable[[TrainState, int], dict[str, float]]  # returns the scores of a state; empty: nothing is held out
SELECTION_SCORE = "test_env/return"  # score by which --save_best chooses


class Run:
    """A run folder from its lock to its report; all processes call every method, the main one writes.

    As a context manager (`start`), around all that may run long, it ends the run. After a signal or a failure to write,
    the newest state is saved and one sentence is printed.

    `command`: the file that trains; `data`: more fingerprints, by name, that must be those of the run that is resumed.

    Raises: OSError when the folder cannot be written. UserError when it cannot be made, or holds a run that must not be
    resumed, or when processes read different problems.
    """

    def __init__(
        self,
        config: TrainConfig,
        layout: Layout,
        environments: Mapping[str, RolloutSettings],
        command: str = GRPO,
        data: Mapping[str, str] | None = None,
    ):
        self.config, self.layout, self.environments = config.run, layout, environments
        self.stop = Stopping(parse_rules(self.config.stop_at), layout)
        self.folder = folder = RunFolder(config, layout, environments["env"].name)
        card = ModelCard(type(config), folder.settings, environments, command, version=folder.version)
        self.states = States(folder, card)
        self.log = Log(folder)
        self.resumed: Progress | None = None
        _, _, self.curve = METHODS.get(command, METHODS[GRPO])
        self.num_steps = 0 if folder.settings.get("num_epochs") else folder.settings["max_steps"]  # 0: not known
        fingerprints: dict[str, str] = {}
        for played in environments.values():
            fingerprints |= {played.label: fingerprint_env(played.env)} | fingerprint_code(played.env)
        folder.compare(fingerprints | dict(data or {}), bool(self.states.checkpoints.steps))

    def restore(self, state: TrainState) -> tuple[TrainState, Progress]:
        """Returns the newest whole state and its progress; `state` and the beginning if there is none.

        Raises: UserError if the disk has no room for one save.
        """
        state, resumed = self.states.restore(state)
        self.resumed = resumed and self.stop.resume(resumed)
        return state, self.resumed or Progress()

    def start(
        self,
        model: Decoder,
        tokenizer: Tokenizer,
        workers: Iterable[RolloutWorker],
        prompts: Mapping[str, str] | None = None,
        saved: Tokenizer | None = None,
    ) -> Self:
        """Writes config.json and data.json, and opens the log; returns the run to be entered. `workers` end with it.

        `prompts`: more fingerprints of what the model reads; `saved`: tokenizer of saved models, if it is another one.
        Raises: UserError if the run is resumed, and its prompts are now other tokens.
        """
        self.workers = list(workers)
        tokens = {f"tokens of {x.name}'s prompts": fingerprint_prompts(x.env, x.encode) for x in self.workers}
        step = self.resumed.step if self.resumed else -1
        segments = self.folder.begin(step, tokens | dict(prompts or {}))
        self.states.card = replace(self.states.card, segments=segments)
        saved = saved or saved_tokenizer(tokenizer, self.environments["env"], self.folder.settings)
        self.states.begin(model, saved)
        self.log.open(tokenizer, step, self.num_steps)
        if self.folder.changes:
            self.log.note(step, self.curve, f"--resume force: {describe_segment(segments[-1])}")
        return self

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            for part in self.log.parts:
                stack.enter_context(part)
            if self.folder.lock:
                stack.callback(self.folder.release)
            for part in (lossy_output(), self.stop.signals, *self.workers):
                stack.enter_context(part)
            self.stack = stack.pop_all()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, _) -> None:
        """Saves the newest state if it is not saved, waits for it, and prints how the run ended.

        Raises: SystemExit after a signal (status 128 + its number) or a failure to write (status 1). After a UserError
        it raises another one, which adds what is saved.
        """
        with self.stack:
            is_stopped = kind is Stop
            try:
                # After an error, the other processes may not come here to save.
                can_save = is_stopped or kind is None or not self.layout.mesh.is_multi_process
                saved = self.save_newest() if can_save and not self.folder.is_lost else None
                self.states.checkpoints.close()
                if saved:  # after the state, which nothing can replace
                    self.states.save_step(*saved)
                self.folder.print(*self.log.compilations.take_late())
                if is_stopped or kind is None:
                    self.write_report(is_ended=True)
                    self.folder.upload()
                if is_stopped:
                    self.layout.broadcast("saved")  # before one process leaves, which would end the others
            except OSError as failure:
                error = error if kind and not is_stopped else failure
            steps, saved = self.states.checkpoints.steps, "no step is saved"
            if steps:
                saved = f"step {steps[0]} is saved: {resuming_command(self.folder)} resumes from there"
            if isinstance(error, OSError):
                print(f"error: {describe_file_error(error).rstrip('.')}; {saved}", file=sys.stderr)
                raise SystemExit(1) from error
            if isinstance(error, UserError) and steps:
                raise UserError(f"{str(error).rstrip('.')}; {saved}") from error
            if isinstance(error, Stop):
                self.folder.print(f"stopped by {self.stopped_by}; {saved}")
                if steps and (model := self.folder.path / f"step{steps[0]}").is_dir():
                    self.folder.print(f"model: {model}")
                raise SystemExit(128 + self.stop.signals.received)

    @property
    def stopped_by(self) -> str:
        """Returns the name of the signal that ended the run."""
        return self.stop.signals.received.name

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Times a phase of a step; a signal ends the run at once in the first one, in others after the step."""
        with self.stop.at_once() if name in FIRST else contextlib.nullcontext(), self.log.phase(name):
            yield

    @property
    def notes(self) -> list[str]:
        """Returns the lines printed at the start: environments, rows they left out, and the run folder."""
        place = f"writing to {self.folder.path}"
        if self.resumed:
            rule = self.resumed.memory.get(STOPPED, "")
            verb = "finished" if rule or 0 < self.num_steps <= self.resumed.step else "resuming"
            by = f" by --stop_at {rule} (remove the rule to continue)" if rule else ""
            place = f"{verb} at step {self.resumed.step}{by} in {self.folder.path}"
        if not (self.folder.path / "report.html").exists():
            place += "; report.html is there after the first save"
        return [*describe_environments(self.environments.values()), place]

    def begin(self, progress: Progress, state: TrainState, evaluate: Evaluate) -> Progress:
        """Evaluates before the first step, and logs that; returns the progress. A signal ends the run at once."""
        if progress.step:
            return progress
        with self.stop.at_once(), waiting("held-out problems before training"):
            metrics = evaluate(state, progress.step)
        for problem in self.stop.missing(metrics, is_held_out=True):
            raise UserError(problem)
        if metrics:
            metrics |= self.log.compile_metrics()
            self.log.write(progress.step, metrics)
            progress = replace(self.save_best(progress, state, metrics), best=metrics.get(SELECTION_SCORE))
            progress = self.judge(progress, metrics)
        return progress

    def save_best(self, progress: Progress, state: TrainState, metrics: Mapping[str, float]) -> Progress:
        """Saves the model if its held-out return is the best so far (--save_best, --stop_at); returns the progress."""
        score = metrics.get(SELECTION_SCORE)
        is_best = score is not None and (progress.best is None or score > progress.best)
        if not is_best or not (self.config.save_best or self.stop.rules):
            return progress
        self.states.save_model("best", state.params, progress)
        return replace(progress, best=score)

    def judge(self, progress: Progress, metrics: Mapping[str, float]) -> Progress:
        """Returns the progress, marked as ended if a rule of --stop_at ends the run at its step."""
        totals = {"rollout/total_rollouts": progress.num_rollouts, "times/run": self.folder.origin.seconds}
        progress = self.stop.judge(progress, totals | metrics)
        if rule := progress.memory.get(STOPPED):
            self.log.note(progress.step, self.curve, f"--stop_at {rule} ended the run")
        return progress

    def end_step(
        self,
        progress: Progress,
        state: TrainState,
        metrics: dict[str, float | list[float]],
        evaluate: Evaluate,
        is_last: bool,
        rollouts: tuple[Episodes, Batch] | None = None,
    ) -> Progress:
        """Evaluates if that is due, logs the step, writes its rollouts, and saves models and state if they are due.

        The last step is evaluated, also if a rule of --stop_at ends the run. Returns the progress.
        Raises: OSError when an earlier save has failed, or another run has taken the folder.
        """
        step, is_due_now = progress.step, is_due(progress.step, self.folder.settings["test_interval"])
        is_evaluated, is_first = is_last or is_due_now, self.log.num_steps == 0
        metrics |= evaluate(state, step) if is_evaluated else {}
        metrics |= self.log.step_metrics(progress, metrics)
        progress = self.judge(progress, metrics)
        is_last |= STOPPED in progress.memory
        metrics |= evaluate(state, step) if is_last and not is_evaluated else {}
        self.log.write(step, metrics)
        problems = self.stop.missing(metrics, is_held_out=False) if is_first else []
        problems += self.stop.missing(metrics, is_held_out=True) if is_evaluated else []
        for problem in problems:
            self.log.note(step, self.curve, problem, is_warning=True)
        if rollouts:
            self.log.write_rollouts(step, *rollouts, is_last or is_due_now or is_first)
        progress = self.save_best(progress, state, metrics)
        is_saved = is_last or is_due(step, self.config.save_interval)
        if is_saved:
            self.states.save_step(state, progress)
        self.log.end_step(step)
        self.states.end_step(state, progress)
        if self.folder.is_lost:
            raise OSError(f"another process has taken {self.folder.path}, since this one was silent for long: end one")
        if is_saved and not is_last:
            self.write_report()
        if is_saved:
            self.save_newest()
        return progress

    def save_newest(self) -> tuple[TrainState, Progress] | None:
        """Writes the newest state: see `States.save_newest`."""
        return self.states.save_newest()

    def write_report(self, is_ended: bool = False) -> None:
        """Writes config.json, whose times move on, and the report."""
        self.folder.write_config(is_ended)
        if self.layout.is_main:
            draw_report(self.folder.path)

    def finish(self, progress: Progress, state: TrainState) -> None:
        """Prints the report's verdict, and the paths of model and report; writes a model that is missing."""
        is_saved = (self.folder.path / f"step{progress.step}").is_dir()
        if not any(self.layout.gather_values(is_saved)):  # of a run that was stopped, or whose model was removed
            self.states.save_step(state, progress)
        if self.layout.is_main:
            self.folder.print(*describe_end(self.folder, progress, self.states.card.segments))


def is_due(step: int, interval: int) -> bool:
    """True if something that happens every `interval` steps (0: never) happens now."""
    return interval > 0 and step % interval == 0
