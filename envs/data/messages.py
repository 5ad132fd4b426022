"""The content of a row: prompt, reply or references, tools, and which replies are trained; in usual formats.

It reads columns by name, lists of messages as OpenAI and TRL have them, ShareGPT's conversations, and the columns of
Alpaca and verl. Columns that the model should read or learn from are used, or refused by name; rewards get the others.
"""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, NamedTuple

from envs.data.files import JSON, SPEAKERS, RawRow
from envs.data.rows import LeftOut, first_of

Message = dict[str, JSON]  # role, content and perhaps keys of KEPT; weight 0: a reply that is not trained
Schema = dict[str, JSON]  # JSON schema of a tool

REPLY, CALL = "assistant", "function_call"
ROLES = dict.fromkeys(("system", "user", REPLY, "tool")) | {
    "human": "user", "gpt": REPLY, "chatgpt": REPLY, "bot": REPLY, "model": REPLY, CALL: REPLY,
    "function": "tool", "function_response": "tool", "observation": "tool",
}  # fmt: skip
KEPT = ("tool_calls", "tool_call_id", "name", "reasoning_content")  # keys of a message that are rendered
WEIGHTS = ("weight", "loss", "train", "trainable", "loss_mask")  # keys of a message that set whether it is trained
CONVERSATIONS = ("messages", "conversations", "conversation")
PROMPTS = ("prompt", "question")
SYSTEM = ("system", "system_prompt")
REFUSED = ("images", "image", "videos", "video", "audios", "audio", "chat_template_kwargs")


class Messages(list[Message]):
    """Messages, with the JSON schemas of the tools that the assistant may call, and the place of their row."""

    tools: tuple[Schema, ...] = ()
    place: str = ""
    encoded: Any = None  # token ids of a stored rollout; None: the chat template makes them

    @classmethod
    def of(cls, messages: Sequence[Message], tools: tuple[Schema, ...]) -> "Messages":
        new = cls(messages)
        new.tools = tools
        return new


@dataclass(frozen=True)
class Columns:
    """Names of the columns of a prompt and its answer, or of a conversation, with dots before nested ones."""

    prompt: str = ""
    answer: str = ""
    messages: str = ""
    usual_answers: tuple[str, ...] = ("answer", "reward_model.ground_truth")
    needs_answer: bool = True
    begins_with_messages: bool = False  # if a row has both: a conversation, and a prompt with its answer


class Exchange(NamedTuple):
    """A prompt, and the reply or reference for it."""

    prompt: str | list[Message]
    answer: JSON  # value of the answer's column: a text, messages, a reference of any type; None: no answer
    reply: Sequence[Message]  # the last message of a conversation, if it is the assistant's
    tools: tuple[Schema, ...]
    column: str  # name of the column with the prompt


def read_exchange(row: RawRow, columns: Columns) -> Exchange:
    """Returns the content of a row. Raises: KeyError for a missing column; ValueError for a malformed or unused one."""
    if wrong := next((name for name in REFUSED if not is_nothing(row.get(name))), ""):
        advice = "give --env_options thinking=on or off, and" if wrong == REFUSED[-1] else "only text is read:"
        raise ValueError(f"its column {wrong} is not rendered: {advice} remove the column")
    tools = read_tools(row.get("tools"))
    given = {name: x for name, x in row.items() if x is not None}
    is_alpaca = "instruction" in row and "output" in row
    answers = [columns.answer] if columns.answer else [*columns.usual_answers, *["output"] * is_alpaca]
    answer = next((name for name in answers if find_column(row, name) is not None), "")
    if columns.answer and columns.needs_answer:
        get_column(row, columns.answer)  # raises if there is none
    conversation = columns.messages or ("" if columns.prompt else first_of(CONVERSATIONS, given))
    prompt = columns.prompt or first_of(PROMPTS, given) or first_of(PROMPTS, row) or "instruction" * is_alpaca
    is_pair = bool(prompt) and bool(answer or not columns.needs_answer)
    if columns.messages or (conversation and (columns.begins_with_messages or not is_pair)):
        messages = read_messages(get_column(row, conversation))
        reply = messages[-1:] if messages and messages[-1]["role"] == REPLY else []
        said, column = messages[: len(messages) - len(reply)], conversation
        answers = [answer] * bool(answer)
    elif prompt == "instruction" and not columns.prompt:
        said, column, reply = read_alpaca(row), PROMPTS[0], []
    else:
        column, reply = prompt or PROMPTS[0], []
        said = read_prompt(get_column(row, column))
    value = get_column(row, answer or answers[0]) if answers and (answer or columns.needs_answer) else None
    return Exchange(with_system(row, said), value, reply, tools, column)


def get_column(row: RawRow, name: str) -> JSON:
    """Returns the value of a column; dots lead to nested ones. Raises: KeyError if there is none."""
    if name in row:
        return row[name]
    value = row
    for part in name.split("."):
        if not isinstance(value, dict) or part not in value:
            raise KeyError(name)
        value = value[part]
    return value


