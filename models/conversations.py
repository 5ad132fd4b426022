"""Demonstrations as token ids: the ids that the policy would have read and sampled."""

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Self

import numpy as np
from jaxtyping import Bool, Int

from models.messages import REPLY, Message, Schema, Tool, content_of
from models.oracle import THINK, THINK_END, compare, differs_by_thinking, reference
from models.tokenizer import CONTENT, TURN, Tokenizer, behind, end_of_turns, unused_mark
from utils.settings.errors import UserError

NUM_ROWS = 2  # rows of each kind that are compared


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


def encode_conversation(
    tokenizer: Tokenizer, messages: Sequence[Message], tools: Sequence[Tool] = ()
) -> Conversation:
    """Returns a conversation whose replies are trained on, except those of weight 0.

    Each reply follows the prompt that a sampler would use. All is encoded as one text: that of the chat template, with
    the thinking that the template drops.

    Raises: UserError as `Tokenizer.write`, and if the chat template cannot be continued after a reply.
    """
    end = end_of_turn(tokenizer)
    replies = [i for i, message in enumerate(messages) if message["role"] == REPLY]
    text, spans = write_turns(tokenizer, messages[: replies[-1] + 1], tools)
    ids, places = tokenizer.encode_spans(text)
    starts = np.array([start for start, _ in places])
    ends = np.array([stop for _, stop in places])
    mask, control = np.zeros(len(ids), bool), {*tokenizer.special_ids.values(), *tokenizer.stop_ids}
    for i, (start, stop) in zip(replies, spans, strict=True):
        columns = np.flatnonzero((ends > start) & (starts < stop))
        if ids[columns[-1]] not in control:  # the token after it ends the reply, as in GLM's template
            following = columns[-1] + 1
            if following == len(ids):
                ids, mask = [*ids, end], np.append(mask, False)
            elif ids[following] not in control:
                raise UserError(
                    "the model's chat template ends replies without a token of its own: choose rows with one reply"
                )
            columns = np.append(columns, following)
        mask[columns] = messages[i].get("weight") in (None, 1)
    if not tokenizer.template:
        ids, mask = [*tokenizer.first_ids, *ids], np.append(np.zeros(len(tokenizer.first_ids), bool), mask)
    if mask[:1].any():
        raise UserError("a reply has no token before it: write a prompt")
    return Conversation(np.array(ids, np.int32), mask)


def write_turns(
    tokenizer: Tokenizer, messages: Sequence[Message], tools: Sequence[Tool]
) -> tuple[str, list[tuple[int, int]]]:
    """Returns a conversation as text, and where its replies stand, each with the token that ends it."""
    text, spans, heard = "", [], []
    end = tokenizer.hf.convert_ids_to_tokens(end_of_turn(tokenizer))
    if tokenizer.template:
        messages, tools = tokenizer.prepare(messages, any(map(thinks, messages)), tools)
    for i, message in enumerate(messages):
        if message["role"] != REPLY:
            heard.append(message)
            continue
        if tokenizer.template:
            opening = tokenizer.render(messages[:i], thinks(message), tools=tools)
            opened = open_turn(tokenizer, text, opening, messages[: i + 1], len(heard), tools)
            text = write_reply(tokenizer, opened, opening, messages[: i + 1], tools)
            place = text.rfind(end, len(opened))
            text = text[: place + len(end)] if place >= 0 else text
        else:
            said = tokenizer.write(heard, None, tools=() if text else tools)
            opened = f"{text}\n{said}\n" if text else said
            text = opened + tokenizer.write([message], None) + end
        spans.append((len(opened), len(text)))
        heard = []
    return text, spans


def open_turn(
    tokenizer: Tokenizer,
    text: str,
    opening: str,
    messages: Sequence[Message],
    num_heard: int,
    tools: Sequence[Schema],
) -> str:
    """Returns a text, continued by the chat template up to the last of the messages, a reply.

    `opening`: the template's text up to that place for these messages alone.
    """
    *before, reply = messages
    if opening.startswith(text):
        return opening
    # The template drops thinking from a reply when messages follow: the text after it is found with another reply.
    heard = before[len(before) - num_heard :]
    *past, last = before[: len(before) - num_heard]
    mark = unused_mark(text + opening)
    past.append({key: x for key, x in last.items() if key != "reasoning_content"} | {"content": mark})
    closed, rest = behind(tokenizer, past, heard, thinks(reply), tools, mark)
    opened = text + rest[len(closed) :]
    if not differs_by_thinking(opened, opening):
        raise UserError(
            "the model's chat template writes earlier messages differently when others follow, and not only without "
            "thinking: choose rows with one reply"
        )
    return opened


def write_reply(
    tokenizer: Tokenizer, opened: str, opening: str, messages: Sequence[Message], tools: Sequence[Schema]
) -> str:
    """Returns an opened turn, continued by the chat template's text of the last message: see `open_turn`."""
    *before, reply = messages
    thinking, content = thinks(reply), content_of(reply)
    closed = tokenizer.render(messages, thinking, is_open=False, tools=tools)
    if closed.startswith(opening):
        return opened + closed.removeprefix(opening)
    if not differs_by_thinking(opening, closed, is_begun=True) or "reasoning_content" in reply:
        place = len(os.path.commonprefix([closed, opening]))
        where = " and ".join(repr(text[max(0, place - 60) : place + 60]) for text in (closed, opening))
        raise UserError(
            f"the model's chat template begins a demonstration differently from a sampled reply, from character "
            f"{place:,} on: {where}: choose another model or template"
        )
    # The template writes thinking before a sampled reply, or leaves it out of a written one.
    framed = tokenizer.render([*before, {**reply, "content": TURN}], thinking, is_open=False, tools=tools)
    head, found, tail = framed.rpartition(TURN)
    if not (found and closed.startswith(head) and closed.endswith(tail)):
        raise UserError(
            f"the model's chat template does not show messages of the role {REPLY} as they are: choose another model "
            "or template"
        )
    kept = closed[len(head) : len(closed) - len(tail)]
    if THINK_END in content and THINK_END not in kept:
        kept = content[: content.rfind(kept) + len(kept)] if kept in content else content
    return opened + without_opening(tokenizer, kept, thinking) + tail


