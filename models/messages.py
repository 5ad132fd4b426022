"""Messages of a conversation as chat templates read them: checked, with calls of tools, and tools announced."""

import contextlib
import json
import reprlib
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from utils.settings.errors import UserError, describe_error

KEYS = ("role", "content", "tool_calls", "tool_call_id", "name", "reasoning_content", "weight")  # keys of a message
REPLY = "assistant"  # role of a reply
CALL = '{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}'
ANNOUNCEMENT = """# Tools

These functions can be called; the JSON schema of each is on a line of its own:
<tools>
SCHEMAS
</tools>

To call one, write its name and its arguments as JSON between two tags, and end the turn:
<tool_call>
{"name": "FUNCTION", "arguments": {"ARGUMENT": "VALUE"}}
</tool_call>"""
Message = Mapping[str, Any]  # some of KEYS
Schema = Mapping[str, Any]  # JSON schema of a tool
Tool = Callable[..., object] | Schema


def content_of(message: Message) -> str:
    """Returns the text of a message; empty if it only calls tools."""
    return message.get("content") or ""


def is_begun(messages: Sequence[Message]) -> bool:
    """True if a conversation ends with the beginning of a reply."""
    return bool(messages) and messages[-1]["role"] == REPLY


def readable(message: Message) -> dict[str, Any]:
    """Returns a message as chat templates read it: arguments of calls as objects, no null, no weight.

    Raises: UserError for unknown keys, and for values of another type.
    """
    given = {key: value for key, value in message.items() if value is not None}
    if unknown := [key for key in given if key not in KEYS]:
        raise UserError(f"a message has the key {unknown[0]!r}, which is not read: use only {', '.join(KEYS)}")
    if given.pop("weight", 1) not in (0, 1):
        raise UserError(f"a message has the weight {reprlib.repr(message['weight'])}: write 0 or 1")
    calls = given.pop("tool_calls", [])
    if wrong := [key for key, value in given.items() if not isinstance(value, str)]:
        raise UserError(f"the {wrong[0]} of a message is {reprlib.repr(given[wrong[0]])}: write text")
    if not (calls or "content" in given):
        raise UserError("a message has neither content nor tool_calls: write one of them")
    return given | ({"tool_calls": [*map(readable_call, calls)]} if calls else {})


def readable_call(call: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a call of a tool in OpenAI's form, its arguments as an object. Raises: UserError for another form."""
    function = call.get("function")
    arguments = function.get("arguments") if isinstance(function, Mapping) else None
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):
            arguments = json.loads(arguments or "{}")  # clients leave out those of a call without any
    if not (isinstance(arguments, Mapping) and isinstance(function.get("name"), str)):
        raise UserError(f"tool_calls has {reprlib.repr(call)}: write {CALL}")
    return {**call, "function": {**function, "arguments": dict(arguments)}}


def tool_schema(tool: Tool) -> Schema:
    """Returns the JSON schema of a tool. Raises: UserError for a function without type hints or a docstring for one."""
    return tool if isinstance(tool, Mapping) else schema_of(tool)


@lru_cache(maxsize=1024)
def schema_of(function: Callable[..., object]) -> Schema:
    """Returns the JSON schema of a function: see `tool_schema`."""
    from transformers.utils import get_json_schema

    try:
        return get_json_schema(function)
    except Exception as error:  # of several classes, and what the evaluation of type hints raises
        name = getattr(function, "__name__", repr(function))
        raise UserError(
            f"the tool {name} cannot be announced ({describe_error(error)}): write type hints, and a docstring that "
            "describes it and, below Args:, each argument"
        ) from error


def announce(messages: Sequence[Message], schemas: Sequence[Schema]) -> list[Message]:
    """Returns messages whose system message announces tools, in the format of Qwen's chat templates."""
    messages = list(messages)
    if not schemas:
        return messages
    lines = "\n".join(json.dumps(schema, ensure_ascii=False) for schema in schemas)
    text = ANNOUNCEMENT.replace("SCHEMAS", lines)
    if messages and messages[0]["role"] == "system":
        text = f"{messages[0]['content']}\n\n{text}"
        messages = messages[1:]
    return [{"role": "system", "content": text}, *messages]
