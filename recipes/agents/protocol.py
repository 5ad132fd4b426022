"""Chat requests in OpenAI's form, and answers to them: JSON in, JSON out.

What a request asks for is done, or refused by name with status 400; nothing is ignored but labels, which change no
token. Sources: platform.openai.com/docs/api-reference/chat; vLLM for return_token_ids, top_k, min_p.
"""

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

from envs.base import Dialect, Reply
from envs.data.messages import Message
from envs.data.rows import JSON
from envs.tools.episode import CallError, parse_call

ROLES = ("system", "user", "assistant", "tool")
LABELS = (
    "model", "user", "metadata", "store", "stream_options", "parallel_tool_calls", "service_tier", "prompt_cache_key",
    "safety_identifier", "extra_headers", "priority", "cache_salt",
)  # fmt: skip
NEUTRAL = {  # what a request may ask for only by the value that changes nothing
    "frequency_penalty": 0, "presence_penalty": 0, "repetition_penalty": 1, "length_penalty": 1, "logit_bias": {},
    "response_format": {"type": "text"}, "best_of": 1, "suffix": "", "use_beam_search": False, "ignore_eos": False,
    "skip_special_tokens": True, "modalities": ["text"], "min_tokens": 0, "n": 1,
}  # fmt: skip
OF_MESSAGES = ("provider_specific_fields", "annotations", "refusal", "index")  # labels that libraries leave there
MAX_STOPS, MAX_TOP = 16, 20
MAX_CHARS = 10**6  # characters of a request's messages; encoding 300,000 takes a second
THINK = "<think>", "</think>"


class BadRequest(ValueError):
    """Raised for a request that cannot be answered; its text goes to the client."""


