"""Reads the rollouts that a run with --save_rollouts all has stored."""

from pathlib import Path

import numpy as np

from core.records import Completions, Episodes
from core.run.rollouts import STORED
from utils.files import read_arrays
from utils.metrics.jsonl import read_lines
from utils.settings.errors import UserError

TOKENS = {  # arrays that say what was sampled, with the letters of their shapes: E rollouts, B rows, T columns
    "tokens": "BT", "mask": "BT", "lengths": "B", "prompt_lengths": "B", "rollout": "B", "tasks": "E", "positions": "E"
}  # fmt: skip
GRADED = TOKENS | {"logprobs": "BT", "finished": "B", "failed": "E", "returns": "E"}  # and what it earned


def read_rollouts(file: Path, shapes: dict[str, str] = TOKENS) -> dict[str, np.ndarray]:
    """Returns the arrays of a file of rollouts: see `rollout_arrays`. Raises: UserError if they do not fit together."""
    rows = read_arrays(file, shapes)
    sizes = {"E": len(np.unique(rows["rollout"])), "B": len(rows["tokens"]), "T": rows["tokens"].shape[-1]}
    for name, letters in shapes.items():
        expected = tuple(sizes[letter] for letter in letters)
        if rows[name].shape != expected:
            raise UserError(f"{file}: {name} has the shape {rows[name].shape}, not {expected}: copy the file again")
    return rows | {"mask": rows["mask"].astype(bool)}


def read_episodes(file: Path) -> Episodes:
    """Returns the rollouts of a step, from its .npz, which --save_rollouts all writes, and its .jsonl.

    Without times, failures by kind, problems, and what only the sampler knew: work, supports, routes.
    Raises: UserError if the files do not fit together.
    """
    arrays, lines = read_rollouts(file, GRADED), file.with_suffix(".jsonl")
    rows, num_rollouts = [row for _, row in read_lines(lines)], len(arrays["tasks"])
    if len(rows) != num_rollouts:
        raise UserError(f"{lines} has {len(rows)} rows and {file.name} {num_rollouts} rollouts: copy both again")
    has_turns = "conversation" in rows[0]
    turn_rewards = arrays.get("turn_rewards", np.zeros((0, 0)))
    scores = {name.removeprefix("scores/"): np.float32(x) for name, x in arrays.items() if name.startswith("scores/")}
    num_rows = len(arrays["tokens"])
    completions = Completions(
        **{name: arrays[name].astype(dtype) for name, dtype in STORED.items()},
        slot_steps=np.zeros(num_rows, np.float32),
        num_observed=np.int32(arrays.get("num_observed", np.zeros(num_rows))),
    )
    return Episodes(
        completions=completions,
        rollout=np.int64(arrays["rollout"]),
        task_ids=np.int64(arrays["tasks"]),
        texts=[str(row["text"]) for row in rows],
        scores=scores | {"return": np.float32(arrays["returns"])},
        failed=arrays["failed"].astype(bool),
        failures={},
        times={},
        stops=[str(row["stop_reason"]) for row in rows] if has_turns else [],
        conversations=[row["conversation"] for row in rows] if has_turns else [],
        turn_rewards=[rewards[~np.isnan(rewards)].tolist() for rewards in turn_rewards],
        positions=np.int64(arrays["positions"]),
    )
