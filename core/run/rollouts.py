"""Rollouts as rows of JSON, for files, sinks and the report, and as arrays."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from core.records import Batch, Episodes
from models.tokenizer import Tokenizer
from utils.files import replacing
from utils.metrics.jsonl import JSONRow, json_value

STORED = {"tokens": np.int32, "mask": bool, "logprobs": np.float32}  # of completions, in files
STORED |= {"lengths": np.int32, "prompt_lengths": np.int32, "finished": bool}
NUM_GROUPS = 2  # groups with the long fields that report.html shows as colors
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
            row |= {"conversation": episodes.conversations[i], "stop_reason": episodes.stops[i]}
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
    turn_rewards    float64 [E, K]  rewards of the turns of an episode, NaN after the last one
    returns         float32 [E]     what training maximizes; scores/NAME: each part of it: see `score_arrays`
    """
    completions = episodes.completions
    arrays = {
        **{name: np.asarray(getattr(completions, name), dtype) for name, dtype in STORED.items()},
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
        names = {"advantage": batch.advantages, "old_logprobs": batch.old_logprobs, "entropies": batch.entropies}
        arrays |= {name: x[batch_row] for name, x in names.items() if x is not None}
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


def write_rows(file: Path, rows: Iterable[Mapping[str, object]]) -> None:
    """Writes one JSON object a line."""
    lines = [json.dumps(row, default=json_value) + "\n" for row in rows]
    with replacing(file) as new:
        new.write("".join(lines).encode())


def write_arrays(file: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes arrays by name, compressed."""
    with replacing(file) as new:
        np.savez_compressed(new, **arrays)


def transcript(episodes: Episodes, row: int) -> str:
    """Returns the messages of a conversation as text, or a single reply."""
    if not episodes.conversations:
        return episodes.texts[row]
    return "\n".join(f"{message['role']}: {message['content']}" for message in episodes.conversations[row])
