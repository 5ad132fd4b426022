"""Files of a run that are not whole are read in part, or rejected by a sentence that names them."""

import contextlib
import io
import json

import numpy as np
import pytest

from core.config import Config
from core.eval import parse_command
from extras.compare import main as compare
from extras.replay import read_stored
from utils.reporting.page import task_means
from utils.settings.config import parse, to_dict
from utils.settings.errors import UserError

ARRAYS = ("tokens", "mask", "lengths", "prompt_lengths", "tasks", "positions")


@pytest.fixture
def run(tmp_path):
    """A run folder without its model."""
    folder = tmp_path / "run"
    (folder / "rollouts").mkdir(parents=True)
    (folder / "step2").mkdir()
    settings = to_dict(parse(Config, ["--config", "configs/demo.py", "--group_size", "4"]))
    (folder / "config.json").write_text(json.dumps(settings | {"run": {"command": "python core/grpo.py"}}))
    records = [{"global_step": i, "env/return": 0.3, "test_env/return": 0.3} for i in range(8)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    shapes = {"tokens": (8, 20), "mask": (8, 20)}
    arrays = {name: np.ones(shapes.get(name, 8), int) for name in ARRAYS} | {"rollout": np.arange(8)}
    np.savez(folder / "rollouts/step_2.npz", **arrays)
    np.savez(folder / "rollouts/held_out_2.npz", tasks=np.arange(8), returns=np.ones(8))
    return folder


def read_config(file) -> None:
    """As core/eval.py reads the config.json of the run whose model it is given."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            parse_command(["--model_dir", str(file.parent / "step2")])
    except SystemExit as end:  # with one sentence
        raise UserError(printed.getvalue()) from end


READERS = {
    "config.json": read_config,
    "metrics.jsonl": lambda file: compare([str(file), "--html", str(file.parent / "out.html")]),
    "rollouts/step_2.npz": lambda file: read_stored(str(file.with_suffix("")), 0),
    "rollouts/held_out_2.npz": task_means,
}
DAMAGE = {
    "half of it": lambda content: content[: len(content) // 2],
    "nothing": lambda content: b"",
    "zeros": lambda content: bytes(len(content)),
    "other values": lambda content: b'{"env_name": "countdown", "temperature": "hot", "run": {"seconds": 1}}',
}


@pytest.mark.parametrize("name", READERS)
def test_damaged_files_are_read_or_rejected_by_name(run, name):
    file, read = run / name, READERS[name]
    content = file.read_bytes()
    read(file)
    for damage, change in DAMAGE.items():
        file.write_bytes(change(content))
        try:
            read(file)
        except UserError as error:
            assert file.name in str(error), damage
        else:
            assert name == "metrics.jsonl", f"{damage}: only lines of a log are left out"
