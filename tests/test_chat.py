"""The conversation on the terminal."""

import os
import sys

import pytest
from helpers import QUICK, ROOT

from utils.chat import Stream, chat


def test_messages_pile_up_until_a_new_conversation(monkeypatch, capsys):
    lines, seen = iter(["hello", "", "more", "/new", "again"]), []

    def read(prompt):
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    def reply(messages, show):
        seen.append([message["content"] for message in messages])
        show("par")
        return "part"

    monkeypatch.setattr("builtins.input", read)
    chat(reply)
    assert seen == [["hello"], ["hello", "part", "more"], ["again"]]
    assert capsys.readouterr().out.count("part\n") == 3


def test_a_reply_that_is_stopped_or_impossible_does_not_end_the_conversation(monkeypatch, capsys):
    lines, seen = iter(["one", "two", "three"]), []

    def reply(messages, show):
        seen.append([message["content"] for message in messages])
        if messages[-1]["content"] == "one":
            show("half a tho")
            raise KeyboardInterrupt
        if messages[-1]["content"] == "two":
            raise ValueError("prompt of task 1 has 9999 tokens")
        return "yes"

    def read(prompt):
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", read)
    chat(reply)
    assert seen == [["one"], ["one", "half a tho", "two"], ["one", "half a tho", "three"]]
    assert "[stopped]" in (out := capsys.readouterr().out) and "9999 tokens; /new begins another" in out


def test_a_stream_shows_no_half_characters_and_no_escape_sequences(capsys):
    stream = Stream()
    for text in ("a", "a\ufffd", "a\u2713", "a\u2713\x1b[31mred", "a\u2713\x1b[31mred!"):
        stream(text)
    assert capsys.readouterr().out == "a\u2713red!"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs a pseudo-terminal")
def test_the_command_talks_on_a_terminal():
    import pty

    command = [sys.executable, str(ROOT / "core" / "sampling.py"), "--ckpt_dir", str(ROOT / "models" / "tiny")]
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(sys.executable, [*command, "--num_generation_tokens", "8"], os.environ | QUICK)
    said, answers = b"", [b"Use 3 7 12 to make 24.\n", b"\x04"]
    while answers or said.count(b"> ") < 2:
        said += os.read(terminal, 4096)
        if answers and said.count(b"\n> ") == 3 - len(answers):
            os.write(terminal, answers.pop(0))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert b"Ctrl-D ends" in said
