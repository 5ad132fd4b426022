"""The endpoint without a model: what requests ask for or are refused, which continue, and how programs end."""

import asyncio
import contextlib
import http.client
import json
import logging
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path

import psutil
import pytest

pytest.importorskip("uvicorn")

from envs.agents.host import AgentHost, AgentJob, read_rewards  # noqa: E402
from envs.agents.protocol import (  # noqa: E402
    BadRequest,
    ChatRequest,
    Sampled,
    chat_answer,
    chunks,
    read_chat,
    read_completion,
    read_generate,
    read_json,
    read_message,
    reply_message,
)
from envs.agents.server import Server  # noqa: E402
from envs.agents.sessions import BUDGET, Asked, Book, Ended, Session  # noqa: E402
from envs.base import DIALECTS, AgentSettings, Reply  # noqa: E402
from envs.scoring.worker import Failure  # noqa: E402
from utils.settings.errors import UserError  # noqa: E402

HELLO = {"role": "user", "content": "hello"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}
CALL = '{"name": "add", "arguments": {"a": 1}}'


# Requests

REFUSED = [
    ([], "no JSON object"),
    ({}, "messages is empty"),
    ({"messages": []}, "messages is empty"),
    ({"messages": "hello"}, "of another type"),
    ({"messages": ["hello"]}, "no object"),
    ({"messages": [{"content": "a"}]}, "has the role null"),
    ({"messages": [{"role": "root", "content": "a"}]}, "has the role"),
    ({"messages": [{"role": ["user"], "content": "a"}]}, "has the role"),
    ({"messages": [{"role": "user", "content": 5}]}, "only text"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "only text"),
    ({"messages": [{"role": "user", "content": "a", "audio": {"id": 1}}]}, '"audio"'),
    ({"messages": [{"role": "user", "content": "a", "tool_calls": [1]}]}, '"tool_calls"'),
    ({"messages": [{"role": "assistant", "tool_calls": 5}]}, "no list"),
    ({"messages": [{"role": "assistant", "tool_calls": [5]}]}, "no call"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]}, "no JSON"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "5"}}]}]}, "no object"),
    ({"tools": "add"}, "of another type"),
    ({"tools": [{"name": "add"}]}, "tools has"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "add"}}}, "no call can be forced"),
    ({"tool_choice": "all"}, "no call can be forced"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 2}, "top_p"),
    ({"top_k": 1.5}, "whole"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 3}, "min_p"),
    ({"n": 0}, "n is 0"),
    ({"n": 1000}, "n is 1000"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_completion_tokens": "many"}, "max_completion_tokens"),
    ({"seed": 0.5}, "seed"),
    ({"stop": 5}, "stop"),
    ({"stop": [5]}, "stop"),
    ({"stop": [""]}, "stop"),
    ({"stop": ["a"] * 99}, "stop"),
    ({"logprobs": 5}, "logprobs"),
    ({"top_logprobs": 5}, "without logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"stream": "yes"}, "stream"),
    ({"frequency_penalty": 1}, "frequency_penalty"),
    ({"presence_penalty": -1}, "presence_penalty"),
    ({"logit_bias": {"5": 100}}, "logit_bias"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"guided_json": {}}, "guided_json is not supported"),
    ({"chat_template_kwargs": {"system": "x"}}, "chat_template_kwargs"),
    ({"messages": [{"role": "user", "content": "a" * 1_100_000}]}, "characters"),
]


@pytest.mark.parametrize(("body", "reason"), REFUSED, ids=[str(i) for i in range(len(REFUSED))])
def test_what_cannot_be_done_is_refused_by_name(body, reason):
    whole = body if isinstance(body, list) or "messages" in body or not body else {"messages": [HELLO], **body}
    with pytest.raises(BadRequest, match=reason):
        read_chat(whole)


@pytest.mark.parametrize("body", [b"", b"{", b"nonsense", b'{"a": NaN}', b"[" * 100_000, b"\xff\xfe", b"-Infinity"])
def test_a_body_that_is_no_json_is_refused(body):
    with pytest.raises(BadRequest, match="no JSON"):
        read_json(body)


