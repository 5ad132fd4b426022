"""Requests in OpenAI's form as types, and the choices of their answers.

A request is done as it asks, or rejected by name with status 400; fields that change no token are dropped. Sources:
platform.openai.com/docs/api-reference; vLLM for return_token_ids, top_k, min_p and /inference/v1/generate.
"""

import contextlib
import json
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import from_json
from tokenizers.decoders import DecodeStream

from envs.base import Dialect, Reply
from envs.data.rows import JSON
from envs.tools.calls import CallError, parse_call
from models.messages import readable
from models.tokenizer import TURN, Tokenizer
from utils.settings.errors import UserError

MAX_BYTES = 2 * 10**6  # of a request: encoding that many characters takes seconds
MAX_STOPS, MAX_TOP = 16, 20
THINK = "<think>", "</think>"
LABELS = (  # fields that change no token
    "model", "user", "store", "service_tier", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention",
    "safety_identifier", "extra_headers", "priority", "cache_salt", "request_id", "provider_specific_fields",
    "annotations", "refusal",
)  # fmt: skip
NEUTRAL = {  # fields that may only have the value that changes nothing
    "frequency_penalty": 0, "presence_penalty": 0, "repetition_penalty": 1, "length_penalty": 1, "logit_bias": {},
    "response_format": {"type": "text"}, "best_of": 1, "suffix": "", "use_beam_search": False, "ignore_eos": False,
    "skip_special_tokens": True, "modalities": ["text"], "min_tokens": 0, "strict": False,
}  # fmt: skip
Message = dict[str, Any]  # as chat templates read it


class BadRequest(ValueError):
    """Raised for a request that cannot be answered; its text goes to the client, with the `field` that is wrong."""

    def __init__(self, text: str, field: str = "", status: int = 400):
        super().__init__(text)
        self.field, self.status = field, status


class Sampled(NamedTuple):
    """A sampled reply, or the beginning of one; log-probabilities are of the distribution that was sampled."""

    reply: Reply
    ids: Sequence[int] = ()
    logprobs: Sequence[float] = ()  # nats
    is_truncated: bool = False
    top: Sequence[Mapping[int, float]] = ()  # candidates of each token with their log-probabilities
    prompt_ids: Sequence[int] = ()  # all tokens before it
    is_thinking: bool = False  # the prompt ends in a think block
    is_whole: bool = True  # False: it was cut within a token, so that no row holds what the client got


class Strict(BaseModel):
    """Fields of a request; null and labels are dropped, and any other field is rejected."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    labels: ClassVar[Sequence[str]] = LABELS

    @model_validator(mode="before")
    @classmethod
    def without_labels(cls, given: JSON) -> JSON:
        if not isinstance(given, dict):
            return given
        left = {key: x for key, x in given.items() if x is not None and key not in cls.labels}
        for key in (left.keys() & NEUTRAL.keys()) - cls.model_fields.keys():
            if left.pop(key) != NEUTRAL[key]:
                raise BadRequest(f"{key} is {shown(given[key])}, and only {shown(NEUTRAL[key])} is supported", key)
        return left

    @classmethod
    def read(cls, body: bytes) -> Self:
        """Returns a request. Raises: BadRequest, which names the first field that is wrong."""
        if len(body) > MAX_BYTES:
            raise BadRequest(f"the request has {len(body):,} bytes: shorten it to {MAX_BYTES:,}")
        try:
            return cls.model_validate(from_json(body, allow_inf_nan=False))
        except ValidationError as error:
            first = error.errors()[0]
            loc, found = [*map(str, first["loc"])], first.get("ctx", {}).get("error")
            field, reason = loc[0] if loc else "", f"is {shown(first['input'])}: {first['msg']}"
            if isinstance(found, BadRequest):
                field, reason = field or found.field, str(found)
            elif first["type"] == "extra_forbidden":
                reason = "is not supported: remove it"
            raise BadRequest(f"{'.'.join(loc)} {reason}".strip(), field) from error
        except ValueError as error:
            raise BadRequest(f"the request is not valid JSON ({error})"[:200]) from error


def listed(value: JSON) -> JSON:
    """Returns a text, or the ids of a prompt, as a list of one."""
    is_one = isinstance(value, str) or isinstance(value, list) and value and isinstance(value[0], int)
    return [value] if is_one else value


class Part(Strict):
    type: Literal["text"]
    text: str


class ChatMessage(Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] = ""
    reasoning_content: str = Field("", validation_alias=AliasChoices("reasoning_content", "reasoning"))
    tool_calls: list[dict[str, Any]] = []
    tool_call_id: str = ""
    name: str = ""

    def for_template(self, joint: str) -> Message:
        """Returns the message as chat templates read it, its parts of text joined by `joint`. Raises: BadRequest."""
        message = self.model_dump(exclude_unset=True)
        message["role"] = "system" if self.role == "developer" else self.role
        message["content"] = self.content if isinstance(self.content, str) else joint.join(x.text for x in self.content)
        if self.role == "assistant":  # the row of a reply holds no name
            message.pop("name", None)
        try:
            message = readable({key: x for key, x in message.items() if x or key == "content"})
            for call in message.get("tool_calls", []):
                call |= {"type": "function"}
                call.pop("index", None)
            json.dumps(message, ensure_ascii=False).encode()  # raises for half of a surrogate pair
            return message
        except (UserError, ValueError) as error:
            raise BadRequest(f"messages cannot be read: {error}", "messages") from error


class Function(Strict):
    name: str
    description: str = ""
    parameters: dict[str, Any] = {}
    returns: dict[str, Any] = Field({}, alias="return")  # as transformers' get_json_schema


class Tool(Strict):
    type: Literal["function"]
    function: Function


class Request(Strict):
    """Fields that all requests share."""

    object: ClassVar[str]  # that answers it
    chunk_object: ClassVar[str]  # of its stream
    id_name: ClassVar[str] = "id"  # field of the answer's number
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0, lt=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    stop: Annotated[
        list[Annotated[str, Field(min_length=1)]], Field(max_length=MAX_STOPS), BeforeValidator(listed)
    ] = []
    n: int = Field(1, ge=1, le=128)
    stop_token_ids: list[int] = []
    metadata: dict[str, str] = {}
    max_tokens: int | None = Field(None, ge=1)
    stream: bool = False
    stream_options: dict[Literal["include_usage", "include_obfuscation"], bool] = {}
    return_token_ids: bool = False

    @property
    def limit(self) -> int | None:
        """The most tokens of a reply."""
        return self.max_tokens

    def before_stop(self, text: str) -> str:
        """Returns a reply without its stop text, as OpenAI's endpoint returns it."""
        for stop in self.stop:
            text = text.partition(stop)[0]
        return text