class Sampling(NamedTuple):
    """The distribution that a request names; None: the server's."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None


@dataclass(frozen=True)
class ChatRequest:
    """What a request for a reply asks for."""

    messages: tuple[Message, ...] = ()
    tools: tuple[Mapping[str, JSON], ...] = ()
    prompts: tuple[str | tuple[int, ...], ...] = ()  # of a completion without messages
    sampling: Sampling = Sampling()
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    n: int = 1
    seed: int | None = None
    top_logprobs: int = -1  # candidates beside each token; -1: no log-probabilities
    echo: bool = False
    returns_ids: bool = False
    thinking: bool | None = None  # None: the template's default


class Sampled(NamedTuple):
    """A sampled reply: its text and calls, its tokens, and their log-probabilities as they were sampled."""

    reply: Reply | None  # None: a text that was not sampled
    ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()  # nats, at most 0
    is_truncated: bool = False
    top: tuple[Mapping[int, float], ...] = ()  # candidates of each token with their log-probabilities
    prompt_ids: tuple[int, ...] = ()  # all tokens before it


class RequestFields:
    """The fields of a request, each read once; what is left over is refused."""

    def __init__(self, body: JSON):
        if not isinstance(body, dict):
            raise BadRequest("the request is no JSON object")
        self.left = {name: value for name, value in body.items() if value is not None}

    def take(self, name: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        """Returns a field. Raises: BadRequest for a value of another type."""
        if name not in self.left:
            return default
        value = self.left.pop(name)
        is_boolean = isinstance(value, bool) and kind is not bool
        if is_boolean or not isinstance(value, kind):
            raise BadRequest(f"{name} is {shown(value)}, of another type than it must have")
        return value

    def number(self, name: str, low: float, high: float = math.inf) -> float | None:
        """Returns a number from `low` to `high`. Raises: BadRequest for any other."""
        value = self.take(name, (int, float))
        if value is not None and not low <= value <= high:
            raise BadRequest(f"{name} is {shown(value)}: give a number from {low:g} to {high:g}")
        return value

    def whole(self, name: str, low: int, high: float = math.inf) -> int | None:
        """Returns a whole number from `low` to `high`. Raises: BadRequest for any other."""
        value = self.number(name, low, high)
        if value is not None and value != int(value):
            raise BadRequest(f"{name} is {shown(value)}: give a whole number")
        return None if value is None else int(value)

    def end(self) -> None:
        """Raises BadRequest for a field that is not read, unless it is a label, or its value changes nothing."""
        for name, value in self.left.items():
            if name in LABELS:
                continue
            if name not in NEUTRAL:
                raise BadRequest(f"{name} is not supported: leave it out")
            if value != NEUTRAL[name]:
                raise BadRequest(f"{name} is {shown(value)}, and only {shown(NEUTRAL[name])} is supported")


def shown(value: JSON) -> str:
    """Returns a value in at most 80 characters."""
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."


def read_json(body: bytes) -> JSON:
    """Returns the JSON of a request. Raises: BadRequest for what is none, and for numbers that are not finite."""
    try:
        return json.loads(body, parse_constant=refuse_constant)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the request is no JSON ({error})"[:200]) from error


def refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def read_chat(body: JSON) -> ChatRequest:
    """Returns the request of a chat completion. Raises: BadRequest."""
    fields = RequestFields(body)
    said = fields.take("messages", list, [])
    if not said:
        raise BadRequest("messages is empty")
    messages = tuple(map(read_message, said))
    if sum(len(json.dumps(message)) for message in messages) > MAX_CHARS:
        raise BadRequest(f"the messages have more than {MAX_CHARS:,} characters")
    tools = tuple(map(read_tool, fields.take("tools", list, [])))
    choice = fields.take("tool_choice", (str, dict), "auto")
    if choice not in ("auto", "none", "required"):
        raise BadRequest(f"tool_choice is {shown(choice)}: no call can be forced, so give auto or none")
    wants_logprobs = fields.take("logprobs", bool, False)
    top = fields.whole("top_logprobs", 0, MAX_TOP)
    if top is not None and not wants_logprobs:
        raise BadRequest("top_logprobs is given without logprobs: true")
    limits = [fields.whole(name, 1) for name in ("max_tokens", "max_completion_tokens")]
    template = fields.take("chat_template_kwargs", dict, {})
    if unknown := [name for name in template if name != "enable_thinking"]:
        raise BadRequest(f"chat_template_kwargs has {shown(unknown[0])}, and only enable_thinking is supported")
    return ChatRequest(
        messages=messages,
        tools=() if choice == "none" else tools,
        max_tokens=min((limit for limit in limits if limit is not None), default=None),
        top_logprobs=(top or 0) if wants_logprobs else -1,
        thinking=template.get("enable_thinking"),
        **read_common(fields),
    )


def read_completion(body: JSON) -> ChatRequest:
    """Returns the request of a completion of texts or ids. Raises: BadRequest."""
    fields = RequestFields(body)
    prompt = fields.take("prompt", (str, list))
    if prompt in (None, []):
        raise BadRequest("prompt is empty")
    if isinstance(prompt, str) or not isinstance(prompt[0], str | list):
        prompt = [prompt]
    prompts = tuple(each if isinstance(each, str) else read_ids(each) for each in prompt)
    top = fields.whole("logprobs", 0, MAX_TOP)
    return ChatRequest(
        prompts=prompts,
        max_tokens=fields.whole("max_tokens", 0),
        top_logprobs=-1 if top is None else top,
        echo=fields.take("echo", bool, False),
        **read_common(fields),
    )


def read_generate(body: JSON) -> ChatRequest:
    """Returns the request of `/inference/v1/generate`: ids in, ids out. Raises: BadRequest."""
    fields = RequestFields(body)
    ids = read_ids(fields.take("token_ids", list, []))
    inner = RequestFields(fields.take("sampling_params", dict, {}))
    fields.end()
    top = inner.whole("logprobs", 0, MAX_TOP)
    inner.take("stop_token_ids", list)  # those of the model end every reply
    for name in ("skip_special_tokens", "spaces_between_special_tokens", "detokenize"):
        inner.take(name, bool)  # no text is returned
    return ChatRequest(
        prompts=(ids,),
        max_tokens=inner.whole("max_tokens", 1),
        top_logprobs=-1 if top is None else top,
        **read_common(inner) | {"returns_ids": True},
    )


def read_common(fields: RequestFields) -> dict[str, Any]:
    """Returns the fields that all requests share. Raises: BadRequest, also for a field that no request has."""
    sampling = Sampling(
        temperature=fields.number("temperature", 0, 100),
        top_p=fields.number("top_p", 0, 1),
        top_k=fields.whole("top_k", -1),
        min_p=fields.number("min_p", 0, 1),
    )
    if sampling.top_p == 0:
        raise BadRequest("top_p is 0: give a number above 0")
    stop = fields.take("stop", (str, list), [])
    stop = [stop] if isinstance(stop, str) else stop
    if len(stop) > MAX_STOPS or not all(isinstance(text, str) and text for text in stop):
        raise BadRequest(f"stop is {shown(stop)}: give at most {MAX_STOPS} texts")
    common = dict(
        sampling=sampling,
        stop=tuple(stop),
        n=fields.whole("n", 1, 128) or 1,
        seed=fields.whole("seed", -(2**63), 2**64),
        returns_ids=fields.take("return_token_ids", bool, False),
    )
    fields.take("stream", bool)  # the server reads it
    fields.end()
    return common


def read_ids(values: JSON) -> tuple[int, ...]:
    """Returns token ids. Raises: BadRequest for anything else."""
    if not (isinstance(values, list) and values and all(type(i) is int and 0 <= i < 2**31 for i in values)):
        raise BadRequest(f"{shown(values)} are no token ids")
    return tuple(values)


def read_tool(tool: JSON) -> Mapping[str, JSON]:
    """Returns a tool that is announced. Raises: BadRequest for one without a name."""
    match tool:
        case {"type": "function", "function": {"name": str()}}:
            return tool
    raise BadRequest(f'tools has {shown(tool)}: write {{"type": "function", "function": {{"name": ...}}}}')


def read_message(message: JSON) -> Message:
    """Returns a message as chat templates read it: text, in one of ROLES. Raises: BadRequest."""
    if not isinstance(message, dict):
        raise BadRequest(f"messages has {shown(message)}, which is no object")
    given = {key: value for key, value in message.items() if value not in (None, [], {})}
    role = given.pop("role", None)
    role = "system" if role == "developer" else role
    if role not in ROLES:
        raise BadRequest(f"a message has the role {shown(role)}: give one of {', '.join(ROLES)}")
    read = {"role": role, "content": read_content(given.pop("content", ""))}
    thoughts = [given.pop(name) for name in ("reasoning_content", "reasoning") if name in given]
    if thoughts and role == "assistant":
        read["reasoning_content"] = read_content(thoughts[0])
    if role == "assistant" and "tool_calls" in given:
        read["tool_calls"] = [read_call(call) for call in read_list(given.pop("tool_calls"))]
    given = {key: value for key, value in given.items() if key not in OF_MESSAGES}
    for key in ("tool_call_id", "name"):
        if key in given:
            read[key] = read_content(given.pop(key))
    if given:
        raise BadRequest(f"a message has {shown(next(iter(given)))}, which is not supported: leave it out")
    return read


def read_list(value: JSON) -> list[JSON]:
    if not isinstance(value, list):
        raise BadRequest(f"tool_calls is {shown(value)}, which is no list")
    return value


def read_content(content: JSON) -> str:
    """Returns the text of a message, which may be in parts. Raises: BadRequest for other parts than text."""
    if isinstance(content, str):
        return content.encode(errors="replace").decode()  # no tokenizer takes halves of surrogate pairs
    texts = []
    for part in content if isinstance(content, list) else [content]:
        match part:
            case {"type": "text", "text": str(text)}:
                texts.append(text)
            case _:
                raise BadRequest(f"a message has the content {shown(part)}: only text is supported")
    return read_content("\n".join(texts))


def read_call(call: JSON) -> dict[str, JSON]:
    """Returns a call of an earlier reply, its arguments as an object. Raises: BadRequest."""
    match call:
        case {"function": {"name": str(name), "arguments": str(text)}}:
            arguments = read_json(text.encode(errors="replace") or b"{}")
        case {"function": {"name": str(name), "arguments": dict(arguments)}}:
            pass
        case _:
            raise BadRequest(f"tool_calls has {shown(call)}, which is no call of a function")
    if not isinstance(arguments, dict):
        raise BadRequest(f"tool_calls has the arguments {shown(arguments)}, which are no object")
    function = {"name": name, "arguments": arguments}
    return {"id": read_content(call.get("id") or ""), "type": "function", "function": function}


def reply_message(reply: Reply, dialect: Dialect, number: int, has_tools: bool) -> Message:
    """Returns a reply as a message: thoughts, text, and calls of tools. `number` makes the ids of calls differ.

    If one of its calls is not JSON with a name, or no tool was announced, the whole reply is its text.
    """
    thoughts, text = "", reply.text
    if THINK[1] in text:
        thoughts, _, text = text.partition(THINK[1])
        thoughts, text = thoughts.removeprefix(THINK[0]).strip("\n"), text.lstrip("\n")
    message = {"role": "assistant", "content": text}
    if thoughts:
        message["reasoning_content"] = thoughts
    try:
        parsed = [parse_call(call) for call in reply.calls] if has_tools else []
    except CallError:
        parsed = []
    if parsed:
        message["content"] = text.partition(dialect.opening)[0].rstrip() if dialect.opening else ""
        message["tool_calls"] = [
            {
                "id": f"call_{number}_{i}",
                "type": "function",
                "function": {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)},
            }
            for i, (name, arguments) in enumerate(parsed)
        ]
    return message


def chat_answer(
    request: ChatRequest, said: Sequence[Message], replies: Sequence[Sampled], model: str, number: str
) -> dict[str, JSON]:
    """Returns the answer to a chat: the messages `said`, one for each sampled reply."""
    choices = []
    for index, (message, sampled) in enumerate(zip(said, replies, strict=True)):
        calls = message.get("tool_calls")
        reason = "length" if sampled.is_truncated else "tool_calls" if calls else "stop"
        content = message["content"] or (None if calls else "")
        choice = {"index": index, "message": message | {"content": content}, "finish_reason": reason, "logprobs": None}
        if request.top_logprobs >= 0:
            choice["logprobs"] = {"content": token_logprobs(sampled, request.top_logprobs)}
        if request.returns_ids:
            choice["token_ids"] = list(sampled.ids)
        choices.append(choice)
    ids = {"prompt_token_ids": list(replies[0].prompt_ids)} if request.returns_ids else {}
    return {"object": "chat.completion", **head(replies, model, number), **ids, "choices": choices}


def model_list(name: str, context: int) -> dict[str, JSON]:
    """Returns the answer of `/v1/models`: one model, with the most tokens of a conversation."""
    card = {"id": name, "object": "model", "owned_by": "lmpo", "max_model_len": context}
    return {"object": "list", "data": [card]}


def completion_answer(
    request: ChatRequest,
    texts: Sequence[str],
    replies: Sequence[Sampled],
    token_text: Callable[[int], str],
    model: str,
    number: str,
) -> dict[str, JSON]:
    """Returns the answer to a completion: the `texts`, which begin with the prompt for an `echo`."""
    choices = []
    for index, (text, sampled) in enumerate(zip(texts, replies, strict=True)):
        choice = {"index": index, "text": text, "finish_reason": "length" if sampled.is_truncated else "stop"}
        choice["logprobs"] = None
        if request.top_logprobs >= 0:
            ids = [*sampled.prompt_ids, *sampled.ids] if request.echo else sampled.ids
            tokens = [token_text(i) for i in ids]
            tops = [{token_text(i): bounded(x) for i, x in likeliest(top, request.top_logprobs)} for top in sampled.top]
            logprobs = [*map(bounded, sampled.logprobs)]
            if request.echo:
                logprobs[:1], tops[:1] = [None], [None]
            offsets = [*accumulate(map(len, tokens), initial=0)][:-1]
            choice["logprobs"] = {
                "tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops or None, "text_offset": offsets,
            }  # fmt: skip
        if request.returns_ids:
            choice |= {"token_ids": list(sampled.ids), "prompt_token_ids": list(sampled.prompt_ids)}
        choices.append(choice)
    return {"object": "text_completion", **head(replies, model, number), "choices": choices}


def generate_answer(request: ChatRequest, replies: Sequence[Sampled], number: str) -> dict[str, JSON]:
    """Returns the answer to `/inference/v1/generate`."""
    choices = []
    for index, sampled in enumerate(replies):
        choice = {"index": index, "token_ids": list(sampled.ids)}
        choice["finish_reason"] = "length" if sampled.is_truncated else "stop"
        if request.top_logprobs >= 0:
            choice["logprobs"] = {"content": token_logprobs(sampled, request.top_logprobs)}
        choices.append(choice)
    return {"request_id": number, "prompt_token_ids": list(replies[0].prompt_ids), "choices": choices}


def likeliest(top: Mapping[int, float], number: int) -> list[tuple[int, float]]:
    """Returns the likeliest candidates of a token."""
    return sorted(top.items(), key=lambda item: -item[1])[:number]


def head(replies: Sequence[Sampled], model: str, number: str) -> dict[str, JSON]:
    """Returns the fields of an answer beside its choices."""
    num_prompt, num_reply = len(replies[0].prompt_ids), sum(len(reply.ids) for reply in replies)
    usage = {"prompt_tokens": num_prompt, "completion_tokens": num_reply, "total_tokens": num_prompt + num_reply}
    return {"id": number, "created": int(time.time()), "model": model, "usage": usage}


def token_logprobs(sampled: Sampled, num_top: int) -> list[dict[str, JSON]]:
    """Returns each token by its id, with its log-probability and those of the likeliest ones."""
    rows = []
    for place, (token, logprob) in enumerate(zip(sampled.ids, sampled.logprobs, strict=True)):
        top = sampled.top[place] if sampled.top else {}
        found = likeliest(top, num_top)
        tops = [{"token": f"token_id:{i}", "logprob": bounded(x), "bytes": None} for i, x in found]
        rows.append({"token": f"token_id:{token}", "logprob": bounded(logprob), "bytes": None, "top_logprobs": tops})
    return rows


def bounded(logprob: float) -> float:
    """Returns a log-probability that is finite and at most 0, as clients check."""
    return min(0.0, max(-1e4, float(logprob)))


def chunks(answer: dict[str, JSON]) -> list[str]:
    """Returns an answer as the events of a stream: one chunk, and the end."""
    choices = []
    for choice in answer["choices"]:
        calls = [call | {"index": i} for i, call in enumerate(choice["message"].get("tool_calls", []))]
        delta = choice["message"] | ({"tool_calls": calls} if calls else {})
        choices.append({key: value for key, value in choice.items() if key != "message"} | {"delta": delta})
    chunk = answer | {"object": "chat.completion.chunk", "choices": choices}
    return [f"data: {json.dumps(chunk)}\n\n", "data: [DONE]\n\n"]


def error_body(text: str, kind: str = "invalid_request_error", code: str | None = None) -> dict[str, JSON]:
    """Returns the body of an error."""
    return {"error": {"message": text, "type": kind, "param": None, "code": code}}