def test_a_request_is_read_whole():
    request = read_chat({
        "model": "x", "messages": [{"role": "developer", "content": [{"type": "text", "text": "a"}]}, HELLO],
        "tools": [TOOL], "tool_choice": "auto", "temperature": 0.5, "top_p": 0.9, "top_k": -1, "min_p": 0.1,
        "max_tokens": 50, "max_completion_tokens": 40, "stop": "END", "n": 2, "seed": 7, "logprobs": True,
        "top_logprobs": 3, "return_token_ids": True, "stream": True, "stream_options": {"include_usage": True},
        "frequency_penalty": 0, "presence_penalty": 0.0, "user": "me",
        "chat_template_kwargs": {"enable_thinking": False},
    })  # fmt: skip
    assert request.messages == ({"role": "system", "content": "a"}, HELLO)
    assert (request.max_tokens, request.stop, request.n, request.seed) == (40, ("END",), 2, 7)
    assert (request.top_logprobs, request.returns_ids, request.thinking) == (3, True, False)
    assert tuple(request.sampling) == (0.5, 0.9, -1, 0.1)
    assert read_chat({"messages": [HELLO], "tools": [TOOL], "tool_choice": "none"}).tools == ()


def test_completions_take_texts_and_ids():
    assert read_completion({"prompt": "a"}).prompts == ("a",)
    assert read_completion({"prompt": ["a", "b"]}).prompts == ("a", "b")
    assert read_completion({"prompt": [1, 2]}).prompts == ((1, 2),)
    assert read_completion({"prompt": [[1], [2]], "logprobs": 1, "echo": True, "max_tokens": 0}).top_logprobs == 1
    for prompt in (None, [], [[]], [1.5], [-1], {"a": 1}):
        with pytest.raises(BadRequest):
            read_completion({"prompt": prompt})
    asked = read_generate({"token_ids": [1, 2], "sampling_params": {"max_tokens": 3, "stop_token_ids": [4]}})
    assert (asked.prompts, asked.max_tokens, asked.returns_ids) == (((1, 2),), 3, True)


# Replies


