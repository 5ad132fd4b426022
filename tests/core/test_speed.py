"""Rates, against counts by loops and by the compiler; compiled programs, against a second process."""

import ctypes
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from core import grpo
from core.records import Completions, Episodes
from core.run.metrics import speed_metrics
from core.sampler import Sampler
from models import decoder
from models.architecture import Decoder, is_spec
from models.checkpoint import save_model
from models.lora import adapter_parameters, init_adapters
from models.names import CRITIC, make_policy
from models.speed import PEAKS, training_flops
from models.tokenizer import load_tokenizer
from tests.helpers import ROOT, read_jsonl, slow, train_here
from tests.kill_runs import FLAGS, arguments, start
from utils.devices import compilation
from utils.devices.compile_log import Compilations, compile_metrics
from utils.devices.sharding import single_device

MODEL = Decoder(512, 128, 384, 3, 4, 2, 32, remat="none", unroll=True)
EXPERTS = replace(
    MODEL,
    num_experts=6,
    num_experts_per_tok=4,
    moe_intermediate_size=96,
)


@pytest.mark.parametrize("trained", ["all", *slow("adapters", "with a critic")])
def test_flops_of_training_are_those_that_the_compiler_counts(trained, optimized):
    model = replace(MODEL, lora_rank=16 if trained == "adapters" else 0)
    params = decoder.init_params(model, jax.random.key(0))
    base = {}
    tokens = jnp.zeros((2, 256), jnp.int32)
    if trained == "adapters":
        base = decoder.decode_weights(model, params)
        params = init_adapters(model, 16, jax.random.key(0))
    if has_critic := trained == "with a critic":
        params |= {CRITIC: decoder.make_critic(model, params)}

    def loss(params):
        outputs = decoder.token_outputs(model, make_policy(base, params), tokens)
        return outputs.logprobs.sum() + (outputs.values.sum() if has_critic else 0)

    counted = jax.jit(jax.grad(loss)).lower(params).compile().cost_analysis()["flops"]
    found = training_flops(model, np.full(2, 256), 512, 512, has_critic)
    # The compiler counts what stands right of a token in its quarter of the row too, and what is no matrix product.
    masked = (2 if has_critic else 1) * 2 * 6 * 3 * 4 * 32 * 256**2 / 4
    assert 0.85 * counted < found + masked < 1.05 * counted


def test_token_is_multiplied_by_its_own_experts_adapters():
    model = replace(EXPERTS, lora_rank=2)
    attention = 3 * 2 * ((128 + 128) + 2 * (128 + 64) + (128 + 128))
    assert adapter_parameters(model) == attention + 3 * 4 * 2 * 3 * (128 + 96)


def test_share_of_the_nominal_rate_is_that_of_a_device_that_is_known(monkeypatch):
    prompt_lengths = np.array([2, 2])
    lengths = np.array([4, 5])
    tokens = np.ones((2, 5), int)
    zeros = np.zeros((2, 5))
    mask = np.array([[0, 0, 1, 1, 0], [0, 0, 1, 1, 1]], bool)
    work = Completions(
        tokens=tokens,
        mask=mask,
        logprobs=zeros,
        lengths=lengths,
        prompt_lengths=prompt_lengths,
        finished=np.ones(2, bool),
        slot_steps=np.full(2, 4.0),
        num_observed=np.zeros(2, int),
    )
    episodes = Episodes(
        completions=work,
        rollout=np.arange(2),
        task_ids=np.zeros(2, int),
        texts=[""] * 2,
        scores={},
        failed=np.zeros(2, bool),
        failures={},
        times={"rollout": 2.0},
    )
    update = {"num_updates": 3, "speed/flops": 8e12, "times/update": 4.0}
    layout = single_device()
    speed = speed_metrics(layout, episodes, update)
    assert speed == {"speed/occupancy": 5 / 8, "speed/update_tflops": 6.0}
    # A device that is in the table.
    monkeypatch.setitem(PEAKS, layout.mesh.devices.flat[0].device_kind, (60e12, 3e12))
    assert speed_metrics(layout, episodes, update)["speed/mfu"] == pytest.approx(3 * 8 / 4 / 60)


def test_a_token_is_multiplied_by_its_own_experts_only():
    params = decoder.init_params(EXPERTS, jax.random.key(0))
    assert EXPERTS.num_parameters == sum(x.size for x in jax.tree.leaves(params))
    alone = replace(EXPERTS, num_experts=4)  # all of which are each token's
    router = 3 * 2 * 128  # rows of two experts, in each layer
    assert EXPERTS.num_matrix_parameters == alone.num_parameters + router


