"""--stop_at: each rule ends a run at the step that its metrics name, and the run can go on from there."""

from functools import partial
from pathlib import Path

import pytest

from core.records import Progress
from core.run.stop import STOPPED, Stopping, StopRule, parse_rules
from tests.helpers import read_jsonl, slow, train_here
from tests.kill_runs import FLAGS, checksum, difference, records
from utils.devices.sharding import single_device

STEPS = 6
FLAGS = FLAGS | {"max_steps": STEPS, "test_interval": 2, "save_best": 1}
train = partial(train_here, **FLAGS)
OPERATORS = {">=": "__ge__", "<=": "__le__", ">": "__gt__", "<": "__lt__"}


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A run without rules."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert train(folder) == 0
    return folder


def ending_step(folder: Path, metric: str, sign: str, limit: float, first_step: int = 0) -> int:
    """Returns the step at which the metrics of a run without rules meet a rule; its last step if none does."""
    rows = [row for row in read_jsonl(folder / "metrics.jsonl") if row["global_step"] >= first_step]
    met = [row["global_step"] for row in rows if metric in row and getattr(float(row[metric]), OPERATORS[sign])(limit)]
    return min(met, default=STEPS)


def value(folder: Path, metric: str, step: int) -> float:
    return next(row[metric] for row in read_jsonl(folder / "metrics.jsonl") if row["global_step"] == step)


@pytest.mark.parametrize(
    "parts",  # metric, comparison with its value at a step, and the step from which the rule holds
    [
        ("env/return", ">=", 3, 2),
        ("rollout/total_rollouts", ">", 2, 0),
        *slow(("test_env/return", "<=", 4, 4), ("entropy", "<", 2, 3), ("env/return", ">", 6, 0)),
    ],
)
def test_rule_ends_a_run_at_the_step_its_metrics_name(parts, whole, tmp_path, capsys):
    metric, sign, of_step, first_step = parts
    limit = value(whole, metric, of_step)
    end = ending_step(whole, metric, sign, float(f"{limit:.12g}"), first_step)
    rule = f"{first_step}: {metric} {sign} {limit:.12g}" if first_step else f"{metric}{sign}{limit:.12g}"
    assert train(tmp_path / "run", stop_at=rule, save_best=0) == 0
    printed = capsys.readouterr().out
    assert records(tmp_path / "run")[-1]["global_step"] == end
    is_met = end < STEPS or value(whole, metric, end) == limit and sign == ">="
    assert (f"ended the run at step {end}." in printed) == is_met
    assert f"model: {tmp_path}/run/step{end}\n" in printed
    assert "test_env/return" in records(tmp_path / "run")[-1], "the last step is evaluated"
    assert (tmp_path / "run/best/model.safetensors").is_file()


def test_stopped_run_stays_until_its_rule_is_left_out(whole, tmp_path, capsys):
    """It then becomes what a run without rules is, to the bit."""
    folder = tmp_path / "run"
    assert train(folder, stop_at="4: test_env/return>=-9") == 0
    assert records(folder) == records(whole)[:5]
    assert train(folder, stop_at="loss>1e9,4: test_env/return >= -9") == 0
    printed = capsys.readouterr().out
    assert "finished at step 4 by --stop_at 4: test_env/return>=-9 (remove the rule to continue)" in printed
    assert printed.count("ended the run at step 4.") == 2
    assert records(folder) == records(whole)[:5]
    assert train(folder) == 0
    assert "resuming at step 4 in" in capsys.readouterr().out
    assert records(folder) == records(whole)
    assert checksum(folder, STEPS) == checksum(whole, STEPS)
    assert difference(folder, whole, STEPS) == 0


@pytest.mark.slow
def test_first_evaluation_ends_a_run_with_rollouts_ahead(tmp_path, capsys):
    for _ in range(2):
        assert train(tmp_path / "run", stop_at="test_env/return>-9", ahead=1) == 0
        assert "ended the run at step 0." in capsys.readouterr().out
        assert [row["global_step"] for row in records(tmp_path / "run")] == [0]
    assert (tmp_path / "run/step0/model.safetensors").is_file()


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ("test_env/retrun>1", "no metric test_env/retrun: give test_env/return"),
        ("env/length=3", "is not a rule"),
        ("loss>many", "is not a rule"),
        ("approx_kl>nan", "is not a rule"),
        ("loss>1 entropy<2", "is not a rule"),
    ],
)
def test_rule_without_a_metric_or_a_number_fails_before_the_run(rule, words, tmp_path, capsys):
    assert train(tmp_path / "run", stop_at=rule) == 2
    assert words in capsys.readouterr().err
    assert not records(tmp_path / "run")


def test_rules_are_read_with_steps_labels_and_commas():
    label = "test_env.gsm8k(form=any,partial=0.5)/correct_answer"
    found = parse_rules(f" 12: {label} < .3,approx_kl>1e-1 ,")
    assert found == [StopRule(12, label, "<", 0.3), StopRule(0, "approx_kl", ">", 0.1)]
    assert list(map(str, found)) == [f"12: {label}<0.3", "approx_kl>0.1"]
    stopping = Stopping(found, single_device())
    ends = [stopping.judge(Progress(step), {label: 0.0}).memory for step in (11, 13)]
    assert ends == [{}, {STOPPED: f"12: {label}<0.3"}]
    assert not stopping.judge(Progress(13), {"approx_kl": float("nan")}).memory


def test_rule_on_a_metric_that_is_not_logged_is_a_warning(tmp_path, capsys):
    assert train(tmp_path / "run", stop_at="los>1e9", max_steps=2) == 0
    assert capsys.readouterr().out.count("no metric los: give loss, or a name") == 1
    warnings = [(event["global_step"], event["warning"]) for event in read_jsonl(tmp_path / "run/events.jsonl")]
    assert [step for step, text in warnings if text.startswith("--stop_at los>")] == [1]
    assert train(tmp_path / "run", stop_at="test_env/retrun>1", max_steps=3) == 0
    assert "no metric test_env/retrun: give test_env/return" in capsys.readouterr().out, "a rule of a resumed run"
