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
from importlib.util import find_spec
from itertools import combinations
from pathlib import Path

import pytest

import envs
from envs.base import Env, Problem, Reply
from envs.countdown import Countdown, share_right_arithmetic, solve
from envs.data.rows import Row
from envs.data.splits import normal_form, split_rows
from envs.grading.answers import extract_answer, parse_arithmetic
from tests.oracles.enumeration import reachable
from utils.settings.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT.parent / "shared" / "data"
GRADERS = DATA / "graders"
SAMPLES = ROOT / "tests" / "fixtures" / "data"  # a few rows of each data set
RANGE = {"min_number": 1, "max_number": 15, "max_target": 30, "max_value": 30}
DEMO = {"numbers": 3, "expression": "tree", "prompt": "bare", **RANGE}
NAMES = [name + suffix for name in envs.ENVS for suffix in ("", "-test")]
HAS_GYM = find_spec("reasoning_gym") is not None  # on Python 3.13 it needs a compiler
INSTALLED = [name for name in NAMES if HAS_GYM or not name.startswith("reasoning_gym")]
LOCAL = ("countdown34", "gsm8k", "deepscaler", "aime", "aime25", "amc", "amc23", "math500")
BENCHMARKS = ("aime", "aime25", "amc", "amc23", "math500")
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="needs the shared data beside the repository")


@cache
def environment(name: str, data_dir: Path = SAMPLES) -> envs.Env:
    options = {"num_tasks": 64} if name == "countdown6-test" else {}  # all of its 1024 take five seconds
    base_name = name.removesuffix("-test").removesuffix("-valid")
    if base_name in LOCAL:
        options = {"data_dir": str(data_dir)}
    elif base_name == "python":
        options = {"data_dir": str(data_dir), "sandbox": "off"}  # confinement needs Linux
    elif base_name == "dataset":
        options = {"path": str(SAMPLES / "gsm8k" / "train.jsonl"), "prompt": "question", "form": "hash"}
    elif base_name == "agent":
        pytest.importorskip("uvicorn")
        rows = str(SAMPLES / "gsm8k" / "train.jsonl")
        options = {"path": rows, "prompt": "question", "form": "hash", "agent": "true"}
    elif base_name == "reasoning_gym":
        pytest.importorskip("reasoning_gym")
        options = {"datasets": "leg_counting+spell_backward*2(min_word_len=3;max_word_len=6)"}
    return envs.make_env(name, **options)


def digest() -> str:
    """A fingerprint of the first problems of environments that draw theirs in different ways."""
    made = [environment(name) for name in INSTALLED]
    problems = [repr(env.problem(i).messages) for env in made for i in range(min(20, env.num_tasks))]
    return hashlib.sha256("\n".join(problems).encode()).hexdigest()


# the table of environments


@pytest.mark.parametrize("name", NAMES)
def test_every_environment_scores_under_the_same_keys(name):
    env = environment(name)
    problem = env.problem(0)
    if env.max_turns == 1:
        keys = {tuple(env.score(problem, text)) for text in ("", "x", "<answer>1+2</answer>", "1+2=3")}
        assert len(keys) == 1
        assert {"return", *(["correct_answer"] * (name[:4] != "poem"))} <= set(*keys)
    assert env.problem(env.num_tasks - 1).messages[-1]["role"] == "user"


def test_problems_are_the_same_in_every_process():
    code = "from tests.envs.test_envs import digest; print(digest())"
    command, variables = [sys.executable, "-c", code], {**os.environ, "PYTHONHASHSEED": "0"}  # here it is random
    assert subprocess.check_output(command, cwd=ROOT, env=variables, text=True).strip() == digest()


