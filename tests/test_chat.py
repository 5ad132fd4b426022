"""The conversation on the terminal."""

import os
import subprocess
import sys

import pytest
from helpers import ROOT

from envs import make_env
from utils.evaluation.chat import StreamPrinter, converse


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
    converse(reply)
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
    converse(reply)
    assert seen == [["one"], ["one", "half a tho", "two"], ["one", "half a tho", "three"]]
    assert "[stopped]" in (out := capsys.readouterr().out) and "9999 tokens; /new begins another" in out


def test_a_stream_shows_no_half_characters_and_no_escape_sequences(capsys):
    stream = StreamPrinter()
    for text in ("a", "a\ufffd", "a\u2713", "a\u2713\x1b[31mred", "a\u2713\x1b[31mred!"):
        stream(text)
    assert capsys.readouterr().out == "a\u2713red!"


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="needs a pseudo-terminal")
def test_the_command_talks_on_a_terminal():
    command = [sys.executable, ROOT / "core" / "sampling.py", "--ckpt_dir", ROOT / "models" / "tiny"]
    ours, theirs = os.openpty()
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), theirs)
    process = subprocess.Popen([*command, "--num_generation_tokens", "8"], **streams)
    said, answers = b"", [b"Use 3 7 12 to make 24.\n", b"\x04"]
    while answers:
        said += os.read(ours, 4096)
        if said.count(b"\n> ") == 3 - len(answers):
            os.write(ours, answers.pop(0))
    assert process.wait(60) == 0
    assert b"Ctrl-D ends" in said


def test_an_episode_is_played_by_hand_or_by_the_model():
    command = [sys.executable, ROOT / "core" / "sampling.py", "--env_name", "wordle", "--env_options", "prompt=bare"]
    word = make_env("wordle").problem(57).answer
    lines = f"DADDY\n\n{word}\x1b[31m\n"
    output = subprocess.run([*command, "--task", "57"], input=lines, capture_output=True, text=True, check=True).stdout
    assert "[user] Guess the word." in output and "[user] d a d d y" in output and "\x1b" not in output
    assert output.endswith("stop done: return 0.9, correct_answer 1, turns 3, invalid 1, guesses 3\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--env_name", "poem"], "poem has one turn"),
        (["--env_name", "guess", "--task", "-1"], "--task -1: guess has 0 to 99999"),
        (["--env_name", "guess", "--env_options", "word=a"], "has no option 'word'"),
    ],
)
def test_what_cannot_be_played_is_named(arguments, message):
    command = [sys.executable, ROOT / "core" / "sampling.py", *arguments]
    process = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert process.returncode == 2 and message in process.stderr
