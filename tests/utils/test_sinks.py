"""wandb and TensorBoard hold the numbers of metrics.jsonl, and cannot stop a run."""

import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from utils.metrics.logger import Logger
from utils.metrics.sinks import open_sinks
from utils.settings.errors import UserError
from utils.settings.groups import SinkConfig


@pytest.fixture(autouse=True)
def no_wandb_in_the_environment(monkeypatch):
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_BASE_URL", "WANDB_MODE"):
        # The user's own login is not used.
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", os.devnull)


def start(tmp_path, resume_step: int = -1, **options) -> Logger:
    sinks = open_sinks(SinkConfig(**options), tmp_path, {"lr": 1e-6, "env_name": "poem"}, resume_step)
    return Logger(tmp_path, resume_step=resume_step, sinks=sinks)


def run(tmp_path, **options) -> dict[str, list[tuple[int, float]]]:
    """Three steps, of which the last is done again after a restart; returns what metrics.jsonl holds, by name."""
    with start(tmp_path, **options) as logger:
        for step in range(4):
            others = {"test_env/pass@2": np.float32(0.1), "loss": np.nan, "list": [1.0]}
            logger.log(step, {"env/return": step / 2} | others)
    with start(tmp_path, 2, **options) as logger:
        logger.log(3, {"env/return": 7.0, "test_env/pass@2": 0.2})
    found = {}
    for record in map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines()):
        for name, value in record.items():
            if isinstance(value, int | float):
                found.setdefault(name, []).append((record["global_step"], value))
    return found


def test_tensorboard_holds_the_same_numbers(tmp_path):
    pytest.importorskip("tensorboardX", reason="pip install tensorboardX")
    from tensorboardX.proto.event_pb2 import Event, SessionLog

    expected = run(tmp_path, tensorboard=True)
    found: dict[str, dict[int, float]] = {}
    for file in sorted((tmp_path / "tensorboard").iterdir()):
        data, at = file.read_bytes(), 0
        while at < len(data):  # length (8 bytes), checksum (4), event, checksum (4)
            size = int.from_bytes(data[at : at + 8], "little")
            event = Event.FromString(data[at + 12 : at + 12 + size])
            at += size + 16
            if event.session_log.status == SessionLog.START:  # steps from here on are done again
                found = {tag: {s: x for s, x in steps.items() if s < event.step} for tag, steps in found.items()}
            for value in event.summary.value:
                found.setdefault(value.tag, {})[event.step] = value.simple_value
    assert {name: sorted(steps.items()) for name, steps in found.items()} == {
        name.replace("@", "_at_"): [(step, pytest.approx(value)) for step, value in values]
        for name, values in expected.items()
    }


