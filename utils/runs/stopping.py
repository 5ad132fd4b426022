"""Rules that end a run before its last step: --stop_at "test_env/correct_answer>=0.9, 12: approx_kl>0.1"."""

import operator
import re
from collections.abc import Mapping
from typing import NamedTuple

from utils.settings.errors import UserError

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

    def is_met(self, step: int, metrics: Mapping[str, object]) -> bool:
        """True if the rule ends the run at this step; a step without the metric does not."""
        value = metrics.get(self.metric)
        return step >= self.first_step and value is not None and COMPARISONS[self.comparison](value, self.limit)


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
