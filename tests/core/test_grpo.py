"""core/grpo.py as a user starts it: runs, presets, mistakes."""

import itertools
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import load_file

from core import grpo
from core.config import Config
from core.extensions.notes import describe_objective
from envs import make_env, parse_options
from tests.helpers import ROOT, slow
from tests.kill_runs import arguments, reproducible
from utils.devices import startup
from utils.settings.config import parse
from utils.settings.errors import user_errors
from utils.settings.lmpo import LMPO

FLAGS = {
    "model_dir": ROOT / "tests" / "fixtures" / "qwen3-tied",
    "env_name": "poem",
    "groups_per_batch": 2,
    "group_size": 4,
    "ppo_minibatch": 4,
    "num_generation_tokens": 12,
    "tokens_per_microbatch": 192,
    "max_steps": 10,
    "save_interval": 4,
    "lr": 1e-3,
    "test_env_name": "poem-test",
    "test_interval": 4,
    "num_eval_tasks": 2,
    "num_eval_samples": 4,
    "do_group_filter": 0,
    "num_score_workers": 1,
}


def train(*argv: str) -> None:
    """The command, in this process."""
    with user_errors():
        grpo.main(parse(Config, argv, spellings=LMPO))


def lines(folder: Path) -> list[dict]:
    """metrics.jsonl, but for what the clock decides."""
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [reproducible(record) for record in records]


def test_steps_without_signal_change_nothing(tmp_path):
    flags = {"env_name": "countdown", "env_options": "prompt=bare,truncation_penalty=0", "weight_decay": 0.5}
    flags |= {"max_steps": 2, "do_group_filter": 1, "test_env_name": "", "save_dir": tmp_path}
    train(*arguments(**FLAGS | flags))
    assert [line["env/groups_without_signal"] for line in lines(tmp_path)] == [1.0, 1.0]
    assert not any("loss" in line for line in lines(tmp_path))
    before, after = (load_file(folder / "model.safetensors") for folder in (FLAGS["model_dir"], tmp_path / "step2"))
    assert before.keys() == after.keys()
    assert all((x == after[name]).all() for name, x in before.items())


RUNS = {
    "ppo": {"critic_lr": 1e-3},
    "reinforce++": {"kl_coef": 0.1, "seed": 3},
    "nanochat": {
        "env_options": "",
        "num_epochs": 0,
        "num_eval_tasks": 2,
        "groups_per_batch": 4,
        "group_size": 8,
        "num_generation_tokens": 24,
        "top_k": 75,
        "temperature": 3,
        "seed": 4,
    },
}


@pytest.mark.parametrize("name", slow("reinforce++", "ppo", "nanochat"))
def test_presets_train(name, tmp_path):
    """With a critic, with a reference, with another optimizer and truncated sampling; the model saved is the policy."""
    flags = FLAGS | {"max_steps": 3, "test_env_name": "", "save_dir": tmp_path} | RUNS[name]
    train("--config", f"configs/{name}.py", *arguments(**flags))
    records = lines(tmp_path)
    assert len(records) == 3
    assert all(np.isfinite(r["loss"]) and r["grad_norm"] > 0 for r in records)
    assert ("value/explained_variance" in records[0]) == (name == "ppo")
    assert ("kl" in records[0]) == ("+" in name)
    before, after = (load_file(folder / "model.safetensors") for folder in (FLAGS["model_dir"], tmp_path / "step3"))
    assert before.keys() == after.keys()
    assert any((x != after[tensor]).any() for tensor, x in before.items())
    more = flags | {"max_steps": 4, "resume": "force"}  # forced, since some learning rates end with the steps
    train("--config", f"configs/{name}.py", *arguments(**more))  # goes on where that ended
    assert [record["global_step"] for record in lines(tmp_path)] == [1, 2, 3, 4]


