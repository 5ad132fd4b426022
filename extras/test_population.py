"""Populations: joined adapters against those of one member, members against runs alone, stops, failures, mistakes."""

import json
import signal
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from scipy import stats

from core import grpo
from core.config import Config
from core.rollout import RolloutWorker
from core.sampler import Sampler
from extras import population
from extras.members import SharedSampler, join_members, with_members
from models.checkpoint import load_policy
from models.names import LORA_B, make_policy
from models.pages import Paging
from tests.helpers import read_jsonl, slow, train_here
from tests.kill_runs import FLAGS, arguments
from tests.references import decode_one, fill_pages
from utils.devices.sharding import single_device
from utils.evaluation.estimates import mean_over_runs
from utils.settings.config import parse
from utils.settings.errors import UserError
from utils.settings.groups import LoraConfig

near = np.testing.assert_allclose


@pytest.mark.parametrize("name", ["models/tiny", *slow("tests/fixtures/lora-qwen3_5")])
def test_joined_adapters_equal_those_of_each_member(name: str):
    config, weights = LoraConfig(lora_rank=2, lora_merge="never"), []
    for seed in range(3):  # adapters that move logits
        model, base, adapters, _ = load_policy(name, config, seed, single_device(), "float32")
        rng = np.random.default_rng(seed)
        for array in [array for array in adapters if array.endswith(LORA_B)]:
            adapters[array] = np.float32(rng.normal(0, 0.01, adapters[array].shape))
        weights.append(Sampler(model, 8, (0,)).load_weights(make_policy(base, adapters)))
    rows = np.array([0, 2, 1, 2])
    rng = np.random.default_rng(0)
    prompts = [rng.integers(5, 100, length) for length in (9, 6, 8, 9)]

    def logits(weights, members):
        weights = with_members(weights, members)
        last = np.array([prompt[-1] for prompt in prompts])
        return decode_one(model, weights, *fill_pages(model, weights, prompts, 1), last)[0]

    found = logits(join_members(weights), rows)
    alone = [logits(own, None) for own in weights]
    near(found, [alone[member][row] for row, member in enumerate(rows)], rtol=1e-5, atol=1e-5)
    assert np.abs(alone[0] - alone[1]).max() > 1e-2, "adapters that do something"


ALL = (
    "--config configs/demo.py --max_steps 2 --groups_per_batch 4 --group_size 4 --num_generation_tokens 64 "
    "--num_eval_tasks 6 --num_eval_samples 2 --test_interval 0 --lora_rank 2 "
    "--max_resampling 2 --do_group_filter 0 --ppo_minibatch 0 --lr 0.01 --inference_batch_per_device 64"
).split()
OWN_TIMES = ("times/", "speed/", "memory/", "compile/", "rollout/")  # beginnings of metrics of time and work


def read_log(folder: Path) -> list[dict]:
    """The metrics of a run that do not depend on what else runs."""
    records = read_jsonl(folder / "metrics.jsonl")
    return [{key: x for key, x in record.items() if not key.startswith(OWN_TIMES)} for record in records]


def read_tokens(folder: Path, step: int) -> np.ndarray:
    with np.load(folder / "rollouts" / f"step_{step}.npz") as arrays:
        return arrays["tokens"]


