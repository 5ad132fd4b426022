"""Requests in OpenAI's form as types, and answers as the openai package's own types.

What a request asks for is done, or refused by name with status 400; fields that change no token are dropped. Sources:
platform.openai.com/docs/api-reference; vLLM for return_token_ids, top_k, min_p and /inference/v1/generate.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from envs.base import Dialect, Reply
from envs.data.rows import JSON
from envs.tools.calls import CallError, parse_call
from recipes.agents.server import BadRequest, read_json

MAX_STOPS, MAX_TOP = 16, 20
MAX_CHARS = 10**6  # characters of a request; encoding 300,000 takes a second
THINK = "<think>", "</think>"
LABELS = (  # fields that change no token
    "model", "user", "store", "service_tier", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention",
    "safety_identifier", "extra_headers", "priority", "cache_salt", "request_id",
)  # fmt: skip
NEUTRAL = {  # fields that may only have the value that changes nothing
    "frequency_penalty": 0, "presence_penalty": 0, "repetition_penalty": 1, "length_penalty": 1, "logit_bias": {},
    "response_format": {"type": "text"}, "best_of": 1, "suffix": "", "use_beam_search": False, "ignore_eos": False,
    "skip_special_tokens": True, "modalities": ["text"], "min_tokens": 0,
}  # fmt: skip
REFUSED = (  # the other fields of OpenAI's reference
    "audio", "function_call", "functions", "moderation", "prediction", "reasoning_effort", "verbosity",
    "web_search_options",
)  # fmt: skip
OF_MESSAGES = ("provider_specific_fields", "annotations", "index")  # labels that libraries leave there
Message = dict[str, Any]  # as chat templates read it


class Sampled(NamedTuple):
    """A sampled reply, or the beginning of one; log-probabilities are of the distribution that was sampled."""

    reply: Reply | None  # None: nothing was sampled
    ids: Sequence[int] = ()
    logprobs: Sequence[float] = ()  # nats
    is_truncated: bool = False
    top: Sequence[Mapping[int, float]] = ()  # candidates of each token with their log-probabilities
    prompt_ids: Sequence[int] = ()  # all tokens before it
    is_thinking: bool = False  # the prompt ends in a think block
    is_whole: bool = True  # False: it was cut within a token, so that no row holds what the client got


class Strict(BaseModel):
    """Fields of a request; null and labels are dropped, and what is left over is refused."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, ignored_types=(cached_property,))
    labels: ClassVar[Sequence[str]] = ()
    empty: ClassVar[Sequence[JSON]] = (None,)

    @model_validator(mode="before")
    @classmethod
    def without_labels(cls, given: JSON) -> JSON:
        if not isinstance(given, dict):
            return given
        left = {key: x for key, x in given.items() if key not in cls.labels and x not in cls.empty}
        for key in [key for key in left if key in NEUTRAL and key not in cls.model_fields]:
            if left.pop(key) != NEUTRAL[key]:
                raise BadRequest(f"{key} is {shown(given[key])}, and only {shown(NEUTRAL[key])} is supported", key)
        return left

    @classmethod
    def read(cls, body: JSON) -> Self:
        """Returns a request. Raises: BadRequest, which names the first field that is wrong."""
        if not isinstance(body, dict):
            raise BadRequest("the request is not a JSON object: send one")
        try:
            return cls.model_validate(body)
        except ValidationError as error:
            worst = max(error.errors(), key=lambda each: len(each["loc"]))  # of a union, what was read furthest
            if isinstance(found := worst.get("ctx", {}).get("error"), BadRequest):
                raise found from error
            path = [part for part in worst["loc"] if isinstance(part, int) or part.isidentifier()]
            name, reason = ".".join(map(str, path)), worst["msg"].partition("\n")[0]
            if worst["type"] == "extra_forbidden":
                raise BadRequest(f"{name} is not supported: leave it out", str(path[0])) from error
            raise BadRequest(f"{name} is {shown(worst['input'])}: {reason}", str(path[0]) if path else "") from error


