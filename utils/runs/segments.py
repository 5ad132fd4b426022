"""Parts of a run with other settings or data: what --resume force changed, and from which step on."""

from collections.abc import Mapping, Sequence

from utils.metrics.curves import Curves
from utils.metrics.jsonl import JSON

RunSegment = Mapping[str, JSON]  # step: the last one before; changed, data: [old, new] by name; comparable: the scores
Changes = Mapping[str, list[JSON]]  # old and new value, by name


def add_segment(
    segments: Sequence[RunSegment], step: int, changed: Changes, data: Changes, is_comparable: bool
) -> list[RunSegment]:
    """Returns the segments of a run that is resumed at a step, with one more if anything was changed."""
    segments = [{**segment, "step": min(segment["step"], step)} for segment in segments]  # if a later state is damaged
    if changed or data:
        segments.append({"step": step, "changed": changed, "data": data, "comparable": is_comparable})
    return segments


def describe_segment(segment: RunSegment) -> str:
    """Returns a segment in words."""
    changes = [f"--{name} {new!r} (before: {old!r})" for name, (old, new) in segment["changed"].items()]
    changes += [f"{name} is {new} (before: {old})" for name, (old, new) in segment["data"].items()]
    return f"from step {segment['step'] + 1} on: {'; '.join(changes)}"


def last_break(segments: Sequence[RunSegment]) -> int:
    """Returns the last step whose scores are of other problems, or sampled in another way, than those now; -1: none."""
    return max((segment["step"] for segment in segments if not segment.get("comparable")), default=-1)


def since(run: Curves, step: int) -> Curves:
    """Returns the metrics of later steps than this one."""
    return {name: (steps[steps > step], values[steps > step]) for name, (steps, values) in run.items()}
