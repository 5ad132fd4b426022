"""What ends a run before its last step: signals, and the rules of --stop_at."""

import contextlib
import signal
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from core.records import Progress
from core.rollout import RolloutWorker
from envs.scoring.shaping import reward_names
from envs.settings import RolloutSettings
from utils.devices.sharding import Layout
from utils.metrics.jsonl import JSON
from utils.runs.shutdown import Signals, Stop
from utils.runs.stopping import STOPPED, check_rules, metric_names, parse_rules
from utils.settings.arguments import Value


class Stopping:
    """The ends of a run; all processes call every method, and end at the same step."""

    def __init__(self, stop_at: str, layout: Layout):
        self.signals, self.rules, self.layout = Signals(), parse_rules(stop_at), layout
        self.left_rule = ""  # rule that ended the run before, and that --stop_at does not have now

    def check(
        self, settings: Mapping[str, Value], roles: Mapping[str, RolloutSettings], workers: Iterable[RolloutWorker]
    ) -> None:
        """Raises UserError for a rule on a metric that the run does not log."""
        if not self.rules:
            return
        names = {played.label: role for role, played in roles.items()}
        parts, open_roles = {}, set()
        for worker in workers:
            role = names[worker.name]
            parts[role] = reward_names(worker.scorer.parts, worker.env)
            if worker.env.has_turns:
                open_roles |= {role, "stop"}
            if settings.get("task_sampling") == "bins":
                open_roles |= {f"bins/{name}" for name in worker.env.bins()}
        check_rules(self.rules, metric_names(settings, parts), open_roles)

    def resume(self, progress: Progress) -> Progress:
        """Returns the progress, which a rule that was left out does not end any more."""
        rule = progress.memory.get(STOPPED, "")
        if not rule or rule in map(str, self.rules):
            return progress
        self.left_rule = rule
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