class Part(Strict):
    type: Literal["text"]
    text: str


class CalledFunction(Strict):
    name: str
    arguments: str | dict[str, Any]

    @model_validator(mode="after")
    def has_object(self) -> Self:
        if not isinstance(self.values, dict):
            raise BadRequest(f"messages has arguments that are no object: {shown(self.arguments)}", "messages")
        return self

    @property
    def values(self) -> JSON:
        """The arguments as an object."""
        return self.arguments if isinstance(self.arguments, dict) else read_json(self.arguments.encode() or b"{}")


class Call(Strict):
    labels = ("index",)
    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction


class SentMessage(Strict):
    """A message as clients send it."""

    labels = OF_MESSAGES
    empty = (None, [], {})
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] = ""
    name: str = ""
    tool_call_id: str = ""
    tool_calls: list[Call] = []
    reasoning_content: str = ""
    reasoning: str = ""  # the same, as OpenRouter and newer vLLM name it

    @model_validator(mode="after")
    def has_the_fields_of_its_role(self) -> Self:
        for key, role in (("tool_calls", "assistant"), ("tool_call_id", "tool")):
            if getattr(self, key) and self.role != role:
                raise BadRequest(f"messages has {key} in a message of the role {self.role}: leave it out", "messages")
        return self

    def as_template(self, joint: str) -> Message:
        """Returns the message as chat templates read it, its parts joined by `joint`."""
        text = self.content if isinstance(self.content, str) else joint.join(part.text for part in self.content)
        read = {"role": "system" if self.role == "developer" else self.role, "content": text}
        if (thoughts := self.reasoning_content or self.reasoning) and self.role == "assistant":
            read["reasoning_content"] = thoughts
        if self.tool_calls:
            read["tool_calls"] = [
                {"id": x.id, "type": x.type, "function": {"name": x.function.name, "arguments": x.function.values}}
                for x in self.tool_calls
            ]
        return read | {key: getattr(self, key) for key in ("tool_call_id", "name") if getattr(self, key)}


class Function(Strict):
    name: str
    description: str = ""
    parameters: dict[str, Any] = {}
    strict: bool = False


class Tool(Strict):
    type: Literal["function"]
    function: Function


class StreamOptions(Strict):
    labels = ("include_obfuscation",)
    include_usage: bool = False


class TemplateOptions(Strict):
    enable_thinking: bool | None = None