def find_column(row: RawRow, name: str) -> JSON:
    """Returns the value of a column, as `get_column` does; None if there is none."""
    try:
        return get_column(row, name)
    except KeyError:
        return None


def is_nothing(value: JSON) -> bool:
    """True for null, and for a list or an object without anything in it."""
    return value is None or value in ([], {})


# messages


def read_prompt(value: JSON) -> str | list[Message]:
    """Returns text or chat messages, which a table may hold as text. Raises: ValueError for anything else."""
    is_text = isinstance(value, str)
    speaker = rf"\s*\[\s*\{{.*[\"'](?:{'|'.join(SPEAKERS)})[\"']\s*:"
    return value if is_text and not re.match(speaker, value, re.DOTALL) else read_messages(value)


def as_messages(value: JSON, role: str) -> list[Message]:
    """Returns messages, or a text as one message of this role."""
    value = read_prompt(value)
    return [{"role": role, "content": value}] if isinstance(value, str) else value


def with_system(row: RawRow, prompt: str | list[Message]) -> str | list[Message]:
    """Returns a prompt with the system message of its column, if there is one. Raises: ValueError for two of them."""
    name = first_of(SYSTEM, row)
    text = row.get(name)
    if not text:
        return prompt
    if not isinstance(text, str):
        raise ValueError(f"its column {name} is a {type(text).__name__}, not text")
    messages = as_messages(prompt, "user")
    if messages and messages[0]["role"] == "system":
        raise ValueError(f"its column {name} and its first message are both system messages: remove one")
    return [{"role": "system", "content": text}, *messages]


def read_alpaca(row: RawRow) -> str:
    """Returns the prompt of Alpaca's columns: instruction, a new line and input."""
    texts = [row.get(name) or "" for name in ("instruction", "input")]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("its instruction or its input is not text")
    if not is_nothing(row.get("history")):
        raise ValueError("its column history is not read: write the conversation as messages")
    return "\n".join(filter(None, texts))


def read_messages(value: JSON) -> list[Message]:
    """Returns the messages of a list, or of its JSON, with the roles and keys of chat templates. Raises: ValueError."""
    if isinstance(value, str):
        value = read_json(value, "its list of messages")
    if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
        raise ValueError("its prompt is neither text nor a list of messages with role and content")
    return [read_message(f"its message {number}", message) for number, message in enumerate(value, 1)]


def read_message(what: str, message: Message) -> Message:
    """Returns a message in the form of chat templates. Raises: ValueError, which names the message by `what`."""
    left = {key: x for key, x in message.items() if x is not None}
    named = left.pop("role" if "role" in left else "from", None)
    if not isinstance(named, str) or named not in ROLES:
        known = ", ".join(name for name, other in ROLES.items() if not other)
        advice = "write system" if named == "developer" else f"roles are {known}"
        raise ValueError(f"{what} has the role {named!r:.40}: {advice}")
    content = left.pop("content" if "content" in left else "value", None)
    role = ROLES[named] or named
    weights = [read_weight(what, role, key, left.pop(key)) for key in WEIGHTS if key in left]
    kept = {key: left.pop(key) for key in KEPT if not is_nothing(left.get(key))}
    if named == CALL:
        call = f"the call in {what.removeprefix('its ')}"
        calls = read_json(content, call) if isinstance(content, str) else content
        calls = calls if isinstance(calls, list) else [calls]
        content, kept["tool_calls"] = "", [{"type": "function", "function": each} for each in calls]
    if "tool_calls" in kept:
        kept["tool_calls"] = read_calls(what, kept["tool_calls"])
        content = content or ""
    left = {key: x for key, x in left.items() if not is_nothing(x)}
    if left:
        raise ValueError(f"{what} has {', '.join(map(str, left))}, which is not rendered: write it into its content")
    if len(set(weights)) > 1:
        raise ValueError(f"{what} has one weight that trains it, and one that does not")
    read = {"role": role, "content": read_content(what, content), **kept}
    return read | {"weight": 0} if role == REPLY and weights and not weights[0] else read


def read_content(what: str, content: JSON) -> str:
    """Returns the text of a message, or of its parts, which must all be text."""
    if isinstance(content, list):
        for number, part in enumerate(content, 1):
            is_text = isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
            if not is_text or not all(is_nothing(x) for key, x in part.items() if key not in ("type", "text")):
                kind = part.get("type") if isinstance(part, dict) else part
                raise ValueError(f"part {number} of {what.removeprefix('its ')} is {kind!r:.40}: only text is read")
        return "".join(part["text"] for part in content)
    if not isinstance(content, str):
        kind = "null" if content is None else f"a {type(content).__name__}"
        raise ValueError(f"the content of {what.removeprefix('its ')} is {kind}: write text, or parts of text")
    return content


