"""No run is lost: kills, signals, damaged states, full disks, closed pipes, changed settings."""

import copy
import gc
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from core import grpo
from core.config import Config
from core.records import Progress
from core.run import fingerprints
from core.run import folder as run_folder
from core.run import run as runs
from core.run.run import Run
from envs import make_env
from envs.base import ForcedAnswer
from envs.settings import RolloutSettings, resolve_environments
from models.checkpoint import load_model, model_steps, resolve_model_dir
from models.state import TrainState
from models.tokenizer import load_tokenizer
from tests.helpers import MODEL, ROOT, gradient_depth, read_jsonl, rounding, slow, train_here, write_jsonl
from tests.kill_runs import FLAGS, arguments, checksum, difference, finish, kill_at, records, start, virtual_devices
from utils.devices.compile_log import Compilations
from utils.devices.memory import HOST, fingerprint, mix_bits
from utils.devices.sharding import single_device
from utils.metrics.logger import LossyWriter
from utils.runs import lock
from utils.runs.lock import FolderLock
from utils.runs.origin import describe_segment, last_break
from utils.settings.config import make_config
from utils.settings.errors import UserError

STEPS = 6
FLAGS = FLAGS | {"max_steps": STEPS}
train = partial(train_here, **FLAGS)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A run that nothing happened to."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert train(folder) == 0
    assert [r["global_step"] for r in records(folder)] == [*range(STEPS + 1)]
    return folder


def assert_same(folder: Path, whole: Path) -> None:
    """Equal metrics, but for times; equal bits of parameters and optimizer; one model card."""
    assert records(folder) == records(whole)
    card = (folder / f"step{STEPS}" / "README.md").read_text()
    assert card == (whole / f"step{STEPS}" / "README.md").read_text()
    before, after = (record for record in records(whole) if record["global_step"] in (0, STEPS))
    for record in (before, after):
        score, half_width = record["test_env/return"], record["test_env/return_ci"]
        interval = f"[{score - half_width:.3g}, {score + half_width:.3g}]"
        assert f"| {score:.3g} {interval} (step {record['global_step']}) |" in card
    assert checksum(folder, STEPS) == checksum(whole, STEPS)
    assert difference(folder, whole, STEPS) == 0