class ChatRequest(Request):
    """A request of /v1/chat/completions."""

    object, chunk_object = "chat.completion", "chat.completion.chunk"
    echo: ClassVar[bool] = False
    prompt: ClassVar[Sequence] = ()
    free: ClassVar[Sequence[str]] = (  # fields that may change while a conversation continues in its row
        *Request.model_fields, "messages", "max_completion_tokens", "logprobs", "top_logprobs", "parallel_tool_calls",
    )  # fmt: skip
    messages: list[ChatMessage] = Field(min_length=1)
    tools: list[Tool] = []
    tool_choice: Literal["auto", "none", "required"] = "auto"
    parallel_tool_calls: bool = True
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP)
    chat_template_kwargs: dict[Literal["enable_thinking"], bool] = {}

    @model_validator(mode="after")
    def is_consistent(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise BadRequest("top_logprobs is given without logprobs: true", "top_logprobs")
        if self.tool_choice == "required" and not self.tools:
            raise BadRequest("tool_choice is required, and there are no tools", "tool_choice")
        if self.messages[-1].role == "assistant":
            raise BadRequest("messages ends with a reply of the assistant: add a message that it answers", "messages")
        return self

    @property
    def limit(self) -> int | None:
        return min(filter(None, (self.max_tokens, self.max_completion_tokens)), default=None)

    @property
    def num_top(self) -> int:
        """Candidates of each token that are returned; -1: no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else -1

    @property
    def schemas(self) -> Sequence[dict[str, JSON]]:
        """The tools that the template announces, as they were sent."""
        tools = () if self.tool_choice == "none" else self.tools
        return [tool.model_dump(exclude_unset=True, by_alias=True) for tool in tools]

    @cached_property
    def fixed(self) -> str:
        """The fields that a conversation cannot change in its row."""
        return self.model_dump_json(exclude={*self.free})


class CompletionRequest(Request):
    """A request of /v1/completions."""

    object = chunk_object = "text_completion"
    messages: ClassVar[Sequence] = ()
    schemas: ClassVar[Sequence[Mapping]] = ()
    parallel_tool_calls: ClassVar[bool] = True
    fixed: ClassVar[str] = ""
    prompt: Annotated[
        list[Annotated[str | list[int], Field(min_length=1)]], Field(min_length=1), BeforeValidator(listed)
    ]
    max_tokens: int | None = Field(16, ge=0)
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP)
    echo: bool = False

    @property
    def num_top(self) -> int:
        return -1 if self.logprobs is None else self.logprobs


class GenerateRequest(CompletionRequest):
    """A request of vLLM's /inference/v1/generate, its sampling_params beside the prompt: ids in, ids out."""

    labels = (*LABELS, "skip_special_tokens", "spaces_between_special_tokens", "detokenize")  # no text is returned
    object, id_name = "generation", "request_id"
    echo: Literal[False] = False
    stream: Literal[False] = False
    prompt: list[list[int]] = Field(alias="token_ids")
    return_token_ids: Literal[True] = True

    @model_validator(mode="before")
    @classmethod
    def flat(cls, given: JSON) -> JSON:
        if not isinstance(given, dict):
            return given
        params = given.get("sampling_params") or {}
        if not isinstance(params, dict):
            raise BadRequest("sampling_params is not an object", "sampling_params")
        rest = {key: x for key, x in given.items() if key != "sampling_params"}
        return params | rest | {"token_ids": [given["token_ids"]] if given.get("token_ids") else None}


@lru_cache(maxsize=64)
def joint_of_parts(tokenizer: Tokenizer, _template: str) -> str:
    """Returns what the chat template writes between two texts of a message; a new line if it takes one text only."""
    parts = [{"type": "text", "text": TURN + number} for number in "12"]
    with contextlib.suppress(UserError):
        _, is_shown, rest = tokenizer.render([{"role": "user", "content": parts}], None).partition(TURN + "1")
        between, is_next, _ = rest.partition(TURN + "2")
        if is_shown and is_next and "'" not in between and '"' not in between:
            return between
    return "\n"


def shown(value: object) -> str:
    """Returns a value in at most 80 characters."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 80 else text[:77] + "..."


PATHS = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/inference/v1/generate": GenerateRequest,
}

# Answers


def choice_of(
    request: Request, sampled: Sampled, tokenizer: Tokenizer, dialect: Dialect, is_partial: bool = False
) -> dict[str, JSON]:
    """Returns a choice of an answer without its index, or the beginning of one."""
    choice, has_logprobs = {}, request.num_top >= 0 and not is_partial
    texts = texts_of(tokenizer, sampled.ids) if has_logprobs else []
    if request.object == "text_completion":
        text = request.before_stop(sampled.reply.text)
        choice["text"] = settled(text, request.stop) if is_partial else text
        if request.echo:
            choice["text"] = tokenizer.decode(sampled.prompt_ids) + choice["text"]
            texts = [*texts_of(tokenizer, sampled.prompt_ids), *texts] if has_logprobs else []
        logprobs = text_logprobs(request, sampled, texts, tokenizer) if has_logprobs else None
    else:
        if request.object == "chat.completion":
            choice["message"] = reply_message(request, sampled, dialect, is_partial)
        logprobs = chat_logprobs(sampled, request.num_top, texts, tokenizer) if has_logprobs else None
    has_calls = bool(choice.get("message", {}).get("tool_calls"))
    reason = "length" if sampled.is_truncated else "tool_calls" if has_calls else "stop"
    choice |= {"logprobs": logprobs, "finish_reason": None if is_partial else reason}
    if request.return_token_ids and not is_partial:
        choice |= {"token_ids": list(sampled.ids), "prompt_token_ids": list(sampled.prompt_ids)}
    return choice


def reply_message(request: ChatRequest, sampled: Sampled, dialect: Dialect, is_partial: bool = False) -> Message:
    """Returns a reply as a message: thoughts, text, and calls of tools.

    If one of its calls cannot be read, or no tool was announced, the whole reply is its text. A reply that goes on
    (`is_partial`) has no calls yet, and none of the text that may belong to one, to a stop text or to a think block.
    """
    text, thoughts, calls = request.before_stop(sampled.reply.text), "", []
    if is_partial:
        text = settled(text, [*THINK, *request.stop, *[dialect.opening or "{"] * bool(request.schemas)])
    if THINK[1] in text:
        thoughts, _, text = text.partition(THINK[1])
        text = text.lstrip("\n")
    elif sampled.is_thinking or text.lstrip().startswith(THINK[0]):
        thoughts, text = text, ""
    thoughts = thoughts.lstrip().removeprefix(THINK[0]).strip("\n")
    if request.schemas and sampled.reply.calls:
        try:
            calls = [] if is_partial else [parse_call(call) for call in sampled.reply.calls]
        except CallError:
            calls = []
        if calls or is_partial:
            text = text.partition(dialect.opening)[0].rstrip() if dialect.opening else ""
    message = {"role": "assistant", "content": text} | ({"reasoning_content": thoughts} if thoughts else {})
    if calls:
        message["content"] = text or None  # as OpenAI's endpoint
        number = len(sampled.prompt_ids)  # makes ids of a conversation differ; Mistral's template wants 9 characters
        message["tool_calls"] = [
            {
                "id": f"c{number % 10**6:06d}{i % 100:02d}",
                "type": "function",
                "function": {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)},
            }
            for i, (name, arguments) in enumerate(calls[: None if request.parallel_tool_calls else 1])
        ]
    return message


def settled(text: str, signs: Sequence[str]) -> str:
    """Returns a text without an end that may belong to a sign, to blanks before one, or to half a character."""
    text = text.rstrip("\ufffd")
    longest = max(map(len, signs), default=0)
    ends = range(max(0, len(text) - longest), len(text))
    start = next((i for i in ends if any(sign.startswith(text[i:]) for sign in signs)), len(text))
    return text[:start].rstrip()


def usage(replies: Sequence[Sampled], num_choices: int) -> dict[str, int]:
    """Returns the tokens of an answer; each prompt counts once, whatever its number of choices."""
    num_prompt = sum(len(reply.prompt_ids) for reply in replies[::num_choices])
    num_reply = sum(len(reply.ids) for reply in replies)
    return {"prompt_tokens": num_prompt, "completion_tokens": num_reply, "total_tokens": num_prompt + num_reply}


def texts_of(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """Returns the text of each token; together they make the text. A character is of the token that completes it."""
    stream = DecodeStream(skip_special_tokens=True)
    return [stream.step(tokenizer.hf.backend_tokenizer, i) or "" for i in ids]


def name_of(tokenizer: Tokenizer, number: int) -> str:
    """Returns the text of a token alone, or its name in the vocabulary if that is half a character."""
    text = tokenizer.hf.decode([number])
    return tokenizer.hf.convert_ids_to_tokens(number) or "" if not text or "\ufffd" in text else text


def chat_logprobs(sampled: Sampled, num_top: int, texts: Sequence[str], tokenizer: Tokenizer) -> dict[str, JSON]:
    """Returns each token with its log-probability, and its likeliest alternatives."""

    def entry(text: str, logprob: float) -> dict[str, JSON]:
        return {"token": text, "logprob": bounded(logprob), "bytes": list(text.encode())}

    tops = sampled.top or [{}] * len(sampled.ids)
    content = [
        entry(text, logprob) | {"top_logprobs": [entry(name_of(tokenizer, i), x) for i, x in likeliest(top, num_top)]}
        for text, logprob, top in zip(texts, sampled.logprobs, tops, strict=True)
    ]
    return {"content": content, "refusal": None}


def text_logprobs(
    request: CompletionRequest, sampled: Sampled, texts: Sequence[str], tokenizer: Tokenizer
) -> dict[str, JSON]:
    """Returns the log-probabilities of a completion, whose tokens are `texts`, those of the prompt for an `echo`."""
    ids = [*sampled.prompt_ids, *sampled.ids] if request.echo else sampled.ids
    logprobs, tops = [*map(bounded, sampled.logprobs)], []
    for i, logprob, top in zip(ids, logprobs, sampled.top, strict=False):
        pairs = {i: logprob} | dict(likeliest(top, request.num_top))  # as OpenAI: the token itself, too
        tops.append({name_of(tokenizer, j): bounded(x) for j, x in pairs.items()})
    if request.echo:
        logprobs[:1], tops[:1] = [None], [None]
    offsets = [sum(map(len, texts[:i])) for i in range(len(texts))]
    return {"tokens": texts, "token_logprobs": logprobs, "top_logprobs": tops or None, "text_offset": offsets}


def likeliest(top: Mapping[int, float], number: int) -> list[tuple[int, float]]:
    """Returns the likeliest candidates of a token that can be sampled at all."""
    return sorted([item for item in top.items() if item[1] > -float("inf")], key=lambda item: -item[1])[:number]


def bounded(logprob: float) -> float:
    """Returns a log-probability that is finite and at most 0, as clients check."""
    return min(0.0, max(-1e4, float(logprob)))


def changes(before: Mapping[str, JSON], choice: Mapping[str, JSON]) -> dict[str, JSON]:
    """Returns a choice of a stream: what it has more than the choice before; empty if that is nothing."""
    rest = {key: x for key, x in choice.items() if key not in ("message", "text")}
    if "text" in choice:
        text = choice["text"][len(before.get("text", "")) :]
        return rest | {"text": text} if text or choice["finish_reason"] else {}
    old, message = before.get("message", {}), choice["message"]
    delta = {key: (message.get(key) or "")[len(old.get(key) or "") :] for key in ("reasoning_content", "content")}
    delta = {key: x for key, x in delta.items() if x}
    if calls := message.get("tool_calls"):
        delta["tool_calls"] = [call | {"index": i} for i, call in enumerate(calls)]
    role = {} if old else {"role": "assistant"}
    return rest | {"delta": role | delta} if delta or choice["finish_reason"] else {}
