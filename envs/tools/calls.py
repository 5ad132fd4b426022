"""Calls of tools as models write them: each form is read to a name and arguments.

A call is adversarial input: what cannot be read raises CallError. To add a form, write its reader and a line in FORMS.
"""

import contextlib
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from envs.data.rows import JSON

ARGUMENTS = ("arguments", "parameters", "args", "kwargs", "input")  # keys of a call; Llama 3 writes "parameters"
MAX_CALL = 100_000  # characters of a call
MAX_ERROR = 200  # characters of the reason of an error
Call = tuple[str, dict[str, JSON]]  # name and arguments
Schemas = Sequence[Mapping[str, JSON]]  # JSON schemas of tools


class CallError(ValueError):
    """Raised for a call that cannot be run."""


class Form(NamedTuple):
    """How a model writes calls: the markers around them, if any, and what reads the text in between."""

    opening: str
    closing: str
    read: Callable[[str, Schemas], Call]


def read_json(text: str, _: Schemas) -> Call:
    return parse_call(text)


def read_functions(text: str, schemas: Schemas) -> Call:
    """Reads <function=add><parameter=a>1</parameter></function>: Qwen3-Coder, Qwen3.5."""
    argument = re.compile(r"<parameter=([^<>\n]+)>\n?((?:(?!<parameter=).)*?)\n?</parameter>", re.DOTALL)
    found = re.fullmatch(r"\s*<function=([^>\n]+)>(.*)</function>\s*", text, re.DOTALL)
    if not found or argument.sub("", found[2]).strip():
        raise CallError("the call is not complete, or has text between its arguments")
    name, arguments = found[1].strip(), dict(argument.findall(found[2]))
    functions = [schema.get("function", schema) for schema in schemas]
    parameters = next((x.get("parameters") or {} for x in functions if x.get("name") == name), {})
    properties = (parameters.get("properties") or {}).items()
    texts = {key for key, x in properties if isinstance(x, Mapping) and x.get("type") == "string"}
    for key in arguments.keys() - texts:  # values of other types have no quotes
        with contextlib.suppress(ValueError, RecursionError):
            arguments[key] = json.loads(arguments[key], parse_float=finite_number, parse_constant=finite_number)
    return name, arguments


FORMS = {  # in the order in which they are tried on what a chat template writes
    "functions": Form("<tool_call>", "</tool_call>", read_functions),
    "qwen": Form("<tool_call>", "</tool_call>", read_json),
    "json": Form("", "", read_json),
}


def calls_as_json(form: Form, bodies: Iterable[str], schemas: Schemas) -> tuple[str, ...]:
    """Returns calls as `parse_call` reads them; a call that cannot be read stays as it is."""
    if form.read is read_json:
        return tuple(bodies)
    written = []
    for body in bodies:
        with contextlib.suppress(CallError):
            name, arguments = form.read(body, schemas) if len(body) <= MAX_CALL else parse_call("")
            body = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
        written.append(body)
    return tuple(written)


def parse_call(text: str) -> tuple[str, dict[str, JSON]]:
    """Returns the name and the arguments of a call in JSON, as in {"name": "add", "arguments": {"a": 1}}.

    The arguments may stand under any of ARGUMENTS, the call under "function". Raises: CallError.
    """
    try:
        call = json.loads(text, parse_float=finite_number, parse_constant=finite_number)
    except CallError:
        raise
    except (ValueError, RecursionError) as error:
        raise CallError(f"the call is not JSON: {reason(error)}") from error
    if isinstance(call, dict) and isinstance(call.get("function"), dict):  # as in messages of transformers and OpenAI
        call = {key: value for key, value in call.items() if key != "function"} | call["function"]
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise CallError('the call is not an object with "name" and "arguments"')
    arguments = next((call[key] for key in ARGUMENTS if key in call), {})
    if not isinstance(arguments, dict):
        raise CallError("the arguments are not an object")
    return call["name"], arguments


def finite_number(text: str) -> float:
    """Returns a number with a point or an exponent. Raises: CallError for NaN, Infinity and what is too large."""
    number = float(text)
    if not math.isfinite(number):
        raise CallError(f"the call has {text[:20]}, which is not a finite number")
    return number


def reason(error: BaseException) -> str:
    """Returns the message of an error; its type if it has no message or cannot be printed."""
    try:
        text = str(error) or type(error).__name__
    except BaseException:  # noqa: BLE001
        text = type(error).__name__
    return text[:MAX_ERROR]
