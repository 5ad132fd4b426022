"""What several tests share: a small random model, a tokenizer without files, and Python on four virtual devices."""

import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType

import jax
import numpy as np

from models.qwen3 import EMBED, HEAD, Qwen, is_spec
from models.tokenizer import Tokenizer
from utils.sharding import Layout

QUICK = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}  # environment where nearly all of the time would be compilation
ROOT = Path(__file__).resolve().parent.parent
MODEL = Qwen(
    vocab_size=200, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, tie_word_embeddings=False, remat="none",
)  # fmt: skip


@cache
def random_params(model: Qwen = MODEL) -> dict:
    """Parameters large enough that tokens differ in probability; on the host, where jit cannot take them away."""
    rng = np.random.default_rng(0)

    def draw(path, spec) -> np.ndarray:
        is_gain = "norm" in path[-1].key
        return np.float32(rng.uniform(0.5, 1.5, spec.shape) if is_gain else rng.normal(0, 0.4, spec.shape))

    params = jax.tree.map_with_path(draw, model.table(), is_leaf=is_spec)
    params[HEAD if HEAD in params else EMBED][0] *= 1.5  # id 0, which also fills the padding, is drawn often
    return params


def on_layout(layout: Layout, model: Qwen = MODEL) -> dict:
    """The same parameters, laid out on the devices."""
    shardings = jax.tree.map(lambda spec: layout.sharding(*spec), model.table(), is_leaf=is_spec)
    return jax.device_put(random_params(model), shardings)


class Letters(Tokenizer):
    """A tokenizer of characters: id i is chr(i), except for `words`."""

    stop_ids, pad_id = (3,), 0

    def __init__(self, words: Mapping[int, str] = MappingProxyType({})):
        vars(self)["words"] = dict(words)

    def decode(self, ids) -> str:
        return "".join(self.words.get(int(i), chr(int(i))) for i in ids)

    def encode(self, text: str) -> list[int]:
        ids = []
        while text:
            i, word = next(((i, w) for i, w in self.words.items() if text.startswith(w)), (ord(text[0]), text[0]))
            ids, text = [*ids, i], text[len(word) :]
        return ids

    def chat(self, messages, thinking: bool = False, prefix: str = "", plain: bool = False) -> list[int]:
        return self.encode(messages[-1]["content"] + prefix)


def on_four_devices(test_file: str, call: str) -> None:
    """Evaluates `call` with the names of a test file, in a process that sees four CPU devices."""
    code = f"from {Path(test_file).stem} import *; {call}"
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    settings = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu", "PYTHONPATH": paths}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=os.environ | settings | QUICK, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def start_processes(code: str, num_devices: int, num_processes: int = 1, **env: str) -> list[subprocess.Popen]:
    """Python with the tests' names in processes of so many CPU devices; `code` knows I (its number) and ADDRESS."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    env = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={num_devices}", "JAX_PLATFORMS": "cpu"} | env
    cache = {"JAX_COMPILATION_CACHE_DIR": str(ROOT / ".jax_cache"), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1"}
    env |= {"PYTHONPATH": paths} | QUICK | cache
    commands = [[sys.executable, "-c", f"I, ADDRESS = {i}, {address!r}\n{code}"] for i in range(num_processes)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return [subprocess.Popen(command, env=os.environ | env, **pipes) for command in commands]


def wait(processes: list[subprocess.Popen], timeout: float = 600) -> None:
    """Waits for the ends of processes, which must be good."""
    try:
        outputs = [process.communicate(timeout=timeout)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert not any(process.returncode for process in processes), "\n".join(outputs)
