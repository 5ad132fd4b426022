"""Requests and answers without a model: what is done, dropped or refused by name, and what comes back.

    python recipes/agents/test_protocol.py    # each field of OpenAI's reference, and what becomes of it
"""

import json
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import pytest

pytest.importorskip("pydantic")
pytest.importorskip("openai")

from openai.types import Completion, completion_create_params  # noqa: E402
from openai.types.chat import ChatCompletion, ChatCompletionChunk  # noqa: E402
from openai.types.chat import completion_create_params as chat

from envs.base import DIALECTS, Reply  # noqa: E402
from recipes.agents.protocol import (  # noqa: E402
    LABELS,
    NEUTRAL,
    REFUSED,
    ChatRequest,
    CompletionRequest,
    GenerateRequest,
    Sampled,
    SentMessage,
    as_json,
    changes,
    chat_answer,
    chat_choice,
    chat_chunk,
    completion_answer,
    completion_choice,
    reply_message,
    settled,
    usage,
)
from recipes.agents.server import BadRequest, read_json  # noqa: E402

HELLO = {"role": "user", "content": "hello"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}
CALL = '{"name": "add", "arguments": {"a": 1}}'
HEAD = {"id": "1", "created": 0, "model": "m"}


def fate(request: type, name: str) -> str:
    """What becomes of a field of OpenAI's reference."""
    fates = {
        "done": name in request.model_fields,
        "dropped: it changes no token": name in LABELS,
        f"only {json.dumps(NEUTRAL.get(name))}": name in NEUTRAL,
        "refused": name in REFUSED,
    }
    return next((text for text, is_so in fates.items() if is_so), "NOT KNOWN")


def conformance() -> list[tuple[str, str, str]]:
    """Path, field and fate of each field that the openai package's types have."""
    params = chat.CompletionCreateParamsBase, completion_create_params.CompletionCreateParamsBase
    rows = []
    for request, fields, path in zip((ChatRequest, CompletionRequest), params, ("chat", "completions"), strict=True):
        names = sorted({*fields.__annotations__, "stream"})
        rows += [(path, name, fate(request, name)) for name in names]
    return rows


def test_each_field_of_the_reference_is_done_refused_or_dropped():
    assert [row for row in conformance() if row[2] == "NOT KNOWN"] == []


REFUSED_BODIES = [  # body and the field that is named
    ({}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hello"}, "messages"),
    ({"messages": ["hello"]}, "messages"),
    ({"messages": [{"content": "a"}]}, "messages"),
    ({"messages": [{"role": "root", "content": "a"}]}, "messages"),
    ({"messages": [{"role": "function", "content": "a", "name": "f"}]}, "messages"),
    ({"messages": [{"role": ["user"], "content": "a"}]}, "messages"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
    ({"messages": [{"role": "user", "content": "a", "audio": {"id": 1}}]}, "messages"),
    ({"messages": [{"role": "user", "content": "a", "tool_calls": [1]}]}, "messages"),
    ({"messages": [HELLO, {"role": "assistant", "content": "a"}]}, "messages"),
    ({"messages": [{"role": "assistant", "tool_calls": 5}]}, "messages"),
    ({"messages": [{"role": "assistant", "tool_calls": [5]}]}, "messages"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "5"}}]}]}, "messages"),
    ({"messages": [{"role": "user", "content": "a" * 1_100_000}]}, "messages"),
    ({"tools": "add"}, "tools"),
    ({"tools": [{"name": "add"}]}, "tools"),
    ({"tools": [{"type": "custom", "custom": {"name": "add"}}]}, "tools"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "add"}}}, "tool_choice"),
    ({"tool_choice": "all"}, "tool_choice"),
    ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 2}, "top_p"),
    ({"top_k": 1.5}, "top_k"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 1}, "min_p"),
    ({"n": 0}, "n"),
    ({"n": 1000}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_completion_tokens": "many"}, "max_completion_tokens"),
    ({"seed": 0.5}, "seed"),
    ({"seed": 2**64}, "seed"),
    ({"stop": 5}, "stop"),
    ({"stop": [5]}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop": [""]}, "stop"),
    ({"stop": ["a"] * 99}, "stop"),
    ({"logprobs": 5}, "logprobs"),
    ({"top_logprobs": 5}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"stream": "yes"}, "stream"),
    ({"stream": True, "stream_options": {"more": 1}}, "stream_options"),
    ({"frequency_penalty": 1}, "frequency_penalty"),
    ({"logit_bias": {"5": 100}}, "logit_bias"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"guided_json": {}}, "guided_json"),
    ({"chat_template_kwargs": {"system": "x"}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"enable_thinking": "no"}}, "chat_template_kwargs"),
    *[({name: {"a": 1}}, name) for name in REFUSED],
]  # fmt: skip