@pytest.mark.slow
@pytest.mark.parametrize("moments", [("state",), ("model", "state")], ids=len)
def test_a_killed_run_goes_on_as_if_nothing_had_been(moments, whole, tmp_path):
    """Also where nobody reads what it prints."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text('{"global_step": 0}\n{"global_step": 1}\n')  # killed before it saved anything
    read_end, closed = os.pipe()
    os.close(read_end)
    for moment in moments:
        process = start(arguments(**FLAGS, save_dir=folder), stdout=closed, stderr=closed)
        assert kill_at(process, folder, moment, 1, 0) != "finished"
    process = start(arguments(**FLAGS, save_dir=folder))
    kill_at(process, folder, "step", 1, 0, signal.SIGTERM)
    said = process.stdout.read()
    assert process.returncode == 128 + signal.SIGTERM
    assert "is saved: the same command resumes from there" in said, said
    assert train(folder) == 0
    assert_same(folder, whole)
    assert not [*folder.glob(".step*"), *folder.glob("state/*tmp*")], "nothing half-written stays"


@pytest.mark.slow
def test_moments_in_host_memory_change_nothing(whole, tmp_path, monkeypatch):
    """Neither in a run nor where another goes on from its state."""
    folder = tmp_path / "run"
    kinds = set()
    end_step = Run.end_step

    def spy(run, progress, state, *rest):
        kinds.update(x.sharding.memory_kind for x in jax.tree.leaves(state.opt_state))
        return end_step(run, progress, state, *rest)

    # Looks at the state's memory in each step.
    monkeypatch.setattr(Run, "end_step", spy)
    assert train(folder, offload="optimizer") == 0
    assert kinds == {HOST}
    assert_same(folder, whole)
    shutil.rmtree(folder / "state" / str(STEPS))
    assert train(folder, offload="optimizer") == 0
    assert_same(folder, whole)


@pytest.mark.slow
def test_a_run_goes_on_on_other_devices(whole, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    shutil.rmtree(folder / "state" / str(STEPS))
    shutil.rmtree(folder / f"step{STEPS}")
    finish(arguments(**FLAGS, save_dir=folder, mesh="fsdp=4"), virtual_devices(4))
    operations = gradient_depth(load_model(FLAGS["model_dir"])[0], 64, num_tokens=8 * FLAGS["num_generation_tokens"])
    assert 0 < difference(folder, whole, STEPS) < rounding(operations, size=10)  # nats of an unlikely token


IN_ROLLOUTS, IN_UPDATE = "collect", "rollout_metrics"


@pytest.mark.parametrize(
    ("place", "number"),
    [(IN_ROLLOUTS, signal.SIGINT), (IN_UPDATE, signal.SIGXCPU), (IN_ROLLOUTS, signal.SIGUSR1)],
)
def test_a_signal_ends_the_run_and_loses_no_step(place, number, whole, tmp_path, monkeypatch, capsys):
    calls, real = [], getattr(grpo, place)

    def signalled(*args):
        calls.append(args)
        if len(calls) == 4:
            os.kill(os.getpid(), number)
            time.sleep(0.01)
        return real(*args)

    # The signal comes at a known place of a step.
    monkeypatch.setattr(grpo, place, signalled)
    assert train(tmp_path / "run") == 128 + number
    reached = 3 if place == IN_ROLLOUTS else 4
    assert len(records(tmp_path / "run")) == 1 + reached, "step 4 is abandoned or finished"
    model = tmp_path / "run" / f"step{reached}"
    printed = capsys.readouterr().out
    assert f"stopped by {number.name}; step {reached} is saved" in printed
    assert f"\nmodel: {model}\n" in printed
    assert resolve_model_dir(str(tmp_path / "run")) == str(model)
    assert load_model(model)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert train(tmp_path / "run") == 0
    assert_same(tmp_path / "run", whole)


REPEATED = {  # signals with the seconds before each; what is printed; True if the last one ends the process
    "twice": (
        "SIGTERM 0.3 SIGTERM 0.1 SIGTERM 1.0",
        "SIGTERM: the run will be saved and end; once more ends it at once\n",
        True,
    ),
    "warnings and a first one": (
        "SIGXCPU 0.3 SIGXCPU 1.1 SIGUSR2 0.1 SIGTERM 0.1",
        "SIGXCPU: the run will be saved and end\n",
        False,
    ),
}


@pytest.mark.parametrize("case", REPEATED)
def test_second_signal_ends_the_run_at_once_and_a_warning_never(case):
    signals, said, is_ended = REPEATED[case]
    code = (
        "import hashlib, os, signal, sys, threading, time; from utils.runs.shutdown import Signals\n"
        "def ask():\n"
        "  words = sys.argv[1].split()\n"
        "  for name, seconds in zip(words[::2], words[1::2]):\n"
        "    time.sleep(float(seconds)); os.kill(os.getpid(), signal.Signals[name])\n"
        "  time.sleep(0.3); os._exit(0)\n"
        "with Signals():\n  threading.Thread(target=ask).start(); hashlib.pbkdf2_hmac('sha256', b'', b'', 10**9)"
    )
    clock = time.monotonic()
    command = [sys.executable, "-c", code, signals]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == (128 + signal.SIGTERM if is_ended else 0)
    assert 1.4 < time.monotonic() - clock < 10
    assert done.stdout == said


def test_a_finished_run_stays_as_it_is_until_it_is_made_longer(whole, tmp_path, capsys):
    shutil.copytree(whole, tmp_path / "run")
    assert train(tmp_path / "run") == 0
    assert_same(tmp_path / "run", whole)
    assert f"model: {tmp_path}/run/step{STEPS}" in capsys.readouterr().out
    assert train(tmp_path / "run", max_steps=STEPS + 1, save_interval=1) == 0
    found = {path.name for path in (tmp_path / "run" / "state").iterdir()}
    assert found == {str(STEPS), str(STEPS + 1)}


def test_last_models_are_kept_and_a_lost_one_is_rewritten(whole, tmp_path, capsys):
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    content = (folder / f"step{STEPS}/model.safetensors").read_bytes()
    shutil.rmtree(folder / f"step{STEPS}")
    assert train(folder, keep=2) == 0
    printed = capsys.readouterr().out
    assert f"model: {folder}/step{STEPS}\n" in printed
    assert "report.html is there after" not in printed
    assert (folder / f"step{STEPS}/model.safetensors").read_bytes() == content
    assert model_steps(folder) == [STEPS - 2, STEPS]
    assert train(folder, max_steps=STEPS + 1, keep=1, save_best=True) == 0
    assert model_steps(folder) == [STEPS + 1], "best/ is none of them"


def test_a_disk_without_room_for_one_save_is_named_before_the_run(tmp_path, monkeypatch, capsys):
    # The disk has so little room.
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=10_000))
    assert train(tmp_path / "run") == 2
    assert "each save writes a model" in capsys.readouterr().err


# Damage


def small_run(folder: Path, data: RolloutSettings | None = None, **options) -> Run:
    """Returns a run that has not started, of the default environment or of `data`."""
    config = make_config(Config, save_dir=str(folder), **options)
    environments = {"env": data} if data else resolve_environments(config.env, config.held_out, config.sampling)
    run = Run(config, single_device(), environments)
    run.states.check_disk = run.states.save_step = lambda *_: None  # its states have no model in them
    return run


def started(run: Run) -> Run:
    return run.start(MODEL, load_tokenizer(FLAGS["model_dir"]), [])


def save(run: Run, step: int) -> None:
    run.states.newest = states(step), Progress(step, cursor=7 * step)
    run.save_newest()


def test_state_across_steps_is_saved_and_resumed_to_the_bit(tmp_path, monkeypatch):
    """Progress.memory as it was at the end of the step, and arrays of TrainState.extra."""
    monkeypatch.setattr("core.run.log.forget_programs", lambda: True)
    rng = np.random.default_rng(0)
    extra = {"ema": {"w": jnp.float32(rng.normal(size=(5, 3)))}, "buffer": jnp.int32(rng.integers(9, size=7))}
    state = TrainState({"w": jnp.ones(3)}, (), jnp.int32(1), jnp.int32(0), extra)
    memory = {"baseline": {"7": rng.normal()}, "seen": [1, 2]}
    with started(small_run(tmp_path / "run")) as run:
        run.log.logger = None  # as in all processes but the main one
        end_step(run, 1, state, copy.deepcopy(memory))
    restored, progress = small_run(tmp_path / "run").restore(jax.tree.map(jnp.zeros_like, state))
    assert progress == Progress(1, memory=memory)
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    assert all((x == y).all() for x, y in zip(*map(jax.tree.leaves, (restored, state)), strict=True))
    with pytest.raises(AssertionError, match=r"Progress\.memory"), started(small_run(tmp_path / "other")) as run:
        end_step(run, 1, state, {7: 0.5})


def end_step(run: Run, step: int, state: TrainState | None = None, memory: dict | None = None) -> None:
    """Ends a step, which is no step to save."""
    progress = Progress(step, memory=memory or {})
    run.end_step(progress, state or states(step), {}, lambda *_: {}, is_last=False)
    progress.memory.clear()  # as the next step may, before this one is saved


def states(step: int) -> dict:
    rng = np.random.default_rng(step)
    a = rng.normal(size=(64, 8))
    b = rng.normal(size=100)
    return {"a": jnp.float32(a), "b": jnp.bfloat16(b), "step": jnp.int32(step)}


@pytest.mark.parametrize("damage", ["flipped", *slow("deleted", "truncated")])
def test_of_damaged_states_the_one_before_is_used(damage, tmp_path, capsys):
    with started(small_run(tmp_path / "run")) as run:
        for step in (1, 2):
            save(run, step)
    rng = np.random.default_rng(0)
    newest = tmp_path / "run" / "state" / "2"
    told = 0
    files = sorted(path.relative_to(newest) for path in newest.rglob("*") if path.is_file())
    assert len(files) > 8
    for i, file in enumerate(files):
        shutil.copytree(tmp_path / "run", tmp_path / str(i))
        path = tmp_path / str(i) / "state" / "2" / file
        content = bytearray(path.read_bytes())
        place = rng.integers(len(content)) if content else 0
        if damage == "flipped" and content:
            content[place] ^= 1 << rng.integers(8)
        path.write_bytes(content[:place] if damage == "truncated" else content)
        if damage == "deleted":
            path.unlink()
        run = small_run(tmp_path / str(i))
        state, progress = run.restore(states(0))
        with started(run):
            step = progress.step
        assert progress == Progress(step, cursor=7 * step)
        assert all((x == y).all() for x, y in zip(*map(jax.tree.leaves, (state, states(step))), strict=True))
        said = "the training state of step 2 is damaged and set aside" in capsys.readouterr().out
        assert said == (step == 1) == (tmp_path / str(i) / "state" / "2.damaged").exists()
        told += said
    assert told >= 4, "arrays, their index, the manifest, the progress; nobody reads the rest"


def test_a_run_of_which_nothing_can_be_read_is_left_alone(tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr(sys, "unraisablehook", told.append)
    with started(small_run(tmp_path)) as run:
        save(run, 1)
    before = sorted(tmp_path.rglob("*"))
    run = small_run(tmp_path)
    with pytest.raises(UserError, match="none of the training states in .* can be read"):
        run.restore(states(0) | {"more": jnp.zeros(3)})
    run.folder.release()
    assert sorted(tmp_path.rglob("*")) == before
    sys.unraisablehook(SimpleNamespace(exc_value=Exception("Encountered error while reading array index: ().")))
    assert told == [], "the other reads, which Orbax leaves when one fails, say no more than it did"


def test_a_fingerprint_sees_all_changes_and_the_host_computes_that_of_devices():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(33, 7)).astype(np.float32)
    variants = [x, x[::-1]]
    for flips in ([(3, 2)], [(0, 0), (32, 6)], [(5, 1), (5, 2)]):
        variants.append(x.copy())
        for place in flips:
            variants[-1][place] *= -1
    assert len({tuple(map(int, fingerprint([jnp.asarray(y)]))) for y in variants}) == 5
    state = [rng.random((3, 50, 700), np.float32), np.int8(rng.integers(-9, 9, 70_000)), jnp.ones((5, 3), jnp.bfloat16)]
    with Compilations() as compilations:
        found = fingerprint(jax.device_put([*state, np.int32(3)]))
        assert not compilations.programs
    np.testing.assert_array_equal(found, mix_bits([*state, np.int32(3)]))


# Settings


def test_run_resumes_if_changed_settings_leave_it_the_same(tmp_path, capsys):
    options = {"lr": 1e-3}
    with started(small_run(tmp_path, **options)) as run:
        save(run, 1)
    for change in ({"lr": 2e-3}, {"seed": 1, "group_size": 4}, {"max_steps": 9, "lr_schedule": "linear"}):
        with pytest.raises(UserError, match=" .* ".join(f"--{name} is .* now and was" for name in change)):
            small_run(tmp_path, **options | change)
    with pytest.raises(UserError, match="--resume never"):
        small_run(tmp_path, **options, resume="never")
    free = {"mesh": "fsdp=1", "max_steps": 9, "save_interval": 3, "model_dir": "models/tiny/", "tensorboard": True}
    capsys.readouterr()
    small_run(tmp_path, **options, **free).folder.release()
    assert not capsys.readouterr().out
    small_run(tmp_path, lr=2e-3, resume="force").folder.release()
    assert "continues with other settings: --lr is 0.002 now and was 0.001" in capsys.readouterr().out


def test_options_that_are_new_or_gone_had_their_defaults(tmp_path):
    with started(small_run(tmp_path)) as run:
        save(run, 1)
    file = tmp_path / "config.json"
    settings = json.loads(file.read_text())
    del settings["temperature"], settings["lr"]
    file.write_text(json.dumps(settings | {"gone": "", "removed": False, "train_vocab": True}))
    small_run(tmp_path).folder.release()
    with pytest.raises(UserError, match="--temperature is 0.5 now and was 1.0"):
        small_run(tmp_path, temperature=0.5)
    file.write_text(json.dumps(settings | {"gone": 2}))
    with pytest.raises(UserError, match="with other settings, gone was 2 and is not an option of this version: "):
        small_run(tmp_path)
    small_run(tmp_path, resume="force").folder.release()


def run_of(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())["run"]


def test_changes_by_force_are_in_the_record_with_their_step(tmp_path):
    """Also after a plain resume, and at an earlier step if a later state was lost."""
    with started(small_run(tmp_path, lr=1e-3)) as run:
        save(run, 3)
    assert "segments" not in run_of(tmp_path)
    for options in ({"lr": 2e-3}, {"lr": 2e-3, "temperature": 0.5}):
        run = small_run(tmp_path, **options, resume="force")
        assert run.restore(states(0))[1].step == 3
        started(run).folder.release()
    run = small_run(tmp_path, lr=2e-3, temperature=0.5)  # nothing changed, and nothing is forgotten
    run.restore(states(0))
    with started(run):
        save(run, 4)
    first, second = run_of(tmp_path)["segments"]
    assert first == {"step": 3, "text": "--lr is 0.002 now and was 0.001"}
    assert second == {"step": 3, "text": "--temperature is 0.5 now and was 1.0"}
    assert last_break([]) == -1
    assert describe_segment({"step": 3, "changed": {"lr": [1, 2]}, "data": {}}) == "from step 4 on: {'lr': [1, 2]}"
    assert [segment["step"] for segment in run.folder.begin(2, {})] == [2, 2]
    events = read_jsonl(tmp_path / "events.jsonl")
    assert [event["global_step"] for event in events] == [3, 3]
    assert "--lr is 0.002 now" in events[0]["warning"]
    assert "--temperature is 0.5 now" in (tmp_path / "report.html").read_text()


# Data


def rows(*numbers: int) -> list[dict]:
    return [{"prompt": f"Write {i}.", "answer": str(i)} for i in numbers]


CHANGED = {  # the rows of the file of a run whose file had rows(*range(20)), and its reward
    "a row more": (rows(*range(21)), 1.0),
    "other answers": ([row | {"answer": "0"} for row in rows(*range(20))], 1.0),
    "another reward": (rows(*range(20)), 0.5),
}


def played_file(folder: Path, content: list[dict], reward: float = 1.0) -> RolloutSettings:
    """Writes a data set and a reward, and returns how they are played."""
    folder.mkdir(exist_ok=True)
    write_jsonl(folder / "rows.jsonl", content)
    (folder / "rewards.py").write_text(f"def reward(text): return {reward}")
    env = make_env("dataset", path=str(folder / "rows.jsonl"), reward=f"{folder}/rewards.py:reward")
    return RolloutSettings("dataset", {}, env, 8, 0, ForcedAnswer())


@pytest.mark.parametrize("kind", CHANGED)
def test_a_run_whose_data_or_reward_has_changed_is_not_resumed(kind, tmp_path, capsys):
    folder, data = tmp_path / "run", tmp_path / "data"
    with started(small_run(folder, played_file(data, rows(*range(20))))) as run:
        save(run, 1)
    small_run(folder, played_file(data, rows(*range(20)))).folder.release()
    changed = played_file(data, *CHANGED[kind])
    what = r"rewards.py is code, digest \w+ and was" if "reward" in kind else "dataset is .* digest .* and was "
    with pytest.raises(UserError, match=f"other data, .*{what}"):
        small_run(folder, changed)
    run = small_run(folder, changed, resume="force")
    assert "continues with other data: " in capsys.readouterr().out
    run.restore(states(0))
    started(run).folder.release()
    (segment,) = run_of(folder)["segments"]
    assert re.search(what, segment["text"])


DATED = "{{ strftime_now('%d %b %Y') }} {{ messages[-1].content }}"


def test_rendered_prompts_are_part_of_what_resuming_compares(tmp_path, capsys):
    """A template that writes the date writes that of the run's start, on whatever day the run goes on."""
    model = tmp_path / "model"
    folder = tmp_path / "run"
    shutil.copytree(FLAGS["model_dir"], model)
    (model / "chat_template.jinja").write_text(DATED)
    flags = FLAGS | {"model_dir": model, "test_env_name": ""}

    def prompt(step: int) -> str:
        row, *_ = (folder / f"rollouts/step_{step}.jsonl").read_text().splitlines()
        return json.loads(row)["prompt"]

    def go_on(num_steps: int, **options) -> int:
        return train_here(folder, **flags | {"max_steps": num_steps} | options)

    today = time.strftime("%d %b %Y")
    assert go_on(1) == go_on(2) == 0
    assert prompt(2).startswith(today)
    config = json.loads((folder / "config.json").read_text())
    config["run"]["start"] = "2020-02-29 23:59:59 +0000"
    (folder / "config.json").write_text(json.dumps(config))
    capsys.readouterr()
    assert go_on(3) == 2
    words = r"other data, tokens of poem's prompts is 16 samples, digest (\w+) and was 16 samples, .*old chat template"
    assert re.search(words, capsys.readouterr().err)
    gc.collect()  # a refused run gives its lock back with its object, which Python 3.13 holds until then
    assert go_on(3, resume="force") == 0
    assert prompt(3).startswith("29 Feb 2020")
    (model / "chat_template.jinja").write_text(DATED + "!")
    assert go_on(4) == 2