def test_occupancy_is_the_share_of_lanes_that_sampled():
    """On one CPU a small model has programs of 16 lanes, for rows that are left."""
    model = Decoder(512, 16, 32, 1, 2, 1, 8)
    sampler = Sampler(model, 32, tuple(range(16)), segment=8)  # one token in 32 stops
    params = decoder.init_params(model, jax.random.key(0))
    ends = {}  # columns drawn after each segment, by the first row of a part
    watched = replace(sampler, on_segment=lambda s: ends.setdefault(s.first_row, []).append(s.num_sampled))
    weights = watched.load_weights(params)
    completions = watched.generate(weights, [[1, 2], [3]], np.arange(2), 32, jax.random.key(1))
    lengths = completions.lengths - completions.prompt_lengths
    num_lanes = 0
    for part in np.split(np.arange(64), len(ends)):
        live = [(lengths[part] > t - 8).sum() for t in range(8, 8 * len(ends[part[0]]) + 1, 8)]
        num_lanes += sum(16 * -(-n // 16) for n in live)
    np.testing.assert_allclose(completions.slot_steps.sum(), 8 * num_lanes)


def test_compilations_are_counted_once():
    x = jnp.ones(7)
    with Compilations() as compilations:
        f = jax.jit(lambda x: x * 3.25)
        f(x)
        first = compile_metrics(compilations.take_programs())
        f(x)
        second = compile_metrics(compilations.take_programs())
    jax.jit(lambda x: x * 4.25)(x)
    assert first["compile/num_programs"] + first["compile/num_from_cache"] == 1
    assert first["times/compile"] > 0
    assert (
        second
        == compile_metrics(compilations.take_programs())
        == {"compile/num_programs": 0, "compile/num_from_cache": 0, "times/compile": 0.0}
    )


def test_a_cpu_saves_models_without_a_program(tmp_path):
    model = Decoder(48, 24, 40, 3, 2, 1, 12)
    layout = single_device()
    params = jax.tree.map(lambda x: layout.put(np.ones(x[0])), model.parameter_table(), is_leaf=is_spec)
    with Compilations() as compilations:
        save_model(tmp_path / "model", model, params, load_tokenizer(ROOT / "models/tiny"))
        assert not compilations.programs


def test_programs_are_dropped_before_mappings_run_out(monkeypatch, tmp_path):
    traced = []
    double = jax.jit(lambda x: traced.append(x) or 2 * x)
    double(1.0)
    few = tmp_path / "max_map_count"
    few.write_text("100\n")
    assert not compilation.forget_programs()
    assert double(1.0) == 2
    assert len(traced) == 1
    # Few mappings are already too many.
    monkeypatch.setattr(compilation, "MOST_MAPS", few)
    assert compilation.forget_programs()
    assert double(1.0) == 2
    assert len(traced) == 2
    # A system without /proc.
    monkeypatch.setattr(compilation, "MAPS", tmp_path / "elsewhere")
    assert not compilation.forget_programs()


def test_second_process_compiles_nothing_if_cache_is_writable(tmp_path):
    program = (
        "import json, jax, jax.numpy as jnp\n"
        "from utils.devices.compile_log import Compilations, compile_metrics\n"
        "from utils.devices.runtime import prepare\n"
        "prepare(), prepare('models/tiny')  # a preset that asks for the devices, the command\n"
        "with Compilations() as c: jax.jit(lambda x: jnp.sin(x) @ x)(jnp.ones((8, 8)))\n"
        "print(json.dumps(compile_metrics(c.take_programs())))"
    )
    root = Path(__file__).parents[2]

    def counts(cache: str, warning: str = "", **more: str) -> dict:
        command = [sys.executable, "-c", program]
        env = {"XDG_CACHE_HOME": cache, "JAX_PLATFORMS": "cpu", "PATH": ""}
        process = subprocess.run(
            command,
            env=env | more,
            cwd=root,
            capture_output=True,
            check=True,
            text=True,
        )
        assert process.stderr == warning
        return {name: x for name, x in json.loads(process.stdout).items() if name.startswith("compile/")}

    first = counts("", JAX_COMPILATION_CACHE_DIR=str(tmp_path / "lmpo"))
    second = counts(str(tmp_path))
    warning = (
        "warning: /proc/none/lmpo cannot be written, so each start compiles anew: "
        "name a folder for compiled programs in JAX_COMPILATION_CACHE_DIR\n"
    )
    assert counts("/proc/none", warning) == counts("/proc/none", JAX_ENABLE_COMPILATION_CACHE="0") == first
    assert first["compile/num_programs"] > 0
    assert (tmp_path / "lmpo").is_dir()
    assert second["compile/num_programs"] == 0
    assert second["compile/num_from_cache"] == first["compile/num_programs"]


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_info"), reason="the C library is not glibc")
def test_threads_of_a_small_model_have_arenas_of_malloc(tmp_path):
    program = (
        "import ctypes, sys, threading; from utils.devices.runtime import prepare; prepare(sys.argv[1])\n"
        "together = threading.Barrier(8)\n"
        "threads = [threading.Thread(target=together.wait) for _ in range(8)]\n"
        "[thread.start() for thread in threads], [thread.join() for thread in threads]\n"
        "libc = ctypes.CDLL(None); libc.fdopen.restype = ctypes.c_void_p\n"
        "libc.malloc_info(0, ctypes.c_void_p(libc.fdopen(1, b'w'))), libc.fflush(None)"
    )
    (tmp_path / "model.safetensors").write_bytes(bytes(2**24))

    def num_arenas(model_dir: str) -> int:
        env = os.environ | {"JAX_PLATFORMS": "cpu", "XDG_CACHE_HOME": str(tmp_path)}
        command = [sys.executable, "-c", program, model_dir]
        process = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, check=True, text=True)
        return process.stdout.count("<heap nr")

    assert num_arenas("models/tiny") > 4
    assert num_arenas(str(tmp_path)) == num_arenas("") == 1


OPTIONS = {
    "replies": {},
    "adapters, a reference, rollouts ahead": {
        "lora_rank": 2,
        "kl_coef": 0.1,
        "ahead": 1,
    },
    "a teacher's average": {"teacher": "self", "teacher_decay": 0.9},
    "another teacher": {"teacher": FLAGS["model_dir"], "distill": "sampled"},
    "a critic, episodes": {
        "advantage": "gae",
        "env_name": "guess",
        "test_env_name": "guess-test",
        "env_options": "prompt=bare,min_size=4,max_size=6,max_number=20",
        "num_generation_tokens": 60,
    },
}


@pytest.mark.parametrize("options", ["replies", *slow(*list(OPTIONS)[1:])])
def test_all_programs_are_compiled_before_step_1(options, tmp_path, capsys):
    """With an evaluation and a save after it; also in a second process, which resumes the run."""
    flags = (
        FLAGS
        | {
            "max_steps": 3,
            "test_interval": 2,
            "save_interval": 2,
        }
        | OPTIONS[options]
    )
    jax.clear_caches()
    assert train_here(tmp_path, **flags) == 0
    jax.clear_caches()
    assert train_here(tmp_path, **flags | {"max_steps": 4}) == 0
    assert len(re.findall(r"\n\d+ programs .* in \d+ s\n", capsys.readouterr().out)) == 2
    steps = read_jsonl(tmp_path / "metrics.jsonl")
    counts = [(step["compile/num_programs"] + step["compile/num_from_cache"]) for step in steps]
    assert counts[0] == counts[-1] > 5
    assert not any(counts[1:-1])
    assert not any(step["times/compile"] for step in steps), "nor does an evaluation, or the first step"
    programs = read_jsonl(tmp_path / "programs.jsonl")
    assert [row["num_steps"] for row in programs] == [0] * 2 * counts[0]


def test_a_program_that_a_later_step_compiles_is_named(tmp_path, capsys, monkeypatch):
    salt, sizes, speed = time.time(), iter([13, 14]), grpo.speed_metrics  # no cache has a program of this number
    double = jax.jit(lambda x: salt * x)

    def compile_again(*arguments: object) -> dict[str, float]:
        double(np.ones(next(sizes), np.float32))
        return speed(*arguments)

    # A late step compiles a program.
    monkeypatch.setattr(grpo, "speed_metrics", compile_again)
    assert train_here(tmp_path, **FLAGS | {"max_steps": 2, "test_env_name": ""}) == 0
    assert "warning: 1 program compiled after the first step: <lambda> (" in capsys.readouterr().out


@pytest.mark.slow
def test_second_start_on_a_mesh_finds_its_programs_cached(tmp_path):
    flags = FLAGS | {"max_steps": 2, "save_interval": 1, "test_interval": 1}
    devices = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
    for number in range(2):
        cache = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache"), "XLA_FLAGS": devices}
        run = start(arguments(**flags, save_dir=tmp_path / str(number)), cache)
        assert not run.wait(), run.stdout.read()
        programs = read_jsonl(tmp_path / str(number) / "programs.jsonl")
        assert {row["from_cache"] for row in programs} == {bool(number)}
