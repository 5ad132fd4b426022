"""Requests and answers without a model: what is done, dropped or refused by name, and what comes back.

    python recipes/agents/test_protocol.py    # each field of OpenAI's reference, and what becomes of it
"""

import json
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import pytest

pytest.importorskip("openai")  # with pydantic

from openai.types import completion_create_params  # noqa: E402
from openai.types.chat import completion_create_params as chat

from envs.base import DIALECTS, Reply  # noqa: E402
from models.tokenizer import load_tokenizer  # noqa: E402
from recipes.agents.protocol import (  # noqa: E402
    LABELS,
    NEUTRAL,
    BadRequest,
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    GenerateRequest,
    Request,
    Sampled,
    changes,
    chat_logprobs,
    name_of,
    reply_message,
    settled,
    text_logprobs,
    texts_of,
    usage,
)
from tests.helpers import ROOT  # noqa: E402

REFUSED = (  # fields of OpenAI's reference that are rejected by name
    "audio", "function_call", "functions", "moderation", "prediction", "reasoning_effort", "verbosity",
    "web_search_options",
)  # fmt: skip
HELLO = {"role": "user", "content": "hello"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {}, "return": {"type": "string"}}}
CALL = '{"name": "add", "arguments": {"a": 1}}'


def read(kind: type, body: object) -> Request:
    return kind.read(json.dumps(body).encode())


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
    ({"messages": ["hello"]}, "messages"),
    ({"messages": [{"content": "a"}]}, "messages"),
    ({"messages": [{"role": "function", "content": "a", "name": "f"}]}, "messages"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages"),
    ({"messages": [{"role": "user", "content": "a", "audio": {"id": 1}}]}, "messages"),
    ({"messages": [HELLO, {"role": "assistant", "content": "a"}]}, "messages"),
    *[({"messages": [{"role": "assistant", "tool_calls": calls}, HELLO]}, "messages") for calls in (
        5, [5], [{}], [{"function": {"name": "f", "arguments": "5"}}], [{"function": {"name": 5, "arguments": "{}"}}],
        [{"function": {"name": "f", "arguments": '{"a": "\\ud800"}'}}], [{"function": {"name": "f", "arguments": "{"}}],
    )],
    ({"tools": [{"type": "custom", "custom": {"name": "add"}}]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "add", "strict": True}}]}, "tools"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "add"}}}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": 1}, "min_p"),
    ({"n": 0}, "n"),
    ({"n": 1000}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_completion_tokens": "many"}, "max_completion_tokens"),
    ({"seed": 2**64}, "seed"),
    ({"stop": [""]}, "stop"),
    ({"stop": ["a"] * 99}, "stop"),
    ({"top_logprobs": 5}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"stream": True, "stream_options": {"more": 1}}, "stream_options"),
    ({"frequency_penalty": 1}, "frequency_penalty"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"guided_json": {}}, "guided_json"),
    ({"chat_template_kwargs": {"system": "x"}}, "chat_template_kwargs"),
    *[({name: {"a": 1}}, name) for name in REFUSED],
]  # fmt: skip


@pytest.mark.parametrize(("body", "field"), REFUSED_BODIES, ids=[str(i) for i in range(len(REFUSED_BODIES))])
def test_what_cannot_be_done_is_refused_by_name(body, field):
    with pytest.raises(BadRequest) as error:
        request = read(ChatRequest, body if "messages" in body or not body else {"messages": [HELLO], **body})
        [message.for_template("") for message in request.messages]
    assert error.value.field == field
    assert field in str(error.value)
    assert len(str(error.value)) < 300 and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "body", [b"", b"{", b"nonsense", b'{"a": NaN}', b"[" * 100_000, b"\xff\xfe", b"-Infinity", b'{"a": "\\ud800"}']
)
def test_a_body_that_is_not_json_is_refused(body):
    with pytest.raises(BadRequest, match="not valid JSON"):
        ChatRequest.read(body)
    with pytest.raises(BadRequest, match="is \\[\\]"):
        GenerateRequest.read(b"[]")
    with pytest.raises(BadRequest, match="shorten it"):
        ChatRequest.read(b" " * 2_100_000)


def test_a_request_is_read_whole():
    request = asking(
        messages=[{"role": "developer", "content": [{"type": "text", "text": "a"}]}, HELLO], tools=[TOOL], top_k=-1,
        max_tokens=50, max_completion_tokens=40, stop="END", n=2, logprobs=True, top_logprobs=3, audio=None, user="me",
        frequency_penalty=0, presence_penalty=0.0, chat_template_kwargs={"enable_thinking": False},
    )  # fmt: skip
    assert [m.for_template("") for m in request.messages] == [{"role": "system", "content": "a"}, HELLO]
    assert (request.limit, request.stop, request.n, request.num_top) == (40, ["END"], 2, 3)
    assert request.schemas == [TOOL], "as they were sent"
    assert asking(tools=[TOOL], tool_choice="none").schemas == []
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert ChatMessage(role="user", content=parts).for_template("|")["content"] == "a|b"


def test_completions_take_texts_and_ids():
    prompts = {"a": ["a"], ("a", "b"): ["a", "b"], (1, 2): [[1, 2]], ((1,), (2,)): [[1], [2]]}
    for prompt, expected in prompts.items():
        assert read(CompletionRequest, {"prompt": json.loads(json.dumps(prompt))}).prompt == expected
    request = read(CompletionRequest, {"prompt": "a", "logprobs": 1, "echo": True, "max_tokens": 0})
    assert (request.num_top, request.limit) == (1, 0)
    for prompt in (None, "", [], [1.5], {"a": 1}, ["a", 5]):
        with pytest.raises(BadRequest, match="prompt"):
            read(CompletionRequest, {"prompt": prompt})
    asked = read(GenerateRequest, {"token_ids": [1, 2], "sampling_params": {"max_tokens": 3, "stop_token_ids": [4]}})
    assert (asked.prompt, asked.limit, asked.stop_token_ids) == ([[1, 2]], 3, [4])
    for more in ({"token_ids": []}, {"stream": True}, {"sampling_params": {"x": 1}}, {"sampling_params": 1}):
        with pytest.raises(BadRequest):
            read(GenerateRequest, {"token_ids": [1]} | more)


