"""Files of a run folder, damaged by a seed, and the readers that meet them; for tests/envs/test_damaged.py.

A damage is one of bytes (a cut, flips, zeros, noise, another encoding, nothing, twice the file), or one of what the
file holds (a value of another type, a key removed or renamed, huge numbers, NaN, lists nested 10,000 deep).
"""

import contextlib
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from core.config import Config
from core.eval import parse_command
from extras.compare import main as compare
from extras.replay import read_stored
from utils.files import write_json
from utils.reporting.page import task_means
from utils.settings.config import parse, to_dict
from utils.settings.errors import UserError

# Texts that stand for what json.dumps does not write.
RAW = {
    "@huge@": "1e400",
    "@digits@": "9" * 5000,
    "@nested@": "[" * 10**4 + "]" * 10**4,
    "@NaN@": "NaN",
}
VALUES = (None, True, -1, 0.5, 10**400, "x", "", [], {}, [[1]], {"a": [None]}, *RAW)
ARRAYS = (
    lambda x: x.astype(str),
    lambda x: x.astype(complex),
    lambda x: x.astype(object),
    lambda x: x[None],
    lambda x: x[:0],
    lambda x: x[:-1],
    lambda x: np.full(x.shape, np.nan),
    lambda x: np.full(x.shape, 2**62),
    lambda x: np.full(x.shape, -7),
    lambda x: np.array(5),
    lambda x: np.full(x.shape, np.inf),
)
Damage = Callable[[np.random.Generator, bytes], bytes]


class Kind(NamedTuple):
    """A file of a run folder, what damages its content, what reads it, and the seed of the damages."""

    file: str
    damage: Damage
    read: Callable[[Path], object]
    seed: int


def make_run(run: Path) -> None:
    """Writes a run folder without its model."""
    rng = np.random.default_rng(0)
    (run / "rollouts").mkdir(parents=True)
    (run / "step2").mkdir()
    settings = to_dict(parse(Config, ["--config", "configs/demo.py", "--group_size", "4"]))
    write_json(run / "config.json", settings | {"run": {"command": "python core/grpo.py", "changed": ["lr"]}})
    scores = {
        "env/return": 0.3,
        "env/correct_answer": 0.2,
        "loss": 0.1,
        "entropy": None,
        "times/step": 2.0,
    }
    held_out = {
        "test_env/return": 0.3,
        "test_env/return_ci": 0.1,
        "test_env/correct_answer": 0.2,
    }
    records = [{"global_step": i} | scores | (held_out if i % 2 == 0 else {}) for i in range(8)]
    (run / "metrics.jsonl").write_bytes(dump_lines(records))
    B, T = 8, 20
    lengths = rng.integers(10, T + 1, B)
    arrays = {"tokens": rng.integers(0, 99, (B, T)), "mask": np.arange(T)[None] >= np.full((B, 1), 5)}
    arrays |= {
        "lengths": lengths,
        "prompt_lengths": np.full(B, 5),
        "tasks": np.arange(B),
        "positions": np.arange(B),
        "rollout": np.arange(B),
    }
    np.savez_compressed(run / "rollouts" / "step_2.npz", **arrays)
    tasks = np.repeat(np.arange(8), 2)
    returns = rng.random(16, np.float32)
    scores = {
        "tasks": tasks,
        "returns": returns,
        "scores/correct_answer": np.round(returns),
    }
    np.savez_compressed(run / "rollouts" / "held_out_2.npz", **scores)


def dump(value: object) -> bytes:
    """Writes JSON, with the texts of RAW as what they stand for."""
    text = json.dumps(value, ensure_ascii=False)
    for name, raw in RAW.items():
        text = text.replace(f'"{name}"', raw)
    return text.encode()


def dump_lines(rows: list) -> bytes:
    return b"".join(dump(row) + b"\n" for row in rows)


# Damages


