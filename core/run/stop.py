"""What ends a run before its last step: signals, and rules, --stop_at "test_env/correct_answer>=0.9, 12: kl>0.1"."""

import contextlib
import operator
import re
import signal
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from core.records import Progress
from utils.devices.sharding import Layout
from utils.metrics.jsonl import JSON
from utils.runs.shutdown import Signals, Stop
from utils.settings.errors import UserError, most_similar

STOPPED = "stopped_by"  # in Progress.memory: the rule that ended the run
RULE = re.compile(r"\s*(?:(\d+)\s*:)?\s*([^<>]*[^<>\s])\s*(>=|<=|>|<)\s*([-+.\deE]+)\s*(?:,|$)")
COMPARISONS = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt}


class StopRule(NamedTuple):
    """Ends a run at the first step, from `first_step` on, whose metric compares so with the limit."""

    first_step: int
    metric: str
    comparison: str  # one of COMPARISONS
    limit: float

    def __str__(self) -> str:
        start = f"{self.first_step}: " if self.first_step else ""
        return f"{start}{self.metric}{self.comparison}{self.limit:.12g}"


def parse_rules(text: str) -> list[StopRule]:
    """Returns the rules of --stop_at, which commas separate. Raises: UserError for anything else."""
    rules, place = [], 0
    while text[place:].strip():
        match = RULE.match(text, place)
        try:
            first_step, metric, comparison, limit = match.groups()
            rules.append(StopRule(int(first_step or 0), metric, comparison, float(limit)))
        except (AttributeError, ValueError) as error:
            raise UserError(
                f"--stop_at: {text[place:].strip()!r} is not a rule: give METRIC>=NUMBER, with one of >= <= > <, or "
                "STEP: METRIC<NUMBER, and commas between rules"
            ) from error
        place = match.end()
    return rules


class Stopping:
    """The ends of a run; all processes call every method, and end at the same step."""

    def __init__(self, rules: list[StopRule], layout: Layout):
        self.signals, self.layout, self.rules = Signals(), layout, rules

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
        known = [x for x in self.rules if progress.step >= x.first_step and metrics.get(x.metric) is not None]
        met = [str(rule) for rule in known if COMPARISONS[rule.comparison](metrics[rule.metric], rule.limit)]
        rule = self.layout.broadcast(met[0] if met else "")  # processes differ in times
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
