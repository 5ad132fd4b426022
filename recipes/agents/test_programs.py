"""The endpoint without a model: what requests ask for or are refused, which continue, and how programs end."""

import asyncio
import http.client
import io
import json
import logging
import os
import re
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

pytest.importorskip("uvicorn")

from envs.base import Reply  # noqa: E402
from envs.scoring.worker import Failure  # noqa: E402
from models.tokenizer import load_tokenizer  # noqa: E402
from recipes.agents.agent import AgentSettings  # noqa: E402
from recipes.agents.endpoint import BUDGET, Asked, Endpoint, Session  # noqa: E402
from recipes.agents.host import AgentHost, AgentJob, passed_variables, read_rewards  # noqa: E402
from recipes.agents.protocol import ChatRequest, Sampled, reply_message  # noqa: E402
from tests.helpers import ROOT  # noqa: E402
from utils.settings.errors import UserError  # noqa: E402

HELLO = {"role": "user", "content": "hello"}


# Sessions


class Script(Endpoint):
    """Answers each request by its number; `is_whole`: whether its rows hold what it answers."""

    def __init__(self, num_rows: int = 9, max_calls: int = 0, is_whole: bool = True, num_places: int = 0):
        super().__init__("script", "qwen", max_calls, num_places)
        self.socket.close()
        self.tokenizer = load_tokenizer(ROOT / "models/tiny")
        self.rows, self.asked, self.is_whole = deque(range(num_rows)), [], is_whole
        self.talker = Session("key")

    def take_row(self, session):
        return self.rows.popleft()

    def session_of(self, key):
        return self.talker

    def publish(self, row, asked):
        self.asked.append((row, asked))
        reply = Sampled(Reply(f"reply {len(self.asked)}"), (1,), (-0.5,), is_whole=self.is_whole)
        asyncio.get_running_loop().call_soon(self.settle, asked, reply)


def asking(is_retry: bool = False) -> SimpleNamespace:
    """The HTTP part of a request."""
    url = SimpleNamespace(hostname="localhost")
    return SimpleNamespace(url=url, headers={"x-stainless-retry-count": str(int(is_retry))})


def talk(script: Script, *requests: tuple) -> list[dict]:
    """The messages that answer these requests of one session: messages, whether it is a retry, other fields."""

    async def run():
        said = []
        for messages, is_retry, *more in requests:
            sent = {"messages": [m if isinstance(m, dict) else said[m] for m in messages], **(more or [{}])[0]}
            request = ChatRequest(**sent)
            sampled = await script.replies(asking(is_retry), request, [()])
            said.append(reply_message(request, sampled[0], script.dialect))
        return said

    return asyncio.run(run())


MORE = {"role": "user", "content": "more"}


def test_a_request_continues_behind_the_replies_as_they_were_returned():
    script = Script()
    other = {"role": "assistant", "content": "reply 1!"}
    talk(
        script,
        ([HELLO], False),
        ([HELLO, 0, MORE], False),  # continues
        ([HELLO, other, MORE], False),  # a reply that was never given: a fork
        ([HELLO], False),  # the same again, not said to be a retry: a fork
        ([HELLO, 0, MORE, 1, HELLO], False),  # continues the first
    )
    assert [row for row, _ in script.asked] == [0, 0, 1, 2, 0]
    assert [asked.is_new for _, asked in script.asked] == [True, False, True, True, False]
    assert [len(asked.messages) for _, asked in script.asked] == [1, 1, 3, 1, 1]
    assert (script.talker.num_calls, len(script.dialogues)) == (5, 3)


