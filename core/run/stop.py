"""What ends a run before its last step: signals, and the rules of --stop_at."""

import contextlib
import signal
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from core.records import Progress
from utils.devices.sharding import Layout
from utils.metrics.jsonl import JSON
from utils.runs.shutdown import Signals, Stop
from utils.settings.errors import most_similar

if TYPE_CHECKING:
    from utils.runs.stopping import StopRule

STOPPED = "stopped_by"  # in Progress.memory: the rule that ended the run


class Stopping:
    """The ends of a run; all processes call every method, and end at the same step."""

    def __init__(self, stop_at: str, layout: Layout):
        self.signals, self.layout = Signals(), layout
        self.rules: list[StopRule] = []
        if stop_at:
            from utils.runs.stopping import parse_rules

            self.rules = parse_rules(stop_at)

    def missing(self, metrics: Mapping[str, JSON], is_held_out: bool) -> list[str]:
        """Returns a sentence for each rule on a held-out score, or on another metric, that is not among these."""
        unknown = [x for x in self.rules if x.metric.startswith("test_") == is_held_out and x.metric not in metrics]
        return [
            f"--stop_at {rule}: the run has logged no metric {rule.metric}: give "
            f"{most_similar(rule.metric, metrics) or 'another one'}, or a name of the table in docs/metrics.md"
            for rule in unknown
        ]

    def resume(self, progress: Progress) -> Progress:
        """Returns the progress, which a rule that was left out does not end any more."""
        if progress.memory.get(STOPPED, "") in ("", *map(str, self.rules)):
            return progress
        return replace(progress, memory={name: x for name, x in progress.memory.items() if name != STOPPED})

    def judge(self, progress: Progress, metrics: Mapping[str, JSON]) -> Progress:
        """Returns the progress, marked as ended if a rule of --stop_at ends the run at its step."""
        if not self.rules:
            return progress
        rule = next((str(rule) for rule in self.rules if rule.is_met(progress.step, metrics)), "")
        rule = self.layout.broadcast(rule)  # processes differ in times
        return replace(progress, memory=progress.memory | {STOPPED: rule}) if rule else progress

    @contextlib.contextmanager
    def at_once(self) -> Iterator[None]:
        """Lets a signal end the run at any moment inside, since the newest state is whole.

        Several processes must stop at the same place: they finish this and the step.
        """
        received = max(self.layout.gather_values(self.signals.received or 0))
        if received:
            self.signals.received = signal.Signals(received)
            raise Stop
        with contextlib.nullcontext() if self.layout.mesh.is_multi_process else self.signals.raising():
            yield
