"""The oracle of a run's start: joined ids of its prompts, replies and messages, compared with `apply_chat_template`.

Two differences are allowed, and named. A system message announces tools that the chat template does not show. And the
template may leave thinking out of earlier replies.
"""

import re
from collections.abc import Sequence

from models.messages import REPLY, Message, Schema, Tool, readable
from models.tokenizer import TURN, Tokenizer
from utils.settings.errors import UserError

ANNOUNCED = "the chat template shows no tools: a system message announces them"
DROPPED = "the chat template strips thinking from replies that other messages follow; it is kept here, as sampled"
AROUND = 20  # tokens on each side of a difference that are shown
THINK, THINK_END = "<think>", "</think>"
BLOCK = f"{THINK}(?:(?!{THINK}).)*?{THINK_END}|{THINK}\\s*\\Z"  # block of thinking, or its beginning
THOUGHTS = re.compile(f"(?:{BLOCK})\n*", re.DOTALL), re.compile(f"\n*(?:{BLOCK})", re.DOTALL)


def check_prompt(
    tokenizer: Tokenizer,
    ids: Sequence[int],
    messages: Sequence[Message],
    thinking: bool | None = None,
    prefix: str = "",
    plain: bool = False,
    tools: Sequence[Tool] = (),
    following: Sequence[Message] = (),
    what: str = "a prompt",
) -> list[str]:
    """Compares the ids of a prompt, and of messages that follow a reply; returns a note on each allowed difference.

    Raises: UserError for another difference.
    """
    if plain or not tokenizer.template:  # transformers has no rendering
        return []
    whole, schemas = tokenizer.prepare(messages, thinking, tools)
    notes = [ANNOUNCED] if len(schemas) < len(tools) else []
    if following:
        bridge = tokenizer.bridge(messages, following, thinking, prefix, plain, tools)
        begun = whole.pop()["content"] if whole[-1]["role"] == REPLY else ""
        whole += [{"role": REPLY, "content": begun + prefix + TURN}, *map(readable, following)]
    expected = reference(tokenizer, whole, thinking, schemas, prefix)
    if following:
        behind = [*bridge.end, *bridge.ids]
        reply = expected[len(ids) : len(expected) - len(behind)]  # it may begin with a header
        if expected[: len(ids)] != [*ids] or not tokenizer.decode(reply).endswith(TURN):
            is_thinking = tokenizer.hf.decode(ids).rstrip().endswith(THINK)
            reply = tokenizer.encode(f"{THINK_END}\n\n" * is_thinking + TURN)
        ids = [*ids, *reply, *behind]
        is_same_text = tokenizer.hf.decode(ids) == tokenizer.hf.decode(expected)
        if is_same_text and expected[len(expected) - len(behind) :] == behind:  # GPT-2 splits "\n\n" before a reply
            return notes
    return notes + compare(tokenizer, what, ids, expected)


def check_result(tokenizer: Tokenizer, result: str, opening: str, closing: str) -> None:
    """Compares a result that is written after a call: see `check_prompt`."""
    found = tokenizer.results([{"role": "tool", "content": result}], opening, closing)
    expected = tokenizer.hf(TURN + opening + result + closing, add_special_tokens=False)["input_ids"]
    compare(tokenizer, "a tool's result", tokenizer.encode(TURN) + found, expected)


def reference(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    thinking: bool | None,
    tools: Sequence[Schema] = (),
    prefix: str = "",
    is_open: bool = True,
) -> list[int]:
    """Returns the ids of transformers' apply_chat_template, with a prefix of the reply: those of one whole text."""
    text = tokenizer.render(messages, thinking, is_open, tools) + prefix
    return tokenizer.hf(text, add_special_tokens=False)["input_ids"]


def compare(tokenizer: Tokenizer, what: str, ids: Sequence[int], expected: Sequence[int]) -> list[str]:
    """Returns a note if ids differ from the expected ones by thinking alone. Raises: UserError if by more."""
    if [*ids] == [*expected]:
        return []
    found, wanted = (tokenizer.hf.decode(x) for x in (ids, expected))
    if found != wanted and differs_by_thinking(found, wanted):
        return [DROPPED]
    place = next((i for i, pair in enumerate(zip(ids, expected, strict=False)) if len({*pair}) > 1), len(ids))
    start, end = max(0, place - AROUND), place + AROUND
    here, theirs = (
        " >>> ".join(repr(tokenizer.hf.decode(part)) for part in (x[start:place], x[place:end]))
        for x in (ids, expected)
    )
    raise UserError(
        f"{what} differs from what transformers makes of the same messages, from token {place} on:\n"
        f"here: {here}\napply_chat_template: {theirs}\n"
        "use the chat template that the model was published with, or leave it out by --env_options plain=true"
    )


def differs_by_thinking(text: str, other: str, is_begun: bool = False) -> bool:
    """True if two texts are equal without blocks of thinking, and line breaks of these; one may have only begun."""
    bare = [[thought.sub("", x) for x in (text, other)] for thought in THOUGHTS]
    return any(a == b or (is_begun and b.startswith(a)) for a, b in bare)
