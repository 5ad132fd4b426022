"""report.html: what is embedded can break nothing and fits; a real browser draws, filters, colors, and runs nothing.

The browser is a headless Chromium, with its chromedriver and selenium; where one is missing its tests are skipped.
"""

import base64
import hashlib
import json
import os
import re
import shlex
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from scipy.stats import binom, ttest_rel

from core.records import Batch, Completions, Episodes, Progress
from core.run.report import describe_end
from core.run.rollouts import rollout_rows, score_arrays
from extras.compare import main
from tests.helpers import write_jsonl
from utils.evaluation.estimates import mean_and_ci
from utils.evaluation.losses import loss_metrics, row_losses
from utils.metrics.curves import WINDOW, format_value, intervals, read_metrics, running_mean
from utils.metrics.logger import Logger
from utils.reporting.page import (
    PANELS,
    count_changes,
    embed_json,
    first_and_last,
    judge_segment,
    pair_rows,
    read_rollouts,
    run_data,
    thin,
    write_report,
)
from utils.reporting.verdict import judge

LONG = "🙂" * 25_000
HOSTILE = {
    "script": "</script><script>window.ran = 1</script><img src=x onerror='window.ran = 1'>",
    "textarea": "</textarea></pre></title>--></style><svg onload='window.ran = 1'>",
    "link": "<a href='javascript:window.ran = 1'>[x](javascript:window.ran=1)</a> {{library}} ${window.ran = 1}",
    "comment": "<!--<script>",
    "nul": "a\0b\x1b[31m\r\x7f",
    "surrogate": "a\ud800b\udc00c",
    "right to left": "\u202egnp.exe\u202c שלום עולם \u2066x\u2028y\u2029z",
    "emoji": LONG,
}


def write_run(folder, num_steps=30, rollouts=None, **config):
    """A run folder; `rollouts` holds the rows of each step."""
    (folder / "rollouts").mkdir(parents=True)
    others = {name: 0.1 for panel in PANELS for name in panel.metrics if name[:4] not in ("env/", "entr", "test")}
    records = []
    for step in range(1, num_steps + 1):
        record = {"global_step": step, "env/return": step / num_steps, "entropy": None if step == 3 else 1 / step}
        held_out = {"test_env/return": step / num_steps, "test_env/return_ci": 0.05} if step % 10 == 0 else {}
        records.append(record | others | held_out)
    write_jsonl(folder / "metrics.jsonl", records)
    (folder / "config.json").write_text(json.dumps({"lr": 1e-3, "env_name": "poem"} | config))
    for step, rows in (rollouts or {}).items():
        write_jsonl(folder / "rollouts" / f"step_{step}.jsonl", rows)
    return folder


def row(i: int, group_size: int = 4, **fields) -> dict:
    text = f"<think>{i}</think>"
    return {"group": i // group_size, "task": 7, "text": text, "return": i / 10, "length": 3, "finished": True} | fields


def colored_row(i: int) -> dict:
    lists = {"logprobs": [-2.0, -0.1, 0.0], "old_logprobs": [-1.9, -0.1, 0.0], "entropies": [1.5, 0.2, 0.0]}
    tokens = ["<think>", str(i), "</think>"]
    return row(i, tokens=tokens, advantage=i / 10 - 0.2, valid=1.0, prompt="<b>Count.</b>", **lists)


# Without a browser


@pytest.mark.parametrize(("updates", "env_name"), [(1, "poem"), (0, "")])
def test_a_run_ends_with_the_verdict_of_its_report(updates, env_name, tmp_path):
    """And with commands; one that played no environment, as core/sft.py without --env_name, has none to score it."""
    folder = write_run(tmp_path / "run")
    with Logger(folder, resume_step=30) as logger:
        logger.log(31, {"num_updates": updates})
        options = {"env_options": "path=my rows.jsonl", "test_env_name": f"{env_name}(sandbox=off)" * bool(env_name)}
        settings = {"env_name": env_name, "reward": "r.py:f"} | options
    run = SimpleNamespace(path=folder, model_dir="base", settings=settings)
    verdict, *lines = describe_end(run, Progress(step=31), [])
    assert verdict == run_data("run", folder / "metrics.jsonl", 1000)["verdict"]["text"]
    assert verdict.startswith("Learned: the held-out return went from" if updates else "Nothing")
    assert any("the saved model is base, unchanged" in line for line in lines) == (not updates)
    printed = [shlex.split(line.partition(":")[2])[1:] for line in lines[-2 if env_name else -1 :]]
    assert [Path(command[0]).name for command in printed] == ["sampling.py", "eval.py"][: len(printed)]
    assert printed[0][1:] == ["--ckpt_dir", f"{folder}/step31"]
    if env_name:
        code = "--reward", "r.py:f", "--env_options", "path=my rows.jsonl,sandbox=off"
        assert printed[1][1:] == ["--model_dir", f"{folder}/step31", *code]


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE.keys())
def test_embedded_json_ends_no_element_and_is_what_it_was(text):
    embedded = embed_json({text: [text, 0.5, None]})
    assert not set(embedded) & set("<>&\u2028\u2029\0")
    embedded.encode("utf-8")
    assert json.loads(embedded) == {text: [text, 0.5, None]}


