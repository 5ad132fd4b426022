"""Rollouts as rows of JSON, for files, sinks and the report, and as arrays."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from core.records import Batch, Completions, Episodes
from core.rollout import RolloutWorker
from envs.base import Env
from models.tokenizer import Tokenizer
from utils.files import read_arrays
from utils.metrics.jsonl import JSON, JSONRow, read_lines
from utils.settings.errors import UserError

if TYPE_CHECKING:
    from utils.evaluation.tables import Result

NUM_GROUPS = 2  # groups with the long fields that report.html shows as colors
OF_ROLLOUTS = ("tasks", "positions")  # the other arrays that are checked have a value for each row
MAX_TOKENS_OF_A_CHARACTER = 8  # more that do not end in a whole one are wrong bytes


def rollout_rows(
    episodes: Episodes, group_size: int, tokenizer: Tokenizer, batch: Batch | None = None, num_groups: int = NUM_GROUPS
) -> list[JSONRow]:
    """Returns the fields of each rollout in rollouts/step_N.jsonl.

    Rows of the first `num_groups` also hold the fields that report.html shows as colors: prompt, tokens and their
    log-probabilities. Rows of `batch` have their advantages and other fields of the batch, too.
    """
    batch_row = {} if batch is None else dict(zip(batch.rollout[batch.first_rows], batch.first_rows, strict=True))
    finished, lengths, rows = episodes.finished, episodes.completion_lengths, []
    for i, text in enumerate(episodes.texts):
        row = {"group": i // group_size, "task": episodes.task_ids[i], "text": text}
        row |= {name: x[i] for name, x in episodes.scores.items()}
        row |= {"length": lengths[i], "finished": finished[i]}
        if episodes.conversations:
            row["conversation"] = episodes.conversations[i]
            row["stop_reason"] = episodes.stops[i]
        if episodes.failed[i]:
            row["reward_failed"] = True
        if row["group"] < num_groups:
            row |= token_fields(episodes, i, tokenizer, batch, batch_row.get(i))
        rows.append(row)
    return rows


def rollout_arrays(episodes: Episodes, group_size: int) -> dict[str, np.ndarray]:
    """Returns the arrays of rollouts/step_N.npz: E rollouts in the order of step_N.jsonl, B rows of them, T columns.

    tokens          int32 [B, T]    prompt, completion, padding
    mask            bool [B, T]     tokens that the policy sampled: the completion without forced tokens
    logprobs        float32 [B, T]  of the completion's tokens under the sampling distribution, nats
    lengths, prompt_lengths  int32 [B]  tokens of prompt and completion, and of the prompt
    finished        bool [B]        not truncated by the token limit
    rollout         int32 [B]       number of the row's rollout, whose rows are adjacent
    failed          bool [E]        the reward failed: its scores are 0 and mean nothing
    tasks, groups   int32 [E]       number of the problem; rollouts of one prompt share the number of their group
    positions       int64 [E]       of the groups in the run; samples depend on them: see extras/replay.py
    num_observed    int32 [B]       tokens of observations, of conversations
    turn_rewards    float64 [E, K]  rewards of the turns of an episode, NaN behind the last one
    returns         float32 [E]     what training maximizes; scores/NAME: each part of it: see `score_arrays`
    """
    completions = episodes.completions
    arrays = {
        "tokens": np.asarray(completions.tokens, np.int32),
        "mask": np.asarray(completions.mask, bool),
        "logprobs": np.asarray(completions.logprobs, np.float32),
        "lengths": np.asarray(completions.lengths, np.int32),
        "prompt_lengths": np.asarray(completions.prompt_lengths, np.int32),
        "finished": np.asarray(completions.finished, bool),
        "rollout": np.int32(episodes.rollout),
        "failed": episodes.failed,
        "groups": np.arange(len(episodes), dtype=np.int32) // group_size,
        "positions": np.int64(episodes.positions),
    }
    if episodes.conversations:
        arrays["num_observed"] = np.asarray(completions.num_observed, np.int32)
    if episodes.turn_rewards:
        num_turns = max(map(len, episodes.turn_rewards))
        padded = [[*rewards, *[np.nan] * (num_turns - len(rewards))] for rewards in episodes.turn_rewards]
        arrays["turn_rewards"] = np.array(padded, np.float64)
    return arrays | score_arrays(episodes)


def read_rollouts(file: Path) -> dict[str, np.ndarray]:
    """Returns the arrays of a file of rollouts. Raises: UserError if they do not fit together.

    Letters: E rollouts, B rows, T columns.
    """
    rows = read_arrays(file)
    rows.setdefault("positions", rows.get("places"))  # their earlier name
    if "forks/tokens" in rows:
        raise UserError(f"{file} was written by an earlier version: read it with that version")
    shape = rows["tokens"].shape if "tokens" in rows else ()
    rows.setdefault("rollout", np.arange(*shape[:1]))  # earlier files have a row for each
    num_rollouts = np.unique(rows["rollout"]).shape
    for name in ("tokens", "mask", "lengths", "prompt_lengths", "rollout", "tasks", "positions"):
        x = rows.get(name)
        if x is None:
            raise UserError(f"{file} has no array {name}: copy the file again")
        expected = shape if name in ("tokens", "mask") else num_rollouts if name in OF_ROLLOUTS else shape[:1]
        if len(shape) != 2 or x.shape != expected or x.dtype.kind not in "biu":
            raise UserError(
                f"{file}: {name} is {x.dtype} {list(x.shape)}, and not integers {[*expected] or '[B, T]'}: copy the "
                "file again"
            )
        most = {"mask": 1, "lengths": shape[1], "prompt_lengths": shape[1]}.get(name, 2**31 - 1)
        if x.size and not 0 <= x.min() <= x.max() <= most:
            raise UserError(
                f"{file}: {name} has numbers from {x.min()} to {x.max()}, beyond 0 to {most}: copy the file again"
            )
    if (rows["prompt_lengths"] > rows["lengths"]).any():
        raise UserError(f"{file}: a row of prompt_lengths is above that of lengths: copy the file again")
    return rows | {"mask": rows["mask"].astype(bool)}


def read_episodes(file: Path) -> Episodes:
    """Returns the rollouts of a step, from its .npz, which --save_rollouts all writes, and its .jsonl.

    Without times, failures by kind, problems, and what only the sampler knew: work, supports, routes.
    Raises: UserError if the files do not fit together.
    """
    arrays = read_rollouts(file)
    rows = [row for _, row in read_lines(file.with_suffix(".jsonl"))]
    shape, num_rollouts = arrays["tokens"].shape, len(arrays["tasks"])
    shapes = {"logprobs": shape, "finished": shape[:1]}
    for name in ("logprobs", "finished", "failed", "groups", "returns"):
        expected = shapes.get(name, (num_rollouts,))
        if name not in arrays or arrays[name].shape != expected:
            raise UserError(f"{file} has no array {name} of the shape {[*expected]}: copy the file again")
    if len(rows) != num_rollouts:
        lines = file.with_suffix(".jsonl")
        raise UserError(f"{lines} has {len(rows)} rows and {file.name} {num_rollouts} rollouts: copy both again")
    has_turns = "conversation" in rows[0]
    turn_rewards = arrays.get("turn_rewards", np.zeros((0, 0)))
    return Episodes(
        completions=Completions(
            tokens=np.int32(arrays["tokens"]),
            mask=arrays["mask"],
            logprobs=np.float32(arrays["logprobs"]),
            lengths=np.int32(arrays["lengths"]),
            prompt_lengths=np.int32(arrays["prompt_lengths"]),
            finished=arrays["finished"].astype(bool),
            slot_steps=np.zeros(shape[0], np.float32),
            num_observed=np.int32(arrays.get("num_observed", np.zeros(shape[0]))),
        ),
        rollout=np.int64(arrays["rollout"]),
        task_ids=np.int64(arrays["tasks"]),
        texts=[str(row["text"]) for row in rows],
        scores={
            "return" if name == "returns" else name.removeprefix("scores/"): np.float32(x)
            for name, x in arrays.items()
            if name == "returns" or name.startswith("scores/")
        },
        failed=arrays["failed"].astype(bool),
        failures={},
        times={},
        stops=[str(row["stop_reason"]) for row in rows] if has_turns else [],
        conversations=[row["conversation"] for row in rows] if has_turns else [],
        turn_rewards=[rewards[~np.isnan(rewards)].tolist() for rewards in turn_rewards],
        positions=np.int64(arrays["positions"]),
    )


def score_arrays(episodes: Episodes) -> dict[str, np.ndarray]:
    """Returns the arrays of rollouts/held_out_N.npz: tasks, returns and scores/NAME, as in `rollout_arrays`."""
    arrays = {"tasks": episodes.task_ids.astype(np.int32)}
    for name, x in episodes.scores.items():
        arrays["returns" if name == "return" else f"scores/{name}"] = x.astype(np.float32)
    return arrays


def token_fields(
    episodes: Episodes, rollout: int, tokenizer: Tokenizer, batch: Batch | None, batch_row: int | None
) -> JSONRow:
    """Returns fields with a value for each token, of the first row of a rollout.

    `batch_row`: its row of the batch, None if it has none.
    """
    completions, i = episodes.completions, episodes.first_rows[rollout]
    start, end = int(completions.prompt_lengths[i]), int(completions.lengths[i])
    ids = completions.tokens[i].tolist()
    fields = {"prompt": tokenizer.hf.decode(ids[:start]), "tokens": token_texts(tokenizer, ids[start:end])}
    if episodes.conversations:
        fields["drawn"] = completions.mask[i, start:end].astype(int)
    arrays = {"logprobs": completions.logprobs[i]}
    if batch_row is not None:
        names = {"advantage": "advantages", "old_logprobs": "old_logprobs", "entropies": "entropies"}
        for name, attribute in names.items():
            x = getattr(batch, attribute)
            if x is not None:
                arrays[name] = x[batch_row]
    for name, x in arrays.items():
        fields[name] = np.round(np.asarray(x[start:end], float), 4) + 0.0  # + 0.0: no "-0.0"
    if "advantage" in fields and not np.ptp(fields["advantage"]):
        fields["advantage"] = fields["advantage"][0]  # one for the completion
    return fields


def token_texts(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """Returns the text of each token; a character that several tokens spell is the text of the last of them."""
    texts, pending = [], []
    for count, token in enumerate(ids, 1):
        pending.append(token)
        text = tokenizer.hf.decode(pending)
        is_last = count == len(ids) or len(pending) == MAX_TOKENS_OF_A_CHARACTER
        is_whole = is_last or not text.endswith("\ufffd")
        texts.append(text if is_whole else "")
        pending = [] if is_whole else pending
    return texts


def transcript(episodes: Episodes, row: int, from_turn: int = 0) -> str:
    """Returns the messages of a conversation as text, with a line before turn `from_turn`, or a single reply."""
    if not episodes.conversations:
        return episodes.texts[row]
    lines = [f"{message['role']}: {message['content']}" for message in episodes.conversations[row]]
    turns = [i for i, message in enumerate(episodes.conversations[row]) if message["role"] == "assistant"]
    if 0 < from_turn <= len(turns):
        lines.insert(turns[from_turn - 1], f"{'-' * 8} drawn anew from turn {from_turn} on")
    return "\n".join(lines)


def write_samples(file: str, result: "Result", worker: RolloutWorker, episodes: Episodes) -> None:
    """Appends one JSON object for each problem: its number, the prompt as the model saw it, reference, completions."""
    num_samples = len(episodes.task_ids) // len(result.ids)
    completions = episodes.completions
    with Path(os.path.expanduser(file)).open("a") as lines:
        for position, task in enumerate(result.ids.tolist()):
            start = position * num_samples
            row = episodes.first_rows[start]
            prompt = completions.tokens[row, : completions.prompt_lengths[row]]
            record = {
                "model_dir": result.model_dir,
                "env_name": result.env_name,
                "task": task,
                "prompt": worker.tokenizer.hf.decode(prompt.tolist()),
                "reference": json_or_text(worker.env.problem(task).answer),
                "completions": [sample(worker.env, episodes, i) for i in range(start, start + num_samples)],
            }
            lines.write(json.dumps(record) + "\n")


def sample(env: Env, episodes: Episodes, row: int) -> dict[str, JSON]:
    """Returns the text, the answer, the scores and the length in tokens of a completion."""
    conversation = {"conversation": episodes.conversations[row]} if episodes.conversations else {}
    value, correct = round(float(episodes.scores["return"][row]), 6), episodes.scores.get("correct_answer")
    return {
        "text": episodes.texts[row],
        "answer": env.answer(episodes.texts[row]),
        "return": None if np.isnan(value) else value,
        **({"correct": bool(correct[row] > 0)} if correct is not None else {}),
        "length": int(episodes.completion_lengths[row]),
        "finished": bool(episodes.finished[row]),
        **conversation,
    }


def json_or_text(value: object) -> JSON:
    """Returns a value as it is if JSON can hold it; if not, its text."""
    try:
        json.dumps(value, allow_nan=False)
        return value
    except (TypeError, ValueError):
        return str(value)