def wandb_records(data: bytes):
    """The records of a .wandb file: LevelDB's log format, behind a header of 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    at, whole = 7, b""
    while at + 7 <= len(data):
        if (room := -at % 32768 or 32768) < 7:  # too little for a header: the next block begins
            at += room
            continue
        size = int.from_bytes(data[at + 4 : at + 6], "little")
        kind = data[at + 6]
        if at + 7 + size > len(data):  # it is still being written
            return
        whole = whole + data[at + 7 : at + 7 + size]
        at = at + 7 + size
        if kind in (1, 4):  # full, or last part
            yield Record.FromString(whole)
            whole = b""


def test_wandb_offline_holds_the_same_numbers(tmp_path):
    with start(tmp_path, wandb_name="x") as logger:
        for step in range(3):
            histogram = np.float32([step, 2, np.nan])
            logger.log(step, {"env/return": step / 2, "loss": np.nan, "ratio_histogram": histogram})
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    expected = [(step, step / 2, [step, 2, 0]) for step in range(3)]
    deadline = time.monotonic() + 60
    while (found := logged_returns(file)) != expected and time.monotonic() < deadline:
        time.sleep(0.1)  # wandb's own process may write after `finish` has returned
    assert found == expected


def logged_returns(file: Path) -> list[tuple[int, float, list[float]]]:
    found = []
    for record in wandb_records(file.read_bytes()):
        items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        found += [(items["global_step"], items["env/return"], items["ratio_histogram/values"])] if items else []
    return found


def test_rollouts_reach_wandb_and_tensorboard(tmp_path):
    """With text that Markdown, HTML and CSV would read as their own."""
    text = "<script>alert(1)</script> | # a\n\nb"
    row = {"group": 0, "task": np.int64(7), "prompt": "p", "text": text, "return": np.float32(0.5), "finished": True}
    with start(tmp_path, tensorboard=True, wandb_name="x") as logger:
        logger.log(3, {"env/return": 0.5})
        for sink in logger.sinks:
            sink.attempt("log_rollouts", 3, [row])
    (table,) = tmp_path.glob("wandb/offline-run-*/files/media/table/*.json")
    table = json.loads(table.read_text())
    assert dict(zip(table["columns"], table["data"][0], strict=True)) == row
    (events,) = (tmp_path / "tensorboard").iterdir()
    assert b"    p<script>alert(1)</script>" in events.read_bytes()


@pytest.mark.parametrize("broken", ["init", "log", "finish"])
def test_a_broken_sink_warns_once_and_the_run_goes_on(tmp_path, broken, monkeypatch, capsys):
    calls = []

    def step(name):
        def call(*_, **__):
            calls.append(name)
            if name == broken:
                raise RuntimeError("\x1b[2J\x9bno network\n")
            return SimpleNamespace(log=step("log"), finish=step("finish"))

        return call

    # A package of which one call fails, and a login.
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=step("init"), Settings=dict, Table=list))
    # A login.
    monkeypatch.setenv("WANDB_API_KEY", "x")
    with start(tmp_path) as logger:
        for i in range(2):
            logger.log(i, {"x": i})
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2
    said = capsys.readouterr().err
    assert said.count("warning: wandb is switched off") == said.count("\n") == 1
    assert "\x1b" not in said
    assert calls == {"init": ["init"], "log": ["init", "log"], "finish": ["init", "log", "log", "finish"]}[broken]


def test_a_sink_that_is_not_installed_says_how_to_install_it(tmp_path, monkeypatch):
    # A package that is not installed.
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(UserError, match="is not installed: `pip install tensorboardX`"):
        start(tmp_path, tensorboard=True)


def test_a_run_goes_on_without_the_package_of_wandb_and_says_so(tmp_path, monkeypatch, capsys):
    """Whether it was named, or there is a login."""
    # A package that is not installed.
    monkeypatch.setitem(sys.modules, "wandb", None)
    for options, key in (({"wandb_name": "x"}, ""), ({}, "x")):
        # A login, or none.
        monkeypatch.setenv("WANDB_API_KEY", key)
        with start(tmp_path, **options):
            pass
        said = capsys.readouterr().out
        assert "not installed, so this run is not logged there: `pip install wandb`" in said
        assert said.count("\n") == 1
    # Turned off by the user.
    monkeypatch.setenv("WANDB_MODE", "disabled")
    with start(tmp_path, wandb_name="x"):
        pass
    assert capsys.readouterr().out == ""


CLOUD = "machine api.wandb.ai\n login user\n password x\n"
OWN = "machine wandb.lab:8080 login user password x\n"
KEY = {"WANDB_API_KEY": "x"}
NAME = {"wandb_name": "x"}
OFF = {"WANDB_MODE": "disabled"}
GROUP = {"wandb_group": "poems"}
AT_OWN = {"WANDB_BASE_URL": "http://wandb.lab:8080"}


@pytest.mark.parametrize(
    ("options", "logins", "environment", "mode"),
    [
        ({}, "", {}, None),
        (NAME, "", {}, "offline"),
        (NAME, CLOUD, KEY | OFF, None),
        (NAME | GROUP, CLOUD, {}, "online"),
        ({}, CLOUD, {}, "online"),
        ({}, "", KEY, "online"),
        ({}, CLOUD, {"WANDB_MODE": "offline"}, "offline"),
        ({}, OWN, {}, None),
        ({}, OWN, AT_OWN, "online"),
        ({}, "default login user password x", {}, None),
        (GROUP, "", {}, "offline"),
        ({}, "not a netrc", {}, None),
    ],
)
def test_when_wandb_is_on(tmp_path, options, logins, environment, mode, monkeypatch, capsys):
    """By an option, or by a login alone, in one line that says how to leave it off."""
    for name, value in environment.items():
        # Variables and logins of the table.
        monkeypatch.setenv(name, value)
    (tmp_path / "netrc").write_text(logins)
    # Logins of the table.
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    made = []
    fake_run = SimpleNamespace(log=lambda *_, **__: None, finish=lambda: None)
    init = lambda mode, name, group, **_: made.append((mode, name, group)) or fake_run  # noqa: E731
    fake = SimpleNamespace(init=init, Settings=dict, Table=list)
    # Keeps what wandb is told.
    monkeypatch.setitem(sys.modules, "wandb", fake)
    with start(tmp_path, **options):
        pass
    name, group = options.get("wandb_name", tmp_path.name), options.get("wandb_group")  # None: WANDB_RUN_GROUP counts
    assert made == ([(mode, name, group)] if mode else [])
    found = "WANDB_MODE=disabled leaves it off" in capsys.readouterr().out
    assert found == (bool(mode) and options == {})