@pytest.mark.parametrize(("body", "field"), REFUSED_BODIES, ids=[str(i) for i in range(len(REFUSED_BODIES))])
def test_what_cannot_be_done_is_refused_by_name(body, field):
    with pytest.raises(BadRequest) as error:
        ChatRequest.read(body if "messages" in body or not body else {"messages": [HELLO], **body})
    assert error.value.field == field
    assert field in str(error.value)
    assert len(str(error.value)) < 300 and "\n" not in str(error.value)


@pytest.mark.parametrize("body", [b"", b"{", b"nonsense", b'{"a": NaN}', b"[" * 100_000, b"\xff\xfe", b"-Infinity"])
def test_a_body_that_is_not_json_is_refused(body):
    with pytest.raises(BadRequest, match="not valid JSON"):
        read_json(body)
    with pytest.raises(BadRequest, match="JSON object"):
        ChatRequest.read([])


def test_a_request_is_read_whole():
    request = ChatRequest.read({
        "model": "x", "messages": [{"role": "developer", "content": [{"type": "text", "text": "a"}]}, HELLO],
        "tools": [TOOL], "tool_choice": "auto", "temperature": 0.5, "top_p": 0.9, "top_k": -1, "min_p": 0.1,
        "max_tokens": 50, "max_completion_tokens": 40, "stop": "END", "n": 2, "seed": 7, "logprobs": True,
        "top_logprobs": 3, "return_token_ids": True, "stream": True, "stream_options": {"include_usage": True},
        "frequency_penalty": 0, "presence_penalty": 0.0, "user": "me", "audio": None,
        "chat_template_kwargs": {"enable_thinking": False},
    })  # fmt: skip
    assert [m.as_template("") for m in request.messages] == [{"role": "system", "content": "a"}, HELLO]
    assert (request.limit, request.stops, request.n, request.seed) == (40, ["END"], 2, 7)
    assert (request.num_top, request.return_token_ids, request.thinking) == (3, True, False)
    assert request.schemas == [TOOL], "as they were sent"
    assert ChatRequest.read({"messages": [HELLO], "tools": [TOOL], "tool_choice": "none"}).schemas == []
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert SentMessage.read({"role": "user", "content": parts}).as_template("|")["content"] == "a|b"


def test_fields_that_a_conversation_cannot_change():
    whole = {"messages": [HELLO], "tools": [TOOL], "chat_template_kwargs": {"enable_thinking": False}}
    fixed = ChatRequest.read(whole).fixed
    free = {"temperature": 0.5, "max_tokens": 5, "stop": ["x"], "seed": 3, "n": 2, "logprobs": True, "model": "y"}
    assert ChatRequest.read(whole | free).fixed == fixed
    for other in ({"tools": []}, {"tool_choice": "none"}, {"chat_template_kwargs": {"enable_thinking": True}}):
        assert ChatRequest.read(whole | other).fixed != fixed


