"""Stored rollouts train as they did in their own run, to the bit; those of other settings are refused by name."""

import json
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from core.grpo import main
from recipes.offline.train import OfflineConfig, OfflineRun, StoredRollouts
from tests.helpers import slow, train_here
from tests.kill_runs import FLAGS, arguments, checksum, records
from tests.oracles.stored import stored_logprobs
from utils.files import read_arrays
from utils.settings.config import parse
from utils.settings.errors import user_errors

STEPS = 3
FLAGS = FLAGS | {"test_env_name": "", "max_steps": STEPS, "lr": 1e-2, "save_interval": 1}
# Groups of equal rewards, of which the filter leaves some out, and several calls of the sampler for a step.
COUNTDOWN = {
    "config": "configs/demo.py", "model_dir": "models/tiny", "env_name": "countdown", "prompt_length": 64,
    "num_generation_tokens": 48, "groups_per_batch": 4, "ppo_minibatch": 8, "do_group_filter": 1, "max_resampling": 2,
    "lr_schedule": "constant", "lr": 1e-4,
}  # fmt: skip
TURNS = {
    "env_name": "guess", "env_options": "prompt=bare,min_size=4,max_size=6,max_number=20",
    "model_dir": "models/player", "num_generation_tokens": 110,
}  # fmt: skip
SAMPLER, WEIGHTS = {"do_inference_logprobs": 1}, {"importance_correction": "truncate"}
CASES = {  # flags of both runs; flags by which the first one has the same importance weights
    "old log-probabilities are the sampler's": ({}, SAMPLER),
    "weights of tokens": (WEIGHTS, {}),
    "filtered groups": (COUNTDOWN, SAMPLER),
    "turns": (TURNS | {"advantage": "turn_mean"}, SAMPLER),
    "parts of the reward": (COUNTDOWN | {"advantage": "gdpo", "reward_parts": "valid=1,steps=0.1"}, SAMPLER),
    "adapters": ({"lora_rank": 2, "length_reward": "overlong"}, SAMPLER),
}
NOT_STORED = ("rollout/", "env/reward_", "inference_recompute/effective")  # speed of sampling; failures by kind
train = partial(train_here, **FLAGS)


def train_stored(folder: Path, **flags) -> int:
    """Runs recipes/offline/train.py in this process; returns its exit status."""
    try:
        with user_errors():
            config = parse(OfflineConfig, arguments(**FLAGS | flags, save_dir=folder))
            main(config, OfflineRun, StoredRollouts)
    except SystemExit as end:
        return end.code
    return 0


def comparable(folder: Path) -> list[dict]:
    """Returns the metrics of each step that both runs have."""
    return [{name: x for name, x in record.items() if not name.startswith(NOT_STORED)} for record in records(folder)]


QUICK = ("filtered groups", "weights of tokens")


@pytest.mark.parametrize("case", [*QUICK, *slow(*(case for case in CASES if case not in QUICK))])
def test_a_run_from_its_own_rollouts_has_the_same_gradients_to_the_bit(case, tmp_path, capsys):
    """Its metrics, parameters and optimizer are those of the run that sampled them, at each step."""
    flags, weights = CASES[case]
    first, second = tmp_path / "first", tmp_path / "second"
    assert train_here(first, **FLAGS | flags | weights, save_rollouts="all") == 0
    assert train_stored(second, **flags, rollouts_from=first, save_rollouts="all") == 0
    assert f"rollouts are read from {first}" in capsys.readouterr().out
    card = (second / f"step{STEPS}" / "README.md").read_text()
    assert "\npython recipes/offline/train.py --" in card
    assert comparable(second) == comparable(first)
    assert checksum(second, STEPS) == checksum(first, STEPS)
    for step in range(1, STEPS + 1):
        stored, again = (read_arrays(folder / f"rollouts/step_{step}.npz") for folder in (first, second))
        assert stored.keys() == again.keys()
        for name, x in stored.items():
            np.testing.assert_array_equal(again[name], x, err_msg=name)
    assert all(record["grad_norm"] > 0 for record in records(first))
    assert [record["rollout/stored_step"] for record in records(second)] == [1, 2, 3]


