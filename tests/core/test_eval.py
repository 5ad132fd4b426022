"""Estimates against enumeration and independent loops; the command over checkpoints and environments, end to end.

Letters: N tasks, G samples of each.
"""

import inspect
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import time
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import scipy.stats

from core import eval as evaluation
from core.config import Config
from core.eval import EvalCommand
from core.run.metrics import explained_variance
from core.sft import SFTConfig
from envs import ENVS, find_class, make_env
from envs.base import Env
from envs.settings import CODE, EnvConfig, RolloutSettings, resolve_environments
from envs.style import Style, Styled
from extras.chat_web import trained_settings
from extras.replay import ReplayCommand
from extras.replay import main as replay_command
from models.checkpoint import find_checkpoints
from recipes.preferences.dpo import DPOConfig
from tests.helpers import ROOT, read_jsonl, train_here
from tests.kill_runs import FLAGS, QUICK, arguments, reached, start
from tests.oracles.enumeration import vote
from utils.evaluation.estimates import (
    best_of_k,
    majority,
    mean_and_ci,
    paired_difference,
    pass_at_k,
    task_estimates,
)
from utils.evaluation.tables import Result, compare_results, format_report
from utils.settings.config import options_of, parse, to_dict, with_options
from utils.settings.errors import UserError, user_errors

MODEL = ROOT / "tests" / "fixtures" / "qwen3-tied"


# Estimates


@pytest.mark.parametrize(
    ("right", "total"),
    [(0, 30), (30, 30), (0, 1), (7, 30), (250, 512), (1, 3)],
)
def test_proportions_of_single_samples_have_wilsons_interval(right, total):
    found = mean_and_ci("correct_answer", np.arange(total) < right)
    expected = scipy.stats.binomtest(right, total).proportion_ci(method="wilson")
    ends = [found["correct_answer_low"], found["correct_answer_high"]]
    assert ends == pytest.approx([expected.low, expected.high], abs=1e-4), "1.96 has three digits"
    assert found["correct_answer"] == pytest.approx(right / total)
    assert found["correct_answer_ci"] == pytest.approx((ends[1] - ends[0]) / 2)
    assert found["correct_answer_ci"] > 0


def test_no_interval_is_zero_by_accident():
    assert mean_and_ci("correct_answer", np.zeros(30))["correct_answer_high"] == pytest.approx(0.1135, abs=1e-4)
    halves = mean_and_ci("pass@2", np.full(30, 0.5))  # one of two samples right, for every task
    assert halves["pass@2_high"] - halves["pass@2_low"] > 0.3
    assert mean_and_ci("x", np.full(30, 68.0)) == {"x": 68.0}, "the spread is unknown"
    assert mean_and_ci("x", np.array([68.0])) == {"x": 68.0}


@pytest.mark.parametrize("values", [(1.0, 2.0, 4.0), (0.1, 0.9, 1.0), (0.0, 1.0, 1.0), (1.0, 1.0), (0.1, 0.1)])
def test_number_that_is_no_share_has_no_wilson_interval(values):
    found = mean_and_ci("calls", np.array(values))
    half_width = 1.96 * scipy.stats.sem(values)
    assert found == pytest.approx({"calls": np.mean(values)} | ({"calls_ci": half_width} if half_width > 1e-9 else {}))


def test_intervals_of_several_samples_hold_the_truth():
    rng, misses = np.random.default_rng(0), 0
    for _ in range(1000):
        chances = rng.beta(0.5, 4.5, size=30)  # tasks differ; a tenth is right on average
        found = mean_and_ci("correct_answer", rng.binomial(4, chances) / 4)
        misses += not found["correct_answer_low"] <= 0.1 <= found["correct_answer_high"]
    assert 20 <= misses <= 90, "about 50 of 1000"


def test_best_of_k_and_pass_at_k_are_means_over_all_subsets():
    returns = np.round(np.random.default_rng(0).normal(size=(5, 7)), 1).astype(np.float32)  # some of them equal
    correct = np.concatenate([returns > 0.5, np.zeros((1, 7), bool), np.ones((1, 7), bool)])
    for k in range(1, 8):
        best = [[max(some) for some in combinations(row, k)] for row in returns.tolist()]
        solved = [[any(some) for some in combinations(row, k)] for row in correct.tolist()]
        np.testing.assert_allclose(best_of_k(returns, k), np.mean(best, axis=1))
        np.testing.assert_allclose(pass_at_k(correct, k), np.mean(solved, axis=1))