def test_mistakes_are_named():
    for name in ("countup", "", "-test", "poem-test-test"):
        with pytest.raises(ValueError, match="countdown, countdown3, countdown6, countdown34, poem, gsm8k"):
            envs.make_env(name)
    mistakes = {
        r"no option 'number' \(did you mean numbers\?\): choose one of numbers": {"number": 3},
        "numbers takes int, not 'three'": {"numbers": "three"},
        "choose one of full, bare": {"prompt": "long"},
        "choose one of chain, tree": {"expression": "bush"},
        "no solvable problem": {"max_number": 0},
        "one of on, off": {"thinking": "maybe"},
        "names no file": {"system": "@absent"},
    }
    for words, options in mistakes.items():
        with pytest.raises(ValueError, match=words):
            envs.make_env("countdown", **options)


def test_options_of_the_command_line():
    assert envs.parse_options("") == {}
    parsed = envs.parse_options("numbers=3, prompt=bare,rate=0.5,strict=True,file=a=b")
    assert parsed == {"numbers": 3, "prompt": "bare", "rate": 0.5, "strict": True, "file": "a=b"}
    for text in ("numbers", "=3", "numbers=3,numbers=4"):
        with pytest.raises(ValueError, match="is not name=value|has numbers twice"):
            envs.parse_options(text)


def grade(env, problem, reply: str) -> dict[str, float]:
    """The scores of a reply, which may be the first turn of an episode."""
    if env.max_turns == 1:
        return env.score(problem, reply)
    step = env.episode(problem, 0).act(Reply(reply))
    return {"return": step.reward, "correct_answer": 0.0, **step.info}


@pytest.mark.parametrize("name", NAMES)
def test_right_replies_earn_full_marks_and_wrong_ones_none(name):
    env = environment(name)
    for i in range(min(10, env.num_tasks)):
        problem = env.problem(i)
        scores = {kind: grade(env, problem, reply) for kind, reply in env.examples(problem).items()}
        if "right" in scores and not name.startswith("poem"):  # which without a maximum knows no full marks
            assert scores["right"]["return"] == scores["right"]["correct_answer"] == 1.0
        wrong = [score for kind, score in scores.items() if kind not in ("right", "reference")]
        assert all(score.get("correct_answer", 0) == 0 for score in wrong)


@pytest.mark.parametrize("name", [name for name in envs.ENVS if name not in (*BENCHMARKS, "wordle")])  # one prompt
def test_splits_share_no_problem(name):
    made = environment(name), environment(name + "-test")
    train, test = ({json.dumps(env.problem(i).messages) for i in range(min(200, env.num_tasks))} for env in made)
    assert not train & test


GENERATED = ("countdown", "countdown3", "countdown6", "reasoning_gym")


@pytest.mark.parametrize("name", [*GENERATED, *(pytest.param(name, marks=needs_data) for name in LOCAL[:3])])
def test_valid_splits_share_nothing_with_the_others(name):
    made = [environment(name + split, DATA) for split in ("", "-test", "-valid")]
    problems = [[env.problem(i) for i in range(min(1000, env.num_tasks))] for env in made]
    if "countdown" in name:
        identities = [{tuple(sorted(problem.answer[0])) for problem in some} for some in problems]
    else:
        identities = [{normal_form(problem.messages) for problem in some} for some in problems]
    assert not any(a & b for a, b in combinations(identities, 2))
    assert all(identities)


@pytest.mark.parametrize(
    ("name", "message"),
    [("poem-valid", "poem has no -valid"), ("aime-valid", "aime has no -valid, since it is a benchmark")]
    + [("countdown-valid", "the test split takes all numbers")],
)
def test_there_is_no_valid_split_without_room(name, message):
    with pytest.raises(ValueError, match=message):
        envs.make_env(name, **(DEMO if "countdown" in name else {}))


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("What is  $x$?", "what is x", True),
        (r"Find \dfrac{1}{2}.", r"Find \(\frac{1}{2}\)", True),
        ("(1, 2), and so on", "(1,2) and so on", True),
        ("What is 3.5 + 1?", "What is 35 + 1?", False),
        ("f(1, 2)", "f(12)", False),
        ("5!", "5", False),
        ("?!", "...", False),
        ("Use 1 23 4", "Use 12 3 4", False),
        ("Solve x^{2}3 = 4", "Solve x^{23} = 4", False),
        ("Reverse 'a b'", "Reverse 'ab'", False),
        ("In triangle $A B C$", r"in triangle \(ABC\)", True),
        (r"Expand \left( 2x_{1} \cdot 3 \right)", r"expand (2 x_1\cdot{3}).", True),
    ],
)
def test_problems_are_compared_whatever_their_spelling(one, other, same):
    assert (normal_form(one) == normal_form(other)) == same