@pytest.mark.parametrize("dialect", ["qwen", "json"])
@pytest.mark.parametrize("thoughts", ["", "hm"])
def test_a_reply_comes_back_as_it_was_sent(dialect, thoughts):
    """What clients send back is compared with what they got: thoughts, text and calls."""
    signs = DIALECTS[dialect]
    text = (f"<think>\n{thoughts}\n</think>\n\n" if thoughts else "") + f"{signs.opening}{CALL}{signs.closing}"
    message = reply_message(Reply(text, (CALL,)), signs, 3, has_tools=True)
    (call,) = message["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"a": 1}
    assert message.get("reasoning_content", "") == thoughts
    answer = chat_answer(ChatRequest(), [message], [Sampled(Reply(text), (1, 2), (0.0, -1.0))], "m", "1")
    sent = json.loads(json.dumps(answer))["choices"][0]
    assert sent["finish_reason"] == "tool_calls"
    assert sent["message"]["content"] is None, "as OpenAI's: no text beside calls"
    assert read_message(sent["message"]) == read_message(message)
    (chunk, end) = chunks(answer)
    assert end == "data: [DONE]\n\n"
    assert json.loads(chunk.removeprefix("data: "))["choices"][0]["delta"]["tool_calls"][0]["index"] == 0


def test_calls_that_cannot_be_read_stay_text():
    for calls, has_tools in (("{broken",), True), (("",), True), ((CALL,), False):
        message = reply_message(Reply("<tool_call>?", calls), DIALECTS["qwen"], 1, has_tools)
        assert message == {"role": "assistant", "content": "<tool_call>?"}


def test_log_probabilities_are_finite_and_at_most_0():
    request = read_chat({"messages": [HELLO], "logprobs": True, "top_logprobs": 1})
    sampled = Sampled(Reply("a"), (5, 6), (1e-7, -float("inf")), top=({5: 1e-7, 7: -3.0}, {6: -1.0}))
    answer = chat_answer(request, [{"role": "assistant", "content": "a"}], [sampled], "m", "1")
    first, second = answer["choices"][0]["logprobs"]["content"]
    assert (first["token"], first["logprob"], second["logprob"]) == ("token_id:5", 0.0, -1e4)
    assert first["top_logprobs"] == [{"token": "token_id:5", "logprob": 0.0, "bytes": None}]


# Sessions


class Loop:
    """A server whose thread is the test's."""

    def call(self, function, *arguments):
        function(*arguments)


class Script(Book):
    """Answers each request by its number and row."""

    def __init__(self, num_rows: int = 9, max_calls: int = 0):
        super().__init__(Loop(), DIALECTS["qwen"], max_calls)
        self.rows, self.asked = deque(range(num_rows)), []

    def take_row(self, session):
        return self.rows.popleft()

    def ask(self, session, dialogue, asked):
        row = dialogue.row
        self.asked.append((row, asked))
        reply = Sampled(Reply(f"reply {len(self.asked)}"), (1,), (-0.5,))
        asyncio.get_running_loop().call_soon(self.reply, row, reply)


def talk(book: Book, *requests: tuple[list, bool]) -> list[dict]:
    """The messages that answer these requests of one session, one after the other."""
    session = Session("key")

    async def run():
        said = []
        for messages, is_retry in requests:
            asked = read_chat({"messages": [m if isinstance(m, dict) else said[m] for m in messages]})
            said.append((await book.reply_to(session, asked, is_retry))[0])
        return said

    return asyncio.run(run()), session


def test_a_request_continues_behind_the_replies_as_they_were_returned():
    book = Script()
    more = {"role": "user", "content": "more"}
    other = {"role": "assistant", "content": "reply 1!"}
    said, session = talk(
        book,
        ([HELLO], False),
        ([HELLO, 0, more], False),  # continues
        ([HELLO, other, more], False),  # a reply that was never given: a fork
        ([HELLO], False),  # the same again, not said to be a retry: a fork
        ([HELLO, 0, more, 1, HELLO], False),  # continues the first
    )
    assert [row for row, _ in book.asked] == [0, 0, 1, 2, 0]
    assert [asked.is_new for _, asked in book.asked] == [True, False, True, True, False]
    assert [len(asked.messages) for _, asked in book.asked] == [1, 1, 3, 1, 1]
    assert (session.num_calls, len(session.turns)) == (5, 3)


def test_a_retry_gets_the_stored_answer():
    book = Script()
    said, session = talk(book, ([HELLO], False), ([HELLO], True))
    assert said[0] == said[1]
    assert (len(book.asked), session.num_calls) == (1, 1)


def test_behind_the_budget_comes_a_text_that_is_not_sampled():
    book = Script(max_calls=1)
    said, _ = talk(book, ([HELLO], False), ([HELLO, 0, HELLO], False))
    assert said[1]["content"] == BUDGET
    assert len(book.asked) == 1


def test_a_last_message_of_the_assistant_is_refused():
    with pytest.raises(BadRequest, match="last message"):
        talk(Script(), ([HELLO, {"role": "assistant", "content": "a"}], False))


# Rewards


@pytest.mark.parametrize(
    ("line", "rewards"),
    [
        ("0.5", {"return": 0.5, "correct_answer": 0.0}),
        ("1", {"return": 1.0, "correct_answer": 1.0}),
        ("true", {"return": 1.0, "correct_answer": 1.0}),
        ('{"reward": 2, "style": 1}', {"return": 2.0, "style": 1.0, "correct_answer": 1.0}),
        ('{"a": 0.25, "b": 0.25}', {"a": 0.25, "b": 0.25, "return": 0.5, "correct_answer": 0.0}),
        ('{"return": 1, "correct_answer": 0}', {"return": 1.0, "correct_answer": 0.0}),
        ("done", {}),
        ('"1"', {}),
        ("", {}),
        ("null", "null"),
        ('{"reward": null}', "numbers"),
        ("NaN", "numbers"),
        ("1e999", "numbers"),
        ('{"reward": "high"}', "numbers"),
        ("{}", "numbers"),
        ('{"length": 1}', "length"),
    ],
)
def test_the_last_line_is_the_reward(line, rewards):
    found = read_rewards(line)
    assert rewards in found if isinstance(rewards, str) else found == rewards


# Programs

PROGRAM = """
import json, os, subprocess, sys, time, urllib.request
def ask(content="hello", key=None):
    body = json.dumps({"messages": [{"role": "user", "content": content}]}).encode()
    headers = {"Authorization": "Bearer " + (key or os.environ["OPENAI_API_KEY"])}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    return json.loads(urllib.request.urlopen(request).read())["choices"][0]["message"]["content"]
def play(row, kind):
    if kind != "silent":
        ask()
    if kind == "hangs":
        time.sleep(600)
    if kind == "dies":
        os.kill(os.getpid(), 9)
    if kind == "fills the memory":
        kept = []
        while True:
            kept.append(bytearray(10**7))
    if kind == "floods":
        while True:
            print("x" * 100_000)
    if kind == "leaves processes":
        subprocess.Popen(f"setsid sleep {row['mark']} & sleep {row['mark']}", shell=True, start_new_session=True)
    if kind == "raises":
        raise ValueError("no luck")
    if kind == "exits":
        sys.exit(3)
    if kind == "steals":
        ask(key="another")
    if kind == "prints null":
        return None
    if kind == "says nothing more":
        os._exit(0)
    return 0.5
"""
ENDS = {  # of programs by kind; rewards, or a part of the reason why there are none
    "is paid": 0.5,
    "leaves processes": 0.5,
    "hangs": "ran for 2 seconds",
    "dies": "status -9",
    "fills the memory": "MemoryError",
    "floods": "ran for 2 seconds",
    "raises": "ValueError: no luck",
    "exits": "status 1",  # an agent's function does not exit
    "steals": "401",
    "silent": "asked for no reply",
    "prints null": "null",
    "says nothing more": {},
}


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("agent") / "agent.py"
    file.write_text(PROGRAM)
    return file


def play(host: AgentHost, jobs: list[AgentJob]) -> dict[int, Ended | Failure]:
    """The ends of programs, whose requests are answered."""
    rows, ends = {job.row for job in jobs}, {}
    host.begin(jobs, deque())
    while len(ends) < len(jobs):
        for row, outcome in host.take(rows - ends.keys(), 1).items():
            if isinstance(outcome, Asked):
                host.answer(row, Sampled(Reply(f"reply of {row}"), (1,), (-0.5,)))
            else:
                ends[row] = outcome
    return ends


def running(text: str) -> list[int]:
    """The processes whose command line matches a pattern."""
    found = [x.pid for x in psutil.process_iter(["cmdline"]) if re.search(text, " ".join(x.info["cmdline"] or []))]
    return [pid for pid in found if pid != os.getpid()]


def test_a_program_costs_its_own_episode_alone(program):
    mark = str(6_000_000 + os.getpid())
    kinds = [*ENDS, "is paid"]
    settings = AgentSettings(f"{program}:play", num_processes=6, timeout=2.0, memory_gb=0.5)
    with AgentHost(settings) as host:
        jobs = [AgentJob(row, {"kind": kind, "mark": mark}, seed=row) for row, kind in enumerate(kinds)]
        ends = play(host, jobs)
    for row, kind in enumerate(kinds):
        expected, found = ENDS[kind], ends[row]
        if isinstance(expected, str):
            assert isinstance(found, Failure) and expected in found.reason, (kind, found)
        else:
            assert isinstance(found, Ended), (kind, found)
            assert found.rewards.get("return", {}) == expected, (kind, found)
    assert not running(mark), "no process is left"
    assert not running(str(program))


def test_a_command_gets_its_row_and_its_endpoint(program):
    script = "import os, json; from agent import ask; print(ask()); print(json.loads(os.environ['ROW'])['x'])"
    command = f'cd {program.parent} && {sys.executable} -c "{script}"'
    with AgentHost(AgentSettings(command, timeout=30.0)) as host:
        ends = play(host, [AgentJob(7, {"x": 0.25}, seed=1)])
    assert ends[7] == Ended({"calls": 1.0, "forks": 0.0, "correct_answer": 0.0, "return": 0.25})


@pytest.mark.parametrize(
    ("agent", "reason"),
    [("agent.py:absent", "has no function absent"), ("absent.py:play", "absent.py"), ("agent.py:play,ask", "play")],
)
def test_a_function_that_is_not_there_is_found_at_the_start(program, agent, reason):
    if agent == "agent.py:play,ask":  # no name of a function: a command, which fails when it runs
        return
    with pytest.raises(UserError, match=reason), AgentHost(AgentSettings(str(program.parent / agent))):
        pass


@pytest.mark.parametrize(
    "command,given,per_core", [("agent.py:play", 0, 32), ("python agent.py", 0, 4), ("agent.py:play", 3, 0)]
)
def test_functions_fill_the_slots_of_the_sampler(command, given, per_core):
    host = AgentHost(AgentSettings(command=command, num_processes=given))
    host.server.socket.close()
    assert host.places._value == (given or per_core * os.cpu_count())


def test_the_server_leaves_the_handlers_of_other_logs_open():
    class Handler(logging.Handler):
        is_open = True

        def close(self):
            self.is_open = False

    handler = Handler()
    with Server({}):
        assert handler.is_open


def test_programs_end_with_the_run(program):
    """A run that is killed takes keeper, wardens and programs with it."""
    mark = str(7_000_000 + os.getpid())
    code = f"""
import sys
sys.path.insert(0, {str(Path(__file__).resolve().parents[2])!r})
from collections import deque
from envs.agents.host import AgentHost, AgentJob
from envs.base import AgentSettings
host = AgentHost(AgentSettings("sleep {mark}")).__enter__()
host.begin([AgentJob(row, {{}}, 0) for row in range(3)], deque())
print("ready", flush=True)
import time
time.sleep(60)
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    deadline = time.monotonic() + 10
    while len(running(f"^sleep {mark}")) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    process.kill()
    process.wait()
    while running(f"sleep {mark}") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not running(f"sleep {mark}")


# HTTP


def send(port: int, data: bytes, wait: float = 5.0) -> bytes:
    """What the server answers to bytes."""
    parts = []
    with socket.create_connection(("127.0.0.1", port), timeout=wait) as connection, contextlib.suppress(OSError):
        connection.sendall(data)
        while part := connection.recv(65536):
            parts.append(part)
            if b"\r\n\r\n" in b"".join(parts) and b"}" in part:
                break
    return b"".join(parts)


def post(body: bytes, **headers: str) -> bytes:
    named = {"Host": "localhost:1", "Content-Length": str(len(body)), **headers}
    lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in named.items())
    return f"POST /v1/chat/completions HTTP/1.1\r\n{lines}\r\n".encode() + body


GOOD = json.dumps({"messages": [HELLO]}).encode()
RAW = {
    "another host": (post(GOOD, Host="evil.example:80"), b" 400 "),
    "another site": (post(GOOD, Origin="http://evil.example"), b" 400 "),
    "no key": (post(GOOD), b" 401 "),
    "another key": (post(GOOD, Authorization="Bearer another"), b" 401 "),
    "no JSON": (post(b"{"), b" 400 "),
    "no method": (b"\0\1\2\r\n\r\n", b" 400 "),
    "another path": (b"GET /etc/passwd HTTP/1.1\r\nHost: localhost\r\n\r\n", b" 404 "),
    "another method": (b"PUT /v1/models HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n", b" 405 "),
    "a long head": (b"GET /v1/models HTTP/1.1\r\nX: " + b"a" * 200_000 + b"\r\n\r\n", b" 400 "),
    "a long body": (post(b" " * 11_000_000), b" 400 "),
    "a length that is none": (b"POST /v1/models HTTP/1.1\r\nHost: localhost\r\nContent-Length: x\r\n\r\n", b" 400 "),
}


def test_bytes_of_any_kind_are_answered_or_refused(program):
    with AgentHost(AgentSettings(f"{program}:play")) as host:
        for name, (data, status) in RAW.items():
            answer = send(host.server.port, data)
            assert status in answer or (not answer and "long" in name), (name, answer)
        cut = http.client.HTTPConnection("127.0.0.1", host.server.port)
        cut.putrequest("POST", "/v1/chat/completions")
        cut.putheader("Content-Length", "100")
        cut.endheaders(b"{")  # the rest never comes
        ends = play(host, [AgentJob(0, {"kind": "is paid"}, 0)])
        assert ends[0].rewards["return"] == 0.5, "others are answered meanwhile"
        assert threading.active_count() < 50
