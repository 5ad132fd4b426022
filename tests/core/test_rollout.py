"""How environments are played: which problems, under which limits and options, and what is forced at the end."""

import json
import re
import unicodedata
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Condition
from types import SimpleNamespace
from typing import NoReturn

import jax
import numpy as np
import pytest

from core import grpo, sampling
from core.chains.forced import reply_opening
from core.chat import models as chat_models
from core.config import Config
from core.eval import show
from core.rollout import RolloutWorker, encode_prompt, make_worker
from core.sampler import Sampler
from envs import make_env, split_name
from envs.base import Env, Problem
from envs.prompts import MAX_MADE_UP, TokenBound, find_tasks, tasks_that_fit
from envs.settings import RolloutSettings, describe_environments, resolve_environments, system_prompt
from models.checkpoint import load_model
from models.tokenizer import load_tokenizer
from tests.helpers import MODEL, ROOT, Letters
from utils.devices.sharding import single_device
from utils.settings.config import parse
from utils.settings.errors import UserError, fail

LIMIT = 40  # tokens of a prompt
DATA = str(ROOT / "tests" / "fixtures" / "data")


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
        assert is_long.sum() == num_dropped
        assert (tasks == np.flatnonzero(~is_long)).all()


@pytest.mark.parametrize("folder", ["models/tiny", "tests/fixtures/qwen2-tied", "tests/fixtures/qwen3-tied"])
def test_the_bound_on_tokens_is_one(folder):
    tokenizer = load_tokenizer(ROOT / folder)
    rng = np.random.default_rng(0)
    pieces = [*"ab  \n\t.,<>/{}é日😀'0123\u00a0\u3000", "the ", "ing", " answer", "<think>", "<|im_end|>", "\r\n"]
    encode = partial(encode_prompt, tokenizer)
    bound = TokenBound(encode)
    for i in range(300):
        contents = ["".join(rng.choice(pieces, rng.integers(1, 30))) for _ in range(1 + i % 3)]
        roles = ("system", "user", "assistant")[: len(contents)]
        messages = [{"role": role, "content": x} for role, x in zip(roles, contents, strict=True)]
        problem = Problem(
            messages,
            thinking=i % 2 > 0,
            prefix="<think>" * (i % 5 == 0),
            plain=i % 7 == 0,
        )
        assert bound(problem) >= len(encode(problem)), messages


def test_start_ends_in_one_sentence_if_all_prompts_are_long():
    advice = "the shortest has [0-9]+: raise --prompt_length"
    for name in ("countdown", "poem-test"):
        with pytest.raises(ValueError, match=f"^all prompts of {name} have more than 20 tokens, {advice}"):
            find_tasks(name, make_env(name), partial(encode_prompt, Letters()), 20)


@pytest.mark.parametrize(("every", "num_dropped", "first"), [(3, 10, 2), (15, 2, 14)])
def test_dropped_text_is_named_with_its_problem(every, num_dropped, first):
    words = f"mine: {num_dropped} prompts of more than 40 tokens skipped, from problem {first} on"
    assert find_tasks("mine", Rows(30, every), in_letters, LIMIT)[1] == words


def test_long_prompt_is_named_if_the_sample_missed_it():
    env = Rows(10, 10, is_generated=True)
    tokenizer = Letters()
    sampler = Sampler(MODEL, 8, (), max_prompt_tokens=LIMIT, tokenizer=tokenizer)
    worker = RolloutWorker(
        env=env,
        name="mine",
        tokenizer=tokenizer,
        sampler=sampler,
        scorer=SimpleNamespace(has_outcomes=Condition(), withdraw=lambda stream: None),
        layout=single_device(),
    )
    words = "^the prompt of problem 9 of mine has 41 tokens, more than 40: raise --prompt_length "
    with pytest.raises(UserError, match=words):
        worker.play({}, np.array([0, 9]), 2, jax.random.key(0), positions=np.array([100, 101]))


HOSTILE = "\x1b]52;c;cm0=\x07a\x1b]0;title\x07b\x1b[2Jc\u202ed\x9b31me"  # clipboard, title, screen, direction, color


class Hostile(Rows):
    def problem(self, index: int) -> Problem:
        return Problem([{"role": "user", "content": HOSTILE}], answer=HOSTILE)

    def score(self, problem: Problem, text: str) -> dict[str, float]:
        return {HOSTILE: 1.0}


def test_show_sends_no_control_characters_to_the_terminal():
    text = show(Hostile(3, 4), in_letters, lambda ids: "".join(map(chr, ids)), 2)
    assert not any(unicodedata.category(c) in ("Cc", "Cf") for c in text if c != "\n"), repr(text)
    assert text.splitlines()[2] == "]52;c;cm0=a]0;titlebcd31me", repr(text)