def test_training_rows_that_stand_in_the_test_file_are_removed(tmp_path):
    def rows(*prompts: str) -> list[str]:
        return [json.dumps({"prompt": prompt, "answer": "1"}) for prompt in prompts]

    options = write(tmp_path / "mine.jsonl", *rows(*(f"What is {i} + 1?" for i in range(60))))
    test = write(tmp_path / "test.jsonl", *rows("what is 7+1", "What is 8 + 1?", "What is 99 + 1?"))["path"]
    made = [envs.make_env(f"dataset{split}", **options, test_path=test) for split in ("", "-valid", "-test")]
    prompts = [{row.prompt for row in env.rows} for env in made]
    assert prompts[0] | prompts[1] == {f"What is {i} + 1?" for i in range(60) if i not in (7, 8)}
    assert not prompts[0] & prompts[1]
    assert prompts[1]
    assert len(prompts[2]) == 3
    assert ", 2 removed because a held-out split has them" in made[0].note
    with pytest.raises(ValueError, match="for the train split, of 3 rows in the data; 0 to train on, 2 removed"):
        envs.make_env("dataset", path=test, test_path=test)


def test_deepscaler_is_compared_with_present_benchmarks(tmp_path):
    lines = (SAMPLES / "deepscaler" / "deepscaler.jsonl").read_text().splitlines()
    (tmp_path / "deepscaler").mkdir()
    (tmp_path / "deepscaler" / "deepscaler.jsonl").write_text("\n".join(lines))
    options = {"data_dir": str(tmp_path)}
    before = envs.make_env("deepscaler", **options)
    assert before.note.endswith("; not compared with aime, aime25, amc, amc23, math500: no file in --data_dir")
    shouted = {"problem": f" {before.rows[0].prompt.upper()} ", "answer": "1"}
    (tmp_path / "math500.jsonl").write_text(json.dumps(shouted))
    after = envs.make_env("deepscaler", **options)
    assert after.rows == before.rows[1:]
    assert "; 1 removed that math500 have, too; not compared with aime, aime25, amc, amc23: no file" in after.note


@needs_data
@pytest.mark.parametrize("name", [name for name in LOCAL if name != "deepscaler"] + ["gsm8k-test", "countdown34-test"])
@pytest.mark.parametrize("step", [17, pytest.param(1, marks=pytest.mark.slow)])
def test_references_of_local_rows_are_right(name, step):
    env = environment(name, DATA)
    for i in range(0, env.num_tasks, step):
        problem = env.problem(i)
        replies = env.examples(problem)
        assert env.score(problem, replies["right"])["return"] == 1.0, problem.answer
        assert env.score(problem, replies["wrong"])["correct_answer"] == 0.0, problem.answer


@needs_data
def test_deepscaler_as_it_is():
    train, test = environment("deepscaler", DATA), environment("deepscaler-test", DATA)
    assert train.note == (
        "deepscaler: 39,381 problems of 40,315 rows (left out: 928 repeated, 6 empty); 38,434 to train on, 24 removed "
        "because a held-out split has them; 308 in the valid split; 615 in the test split; 8 removed that aime, "
        "aime25, amc, amc23, math500 have, too"
    )
    assert test.num_tasks == 615
    assert not {row.prompt for row in train.rows} & {row.prompt for row in test.rows}


@needs_data
def test_tinyzeros_parquet_is_read(tmp_path):
    (tmp_path / "test_tinyzero_format.parquet").symlink_to(DATA / "countdown" / "test_tinyzero_format.parquet")
    env = envs.make_env("countdown34-test", data_dir=str(tmp_path), prompt="tinyzero")
    problem = env.problem(0)
    assert env.num_tasks == 1024
    assert problem.answer == ((47, 76, 55, 60), 24)
    assert problem.plain
    import pyarrow.parquet

    first = pyarrow.parquet.read_table(tmp_path / "test_tinyzero_format.parquet").slice(0, 1).to_pylist()[0]
    assert problem.messages[0]["content"] + problem.prefix == first["question"].rstrip(" ")