@pytest.fixture(scope="module")
def stored(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("stored") / "run"
    assert train(folder, save_rollouts="all", max_steps=2) == 0
    return folder


def test_other_weights_than_the_sampler_s_are_corrected_for(stored, tmp_path):
    """A policy that has moved: the ratios are those of its probabilities to the stored ones, in float64."""
    assert train_stored(tmp_path / "run", rollouts_from=stored, ppo_minibatch=0, max_steps=4) == 0
    metrics = records(tmp_path / "run")
    assert [record["rollout/stored_step"] for record in metrics] == [1, 2, 1, 2], "from the first one again"
    assert metrics[0]["approx_kl"] < 1e-9
    assert metrics[2]["approx_kl"] > 1e-6, "step 1 again, by a policy of two steps later"
    arrays = read_arrays(stored / "rollouts/step_1.npz")
    new = stored_logprobs(arrays, tmp_path / "run" / "step2")
    ratio = np.exp(new - np.float64(arrays["logprobs"]))[arrays["mask"]]
    assert metrics[2]["importance_ratio"] == pytest.approx(ratio.mean(), rel=1e-5)
    assert metrics[2]["importance_ratio_max"] == pytest.approx(ratio.max(), rel=1e-4)


REFUSED = {  # flags, and what is said
    "no folder": ({"rollouts_from": "runs/none-such"}, "has no rollouts/step_N.npz: name a run with --save_rollouts"),
    "environment": ({"env_options": "subjects_file=other.txt"}, "another env_options ('', and 'subjects_file="),
    "reward": ({"reward": "r.py:longer"}, "another reward ('r.py:shorter', and 'r.py:longer' now"),
    "temperature": ({"temperature": 0.5}, "another temperature (1.0, and 0.5 now)"),
    "model": ({"model_dir": "models/tiny", "prompt_length": 256}, "another model_dir ("),
    "truncated sampling": ({"top_k": 20}, "--top_k, --top_p and --min_p leave are not stored"),
    "ahead": ({"ahead": 1}, "reads what an earlier run sampled: leave out --ahead and --task_sampling"),
    "no weights": ({"objective": "reinforce"}, "--rollouts_from trains on rollouts of older weights"),
}
REWARDS = """
def longer(completion, **row): return len(completion)
def shorter(completion, **row): return -len(completion)
"""


def test_rollouts_of_other_settings_are_refused_by_name(tmp_path, capsys, monkeypatch):
    """Those that decide on rollouts and rewards; what a run learns from them may differ."""
    monkeypatch.chdir(tmp_path)  # the folder of relative paths
    (tmp_path / "r.py").write_text(REWARDS)
    (tmp_path / "other.txt").write_text("rain\nsnow\nwind\nfog\nhail\n")
    assert train("first", reward="r.py:shorter", save_rollouts="all", max_steps=1) == 0
    shared = {"reward": "r.py:shorter", "rollouts_from": "first"}
    for case, (flags, said) in REFUSED.items():
        assert train_stored(tmp_path / "run", **shared | flags) == 2, case
        assert said in " ".join(capsys.readouterr().err.split()), case
    assert not (tmp_path / "run" / "rollouts").exists()
    free = {"lr": 1e-3, "loss_normalization": "constant", "ppo_epochs": 2, "lora_rank": 2, "seed": 1, "max_steps": 2}
    assert train_stored(tmp_path / "free", **shared | free) == 0
    (tmp_path / "r.py").write_text(REWARDS.replace("-len", "len"))
    assert train_stored(tmp_path / "run", **shared) == 2
    assert "another r.py (" in capsys.readouterr().err


def test_its_own_folder_and_files_that_do_not_fit_are_refused(stored, tmp_path, capsys):
    copy = tmp_path / "copy"
    shutil.copytree(stored / "rollouts", copy / "rollouts")
    assert train_stored(tmp_path / "run", rollouts_from=copy) == 2
    assert "has no config.json: name a whole run folder" in capsys.readouterr().err
    assert train_stored(copy, rollouts_from=copy) == 2
    assert "is the --save_dir of this run" in capsys.readouterr().err
    for name in ("config.json", "data.json"):
        shutil.copy(stored / name, copy / name)
    lines = (copy / "rollouts" / "step_1.jsonl").read_text().splitlines()
    (copy / "rollouts" / "step_1.jsonl").write_text("\n".join(lines[:-1]) + "\n")
    assert train_stored(tmp_path / "run", rollouts_from=copy) == 2
    assert "step_1.jsonl has 7 rows and step_1.npz 8 rollouts: copy both again" in capsys.readouterr().err
    config = json.loads((copy / "config.json").read_text())
    config["run"]["segments"] = [{"step": 1, "text": "--temperature is 1.0 now and was 0.5"}]
    (copy / "config.json").write_text(json.dumps(config))
    assert train_stored(tmp_path / "other", rollouts_from=copy) == 2
    assert "was changed on the way by --resume force" in capsys.readouterr().err


def test_option_that_moved_says_where_it_is(capsys):
    assert train(Path("none"), rollouts_from="runs/first") == 2
    assert "no option --rollouts_from: give it to recipes/offline/train.py" in capsys.readouterr().err