@pytest.mark.parametrize("seed", range(12))
def test_majority_is_an_election_of_all_samples(seed):
    rng = np.random.default_rng(seed)
    answers = [None if i == 0 else "abcdefgh"[i] for i in rng.integers(0, 2 + seed % 6, 8).tolist()]
    right = {"b", "d"} if seed % 3 else {"c"}  # two answers may be right, as in Countdown: they are one vote
    correct = np.array([answer in right for answer in answers])
    merged = ["right" if answer in right else answer for answer in answers]
    for some in combinations(range(8), 5):
        found = majority([answers[i] for i in some], correct[list(some)])
        assert found == pytest.approx(vote([merged[i] for i in some], correct[list(some)].tolist())), some


def test_majority_by_hand():
    def share(text: str, correct: list[int]) -> float:
        return majority([None if a == "-" else a for a in text], np.array(correct) > 0)

    assert share("aabb", [1, 0, 0, 0]) == 0.25, "equal answers, graded differently"
    assert share("abbc", [1, 0, 0, 1]) == 0.5, "answers that are graded right are one, whatever their spelling"
    assert majority(["1  1/2\n", " 1 1/2", "11/2"], np.array([True, True, False])) == 1


def test_task_estimates_are_named_by_k():
    scores = {name: np.float32([[0, 1, 0, 0, 1, 0]] * 2) for name in ("return", "correct_answer")}
    found = task_estimates(scores, list("abcdbe") * 2)
    kinds = ("pass@", "best_of_")
    assert set(found) == {"return", "correct_answer", "maj@6", *(f"{kind}{k}" for kind in kinds for k in range(2, 7))}
    assert all(x.shape == (2,) for x in found.values())
    assert found["maj@6"].tolist() == [1, 1]
    assert not any("maj" in name for name in task_estimates(scores, [None] * 12)), "an environment without answers"
    one = {name: x[:, :1] for name, x in scores.items()}
    assert set(task_estimates(one, ["a", "b"])) == {"return", "correct_answer"}
    many = {name: np.zeros((1, 40), np.float32) for name in scores}
    ks = [int(name[5:]) for name in task_estimates(many, [None] * 40) if name.startswith("pass@")]
    assert ks == [2, 3, 4, 5, 6, 7, 8, 16, 32, 40]


@pytest.mark.parametrize("num_tasks", [2, 5, 29])
def test_paired_difference_of_few_problems_is_students(num_tasks):
    rng = np.random.default_rng(0)
    x = rng.random(num_tasks)
    y = x + rng.normal(0.02, 0.1, num_tasks)
    test = scipy.stats.ttest_rel(y, x, alternative="greater")
    ends = scipy.stats.ttest_rel(y, x).confidence_interval(0.95)
    found = paired_difference(x, y)
    assert [found["mean"], found["low"], found["high"]] == pytest.approx([np.mean(y - x), *ends])
    assert found["p"] == pytest.approx(max(test.pvalue, 0.5**num_tasks))


def test_paired_difference_of_many_problems_against_a_loop():
    rng = np.random.default_rng(0)
    x = rng.random(50)
    y = x + rng.normal(0.02, 0.1, 50)  # what problems have in common cancels
    means = [np.mean([y[i] - x[i] for i in rng.integers(50, size=50)]) for _ in range(4000)]
    found = paired_difference(x, y)
    assert found["p"] == pytest.approx(np.mean(np.array(means) <= 0), abs=0.03)
    assert [found["low"], found["high"]] == pytest.approx(np.quantile(means, [0.025, 0.975]), abs=0.004)
    tenths = np.array([0.1, 0.2, 0.3])
    same = paired_difference(tenths, tenths.copy())
    assert same == {"mean": 0, "low": None, "high": None, "p": 1}
    assert paired_difference(np.zeros(3), np.ones(3))["p"] == 1 / 8, "three signs that agree"
    better = paired_difference(np.zeros(100), np.linspace(1, 2, 100))
    assert better["p"] == pytest.approx(1 / 10_001)
    assert 1 < better["low"] < better["high"] < 2


# Comparisons