@pytest.mark.parametrize(
    ("fields", "is_new"),
    [
        ({}, False),
        ({"temperature": 0.5, "max_tokens": 3, "stop": "x", "seed": 1, "logprobs": True}, False),
        ({"chat_template_kwargs": {"enable_thinking": True}}, True),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, True),
        ({"n": 2}, True),  # choices are samples of their own
    ],
)
def test_a_turn_is_what_the_client_sent(fields, is_new):
    for is_whole in (True, False):  # a reply that no row holds is not continued
        script = Script(is_whole=is_whole)
        talk(script, ([HELLO], False), ([HELLO, 0, MORE], False, fields))
        assert {asked.is_new for _, asked in script.asked[1:]} == {is_new or not is_whole}
        assert [asked.index for _, asked in script.asked[1:]] == [*range(fields.get("n", 1))]


def test_a_retry_gets_the_answer_of_the_one_equal_request():
    script = Script()
    said = talk(script, ([HELLO], False), ([HELLO], True), ([HELLO], True, {"max_tokens": 3}), ([HELLO], False))
    assert said[0] == said[1] != said[2]
    assert (len(script.asked), script.talker.num_calls) == (3, 3)
    again = talk(script, ([HELLO], True))
    assert again[0] not in said, "of two equal requests nobody knows which is meant: a new sample"


def test_a_request_whose_program_ends_meanwhile_is_refused():
    """Nobody would end its row, and the run would wait for it forever."""
    script, sessions = Script(), [Session("key")]
    script.session_of = lambda _: sessions.pop()  # raises when it is asked again
    with pytest.raises(IndexError):
        talk(script, ([HELLO], False))
    assert not script.asked


def test_requests_beyond_the_rows_wait_in_their_order():
    script = Script(num_places=2)
    held = []
    script.settle = lambda asked, sampled: held.append(asked)

    async def run():
        sent = [ChatRequest(messages=[HELLO], max_tokens=i) for i in range(1, 6)]
        tasks = [asyncio.ensure_future(script.replies(asking(), request, [()])) for request in sent]
        for _ in range(5):
            while not held:
                await asyncio.sleep(0)
            assert sum(x.request is not None for _, x in script.asked if not x.reply.done()) <= 2
            held.pop(0).reply.set_result(Sampled(Reply("a"), (1,), (-0.5,)))
        await asyncio.gather(*tasks)

    asyncio.run(run())
    assert [asked.request.max_tokens for _, asked in script.asked] == [1, 2, 3, 4, 5]


def test_behind_the_budget_comes_a_text_that_is_not_sampled():
    script = Script(max_calls=1)
    said = talk(script, ([HELLO], False), ([HELLO, 0, HELLO], False))
    assert said[1]["content"] == BUDGET
    assert len(script.asked) == 1


# Rewards


