"""Rollouts a step ahead: by which weights they are drawn, on which devices, and that nothing of it is lost or left."""

import os
import signal
import threading
import time
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest

from core import grpo
from core.config import Config
from core.extensions import ahead
from core.rollout import RolloutWorker
from extras.replay import read_stored, replay
from models.checkpoint import load_model
from tests.helpers import slow, train_here
from tests.kill_runs import FLAGS, arguments, checksum, records
from tests.processes import on_four_devices, start_processes, wait
from utils.devices.sharding import single_device
from utils.settings.config import parse
from utils.settings.errors import UserError

STEPS = 5
FLAGS = FLAGS | {"ahead": 1, "max_steps": STEPS, "test_env_name": "", "lr": 1e-2}
TURNS = {
    "env_name": "guess",
    "env_options": "prompt=bare,min_size=4,max_size=6,max_number=20",
    "model_dir": "models/player",
    "num_generation_tokens": 110,
}
CASES = {"replies": {}, "adapters": {"lora_rank": 2}, "turns": TURNS}
train = partial(train_here, **FLAGS)


@pytest.fixture(scope="module")
def wholes(tmp_path_factory):
    """Runs that nothing happened to, by case."""
    folders = {}

    def whole(case: str) -> Path:
        if case not in folders:
            folders[case] = tmp_path_factory.mktemp(case) / "run"
            assert train(folders[case], **CASES[case], save_rollouts="all", save_interval=1) == 0
        return folders[case]

    return whole


def assert_same(folder: Path, whole: Path) -> None:
    """Equal metrics, but for times; equal bits of parameters, optimizer and weights of the next rollouts."""
    assert records(folder) == records(whole)
    assert checksum(folder, STEPS) == checksum(whole, STEPS)


def drawing_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("rollouts")]


@pytest.mark.parametrize("case", ["replies", *slow("adapters", "turns")])
def test_rollouts_are_drawn_by_the_model_before_the_last_updates(case, wholes, capsys):
    """By the saved models and the sampler alone: that of step 3 is drawn by the model of step 1, not of step 2."""
    folder = wholes(case)
    stale = [record["rollout/staleness"] for record in records(folder)]
    assert stale == [0, 1, 1, 1, 1]
    for step, model in {1: 0, 2: 0, 3: 1, 5: 3}.items():
        np.testing.assert_array_equal(draw_again(folder, step, model), drawn_tokens(folder, step))
    assert not np.array_equal(draw_again(folder, 5, 4), drawn_tokens(folder, 5))
    replay(str(folder / "rollouts" / "step_3"), 5, single_device())
    assert "tokens are those of the run" in capsys.readouterr().out


def drawn_tokens(folder: Path, step: int) -> np.ndarray:
    return np.load(folder / "rollouts" / f"step_{step}.npz")["tokens"]


def draw_again(folder: Path, step: int, model_step: int) -> np.ndarray:
    """Returns what the model of another step draws in the place of a step's rollouts."""
    rollouts = folder / "rollouts" / f"step_{step}"
    _, config = read_stored(str(rollouts), 0)
    path = folder / f"step{model_step}" if model_step else config.model_dir
    model, params, tokenizer = load_model(path, single_device())
    settings = grpo.resolve_environments(config.env, config.held_out, config.sampling)["env"]
    key = jax.random.fold_in(jax.random.key(config.seed), step)
    rows = np.load(rollouts.with_suffix(".npz"))
    size = config.update.group_size
    with grpo.make_workers(config, {"env": settings}, model, tokenizer, single_device(), "")["env"] as worker:
        tasks = rows["tasks"][::size]  # numbers in the environment: some prompts are too long for the model
        tasks = tasks if worker.fitting_ids is None else np.searchsorted(worker.fitting_ids, tasks)
        played = worker.play(worker.load_weights(params), tasks, size, key, rows["positions"][::size])
        return played.completions.tokens


@pytest.mark.parametrize("case", ["replies", *slow("adapters", "turns")])
def test_a_run_that_ended_early_goes_on_as_one_that_never_did(case, wholes, tmp_path):
    for steps in (2, 3, STEPS):
        found = train(tmp_path / "run", **CASES[case], max_steps=steps, save_rollouts="all", save_interval=1)
        assert found == 0
    assert_same(tmp_path / "run", wholes(case))