def result(name: str, ids: list[int], values: list[float], env_name: str = "poem-test") -> Result:
    by_task = {"return": np.array(values), "correct_answer": np.array(values)}
    metrics = {"num_tasks": len(ids), "num_samples": 1, "length": 7.0}
    for metric, x in by_task.items():
        metrics |= {metric: float(x.mean()), f"{metric}_ci": 0.125}
    return Result(name, env_name, metrics, np.array(ids), by_task)


def test_differences_are_of_tasks_that_both_played():
    first = result("a", [1, 2, 5], [0, 1, 0])
    second = result("b", [2, 5, 7], [1, 1, 0])
    other = result("a", [1], [1], "gsm8k-test")
    apart = result("c", [9], [1])
    rows = compare_results([first, other, second, apart], seed=0)
    assert "difference" not in rows[0]
    assert "difference" not in rows[1]
    assert rows[2]["difference"]["to"] == "a"
    assert rows[2]["difference"]["num_tasks"] == 2
    assert rows[2]["difference"]["return"] == paired_difference(np.array([1, 0]), np.array([1, 1]))
    assert rows[3]["difference"] == {"to": "a", "num_tasks": 0}
    json.dumps(rows, allow_nan=False)


def test_tables_are_aligned():
    pairs = [("poem-test", 1.0), ("gsm8k-test", 0.0)]
    results = [result(f"run/{name}", [1, 2], [0, x], env) for name in ("step5", "step10") for env, x in pairs]
    lines = format_report(compare_results(results, seed=0)).splitlines()
    assert lines[0] == "poem-test   correct        return         length"
    assert lines[2] == "run/step10  0.500 ± 0.125  0.500 ± 0.125  7.0"
    assert lines[4].startswith("difference to run/step5, 95% interval, p of 0 or less (paired bootstrap")
    assert lines[6] == "run/step10  +0.000 [unknown] p 1.0000  +0.000 [unknown] p 1.0000"
    assert lines[8].startswith("gsm8k-test  correct")
    assert lines[-1].startswith("run/step10  +0.000 [unknown] p 1.0000")


def test_checkpoints_of_a_run_folder(tmp_path, monkeypatch):
    # Folders are given relative to this one.
    monkeypatch.chdir(tmp_path)
    run = Path("run")
    (run / "state").mkdir(parents=True)
    find = find_checkpoints
    words = "run folder without a model, .*: continue the run by its command .*, which writes a model when it is"
    with pytest.raises(ValueError, match=words):
        find("run")
    for name in ("step100", "step20", "best", "steps"):
        (run / name).mkdir()
    (run / "config.json").write_text("{}")
    found = find("run/")
    assert found == [("run/step20", run / "step20"), ("run/step100", run / "step100")]
    assert find(" run/step20") == [("run/step20", run / "step20")]
    (run / "model.safetensors").touch()
    assert find("run") == [("run", run)], "a model with folders of that name in it"


def test_answers_are_of_the_form_that_the_environment_asks_for():
    env = Env()
    env.num_tasks = 1
    assert env.answer("so <answer> 5 </answer> or \\boxed{6}") == "5"
    assert env.answer("\\boxed{6}") is None
    env.form = "boxed"
    assert Styled(env, Style()).answer("<answer>5</answer> or \\boxed{6}") == "6"


def test_votes_for_one_answer_have_one_spelling():
    env = Env()
    env.form = "boxed"
    for spellings in (
        ["0.5", "1/2", r"\frac{1}{2}", "**0.5**"],
        ["1,240", "1240", "$1240"],
        ["E", "(E)", "E: forty"],
    ):
        assert len({env.vote(rf"\boxed{{{answer}}}") for answer in spellings}) == 1
    votes = {env.vote(rf"\boxed{{{answer}}}") for answer in ("25", "25%", "0.25", "x", "2x", "D", "")}
    assert len(votes) == 7
    assert env.vote("25") is None
    votes = [env.vote(rf"\boxed{{{answer}}}") for answer in ("3", "0.5", "x/2", "3.0", r"\frac{x}{2}")]
    found = majority(votes, np.array([0, 0, 1, 0, 1]) > 0)
    assert found == 0.5, "3 has two votes, the right answer too"


# The command


def command(*argv: str, **flags) -> evaluation.EvalCommand:
    flags = {"num_generation_tokens": 8, "num_score_workers": 1} | flags
    return evaluation.parse_command([*argv, *(word for name, x in flags.items() for word in (f"--{name}", str(x)))])