def thinks(message: Message) -> bool:
    """True if a reply has thinking."""
    return THINK_END in content_of(message) or bool(message.get("reasoning_content"))


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
    """Returns the chat template's text between a message and a reply; empty without a template."""
    if not tokenizer.template:
        return ""
    return tokenizer.render([{"role": "user", "content": CONTENT}], thinking).rpartition(CONTENT)[2]


def describe_prompts(tokenizer: Tokenizer, thinking: bool, plays_thinking: bool) -> list[str]:
    """Returns a warning if an environment's prompts open replies in another way than the rows' prompts."""
    rows, played = (generation_prompt(tokenizer, is_on) for is_on in (thinking, plays_thinking))
    advice = f"to play them alike, give --env_options thinking={'on' if thinking else 'off'}, here and in RL"
    warning = f"warning: replies of rows follow {rows!r}, but those of the environment follow {played!r}: {advice}"
    return [warning] * (rows != played)


def end_of_turn(tokenizer: Tokenizer) -> int:
    """Returns the token by which the chat template ends a reply; if it has none, the first that ends a completion.

    Raises: UserError if there is none, so that no reply would end.
    """
    if not tokenizer.stop_ids:
        raise UserError("the tokenizer has no end of sequence, so no reply would end: name one in its eos_token")
    end = end_of_turns(tokenizer, tokenizer.template)
    return tokenizer.stop_ids[0] if end is None else end


def encode_rows(
    tokenizer: Tokenizer,
    name: str,
    rows: Iterable[Sequence[Message]],
    max_length: int,
    long_rows: str,
    group_size: int = 1,
) -> tuple[list[Conversation], str]:
    """Returns conversations of at most `max_length` tokens, and a note on longer ones; groups are dropped whole.

    Raises: UserError for a longer one if `long_rows` is "error", and as `encode_conversation`, with its number.
    """
    encoded = []
    for number, messages in enumerate(rows, 1):
        if stored := getattr(messages, "encoded", None):
            encoded.append(stored)
            continue
        try:
            encoded.append(encode_conversation(tokenizer, messages, getattr(messages, "tools", ())))
        except UserError as error:
            place = getattr(messages, "place", "") or f"{name}: row {number}"
            raise UserError(f"{place}: {error}") from error
    lengths = np.array([len(row) for row in encoded])
    is_long = lengths > max_length
    if is_long.any() and long_rows == "error":
        raise UserError(
            f"{name}: {is_long.sum():,} of {len(lengths):,} rows have more than --max_length {max_length} tokens, the "
            f"longest {max(lengths):,}: raise --max_length, or give --long_rows cut or drop"
        )
    encoded = [row.cut(max_length) for row in encoded]
    is_kept = np.array([row.mask.any() for row in encoded]) & (~is_long | (long_rows == "cut"))
    is_kept = is_kept.reshape(-1, group_size).all(axis=1).repeat(group_size)
    kept = [row for row, is_row in zip(encoded, is_kept, strict=True) if is_row]
    if not kept:
        raise UserError(f"{name}: no row has a reply within --max_length {max_length} tokens: raise --max_length")
    num_trained = sum(row.mask.sum() for row in kept)
    note = f"{len(kept):,} rows, {sum(map(len, kept)):,} tokens, {num_trained:,} of them trained"
    num_cut, num_dropped = (is_long & is_kept).sum(), (~is_kept).sum()
    note += f"; {num_cut:,} cut and {num_dropped:,} dropped at {max_length} tokens" if is_long.any() else ""
    return kept, f"{name}: {note}"


def check_rows(tokenizer: Tokenizer, name: str, rows: Sequence[Sequence[Message]]) -> list[str]:
    """Compares the first rows of SFT of each kind up to their last replies: see `check_prompt` of models/oracle.py.

    Rows differ in kind by what chat templates treat differently. Stored rollouts are token ids, and not compared.
    """
    seen, notes = Counter(), []
    for number, row in enumerate(rows, 1):
        tools, replies = getattr(row, "tools", ()), [i for i, message in enumerate(row) if message["role"] == REPLY]
        *earlier, thinking = [thinks(row[i]) for i in replies]
        kind = bool(earlier), bool(tools) or any("tool_calls" in message for message in row), any(earlier), thinking
        seen[kind] += 1
        if seen[kind] > NUM_ROWS or not tokenizer.template or getattr(row, "encoded", None):
            continue
        ids = encode_conversation(tokenizer, row, tools).tokens.tolist()
        whole, schemas = tokenizer.prepare(row[: replies[-1] + 1], thinking, tools)
        expected = reference(tokenizer, whole, thinking, schemas, is_open=False)
        if ids[:-1] == expected:
            end = tokenizer.hf.decode(ids[-1:])
            notes.append(f"the chat template ends a last reply by no token: {end} ends those of rows")
            continue
        length = next((i for i in range(len(expected), 0, -1) if expected[i - 1] == ids[-1]), len(expected))
        is_whole = bool(tokenizer.decode(expected[length:]).strip())  # more than the end of a conversation follows
        notes += compare(tokenizer, f"{name}: row {number}", ids, expected if is_whole else expected[:length])
    return list(dict.fromkeys(notes))