# What is forced into replies without an answer

THINK = "<think>\nlet me see"
BOTH = "<think>\nlet me see\n</think>\nso"
REPLIES = {  # form: replies before and after which its answer is forced, with the text that is forced
    "tags": [
        (THINK, "</think>\n<answer>"),
        (BOTH, "\n<answer>"),
        ("so\n", "<answer>"),
        ("so <answer>5", ""),
    ],
    "boxed": [
        (THINK, "</think>\n\\boxed{"),
        (BOTH, "\n\\boxed{"),
        (THINK + " \\boxed{5}", ""),
        ("so", "\n\\boxed{"),
    ],
    "hash": [
        (THINK, "</think>\n#### "),
        (BOTH, "\n#### "),
        ("so\n#### 5", ""),
        ("\\boxed{5}", "\n#### "),
    ],
}
OPENINGS = {  # thinking and prefix: what the reply continues opens a think block
    ("on", "none"): False,
    ("off", "none"): False,
    ("on", "<think>"): True,
    ("off", "<think>"): True,
    ("on", "<think>\nFirst,"): True,
}


def settings_of(name: str, test: str = "", **flags: str | int) -> list[RolloutSettings]:
    """How training and testing are played under these settings."""
    own = flags.pop("test_env_options", "")
    flags |= {"env_name": name, "test_env_name": f"{test}({own})" if own else test}
    argv = [word for flag, value in flags.items() for word in (f"--{flag}", str(value))]
    config = parse(Config, argv)
    return list(resolve_environments(config.env, config.held_out, config.sampling).values())


@pytest.mark.parametrize("style", OPENINGS, ids=str)
@pytest.mark.parametrize("form", REPLIES)
@pytest.mark.parametrize("name", ["gsm8k", "math500", "dataset"])
def test_the_forced_text_follows_form_and_thinking(name, form, style):
    thinking, prefix = style
    options = f"form={form},thinking={thinking},prefix={prefix}"
    options += f",path={DATA}/gsm8k/train.jsonl,prompt=question" if name == "dataset" else ""
    flags = {} if name == "dataset" else {"data_dir": DATA}
    (settings,) = settings_of(name, env_options=options, force_answer_at=20, **flags)
    assert (settings.force_answer_at, settings.env.form) == (20, form)
    tokenizer = load_tokenizer(ROOT / "models" / "tiny")
    problem = settings.env.problem(0)
    opening = reply_opening(problem, tokenizer.decode(encode_prompt(tokenizer, problem)))
    answer = replace(settings.forced_answer, opening=opening)
    for reply, expected in REPLIES[form]:
        is_open = OPENINGS[style] and "</think>" not in reply and expected
        assert answer.text_after(reply) == (REPLIES[form][0][1] if is_open else expected), (opening, reply)
    assert answer.text_after("so").startswith("</think>") == OPENINGS[style]
    reply = "so" + answer.text_after("so") + {"tags": "5</answer>", "boxed": "5}", "hash": "5"}[form]
    assert settings.env.answer(reply) == "5", "what is forced is what the environment reads"