def write_countdown_run(folder: Path) -> Path:
    """Writes a run of two equal checkpoints, which was trained with an option of Countdown."""
    for step in (2, 10):
        shutil.copytree(MODEL, folder / f"step{step}")
    trained = {"env_name": "countdown3", "env_options": "max_number=9"}
    (folder / "config.json").write_text(json.dumps(trained))
    return folder


def test_a_run_folder_on_two_environments(tmp_path, capsys):
    run = write_countdown_run(tmp_path / "run")
    scores = tmp_path / "scores.json"
    samples = tmp_path / "samples.jsonl"
    flags = {
        "num_eval_tasks": 3,
        "num_epochs": 4,
        "json": scores,
        "prompt_length": 1024,
    }
    evaluation.main(command(**flags, env_name="poem,Countdown3", save_samples=samples, model_dir=run))
    found = json.loads(scores.read_text())
    where = [(f"{run}/step{step}", env) for step in (2, 10) for env in ("poem-test", "countdown3-test")]
    assert [(row["model_dir"], row["env_name"]) for row in found] == where
    names = {"correct_answer_low", "correct_answer_ci", "pass@2", "pass@3", "pass@4_high"}
    assert {*names, "best_of_2", "length", "finished"} <= found[1].keys()
    assert not names & found[0].keys(), "a poem is neither right nor wrong"
    place = ("model_dir", "env_name", "difference")
    scores_of = [{name: value for name, value in row.items() if name not in place} for row in found]
    assert scores_of[0] == scores_of[2], "equal weights, equal draws"
    assert scores_of[1] == scores_of[3]
    assert found[2]["difference"]["return"] == {"mean": 0, "low": None, "high": None, "p": 1}
    assert "truncation" in found[1]
    assert "truncation" not in found[0], "Countdown of kvfrans/lmpo alone takes 0.05 off at the limit"
    printed = capsys.readouterr().out
    assert "step10 " in printed
    assert "best_of_4" in printed
    assert f"difference to {run}/step2" in printed
    assert_samples(samples, found[0])

    evaluation.main(command(**flags, env_name="poem", model_dir=run / "step2"))
    assert json.loads(scores.read_text()) == scores_of[0], "one checkpoint, one environment: one object"
    printed = capsys.readouterr().out
    assert "3 tasks x 4, temperature 1" in printed


def assert_samples(file: Path, scores: dict[str, float]) -> None:
    """Asserts that the rows of --save_samples hold the problems and replies that the scores are of."""
    assert file.read_text().isascii()
    rows = read_jsonl(file)
    assert len(rows) == 2 * 2 * 3
    poem = rows[:3]
    assert [row["task"] for row in poem] == [0, 1, 2]
    assert all("three sentences about" in row["prompt"] for row in poem)
    completions = [x for row in poem for x in row["completions"]]
    assert len(completions) == 12
    assert all(x["return"] == len(x["text"]) for x in completions)
    assert all(0 < x["length"] <= 8 for x in completions)
    assert np.mean([x["return"] for x in completions]) == pytest.approx(scores["return"])
    assert np.mean([x["finished"] for x in completions]) == pytest.approx(scores["finished"])
    assert rows[3]["env_name"] == "countdown3-test"
    assert len(rows[3]["reference"][0]) == 3


TRAINED = {
    "env_name": "Countdown3",
    "env_options": "max_number=9",
    "temperature": 0.5,
    "num_generation_tokens": 64,
    # What follows is not taken over.
    "seed": 7,
    "sharding": "dp",
    "inference_batch_per_device": 9,
    "run": {"lmpo": "version 1"},
}


def trained_run(folder: Path, **others: object) -> Path:
    """Writes the folder of a run with these settings."""
    (folder / "step2").mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(TRAINED | others))
    return folder


def settings_of(*argv: str) -> tuple[str, str, float, int]:
    """Returns the environment, its options, the temperature and the limit of tokens that a command evaluates with."""
    config = evaluation.parse_command(argv)
    sampling = config.sampling
    own = (config.output.seed, config.devices.sharding, sampling.inference_batch_per_device)
    assert own == (0, "fsdp", 0), "those of the command"
    return config.env.env_name, config.env.env_options, sampling.temperature, sampling.num_generation_tokens


