"""What a run writes as it goes: metrics, compiled programs, rollouts; and what it prints."""

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import jax
import numpy as np

from core.records import Batch, Episodes, Progress
from core.run.folder import RunFolder
from core.run.rollouts import (
    NUM_GROUPS,
    rollout_arrays,
    rollout_rows,
    score_arrays,
    transcript,
    write_arrays,
    write_rows,
)
from models.tokenizer import Tokenizer
from utils.devices.compilation import Programs, compile_programs, forget_programs
from utils.devices.compile_log import Compilations, compile_metrics, describe_programs
from utils.metrics.logger import Logger
from utils.metrics.sinks import open_sinks
from utils.metrics.terminal import waiting

PHASES = {  # phases of a step, and the names shown while they run
    "rollout": "rollouts", "logprobs": "log-probabilities", "data": "rows", "update": "updating"
}  # fmt: skip
FIRST = ("rollout", "data")  # phases that a step begins with
NUM_HELD_OUT = 32  # held-out problems whose rollouts are written


class Log:
    """The log of a run; its `parts` are context managers, which are entered after `open`."""

    def __init__(self, folder: RunFolder):
        self.folder, self.config, self.layout = folder, folder.config, folder.layout
        self.num_steps = 0  # of this process
        self.times: dict[str, float] = {}  # seconds of the phases of a step
        self.step_start = 0.0  # by the clock
        self.ahead: list[dict] = []  # programs that were compiled ahead, until the first metrics count them
        self.logger: Logger | None = None  # in the main process
        self.trace = contextlib.ExitStack()  # of jax.profiler

    def open(self, tokenizer: Tokenizer, resume_step: int, num_steps: int) -> None:
        """Opens the files; those of a run that is resumed lose what came after the step."""
        self.tokenizer, folder = tokenizer, self.folder
        if self.layout.is_main:
            sinks = open_sinks(self.config, folder.path, folder.settings, resume_step)
            interval = folder.settings.get("test_interval", 0)
            steps = {"resume_step": resume_step, "num_steps": num_steps, "test_interval": interval}
            self.logger = Logger(folder.path, **steps, sinks=sinks)
        self.compilations = Compilations(folder.path / "programs.jsonl" if self.layout.is_main else None)
        self.parts = [*filter(None, [self.logger]), self.compilations, self.trace]

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Times a phase of a step, and shows on the terminal that it is waited for."""
        clock = time.perf_counter()
        if name in FIRST:
            self.step_start = clock
            if self.config.profile and self.num_steps == 2:  # the third step, which is past compilation
                self.trace.enter_context(jax.profiler.trace(str(self.folder.path / "profile")))
        with waiting(PHASES[name]):
            yield
        self.times[f"times/{name}"] = time.perf_counter() - clock

    def compile(self, lists: Sequence[Programs]) -> None:
        """Compiles all programs of the run ahead of its steps, and prints how many they are and how long that took."""
        clock = time.perf_counter()
        with waiting("programs"):
            notes = compile_programs(lists)
        self.compilations.are_all_known = not notes
        self.ahead += self.compilations.take_programs()
        self.folder.print(*notes, describe_programs(self.ahead, time.perf_counter() - clock))

    def compile_metrics(self) -> dict[str, float]:
        """Returns the metrics of the programs since the last call; prints those that are compiled too late."""
        self.folder.print(*self.compilations.take_late())
        ahead, self.ahead = self.ahead, []
        return compile_metrics(self.compilations.take_programs(), ahead)

    def step_metrics(self, progress: Progress, metrics: Mapping[str, float]) -> dict[str, float]:
        """Returns what is measured of a step: programs, times and memory."""
        self.trace.close()
        totals = {"rollout/total_rollouts": progress.num_rollouts} if progress.num_rollouts else {}
        return self.compile_metrics() | totals | {
            "times/step": time.perf_counter() - self.step_start - metrics.get("times/test", 0.0),
            "times/run": self.folder.origin.seconds,
            "memory/peak_gb": self.layout.peak_memory / 1e9,
        }  # fmt: skip

    def write(self, step: int, metrics: dict[str, float | list[float]]) -> None:
        """Logs the metrics of a step, and prints some of them."""
        if self.logger:
            self.logger.log(step, metrics)

    def note(self, step: int, metric: str, text: str, is_warning: bool = False) -> None:
        """Marks a step on the curve of a metric in the report; prints a warning, too."""
        if self.logger:
            self.logger.note(step, metric, text, is_warning)

    def end_step(self, step: int) -> None:
        """Counts a step, and drops compiled programs if there are too many for the process."""
        if self.layout.is_cpu and forget_programs():
            text = "there were too many compiled programs for this process; it loads them as needed"
            self.folder.print(f"step {step}: {text}")
            self.compilations.are_all_known = False
        self.num_steps += 1
        self.compilations.num_steps = self.num_steps

    def write_rollouts(self, step: int, episodes: Episodes, batch: Batch, is_shown: bool) -> None:
        """Writes one JSON object per rollout, of all with their arrays or of two groups; prints an example if shown."""
        if not self.layout.is_main:
            return
        group_size, kind = self.folder.settings["group_size"], self.config.save_rollouts
        rows = rollout_rows(episodes, group_size, self.tokenizer, batch)
        first_rows = [row for row in rows if row["group"] < NUM_GROUPS]
        if is_shown:
            self.print_rollout(f"step {step}", episodes)
            for sink in self.logger.sinks:
                sink.attempt("log_rollouts", step, first_rows)
        if kind == "all":
            write_arrays(self.file(f"rollouts/step_{step}.npz"), rollout_arrays(episodes, group_size))
        if kind != "none":
            write_rows(self.file(f"rollouts/step_{step}.jsonl"), rows if kind == "all" else first_rows)

    def print_rollout(self, where: str, episodes: Episodes) -> None:
        """Prints the first of these rollouts: prompt, completion and reward."""
        prompt = episodes.completions.tokens[0, : episodes.completions.prompt_lengths[0]]
        self.logger.sample(where, self.tokenizer.decode(prompt), transcript(episodes, 0), episodes.scores["return"][0])

    def write_held_out(self, step: int, episodes: Episodes) -> None:
        """Prints a rollout, and writes scores of the held-out problems (always the same) and rollouts of the first."""
        if not self.layout.is_main:
            return
        self.print_rollout(f"step {step}, held out", episodes)
        if self.config.save_rollouts != "none":
            num_samples = self.folder.settings["num_eval_samples"]
            rows = rollout_rows(episodes, num_samples, self.tokenizer, num_groups=NUM_HELD_OUT)
            first_rows = [row for row in rows if row["group"] < NUM_HELD_OUT]
            write_rows(self.file(f"rollouts/held_out_{step}.jsonl"), first_rows)
            write_arrays(self.file(f"rollouts/held_out_{step}.npz"), score_arrays(episodes))

    def write_losses(self, step: int, arrays: Mapping[str, np.ndarray]) -> None:
        """Writes the losses of held-out rows (the same at each evaluation): see `row_losses`."""
        if arrays and self.layout.is_main and self.config.save_rollouts != "none":
            write_arrays(self.file(f"rollouts/held_out_rows_{step}.npz"), arrays)

    def write_bad_batch(self, batch: Batch) -> None:
        """Writes a batch whose loss or gradient was not finite to bad_batches/, for inspection."""
        if not self.layout.is_main:
            return
        number = len([*self.folder.path.glob("bad_batches/*")])
        path, arrays = self.file(f"bad_batches/{number}.npz"), vars(batch) | batch.extras
        write_arrays(path, {name: x for name, x in arrays.items() if isinstance(x, np.ndarray)})
        text = f"an update was skipped, since its loss or gradient is not finite; its batch: {path}"
        self.logger.note(self.logger.step + 1, "loss", text, is_warning=True)

    def file(self, name: str) -> Path:
        """Returns a path in the run folder, whose own folder is there."""
        path = self.folder.path / name
        path.parent.mkdir(exist_ok=True)
        return path