def test_processes_that_see_different_data_stop():
    layout = SimpleNamespace(gather_values=lambda value: ["5 problems, digest 0", value])
    fingerprints.compare_processes({"a": "5 problems, digest 0"}, layout)
    with pytest.raises(ValueError, match=r"processes see different contents of a \(here: 6 problems"):
        fingerprints.compare_processes({"a": "6 problems, digest 0"}, layout)


# Two runs in one folder


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_folder_in_use_is_refused_before_a_model_is_loaded(whole, tmp_path):
    """This process holds the lock; the refused command is a process of its own."""
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    (folder / "state" / "9.orbax-checkpoint-tmp").mkdir()
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"global_step": 9}\n{"global_')
    held = FolderLock(folder)
    before = contents(folder)
    empty = tmp_path / "empty"
    empty.mkdir()
    flags = FLAGS | {"save_dir": folder, "model_dir": empty}
    refused = start(arguments(**flags), stderr=subprocess.PIPE)
    output, error = refused.communicate(timeout=240)
    assert refused.returncode == 2
    assert output.count("\n") == 1
    assert error.startswith(f"error: {folder} is in use by process {os.getpid()} on "), error
    assert error.count("\n") == 1
    assert "--save_dir" in error
    assert contents(folder) == before
    assert (folder / "state" / "9.orbax-checkpoint-tmp").is_dir()
    held.release()
    assert not (folder / lock.NAME).exists()


def test_default_folders_are_never_shared(tmp_path, monkeypatch):
    # Default folders are made here, on one day.
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run_folder.time, "strftime", lambda _: "2026-01-02")
    made = [small_run("") for _ in range(3)]
    assert [run.folder.path.name for run in made] == ["poem-2026-01-02", "poem-2026-01-02-2", "poem-2026-01-02-3"]
    made[0].folder.release()
    assert not made[0].folder.path.exists(), "nothing was written to it"