@pytest.mark.parametrize("case", ["replies", *slow("turns")])
@pytest.mark.parametrize("place", ["while they are drawn ahead", "between two copies", *slow("in the rollouts")])
def test_a_signal_ends_the_run_and_its_thread_and_loses_no_step(case, place, wholes, tmp_path, monkeypatch, capsys):
    """The first rollouts are waited for; those of step 4 are drawn while step 3 updates, which ends before the run."""
    number, reached = {"in the rollouts": (1, 0)}.get(place, (4, 3))
    holder, name = (ahead, "with_behavior") if place == "between two copies" else (RolloutWorker, "play")
    real, calls = getattr(holder, name), []

    def signalled(*args):
        calls.append(args)
        if len(calls) == number:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)
        return real(*args)

    # The signal comes while the thread samples, or when the state has lost the weights of the step before.
    monkeypatch.setattr(holder, name, signalled)
    flags = CASES[case] | {"save_rollouts": "all", "save_interval": 1}
    assert train(tmp_path / "run", **flags) == 128 + signal.SIGINT
    assert not drawing_threads()
    assert len(records(tmp_path / "run")) == reached if reached else True
    saved = f"step {reached} is saved" if reached else "no step is saved"
    assert f"stopped by SIGINT; {saved}" in capsys.readouterr().out
    assert train(tmp_path / "run", **flags) == 0
    assert_same(tmp_path / "run", wholes(case))


@pytest.mark.parametrize("error", [UserError("the well is dry: fill it"), *slow(OSError("the well is dry: fill it"))])
def test_what_goes_wrong_in_the_thread_is_said_in_a_sentence(error, wholes, tmp_path, monkeypatch, capsys):
    """In the rollouts of step 4, which step 3 draws: three steps are saved, and the run resumes from there."""
    play, calls = RolloutWorker.play, []

    def failing(*args):
        calls.append(args)
        if len(calls) == 4:
            raise error
        return play(*args)

    with monkeypatch.context() as patch:
        # Errors are raised in the thread that samples.
        patch.setattr(RolloutWorker, "play", failing)
        assert train(tmp_path / "run") in (1, 2)
    said = capsys.readouterr().err
    assert said.startswith("error: the well is dry: fill it")
    assert said.count("\n") == 1
    assert not drawing_threads()
    assert train(tmp_path / "run") == 0
    assert_same(tmp_path / "run", wholes("replies"))


def test_no_rollouts_are_drawn_behind_the_end(tmp_path, monkeypatch):
    play, calls = RolloutWorker.play, []
    # Counts the calls.
    monkeypatch.setattr(RolloutWorker, "play", lambda *args: calls.append(args) or play(*args))
    assert train(tmp_path / "run", max_steps=2) == 0
    assert len(calls) == 2


# Devices


APART = {
    "replies": {"importance_correction": "truncate"},
    "adapters": {"lora_rank": 2, "max_resampling": 2, "do_group_filter": 1},
}


def train_both(folder: Path, **flags) -> None:
    """Trains in each case with a held-out evaluation while the rollouts of the last step are drawn."""
    for name, options in APART.items():
        found = train(folder / name, max_steps=3, test_env_name="poem-test", test_interval=2, **options, **flags)
        assert found == 0


@pytest.mark.slow
def test_devices_of_their_own_draw_the_same(tmp_path):
    """As one device that draws and trains; small programs are compiled for the one and the other."""
    alone = tmp_path / "alone"
    apart = tmp_path / "apart"
    train_both(alone)
    call = f"train_both(Path({str(apart)!r}), mesh='fsdp=1')"
    wait(start_processes(f"from tests.core.extensions.test_ahead import *; {call}", 2))
    for name in APART:
        assert records(apart / name) == records(alone / name)


def on_two_meshes(folder: Path) -> None:
    """Trains on fsdp=2 while data=2 draws, and goes on where the first command ended."""
    flags = {"mesh": "fsdp=2", "save_rollouts": "all", "save_interval": 1}
    for steps in (2, 4):
        assert train(folder, **flags, max_steps=steps) == 0


@pytest.mark.slow
def test_two_meshes_draw_as_one_device(tmp_path):
    folder = tmp_path / "run"
    on_four_devices(__file__, f"on_two_meshes(Path({str(folder)!r}))")
    for step, model in {2: 0, 3: 1, 4: 2}.items():
        np.testing.assert_array_equal(draw_again(folder, step, model), drawn_tokens(folder, step))


def refused_on_four_devices() -> None:
    for flags, words in (
        ({}, "--ahead 1 on 4 devices needs a --mesh of 1 to 3"),
        ({"mesh": "fsdp=4"}, "needs a --mesh of 1 to 3"),
        ({"mesh": "fsdp=1,tp=3"}, "leaves 1 device to sample, no multiple of the tp=3 of --mesh"),
    ):
        config = parse(Config, arguments(**FLAGS | flags))
        with pytest.raises(UserError, match=words):
            grpo.make_layouts(config.devices, is_ahead=True)


@pytest.mark.slow
def test_devices_that_do_not_fit_are_refused():
    on_four_devices(__file__, "refused_on_four_devices()")


# Settings


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"ahead": 2}, "--ahead 2 is not supported"),
        ({"do_mask_inference_ratio": 1}, "--do_mask_inference_ratio has no effect"),
        ({"objective": "reinforce"}, "--objective reinforce does not account for"),
    ],
)
def test_wrong_settings_are_refused(flags, message, capsys):
    with pytest.raises(SystemExit):
        parse(Config, arguments(**FLAGS | flags))
    assert message in capsys.readouterr().err
