"""Environments: what they ask, what they pay, and that no text can hang, break or fool them."""

import hashlib
import json
import os
import subprocess
import sys
import time
import warnings
from fractions import Fraction
from functools import cache
from itertools import permutations
from pathlib import Path

import pytest

import envs
from envs.answers import extract_answer, parse_arithmetic
from envs.base import Problem
from envs.countdown import Countdown, share_right_arithmetic

ROOT = Path(__file__).resolve().parents[1]
GRADERS = ROOT.parent / "shared" / "data" / "graders"
DEMO = dict(numbers=3, min_number=1, max_number=15, max_target=30, max_value=30, prompt="bare")
NAMES = [name + suffix for name in envs.ENVS for suffix in ("", "-test")]


@cache
def environment(name: str) -> envs.Env:
    options = {"num_tasks": 64} if name == "countdown6-test" else {}  # all of its 1024 take five seconds
    return envs.make_env(name, **options)


def digest() -> str:
    """A fingerprint of the first problems of environments that draw theirs in different ways."""
    made = [environment(name) for name in ("countdown", "countdown-test", "countdown6", "poem", "poem-test")]
    problems = [repr(env.problem(i)) for env in made for i in range(20)]
    return hashlib.sha256("\n".join(problems).encode()).hexdigest()


def reachable(values: tuple[Fraction, ...]) -> set[Fraction]:
    """Every number that + - * / over all values can make, by brute force."""
    if len(values) == 1:
        return set(values)
    found = set()
    for a, b, *rest in permutations(values):
        for result in (a + b, a - b, a * b, *([a / b] if b else [])):
            found |= reachable((result, *rest))
    return found


# the table of environments


@pytest.mark.parametrize("name", NAMES)
def test_every_environment_scores_under_the_same_keys(name):
    env = environment(name)
    problem = env.problem(0)
    keys = {tuple(env.score(problem, text)) for text in ("", "x", "<answer>1+2</answer>", "1+2=3")}
    assert len(keys) == 1
    assert {"return", "correct_answer"} <= set(*keys)
    assert env.problem(env.num_tasks - 1).messages[-1]["role"] == "user"


def test_problems_are_the_same_in_every_process():
    code = "from tests.test_envs import digest; print(digest())"
    for seed in ("0", "1"):
        variables = {**os.environ, "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", code]
        assert subprocess.check_output(command, cwd=ROOT, env=variables, text=True).strip() == digest()


def test_names_are_case_insensitive():
    assert envs.make_env("Countdown-Test").problem(3) == environment("countdown-test").problem(3)
    assert [envs.make_env(f"countdown{n}").numbers for n in ("", 3, 6)] == [4, 3, 6]
    assert envs.test_name("Poem") == envs.test_name("poem-test") == "poem-test"


def test_mistakes_are_named():
    for name in ("countup", "", "-test", "poem-test-test"):
        with pytest.raises(ValueError, match="countdown, countdown3, countdown6, poem"):
            envs.make_env(name)
    with pytest.raises(ValueError, match="no option 'number'; its options are numbers, min_number"):
        envs.make_env("countdown", number=3)
    with pytest.raises(ValueError, match="numbers takes int, not 'three'"):
        envs.make_env("countdown", numbers="three")
    with pytest.raises(ValueError, match="choose one of full, bare"):
        envs.make_env("countdown", prompt="long")
    with pytest.raises(ValueError, match="no solvable problem"):
        envs.make_env("countdown", max_number=0)


def test_options_of_the_command_line():
    assert envs.parse_options("") == {}
    parsed = envs.parse_options("numbers=3, prompt=bare,rate=0.5,strict=True,file=a=b")
    assert parsed == {"numbers": 3, "prompt": "bare", "rate": 0.5, "strict": True, "file": "a=b"}
    for text in ("numbers", "=3", "numbers=3,numbers=4"):
        with pytest.raises(ValueError, match="key=value"):
            envs.parse_options(text)


# Countdown


@pytest.mark.parametrize("options", [DEMO, {"numbers": 3}])
def test_countdown_is_solvable(options):
    for env in (Countdown(**options), Countdown("test", **options)):
        for i in range(150):
            numbers, target = env.problem(i).answer
            assert target in reachable(tuple(map(Fraction, numbers))), (numbers, target)


