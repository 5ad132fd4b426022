"""The conversation in a browser."""

import http.client
import json
import os
import re
import shutil
import signal
import socket
import struct
import threading
import time
from contextlib import closing

import jax
import pytest

from envs import make_env
from envs.settings import EnvConfig
from extras import chat_web as web
from extras.chat_web import ChatServer, load_examples, serve, trained_settings
from tests.helpers import ROOT
from tests.scripted import Scripted


@pytest.fixture
def server():
    def hostile(show):
        show("<img src=x")
        return "<img src=x onerror='window.ran = 1'>"

    def slow(show):
        for i in range(1000):
            show(f"{i} ")
            time.sleep(0.02)

    models = [Scripted({"hostile": hostile, "slow": slow}), Scripted({})]
    models[1].name, models[1].has_one_turn = "</script><b>trained", True
    with ChatServer(models, 0, ["3 7", "</script>{{data}}"]) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def post(server, body, timeout=60, **headers):
    """Returns the status and the objects of an answer to a request for a reply."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=timeout)
    origin = {"Host": f"localhost:{server.server_port}", "Origin": f"http://localhost:{server.server_port}"}
    connection.request("POST", "/reply", json.dumps(body), origin | headers)
    with closing(connection), closing(connection.getresponse()) as answer:
        lines = answer.read().splitlines() if answer.status == 200 else []
    return answer.status, [json.loads(line) for line in lines]


def test_the_server_answers_its_own_page_alone(server):
    body = {
        "model": 0,
        "temperature": "0.5",
        "messages": [{"role": "user", "content": "hostile"}],
    }
    status, lines = post(server, body)
    assert status == 200
    assert [line["text"][:10] for line in lines[:2]] == ["<img src=x"] * 2
    assert lines[2:] == [{"right": False}]
    assert server.models[0].changes == [("temperature", "0.5")]
    assert post(server, body | {"temperature": "hot"}) == (200, [{"error": "it is a number"}])
    assert post(server, body, Origin="http://example.org")[0] == post(server, body, Host="example.org")[0] == 400
    for wrong in (
        {"model": 2},
        {"model": True},
        {"messages": 1},
        {"messages": [{"role": "system", "content": ""}]},
    ):
        assert post(server, body | wrong)[0] == 400
    assert server.socket.getsockname()[0] == "127.0.0.1"


def test_reply_is_not_computed_if_stopped_while_it_waits(server):
    body = {
        "model": 0,
        "temperature": "0.5",
        "messages": [{"role": "user", "content": "hostile"}],
    }
    with server.lock, pytest.raises(TimeoutError):
        post(server, body, timeout=0.2)
    post(server, body | {"model": 1})
    time.sleep(0.2)  # a reply that had waited would have been given by now
    assert server.models[0].seen == []
    assert len(server.models[1].seen) == 1


def send(server, text, length):
    """Begins a request for a reply and returns its connection; nothing of the answer is read."""
    connection = socket.create_connection(("127.0.0.1", server.server_port), timeout=20)
    host = f"localhost:{server.server_port}"
    head = f"POST /reply HTTP/1.1\r\nHost: {host}\r\nOrigin: http://{host}\r\nContent-Length: {length}\r\n\r\n"
    connection.sendall(head.encode() + text)
    return connection


REQUEST = {
    "model": 0,
    "temperature": "0.5",
    "messages": [{"role": "user", "content": "hostile"}],
}


@pytest.mark.parametrize(
    ("length", "status"),
    [
        ("-1", b"400"),
        ("x", b"400"),
        ("9", b""),
    ],
)
def test_no_request_is_read_beyond_its_length_or_for_ever(length, status, server, monkeypatch, capsys):
    # The test does not wait for seconds.
    monkeypatch.setattr(web.Handler, "timeout", 0.3)
    with send(server, b"{", length) as connection:
        assert connection.makefile("rb").readline().split()[1:2] == [status] * bool(status)
    assert capsys.readouterr().err == ""
    assert server.models[0].seen == []


def test_a_page_that_does_not_read_holds_nobody_up(server, monkeypatch, capsys):
    # The test does not wait for seconds.
    monkeypatch.setattr(web.Handler, "timeout", 0.5)
    def flood(show):
        for size in range(100):
            show("x" * size * 10**5)
        return "flooded"

    server.models[0].replies["flood"] = flood
    body = json.dumps(REQUEST | {"messages": [{"role": "user", "content": "flood"}]}).encode()
    with send(server, body, len(body)):
        while not server.models[0].seen:
            time.sleep(0.01)
        assert post(server, REQUEST | {"model": 1}) == (200, [{"text": "yes"}, {"right": False}])
    with send(server, body, len(body)) as connection:  # resets the connection
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    assert post(server, REQUEST | {"model": 1})[0] == 200
    assert capsys.readouterr().err == ""


def test_the_page_is_told_what_is_compiled(server):
    server.models[0].replies["new"] = lambda show: str(jax.jit(lambda x: 1 + x)(41))
    lines = post(server, REQUEST | {"messages": [{"role": "user", "content": "new"}]})[1]
    compiled = [line["compiling"] for line in lines if "compiling" in line]
    assert compiled[-1] == "<lambda>"
    assert lines[-2] == {"text": "42"}


def test_examples_are_problems_that_the_environment_grades(tmp_path):
    config = trained_settings("models/tiny")
    assert config.env_name == "countdown"
    assert "prompt=bare" in config.env_options
    examples, has_one_turn = load_examples(config)
    prompt = next(iter(examples.numbers))
    assert has_one_turn
    assert re.fullmatch(r"Use \d+ \d+ \d+ to make \d+\.", prompt)
    env = make_env("countdown-test", **config.options("countdown"))
    replies = env.examples(env.problem(0))
    assert [examples.grade(prompt, replies[name]) for name in ("right", "wrong")] == [True, False]
    assert examples.grade("Use 1 1 to make 2.", "") is None
    assert examples.grade(prompt, "9**9**9**9") is False
    examples.scorer.close()
    assert load_examples(EnvConfig("guess", "prompt=bare"))[1] is False, "episodes"
    assert load_examples(EnvConfig("guess", "unknown=1"))[0].numbers == {}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"env_name": "countdown"},
        {"env_name": "dataset", "reward": "a.py:f", "run": {"host": "here"}},
        {"env_name": "dataset", "env_options": "reward=a.py:f", "run": {"host": "here"}},
        {"env_name": "python", "env_options": "sandbox=off", "run": {"host": "here"}},
        {"env_name": "python", "run": {"host": "here"}},
    ],
)
def test_what_is_unknown_or_would_run_code_is_no_example(settings, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(settings))
    shutil.copytree(ROOT / "models/tiny", tmp_path / "step1")
    is_known = "run" in settings and len(settings) == 2
    assert (trained_settings(str(tmp_path / "step1")) is not None) == is_known


def test_errors_are_told_to_the_page(server, capsys):
    def fail(show):
        raise TypeError("of the tokenizer")

    server.models[0].replies["fail"] = fail
    messages = [{"role": "user", "content": "fail"}]
    found = post(server, REQUEST | {"messages": messages})[1]
    assert found == [{"error": "TypeError: of the tokenizer"}]
    assert "Traceback" in capsys.readouterr().err
    long = post(server, REQUEST | {"messages": [{"role": "user", "content": "x" * (10**6 + 1)}]})[1]
    assert long == [{"error": "the conversation has 1,000,001 characters, and may have 1,000,000"}]
    assert server.models[0].seen == [["fail"]]


def test_ctrl_c_ends_a_reply_that_is_being_drawn():
    started = threading.Event()

    def endless(show):
        started.set()
        while True:
            show("more")
            time.sleep(0.01)

    def ask(server):
        with send(server, body, len(body)) as connection:
            started.wait(20)
            os.kill(os.getpid(), signal.SIGINT)
            connection.makefile("rb").read()

    body = json.dumps(REQUEST | {"messages": [{"role": "user", "content": "endless"}]}).encode()
    servers = []

    class Recording(ChatServer):
        def __enter__(self):
            servers.append(self)
            threading.Thread(target=ask, args=(self,), daemon=True).start()
            return super().__enter__()

    with pytest.MonkeyPatch.context() as patch:
        # Keeps the server, so that the test can close it.
        patch.setattr(web, "ChatServer", Recording)
        serve([Scripted({"endless": endless})], 0)
    assert servers[0].is_ending
    assert not servers[0].lock.locked()


def test_browser_talks_to_both_models_and_shows_replies_as_text(server, chromium):
    def wait(script):
        end = time.monotonic() + 30
        while not chromium.execute_script(f"return {script}"):
            assert time.monotonic() < end, f"never true: {script}"
            time.sleep(0.05)

    def say(text):
        chromium.execute_script("find('text').value = arguments[0]; find('send').click()", text)

    def texts(selector):
        return [element.text for element in chromium.find_elements("css selector", selector)]

    chromium.get(f"http://localhost:{server.server_port}/")
    assert texts("h2") == ["scripted", "</script><b>trained · trained on single replies: each message begins anew"]
    assert texts("#examples button") == ["3 7", "</script>{{data}}"]
    chromium.execute_script("document.querySelector('#examples button').click()")
    wait("stopping === null")
    assert texts(".right") == ["✓ right"] * 2
    chromium.execute_script("find('new').click()")
    background = "return getComputedStyle(document.querySelector('textarea')).backgroundColor"
    by_day = chromium.execute_script(background)
    chromium.execute_script("find('theme').click()")
    assert chromium.execute_script(background) != by_day
    say("hostile")
    wait("stopping === null")
    shown = ["hostile", "<img src=x onerror='window.ran = 1'>", "✗ wrong", "hostile", "yes", "✗ wrong"]
    assert texts(".message") == shown
    say("slow")
    wait("document.querySelector('.waiting').textContent !== ''")
    chromium.execute_script("find('stop').click()")
    wait("stopping === null")
    say("more")
    wait("stopping === null")
    first, second = (model.seen[-1] for model in server.models)
    assert first[3].strip().isdigit()
    assert first[2::2] == ["slow", "more"]
    assert second == ["more"], "one turn"
    chromium.execute_script("find('new').click()")
    assert texts(".message") == []
    assert chromium.execute_script("return window.ran") is None
    assert [line for line in chromium.get_log("browser") if "favicon" not in line["message"]] == []