# options of every environment


def test_style():
    style = dict(system="Be brief.", thinking="off", prefix="<think>", plain=True)
    env = envs.make_env("gsm8k", data_dir=str(SAMPLES), **style)
    problem = env.problem(0)
    before = environment("gsm8k").problem(0)
    assert problem.messages == [{"role": "system", "content": "Be brief."}, before.messages[-1]]
    assert (problem.thinking, problem.prefix, problem.plain) == (False, "<think>", True)
    assert (before.thinking, before.plain) == (True, False)
    bare = envs.make_env("countdown", system="none", prefix="none").problem(0)
    assert (len(bare.messages), bare.prefix) == (1, "")


def test_format_rewards_are_added_and_logged_apart():
    env = envs.make_env("countdown", partial=0.0, format_reward="tags", format_weight=0.5)
    problem = env.problem(0)
    good = env.score(problem, env.examples(problem)["right"])
    assert (good["return"], good["correct_answer"], good["format"]) == (1.5, 1.0, 1.0)
    assert env.score(problem, "<answer>1</answer>")["return"] == 0.25


# data


def write(path: Path, *lines: str) -> dict:
    path.write_text("\n".join(lines) + "\n")
    return {"path": str(path)}


def test_a_file_of_ones_own(tmp_path):
    (tmp_path / "my_reward.py").write_text("def reward(completion, answer): return {'right': 1.0, 'short': 0.5}\n")
    rows = [{"prompt": f"Say {i}.", "answer": str(i)} for i in range(40)]
    options = write(tmp_path / "mine.jsonl", *map(json.dumps, rows))
    env = envs.make_env("dataset", **options, reward=f"{tmp_path / 'my_reward.py'}:reward")
    assert env.score(env.problem(0), "It is 0.") == {"right": 1.0, "short": 0.5, "return": 1.5, "correct_answer": 1.0}
    styled = envs.make_env("dataset", **options, reward=f"{tmp_path / 'my_reward.py'}:reward", thinking="on")
    traits, styled_traits = ([getattr(x, name) for name in Env.__annotations__] for x in (env, styled))
    assert styled_traits == traits
    assert styled.code == (tmp_path / "my_reward.py",), "a resumed run compares it"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("[1, 2]", "not an object"),
        ('{"prompt": 5, "answer": "5"}', "neither text nor a list of messages"),
    ],
)
def test_malformed_rows_are_named(tmp_path, line, reason):
    good = [json.dumps({"prompt": f"p{i}", "answer": "1"}) for i in range(30)]
    options = write(tmp_path / "mine.jsonl", *good[:3], line, "", *good[3:], good[0], '{"prompt": "", "answer": "1"}')
    with pytest.raises(ValueError, match=rf"mine.jsonl:4 is malformed: .*{reason}.*skip_bad_rows=true"):
        envs.make_env("dataset", **options)
    env = envs.make_env("dataset", **options, skip_bad_rows=True)
    assert env.note.startswith("dataset: 30 problems of 33 rows (left out: 1 malformed, 1 repeated, 1 empty); ")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("other.csv", b"question,solution\nx,1\n", "other.csv:2 has no column 'answer', .* prompt=question,answer=sol"),
        ("no.jsonl", b'{"prompt": "x"}', r"no column 'answer', only 'prompt': .*answer=COLUMN \(with a --reward"),
        ("twice.csv", b"prompt,prompt,answer\nx,y,1\n", "twice.csv has several columns 'prompt': give each"),
        ("latin.csv", "prompt,answer\ncaf\xe9,1\n".encode("latin-1"), "latin.csv:2 .*not UTF-8; .*`iconv -f latin1"),
        ("latin.jsonl", '{"prompt": "caf\xe9"}'.encode("latin-1"), "latin.jsonl is not UTF-8; .*`iconv -f latin1"),
        ("latin.json", '[{"prompt": "caf\xe9"}]'.encode("latin-1"), "latin.json is not UTF-8; .*`iconv -f latin1"),
        ("excel.csv", "prompt,answer\ncaf\xe9,1\n".encode("utf-16"), "excel.csv begins with .*, in UTF-8"),
    ],
)
def test_other_columns_and_encodings_come_with_a_remedy(tmp_path, name, content, words):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=words):
        envs.make_env("dataset", path=str(tmp_path / name))


