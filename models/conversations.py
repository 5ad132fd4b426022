"""Conversations with written replies as token ids: those that the policy would have read, and drawn, had it said so."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Self

import numpy as np
from jaxtyping import Bool, Int

from models.tokenizer import CONTENT, TURN, Message, Tokenizer
from utils.settings.errors import UserError

REPLY = "assistant"  # role of what is trained on
THINK, THINK_END = "<think>", "</think>"


@dataclass(frozen=True)
class Conversation:
    """Token ids up to the last reply, and which of them are trained on."""

    tokens: Int[np.ndarray, "T"]
    mask: Bool[np.ndarray, "T"]  # replies, each with the token that ends it

    def __len__(self) -> int:
        return len(self.tokens)

    def cut(self, length: int) -> Self:
        """Returns the first tokens."""
        return replace(self, tokens=self.tokens[:length], mask=self.mask[:length])


def encode_conversation(tokenizer: Tokenizer, messages: Sequence[Message], train_on: str) -> Conversation:
    """Returns a conversation whose replies, "all" or the "last", are trained on.

    Each reply stands behind the prompt that a sampler would draw it from: the chat template's, and between two replies
    the bridge that episodes of several turns have. What a reply spells stays text, but for tags (<think>).

    Raises: UserError where the chat template fails, cannot be continued behind a reply, or opens a block of thinking
    that the reply does not close.
    """
    ids, spans, heard = [], [], []
    for message in messages:
        if message["role"] != REPLY:
            heard.append(message)
            continue
        thinking = THINK_END in message["content"]
        ids += tokenizer.bridge(heard, thinking).ids if ids else tokenizer.chat(heard, thinking)
        text = without_opening(tokenizer, message["content"], thinking)
        reply = [*tokenizer.encode(tokenizer.cut(text, tokenizer.control_signs)), end_of_turn(tokenizer)]
        spans.append((len(ids), len(ids) + len(reply)))
        ids += reply
        heard = []
    mask = np.zeros(len(ids), bool)
    for start, end in spans if train_on == "all" else spans[-1:]:
        mask[start:end] = True
    if mask[:1].any():
        raise UserError("a reply has no token before it: write a prompt")
    return Conversation(np.array(ids, np.int32), mask)


def without_opening(tokenizer: Tokenizer, reply: str, thinking: bool) -> str:
    """Returns a reply without the <think> that the chat template has written already, if it has."""
    opening = generation_prompt(tokenizer, thinking)
    if opening.count(THINK) <= opening.count(THINK_END):
        return reply
    if not thinking:
        raise UserError(f"the model's chat template begins replies with {THINK}: write {THINK_END} into each reply")
    rest = reply.removeprefix(THINK)
    return rest.removeprefix("\n") if opening.endswith("\n") else rest


@lru_cache(maxsize=64)
def generation_prompt(tokenizer: Tokenizer, thinking: bool) -> str:
    """Returns what the chat template writes between a message and a reply; empty without a template."""
    if not tokenizer.has_template:
        return ""
    return tokenizer.render([{"role": "user", "content": CONTENT}], thinking).rpartition(CONTENT)[2]


def describe_prompts(tokenizer: Tokenizer, thinking: bool, plays_thinking: bool) -> list[str]:
    """Returns a warning where an environment asks for replies by other prompts than those of the rows."""
    rows, played = (generation_prompt(tokenizer, is_on) for is_on in (thinking, plays_thinking))
    advice = f"to play them alike, give --env_options thinking={'on' if thinking else 'off'}, here and in RL"
    warning = f"warning: replies of rows stand behind {rows!r}, those that are played behind {played!r}: {advice}"
    return [warning] * (rows != played)


@lru_cache(maxsize=64)
def end_of_turn(tokenizer: Tokenizer) -> int:
    """Returns the stop token that the chat template writes behind a reply, else the first that ends a completion.

    Raises: UserError where there is none, so that no reply would end.
    """
    stops = tokenizer.stop_ids
    if not stops:
        raise UserError("the tokenizer has no end of sequence, so that no reply would end: name one in its eos_token")
    if not tokenizer.has_template:
        return stops[0]
    turn = [{"role": "user", "content": CONTENT}, {"role": REPLY, "content": TURN}]
    _, found, rest = tokenizer.render(turn, thinking=None, is_open=False).rpartition(TURN)
    if not found:
        raise UserError(f"the model's chat template does not show messages of the role {REPLY}")
    return next((i for i in tokenizer.encode(rest) if i in stops), stops[0])


def encode_rows(
    tokenizer: Tokenizer, name: str, rows: Iterable[Sequence[Message]], train_on: str, max_length: int, long_rows: str
) -> tuple[list[Conversation], str]:
    """Returns conversations of at most `max_length` tokens, and in words what was done about longer ones.

    Raises: UserError for a longer one where `long_rows` is "error", and as `encode_conversation`, with its number.
    """
    encoded = []
    for number, messages in enumerate(rows, 1):
        try:
            encoded.append(encode_conversation(tokenizer, messages, train_on))
        except UserError as error:
            raise UserError(f"{name}: row {number}: {error}") from error
    lengths = [len(row) for row in encoded]
    num_long = sum(length > max_length for length in lengths)
    if num_long and long_rows == "error":
        raise UserError(
            f"{name}: {num_long:,} of {len(lengths):,} rows have more than --max_length {max_length} tokens, the "
            f"longest {max(lengths):,}: raise it, or give --long_rows cut or drop"
        )
    kept = [row.cut(max_length) for row in encoded if long_rows == "cut" or len(row) <= max_length]
    kept = [row for row in kept if row.mask.any()]
    if not kept:
        raise UserError(f"{name}: no row has a reply within --max_length {max_length} tokens: raise it")
    num_dropped, num_trained = len(lengths) - len(kept), sum(row.mask.sum() for row in kept)
    note = f"{len(kept):,} rows, {sum(map(len, kept)):,} tokens, {num_trained:,} of them trained"
    note += f"; {num_long - num_dropped:,} cut and {num_dropped:,} dropped at {max_length} tokens" if num_long else ""
    return kept, f"{name}: {note}"
