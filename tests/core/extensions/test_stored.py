"""--rollouts_from: stored rollouts train as they did in their own run, to the bit; others are refused by name."""

import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from core.run.rollouts import read_episodes, rollout_arrays
from tests.helpers import slow, train_here
from tests.kill_runs import FLAGS, checksum, records
from tests.oracles.stored import stored_logprobs
from utils.files import read_arrays

STEPS = 3
FLAGS = FLAGS | {"test_env_name": "", "max_steps": STEPS, "lr": 1e-2, "save_interval": 1}
# Groups of equal rewards, of which the filter leaves some out, and several calls of the sampler for a step.
COUNTDOWN = {
    "config": "configs/demo.py",
    "model_dir": "models/tiny",
    "env_name": "countdown",
    "prompt_length": 64,
    "num_generation_tokens": 48,
    "groups_per_batch": 4,
    "ppo_minibatch": 8,
    "do_group_filter": 1,
    "max_resampling": 2,
    "lr_schedule": "constant",
    "lr": 1e-4,
}
TURNS = {
    "env_name": "guess",
    "env_options": "prompt=bare,min_size=4,max_size=6,max_number=20",
    "model_dir": "models/player",
    "num_generation_tokens": 110,
}
SAMPLER, WEIGHTS = {"do_inference_logprobs": 1}, {"importance_correction": "truncate"}
CASES = {  # flags of both runs; flags by which the first one has the same importance weights
    "old log-probabilities are the sampler's": ({}, SAMPLER),
    "weights of tokens": (WEIGHTS, {}),
    "filtered groups": (COUNTDOWN, SAMPLER),
    "turns": (TURNS | {"advantage": "turn_mean"}, SAMPLER),
    "parts of the reward": (COUNTDOWN | {"advantage": "gdpo", "reward_parts": "valid=1,steps=0.1"}, SAMPLER),
    "adapters": ({"lora_rank": 2, "length_reward": "overlong"}, SAMPLER),
    "critic": (TURNS | {"advantage": "gae"}, SAMPLER),
}
NOT_STORED = ("rollout/", "env/reward_", "inference_recompute/effective")  # speed of sampling; failures by kind
train = partial(train_here, **FLAGS)


def weights_of(model: Path) -> list[bytes]:
    """Returns the bits of a saved model."""
    found = [file.read_bytes() for file in sorted(model.glob("*.safetensors"))]
    assert found
    return found


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
    assert train_here(second, **FLAGS | flags, rollouts_from=first, save_rollouts="all") == 0
    assert f"rollouts are read from {first}, of {STEPS} steps" in capsys.readouterr().out
    assert comparable(second) == comparable(first)
    assert checksum(second, STEPS) == checksum(first, STEPS)
    for step in range(1, STEPS + 1):
        assert weights_of(second / f"step{step}") == weights_of(first / f"step{step}")
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
    assert train(tmp_path / "run", rollouts_from=stored, ppo_minibatch=0, max_steps=4) == 0
    metrics = records(tmp_path / "run")
    assert [record["rollout/stored_step"] for record in metrics] == [1, 2, 1, 2], "from the first one again"
    assert metrics[0]["approx_kl"] < 1e-9
    assert metrics[2]["approx_kl"] > 1e-6, "step 1 again, by a policy of two steps later"
    arrays = read_arrays(stored / "rollouts/step_1.npz")
    new = stored_logprobs(arrays, tmp_path / "run" / "step2")
    ratio = np.exp(new - np.float64(arrays["logprobs"]))[arrays["mask"]]
    assert metrics[2]["importance_ratio"] == pytest.approx(ratio.mean(), rel=1e-5)
    assert metrics[2]["importance_ratio_max"] == pytest.approx(ratio.max(), rel=1e-4)


def test_a_stopped_run_resumes_to_the_bit(stored, tmp_path):
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    assert train(whole, rollouts_from=stored) == 0
    for steps in (1, STEPS):
        assert train(stopped, rollouts_from=stored, max_steps=steps) == 0
    assert records(stopped) == records(whole)
    assert checksum(stopped, STEPS) == checksum(whole, STEPS)


def test_stored_episodes_are_those_that_were_written(stored):
    file = stored / "rollouts" / "step_1.npz"
    arrays = read_arrays(file)
    again = rollout_arrays(read_episodes(file), FLAGS["group_size"])
    assert again.keys() == arrays.keys()
    for name, x in arrays.items():
        np.testing.assert_array_equal(again[name], x, err_msg=name)


REFUSED = {  # flags, and what is said
    "no folder": ({"rollouts_from": "runs/none-such"}, "has no rollouts/step_N.npz: name a run with --save_rollouts"),
    "group size": ({"group_size": 2, "ppo_minibatch": 2}, "was sampled with --group_size 4, and this run has 2"),
    "environment": ({"env_options": "subjects_file=other.txt"}, "--env_options '', and this run has subjects_file"),
    "reward": ({"length_reward": "cosine"}, "--length_reward '', and this run has cosine"),
    "truncated sampling": ({"top_k": 20}, "--top_k, --top_p and --min_p leave are not stored"),
    "tokenizer": ({"model_dir": "models/tiny", "prompt_length": 256}, "other texts for the tokenizer of this run"),
    "ahead": ({"ahead": 1}, "--ahead 1 samples rollouts, and --rollouts_from reads them"),
    "no weights": ({"objective": "reinforce"}, "--rollouts_from trains on rollouts of older weights"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_trained_on_is_refused_by_name(case, stored, tmp_path, capsys, monkeypatch):
    flags, said = REFUSED[case]
    (tmp_path / "other.txt").write_text("rain\nsnow\nwind\nfog\nhail\n")
    # The folder of relative paths.
    monkeypatch.chdir(tmp_path)
    assert train_here(tmp_path / "run", **FLAGS | {"rollouts_from": stored} | flags) == 2
    assert said in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "run" / "rollouts").exists()


def test_its_own_folder_and_files_that_do_not_fit_are_refused(stored, tmp_path, capsys):
    copy = tmp_path / "copy"
    shutil.copytree(stored / "rollouts", copy / "rollouts")
    assert train(copy / "run", rollouts_from=copy / "run") == 2
    shutil.copytree(stored / "rollouts", tmp_path / "own" / "rollouts")
    assert train(tmp_path / "own", rollouts_from=tmp_path / "own") == 2
    assert "is the --save_dir of this run" in capsys.readouterr().err
    lines = (copy / "rollouts" / "step_1.jsonl").read_text().splitlines()
    (copy / "rollouts" / "step_1.jsonl").write_text("\n".join(lines[:-1]) + "\n")
    assert train(tmp_path / "run", rollouts_from=copy) == 2
    assert "step_1.jsonl has 7 rows and step_1.npz 8: copy both again" in capsys.readouterr().err