def marker(pid: int, host: str = "node7", seconds: float = 1.0) -> str:
    """What filelock writes into its file."""
    return f"filelock/2\npid={pid}\nhost={host}\nmode=lease\ntoken=x\nduration={seconds}\nstart=1\n"


@pytest.fixture
def other_machine(tmp_path, monkeypatch) -> Path:
    """A lock file of a run on another machine."""
    # A second of silence instead of minutes.
    monkeypatch.setattr(lock, "SILENCE", 1.0)
    monkeypatch.setattr(lock, "HEARTBEAT", 0.05)
    file = tmp_path / ".lock"
    file.write_text(marker(12))
    return file


@pytest.mark.parametrize("difference", [0, -1e9])
def test_a_lock_of_another_machine_counts_while_it_is_touched(difference, other_machine, capsys):
    """Also where its clock differs."""

    def touch():
        while not done.wait(0.1):
            os.utime(other_machine, 2 * (time.time() + difference,))

    os.utime(other_machine, 2 * (time.time() + difference,))
    done = threading.Event()
    thread = threading.Thread(target=touch)
    thread.start()
    try:
        with pytest.raises(ValueError, match="is in use by process 12 on node7: name another"):
            FolderLock(other_machine.parent)
    finally:
        done.set()
        thread.join()
    assert "waiting up to" in capsys.readouterr().out
    assert "node7" in other_machine.read_text(), "untouched"