def test_completions_take_texts_and_ids():
    prompts = {"a": ["a"], ("a", "b"): ["a", "b"], (1, 2): [[1, 2]], ((1,), (2,)): [[1], [2]]}
    for prompt, expected in prompts.items():
        sent = json.loads(json.dumps(prompt))
        assert list(CompletionRequest.read({"prompt": sent}).prompts) == expected
    request = CompletionRequest.read({"prompt": "a", "logprobs": 1, "echo": True, "max_tokens": 0})
    assert (request.num_top, request.limit) == (1, 0)
    for prompt in (None, "", [1.5], {"a": 1}, ["a", 5]):
        with pytest.raises(BadRequest):
            CompletionRequest.read({"prompt": prompt})
    asked = GenerateRequest.read({"token_ids": [1, 2], "sampling_params": {"max_tokens": 3, "stop_token_ids": [4]}})
    assert (asked.token_ids, asked.sampling_params.limit, asked.sampling_params.stop_token_ids) == ([1, 2], 3, [4])
    whole = {"token_ids": [1]}
    for body in ({"token_ids": []}, whole | {"stream": True}, whole | {"sampling_params": {"x": 1}}):
        with pytest.raises(BadRequest):
            GenerateRequest.read(body)


# Replies


def asking(**fields: object) -> ChatRequest:
    return ChatRequest.read({"messages": [HELLO], **fields})


def names(i: int) -> bytes:
    return f" {i}".encode()