class Request(Strict):
    """What all requests share; a reply is `limit` tokens long at most."""

    labels = LABELS
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0, lt=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    stop: (
        Annotated[str, Field(min_length=1)]
        | Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=MAX_STOPS)]
    ) = []
    n: int = Field(1, ge=1, le=128)
    stop_token_ids: list[int] = []
    metadata: dict[str, str] = {}

    @property
    def stops(self) -> Sequence[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop


class ChatRequest(Request):
    """A request of /v1/chat/completions."""

    free: ClassVar[Sequence[str]] = (  # fields that may change while a conversation continues in its row
        *Request.model_fields, "messages", "max_tokens", "max_completion_tokens", "logprobs", "top_logprobs", "stream",
        "stream_options", "return_token_ids", "parallel_tool_calls",
    )  # fmt: skip
    echo: ClassVar[bool] = False
    messages: list[SentMessage] = Field(min_length=1)
    tools: list[Tool] = []
    tool_choice: Literal["auto", "none", "required"] = "auto"
    parallel_tool_calls: bool = True
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP)
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    return_token_ids: bool = False
    chat_template_kwargs: TemplateOptions = TemplateOptions()

    @model_validator(mode="after")
    def is_consistent(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise BadRequest("top_logprobs is given without logprobs: true", "top_logprobs")
        if self.messages[-1].role == "assistant":
            raise BadRequest("messages ends with a reply of the assistant: add a message that it answers", "messages")
        if len(self.model_dump_json(include={"messages"})) > MAX_CHARS:
            raise BadRequest(f"messages has more than {MAX_CHARS:,} characters: shorten it", "messages")
        return self

    @property
    def limit(self) -> int | None:
        return min(filter(None, (self.max_tokens, self.max_completion_tokens)), default=None)

    @property
    def num_top(self) -> int:
        """Candidates of each token that are returned; -1: no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else -1

    @property
    def thinking(self) -> bool | None:
        return self.chat_template_kwargs.enable_thinking

    @property
    def schemas(self) -> Sequence[dict[str, JSON]]:
        """The tools that the template announces, as they were sent."""
        return [] if self.tool_choice == "none" else [tool.model_dump(exclude_unset=True) for tool in self.tools]

    @cached_property
    def fixed(self) -> str:
        """The fields that a conversation cannot change in its row."""
        return self.model_dump_json(exclude=set(self.free))


class TextRequest(Request):
    """A request without messages."""

    schemas: ClassVar[Sequence[Mapping]] = ()
    parallel_tool_calls: ClassVar[bool] = True
    max_tokens: int | None = Field(None, ge=1)
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP)

    @property
    def limit(self) -> int | None:
        return self.max_tokens

    @property
    def num_top(self) -> int:
        return -1 if self.logprobs is None else self.logprobs


class CompletionRequest(TextRequest):
    """A request of /v1/completions."""

    prompt: Annotated[str, Field(min_length=1)] | list[int] | list[list[int]] | list[str]
    max_tokens: int | None = Field(16, ge=0)
    echo: bool = False
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    return_token_ids: bool = False

    @property
    def prompts(self) -> Sequence[str | Sequence[int]]:
        is_one = isinstance(self.prompt, str) or self.prompt and isinstance(self.prompt[0], int)
        return [self.prompt] if is_one else self.prompt


class SamplingParams(TextRequest):
    """The sampling_params of a request of /inference/v1/generate."""

    labels = ("skip_special_tokens", "spaces_between_special_tokens", "detokenize")  # no text is returned
    echo: ClassVar[bool] = False


class GenerateRequest(Strict):
    """A request of vLLM's /inference/v1/generate: ids in, ids out."""

    labels = LABELS
    token_ids: list[int] = Field(min_length=1)
    sampling_params: SamplingParams = SamplingParams()


def shown(value: object) -> str:
    """Returns a value in at most 80 characters."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 80 else text[:77] + "..."


# Answers


def reply_message(
    request: Request, sampled: Sampled, dialect: Dialect, number: int, is_partial: bool = False
) -> Message:
    """Returns a reply as a message: thoughts, text, and calls of tools. `number` makes the ids of calls differ.

    If one of its calls cannot be read, or no tool was announced, the whole reply is its text. A reply that goes on
    (`is_partial`) has no calls yet, and none of the text that may belong to one, to a stop text or to a think block.
    """
    text = sampled.reply.text
    for stop in request.stops:  # as OpenAI's endpoint: without the stop text
        text = text.partition(stop)[0]
    if is_partial:
        text = settled(text, [*THINK, *request.stops, *[dialect.opening or "{"] * bool(request.schemas)])
    thoughts = ""
    if THINK[1] in text:
        thoughts, _, text = text.partition(THINK[1])
        text = text.lstrip("\n")
    elif sampled.is_thinking or text.lstrip().startswith(THINK[0]):
        thoughts, text = text, ""
    thoughts = thoughts.lstrip().removeprefix(THINK[0]).strip("\n")
    calls = []
    if request.schemas:
        try:
            calls = [] if is_partial else [parse_call(call) for call in sampled.reply.calls]
        except CallError:
            calls = []
        if sampled.reply.calls and (calls or is_partial):
            text = text.partition(dialect.opening)[0].rstrip() if dialect.opening else ""
    message = {"role": "assistant", "content": text}
    if thoughts:
        message["reasoning_content"] = thoughts
    if calls:
        message["tool_calls"] = [
            {
                "id": f"call_{number}_{i}",
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
    start = next((i for i in range(max(0, len(text) - longest), len(text)) if starts_any(text[i:], signs)), len(text))
    return text[:start].rstrip()


def starts_any(text: str, signs: Sequence[str]) -> bool:
    return any(sign.startswith(text) for sign in signs)


def finish_reason(sampled: Sampled, message: Message) -> str:
    return "length" if sampled.is_truncated else "tool_calls" if message.get("tool_calls") else "stop"


def usage(replies: Sequence[Sampled], num_choices: int) -> dict[str, int]:
    """Returns the tokens of an answer; each prompt counts once, whatever its number of choices."""
    num_prompt = sum(len(reply.prompt_ids) for reply in replies[::num_choices])
    num_reply = sum(len(reply.ids) for reply in replies)
    return {"prompt_tokens": num_prompt, "completion_tokens": num_reply, "total_tokens": num_prompt + num_reply}


def head(model: str, number: str) -> dict[str, JSON]:
    """Returns the fields of an answer beside its choices."""
    return {"id": number, "created": int(time.time()), "model": model}


TokenBytes = Callable[[int], bytes]


def chat_choice(request: ChatRequest, message: Message, sampled: Sampled, bytes_of: TokenBytes) -> dict[str, JSON]:
    """Returns what a choice has beside its message."""
    choice = {"finish_reason": finish_reason(sampled, message), "logprobs": None}
    if request.num_top >= 0:
        choice["logprobs"] = {"content": chat_logprobs(sampled, request.num_top, bytes_of), "refusal": None}
    return choice | ({"token_ids": list(sampled.ids)} if request.return_token_ids else {})


def chat_answer(
    request: ChatRequest,
    said: Sequence[Message],
    replies: Sequence[Sampled],
    bytes_of: TokenBytes,
    fields: Mapping[str, JSON],
) -> BaseModel:
    """Returns the answer to a chat: the messages `said`, one for each sampled reply."""
    from openai.types.chat import ChatCompletion

    choices = []
    for index, (message, sampled) in enumerate(zip(said, replies, strict=True)):
        content = message["content"] or (None if "tool_calls" in message else "")
        message = message | {"content": content, "refusal": None}
        choices.append({"index": index, "message": message, **chat_choice(request, message, sampled, bytes_of)})
    ids = {"prompt_token_ids": list(replies[0].prompt_ids)} if request.return_token_ids else {}
    whole = {"object": "chat.completion", "choices": choices, "usage": usage(replies, len(replies)), **ids}
    return ChatCompletion.model_validate(fields | whole)


def chat_logprobs(sampled: Sampled, num_top: int, bytes_of: TokenBytes) -> list[dict[str, JSON]]:
    """Returns each token with its log-probability, and its likeliest alternatives."""

    def named(i: int, logprob: float) -> dict[str, JSON]:
        data = bytes_of(i)
        return {"token": data.decode(errors="replace"), "logprob": bounded(logprob), "bytes": list(data)}

    tops = sampled.top or [{}] * len(sampled.ids)
    return [
        named(i, logprob) | {"top_logprobs": [named(*each) for each in likeliest(top, num_top)]}
        for i, logprob, top in zip(sampled.ids, sampled.logprobs, tops, strict=True)
    ]


def completion_choice(
    request: CompletionRequest,
    text: str,
    sampled: Sampled,
    texts_of: Callable[[Sequence[int], str], list[str]],
    bytes_of: TokenBytes,
) -> dict[str, JSON]:
    """Returns a choice of a completion; `text` begins with the prompt for an `echo`."""
    choice = {"text": text, "finish_reason": "length" if sampled.is_truncated else "stop", "logprobs": None}
    if request.num_top >= 0:
        ids = [*sampled.prompt_ids, *sampled.ids] if request.echo else sampled.ids
        tokens, logprobs = texts_of(ids, text), [*map(bounded, sampled.logprobs)]
        tops = []
        for i, logprob, top in zip(ids, logprobs, sampled.top, strict=False):
            pairs = {i: logprob} | dict(likeliest(top, request.num_top))  # as OpenAI: the token itself, too
            tops.append({bytes_of(j).decode(errors="backslashreplace"): bounded(x) for j, x in pairs.items()})
        if request.echo:
            logprobs[:1], tops[:1] = [None], [None]
        offsets = [sum(map(len, tokens[:i])) for i in range(len(tokens))]
        choice["logprobs"] = {
            "tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops or None, "text_offset": offsets,
        }  # fmt: skip
    if request.return_token_ids:
        choice |= {"token_ids": list(sampled.ids), "prompt_token_ids": list(sampled.prompt_ids)}
    return choice


def completion_answer(
    request: CompletionRequest, choices: Sequence[Mapping], replies: Sequence[Sampled], fields: Mapping[str, JSON]
) -> BaseModel:
    """Returns the answer to a completion."""
    from openai.types import Completion

    numbered = [{"index": i, **choice} for i, choice in enumerate(choices)]
    whole = {"object": "text_completion", "choices": numbered, "usage": usage(replies, request.n)}
    return Completion.model_construct(**fields | whole)


def generate_answer(request: SamplingParams, replies: Sequence[Sampled], bytes_of: TokenBytes, number: str) -> JSON:
    """Returns the answer to /inference/v1/generate."""
    choices = []
    for index, sampled in enumerate(replies):
        choice = {"index": index, "token_ids": list(sampled.ids)}
        choice["finish_reason"] = "length" if sampled.is_truncated else "stop"
        if request.num_top >= 0:
            choice["logprobs"] = {"content": chat_logprobs(sampled, request.num_top, bytes_of)}
        choices.append(choice)
    return {"request_id": number, "prompt_token_ids": list(replies[0].prompt_ids), "choices": choices}


def likeliest(top: Mapping[int, float], number: int) -> list[tuple[int, float]]:
    """Returns the likeliest candidates of a token."""
    return sorted(top.items(), key=lambda item: -item[1])[:number]


def bounded(logprob: float) -> float:
    """Returns a log-probability that is finite and at most 0, as clients check."""
    return min(0.0, max(-1e4, float(logprob)))


def changes(before: Message, message: Message) -> Message:
    """Returns what a message has more than its beginning, as a delta of a stream."""
    delta = {} if before else {"role": "assistant"}
    for key in ("reasoning_content", "content"):
        if more := message.get(key, "")[len(before.get(key, "")) :]:
            delta[key] = more
    calls = message.get("tool_calls", [])
    return delta | ({"tool_calls": [call | {"index": i} for i, call in enumerate(calls)]} if calls else {})


def chat_chunk(fields: Mapping, choices: Sequence[Mapping], used: Mapping | None = None) -> BaseModel:
    """Returns an event of a stream of chats."""
    from openai.types.chat import ChatCompletionChunk

    whole = {"object": "chat.completion.chunk", "choices": choices, "usage": used}
    return ChatCompletionChunk.model_validate(fields | whole)


def completion_chunk(fields: Mapping, choices: Sequence[Mapping], used: Mapping | None = None) -> BaseModel:
    """Returns an event of a stream of completions; a choice that goes on has no reason of its end yet."""
    from openai.types import Completion

    return Completion.model_construct(**fields, object="text_completion", choices=choices, usage=used)


def as_json(answer: BaseModel | JSON) -> str:
    """Returns an answer as text; fields that were not set are left out."""
    return answer.model_dump_json(exclude_unset=True) if isinstance(answer, BaseModel) else json.dumps(answer)