def test_run_is_evaluated_with_its_training_settings(tmp_path):
    run = trained_run(tmp_path / "run")
    models = f"models/tiny,{run}/step2"
    assert settings_of("--model_dir", models) == ("Countdown3", "max_number=9", 0.5, 64)
    found = settings_of("--ckpt_dir", str(run), "--env_name", "countdown3-test")[1:]
    assert found == ("max_number=9", 0.5, 64)
    found = settings_of("--model_dir", models, "--env_options", "", "--temperature", "1")[1:]
    assert found == ("", 1.0, 64)
    for names in ("poem", "countdown3,poem"):
        found = settings_of("--model_dir", models, "--env_name", names)
        assert found == (names, "", 1.0, -1), "another environment"
    note = evaluation.inheritance_note(evaluation.parse_command(["--model_dir", models, "--temperature", "0.7"]))
    assert note == f"as in {run}: --env_name Countdown3 --env_options max_number=9 --num_generation_tokens 64"
    assert evaluation.inheritance_note(evaluation.parse_command(["--env_name", "countdown3"])) == ""


@pytest.mark.parametrize(
    ("test_env", "options", "limit"),
    [("countdown3-test", "max_number=20,prompt=bare", 96), ("poem", "max_number=9", 64)],
)
def test_held_out_options_of_a_run_are_taken_over(test_env, options, limit, tmp_path):
    """As in the log of the run, which an earlier version may have written in two options."""
    own = "num_generation_tokens=96,max_number=20,prompt=bare" if "countdown" in test_env else "max_characters=9"
    earlier = {"test_env_name": test_env, "test_env_options": own, "also_eval": "poem(max_characters=7)"}
    for settings in ({"test_env_name": f"{test_env}({own})"}, earlier):
        run = trained_run(tmp_path / "run", **settings)
        _, env_options, _, found = settings_of("--model_dir", f"models/tiny,{run}/step2")
        assert [env_options, found] == [options, limit]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"env_name": "countdown,nowhere"}, "no environment 'nowhere'"),
        ({"model_dir": "models/tiny,no/such/folder"}, "no folder no/such/folder"),
        ({"env_name": "countdown,poem", "env_options": "numbers=3"}, "poem has no option 'numbers'"),
        ({"save_samples": "no/such/folder/samples.jsonl"}, "No such file or directory"),
    ],
)
def test_mistakes_are_told_before_anything_is_loaded(flags, message, capsys, monkeypatch):
    # Loading a model would fail.
    monkeypatch.setattr(evaluation, "load_model", None)
    with pytest.raises(SystemExit), user_errors():
        evaluation.main(with_options(command(), **flags))
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1


def test_explained_variance():
    rng = np.random.default_rng(0)
    mask = rng.random((5, 7)) < 0.6
    rewards = rng.random((5, 1))
    values = rewards + rng.normal(0, 0.1, mask.shape)
    pairs = [(float(rewards[i, 0]), float(values[i, t])) for i, t in np.argwhere(mask)]
    expected = 1 - np.var([r - v for r, v in pairs]) / np.var([r for r, _ in pairs])
    assert explained_variance(rewards, values, mask) == pytest.approx(expected)
    assert expected < 1
    assert explained_variance(np.ones((5, 1)), values, mask) == 0


# Code that the folder of a run names

HELPER = "from pathlib import Path\nPath('executed').touch()\ndef f(completion, **row): return 0.0\nclass G: pass\n"
ROWS, REWARD = "path=x/q.jsonl", "x/helper.py:f"
CODE_SETTINGS = {  # the flag that has to be named, and the settings of a run
    "a reward": ("reward", {"reward": REWARD}),
    "an episode": ("episode", {"episode": "x/helper.py:G"}),
    "a program": ("agent", {"env_name": "agent", "agent": "touch executed"}),
    "a reward inside": ("env_options", {"env_options": f"{ROWS}, reward = {REWARD}"}),
    "an episode inside": ("env_options", {"env_options": f"{ROWS},episode =x/helper.py:G"}),
    "a program inside": ("env_options", {"env_name": "agent", "env_options": f"{ROWS},agent=touch executed"}),
    "no sandbox": ("env_options", {"env_name": "python", "env_options": "problems=gsm8k,sandbox=off"}),
    "replies graded again": ("env_options", {"env_options": f"{ROWS},regraded=dataset(reward={REWARD})"}),
    "held-out problems": ("test_env_name", {"test_env_name": f"dataset-test(reward={REWARD})"}),
}
CONFIGS = {
    "core/grpo.py": Config,
    "core/sft.py": SFTConfig,
    "recipes/preferences/dpo.py": DPOConfig,
    "core/eval.py": EvalCommand,
}