STALE = {  # contents of a lock file; "no exchange": of a file system like NFS; "container": one that is gone
    "silent": marker(12, seconds=0.3),
    "no exchange": marker(12, seconds=0.3),
    "empty": "",
    "container": marker(os.getpid(), f"{socket.gethostname()}?pidns-1", seconds=0.3),
}


@pytest.mark.parametrize("kind", STALE)
def test_a_stale_lock_is_taken_over(kind, other_machine, monkeypatch, capsys):
    # The test does not wait for minutes.
    monkeypatch.setattr(lock, "SILENCE", 0.3)
    other_machine.write_text(STALE[kind])
    if kind == "no exchange":  # the function of filelock is private, and moves from release to release
        modules = [x for name, x in sys.modules.items() if name.startswith("filelock") and "exchange_names" in vars(x)]
        assert modules
        for module in modules:
            # What filelock asks the file system.
            monkeypatch.setattr(module, "exchange_names", lambda *_: False)
    held = FolderLock(other_machine.parent)
    assert "waiting up to" in capsys.readouterr().out
    assert f"pid={os.getpid()}\n" in other_machine.read_text()
    held.release()
    assert not [*other_machine.parent.iterdir()]


def test_a_run_whose_lock_was_taken_saves_nothing_more(tmp_path, monkeypatch, capsys):
    # The lock is looked at twenty times a second.
    monkeypatch.setattr(lock, "HEARTBEAT", 0.05)
    with pytest.raises(SystemExit) as end, started(small_run(tmp_path)) as run:
        end_step(run, 1)
        file = tmp_path / ".lock"
        file.unlink()
        file.write_text("another")
        while not run.folder.is_lost:
            time.sleep(0.01)
        end_step(run, 2)
    assert end.value.code == 1
    assert "another process has taken" in capsys.readouterr().err
    assert not (tmp_path / "state").exists()
    assert file.read_text() == "another"


