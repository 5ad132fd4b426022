"""The oracle of a run's start: its prompts and conversations, compared with transformers' rendering.

A run joins the ids of prompts, sampled replies and the messages between them. They are compared with the ids of
`apply_chat_template`. Two differences are allowed, and named. A system message announces tools that the chat template
does not show. And the template may leave thinking out of earlier replies.
"""

from collections import defaultdict
from collections.abc import Sequence

from models.conversations import THINK, THINK_END, Conversation, differs_by_thinking, encode_conversation, thinks
from models.messages import REPLY, Message, Schema, Tool, announce, content_of, is_begun, readable, tool_schema
from models.tokenizer import TURN, Tokenizer
from utils.settings.errors import UserError

ANNOUNCED = "the chat template shows no tools: a system message announces them"
DROPPED = "the chat template leaves thinking out of replies that messages follow: here it stays as it was drawn"
AROUND = 20  # tokens on each side of a difference that are shown
NUM_ROWS = 2  # rows of each kind that are compared


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
    schemas = [*map(tool_schema, tools)]
    if plain or not tokenizer.has_template:
        text = "\n".join(map(content_of, announce(messages, schemas))) + prefix
        expected = tokenizer.hf(text)["input_ids"]
        has_more = {*expected[len(ids) :]} - {*tokenizer.special_ids.values()}  # more than the token that ends a text
        return compare(tokenizer, what, ids, expected if has_more else expected[: len(ids)])
    whole, notes = [*map(readable, messages)], []
    if schemas and reference(tokenizer, whole, thinking, schemas) == reference(tokenizer, whole, thinking):
        whole, schemas, notes = announce(whole, schemas), [], [ANNOUNCED]
    if following:
        bridge = tokenizer.bridge(messages, following, thinking, prefix, plain, tools)
        begun = whole.pop()["content"] if is_begun(whole) else ""
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


def check_rows(tokenizer: Tokenizer, name: str, rows: Sequence[Sequence[Message]], train_on: str) -> list[str]:
    """Compares the first rows of SFT of each kind, by what chat templates treat differently: see `check_prompt`.

    Stored rollouts are token ids already, and are not compared.
    """
    rows = [row for row in rows if not getattr(row, "encoded", None)]
    kinds = defaultdict(list)
    for i, row in enumerate(rows):
        *earlier, last = [message for message in row if message["role"] == REPLY]
        has_tools = bool(getattr(row, "tools", ())) or any("tool_calls" in message for message in row)
        kinds[bool(earlier), has_tools, any(map(thinks, earlier)), thinks(last)].append(i)
    numbers = [i for found in kinds.values() for i in found[:NUM_ROWS]]
    notes = []
    for i in sorted(numbers) if tokenizer.has_template else ():
        row = encode_conversation(tokenizer, rows[i], train_on, getattr(rows[i], "tools", ()))
        notes += check_row(tokenizer, row, rows[i], f"{name}: row {i + 1}")
    return list(dict.fromkeys(notes))


def check_row(tokenizer: Tokenizer, row: Conversation, messages: Sequence[Message], what: str) -> list[str]:
    """Compares a row of SFT: see `check_prompt`."""
    last = max(i for i, message in enumerate(messages) if message["role"] == REPLY)
    thinking, ids = thinks(messages[last]), row.tokens.tolist()
    whole, schemas = tokenizer.prepare(messages[: last + 1], thinking, getattr(messages, "tools", ()))
    expected = reference(tokenizer, whole, thinking, schemas, is_open=False)
    if ids[:-1] == expected:
        return [f"the chat template ends a last reply by no token: {tokenizer.hf.decode(ids[-1:])} ends those of rows"]
    return compare(tokenizer, what, ids, up_to(tokenizer, expected, ids[-1]))


def up_to(tokenizer: Tokenizer, ids: list[int], last: int) -> list[int]:
    """Returns ids up to the last `last`, if no text follows it, only the end of a conversation."""
    length = next((i for i in range(len(ids), 0, -1) if ids[i - 1] == last), len(ids))
    return ids if tokenizer.decode(ids[length:]).strip() else ids[:length]


def check_result(tokenizer: Tokenizer, result: str, opening: str, closing: str) -> None:
    """Compares a result that is written behind a call: see `check_prompt`."""
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
    """Returns the ids of transformers' apply_chat_template, with a prefix of the reply."""
    options = {"tools": [*tools] or None, "assistant_prefix": ""}
    options |= {} if thinking is None else {"enable_thinking": thinking}
    options["continue_final_message" if is_begun(messages) else "add_generation_prompt"] = is_open
    if not prefix:
        return tokenizer.hf.apply_chat_template([*messages], return_dict=False, **options)
    text = tokenizer.hf.apply_chat_template([*messages], tokenize=False, **options)
    return tokenizer.hf(text + prefix, add_special_tokens=False)["input_ids"]


def compare(tokenizer: Tokenizer, what: str, ids: Sequence[int], expected: Sequence[int]) -> list[str]:
    """Returns a note if ids differ from the expected ones by thinking alone. Raises: UserError if by more."""
    if [*ids] == [*expected]:
        return []
    found, wanted = (tokenizer.hf.decode(x) for x in (ids, expected))
    if found != wanted and differs_by_thinking(found, wanted):
        return [DROPPED]
    place = next((i for i, pair in enumerate(zip(ids, expected, strict=False)) if len({*pair}) > 1), len(ids))
    shown = []
    for name, x in (("here", ids), ("apply_chat_template", expected)):
        start = max(0, place - AROUND)
        parts = (tokenizer.hf.decode(part) for part in (x[start:place], x[place : place + AROUND]))
        shown.append(f"{name}: {' >>> '.join(map(repr, parts))}")
    raise UserError(
        f"{what} differs from what transformers makes of the same messages, from token {place} on:\n"
        + "\n".join(shown)
        + "\nuse the chat template that the model was published with, or leave it out by --env_options plain=true"
    )
