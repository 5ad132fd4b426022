"""The conversation in a browser."""

import http.client
import json
import os
import re
import shutil
import signal
import threading
import time
from contextlib import closing

import pytest

from envs import make_env
from envs.settings import EnvConfig
from extras import chat_web as web
from extras.chat_web import ChatServer, load_examples, serve, trained_settings
from tests.helpers import ROOT
from tests.scripted import Scripted

REQUEST = {"model": 0, "temperature": "0.5", "messages": [{"role": "user", "content": "hostile"}]}


def hostile(show):
    show("<img src=x")
    return "<img src=x onerror='window.ran = 1'>"


def slow(show):
    for i in range(1000):
        show(f"{i} ")
        time.sleep(0.02)


def fail(show):
    raise TypeError("of the tokenizer")


@pytest.fixture
def server():
    models = [Scripted({"hostile": hostile, "slow": slow, "fail": fail}), Scripted({})]
    models[1].name, models[1].has_one_turn = "</script><b>trained", True
    with ChatServer(models, 0, ["3 7", "</script>{{data}}"]) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def post(server, body, **headers):
    """Returns the status and the objects of an answer to a request for a reply."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    origin = {"Host": f"localhost:{server.server_port}", "Origin": f"http://localhost:{server.server_port}"}
    connection.request("POST", "/reply", json.dumps(body), origin | headers)
    with closing(connection), closing(connection.getresponse()) as answer:
        lines = answer.read().splitlines() if answer.status == 200 else []
    return answer.status, [json.loads(line) for line in lines]


def test_the_server_answers_its_own_page_alone(server, monkeypatch):
    status, lines = post(server, REQUEST)
    assert status == 200
    assert [line["text"][:10] for line in lines[:2]] == ["<img src=x"] * 2
    assert lines[2:] == [{"right": False}]
    assert server.models[0].changes == [("temperature", "0.5")]
    assert server.socket.getsockname()[0] == "127.0.0.1"
    assert post(server, REQUEST, Origin="http://example.org")[0] == 400
    assert post(server, REQUEST, Host="example.org")[0] == 400
    for wrong in ({"model": 2}, {"messages": 1}, {"messages": [{"role": "system", "content": ""}]}):
        assert post(server, REQUEST | wrong)[0] == 400
    for length in ("-1", "x", "9" * 9):
        assert post(server, REQUEST, **{"Content-Length": length})[0] == 400


def test_errors_are_told_to_the_page(server, capsys):
    assert post(server, REQUEST | {"temperature": "hot"}) == (200, [{"error": "it is a number"}])
    failing = REQUEST | {"messages": [{"role": "user", "content": "fail"}]}
    assert post(server, failing) == (200, [{"error": "TypeError: of the tokenizer"}])
    assert "Traceback" in capsys.readouterr().err


def test_examples_are_problems_that_the_environment_grades():
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
    examples.scorer.close()
    assert load_examples(EnvConfig("guess", "prompt=bare"))[1] is False, "episodes"
    assert load_examples(EnvConfig("guess", "unknown=1"))[0].numbers == {}


@pytest.mark.parametrize("options", ["", "sandbox=off", None])
def test_what_is_unknown_or_would_run_code_is_no_example(options, tmp_path):
    settings = {"env_name": "python", "env_options": options, "run": {"host": "here"}}
    (tmp_path / "config.json").write_text(json.dumps({} if options is None else settings))
    shutil.copytree(ROOT / "models/tiny", tmp_path / "step1")
    assert (trained_settings(str(tmp_path / "step1")) is not None) == (options == "")


def test_ctrl_c_ends_a_reply_that_is_being_drawn(monkeypatch):
    servers = []

    def endless(show):
        os.kill(os.getpid(), signal.SIGINT)
        while True:
            show("more")
            time.sleep(0.01)

    class Recording(ChatServer):
        def __enter__(self):
            servers.append(self)
            threading.Thread(target=post, args=(self, REQUEST), daemon=True).start()
            return super().__enter__()

    monkeypatch.setattr(web, "ChatServer", Recording)  # keeps the server, to which the request goes
    serve([Scripted({"hostile": endless})], 0)
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
