"""The conversation on the terminal."""

import fcntl
import os
import re
import select
import signal
import subprocess
import sys
import termios
import time

import pytest

from core import sampling
from core.chat.models import ChatModelConfig, load_chat_models, prompt_styles
from core.chat.terminal import StreamPrinter, converse
from core.sampling import SamplingCommand, encode_row, read_prompts
from models.memory import Room, page_bytes
from models.pages import new_state
from models.tokenizer import load_tokenizer, with_training_prompts
from tests.helpers import ROOT
from tests.scripted import Scripted
from utils.devices.sharding import single_device
from utils.settings.config import make_config
from utils.settings.errors import UserError


def talk(monkeypatch, lines, replies=()):
    """Holds a conversation of these lines; an exception among them is raised where it would be read."""
    model = Scripted(dict(replies))
    rest = iter(lines)

    def read(prompt):
        line = next(rest, EOFError)
        if isinstance(line, type):
            raise line
        return line

    # What a user types.
    monkeypatch.setattr("builtins.input", read)
    converse(model)
    return model


def test_messages_pile_up_until_a_new_conversation(monkeypatch, capsys):
    def part(show):
        show("par")
        return "part"

    lines = ["hello", "", "more", "/new", KeyboardInterrupt, "again", "exit", "not read"]
    model = talk(monkeypatch, lines, {line: part for line in lines[:6] if isinstance(line, str)})
    assert model.seen == [["hello"], ["hello", "part", "more"], ["again"]]
    assert capsys.readouterr().out.count("part\n") == 3


def test_commands_are_no_messages(monkeypatch, capsys):
    assert talk(monkeypatch, ["/help", "/sett", "/quit", "x"]).seen == []
    assert capsys.readouterr().out.count("/new ") == 3


def test_conversation_goes_on_if_a_reply_is_stopped(monkeypatch, capsys):
    def stop(show):
        show("half a tho")
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)  # once more does no harm
        show("half a thought")
        raise AssertionError("it goes on")

    def stop_at_once(show):
        signal.raise_signal(signal.SIGINT)
        show("")
        raise AssertionError("it goes on")

    def fail(show):
        raise UserError("prompt of task 1 has 9999 tokens")

    before = signal.getsignal(signal.SIGINT)
    replies = {"none": stop_at_once, "one": stop, "two": fail}
    model = talk(monkeypatch, ["none", "one", "two", "three"], replies)
    kept = ["one", "half a thought"]
    assert model.seen == [["none"], ["one"], [*kept, "two"], [*kept, "three"]], "without an empty reply"
    out = capsys.readouterr().out
    assert out.count("[stopped]") == 2
    assert "9999 tokens; /new begins another" in out
    assert signal.getsignal(signal.SIGINT) is before


def test_stream_shows_no_half_characters_or_escapes(capsys):
    stream = StreamPrinter()
    for text in ("a", "a\ufffd", "a\u2713", "a\u2713\x1b[31mred", "a\u2713\x1b[31mred!"):
        stream(text)
    assert capsys.readouterr().out == "a\u2713red!"


@pytest.mark.parametrize("thinking", ["", "on", "off"])
def test_models_side_by_side_are_asked_as_the_trained_one_was(thinking, tmp_path):
    base = load_tokenizer(ROOT / "models" / "tiny")
    with_training_prompts(base, True, "<think>").save(tmp_path)
    trained = load_tokenizer(tmp_path)
    messages = [{"role": "user", "content": "Use 3 7 12 to make 24."}]
    config = SamplingCommand(model=ChatModelConfig(thinking=thinking))
    asked = [base.chat(messages, *style) for style in prompt_styles([base, trained], thinking)]
    assert asked == [base.chat(messages, thinking != "off", "<think>")] * 2
    alone = encode_row({"messages": messages}, base, config)
    switch = {"enable_thinking": thinking == "on"} if thinking else {}
    text = base.hf.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, **switch)
    assert alone == base.encode(text), "a model without a record of training as its template has it"


