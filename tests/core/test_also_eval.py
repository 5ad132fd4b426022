"""Lists of --test_env_name: the same replies graded in a second way, and other environments that are sampled."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from core import eval as evaluation
from core.config import Config
from envs import make_env
from envs.settings import RolloutSettings, resolve_environments
from tests.helpers import ROOT, read_jsonl, train_here
from utils.settings.config import parse
from utils.settings.errors import UserError

DATA = ROOT / "tests" / "fixtures" / "data"
LENIENT = "gsm8k(form=any)"


def settings_of(others: str, test_env_name: str = "gsm8k-test", **flags: str) -> dict[str, RolloutSettings]:
    """How training, testing and the other environments of --test_env_name are played, by role."""
    flags |= {"test_env_name": f"{test_env_name},{others}", "data_dir": str(DATA)}
    argv = [word for flag, value in flags.items() for word in (f"--{flag}", value)]
    config = parse(Config, ["--env_name", "gsm8k", *argv])
    return resolve_environments(config.env, config.held_out, config.sampling)


@pytest.mark.parametrize(
    ("reply", "strict", "lenient"),
    [
        ("So it is \\boxed{{{}}}.", (1, 1, 1), (1, 1, 1)),
        ("The answer is {}.", (0, 0, 0), (1, 1, 1)),
        ("It follows that\n#### {}", (0, 0, 0), (1, 1, 1)),
        ("\\boxed{{-7}}, or perhaps {}", (0.1, 0, 1), (0.1, 0, 1)),
        ("I would rather not say.", (0, 0, 0), (0, 0, 0)),
    ],
)
def test_reply_is_graded_in_both_forms(reply, strict, lenient):
    played = settings_of(LENIENT, env_options="form=boxed")
    assert played.keys() == {"env", "test_env"}, "nothing else is sampled"
    test = played["test_env"]
    problem = test.env.problem(0)
    scores = test.env.score(problem, reply.format(problem.answer))
    names = ("return", "correct_answer", "format")
    assert tuple(scores[name] for name in names) == strict
    assert tuple(scores[f"{LENIENT}/{name}"] for name in names) == lenient
    assert problem == make_env("gsm8k-test", data_dir=str(DATA), form="boxed").problem(0), "the prompts stay"
    assert f"graded also as {LENIENT}" in test.manner
    assert LENIENT not in str(played["env"].options), "training has one reward"


@pytest.mark.parametrize(
    ("others", "test_env_name", "regraded", "sampled"),
    [
        (f"{LENIENT}, gsm8k(form=hash,partial=0)", "gsm8k-test", [LENIENT, "gsm8k(form=hash,partial=0)"], []),
        (LENIENT, "gsm8k-valid", [LENIENT], []),
        ("gsm8k-test(form=any)", "gsm8k-valid", [], [("gsm8k-test(form=any)", "gsm8k-test")]),
        ("gsm8k(thinking=off)", "gsm8k-test", [], [("gsm8k(thinking=off)", "gsm8k-test")]),
        ("countdown3", "gsm8k-test", [], [("countdown3-test", "countdown3-test")]),
        ("calculator(max_number=9)", "calculator", [], [("calculator(max_number=9)", "calculator-test")]),
        ("python(form=any)", "python", [], [("python(form=any)", "python-test")]),
        (f"math500(form=hash),{LENIENT}", "gsm8k-test", [LENIENT], [("math500(form=hash)", "math500-test")]),
    ],
)
def test_replies_are_sampled_again_unless_the_grading_alone_differs(others, test_env_name, regraded, sampled):
    played = settings_of(others, test_env_name)
    scores = played["test_env"].env.score(played["test_env"].env.problem(0), "5") if regraded else {}
    assert [name.removesuffix("/return") for name in scores if name.endswith("/return")] == regraded
    found = {role: settings.name for role, settings in played.items() if role not in ("env", "test_env")}
    assert found == {f"test_env.{label}": name for label, name in sampled}


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ("gms8k(form=any)", "there is no environment 'gms8k' .did you mean gsm8k"),
        ("gsm8k(form=anything)", "form=anything: choose one of tags, boxed, hash, any"),
        ("gsm8k(shape=any)", r"--test_env_name gsm8k\(shape=any\): environment gsm8k has no option 'shape'"),
        ("gsm8k(form=any", "'gsm8k.form=any' is no environment: give NAME or"),
        ("gsm8k(form)", "'form' is not name=value"),
        ("aime,aime", "--test_env_name has aime twice: leave one out"),
        ("gsm8k", "gsm8k-test is graded so already: name another form"),
    ],
)
def test_environment_or_form_that_does_not_exist_is_refused_by_name(others, message):
    with pytest.raises(UserError, match=message):
        settings_of(others)


# A run of models/tiny: it writes answers in tags, and the strict form, ####, never


@pytest.fixture(scope="module")
def problems(tmp_path_factory) -> Path:
    """A folder of problems that models/tiny can read, whose answer is the number to make."""
    folder = tmp_path_factory.mktemp("problems")
    for split, targets in (("train", range(12, 15)), ("test", range(9, 12))):
        numbers = [(a, b, c) for a in range(2, 6) for b in range(6, 9) for c in targets]
        rows = [{"prompt": f"Use {a} {b} {c} to make {a + b + c}.", "answer": str(a + b + c)} for a, b, c in numbers]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


TAGS, OTHER = "dataset(form=tags)", "countdown3(prompt=bare,max_number=15)"


def flags_of(problems: Path, **flags: object) -> dict[str, object]:
    return {
        "model_dir": ROOT / "models" / "tiny",
        "env_name": "dataset",
        "test_env_name": "dataset-test(form=hash)",
        "env_options": f"path={problems}/train.jsonl,test_path={problems}/test.jsonl,form=tags,thinking=on,system=none",
        "lr": 1e-3,
        "groups_per_batch": 2,
        "group_size": 2,
        "max_resampling": 1,
        "do_group_filter": 0,
        "ppo_minibatch": 0,
        "num_generation_tokens": 80,
        "num_eval_tasks": 12,
        "num_eval_samples": 2,
        "test_interval": 1,
        "num_score_workers": 1,
        "max_steps": 2,
    } | flags


def by_hand(text: str) -> float | None:
    """The number in the last tags of a reply, by Python; None if there is none."""
    found = re.findall(r"<answer>([-+*/()\d ]+)</answer>", text)
    try:
        return eval(found[-1]) if found else None
    except (SyntaxError, ZeroDivisionError):
        return None


def also(record: dict[str, float]) -> dict[str, float]:
    return {name: x for name, x in record.items() if name.startswith("test_env")}


@pytest.fixture(scope="module")
def whole(problems, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert train_here(folder, **flags_of(problems, test_env_name=f"dataset-test(form=hash),{TAGS},{OTHER}")) == 0
    return folder


def test_second_grading_of_a_run_is_that_by_hand(problems, whole):
    records = {record["global_step"]: record for record in read_jsonl(whole / "metrics.jsonl")}
    for step in (1, 2):
        rows = read_jsonl(whole / "rollouts" / f"held_out_{step}.jsonl")
        assert len(rows) == 24
        with np.load(whole / "rollouts" / f"held_out_{step}.npz") as arrays:
            tasks, written = arrays["tasks"], arrays[f"scores/{TAGS}/correct_answer"]
        numbers = [int(json.loads(row)["answer"]) for row in (problems / "test.jsonl").read_text().splitlines()]
        answers = [numbers[task] for task in tasks.tolist()]
        right = [by_hand(row["text"]) == answer for row, answer in zip(rows, answers, strict=True)]
        assert 0 < sum(right) < 24, "some replies are right, some are not"
        np.testing.assert_array_equal(written, right)
        record = records[step]
        assert record["test_env/correct_answer"] == 0, "no reply has ####"
        assert record[f"test_env.{TAGS}/correct_answer"] == pytest.approx(np.mean(right))
        low, high = (record[f"test_env.{TAGS}/correct_answer_{end}"] for end in ("low", "high"))
        assert low < np.mean(right) < high
        assert record[f"test_env.{OTHER}/num_tasks"] == 12
        assert not any("/" in name.removeprefix("test_env.").partition("/")[2] for name in also(record))


def test_run_with_several_resumes_to_the_bit_and_trains_as_without(problems, whole, tmp_path):
    flags = flags_of(problems, test_env_name=f"dataset-test(form=hash),{TAGS},{OTHER}")
    assert train_here(tmp_path / "run", **flags | {"max_steps": 1}) == 0
    assert train_here(tmp_path / "run", **flags) == 0
    expected, found = (read_jsonl(folder / "metrics.jsonl") for folder in (whole, tmp_path / "run"))
    assert list(map(also, found)) == list(map(also, expected))
    assert [len(also(record)) > 40 for record in found] == [True] * 3, "before the run, and after each step"
    assert also(found[0]) != also(found[2]), "the policy moves"
    assert train_here(tmp_path / "without", **flags_of(problems, max_steps=1)) == 0
    without = read_jsonl(tmp_path / "without" / "metrics.jsonl")
    names = also(without[1]).keys()
    assert not any(name.startswith("test_env.") for name in names)
    assert {name: expected[1][name] for name in names} == also(without[1]), "neither replies nor their scores move"
    assert without[1]["loss"] == expected[1]["loss"]


def test_eval_grades_the_same_replies_again(problems, tmp_path):
    scores, samples = tmp_path / "scores.json", tmp_path / "samples.jsonl"
    names = ("env_name", "num_generation_tokens", "num_eval_tasks", "num_eval_samples", "model_dir")
    flags = {name: value for name, value in flags_of(problems).items() if name in names}
    flags["env_options"] = flags_of(problems)["env_options"].replace("tags", "hash")
    flags |= {"json": scores, "save_samples": samples, "env_name": f"dataset,{TAGS}"}
    evaluation.main(evaluation.parse_command([word for name, x in flags.items() for word in (f"--{name}", str(x))]))
    found = json.loads(scores.read_text())
    replies = [(row["reference"]["answer"], x["text"]) for row in read_jsonl(samples) for x in row["completions"]]
    right = [by_hand(text) == int(reference) for reference, text in replies]
    assert len(right) == 24
    assert found["correct_answer"] == 0
    assert found[f"{TAGS}/correct_answer"] == pytest.approx(np.mean(right))
    either = np.reshape(right, (12, 2)).any(axis=1)
    assert found[f"{TAGS}/pass@2"] == pytest.approx(either.mean())