# Folders and files


@pytest.mark.parametrize("save_dir", ["foo://bucket/x", f"{__file__}/x"])
def test_an_impossible_folder_is_refused_before_training(save_dir, tmp_path, monkeypatch, capsys):
    # Relative folders are made here.
    monkeypatch.chdir(tmp_path)
    assert train(save_dir) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: --save_dir")
    assert error.count("\n") == 1
    assert not [*tmp_path.iterdir()]


# Disks, buckets and pipes


def test_a_run_in_a_bucket_goes_on_on_another_machine(whole, tmp_path, monkeypatch):
    """A folder plays the bucket; the files of Orbax go to it directly."""
    bucket = tmp_path / "bucket"
    names = ("here", "there")
    # A folder stands for the bucket.
    monkeypatch.setattr(run_folder, "is_bucket", lambda name: name == str(bucket))
    for name, max_steps in zip(names, (4, STEPS), strict=True):
        # Each machine has its own local folder.
        monkeypatch.setattr("utils.runs.bucket.local_folder", lambda _, name=name: tmp_path / name)
        assert train(bucket, max_steps=max_steps) == 0
    assert_same(bucket, whole)
    assert records(tmp_path / "there") == records(whole)
    assert not (tmp_path / "there" / "state").exists()
    assert len([*(bucket / "rollouts").glob("step_*")]) == STEPS
    config = json.loads((bucket / "config.json").read_text())
    assert config["run"]["end"], "what is written at the end is there, too"
    assert "max_steps" in config["run"]["changed"]
    assert "temperature" not in config["run"]["changed"], "the defaults"