def assert_equal_runs(found: Path, expected: Path, steps: range) -> None:
    for own, alone in zip(read_log(found), read_log(expected), strict=True):
        assert own.keys() == alone.keys()
        for name, value in alone.items():
            near(own[name], value, rtol=1e-5, atol=1e-5, err_msg=name)
    for step in steps:
        np.testing.assert_array_equal(read_tokens(found, step), read_tokens(expected, step))
    file = f"step{steps[-1]}/adapter_model.safetensors"
    for name, x in load_file(expected / file).items():
        near(load_file(found / file)[name], x, rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.slow
def test_members_equal_runs_alone_also_when_they_are_resumed(tmp_path, capsys):
    """With an epsilon: AdamW divides a gradient near 0 by itself, which would make whole steps of another rounding."""
    arguments = [*ALL, "--save_rollouts=all", "--adam_eps=1e-5", "--lr_schedule=constant"]
    preset = tmp_path / "filtering.json"
    preset.write_text(json.dumps({"do_group_filter": 1, "objective": "cispo", "clip_epsilon": 1.0}))
    members = f"seed=0,1;config=configs/drgrpo.py,{preset}"
    together = [*arguments, "--population", members, "--save_dir", str(tmp_path / "all")]
    population.main([*together, "--max_steps=1"])
    population.main(together)
    output = capsys.readouterr().out
    for seed, config in ((0, "configs/drgrpo.py"), (1, str(preset))):
        name = f"seed={seed}_config={Path(config).stem}"
        assert f"[{name}] step 2/" in output
        own = [f"--config={config}", f"--seed={seed}", f"--save_dir={tmp_path / name}", "--lora_merge=never"]
        grpo.main(parse(Config, [*arguments, *own, "--max_steps=1"]))  # which evaluates, too
        grpo.main(parse(Config, [*arguments, *own]))
        assert_equal_runs(tmp_path / "all" / name, tmp_path / name, range(1, 3))
    assert "config=drgrpo: mean over 2 seeds" in output
    assert (tmp_path / "all" / "population.html").is_file()


def test_members_of_one_step_equal_runs_alone(tmp_path):
    """The quick case of the test above."""
    flags = FLAGS | {"max_steps": 1, "test_env_name": "", "lora_rank": 2, "lora_merge": "never"}
    flags |= {"save_rollouts": "all", "ppo_minibatch": 8, "num_generation_tokens": 8}
    population.main(arguments(**flags, population="seed=0,1", save_dir=tmp_path / "all"))
    assert train_here(tmp_path / "alone", **flags, seed=1) == 0
    assert_equal_runs(tmp_path / "all" / "seed=1", tmp_path / "alone", range(1, 2))
    assert not np.array_equal(read_tokens(tmp_path / "all" / "seed=0", 1), read_tokens(tmp_path / "alone", 1))
    adapters = json.loads((tmp_path / "alone" / "step1" / "adapter_config.json").read_text())
    assert Path(adapters["base_model_name_or_path"]).is_absolute(), "PEFT finds it from any folder"


def test_members_have_the_fewest_slots_that_fit_one_of_them(tmp_path, monkeypatch):
    """What fits of one member may not of another; samplers with other slots would not sample together."""
    room = iter([300, 250, 200, 400])

    def with_room(worker: RolloutWorker, *_) -> RolloutWorker:
        paging = Paging(8, num_pages=(num_slots := next(room)) * 50, num_slots=num_slots)
        return replace(worker, sampler=replace(worker.sampler, paging=paging))

    # Memory leaves other numbers of slots to each.
    monkeypatch.setattr(RolloutWorker, "with_room", with_room)
    configs = {name: parse(Config, [*ALL, f"--save_dir={tmp_path / name}"]) for name in "ab"}
    members = population.make_members(configs, single_device(), SharedSampler([*"ab"]))
    found = [{role: worker.sampler.paging.num_slots for role, worker in member.workers.items()} for member in members]
    for member in members:
        for worker in member.workers.values():
            worker.scorer.close()
    assert found == 2 * [{"env": 200, "test_env": 250}]


MISTAKES = [
    ("", "", "--population names no members"),
    ("seed", "", "'seed' is not an option"),
    ("seed=0,0", "", "two members"),
    ("seed=0;save_dir=a,b", "", "members have folders in --save_dir"),
    ("sed=0,1", "", "there is no option --sed; did you mean --seed?"),
    ("lora_rank=2,4", "", "--lora_rank is 2 in lora_rank=2 and 4 in lora_rank=4"),
    ("seed=0,1", "--lora_rank 0", "give --lora_rank"),
    ("seed=0,1", "--lora_merge always", "one member only"),
    ("seed=0,1", "--teacher models/tiny --wandb_name x", "--teacher, options of wandb: a population has several runs"),
]


@pytest.mark.parametrize(("members", "options", "message"), MISTAKES)
def test_mistakes_are_named(members: str, options: str, message: str, capsys):
    with pytest.raises((UserError, SystemExit)) as error:
        population.main([*ALL, *options.split(), "--population", members])
    assert message in f"{error.value} {capsys.readouterr().err}"


@pytest.mark.slow
def test_a_failure_of_one_member_ends_all(tmp_path, monkeypatch, capfd):
    train = grpo.compute_advantages

    def fail(batch, config):
        if threading.current_thread().name == "seed=1":
            raise OSError("the disk is full")
        return train(batch, config)

    # A member fails in its step.
    monkeypatch.setattr(grpo, "compute_advantages", fail)
    with pytest.raises(SystemExit) as end:
        population.main([*ALL, "--max_steps=9", "--population=seed=0,1,2", f"--save_dir={tmp_path}"])
    assert end.value.code == 1
    output, errors = capfd.readouterr()
    assert "[seed=1] error: the disk is full; no step is saved" in errors
    for name in ("seed=0", "seed=2"):
        assert f"[{name}] stopped by the failure of seed=1; step 1 is saved" in output
    assert read_log(tmp_path / "seed=0")[-1]["global_step"] == 1


@pytest.mark.slow
def test_a_signal_stops_all_members(tmp_path, capfd, monkeypatch):
    log = population.MemberRun.end_step

    def end_step(run, progress, *arguments):
        if progress.step == 2 and run.folder.path.name == "seed=0":
            signal.raise_signal(signal.SIGTERM)
        return log(run, progress, *arguments)

    # The signal comes at the end of a known step.
    monkeypatch.setattr(population.MemberRun, "end_step", end_step)
    with pytest.raises(SystemExit) as end:
        population.main([*ALL, "--max_steps=9", "--population=seed=0,1", f"--save_dir={tmp_path}"])
    assert end.value.code == 128 + signal.SIGTERM
    output = capfd.readouterr().out
    for name in ("seed=0", "seed=1"):
        assert f"[{name}] stopped by SIGTERM; step " in output
        assert read_log(tmp_path / name)[-1]["global_step"] in (1, 2, 3)


@pytest.mark.parametrize("lasts", [[0.5, 0.6, 0.7], [0.1, 0.9], [0.1]])
def test_scores_before_and_after_stand_in_a_table(lasts):
    steps = np.array([0.0, 9])
    runs = {f"seed={i}": {"test_env/correct_answer": (steps, np.array([0.2, last]))} for i, last in enumerate(lasts)}
    table = population.format_runs(runs, {"all": list(runs)})
    assert table.splitlines()[0].split()[-4:] == ["correct_answer", "before", "correct_answer", "after"]
    assert ("2 seeds   0.200 (too few seeds)  0.500 (too few seeds)" in table) == (len(lasts) == 2), table
    assert population.format_runs({"seed=0": {}}, {"all": ["seed=0"]}) == ""


@pytest.mark.parametrize("number", [3, 12])
def test_means_over_runs_have_students_intervals(number: int):
    x = np.random.default_rng(number).uniform(size=number)
    low, high = stats.t.interval(0.95, number - 1, x.mean(), stats.sem(x))
    near(mean_over_runs("x", x)["x_ci"], (high - low) / 2, rtol=1e-3)