def test_page_runs_its_own_scripts_only_and_loads_nothing(tmp_path):
    run = write_run(
        tmp_path / "run", rollouts={1: [row(0, text=text) for text in HOSTILE.values()]}, note=HOSTILE["script"]
    )
    write_report([run], tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)[1]
    scripts = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    hashes = {f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in scripts}
    assert len(scripts) == 2
    assert set(re.search("script-src ([^;]*);", policy)[1].split()) == hashes
    assert policy.startswith("default-src 'none';")
    assert not re.search("https?:|connect-src|unsafe-eval", policy)
    shell = page.replace(scripts[0], "").replace(scripts[1], "")
    assert "window.ran = 1<" not in shell
    assert not re.search(r"<(link|img|iframe|svg|object|embed)\b", shell)
    assert "innerHTML" not in scripts[1]
    assert "document.write" not in scripts[1]
    assert "eval" not in scripts[1]


@pytest.mark.parametrize("size", [1, 4, 99, 100, 101, 10_007])
def test_thinning_keeps_the_ends_and_the_extremes(size):
    values = np.random.default_rng(size).normal(size=size)
    values[size // 3 : size // 2] = np.nan
    kept = thin(values, 100)
    assert len(kept) <= 100
    assert (np.diff(kept) > 0).all()
    assert kept[0] == 0
    assert kept[-1] == size - 1
    assert np.nanmin(values) == np.nanmin(values[kept])
    assert np.nanmax(values) == np.nanmax(values[kept])
    assert np.isnan(values[kept]).any() == np.isnan(values).any(), "a gap stays one"


@pytest.mark.parametrize("size", [1, 4, 100])
def test_running_mean_reads_finite_values_and_keeps_gaps(size):
    values = np.random.default_rng(0).normal(size=size)
    values[size // 3 : size // 2] = np.nan
    last = [values[max(0, i + 1 - WINDOW) : i + 1] for i in range(size)]
    expected = [np.nan if np.isnan(x) else np.nanmean(part) for x, part in zip(values, last, strict=True)]
    np.testing.assert_allclose(running_mean(values), expected, atol=1e-12)


def test_steps_without_update_are_gaps_in_curves(tmp_path):
    with Logger(tmp_path) as logger:
        for step in range(7):
            update = {"entropy": 1.0} if step in (2, 5) else {}
            held_out = {"test_env/return": 0.5} if step in (0, 6) else {}
            logger.log(step, {"env/return": 1.0} | update | held_out)
    run = read_metrics(tmp_path / "metrics.jsonl")
    np.testing.assert_array_equal(run["entropy"], [[2, 3, 4, 5, 6], [1, np.nan, np.nan, 1, np.nan]])
    np.testing.assert_array_equal(run["test_env/return"], [[0, 6], [0.5, 0.5]])


def test_intervals_are_as_logged_and_within_0_and_1(tmp_path):
    with Logger(tmp_path) as logger:
        logger.log(0, {f"test_env/{name}": x for name, x in mean_and_ci("correct_answer", np.eye(1, 64)[0]).items()})
        logger.log(1, {"test_env/correct_answer": 2.0, "test_env/correct_answer_ci": 0.5})
    run = read_metrics(tmp_path / "metrics.jsonl")
    ends = intervals(run, "test_env/correct_answer")
    assert 0 < ends[0][0] < 1 / 64 < ends[0][1] < 0.1
    assert ends[1] == (1.5, 2.5)
    series = run_data("run", tmp_path / "metrics.jsonl", 0)["metrics"]["test_env/correct_answer"]
    assert [series["low"][0], series["high"][0]] == pytest.approx(ends[0], rel=1e-4)


SCORES = {  # of evaluations: what the verdict says
    "better": ([0.2, 0.4, 0.6, 0.8], "Learned: "),
    "same": ([0.5, 0.52, 0.5, 0.51], "Nothing learned"),
    "worse": ([0.5, 0.4, 0.1, 0.1], "Worse than before"),
    "lost again": ([0.2, 0.8, 0.7, 0.4], "Learned, then lost again"),
}


@pytest.mark.parametrize("name", SCORES)
def test_the_verdict_compares_intervals(name):
    values, opening = SCORES[name]
    steps, values = np.arange(4.0) * 10, np.array(values)
    run = {"test_env/correct_answer": (steps, values)}
    run |= {f"test_env/correct_answer_{end}": (steps, values + by) for end, by in (("low", -0.05), ("high", 0.05))}
    text = judge(run)["text"]
    assert text.startswith(opening)
    change, width = values[-1] - values[0], 0.05 * 2**0.5  # of two independent errors
    change, low, high = (100 * x for x in (change, change - width, change + width))
    assert f"a change of {change:.1f} points [{low:.1f}, {high:.1f}]" in text


@pytest.mark.parametrize(
    ("shares", "rewards", "spread", "finished", "reason"),
    [
        (1.0, (0.1, 0.1), 0.0, 1.0, "all rewards were equal (0.1 everywhere), so no update"),
        (1.0, (0.1, 0.2), 0.0, 0.0, "all rewards were equal, so no update"),
        (1.0, (0.5, 0.5), 1.0, 0.5, "were equal, so no update"),
        (0.5, (0.1, 0.1), 0.2, 0.1, "Nothing learned: no update"),
        (0.5, (0.1, 0.1), 0.2, 0.0, "Nothing learned: all completions were truncated by the token limit, and no"),
    ],
)
def test_without_an_update_the_verdict_says_why(shares, rewards, spread, finished, reason):
    columns = {"return": rewards, "return_spread": [spread] * 2, "groups_without_signal": [shares] * 2}
    run = {f"env/{name}": np.array(values) for name, values in columns.items()}
    run |= {"env/finished": np.full(2, finished), "num_updates": np.zeros(2), "test_env/return": np.ones(2)}
    verdict = judge({name: (np.arange(2.0), values) for name, values in run.items()})
    assert verdict["kind"] == "same"
    assert reason in verdict["text"]


def test_only_scores_of_the_same_problems_are_compared():
    """A change by --resume force at step 20, after which the first score is that of step 30."""
    steps = np.array([0.0, 10, 20, 30, 40])
    values = np.array([0.9, 0.9, 0.9, 0.1, 0.1])
    run = {"test_env/correct_answer": (steps, values), "num_updates": (steps, np.ones(5))}
    run |= {f"test_env/correct_answer_{end}": (steps, values) for end in ("low", "high")}
    assert "from 90.0% at step 0 to 10.0% at step 40" in judge_segment(run, {}, [])["text"]
    text = judge_segment(run, {}, [{"step": 20, "text": "--env_options"}])["text"]
    assert "from 10.0% at step 30 to 10.0% at step 40" in text
    assert text.endswith("Scores up to step 20 are of other data or settings (--resume force).")
    late = judge_segment(run, {}, [{"step": 30, "text": "--env_options"}])["text"]
    assert late.startswith("No verdict: there is only the score at step 40, and a change needs two.")


def test_the_change_of_a_share_stays_within_what_is_possible():
    for score, ends in ((1.0, "[-43.4, 0.0]"), (0.0, "[0.0, 43.4]")):
        points = [mean_and_ci("test_env/correct_answer", np.full(5, score))] * 2
        run = {name: (np.arange(2.0), np.array([point[name] for point in points])) for name in points[0]}
        assert f"a change of 0.0 points {ends}" in judge(run)["text"]


@pytest.mark.parametrize(
    ("num_tasks", "num_gains", "is_damaged"),
    [(200, 10, False), (20, 5, False), (200, 10, True)],
)
def test_held_out_scores_of_equal_problems_are_paired(tmp_path, num_tasks, num_gains, is_damaged):
    run = write_run(tmp_path / "run", num_steps=0)
    before = np.repeat(np.arange(num_tasks) % 2.0, 2)  # two rollouts of each problem
    after = before.copy()
    after[: 4 * num_gains] = 1.0
    with Logger(run) as logger:
        for step, x in ((0, before), (10, after)):
            scores = {"return": x, "correct_answer": x}
            episodes = SimpleNamespace(task_ids=np.repeat(np.arange(num_tasks), 2)[::-1], scores=scores)
            np.savez(run / "rollouts" / f"held_out_{step}.npz", **score_arrays(episodes))
            means = mean_and_ci("test_env/correct_answer", x.reshape(-1, 2).mean(axis=1))
            logger.log(step, means)
    if is_damaged:
        (run / "rollouts" / "held_out_10.npz").write_bytes(b"PK\3\4")
    text = run_data("run", run / "metrics.jsonl", 0)["verdict"]["text"]
    if is_damaged:
        assert text.startswith("Nothing learned")
        return
    ends = re.search(r"Learned: .* points \[(.*), (.*)\]", text).groups()
    quantiles = binom.ppf([0.025, 0.975], num_tasks, 0.05) / num_tasks  # of how often the 10 gains of 1 are drawn
    if num_tasks < 30:
        quantiles = ttest_rel(*(x[::2] for x in (after, before))).confidence_interval()
    np.testing.assert_allclose([float(end) for end in ends], 100 * np.array(quantiles), atol=0.51)


def test_a_change_without_a_known_spread_is_no_verdict():
    def verdict(*losses, **others):
        values = {"test_data/loss": np.array(losses)} | others
        return judge({name: (np.arange(2.0), x) for name, x in values.items()})

    one_row = verdict(8.52, 8.51)
    assert one_row["kind"] == "open"
    assert one_row["text"].startswith("No verdict: the loss of held-out replies went")
    assert verdict(8.5, 8.5)["kind"] == "same"
    assert verdict(8.5, 7.5, **{"test_data/loss_ci": np.full(2, 0.1)})["kind"] == "better"


def test_losses_of_the_same_held_out_rows_are_compared_in_pairs(tmp_path):
    """Rows differ much and all gain a little; the interval is that of the ratio of sums, as brute force has it."""
    run = write_run(tmp_path / "run", num_steps=0)
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 40, 60)
    mask = np.arange(40) < lengths[:, None]
    before = -rng.exponential(1 + lengths[:, None] / 20, mask.shape)
    after = before + rng.normal(0.1, 0.1, mask.shape)
    with Logger(run) as logger:
        for step, logprobs in enumerate((before, after)):
            np.savez(run / "rollouts" / f"held_out_rows_{step}.npz", **row_losses(logprobs, mask))
            logger.log(step, loss_metrics(logprobs, mask))
    verdict = run_data("run", run / "metrics.jsonl", 0)["verdict"]
    ends = re.search(r"Learned: .* a change of -0.\d+ \[(.*), (.*)\]", verdict["text"]).groups()
    drawn = rng.integers(60, size=(20_000, 60))
    gains = ((before - after) * mask).sum(axis=1)
    sizes = mask.sum(axis=1)
    ratios = gains[drawn].sum(axis=1) / sizes[drawn].sum(axis=1)
    np.testing.assert_allclose([float(end) for end in ends], np.quantile(ratios, [0.025, 0.975]), atol=2e-3)
    (run / "rollouts" / "held_out_rows_1.npz").write_bytes(b"PK\3\4")
    assert run_data("run", run / "metrics.jsonl", 0)["verdict"]["kind"] == "same"


def test_training_is_compared_if_no_problems_are_held_out():
    steps = np.arange(1.0, 41)
    noise = np.random.default_rng(0).normal(size=40)
    assert judge({"env/return": (steps, noise + steps)})["kind"] == "better"
    assert judge({"env/return": (steps, noise)})["kind"] == "same"
    assert judge({"env/return": (steps[:6], steps[:6])})["kind"] == "open", "one block"


def test_first_and_last_rollouts_of_a_problem_are_paired(tmp_path):
    tasks = {"step_1": [1, 1, 2, 3], "step_9": [3, 1, 1, 1], "held_out_0": [8, 9], "held_out_9": [8, 9]}
    for name, numbers in tasks.items():
        write_jsonl(tmp_path / f"{name}.jsonl", [row(i, task=task) for i, task in enumerate(numbers)])
    pairs = [(each["step"], each["task"]) for each in first_and_last(tmp_path)["rows"]]
    assert pairs == [(0, 9), (9, 9), (0, 8), (9, 8)], "those that were solved come first"
    for file in tmp_path.glob("held_out*"):
        file.unlink()
    pairs = [(each["step"], each["task"], each["change"]) for each in first_and_last(tmp_path)["rows"]]
    assert pairs == [(1, 1, "gained"), (9, 1, "gained"), (1, 3, "lost"), (9, 3, "lost")], "one of each problem"


def test_changed_held_out_problems_are_counted_and_shown():
    before = [0, 0, 0, 0, 0, 0, 1, 1, 0.5, 0.5, 1, 1]
    after = [1, 1, 1, 1, 0.5, 0, 0, 0.5, 0.5, 1, 1, 1]
    first, last = ([{"task": i, "correct_answer": x} for i, x in enumerate(scores)] for scores in (before, after))
    pairs = pair_rows({0: first, 9: last})
    assert [row["task"] for row in pairs] == [i for i in (0, 1, 2, 6, 7, 8, 10, 11, 5) for _ in range(2)]
    assert [row["step"] for row in pairs] == [0, 9] * 9
    scores = {step: {"correct_answer": dict(enumerate(x))} for step, x in ((0, before), (9, after))}
    changes = count_changes({5: {}} | scores)
    assert changes["steps"] == [0, 9]
    assert changes["counts"] == [
        ("gained", 0.5, 1, 1),
        ("gained", 0, 1, 4),
        ("gained", 0, 0.5, 1),
        ("lost", 1, 0.5, 1),
        ("lost", 1, 0, 1),
        ("solved as often", 1, 1, 2),
        ("solved as often", 0.5, 0.5, 1),
        ("never solved", 0, 0, 1),
    ]
    none = {}, {0: scores[0]}, {0: scores[0], 9: {"correct_answer": {1: 1.0}}}, {0: {"return": {1: 1.0}}, 9: {}}
    assert [count_changes(each)["counts"] for each in none] == [[]] * 4


def test_rollouts_fit_their_budget(tmp_path):
    steps = range(1, 101)
    run = write_run(tmp_path / "run", rollouts={step: [row(i) for i in range(200)] for step in steps})
    size = sum(path.stat().st_size for path in (run / "rollouts").iterdir())
    whole = read_rollouts(run / "rollouts", size)
    assert len(whole["rows"]) == 20_000
    assert whole["note"] == "20,000 rollouts from 100 steps"
    one = write_run(tmp_path / "one", rollouts={1: [row(0)]})
    assert read_rollouts(one / "rollouts", size)["note"] == "1 rollout from 1 step"
    part = read_rollouts(run / "rollouts", size // 20)
    assert len(json.dumps(part["rows"])) < size / 10
    assert " of 100 steps" in part["note"]
    assert {row["step"] for row in part["rows"]} >= {1, 100}, "the ends of the run"
    few = read_rollouts(run / "rollouts", size // 100)
    last = [row for row in few["rows"] if row["step"] == 100]
    assert {0.0, 0.3, 19.6, 19.9} <= {row["return"] for row in last}
    assert len(last) < 200
    assert len(last) % 4 == 0, "whole groups"
    assert read_rollouts(tmp_path / "nowhere", 100) == {"rows": [], "note": ""}


def test_half_lines_and_missing_files_are_no_obstacle(tmp_path):
    run = write_run(tmp_path / "run", rollouts={2: [row(0), row(1)]})
    for path in (run / "metrics.jsonl", run / "rollouts" / "step_2.jsonl"):
        with path.open("a") as file:
            file.write('{"global_step": 31, "te')
    (run / "rollouts" / "notes.jsonl").write_text("not of a step")
    (run / "rollouts" / "step_4.jsonl").write_text(json.dumps(row(0, valid=float("nan"))))
    (run / "config.json").unlink()
    described = run_data("run", run / "metrics.jsonl", 10_000)
    assert described["config"] is None
    assert described["metrics"]["entropy"]["y"][2] is None
    assert described["metrics"]["test_env/return"]["low"] == [0.28333, 0.61667, 0.95]
    assert [row.get("valid", 0) for row in described["rollouts"]["rows"]] == [0, 0, None]


def test_runs_are_compared(tmp_path, capsys):
    runs = [str(write_run(tmp_path / name / "run", lr=lr)) for name, lr in (("a", 0.1), ("b", 0.2))]
    main([*runs, "--html", str(tmp_path / "report.html")])
    assert "report.html" in capsys.readouterr().out
    assert not (tmp_path / "plot.png").exists()
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    data = json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])
    assert [run["name"] for run in data["runs"]] == runs, "paths, since both names are `run`"
    assert [run["config"]["lr"] for run in data["runs"]] == [0.1, 0.2]
    main([*runs, "--out", str(tmp_path / "two.png")])
    assert (tmp_path / "two.png").exists()
    with pytest.raises(SystemExit):
        main([str(tmp_path / "c"), "--html", str(tmp_path / "report.html")])
    assert "there is no" in capsys.readouterr().err


def episodes_of_bytes(ids: list[list[int]], texts: list[str]) -> Episodes:
    """Returns three rows of a prompt of one token; the grader of the last one failed."""
    tokens, lengths = np.zeros((3, 8), int), np.array([6, 3, 2])
    for i, each in enumerate(ids):
        tokens[i, : len(each)] = each
    columns = np.arange(8)
    completions = Completions(
        tokens=tokens,
        mask=(columns >= 1) & (columns < lengths[:, None]),
        logprobs=-np.arange(24.0).reshape(3, 8),
        lengths=lengths,
        prompt_lengths=np.ones(3, int),
        finished=np.ones(3, bool),
        slot_steps=lengths - 1.0,
        num_observed=0 * lengths,
    )
    return Episodes(
        completions=completions,
        rollout=np.arange(3),
        task_ids=np.arange(3),
        texts=texts,
        scores={"return": np.arange(3.0)},
        failed=np.array([False, False, True]),
        failures={},
        times={},
    )


def test_tokens_are_written_with_what_is_known_of_each():
    ids = [[1, *b"x\xf0\x9f\x99\x82"], [1, *b"ab"], [1, 0xFF]]
    episodes = episodes_of_bytes(ids, ["x🙂", "ab", "\xff"])
    r = episodes.completions
    batch = Batch(
        tokens=r.tokens[[1], :4],
        mask=r.mask[[1], :4],
        sample_logprobs=r.logprobs[[1], :4],
        rewards=episodes.scores["return"][[1]],
        lengths=r.lengths[[1]],
        prompt_lengths=r.prompt_lengths[[1]],
        rollout=np.array([1]),
        advantages=np.full((1, 4), 0.5),
        entropies=np.array([[0, 0.25, 2, 0]]),
    )
    tokenizer = SimpleNamespace(hf=SimpleNamespace(decode=lambda ids: bytes(ids).decode("utf-8", "replace")))
    first, second, third = rollout_rows(episodes, 1, tokenizer, batch)
    assert first["tokens"] == ["x", "", "", "", "🙂"]
    assert first["prompt"] == "\x01"
    assert "advantage" not in first
    assert second["tokens"] == ["a", "b"]
    assert list(second["logprobs"]) == [-9, -10]
    assert second["advantage"] == 0.5
    assert "old_logprobs" not in second
    assert list(second["entropies"]) == [0.25, 2]
    assert "tokens" not in third
    assert third["reward_failed"], "tokens of the first two groups only"
    names = {"group", "task", "text", "return", "length", "finished"}
    assert rollout_rows(episodes, 1, tokenizer, num_groups=0)[0].keys() == names


# In a browser


class Page:
    """A report in a browser."""

    def __init__(self, browser, runs, out):
        write_report(runs, out)
        self.browser, clock = browser, time.perf_counter()
        browser.get(out.as_uri())
        self.seconds = time.perf_counter() - clock
        self.wait("return [...document.querySelectorAll('.plot')].every(plot => plot.querySelector('svg'))")

    def run(self, script, *arguments):
        return self.browser.execute_script(script, *arguments)

    def wait(self, script):
        end = time.monotonic() + 60
        while not self.run(script):
            assert time.monotonic() < end, f"never true: {script}"
            time.sleep(0.05)

    def choose(self, name, value):
        change = "const e = document.getElementById(arguments[0]); e.value = arguments[1];"
        self.run(f"{change} e.dispatchEvent(new Event('input', {{bubbles: true}}))", name, value)

    def texts(self, selector="#rollouts pre"):
        return self.run("return [...document.querySelectorAll(arguments[0])].map(e => e.textContent)", selector)

    def colors(self):
        return self.run("return [...document.querySelectorAll('#rollouts pre span')].map(e => e.style.background)")

    def check(self):
        """Nothing was refused, went wrong, was loaded or ran that should not."""
        assert self.browser.get_log("browser") == []
        assert self.run("return performance.getEntriesByType('resource').length") == 0
        assert self.run("return window.ran") is None
        assert self.run("return document.scripts.length") == 3


def test_curves_are_drawn_and_runs_can_be_hidden(chromium, tmp_path):
    page = Page(
        chromium, [write_run(tmp_path / name, lr=lr) for name, lr in (("a", 1), ("<b>b", 2))], tmp_path / "r.html"
    )
    count = (
        "const lines = (plot) => plot.querySelectorAll('path.strong, path.held-out').length;"
        "return [...document.querySelectorAll('.plot')].map(lines)"
    )
    drawn = page.run(count)
    assert len(drawn) >= 10
    assert min(drawn) >= 2, "a trace for each run in each panel"
    assert page.run("return document.querySelectorAll('.plot .interval').length") == 6
    assert page.texts("#curves h3")[0] == "Loss of demonstrations"
    assert all(page.texts("#curves .note"))
    assert page.texts("#runs .run") == ["a", "<b>b"]
    assert len(page.texts("#summary tbody tr")) == 2
    assert page.texts("#settings .differs th") == ["lr"]
    assert page.texts("#settings summary") == ["1 equal in all runs"]
    assert page.texts("#tasks") == []
    page.run("document.querySelectorAll('.run')[0].click()")
    assert sum(page.run(count)) == sum(drawn) / 2
    theme = "return getComputedStyle(document.body).backgroundColor"
    before = page.run(theme)
    page.run("document.getElementById('theme').click()")
    assert page.run(theme) != before
    page.check()
    # Numbers are rounded as on the terminal, halves too.
    values = [0.5625, 0.0625, 0.03125, -0.5625, 100.5, 12.34567, 0.0, 1.0]
    for unit, metric in (("", "env/return"), ("%", "env/correct_answer")):
        once = chromium.execute_script(f"return change({{x: [0], y: [0.25]}}, '{unit}')")
        assert once == f"{format_value(metric, 0.25)} (step 0 only)"
        shown = chromium.execute_script(f"return arguments[0].map((value) => short(value, '{unit}'))", values)
        assert shown == [format_value(metric, value) for value in values]


def test_pages_of_rollouts_and_their_colors(chromium, tmp_path):
    rollouts = {1: [row(i) for i in range(8)], 2: [colored_row(i) for i in range(16)]}
    page = Page(chromium, [write_run(tmp_path / "run", rollouts=rollouts)], tmp_path / "report.html")
    assert page.texts("#place") == ["1 to 2 of 2"], "the first and the last step, side by side"
    assert page.run("return [...document.querySelectorAll('#rollouts details')].every(prompt => prompt.open)")
    assert "log-prob" in page.run("return document.getElementById('color').value")
    page.choose("step", "2")
    assert len(page.texts()) == 20, "ten completions of the last step, and their prompts"
    assert page.texts()[:2] == ["<b>Count.</b>", "<think>0</think>"]
    page.run("document.getElementById('next').click()")
    assert page.texts("#place") == ["11 to 16 of 16"]
    seen = {}
    for color in ("advantage", "log-prob", "ratio", "entropy", ""):
        page.choose("color", color)
        seen[color] = tuple(page.colors())
        assert page.texts("#rollouts article:first-child > pre") == ["<think>10</think>"]
    assert len(set(seen.values())) == 4
    assert not any(seen[""])
    assert page.texts("#rollouts .above")[0] == "0.8", "the advantage of all tokens is in the header"
    assert page.run("return document.querySelector('#rollouts pre span').title") == ""
    page.check()


def write_run_with_held_out_problems(folder: Path) -> Path:
    """Writes a run of 33 steps, the last three without an evaluation; of its problems one is gained."""
    talk = [{"role": "assistant", "content": "8"}, {"role": "<b>user", "content": "<i>Lower.\u202e"}]
    rows = [row(0, correct_answer=0.0), row(4, task=8, conversation=talk, correct_answer=1.0)]
    config = {"lr": 0.5, "reward": "a,b", "run": {"changed": ["lr"]}, "test_env_name": "a"}
    run = write_run(folder, rollouts={1: rows}, **config)
    for step, solved in ((0, [0.0, 1.0, 0.0]), (30, [1.0, 1.0, 0.0])):
        graded = [each | {"correct_answer": solved[i]} for i, each in enumerate(rows)]
        write_jsonl(run / "rollouts" / f"held_out_{step}.jsonl", graded)
        scores = {"tasks": np.arange(3), "returns": np.zeros(3), "scores/correct_answer": np.array(solved)}
        np.savez(run / "rollouts" / f"held_out_{step}.npz", **scores)
    log = (run / "metrics.jsonl").read_text().replace('kl": 0.1', 'kl": 0.0')
    log += "".join(json.dumps({"global_step": 30 + i, "times/step": x}) + "\n" for i, x in enumerate((90, 1, 2)))
    (run / "metrics.jsonl").write_text(log)
    return run


def test_held_out_problems_and_changed_settings_are_shown(chromium, tmp_path):
    run = write_run_with_held_out_problems(tmp_path / "run")
    page = Page(chromium, [run], tmp_path / "report.html")
    assert page.texts("#strip h3") == ["3 held-out problems"]
    assert page.texts("#strip .key span") == ["1 gained", "1 solved as often", "1 never solved"]
    assert page.texts("#strip rect title")[1] == "1 gained: 0.0% → 100.0%"
    assert page.texts("#strip .sides span") == ["step 0", "step 30"]
    assert page.texts("#rollouts h3") == ["gained", "solved as often"]
    turns = "return [...document.querySelectorAll('.turn')].map(e => [e.className, e.dataset.role])"
    assert page.run(turns)[:2] == [["turn ours", "assistant"], ["turn", "<b>user"]]
    assert page.texts(".turn")[1] == "<i>Lower.⟨202E⟩\n"
    page.run("document.getElementById('raw').click()")
    assert page.texts(".turn") == []
    assert page.texts("#rollouts .said") == ["<i>Lower.⟨202E⟩\n"] * 2
    assert page.texts("#settings .differs th") == ["lr"]
    assert page.texts("#settings details:not([open]) summary") == ["3 as the defaults are"]
    assert "Drawn at 20" in page.texts("#live")[0]
    assert ", step 32." in page.texts("#live")[0]
    assert "2 (median)" in page.texts("#summary td")
    assert "KL" not in page.texts("#curves h3") != []
    other = write_run(tmp_path / "other", test_env_name="b")
    page = Page(chromium, [run, other], tmp_path / "two.html")
    assert "different tasks (reward, test_env_name differ)" in page.texts("#tasks")[0]
    page.check()


def test_hostile_text_is_shown_as_text_and_nothing_runs(chromium, tmp_path):
    rows = [row(0, text=text, **{f"<i>{name}": 1.0}) for name, text in HOSTILE.items()]
    rows += [row(1, text="", tokens=[text, text], logprobs=[-1, -2]) for text in HOSTILE.values()]
    config = {"note": HOSTILE["script"], HOSTILE["textarea"]: HOSTILE["link"]}
    run = write_run(tmp_path / "<img src=x onerror=alert(1)>", rollouts={1: rows}, **config)
    page = Page(chromium, [run], tmp_path / "report.html")
    assert page.run("return document.title").startswith("<img src=x")
    texts = page.texts()
    for shown, name in zip(texts, HOSTILE, strict=False):
        if name in ("script", "textarea", "link", "comment"):
            assert shown == HOSTILE[name]
    shown = dict(zip(HOSTILE, texts, strict=False))
    assert shown["nul"] == "a⟨0000⟩b⟨001B⟩[31m⟨000D⟩⟨007F⟩"
    assert shown["surrogate"] == "a⟨D800⟩b⟨DC00⟩c"
    assert shown["right to left"] == "⟨202E⟩gnp.exe⟨202C⟩ שלום עולם ⟨2066⟩x\u2028y\u2029z"
    assert shown["emoji"] == "🙂" * 2000, "the beginning, until one asks for all"
    page.run("document.querySelector('#rollouts pre + button').click()")
    assert page.texts()[list(HOSTILE).index("emoji")] == LONG
    page.choose("color", "log-prob")
    page.run("document.getElementById('next').click()")
    assert page.texts("#place") == ["11 to 16 of 16"]
    page.check()


EQUAL, CUT = {"env/groups_without_signal": 1.0}, "of the completions end before the limit"
PROVOKED = {  # held-out score and metrics of a step: the opening of the verdict, and of the first warning
    "good": (lambda step: step / 40, lambda step: {}, "Learned: ", None),
    "flat rewards": (lambda step: 0.0, lambda step: EQUAL, "Nothing learned", "step 1 100% of the groups have equal"),
    "collapse by a high rate": (
        lambda step: 1.0 if step == 10 else 0.1,
        lambda step: {"approx_kl": 1e-3 if step < 12 else 0.4},
        "Learned, then lost again",
        "step 12 the policy moves by a KL of 0.4 within a step",
    ),
    "truncated": (lambda _: 0.5, lambda n: {"env/finished": 1 - n / 40}, "Nothing learned", f"step 21 only 48% {CUT}"),
}


@pytest.mark.parametrize("name", PROVOKED)
def test_the_page_says_what_went_wrong_first_and_shows_it(chromium, tmp_path, name, capsys):
    score, metrics, opening, warning = PROVOKED[name]
    run = write_run(tmp_path / "run", num_steps=0, rollouts={step: [row(0), row(1)] for step in range(1, 41)})
    for resume_step in (-1, 20):  # which hardly changes what is warned of
        with Logger(run, resume_step=resume_step) as logger:
            for step in range(resume_step + 1, 41):
                logged = metrics(step) if step else {}
                logged |= {"test_env/return": score(step), "test_env/return_ci": 0.05} if step % 10 == 0 else {}
                logger.log(step, logged)
                logger.line(step, logged)
    page = Page(chromium, [run], tmp_path / "report.html")
    assert page.texts(".verdict")[0].startswith(opening)
    assert "200.0%" not in page.texts("svg text"), "also where a share is always 1"
    events = page.texts(".events li")
    if warning is None:
        assert not events
        assert page.texts("svg .mark-head") == []
        return page.check()
    assert events[0].startswith(warning)
    assert warning.split(maxsplit=2)[2] in capsys.readouterr().out
    assert f"What went wrong first, at step {warning.split()[1]}:" in page.texts("#verdict p")
    marks = page.texts("svg g title")
    assert len(marks) == len(events)
    assert events[0].startswith(marks[0].replace(":", "", 1))
    page.run("document.querySelector('.events li a:last-child').click()")
    found = page.texts("#rollouts article:first-child .facts span:nth-child(2)")
    assert found == [f"step {warning.split()[1]}"]
    page.check()


HURRY = """{
    const [every, now] = [setInterval, Date.now];
    sessionStorage.loads = 1 + Number(sessionStorage.loads ?? 0);
    setInterval = (action) => every(action, 10);
    if (sessionStorage.loads === "1") setTimeout(() => { Date.now = () => now() + 61_000; }, 50);
}"""  # a minute passes at once, and only in the page that is loaded first


@pytest.mark.parametrize(
    ("age", "step_seconds", "goes_on"),
    [(60, 1, True), (4000, 1, False), (4000, 500, True), (6000, 500, False)],
)
def test_a_page_stops_loading_itself_when_the_run_was_killed(chromium, tmp_path, age, step_seconds, goes_on):
    run = write_run(tmp_path / "run", run={"end": None})
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"global_step": 31, "times/step": step_seconds}) + "\n")
    last = time.time() - age
    os.utime(run / "metrics.jsonl", (last, last))
    hook = chromium.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": HURRY})
    try:
        page = Page(chromium, [run], tmp_path / "report.html")
        if goes_on:
            page.wait("return sessionStorage.loads === '2'")
        time.sleep(0.5)
        assert page.run("return sessionStorage.loads") == ("2" if goes_on else "1")
        since = time.strftime("No news since %Y-%m-%d %H:%M", time.localtime(last))
        assert page.texts("#live")[0].startswith("The run goes on" if goes_on else since)
        page.check()
    finally:
        chromium.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", hook)
        page.run("sessionStorage.clear()")
