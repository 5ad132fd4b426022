"""Verdict on a run in words: what it has learned and by how much.

It compares held-out scores problem by problem (losses row by row), or by their 95% intervals if only their means are
known. A run without held-out scores is judged by the returns of its training batches, in blocks of steps.
"""

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from utils.evaluation.estimates import mean_over_runs, paired_difference
from utils.metrics.curves import LOSS, MAIN, Curves, Interval, format_value, intervals, is_held_out, is_share
from utils.metrics.health import describe_same
from utils.metrics.jsonl import JSON

BLOCK = 5  # steps of training that make one point
TaskMeans = Mapping[int, float]  # a score by task: means over its samples
TaskScores = Mapping[int, Mapping[str, TaskMeans]]  # of held-out problems, by step and name
NO_SCORES = MappingProxyType({})
TITLES = {
    "test_env/correct_answer": "held-out correct answers",
    "test_env/return": "the held-out return",
    "env/return": "the return of the training batches (means of 5 steps)",
    "test_data/loss": "the loss of held-out replies",
    "data/loss": "the loss of the training batches (means of 5 steps)",
}
OPENINGS = {"better": "Learned", "worse": "Worse than before", "same": "Nothing learned that can be shown"}
MORE = "Hold out more rows: --test_fraction of core/sft.py, or --num_eval_tasks."
HINT = "Held-out problems would show more: --test_env_name X-test for environment X, dataset-test for own data."


class Point(NamedTuple):
    """A score at a step, with the ends of its 95% interval, and what it is the mean of, if that is known."""

    step: int
    value: float
    low: float
    high: float
    by_task: TaskMeans = NO_SCORES


def judge(run: Curves, scores: TaskScores = NO_SCORES) -> dict[str, JSON]:
    """Returns the verdict: `kind` (better, worse, same, open) and the sentences of `text`.

    The verdict is on the correct answers if they are logged and have changed; if not, on the return, or on the loss of
    written replies. Without an update there is nothing to compare.
    """
    if made_no_update(run):
        return {"kind": "same", "text": explain_no_update(run)}
    held_out = [name for name, _ in MAIN if name in run] + [name for name in LOSS if name in run][:1]
    verdicts = [judge_points(name, points_of(run, name, scores)) for name in held_out or ["env/return"]]
    verdict = next((verdict for verdict in verdicts if verdict["kind"] in ("better", "worse")), verdicts[0])
    return verdict if held_out else verdict | {"text": f"{verdict['text']} {HINT}"}


def made_no_update(run: Curves) -> bool:
    """True if steps of training were logged, and none updated the model."""
    _, counts = run.get("num_updates", ((), np.zeros(0)))
    return len(counts) > 0 and not np.nansum(counts)


def explain_no_update(run: Curves) -> str:
    """Returns why no step made an update, as far as the rewards show."""
    columns = {name: values for name, (_, values) in run.items()}
    failed = sum(np.nansum(columns.get(f"env/reward_{kind}", 0)) for kind in ("errors", "timeouts"))
    if failed > np.nansum(columns.get("rollout/num_rollouts", 0)) / 2:
        return f"Nothing could be learned: the reward failed for {failed:,.0f} replies, see reward_failures.jsonl."
    if (columns.get("env/groups_without_signal", np.zeros(1)) == 1).all():
        returns = columns["env/return"]
        spread = max(columns["env/return_spread"].max(), np.ptp(returns)) if "env/return_spread" in columns else None
        same = describe_same(float(returns[0]), spread)
        return f"Nothing could be learned: in all groups all rewards were equal{same}, so no update was made."
    was_finished = columns.get("env/finished", np.ones(1)).any()
    why = "" if was_finished else "all completions were truncated by the token limit, and "
    return f"Nothing learned: {why}no update was made."