@pytest.mark.parametrize("dialect", ["qwen", "json"])
@pytest.mark.parametrize("thoughts", ["", "hm"])
def test_a_reply_comes_back_as_it_was_sent(dialect, thoughts):
    """What clients send back is compared with what they got: thoughts, text and calls."""
    signs, request = DIALECTS[dialect], asking(tools=[TOOL])
    text = (f"<think>\n{thoughts}\n</think>\n\n" if thoughts else "") + f"{signs.opening}{CALL}{signs.closing}"
    sampled = Sampled(Reply(text, (CALL,)), (1, 2), (0.0, -1.0))
    message = reply_message(request, sampled, signs, 3)
    (call,) = message["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"a": 1}
    assert message.get("reasoning_content", "") == thoughts
    answer = ChatCompletion.model_validate_json(as_json(chat_answer(request, [message], [sampled], names, HEAD)))
    assert answer.choices[0].finish_reason == "tool_calls"
    assert answer.choices[0].message.content is None, "as OpenAI's: no text beside calls"
    sent = answer.choices[0].message.model_dump(exclude_unset=True)
    assert SentMessage.read(sent).as_template("") == SentMessage.read(message).as_template("")


def test_only_one_call_is_returned_if_one_is_asked_for():
    text = "".join(f"<tool_call>{CALL}</tool_call>" for _ in range(2))
    sampled = Sampled(Reply(text, (CALL, CALL)))
    for parallel, expected in ((True, 2), (False, 1)):
        request = asking(tools=[TOOL], parallel_tool_calls=parallel)
        assert len(reply_message(request, sampled, DIALECTS["qwen"], 1)["tool_calls"]) == expected


def test_calls_that_cannot_be_read_stay_text():
    for calls, tools in (("{broken",), [TOOL]), (("",), [TOOL]), ((CALL,), []):
        message = reply_message(asking(tools=tools), Sampled(Reply("<tool_call>?", calls)), DIALECTS["qwen"], 1)
        assert message == {"role": "assistant", "content": "<tool_call>?"}


@pytest.mark.parametrize(
    ("text", "is_thinking", "expected"),
    [
        ("<think>\nso far", False, ("so far", "")),
        ("so far", True, ("so far", "")),
        ("so\n</think>\n\nfour", True, ("so", "four")),
        ("four", False, ("", "four")),
        ("fourENDfive", False, ("", "four")),
    ],
)
def test_thoughts_that_were_cut_are_thoughts(text, is_thinking, expected):
    sampled = Sampled(Reply(text), is_truncated=True, is_thinking=is_thinking)
    message = reply_message(asking(stop="END"), sampled, DIALECTS["qwen"], 1)
    assert (message.get("reasoning_content", ""), message["content"]) == expected


@pytest.mark.parametrize("calls", [(), (CALL,)])
def test_deltas_of_a_stream_make_its_message(calls):
    """Whatever the segments: no delta takes back what was sent."""
    request = asking(tools=[TOOL], stop="STOP", stream=True)
    written = "".join(f" \n<tool_call>{call}</tool_call>" for call in calls)
    text = f"<think>\nA b\n</think>\n\nfive é{written}STOP x"
    whole = reply_message(request, Sampled(Reply(text, calls)), DIALECTS["qwen"], 1)
    for step in range(1, 9):
        sent, got = {}, {"role": "", "content": "", "reasoning_content": ""}
        begun = [Reply(text[:i], ("",) * text[:i].count("<tool_call>")) for i in range(1, len(text), step)]
        parts = [reply_message(request, Sampled(reply), DIALECTS["qwen"], 1, is_partial=True) for reply in begun]
        for message in [*parts, whole]:
            delta, sent = changes(sent, message), message
            got |= {key: got[key] + x if isinstance(x, str) else x for key, x in delta.items() if key != "tool_calls"}
        assert (got["role"], got["content"]) == ("assistant", whole["content"])
        assert got["reasoning_content"] == whole["reasoning_content"] == "A b"
        assert [call["index"] for call in delta.get("tool_calls", [])] == [*range(len(calls))]
    event = {"index": 0, "delta": delta, **chat_choice(request, whole, Sampled(Reply(text)), names)}
    ChatCompletionChunk.model_validate_json(as_json(chat_chunk(HEAD, [event])))


def test_an_end_that_may_change_is_held_back():
    assert [settled(text, ["STOP", "</think>"]) for text in ("a ST", "a S", "a <", "a x", "a \ufffd", "a STX")] == [
        "a", "a", "a", "a x", "a", "a STX",
    ]  # fmt: skip


def test_log_probabilities_are_finite_and_at_most_0():
    request = asking(logprobs=True, top_logprobs=1)
    sampled = Sampled(Reply("a"), (5, 6), (1e-7, -float("inf")), top=({5: 1e-7, 7: -3.0}, {6: -1.0}))
    answer = chat_answer(request, [{"role": "assistant", "content": "a"}], [sampled], names, HEAD)
    first, second = json.loads(as_json(answer))["choices"][0]["logprobs"]["content"]
    assert (first["token"], first["logprob"], second["logprob"]) == (" 5", 0.0, -1e4)
    assert first["top_logprobs"] == [{"token": " 5", "logprob": 0.0, "bytes": [32, 53]}]


def test_a_completion_is_what_the_client_reads():
    request = CompletionRequest.read({"prompt": ["a", "b"], "n": 2, "logprobs": 1})
    sampled = Sampled(Reply("x"), (5,), (-1.0,), top=({7: -0.5},), prompt_ids=(1, 2, 3))
    choice = completion_choice(request, "x", sampled, lambda ids, _: [f"t{i}" for i in ids], names)
    answer = Completion.model_validate_json(as_json(completion_answer(request, [choice] * 4, [sampled] * 4, HEAD)))
    assert [each.index for each in answer.choices] == [0, 1, 2, 3]
    assert answer.choices[0].logprobs.top_logprobs == [{" 5": -1.0, " 7": -0.5}]
    assert usage([sampled] * 4, 2) == {"prompt_tokens": 6, "completion_tokens": 4, "total_tokens": 10}
    assert answer.usage.prompt_tokens == 6, "each prompt once"


if __name__ == "__main__":
    print("| path | field | what becomes of it |\n|---|---|---|")
    print("\n".join(f"| {path} | {name} | {text} |" for path, name, text in conformance()))