@pytest.fixture
def run_folder(tmp_path, monkeypatch):
    """The folder x: a run with a model and rollouts, and code beside it; the current folder is the one around it."""
    # Relative paths of the settings begin here.
    monkeypatch.chdir(tmp_path)
    shutil.copytree(MODEL, "x/step1")
    Path("x/rollouts").mkdir()
    arrays = {"tokens": [[1]], "lengths": [1], "prompt_lengths": [0], "mask": [[1]], "rollout": [0]}
    arrays |= {"tasks": [0], "positions": [0]}
    np.savez("x/rollouts/step_1.npz", **arrays)
    Path("x/q.jsonl").write_text(json.dumps({"prompt": "1 + 1", "answer": "2"}) + "\n")
    Path("x/helper.py").write_text(HELPER)
    return tmp_path / "x"


def write_settings(folder, **settings) -> dict:
    """Writes the config.json of a run, of this user or of others, over that of a model; returns the settings."""
    settings = {"env_name": "dataset", "env_options": ROWS} | settings
    file = folder / "config.json"
    model = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(model | settings | {"run": {"lmpo": "0", "host": "here"}}))
    return settings


TAKING = [
    (case, command)
    for case, (flag, _) in CODE_SETTINGS.items()
    for command, config in CONFIGS.items()
    if flag in options_of(config) and case != "replies graded again"
]


@pytest.mark.parametrize(("case", "command"), TAKING)
def test_no_command_takes_code_from_a_config_json(case, command, run_folder, capsys):
    """Neither from its own run; one that names the setting does, and so does a preset in Python."""
    flag, settings = CODE_SETTINGS[case]
    known = options_of(CONFIGS[command])
    settings = {"env_name": "dataset", "env_options": ROWS, "data": "x/q.jsonl"} | settings
    settings = {name: value for name, value in settings.items() if name in known}
    for file in ("x/config.json", "x/preset.yaml"):
        (run_folder / "preset.yaml").write_text(json.dumps(settings))
        (run_folder / "config.json").write_text(json.dumps(settings | {"run": {"lmpo": "0"}}))
        with pytest.raises(SystemExit, match="^2$"):
            parse(CONFIGS[command], ["--config", file])
        said = capsys.readouterr().err
        assert said.startswith(f"error: {file} sets --{flag} ")
        assert said.endswith(f"add --{flag} {shlex.quote(settings[flag])}\n")
    named = parse(CONFIGS[command], ["--config", "x/config.json", f"--{flag}={settings[flag]}"])
    Path("x/preset.py").write_text(f"def get_config(): return {settings!r}")
    assert to_dict(parse(CONFIGS[command], ["--config", "x/preset.py"])) == to_dict(named)
    assert to_dict(named)[flag] == settings[flag]
    assert not Path("executed").exists()


@pytest.mark.parametrize("case", CODE_SETTINGS)
def test_evaluation_and_replay_need_code_to_be_named(case, run_folder, capsys):
    flag, settings = CODE_SETTINGS[case]
    settings = write_settings(run_folder, **settings)
    if case == "held-out problems":  # its options are added to those of training
        flag, settings["env_options"] = "env_options", f"{ROWS},reward={REWARD}"
    advice = f"add --{flag} {shlex.quote(settings[flag])}\n"
    for name in ("x", "x/step1"):
        with pytest.raises(SystemExit, match="^2$"):
            evaluation.main(evaluation.parse_command(["--model_dir", name, "--show", "1"]))
        assert capsys.readouterr().err.endswith(advice)
    if case != "held-out problems":
        argv = ["--rollouts", "x/rollouts/step_1", f"--{flag}=reward=x/other.py:f"]
        with pytest.raises(SystemExit, match="^2$"), user_errors():
            replay_command(parse(ReplayCommand, argv))
        assert capsys.readouterr().err.endswith(advice)
    assert not Path("executed").exists()
    named = evaluation.parse_command(["--model_dir", "x/step1", f"--{flag}={settings[flag]}"])
    assert to_dict(named)[flag] == settings[flag]
    assert evaluation.parse_command(["--model_dir", "x", "--env_name", "poem"]).env.reward == "", "another environment"
    (run_folder / "config.json").write_text(json.dumps(settings))
    assert evaluation.parse_command(["--model_dir", "x"]).env.env_name == "poem", "no origin: it is not a run"