@pytest.mark.parametrize(
    ("line", "rewards"),
    [
        ("0.5", {"return": 0.5, "correct_answer": 0.0}),
        ("1", {"return": 1.0, "correct_answer": 1.0}),
        ('{"reward": 2, "style": 1}', {"return": 2.0, "style": 1.0, "correct_answer": 1.0}),
        ('{"a": 0.25, "b": 0.25}', {"a": 0.25, "b": 0.25, "return": 0.5, "correct_answer": 0.0}),
        ('{"return": 1, "correct_answer": 0}', {"return": 1.0, "correct_answer": 0.0}),
        ("done", {}),
        ("null", "null"),
        ('{"reward": null}', "numbers"),
        ("NaN", "numbers"),
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
    if kind == "logs":
        print("INFO: closed", file=sys.stderr, flush=True)
        os.write(1, b"0.5\\n")
        os.write(2, b"Exception ignored in: <x>\\n")
        os._exit(0)
    if kind == "prints null":
        return None
    if kind == "says nothing more":
        os._exit(0)
    return 0.5
"""
ENDS = {  # of programs by kind; rewards, or a part of the reason why there are none
    "is paid": 0.5,
    "leaves processes": 0.5,
    "logs": 0.5,  # what comes on stderr is no reward
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


def play(host: AgentHost, jobs: list[AgentJob]) -> dict[int, dict | Failure]:
    """The ends of programs, whose requests are answered."""
    rows, ends = {job.row for job in jobs}, {}
    host.tokenizer = load_tokenizer(ROOT / "models/tiny")
    host.begin(jobs, deque())
    while len(ends) < len(jobs):
        for row, outcome in host.take(rows - ends.keys(), 1).items():
            if isinstance(outcome, Asked):
                host.answer(row, outcome, Sampled(Reply(f"reply of {row}"), (1,), (-0.5,)))
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
            assert isinstance(found, dict), (kind, found)
            assert found.get("return", {}) == expected, (kind, found)
    assert not running(mark), "no process is left"
    assert not running(str(program))


def test_a_command_gets_its_row_and_its_endpoint(program):
    script = "import os, json; from agent import ask; print(ask()); print(json.loads(os.environ['ROW'])['x'])"
    command = f'cd {program.parent} && {sys.executable} -c "{script}"'
    with AgentHost(AgentSettings(command, timeout=30.0)) as host:
        ends = play(host, [AgentJob(7, {"x": 0.25}, seed=1)])
    assert ends[7] == {"calls": 1.0, "forks": 0.0, "auxiliary": 0.0, "correct_answer": 0.0, "return": 0.25}


@pytest.mark.parametrize(
    ("agent", "reason"), [("agent.py:absent", "no function absent"), ("absent.py:play", "absent.py")]
)
def test_a_function_that_is_not_there_is_found_at_the_start(program, agent, reason):
    with pytest.raises(UserError, match=reason), AgentHost(AgentSettings(str(program.parent / agent))):
        pass


def test_the_server_leaves_the_handlers_of_other_logs_open():
    handler, settings = logging.StreamHandler(io.StringIO()), AgentSettings("true")
    with AgentHost(settings):
        assert handler in [each() for each in logging._handlerList], "closing takes it off this list"


def test_programs_end_with_the_run(program):
    """A run that is killed takes keeper, wardens and programs with it."""
    mark = str(7_000_000 + os.getpid())
    code = f"""
import sys
sys.path.insert(0, {str(Path(__file__).resolve().parents[2])!r})
from collections import deque
from recipes.agents.host import AgentHost, AgentJob
from recipes.agents.agent import AgentSettings
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

GOOD = json.dumps({"messages": [HELLO]})
CHAT = "/v1/chat/completions"
REQUESTS = {  # method, path, body, a header, status
    "another host": ("POST", CHAT, GOOD, {"Host": "evil.example:80"}, 400),
    "another site": ("POST", CHAT, GOOD, {"Origin": "http://evil.example"}, 400),
    "no key": ("POST", CHAT, GOOD, {}, 401),
    "another key": ("POST", CHAT, GOOD, {"Authorization": "Bearer another"}, 401),
    "another path": ("GET", "/etc/passwd", None, {}, 404),
    "another method": ("PUT", "/v1/models", "", {}, 405),
}


def test_requests_of_others_are_refused_and_hold_nobody_up(program):
    with AgentHost(AgentSettings(f"{program}:play")) as host:
        for name, (method, path, body, headers, status) in REQUESTS.items():
            connection = http.client.HTTPConnection("127.0.0.1", host.port, timeout=10)
            connection.request(method, path, body, headers)
            assert connection.getresponse().status == status, name
        cut = http.client.HTTPConnection("127.0.0.1", host.port)
        cut.putrequest("POST", CHAT)
        cut.putheader("Content-Length", "100")
        cut.endheaders(b"{")  # the rest never comes
        ends = play(host, [AgentJob(0, {"kind": "is paid"}, 0)])
        assert ends[0]["return"] == 0.5
        assert threading.active_count() < 50


def test_programs_get_no_variables_with_the_name_of_a_secret():
    hidden = {"HF_TOKEN": "t", "AWS_SECRET_ACCESS_KEY": "k", "DB_PASSWORD": "p", "WANDB_API_KEY": "k"}
    given = {"PATH": "/bin", "REWARD_SEARCH_KEY": "s", **hidden}
    assert passed_variables(given) == {"PATH": "/bin", "REWARD_SEARCH_KEY": "s", "SEARCH_KEY": "s"}
