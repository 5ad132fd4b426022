"""Calls of tools as models write them: each form is read to a name and arguments.

A call is adversarial input: what cannot be read raises CallError. To add a form, write its reader and a line in FORMS.
"""

import ast
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
    """How a model writes calls: the markers around them, and what reads the text in between.

    Without markers a reply is a call if it is a JSON object, alone or in a code block.
    """

    opening: str
    closing: str
    read: Callable[[str, Schemas], list[Call]]


def read_json(text: str, _: Schemas) -> list[Call]:
    return [parse_call(text)]


def read_functions(text: str, schemas: Schemas) -> list[Call]:
    """Reads <function=add><parameter=a>1</parameter></function>: Qwen3-Coder, Qwen3.5, Nemotron 3."""
    argument = r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>"
    return [read_tags(r"<function=([^>\n]+)>(.*)</function>", argument, text, schemas)]


def read_pairs(text: str, schemas: Schemas) -> list[Call]:
    """Reads add<arg_key>a</arg_key><arg_value>1</arg_value>: GLM 4.5."""
    return [read_tags(r"([^\s<{]+)(.*)", r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", text, schemas)]


def read_tags(whole: str, argument: str, text: str, schemas: Schemas) -> Call:
    """Reads a call by two patterns: of its name and all arguments, and of the name and text of each argument."""
    found = re.fullmatch(rf"\s*{whole}\s*", text, re.DOTALL)
    if not found or re.sub(argument, "", found[2], flags=re.DOTALL).strip():
        raise CallError("the call is not complete, or has text between its arguments")
    name, pairs = found[1].strip(), re.findall(argument, found[2], re.DOTALL)
    functions = [schema.get("function", schema) for schema in schemas]
    parameters = next((x.get("parameters") or {} for x in functions if x.get("name") == name), {})
    properties = (parameters.get("properties") or {}).items()
    texts = {key for key, x in properties if isinstance(x, Mapping) and x.get("type") == "string"}
    arguments = dict(pairs)
    for key in arguments.keys() - texts:  # values of other types have no quotes
        with contextlib.suppress(ValueError, RecursionError):
            arguments[key] = json.loads(arguments[key], parse_float=finite_number, parse_constant=finite_number)
    return name, arguments


def read_python(text: str, _: Schemas) -> list[Call]:
    """Reads [add(a=1), add(a=2)]: LFM2."""
    try:
        calls = ast.parse(text.strip(), mode="eval").body.elts
        if any(call.args for call in calls):
            raise CallError("an argument of the call has no name")
        read = [(ast.unparse(call.func), {x.arg: ast.literal_eval(x.value) for x in call.keywords}) for call in calls]
        json.dumps(read, allow_nan=False)
    except (ValueError, SyntaxError, AttributeError, TypeError, RecursionError, MemoryError) as error:
        raise CallError(f"the call is not a list of Python calls with named arguments: {reason(error)}") from error
    return read


def read_braces(text: str, _: Schemas) -> list[Call]:
    """Reads call:add{a:1,b:<|"|>text<|"|>}: Gemma 4."""
    name, brace, rest = text.strip().removeprefix("call:").partition("{")
    parts = (brace + rest).split('<|"|>')
    parts[::2] = [re.sub(r'([{,]\s*)([^\s{},:"\[\]]+):', r'\1"\2":', part) for part in parts[::2]]
    parts[1::2] = map(json.dumps, parts[1::2])
    try:
        arguments = json.loads("".join(parts), parse_float=finite_number, parse_constant=finite_number)
    except (ValueError, RecursionError) as error:
        raise CallError(f"the arguments of the call cannot be read: {reason(error)}") from error
    return [(name, arguments)]


FORMS = {  # in the order in which they are tried on what a chat template writes
    "functions": Form("<tool_call>", "</tool_call>", read_functions),
    "pairs": Form("<tool_call>", "</tool_call>", read_pairs),
    "qwen": Form("<tool_call>", "</tool_call>", read_json),
    "lfm": Form("<|tool_call_start|>", "<|tool_call_end|>", read_python),
    "gemma": Form("<|tool_call>", "<tool_call|>", read_braces),
    "json": Form("", "", read_json),
}


def calls_as_json(form: Form, bodies: Iterable[str], schemas: Schemas) -> tuple[str, ...]:
    """Returns calls as `parse_call` reads them; a call that cannot be read stays as it is."""
    written = []
    for body in bodies:
        try:
            calls = form.read(body, schemas) if form.read is not read_json and len(body) <= MAX_CALL else []
        except CallError:
            calls = []
        texts = [json.dumps({"name": name, "arguments": given}, ensure_ascii=False) for name, given in calls]
        written += texts or [body]
    return tuple(written)


def parse_call(text: str) -> tuple[str, dict[str, JSON]]:
    """Returns the name and the arguments of a call in JSON, as in {"name": "add", "arguments": {"a": 1}}.

    The arguments may stand under any of ARGUMENTS, and the whole call under "function".
    Other keys are not read. Raises: CallError for anything else, and for numbers that are not finite.
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