def test_page_of_a_chat_runs_no_code_and_says_so(run_folder, capsys):
    write_settings(run_folder, reward=REWARD)
    assert trained_settings("x/step1") is None
    assert "x/step1 was trained with --reward, which runs code" in capsys.readouterr().out
    write_settings(run_folder, reward="")
    assert trained_settings("x/step1") == EnvConfig("dataset", ROWS)


@pytest.mark.slow
def test_printed_commands_run_as_printed(run_folder):
    """Those that resume and evaluate a run without --save_dir, whose reward they name."""
    flags = FLAGS | {"env_name": "dataset", "env_options": ROWS, "reward": REWARD, "max_steps": 9999}
    Path("x/q.jsonl").write_text("".join(json.dumps({"prompt": f"{i} + 1", "answer": ""}) + "\n" for i in range(8)))
    process = start(arguments(**flags | {"test_env_name": ""}, stop_at="12:env/return>=0", resume="never"))
    while process.poll() is None and not any(reached(folder) > 0 for folder in Path().glob("runs/*")):
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=120)
    command = re.search(r"is saved: `(.*)` resumes from there", said)
    assert command, said
    assert f"--reward {REWARD}" in command[1]
    done = subprocess.run(command[1], shell=True, capture_output=True, text=True, env=QUICK | os.environ)
    assert "resuming at step" in done.stdout, done.stderr
    command = re.search(r"^evaluate: +(.*)$", done.stdout, re.MULTILINE)[1]
    done = subprocess.run(command, shell=True, capture_output=True, text=True, env=QUICK | os.environ)
    assert done.returncode == 0, done.stderr
    assert "return" in done.stdout


def test_text_options_are_listed_by_whether_they_run_code():
    """Another one is to be decided: those that run code belong into CODE."""
    names = "answer bin corpus data_dir data_set datasets dialect expression form hub_split messages mixture operators"
    names += " opponent path problems prompt questions reward_weights split subjects_file test_hub_split test_path"
    parameters = {x for name in ENVS for x in inspect.signature(find_class(name)[0]).parameters.values()}
    assert {x.name for x in parameters if isinstance(x.default, str)} == {*names.split(), *CODE}


def test_problems_are_shown_whatever_the_limit_of_prompts(capsys, monkeypatch):
    monkeypatch.setattr(evaluation, "sampling_room", None)  # no model is run: its memory does not matter
    command = evaluation.parse_command(["--env_name", "poem", "--prompt_length", "5", "--show", "1"])
    evaluation.main(command)
    printed = capsys.readouterr().out
    assert "======== problem 0" in printed
    assert "skipped" not in printed
    monkeypatch.setattr(evaluation.Layout, "is_main", False)  # another process of a job
    evaluation.main(command)
    assert capsys.readouterr().out == ""


# Lists of --test_env_name: the same replies graded in a second way, and other environments that are sampled

DATA = ROOT / "tests" / "fixtures" / "data"
LENIENT = "gsm8k(form=any)"


def lists_of(others: str, test_env_name: str = "gsm8k-test", **flags: str) -> dict[str, RolloutSettings]:
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
    played = lists_of(LENIENT, env_options="form=boxed")
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
    played = lists_of(others, test_env_name)
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
        ("gsm8k(form=any", "'gsm8k.form=any' is not an environment: give NAME or"),
        ("gsm8k(form)", "'form' is not name=value"),
        ("aime,aime", "--test_env_name has aime twice: remove one"),
        ("gsm8k", "gsm8k-test is already graded this way: name another form"),
    ],
)
def test_environment_or_form_that_does_not_exist_is_refused_by_name(others, message):
    with pytest.raises(UserError, match=message):
        lists_of(others)


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
        "model_dir": ROOT / "models" / "tiny",  # writes answers in tags, and never the strict form, ####
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
        either = np.reshape(right, (12, 2)).any(axis=1)
        assert record[f"test_env.{TAGS}/pass@2"] == pytest.approx(either.mean())
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