@pytest.mark.parametrize("options", [DEMO, {}])
def test_countdown_splits_share_no_numbers(options):
    train, test = Countdown(**options), Countdown("test", **options)
    sets = [{tuple(sorted(env.problem(i).answer[0])) for i in range(500)} for env in (train, test)]
    assert not sets[0] & sets[1]
    answers = {(tuple(sorted(numbers)), target) for numbers, target in test.instances}
    assert len(answers) == test.num_tasks >= 512
    assert Countdown("test", **options, num_tasks=512).instances == test.instances[:512]


def test_countdown_problems_are_those_the_base_model_was_made_with():
    env = Countdown(**DEMO)
    assert [env.instance(i) for i in range(3)] == [((12, 7, 5), 10), ((8, 2, 5), 9), ((11, 5, 1), 7)]
    assert env.problem(0).messages == [{"role": "user", "content": "Use 12 7 5 to make 10."}]
    first = repr([env.instance(i) for i in range(1000)])
    assert hashlib.sha256(first.encode()).hexdigest()[:16] == "7a4ff1be1ca2037f"


@pytest.mark.parametrize(
    ("reply", "reward", "correct"),
    [
        ("<answer>(1+2)*3</answer>", 1.0, 1.0),
        ("<think>1+2=4</think><answer> ( 1 + 2 )\n * 3 </answer>", 1.0, 1.0),
        ("<answer>(1+2)*3 = 9</answer>", 1.0, 1.0),
        ("<answer>1+2+3</answer><answer>3*(2+1)</answer> <answer>1", 1.0, 1.0),  # the last complete block counts
        ("<answer>3*(2+1)</answer> </answer>", 1.0, 1.0),
        ("<answer>-(1+2)*3+9/1</answer>", 0.0, 0.0),  # not these numbers
        ("<answer>+3*(2+1)</answer>", 1.0, 1.0),
        ("<answer>1+2+3</answer>", 0.1, 0.0),
        ("<answer>1+2+3=9</answer>", 0.1, 0.0),  # a lie about its value: still valid, still wrong
        ("<answer>1+2+3=6</answer>", 0.0, 0.0),  # an equation that is not about the target
        ("<answer>9=(1+2)*3</answer>", 0.0, 0.0),
        ("<answer>(1+2)*3=9=9</answer>", 0.0, 0.0),
        ("<answer>9</answer>", 0.0, 0.0),
        ("<answer>3*3</answer>", 0.0, 0.0),
        ("<answer>(1+2)*3*1</answer>", 0.0, 0.0),
        ("<answer>1)+(2*3</answer>", 0.0, 0.0),
        ("<answer>3/(2-1-1)</answer>", 0.0, 0.0),
        ("<answer>1+2**3</answer>", 0.0, 0.0),
        ("<answer>12-3</answer>", 0.0, 0.0),
        ("<answer></answer>", 0.0, 0.0),
        ("(1+2)*3", 0.0, 0.0),
        ("", 0.0, 0.0),
    ],
)
def test_countdown_score(reply, reward, correct):
    score = Countdown(numbers=3).score(Problem([], ((1, 2, 3), 9)), reply)
    assert (score["return"], score["correct_answer"], score["valid"]) == (reward, correct, float(reward > 0))


@pytest.mark.parametrize(
    ("text", "right", "written"),
    [
        ("22-14=8,8*2=16?24✗\n22+14=35", 2, 3),
        ("We try 22 - 14 = 8. Then 8 × 3 = 24, and 24 ÷ 5 = 4; 3 − 5 = -2.", 3, 4),
        ("1. 22-14=8\n- 22 - 14 = 9\n(22-14=8)", 2, 3),
        ("1/0=0 5/2=2", 0, 2),
        ("1+2+3=6, 1 + 2 + 3 = 6, (1+2)*3=9, 2*3=6+1, 5/2=2.5, 500*2=1,000", 0, 0),  # right, but no single steps
        ("no steps: 3 = 3, x+1=2", 0, 0),
    ],
)
def test_arithmetic_of_a_search(text, right, written):
    assert share_right_arithmetic(text) == (right, written)
    score = Countdown().score(Problem([], ((1, 2, 3), 9)), text)
    assert (score["arithmetic"], score["steps"]) == (right / written if written else 0.0, written)


# Poem


def test_poem_pays_for_characters():
    env, limited = envs.make_env("Poem"), envs.make_env("poem", max_characters=10)
    problem = env.problem(0)
    assert env.score(problem, "a" * 12) == {"return": 12.0, "correct_answer": 0.0, "characters": 12.0}
    assert limited.score(problem, "a" * 12) == {"return": 10.0, "correct_answer": 1.0, "characters": 12.0}
    assert limited.score(problem, "a" * 9) == {"return": 9.0, "correct_answer": 0.0, "characters": 9.0}