def test_a_conversation_and_its_reply_fill_the_context(monkeypatch):
    (model,) = load_chat_models([str(ROOT / "models/tiny")], SamplingCommand(), single_device())
    assert model.sampler.max_prompt_tokens + model.sampler.max_new_tokens == model.sampler.model.num_positions
    room, made = 1 << 22, []  # bytes: little, as the conversation is short
    monkeypatch.setattr("core.sampler.new_state", lambda *sizes: made.append(sizes) or new_state(*sizes))
    monkeypatch.setattr("core.chat.models.sampling_room", lambda model, layout, *_: Room(layout, room))
    assert model.reply([{"role": "user", "content": "Use 3 7 12 to make 24."}], lambda text: None)
    sampling.main(make_config(SamplingCommand, num_samples=4, num_generation_tokens=8))
    assert all(num_pages * page_bytes(model, page) <= room for model, _, num_pages, page, _ in made)


def take_terminal():
    """Makes standard input the terminal whose Ctrl-C goes to this process; runs in the child."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "openpty"), reason="needs a pseudo-terminal")
def test_the_command_talks_on_a_terminal():
    command = [sys.executable, ROOT / "core" / "sampling.py", "--ckpt_dir", ROOT / "models" / "tiny"]
    ours, theirs = os.openpty()
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), theirs)
    limit = ["--num_generation_tokens", "8"]
    process = subprocess.Popen([*command, *limit], **streams, start_new_session=True, preexec_fn=take_terminal)
    said = b""

    def read_until(text):
        nonlocal said
        while text not in said:
            assert select.select([ours], [], [], 60)[0], f"{text} never came after {said}"
            said += os.read(ours, 4096)
        said = said[said.index(text) + len(text) :]

    read_until(b"Ctrl-C stops a reply")
    read_until(b"> ")
    os.write(ours, b"Use 3 7 12 to make 24.\n")
    read_until(b"24.\r\n")
    time.sleep(0.1)  # the line has been read: Ctrl-C before that would take it from the terminal
    os.write(ours, b"\x03")
    read_until(b"> ")
    os.write(ours, b"\x1b[A\n")  # up: the line before
    read_until(b"24.")
    read_until(b"> ")
    os.write(ours, b"\x04")
    assert process.wait(60) == 0


PROMPT_FILES = {
    "line separators": ("a.jsonl", '{"prompt": "a\u2028b\u2029c\u0085d"}\n\n{"prompt": "e"}\n'.encode(), 2),
    "a table": ("a.csv", b"prompt,n\na,1\nb,2\n", 2),
    "latin-1": ("a.jsonl", b'{"prompt": "caf\xe9"}', "a.jsonl is not UTF-8; from Latin-1"),
    "half a pair": ("a.jsonl", b'{"prompt": "\\ud83d"}', "a.jsonl:1: it holds"),
    "a number": ("a.jsonl", b'{"prompt": "a"}\n{"prompt": 5}', "a.jsonl:2: its prompt is neither text nor"),
    "no prompt": ("a.jsonl", b'{"text": "a"}', 'a.jsonl:1 has neither "prompt" nor "messages"'),
    "no content": ("a.jsonl", b'{"messages": [{"role": "user"}]}', "a.jsonl:1: the content of message 1 is null"),
    "nothing": ("a.jsonl", b"\n", "a.jsonl is empty"),
    "half a line": ("a.jsonl", b'{"prompt": ', "a.jsonl is not JSON"),
}


@pytest.mark.parametrize("name", PROMPT_FILES)
def test_rows_of_prompts_are_read_or_named(name, tmp_path):
    file, content, expected = PROMPT_FILES[name]
    (tmp_path / file).write_bytes(content)
    if isinstance(expected, int):
        assert len(read_prompts(str(tmp_path / file))) == expected
    else:
        with pytest.raises(UserError, match=re.escape(expected)):
            read_prompts(str(tmp_path / file))
