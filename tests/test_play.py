"""How environments are played: which problems, under which limits and options, and what is forced at the end."""

import unicodedata
from functools import partial

import numpy as np
import pytest
from helpers import MODEL, ROOT, Letters

from core import eval as evaluation
from core.sampling import Sampler, SamplingConfig
from envs import make_env
from envs.base import Env, Problem
from models.tokenizer import load_tokenizer
from utils.sharding import single_device
from utils.show import MAX_MADE_UP, TokenBound, show, tasks_that_fit

LIMIT = 40  # tokens of a prompt


class Rows(Env):
    """One problem in `every` is longer than the limit."""

    def __init__(self, num_tasks: int, every: int, is_generated: bool = False):
        self.num_tasks, self.every, self.is_generated = num_tasks, every, is_generated

    def problem(self, index: int) -> Problem:
        length = LIMIT + 1 if index % self.every == self.every - 1 else LIMIT
        return Problem([{"role": "user", "content": "x" * length}])


def in_letters(problem: Problem) -> list[int]:
    return [ord(c) for message in problem.messages for c in message["content"]]


@pytest.mark.parametrize(
    ("env", "num_dropped"),
    [
        (Rows(30, 3), 10),
        (Rows(100_050, 50), 2001),  # a file of any size
        (Rows(30, 3, is_generated=True), 10),
        (Rows(MAX_MADE_UP + 100, MAX_MADE_UP + 1, is_generated=True), None),  # so rare that the sample holds none
        (Rows(MAX_MADE_UP + 2, 1, is_generated=True), MAX_MADE_UP + 2),
        (Rows(MAX_MADE_UP + 2, 2, is_generated=True), MAX_MADE_UP // 2 + 1),
    ],
)
def test_long_prompts_are_dropped_by_the_kind_of_environment(env, num_dropped):
    tasks = tasks_that_fit(env, in_letters, LIMIT)
    if num_dropped is None:
        assert tasks is None
    else:
        is_long = np.arange(env.num_tasks) % env.every == env.every - 1
        assert is_long.sum() == num_dropped and (tasks == np.flatnonzero(~is_long)).all()


@pytest.mark.parametrize("folder", ["models/tiny", "tests/fixtures/qwen2-tied", "tests/fixtures/qwen3-tied"])
def test_the_bound_on_tokens_is_one(folder):
    tokenizer, rng = load_tokenizer(ROOT / folder), np.random.default_rng(0)
    pieces = [*"ab  \n\t.,<>/{}é日😀'0123\u00a0\u3000", "the ", "ing", " answer", "<think>", "<|im_end|>", "\r\n"]
    encode = partial(evaluation.encode, tokenizer)
    bound = TokenBound(encode)
    for i in range(300):
        contents = ["".join(rng.choice(pieces, rng.integers(1, 30))) for _ in range(1 + i % 3)]
        roles = ("system", "user", "assistant")[: len(contents)]
        messages = [{"role": role, "content": x} for role, x in zip(roles, contents, strict=True)]
        problem = Problem(messages, thinking=i % 2 > 0, prefix="<think>" * (i % 5 == 0), plain=i % 7 == 0)
        assert bound(problem) >= len(encode(problem)), messages


def test_prompts_that_are_all_too_long_end_the_start_with_one_sentence():
    config = SamplingConfig(prompt_length=64)
    for name in ("countdown", "countdown-test"):
        with pytest.raises(ValueError, match=f"^all prompts of {name} have more than 64 tokens: raise --prompt_length"):
            evaluation.find_tasks(config, name, make_env(name), Letters(), single_device())


def test_what_was_dropped_is_printed_with_the_number_of_the_problem(capsys):
    evaluation.find_tasks(SamplingConfig(prompt_length=LIMIT), "mine", Rows(30, 3), Letters(), single_device())
    assert capsys.readouterr().out == "mine: 10 prompts of more than 40 tokens are left out, from problem 2 on\n"


def test_a_long_prompt_that_the_sample_missed_is_named_by_its_problem(capsys):
    env, tokenizer = Rows(10, 10, is_generated=True), Letters()
    sampler = Sampler(MODEL, 8, (), max_prompt_tokens=LIMIT, tokenizer=tokenizer)
    player = evaluation.Player(env, tokenizer, sampler, None, single_device(), 4, name="mine")
    with pytest.raises(SystemExit):
        player.play({}, np.array([0, 9]), 2, None, places=np.array([100, 101]))
    error = capsys.readouterr().err
    assert error.startswith("error: the prompt of problem 9 of mine has 41 tokens, more than --prompt_length 40: ")


HOSTILE = "\x1b]52;c;cm0=\x07a\x1b]0;title\x07b\x1b[2Jc\u202ed\x9b31me"  # clipboard, title, screen, direction, colour


class Hostile(Rows):
    def problem(self, index: int) -> Problem:
        return Problem([{"role": "user", "content": HOSTILE}], answer=HOSTILE)

    def score(self, problem: Problem, text: str) -> dict[str, float]:
        return {HOSTILE: 1.0}


def test_show_sends_no_control_characters_to_the_terminal():
    text = show(Hostile(3, 4), in_letters, lambda ids: "".join(map(chr, ids)), 2)
    assert not any(unicodedata.category(c) in ("Cc", "Cf") for c in text if c != "\n"), repr(text)
    assert text.splitlines()[1] == "]52;c;cm0=a]0;titlebcd31me", repr(text)