def test_poem_splits_share_no_subject(tmp_path):
    (tmp_path / "subjects.txt").write_text("the sea\n\ncrane\n owl \ncrane\n")
    for options in ({}, {"subjects_file": str(tmp_path / "subjects.txt")}):
        train, test = envs.make_env("poem", **options), envs.make_env("poem-test", **options)
        assert train.subjects and test.subjects and not set(train.subjects) & set(test.subjects)
    assert {*train.subjects, *test.subjects} == {"the sea", "crane", "owl"}
    assert test.problem(0).messages == [{"role": "user", "content": "Write a poem about the sea."}]
    for name, text in (("absent.txt", None), ("short.txt", "one\n")):
        if text:
            (tmp_path / name).write_text(text)
        with pytest.raises(ValueError, match=name):
            envs.make_env("poem", subjects_file=str(tmp_path / name))


# any text whatever

HOSTILE = {
    "brackets": lambda: "(" * 100_000 + "1" + ")" * 100_000,
    "brackets under the limit": lambda: "(" * 450 + "1" + ")" * 450,
    "signs": lambda: "-" * 999 + "1",
    "sum": lambda: "1+" * 499 + "1",
    "call": lambda: "(5 (3))",
    "powers": lambda: "9**9**9**9",
    "big product": lambda: "*".join(["9" * 90] * 10),
    "division": lambda: "1/(1-1)",
    "import": lambda: "__import__('os').system('true')",
    "10 MB number": lambda: "9" * 10_000_000,
    "10 MB sum": lambda: "1+" * 5_000_000 + "1",
    "10 MB spaces": lambda: "1" + " " * 10_000_000 + "+",
    "10 MB steps": lambda: "1+1=2," * 1_700_000,
    "10 MB equals": lambda: "=" * 10_000_000,
    "10 MB tags": lambda: "<answer>" * 1_250_000,
    "10 MB closing tags": lambda: "</answer>" * 1_250_000,
    "nul": lambda: "1+\0+2",
    "surrogate": lambda: "\ud800+1",
    "other digits": lambda: "١+٢=٣",
    "bidi": lambda: "1+\u202e2",
    "literals": lambda: "1_0+0x1f+1e9+1j+1.5+007+1if 1else 2",
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_text(kind):
    text = HOSTILE[kind]()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for env in (environment("countdown3"), environment("poem")):
            problem = env.problem(0)
            for reply in (text, f"<answer>{text}</answer>", f"<answer>{text}", f"{text}<answer>1</answer>"):
                start = time.perf_counter()
                score = env.score(problem, reply)
                assert time.perf_counter() - start < 1
                assert score["correct_answer"] == 0


@pytest.mark.parametrize("text", ["", "5 (3)", "(1)(2)", "1,2", "7//2", "~3", "1 2", "1)+(2", "1+2 3", "[1]", "1<2"])
def test_what_is_not_arithmetic(text):
    assert parse_arithmetic(text) == (None, [])


def test_arithmetic_is_exact():
    assert parse_arithmetic("1/3 + 1/3\n+ 1/3") == (1, [1, 3, 1, 3, 1, 3])
    assert parse_arithmetic("-(2-5)*4") == (12, [2, 5, 4])
    assert parse_arithmetic("6*34/11-1") == (Fraction(193, 11), [6, 34, 11, 1])
    assert extract_answer("<answer>a<answer>b</answer>c</answer>") == "b"


# labels that other people wrote


@pytest.mark.skipif(not GRADERS.is_dir(), reason="needs the shared grader files beside the repository")
@pytest.mark.parametrize("name", ["countdown_edge_cases", "countdown_model_outputs"])
def test_countdown_labels(name):
    rows = [json.loads(line) for line in (GRADERS / f"{name}.jsonl").read_text().splitlines()]
    for row in rows:
        if row["strict_ok"] is None:
            continue
        expression = row.get("expr", row.get("last_boxed")) or ""
        value, used = parse_arithmetic(expression)
        score = Countdown().score(Problem([], (row["nums"], row["target"])), f"<answer>{expression}</answer>")
        assert (None if value is None else str(value)) == row["value"], row["id"]
        assert (value is not None and sorted(used) == sorted(row["nums"])) == row["uses_each_once"], row["id"]
        assert score["correct_answer"] == row["strict_ok"] and score["valid"] == row["uses_each_once"], row["id"]
