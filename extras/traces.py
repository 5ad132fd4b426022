"""Rollouts as OpenEnv's TrainingTrace (schema version 1).

    python extras/traces.py runs/agent/rollouts/step_3.npz traces.jsonl   # a trace a rollout; --save_rollouts all

A trace lists the calls of a program: all tokens before a reply, the reply, its log-probabilities as they were sampled,
and a mask. Source: openenv 0.10.0, core/harness/training.py.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    import utils.settings.packages  # noqa: F401 (says what to install)

import numpy as np
from jaxtyping import Bool, Int

from utils.files import read_arrays, replacing
from utils.metrics.jsonl import JSON
from utils.settings.errors import UserError, user_errors

Arrays = Mapping[str, np.ndarray]
NEEDED = ("tokens", "mask", "logprobs", "lengths", "prompt_lengths")
OF_ROLLOUTS = ("returns", "groups", "tasks")  # told in the metadata of each row's last turn, with "finished"


def turns_of(tokens: Int[np.ndarray, "T"], mask: Bool[np.ndarray, "T"], logprobs: np.ndarray, name: str) -> list[JSON]:
    """Returns the turns of a row."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(int))).tolist()
    return [
        {
            "node_id": f"{name}.{number}",
            "prompt_token_ids": tokens[:start].tolist(),
            "completion_token_ids": tokens[start:stop].tolist(),
            "per_token_logps": np.minimum(logprobs[start:stop], 0).tolist(),
            "loss_mask": [0] * start + [1] * (stop - start),
            "metadata": {},
        }
        for number, (start, stop) in enumerate(zip(edges[::2], edges[1::2], strict=True))
    ]


def traces(arrays: Arrays) -> Iterator[JSON]:
    """Yields the trace of each rollout, one row's turns after another's."""
    rollouts = arrays.get("rollout", np.arange(len(arrays["tokens"])))
    for rollout in np.unique(rollouts):
        all_turns = []
        for row in np.flatnonzero(rollouts == rollout):
            turns = turns_of(*(arrays[name][row] for name in NEEDED[:3]), f"{row}")
            places = dict.fromkeys(OF_ROLLOUTS, rollout) | {"finished": row}
            if turns:
                told = {name: arrays[name][place].item() for name, place in places.items() if name in arrays}
                turns[-1]["metadata"] = told
            all_turns += turns
        yield {"schema_version": 1, "turns": all_turns}


def main(source: Path, target: Path) -> None:
    """Writes the traces of a file of rollouts. Raises: UserError if there is no such file."""
    if not source.is_file():
        raise UserError(f"there is no file {source}: correct the path")
    lines = [json.dumps(trace) for trace in traces(read_arrays(source, NEEDED))]
    with replacing(target) as file:
        file.write("\n".join([*lines, ""]).encode())
    print(f"{target}: {len(lines)} traces")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path, help="rollouts/step_N.npz")
    parser.add_argument("target", type=Path, help="file of traces as JSON lines")
    options = parser.parse_args()
    with user_errors():
        main(options.source, options.target)