@pytest.mark.parametrize(
    ("num_rows", "sizes"),
    [(1, (1, 0, 0)), (2, (1, 0, 1)), (3, (1, 1, 1)), (20, (17, 1, 2)), (200, (170, 10, 20))],
)
def test_one_row_in_ten_is_one_in_ten(num_rows, sizes):
    rows = [Row(f"What is {i} + 1?", "1") for i in range(num_rows)]
    splits = split_rows(rows, 10, None)
    assert tuple(len(splits[name]) for name in ("train", "valid", "test")) == sizes
    shuffled = split_rows(rows[::-1], 10, None)
    found = {name: set(part) for name, part in splits.items()}
    assert found == {name: set(part) for name, part in shuffled.items()}


def test_missing_data_says_what_to_do(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"none of gsm8k/train.jsonl, .* `hf download openai/gsm8k --repo-type"):
        envs.make_env("gsm8k", data_dir=str(tmp_path))

    def offline(*_):
        raise ConnectionError("Couldn't reach the Hub")

    # A machine without network.
    monkeypatch.setattr("envs.data.hub.fetch_split", offline)
    with pytest.raises(ValueError, match=r"could not load openai/gsm8k .*Couldn't reach.*--data_dir FOLDER"):
        envs.make_env("gsm8k")
    paths = {"": "path=FILE", "absent.jsonl": "no file absent.jsonl", str(tmp_path): "has no file of rows"}
    for path, message in paths.items():
        with pytest.raises(ValueError, match=message):
            envs.make_env("dataset", path=path)


@pytest.mark.parametrize(
    ("package", "start", "install"),
    [("math_verify", "", "-r requirements.txt"), ("pyarrow", "PAR1", "-r requirements.txt")],
)
def test_an_environment_names_the_package_that_it_lacks(tmp_path, package, start, install, monkeypatch):
    """Before anything is computed; without math-verify equal formulas would silently be called different."""
    # A package that is not installed.
    monkeypatch.setitem(sys.modules, package, None)
    options = write(tmp_path / "rows", start + '{"prompt": "1+1?", "answer": "2"}', '{"prompt": "2+2?", "answer": "4"}')
    with pytest.raises(UserError, match=f"`pip install {install}"):
        envs.make_env("dataset", **options)


def test_reasoning_gym_mixtures(tmp_path):
    pytest.importorskip("reasoning_gym")
    block = "data:\n  size: 70\n  specs:\n  - {name: spell_backward, weight: 3}\n  - {name: leg_counting}\n"
    (tmp_path / "mix.yaml").write_text(block)
    mixed = envs.make_env("reasoning_gym", datasets=str(tmp_path / "mix.yaml"))
    asked = [mixed.problem(i).messages for i in range(mixed.num_tasks)]
    assert len(asked) == 70
    assert 0.6 < sum("Spell" in messages[-1]["content"] for messages in asked) / 70 < 0.9
    assert "<think>" in asked[0][0]["content"], "the system prompt asks for the tags that are paid for"
    few = envs.make_env("reasoning_gym-test", datasets="gsm_symbolic")
    assert len({few.problem(i).messages[-1]["content"] for i in range(400)}) == 400, "each counts once in an interval"
    (tmp_path / "bad.yaml").write_text(block.replace("70", "many"))
    mistakes = {
        str(tmp_path / "bad.yaml"): "data.size must be a number",
        "nonesuch": "nonesuch",
        "leg_counting*0": "above 0",
        "a b": "is not name",
    }
    for text, message in mistakes.items():
        with pytest.raises(ValueError, match=message):
            envs.make_env("reasoning_gym", datasets=text)