@pytest.fixture
def small_disk(whole, tmp_path, monkeypatch):
    """One on which the run `whole` has not quite room; without pictures, whose drafts would fill it now and then."""
    # Drafts of pictures would fill the disk now and then.
    monkeypatch.setattr(runs, "draw_report", lambda folder: None)
    files = [path for path in whole.rglob("*") if path.suffix not in (".html", ".png")]
    folder = tmp_path / "disk"
    size = sum(512 * path.stat().st_blocks for path in files)
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size - 300_000}", "lmpo", folder]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("only root can mount a small tmpfs")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def remount(folder: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", folder], check=True)


def test_a_full_disk_ends_the_run_with_what_it_had_saved(small_disk, whole, capsys):
    folder = small_disk / "run"
    assert train(folder) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert "No space left" in error, error
    assert "is saved: the same command resumes from there" in error
    assert "[Errno" not in error, error
    remount(small_disk, "size=50m")
    assert train(folder) == 0
    assert_same(folder, whole)
    capsys.readouterr()
    remount(small_disk, "ro")
    assert train(folder) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert "Read-only file system" in error, error


def test_output_that_nobody_takes_stops_nothing():
    out = LossyWriter(os.open("/dev/full", os.O_WRONLY), "w")
    for _ in range(100):
        assert out.write(b"x" * 10_000) == 10_000