# Replies


def asking(**fields: object) -> ChatRequest:
    return ChatRequest(**{"messages": [HELLO], **fields})


@pytest.mark.parametrize("dialect", ["qwen", "json"])
@pytest.mark.parametrize("thoughts", ["", "hm"])
def test_a_reply_comes_back_as_it_was_sent(dialect, thoughts):
    """What clients send back is compared with what they got: thoughts, text and calls."""
    signs, request = DIALECTS[dialect], asking(tools=[TOOL])
    text = (f"<think>\n{thoughts}\n</think>\n\n" if thoughts else "") + f"{signs.opening}{CALL}{signs.closing}"
    message = reply_message(request, Sampled(Reply(text, (CALL,))), signs)
    (call,) = message["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"a": 1}
    assert len(call["id"]) == 9 and call["id"].isalnum(), "as Mistral's template wants it"
    assert message.get("reasoning_content", "") == thoughts
    assert message["content"] is None, "as OpenAI's: no text beside calls"
    sampled = Sampled(Reply(text * 2, (CALL, CALL)))
    for parallel, expected in ((True, 2), (False, 1)):
        found = reply_message(asking(tools=[TOOL], parallel_tool_calls=parallel), sampled, signs)
        assert len(found["tool_calls"]) == expected
    sent = message | {"refusal": None, "annotations": []}
    assert ChatMessage(**sent).for_template("") == ChatMessage(**message).for_template("")


def test_calls_that_cannot_be_read_stay_text():
    for calls, tools in (("{broken",), [TOOL]), (("",), [TOOL]), ((CALL,), []):
        message = reply_message(asking(tools=tools), Sampled(Reply("<tool_call>?", calls)), DIALECTS["qwen"])
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
    message = reply_message(asking(stop="END"), sampled, DIALECTS["qwen"])
    assert (message.get("reasoning_content", ""), message["content"]) == expected


@pytest.mark.parametrize("calls", [(), (CALL,)])
def test_deltas_of_a_stream_make_its_message(calls):
    """Whatever the segments: no delta takes back what was sent."""
    request = asking(tools=[TOOL], stop="STOP", stream=True)
    written = "".join(f" \n<tool_call>{call}</tool_call>" for call in calls)
    text = f"<think>\nA b\n</think>\n\nfive é{written}STOP x"
    whole = reply_message(request, Sampled(Reply(text, calls)), DIALECTS["qwen"])
    for step in range(1, 9):
        sent, got = {}, {"role": "", "content": "", "reasoning_content": ""}
        begun = [Reply(text[:i], ("",) * text[:i].count("<tool_call>")) for i in range(1, len(text), step)]
        parts = [reply_message(request, Sampled(reply), DIALECTS["qwen"], is_partial=True) for reply in begun]
        for message in [*parts, whole]:
            choice = {"message": message, "finish_reason": "stop" if message is whole else None}
            if found := changes(sent, choice):
                delta, sent = found["delta"], choice
                got |= {key: got[key] + x for key, x in delta.items() if key != "tool_calls"}
        assert (got["role"], got["content"]) == ("assistant", whole["content"] or "")
        assert got["reasoning_content"] == whole["reasoning_content"] == "A b"
        assert [call["index"] for call in delta.get("tool_calls", [])] == [*range(len(calls))]


def test_an_end_that_may_change_is_held_back():
    assert [settled(text, ["STOP", "</think>"]) for text in ("a ST", "a S", "a <", "a x", "a \ufffd", "a STX")] == [
        "a", "a", "a", "a x", "a", "a STX",
    ]  # fmt: skip


def test_log_probabilities_are_finite_and_at_most_0():
    tokenizer, inf = load_tokenizer(ROOT / "models/tiny"), float("inf")
    ids = tokenizer.encode("Use 7 é")
    sampled = Sampled(Reply("a"), ids[:2], (1e-7, -inf), top=({5: 1e-7, 7: -3.0}, {6: -1.0, 8: -inf}))
    first, second = chat_logprobs(sampled, 2, ["é", "b"], tokenizer)["content"]
    assert (first["token"], first["logprob"], first["bytes"], second["logprob"]) == ("é", 0.0, [195, 169], -1e4)
    assert (len(first["top_logprobs"]), first["top_logprobs"][0]["logprob"]) == (2, 0.0)
    assert len(second["top_logprobs"]) == 1, "a token that cannot be sampled is no candidate"
    found = text_logprobs(read(CompletionRequest, {"prompt": "a", "logprobs": 1}), sampled, ["t5", "t6"], tokenizer)
    assert (len(found["top_logprobs"][1]), found["text_offset"]) == (2, [0, 2])
    assert "".join(texts_of(tokenizer, ids)) == "Use 7 é"
    assert len({name_of(tokenizer, i) for i in range(256)}) == 256, "halves of characters have names"


def test_each_prompt_counts_once():
    sampled = Sampled(Reply("x"), (5,), (-1.0,), prompt_ids=(1, 2, 3))
    assert usage([sampled] * 4, 2) == {"prompt_tokens": 6, "completion_tokens": 4, "total_tokens": 10}


if __name__ == "__main__":
    print("| path | field | what becomes of it |\n|---|---|---|")
    print("\n".join(f"| {path} | {name} | {text} |" for path, name, text in conformance()))
