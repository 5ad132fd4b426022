"""Rollouts as OpenEnv's TrainingTrace (schema version 1), and such traces as arrays of rollouts.

    python extras/traces.py runs/agent/rollouts/step_3.npz traces.jsonl   # a trace a rollout; --save_rollouts all
    python extras/traces.py traces.jsonl rows.npz

A trace lists the calls of a program: all tokens before a reply, the reply, its log-probabilities as they were sampled,
and a mask. On the way back a call that does not continue the one before begins another row of the rollout. If openenv
is installed, its library checks each trace. Source: openenv 0.10.0, core/harness/training.py.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
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


def spans(mask: Bool[np.ndarray, "T"]) -> list[tuple[int, int]]:
    """Returns the first column of each turn, and the column behind its last token."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(int)))
    return [*zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)]


def turns_of(tokens: Int[np.ndarray, "T"], mask: Bool[np.ndarray, "T"], logprobs: np.ndarray, name: str) -> list[JSON]:
    """Returns the turns of a row."""
    return [
        {
            "node_id": f"{name}.{number}",
            "prompt_token_ids": tokens[:start].tolist(),
            "completion_token_ids": tokens[start:stop].tolist(),
            "per_token_logps": np.minimum(logprobs[start:stop], 0).tolist(),
            "loss_mask": [0] * start + [1] * (stop - start),
            "metadata": {},
        }
        for number, (start, stop) in enumerate(spans(mask))
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


def rows_of(trace: JSON) -> list[list[JSON]]:
    """Returns the turns of each row of a trace: those that continue one another."""
    rows = []
    for turn in trace["turns"]:
        before = [*rows[-1][-1]["prompt_token_ids"], *rows[-1][-1]["completion_token_ids"]] if rows else [None]
        if turn["prompt_token_ids"][: len(before)] == before:
            rows[-1].append(turn)
        else:
            rows.append([turn])
    return rows


def arrays_of(all_traces: Sequence[JSON]) -> dict[str, np.ndarray]:
    """Returns the arrays of the rows of traces; each trace is a rollout."""
    found = [(number, row) for number, trace in enumerate(all_traces) for row in rows_of(trace)]
    lengths = [len(row[-1]["prompt_token_ids"]) + len(row[-1]["completion_token_ids"]) for _, row in found]
    shape = len(found), max(lengths, default=0)
    tokens, mask, logprobs = np.zeros(shape, np.int32), np.zeros(shape, bool), np.zeros(shape, np.float32)
    for i, (_, row) in enumerate(found):
        tokens[i, : lengths[i]] = [*row[-1]["prompt_token_ids"], *row[-1]["completion_token_ids"]]
        for turn in row:
            start = len(turn["prompt_token_ids"])
            place = slice(start, start + len(turn["completion_token_ids"]))
            mask[i, place] = np.array(turn["loss_mask"][start:], bool)
            logprobs[i, place] = turn["per_token_logps"]
    arrays = dict(zip(NEEDED, (tokens, mask, logprobs, np.array(lengths, np.int32)), strict=False))
    arrays["prompt_lengths"] = np.array([len(row[0]["prompt_token_ids"]) for _, row in found], np.int32)
    arrays["rollout"] = np.array([number for number, _ in found], np.int32)
    for name in (*OF_ROLLOUTS, "finished"):
        rows = range(len(found)) if name == "finished" else np.unique(arrays["rollout"], return_index=True)[1]
        told = [found[row][1][-1].get("metadata", {}).get(name) for row in rows]
        if told and None not in told:
            arrays[name] = np.array(told)
    return arrays


def check(trace: JSON, place: str) -> JSON:
    """Returns a trace. Raises: UserError for one that has another form."""
    try:
        if trace["schema_version"] != 1:
            raise ValueError(f"its schema_version is {trace['schema_version']!r}, and 1 is read")
        for turn in trace["turns"]:
            num_prompt, num_reply = len(turn["prompt_token_ids"]), len(turn["completion_token_ids"])
            if len(turn["per_token_logps"]) != num_reply or len(turn["loss_mask"]) != num_prompt + num_reply:
                raise ValueError("a turn has another number of log-probabilities, or of its mask, than of tokens")
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{place} is no TrainingTrace ({error}): correct the line") from error
    if training := openenv_training():
        training.TrainingTrace.model_validate(trace)
    return trace


def openenv_training() -> object | None:
    """Returns openenv's module; None: it is not installed."""
    try:
        from openenv.core.harness import training
    except ImportError:
        return None
    return training


def read_traces(file: Path) -> list[JSON]:
    """Returns the traces of a file. Raises: UserError for a line that is none."""
    found = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        try:
            found.append(check(json.loads(line), f"{file}:{number}"))
        except ValueError as error:
            raise UserError(f"{file}:{number} is no JSON ({error}): correct the line") from error
    return found


def main(source: Path, target: Path) -> None:
    """Writes traces of arrays, or arrays of traces, by the name of the source."""
    if not source.is_file():
        raise UserError(f"there is no file {source}: correct the path")
    if source.suffix == ".npz":
        arrays = read_arrays(source, NEEDED)
        if "forks/tokens" in arrays:
            raise UserError(f"{source} was written by an earlier version: read it with that version")
        lines = [json.dumps(check(trace, f"row {i}")) for i, trace in enumerate(traces(arrays))]
        with replacing(target) as file:
            file.write("\n".join([*lines, ""]).encode())
        print(f"{target}: {len(lines)} traces")
    else:
        arrays = arrays_of(read_traces(source))
        with replacing(target) as file:
            np.savez_compressed(file, **arrays)
        print(f"{target}: {len(arrays['tokens'])} rows")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path, help="rollouts/step_N.npz, or traces as JSON lines")
    parser.add_argument("target", type=Path, help="traces as JSON lines, or an .npz")
    options = parser.parse_args()
    with user_errors():
        main(options.source, options.target)