def judge_points(name: str, points: list[Point]) -> dict[str, JSON]:
    """Returns the verdict on the points of a metric: see `judge`."""
    if len(points) < 2:
        found = f"only the score at step {points[0].step}" if points else "no score"
        return {"kind": "open", "text": f"No verdict: there is {found}, and a change needs two."}
    first, last = points[0], points[-1]
    sign = -1 if name in LOSS else 1
    best = max(points, key=lambda point: sign * point.value)
    low, high = sorted(sign * end for end in difference(first, last))
    if low == high and first.value != last.value:
        change = describe_change(name, first, last, ())
        return {"kind": "open", "text": f"No verdict: {change}, but nothing shows how much of it is chance. {MORE}"}
    kind = "better" if low > 0 else "worse" if high < 0 else "same"
    opening = OPENINGS[kind]
    # The best of many is chosen by chance, too: by the wider interval.
    if kind != "worse" and min(sign * end for end in independent_difference(last, best)) > 0:
        kind, opening = "worse", "Learned, then lost again"
    text = f"{opening}: {describe_change(name, first, last, difference(first, last))}."
    if kind == "worse" and best is not first:
        text += f" The best score was {format_value(name, best.value)} at step {best.step}."
    return {"kind": kind, "text": text}


def points_of(run: Curves, name: str, scores: TaskScores) -> list[Point]:
    """Returns the points of a metric: by evaluations, or means of BLOCK steps of training with Student's intervals."""
    steps, values = run.get(name, (np.zeros(0), np.zeros(0)))
    steps, values = steps[np.isfinite(values)], values[np.isfinite(values)]
    points = []
    if is_held_out(name):
        ends = intervals(run, name)
        for step, x in zip(steps, values, strict=True):
            by_task = scores.get(step, {}).get(name.removeprefix("test_env/"), {})
            points.append(Point(int(step), x, *ends.get(step, (x, x)), by_task))
        return points
    for end in range(BLOCK, len(values) + 1, BLOCK):
        estimate = mean_over_runs(name, values[end - BLOCK : end])
        mean, half_width = estimate[name], estimate.get(f"{name}_ci", 0.0)
        points.append(Point(int(steps[end - 1]), mean, mean - half_width, mean + half_width))
    return points


def difference(first: Point, last: Point) -> Interval:
    """Returns the 95% interval of last - first: paired if both are known for the same problems.

    A share can neither fall below 0 nor rise above 1, so its interval ends there.
    """
    if first.by_task and first.by_task.keys() == last.by_task.keys():
        before, after = (np.array([point.by_task[task] for task in first.by_task]) for point in (first, last))
        estimate = paired_difference(before, after)
        if estimate["low"] is not None:
            return estimate["low"], estimate["high"]
    low, high = independent_difference(first, last)
    ends = first.low, first.high, last.low, last.high
    if min(ends) >= 0 and max(ends) <= 1:
        return max(low, -first.value), min(high, 1 - first.value)
    return low, high


def independent_difference(first: Point, last: Point) -> Interval:
    """Returns the 95% interval of last - first, taken as independent: wider than that of a paired comparison.

    Source: Newcombe 1998, Interval Estimation for the Difference Between Independent Proportions, method 10.
    """
    change = last.value - first.value
    down = math.hypot(last.value - last.low, first.high - first.value)
    up = math.hypot(last.high - last.value, first.value - first.low)
    return change - down, change + up


def describe_change(name: str, first: Point, last: Point, ends: Sequence[float]) -> str:
    """Returns the first and the last score and their difference in words; `ends`: of its interval, if there is one."""
    before, after = (format_value(name, point.value) for point in (first, last))
    size, *ends = (100 * x if is_share(name) else x for x in (last.value - first.value, *ends))  # percentage points
    size, *ends = (f"{x:z.1f}" if is_share(name) else format_value(name, x) for x in (size, *ends))
    unit, interval = " points" * is_share(name), f" [{', '.join(ends)}]" * bool(ends)
    steps = f"from {before} at step {first.step} to {after} at step {last.step}"
    return f"{TITLES[name]} went {steps}, a change of {size}{unit}{interval}"