def read_weight(what: str, role: str, key: str, value: JSON) -> bool:
    """Returns whether a message is trained. Raises: ValueError for weights between, and if it is no reply."""
    if not isinstance(value, (bool, int, float)) or value not in (0, 1):
        raise ValueError(f"{what} has {key}={value!r:.40}: a reply is trained (1) or not (0)")
    if value and role != REPLY:
        raise ValueError(f"{what} has {key}={value!r}: only messages of the assistant are trained")
    return bool(value)


# references

def read_references(value: JSON) -> list[str]:
    """Returns the texts of an answer, or of a list of right answers; none if it is empty. Raises: ValueError."""
    if isinstance(value, dict) and "ground_truth" in value:  # verl's
        value = value["ground_truth"]
    return list(filter(None, map(read_reference, value if isinstance(value, list) else [value])))


def read_reference(value: JSON) -> str:
    """Returns an answer as text, empty for null. Raises: ValueError for anything but a text or a number."""
    if value is None or isinstance(value, str):
        return (value or "").strip()
    if isinstance(value, bool) or not isinstance(value, (int, float, Decimal)):
        key = next(iter(value), "KEY") if isinstance(value, dict) else ""
        advice = f"; name one of its keys, as answer=COLUMN.{key}" if key else ""
        raise ValueError(f"its answer is a {type(value).__name__}, not text, a number or a list of these{advice}")
    if not isinstance(value, int) and not math.isfinite(value):  # which has no answer for large integers
        raise ValueError(f"its answer is {value}, which is not a number")
    return str(int(value)) if value == int(value) else str(value)


# tools


def read_tools(value: JSON) -> tuple[Schema, ...]:
    """Returns the schemas of a column `tools`: a list of objects, or of their JSON, or the JSON of the list."""
    tools = read_json(value, "its column tools") if isinstance(value, str) and value.strip() else value or []
    if not isinstance(tools, list):
        raise ValueError("its column tools is not a list of JSON schemas")
    tools = [read_json(tool, "its column tools") if isinstance(tool, str) else tool for tool in tools]
    if not all(map(function_of, tools)):
        raise ValueError("its column tools is not a list of JSON schemas with a name each")
    return tuple(tools)


def function_of(value: JSON) -> Schema | None:
    """Returns what a tool or a call has under `function`, or itself; None if that has no name."""
    function = value.get("function", value) if isinstance(value, dict) else None
    return function if isinstance(function, dict) and isinstance(function.get("name"), str) else None


def read_calls(what: str, calls: JSON) -> list[JSON]:
    """Returns the calls of a message with their arguments as objects, as chat templates need them."""
    read = []
    for call in calls if isinstance(calls, list) else [None]:
        function = function_of(call)
        if not function:
            raise ValueError(f"{what} has tool_calls that are not a list of calls with a name each")
        arguments = function.get("arguments") or {}
        if isinstance(arguments, str):
            arguments = read_json(arguments, f"the arguments in {what.removeprefix('its ')}")
        if not isinstance(arguments, dict):
            raise ValueError(f"{what} has a call of {function['name']!r:.40} whose arguments are not an object")
        function = function | {"arguments": arguments}
        read.append(call | {"function": function} if "function" in call else function)
    return read


def read_json(text: str, what: str) -> JSON:
    """Returns the value of a text of JSON. Raises: ValueError, which names the text by `what`."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{what} is text, and not JSON ({error})") from error


# what is trained


def weighted(row: RawRow, messages: list[Message]) -> list[Message]:
    """Returns messages with their row's weights, one for all or for each. Raises: ValueError; LeftOut if all are 0."""
    replies = [i for i, message in enumerate(messages) if message["role"] == REPLY]
    weights = {i: messages[i].get("weight", 1) for i in replies}
    for name in WEIGHTS:
        value = row.get(name)
        if value is None:
            continue
        values = value if isinstance(value, list) else [value] * len(replies)
        places = range(len(messages)) if len(values) == len(messages) else replies
        if len(values) != len(places):
            count = f"{len(values)} values for {len(messages)} messages and {len(replies)} replies"
            raise ValueError(f"its column {name} has {count}: give one for each, 0 or 1")
        for i, x in zip(places, values, strict=True):
            is_trained = read_weight(f"the column {name} at message {i + 1}", messages[i]["role"], name, x)
            if not is_trained and i in weights:
                weights[i] = 0
    if not any(weights.values()):
        raise LeftOut("marked as not to be trained")
    return [message | {"weight": 0} if weights.get(i) == 0 else message for i, message in enumerate(messages)]


def unweighted(prompt: str | list[Message]) -> str | list[Message]:
    """Returns a prompt without weights: it is the same prompt whichever parts are trained."""
    if isinstance(prompt, str):
        return prompt
    return [{key: x for key, x in message.items() if key != "weight"} for message in prompt]