def test_the_example_of_an_environment_works(monkeypatch):
    page = (ROOT / "docs/tasks.md").read_text()
    code = page[page.index("from envs.base import Env, Problem") :].partition("```")[0]
    assert len(code.strip().splitlines()) <= 19
    module = type(sys)("envs.product")
    exec(code, vars(module))
    # Registers the example as the README says.
    monkeypatch.setitem(sys.modules, "envs.product", module)
    monkeypatch.setitem(envs.ENVS, "product", ("envs.product", "Product", {}))
    env = envs.make_env("Product", prefix="Sure: ")
    test = envs.make_env("product-test")
    assert isinstance(test, Env)
    assert env.problem(0).prefix == "Sure: "
    problem = test.problem(0)
    for sign, score in (("*", 1.0), ("+", 0.0)):
        found = test.score(problem, f"<answer>{sign.join(map(str, problem.answer))}</answer>")["return"]
        assert found == score
    assert env.problem(0).messages != test.problem(0).messages


@pytest.mark.parametrize(
    ("name", "options", "prefix"),
    [
        *((name, {}, "<think>") for name in ("countdown", "gsm8k", "math500-test")),
        ("gsm8k", {"form": "boxed"}, ""),
        ("gsm8k", {"thinking": "off"}, ""),
        ("gsm8k", {"thinking": "off", "prefix": "Well"}, "Well"),
        ("gsm8k", {"prefix": "none"}, ""),
        ("poem", {}, ""),
    ],
)
def test_who_is_asked_to_think_begins_to(name, options, prefix):
    data = {"data_dir": str(SAMPLES)} if name.removesuffix("-test") in LOCAL else {}
    assert envs.make_env(name, **data, **options).problem(0).prefix == prefix


# Countdown


def test_countdown_is_lmpos():
    env = envs.make_env("countdown")
    system, user = env.problem(0).messages
    assert system["content"].startswith("You are a helpful assistant. You first think")
    assert user["content"].startswith("Using the numbers [")
    targets = [env.instance(i)[1] for i in range(2000)]
    share = sum(target > 100 for target in targets) / 2000
    assert 0.36 < share < 0.54, "of 300 targets of kvfrans/lmpo 45% are above 100: within three standard errors"
    assert min(targets) >= 1
    assert 900 < max(targets) <= 1000
    penalties = [made.truncation_penalty for made in (env, envs.make_env("countdown", **DEMO, truncation_penalty=0))]
    assert penalties == [0.05, 0]


@pytest.mark.parametrize("numbers", [(3, 7, 2), (25, 5, 1, 4), (1, 1, 1, 1)])
def test_countdown_solver(numbers):
    for target in range(1, 30):
        found = solve(numbers, target)
        assert (found is not None) == (target in reachable(tuple(map(Fraction, numbers))))
        if found:
            value, used = parse_arithmetic(found)
            assert value == target
            assert sorted(used) == sorted(numbers)


@pytest.mark.parametrize("options", [DEMO, {"numbers": 3}])
def test_countdown_is_solvable(options):
    for env in (Countdown(**options), Countdown("test", **options)):
        for i in range(150):
            numbers, target = env.problem(i).answer
            assert target in reachable(tuple(map(Fraction, numbers))), (numbers, target)


def test_countdown_problems_are_those_of_the_base_model():
    env = Countdown(**DEMO)
    assert [env.instance(i) for i in range(3)] == [((12, 7, 5), 10), ((8, 2, 5), 9), ((11, 5, 1), 7)]
    assert env.problem(0).messages == [{"role": "user", "content": "Use 12 7 5 to make 10."}]
    first = repr([env.instance(i) for i in range(1000)])
    assert hashlib.sha256(first.encode()).hexdigest()[:16] == "7a4ff1be1ca2037f"