def test_epoch_has_each_problem_once_and_best_model_is_kept(tmp_path, monkeypatch):
    scores = iter([0.0, -0.4, -0.1, -0.2, 0.0])  # of the untrained model, and after each step
    evaluate_held_out = grpo.evaluate_held_out

    def scripted(*arguments):
        metrics, episodes = evaluate_held_out(*arguments)
        return metrics | {"test_env/return": next(scores)}, episodes

    # The scores are chosen, so that the best model is known.
    monkeypatch.setattr(grpo, "evaluate_held_out", scripted)
    subjects = tmp_path / "subjects.txt"
    subjects.write_text("\n".join("abcdefghijklmno"))
    options = {"env_options": f"subjects_file={subjects}", "num_epochs": 1, "groups_per_batch": 4, "save_best": 1}
    options |= {"lr_schedule": "linear", "max_steps": 10000, "test_interval": 1, "test_env_name": "poem-test"}
    train(*arguments(**FLAGS | options | {"save_dir": tmp_path / "run", "save_rollouts": "all"}))
    files = sorted((tmp_path / "run" / "rollouts").glob("step_*.jsonl"))
    steps = [[json.loads(line) for line in file.open()] for file in files]
    rollouts = [row for rows in steps for row in rows]
    num_tasks = len({row["task"] for row in rollouts})
    records = [record for record in lines(tmp_path / "run") if record["global_step"]]
    assert len(records) == -(-num_tasks // 4)
    assert {row["task"] for row in rollouts} == {*range(num_tasks)}
    shares = [1 - 4 * i / num_tasks for i in range(len(records))]
    assert [record["lr"] / FLAGS["lr"] for record in records] == pytest.approx(shares), "by problems"
    for file, rows in zip(files, steps, strict=True):
        check_arrays(np.load(file.with_suffix(".npz"), allow_pickle=False), rows)
    folders = FLAGS["model_dir"], tmp_path / "run" / "best"
    untrained, best = (load_file(folder / "model.safetensors") for folder in folders)
    assert all((x == best[name]).all() for name, x in untrained.items()), "a score of 0, before the first step"


def check_arrays(arrays: Mapping[str, np.ndarray], rows: list[dict]) -> None:
    """rollouts/step_N.npz holds what step_N.jsonl says, and the tokens."""
    tokens, starts, ends = (arrays[name] for name in ("tokens", "prompt_lengths", "lengths"))
    is_completion = (np.arange(tokens.shape[1]) >= starts[:, None]) & (np.arange(tokens.shape[1]) < ends[:, None])
    same = {"tasks": "task", "groups": "group", "finished": "finished", "returns": "return"}
    for array, field in same.items():
        np.testing.assert_array_equal(arrays[array], np.array([row[field] for row in rows]).astype(arrays[array].dtype))
    assert (ends - starts).tolist() == [row["length"] for row in rows]
    assert (arrays["mask"] == is_completion).all()
    assert not arrays["failed"].any()
    assert (arrays["logprobs"][is_completion] < 0).all()
    assert not arrays["logprobs"][~is_completion].any()
    parts = {"scores/" + field for field in rows[0]} & arrays.keys()
    assert "scores/characters" in parts
    assert tokens.dtype == np.int32
    assert len(tokens) == len(rows)
    _, first = np.unique(arrays["groups"], return_index=True)
    assert all((tokens[i, : starts[i]] == tokens[j, : starts[j]]).all() for i in first for j in (i, i + 1))
    for i, row in enumerate(rows):
        if "logprobs" in row:
            np.testing.assert_allclose(arrays["logprobs"][i, starts[i] : ends[i]], row["logprobs"], atol=6e-5)


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.py")), ids=lambda path: path.stem)
def test_presets_are_valid_and_say_what_they_maximize(path, monkeypatch):
    # Presets for one chip ask which it is.
    monkeypatch.setattr(startup, "find_devices", lambda: [SimpleNamespace(device_kind="NVIDIA L4")])
    config = parse(Config, ["--config", str(path)])
    assert describe_objective(config.objective).startswith("minimize ")


THEIRS = {  # policy-gradients' configs/grpo.yaml and ppo.yaml; Adam is torch's: betas 0.9, 0.999, no decay
    "grpo": {"prompts_per_step": 4, "num_rollouts": 8, "size": 3000, "updates": 4},
    "ppo": {"prompts_per_step": 16, "num_rollouts": 1, "size": 15000, "gamma": 0.99, "lam": 0.95, "updates": 2},
}


@pytest.mark.parametrize("loss", THEIRS)
def test_the_presets_of_policy_gradients_are_its_files(loss):
    """train_batch_size 2 x batch_acc 4 are the eight completions of an update; one pass over `size` problems."""
    theirs = THEIRS[loss]
    files = ["configs/policy_gradients.py", *["configs/policy_gradients_ppo.py"] * (loss == "ppo")]
    config = parse(Config, [word for file in files for word in ("--config", file)])
    update, optimizer, objective = config.update, config.optimizer, config.objective
    assert (update.groups_per_batch, update.group_size) == (theirs["prompts_per_step"], theirs["num_rollouts"])
    assert (config.minibatch_size, config.updates_per_step, config.num_epochs) == (2 * 4, theirs["updates"], 1)
    assert (optimizer.b1, optimizer.b2, optimizer.adam_eps, optimizer.weight_decay) == (0.9, 0.999, 1e-8, 0)
    assert optimizer.lr == 5e-6
    assert not objective.do_group_filter
    assert not objective.kl.kl_coef
    if loss == "ppo":
        critic = objective.critic
        assert (critic.gamma, critic.gae_lambda, optimizer.critic_lr) == (theirs["gamma"], theirs["lam"], 5e-6)
    pytest.importorskip("reasoning_gym")
    env = make_env(config.env.env_name, **parse_options(config.env.env_options))
    assert env.num_tasks == theirs["size"]
    words = [env.problem(index).answer["metadata"]["word"] for index in range(50)]
    assert {3, 10} <= {*map(len, words)} <= {*range(3, 11)}


def test_a_preset_has_its_own_row_of_the_table_behind_any_other():
    """Advantage, loss, aggregation and clip range are its own, whatever a preset before it has set."""

    def row(*paths: Path) -> tuple:
        objective = parse(Config, [word for path in paths for word in ("--config", str(path))]).objective
        policy = objective.policy
        clip = objective.loss.clip_range if policy.objective in CLIPS else ()
        return objective.advantage, policy.objective, policy.loss_normalization, clip

    CLIPS = ("ppo", "ppo_all_clip", "cispo", "gspo", "dppo")
    methods = [path for path in (ROOT / "configs").glob("*.py") if '"objective"' in path.read_text()]
    assert len(methods) >= 16
    for before, path in itertools.permutations(methods, 2):
        assert row(before, path) == row(path), f"{path.stem} behind {before.stem}"


MISTAKES = [
    ({"temperature": 0}, "give one above 0 for training"),
    ({"advantage": "best_k", "best_k": 5}, "--best_k 5 is more than --group_size 4"),
    ({"kl_coef": -0.1}, "--kl_coef -0.1 must not be negative"),
    ({"do_group_normalization": 0, "advantage": "group_mean"}, "contradicts --advantage group_mean"),
    ({"model_dir": "/nowhere/model"}, "there is no folder /nowhere/model"),
    ({"num_generation_tokens": -5}, "--num_generation_tokens must be at least 1"),
    ({"force_answer_at": 12}, "--force_answer_at 12 must be below the 12 tokens"),
    ({"mesh": "fsdp=3"}, "--mesh fsdp=3 makes"),
    ({"seed": -1}, "--seed must not be negative"),
    ({"save_best": 1, "test_env_name": ""}, "--save_best needs held-out scores"),
]


@pytest.mark.parametrize(("flags", "words"), MISTAKES, ids=lambda x: " ".join(x) if isinstance(x, dict) else "")
def test_a_mistake_ends_with_one_sentence(flags, words, tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        train(*arguments(**FLAGS | {"save_dir": tmp_path} | flags))
    error = capsys.readouterr().err
    assert end.value.code == 2
    assert error.startswith("error: ")
    assert words in error
    assert error.count("\n") == 1


def test_the_command_from_another_folder(tmp_path):
    command = [sys.executable, ROOT / "core" / "grpo.py", "--env_name", "nowhere"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "there is no environment 'nowhere'" in done.stderr
    assert not list(tmp_path.iterdir())


def test_lmpos_switches_come_before_the_checks():
    argv = arguments(do_group_normalization=0, group_size=1, groups_per_batch=64)
    config = parse(Config, argv, spellings=LMPO)
    assert (config.objective.advantage, config.batch_size) == ("reinforce", 64)