def test_facts_on_rows_are_said_once(tmp_path):
    for name, count in (("train", 40), ("other", 7)):
        rows = [{"prompt": f"{name} {i}", "answer": "5"} for i in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = {"test": "dataset-test", "env_options": f"path={tmp_path}/train.jsonl"}
    lines = describe_environments(settings_of("dataset", **flags))
    assert lines[1:] == ["dataset: 40 problems; 34 to train on; 2 in the valid split; 4 in the test split"]
    lines = describe_environments(settings_of("dataset", **flags, test_env_options=f"test_path={tmp_path}/other.jsonl"))
    assert lines[2:] == ["dataset: 7 problems"], "of another file"
    with pytest.raises(ValueError, match=r"--test_env_name .* has problems of 34 rows that are trained on: remove"):
        settings_of("dataset", **flags, test_env_options=f"test_path={tmp_path}/train.jsonl")


def test_nothing_is_forced_if_no_form_is_given_or_shown(tmp_path):
    path = tmp_path / "rows.jsonl"
    starts = {"Name a river.": "", "End with \\boxed{ANSWER}.": "\\boxed{", "Write <answer>X</answer>.": "<answer>"}
    for prompt, start in starts.items():
        path.write_text("".join(json.dumps({"prompt": f"{i} {prompt}", "answer": "5"}) + "\n" for i in range(30)))
        flags = {"env_options": f"path={path}"}
        if start:
            (settings,) = settings_of("dataset", **flags, force_answer_at=20)
            assert (settings.force_answer_at, settings.forced_answer.start) == (20, start)
            assert not any(map(settings.forced_answer.text_after, ("<answer>5", "\\boxed{5}", "#### 5")))
        else:
            with pytest.raises(ValueError, match="--force_answer_at 20: the prompts of dataset do not ask for"):
                settings_of("dataset", **flags, force_answer_at=20)
        training, test = settings_of("countdown", "dataset", test_env_options=f"path={path}")
        assert (training.force_answer_at, test.force_answer_at) == (50, 50 if start else 0)


# The test environment


BOXED, FEW = "form=boxed,thinking=off", "num_tasks=64"
PLAYS = [
    # training, test, further flags; then of the test environment: limit, forced at, form, thinking, prefix, split
    ("deepscaler", "aime", {"data_dir": DATA}, (4096, 50, "tags", True, "test")),
    ("deepscaler", "aime", {"data_dir": DATA, "num_generation_tokens": 40}, (40, 0, "tags", True, "test")),
    ("deepscaler", "aime", {"data_dir": DATA, "force_answer_at": 9}, (4096, 9, "tags", True, "test")),
    ("aime", "deepscaler", {"data_dir": DATA}, (512, 50, "tags", True, "test")),
    ("gsm8k", "math500-test", {"data_dir": DATA, "env_options": BOXED}, (512, 50, "boxed", False, "test")),
    ("gsm8k", "gsm8k", {"data_dir": DATA, "env_options": BOXED}, (512, 50, "boxed", False, "test")),
    (
        "gsm8k",
        "math500",
        {"data_dir": DATA, "env_options": BOXED, "test_env_options": "form=hash,thinking=on"},
        (512, 50, "hash", True, "test"),
    ),
    (
        "gsm8k",
        "countdown",
        {"data_dir": DATA, "env_options": BOXED, "test_env_options": FEW},
        (512, 50, "tags", False, "test"),
    ),
    (
        "countdown",
        "gsm8k",
        {"data_dir": DATA, "env_options": "numbers=3,thinking=off,partial=0.0"},
        (1024, 50, "tags", False, "test"),
    ),
    ("countdown", "countdown", {"env_options": FEW}, (1024, 50, "tags", True, "test")),
    (
        "Countdown",
        "Countdown-Test",
        {"env_options": FEW, "test_env_options": "num_generation_tokens=2048,force_answer_at=100"},
        (2048, 100, "tags", True, "test"),
    ),
    (
        "countdown",
        "countdown",
        {"env_options": FEW, "test_env_options": "num_generation_tokens=30"},
        (30, 0, "tags", True, "test"),
    ),
    (
        "countdown",
        "poem",
        {"test_env_options": "num_generation_tokens=-1,force_answer_at=-1"},
        (128, 0, "tags", False, "test"),
    ),
    ("poem", "countdown", {"test_env_options": FEW}, (128, 0, "tags", True, "test")),
]


@pytest.mark.parametrize(("name", "test", "flags", "expected"), PLAYS, ids=lambda x: x if isinstance(x, str) else "")
def test_the_test_environment_is_played_as_training_is(name, test, flags, expected):
    training, tester = settings_of(name, test, **flags)
    problem = tester.env.problem(0)
    split = split_name(tester.name)[1]
    found = (tester.max_new_tokens, tester.force_answer_at, tester.env.form, problem.thinking, split)
    assert found == expected, tester.manner
    assert split_name(training.name)[1] == "train"
    assert training.name == name
    if not flags.get("test_env_options"):
        assert tester.max_new_tokens == training.max_new_tokens
    assert make_env(tester.name, **tester.options).problem(0) == problem, "what scores it is made from the same options"
    if split_name(name)[0] == split_name(test)[0] == "countdown":
        sets = [{tuple(sorted(x.env.problem(i).answer[0])) for i in range(30)} for x in (training, tester)]
        assert not sets[0] & sets[1]


def test_every_option_of_style_reaches_another_environment():
    options = "form=hash,system=Be brief.,thinking=off,prefix=Well: ,plain=true,partial=0.3"
    for settings in settings_of("gsm8k", "math500", data_dir=DATA, env_options=options):
        problem = settings.env.problem(0)
        assert (settings.env.form, problem.thinking, problem.plain) == ("hash", False, True)
        assert (system_prompt(problem.messages), problem.prefix) == ("Be brief.", "Well:")
    assert "partial" not in settings.options, "what is paid is the environment's own"


@pytest.mark.parametrize(
    ("name", "test", "flags", "message"),
    [
        ("countdown", "", {"data_dir": DATA}, f"--data_dir {DATA}: no environment of countdown takes it"),
        ("countdown", "poem", {"episode": "r.py:f"}, "poem-test takes it: remove it, or give --env_name dataset"),
        ("countdown", "gsm8k", {"data_dir": DATA, "test_env_options": "numbers=3"}, "gsm8k has no option 'numbers'"),
        ("countdown", "", {"env_options": "form=boxed"}, "countdown has no option 'form'"),
        ("countdown", "poem", {"test_env_options": "max_characters"}, "--test_env_name 'max_characters': "),
        ("countdown", "poem", {"test_env_options": "num_generation_tokens=x"}, "num_generation_tokens is a number"),
        ("countdown", "nowhere", {}, "no environment 'nowhere'"),
        ("countdown", "contdown", {}, "did you mean countdown?"),
    ],
)
def test_options_that_no_environment_takes_are_refused(name, test, flags, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        settings_of(name, test, **flags)


def test_how_it_is_played_is_one_line():
    _, tester = settings_of("gsm8k", "math500", data_dir=DATA, env_options="form=boxed,system=\x1b[2J")
    assert tester.manner == (
        "completions of at most 512 tokens, \\boxed{ forced 50 tokens before it, "
        "form boxed, thinking on, system prompt '\\x1b[2J'"
    )


def test_all_of_gsm8k_is_evaluated():
    env = make_env("gsm8k-test", data_dir=DATA, system="none")
    worker = RolloutWorker(
        env=env,
        name="gsm8k-test",
        tokenizer=None,
        sampler=None,
        scorer=None,
        layout=None,
    )
    assert [worker.num_eval_tasks(n) for n in (-1, 0, 3)] == [env.num_tasks, env.num_tasks, 3]
    worker = RolloutWorker(
        env=Rows(1024, 5),
        name="mine",
        tokenizer=None,
        sampler=None,
        scorer=None,
        layout=None,
    )
    assert [worker.num_eval_tasks(n) for n in (-1, 0, 3)] == [512, 1024, 3]


# Model folders and stop strings


def test_a_run_folder_stands_for_its_last_step(tmp_path, monkeypatch):
    run = tmp_path / "run"
    for step in (9, 10):
        (run / f"step{step}").mkdir(parents=True)
    seen = []

    def look(folder: str, *_: object, **__: object) -> NoReturn:
        seen.append(Path(folder))
        fail("seen")

    # Ends the commands when they read a model.
    monkeypatch.setattr(grpo, "load_policy", look)
    monkeypatch.setattr(chat_models, "load_model", look)
    with pytest.raises(SystemExit):
        grpo.main(parse(Config, ["--model_dir", str(run), "--save_dir", str(tmp_path / "new")]))
    with pytest.raises(SystemExit):
        sampling.main(parse(sampling.SamplingCommand, ["--model_dir", str(run)]))
    assert seen == [run / "step10"] * 2


@pytest.mark.parametrize("folder", ["models/tiny", "tests/fixtures/qwen2-tied"])
def test_a_special_token_among_stop_strings_is_a_stop_id(folder):
    tokenizer = load_tokenizer(ROOT / folder)
    (special, number), *_ = tokenizer.special_ids.items()
    assert tokenizer.decode([number]) == "", "so it is never found in the text"
    stop_ids, stop_strings = tokenizer.read_stops(f"END,{special},\n\n")
    assert set(stop_ids) == {*tokenizer.stop_ids, number}
    assert stop_strings == ("END", "\n\n")
    assert tokenizer.read_stops("") == (tokenizer.stop_ids, ())
    for stop in (special + "\n", "a" + special):
        with pytest.raises(ValueError, match="can never match, since"):
            tokenizer.read_stops(f"END,{stop}")


@pytest.mark.parametrize("options, is_named", [("", True), ("plain=true", False)])
def test_model_without_chat_template_is_named_if_not_meant(options, is_named):
    model, _, tokenizer = load_model(ROOT / "tests" / "fixtures" / "qwen3-tied")
    config = parse(Config, ["--env_name", "poem", "--env_options", options, "--num_generation_tokens", "24"])
    settings = resolve_environments(config.env, config.held_out, config.sampling)["env"]
    worker = make_worker(settings, config.sampling, config.rewards, model, tokenizer, single_device())
    found = [note.split(":")[1] for note in worker.notes]
    assert found == [" the model has no chat template"] * is_named