def damage_bytes(rng: np.random.Generator, content: bytes) -> bytes:
    """A cut, flips, a region of zeros or of noise, another encoding, nothing, or the file twice."""
    x = np.frombuffer(content, np.uint8).copy()
    start, end = np.sort(rng.integers(0, len(x), 2))
    way = rng.integers(8)
    if way == 0:
        x = x[:end]
    elif way in (1, 2):
        x[rng.integers(0, len(x), 1 + rng.integers(8))] ^= np.uint8(1 << rng.integers(8))
    elif way == 3:
        x[start:end] = 0
    elif way == 4:
        x[start : start + 64] = rng.integers(0, 256, len(x[start : start + 64]))
    elif way == 5:
        return content.decode("latin-1").encode(str(rng.choice(["utf-16", "utf-32", "utf-8-sig", "utf-7"])))
    elif way == 6:
        return b"" if rng.random() < 0.5 else content[start:]
    else:
        return content * 2
    return x.tobytes()


def damage_tree(rng: np.random.Generator, root: object) -> object:
    """Replaces, removes or renames a value anywhere in a tree; changes it in place."""
    place, keys = [root], [0]  # the root as the only item of a list
    holder, key = place, 0
    while isinstance(holder[key], dict | list) and holder[key] and (holder is place or rng.random() < 0.85):
        holder = holder[key]
        keys = list(holder) if isinstance(holder, dict) else range(len(holder))
        key = keys[rng.integers(len(keys))]
    way = rng.integers(5)
    if way == 0 and holder is not place:
        del holder[key]
    elif way == 1 and isinstance(holder, dict):
        holder[key + "_"] = holder.pop(key)
    else:
        holder[key] = VALUES[rng.integers(len(VALUES))]
    return place[0]


def damage_json(rng: np.random.Generator, content: bytes) -> bytes:
    return dump(damage_tree(rng, json.loads(content)))


def damage_lines(rng: np.random.Generator, content: bytes) -> bytes:
    rows = [json.loads(line) for line in content.splitlines()]
    i = rng.integers(len(rows))
    rows[i] = damage_tree(rng, rows[i])
    return dump_lines(rows)


def damage_arrays(rng: np.random.Generator, content: bytes) -> bytes:
    """Gives an array another type, shape or values, removes or renames it."""
    arrays = dict(np.load(io.BytesIO(content)))
    name = list(arrays)[rng.integers(len(arrays))]
    way = rng.integers(len(ARRAYS) + 2)
    x = arrays.pop(name)
    if way < len(ARRAYS):
        arrays[name] = ARRAYS[way](x)
    elif way == len(ARRAYS):
        arrays[name + "_"] = x
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


# Readers


def read_run(file: Path) -> None:
    """As core/eval.py reads the config.json of the run whose model it is given."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            parse_command(["--model_dir", str(file.parent / "step2")])
    except SystemExit as end:  # with one sentence
        raise UserError(printed.getvalue()) from end


def read_curves(file: Path) -> None:
    out = file.parent.parent
    compare([str(file), "--html", str(out / "report.html"), "--out", str(out / "plot.png")])


def read_replay(file: Path) -> None:
    for row in range(2):
        stored, _ = read_stored(str(file.with_suffix("")), row)
        assert len(stored.turns) >= 0


KINDS = {
    "npz": Kind("run/rollouts/held_out_2.npz", damage_arrays, task_means, seed=5),
    "metrics": Kind("run/metrics.jsonl", damage_lines, read_curves, seed=4),
    "config": Kind("run/config.json", damage_json, read_run, seed=1),
    "replay": Kind("run/rollouts/step_2.npz", damage_arrays, read_replay, seed=7),
}


@contextlib.contextmanager
def damaged(folder: Path, kind: str, number: int) -> Iterator[Path]:
    """Yields the file of a kind with damage number `number`, and restores it."""
    file = folder / KINDS[kind].file
    content = file.read_bytes()
    rng = np.random.default_rng([KINDS[kind].seed, number])
    damage = KINDS[kind].damage
    file.write_bytes((damage if rng.random() < 0.5 else damage_bytes)(rng, content))
    try:
        yield file
    finally:
        file.write_bytes(content)