@pytest.mark.parametrize(
    ("reply", "reward", "correct"),
    [
        ("<think>1+2=4</think><answer> (( 1 + 2 )\n * 3 </answer>", 0.0, 0.0),
        ("<think>1+2=4</think><answer> ( 1 + 2 )\n * 3 </answer>", 1.0, 1.0),
        ("<answer>(1+2)*3 = 9</answer>", 1.0, 1.0),
        ("<answer>1+2+3</answer><answer>3*(2+1)</answer> <answer>1", 1.0, 1.0),  # the last complete block counts
        ("<answer>3*(2+1)</answer> </answer>", 1.0, 1.0),
        ("<answer>-(1+2)*3+9/1</answer>", 0.0, 0.0),  # not these numbers
        ("<answer>1+2+3</answer>", 0.1, 0.0),
        ("<answer>1+2+3=9</answer>", 0.1, 0.0),  # a lie about its value: still valid, still wrong
        ("<answer>1+2+3=6</answer>", 0.0, 0.0),  # an equation that is not about the target
        ("<answer>9=(1+2)*3</answer>", 0.0, 0.0),
        ("<answer>9</answer>", 0.0, 0.0),
        ("<answer>(1+2)*3*1</answer>", 0.0, 0.0),
        ("<answer>3/(2-1-1)</answer>", 0.0, 0.0),
        ("<answer>1+2**3</answer>", 0.0, 0.0),
        ("<answer>12-3</answer>", 0.0, 0.0),
        ("(1+2)*3", 0.0, 0.0),
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
    env = envs.make_env("Poem")
    limited = envs.make_env("poem", max_characters=10)
    problem = env.problem(0)
    assert env.score(problem, "a" * 12) == {"return": 12.0, "characters": 12.0}, "nothing says what is right"
    assert limited.score(problem, "a" * 12) == {"return": 10.0, "correct_answer": 1.0, "characters": 12.0}
    assert limited.score(problem, "a" * 9) == {"return": 9.0, "correct_answer": 0.0, "characters": 9.0}


def test_poem_splits_share_no_subject(tmp_path):
    (tmp_path / "subjects.txt").write_text("the sea\n\ncrane\n owl \ncrane\n")
    options = {"subjects_file": str(tmp_path / "subjects.txt")}
    train, test = envs.make_env("poem", **options), envs.make_env("poem-test", **options)
    assert sorted(train.subjects + test.subjects) == ["crane", "owl", "the sea"]
    assert test.problem(0).messages == [{"role": "user", "content": "Write three sentences about the sea"}]
    (tmp_path / "short.txt").write_text("one\n")
    for name in ("absent.txt", "short.txt"):
        with pytest.raises(ValueError, match=name):
            envs.make_env("poem", subjects_file=str(tmp_path / name))


# any text whatever; more in tests/envs/test_graders.py


@pytest.mark.parametrize(
    "text",
    [
        "(" * 450 + "1" + ")" * 450,
        "*".join(["9" * 90] * 10),
        "9" * 10_000_000,
        "1+1=2," * 1_700_000,
        "١+٢=٣",
        "1_0+0x1f+1e9+1j+1.5+007+1if 1else 2",
    ],
    ids=lambda text: text[:10],
)
def test_hostile_text(text):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for env in map(environment, ["countdown3", "poem", "gsm8k", "math500", *["reasoning_gym"] * HAS_GYM]):
            for reply in (text, f"<answer>{text}</answer>", f"{text}<answer>1</answer>"):
                start = time.process_time()
                score = env.score(env.problem(0), reply)
                assert time.process_time() - start < 1
                assert score.get("correct_answer", 0) == 0


def test_arithmetic_is_exact():
    for text in ("", "5 (3)", "(1)(2)", "1,2", "7//2", "~3", "1 2", "1)+(2", "1+2 3", "[1]", "1<2"):
        assert parse_arithmetic(text) == (None, []), text
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
        found = value is not None and sorted(used) == sorted(row["nums"])
        assert found == row["uses_each_once"], row["id"]
        assert score["correct_answer"] == row["strict_ok"]
        assert score["valid"] == row["uses_each_once"], row["id"]
