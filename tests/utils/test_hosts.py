"""Several processes: who is asked to join, and that all end when one does."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from chex import assert_trees_all_equal
from jax.sharding import NamedSharding

from core import grpo
from tests.helpers import ROOT
from tests.processes import start_processes, wait
from utils.devices import runtime
from utils.devices.startup import DeviceConfig, ending_together, join_processes, make_layout, started_processes
from utils.settings.config import parse
from utils.settings.errors import UserError, user_errors

LIMIT = 600  # seconds until a process hangs
FLAGS = {
    "model_dir": ROOT / "tests" / "fixtures" / "qwen3-tied", "env_name": "poem", "groups_per_batch": 2, "group_size": 2,
    "ppo_minibatch": 0, "num_generation_tokens": 4, "do_group_filter": 0, "num_score_workers": 1, "save_interval": 1,
    "max_steps": 100000, "save_rollouts": "none",
}  # fmt: skip
SLURM = {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "2"}


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, (1, 0)),
        (SLURM, (2, 1)),
        (SLURM | {"SLURM_STEP_NUM_NODES": "1"}, (2, 0)),
        (SLURM | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NUM_NODES": "1"}, (1, 1)),  # a shell of `salloc -n 2`
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2"}, (1, 0)),  # the script of `sbatch`, before its `srun`
        ({"OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, (8, 4)),
    ],
)
def test_what_started_this_process(env, expected, monkeypatch):
    # The variables of the table, and no others.
    monkeypatch.setattr(os, "environ", env)
    assert started_processes() == expected


def test_one_process_joins_nothing(monkeypatch):
    # Joining would wait for other processes.
    monkeypatch.setattr(jax.distributed, "initialize", lambda **_: pytest.fail("it tried to"))
    assert make_layout(DeviceConfig()).is_main
    with pytest.raises(ZeroDivisionError), ending_together():
        raise ZeroDivisionError


@pytest.mark.parametrize("error", [ValueError("coordinator_address should be defined"), ConnectionError("no route")])
def test_a_tpu_host_without_a_cluster_is_one_process(error, monkeypatch, capsys):
    def initialize(**_):
        raise error

    # A TPU host on which JAX finds no cluster.
    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    monkeypatch.setattr(jax, "config", SimpleNamespace(jax_platforms=None))
    monkeypatch.setenv("TPU_ML_PLATFORM", "JAX")
    join_processes.__wrapped__()
    printed = capsys.readouterr().err
    assert printed.startswith("one process, since no cluster is found")
    assert str(error) in printed
    # Said by the user.
    monkeypatch.setenv("JAX_NUM_PROCESSES", "2")
    with pytest.raises(UserError, match="set JAX_COORDINATOR_ADDRESS to host:port"):
        join_processes.__wrapped__()
    # Said by the user, and wrong.
    monkeypatch.setenv("JAX_PROCESS_ID", "first")
    with pytest.raises(UserError, match="invalid literal .*'first': set JAX_COORDINATOR_ADDRESS"):
        join_processes.__wrapped__()


def test_an_accelerator_is_found_by_plugin_and_device_file(tmp_path, monkeypatch):
    # A machine with the plugin of TPUs.
    monkeypatch.setattr(runtime.importlib.util, "find_spec", lambda name: name == "libtpu")
    monkeypatch.setattr(runtime.jax, "config", SimpleNamespace(jax_platforms=None))
    (tmp_path / "vfio").mkdir()
    (tmp_path / "vfio" / "vfio").touch()  # of the kernel's module, with no device behind it
    assert runtime.runs_on_cpu(tmp_path)
    (tmp_path / "vfio" / "0").touch()
    assert not runtime.runs_on_cpu(tmp_path)
    # A machine without it.
    monkeypatch.setattr(runtime.importlib.util, "find_spec", lambda name: None)
    assert runtime.runs_on_cpu(tmp_path)
    for platforms in ("cpu", "cpu,tpu", "cuda"):
        # As JAX_PLATFORMS sets it.
        monkeypatch.setattr(runtime.jax, "config", SimpleNamespace(jax_platforms=platforms))
        assert runtime.runs_on_cpu() == (platforms != "cuda")


@pytest.mark.parametrize(
    ("backend", "dtype", "before", "expected"),
    [
        ("tpu", "float32", None, "highest"),
        ("tpu", "float32", "high", "high"),
        ("gpu", "bfloat16", None, None),
        ("cpu", "float32", None, None),
    ],
)
def test_products_of_a_float32_model_are_float32(backend, dtype, before, expected, monkeypatch):
    config = SimpleNamespace(jax_default_matmul_precision=before)
    config.update = lambda name, value: setattr(config, name, value)
    # A backend that is not here.
    monkeypatch.setattr(runtime.jax, "config", config)
    monkeypatch.setattr(runtime.jax, "default_backend", lambda: backend)
    runtime.set_matmul_precision(dtype)
    assert config.jax_default_matmul_precision == expected


VMEM = "--xla_tpu_scoped_vmem_limit_kib=1"


@pytest.mark.parametrize("given", ["", VMEM])
def test_a_tpu_gets_the_options_that_its_compiler_knows(given, tmp_path, monkeypatch):
    """By their names in the library, of whatever release; what the user has set wins."""
    (tmp_path / "libtpu.so").write_bytes(b"\x7fELF\0xla_tpu_scoped_vmem_limit_kib\0xla_tpu_msa_other\0")
    package = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    # A machine with this library.
    monkeypatch.setattr(runtime.importlib.util, "find_spec", lambda name: package if name == "libtpu" else None)
    monkeypatch.setenv("LIBTPU_INIT_ARGS", given)
    for _ in range(2):
        runtime.set_tpu_options()
        assert os.environ["LIBTPU_INIT_ARGS"] == (given or runtime.TPU_OPTIONS[0])


def fetch_on_two_processes() -> None:
    """Asserts that one program fetches all rows, of which each process holds a part, and nothing else."""
    layout, programs, jit = make_layout(DeviceConfig("fsdp")), [], jax.jit

    def listed(f: Callable, **options: NamedSharding) -> Callable:
        return lambda x: programs.append([a.shape for a in x.values()]) or jit(f, **options)(x)

    host = {"loss": np.float32(3), "bins": np.arange(3), "rows": np.arange(8.0).reshape(4, 2), "none": np.zeros((2, 0))}
    with pytest.MonkeyPatch.context() as patch:
        # Lists the shapes that are gathered.
        patch.setattr(jax, "jit", listed)
        fetched = layout.fetch(layout.put(host))
    assert_trees_all_equal(fetched, host)
    assert programs == [[(2, 0), (4, 2)]]


@pytest.mark.slow
def test_values_that_each_process_holds_are_fetched_without_a_program():
    wait(start_processes("from tests.utils.test_hosts import *; fetch_on_two_processes()", 1, num_processes=2))


def train(folder: str, process_id: int, ending: str) -> None:
    """This process's part of a run on two, which process 1 leaves in its third step."""
    argv = [word for name, value in (FLAGS | {"save_dir": folder}).items() for word in (f"--{name}", str(value))]
    collect = grpo.collect

    def third(*args):
        if process_id == 1 and args[3].step == 2 and ending == "raises":
            raise ZeroDivisionError
        return collect(*args)

    grpo.collect = third
    with ending_together(), user_errors():
        grpo.main(parse(grpo.Config, argv))


ENDED = {"killed": 1, "main killed": 0, "asked": 1}  # by a signal to this process


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["main killed", "raises", "killed", "asked"])
def test_when_one_process_ends_so_do_all(ending, tmp_path):
    """Also when it is process 0, and saved when it was asked to; it takes half a minute where nothing else runs."""
    code = f"from tests.utils.test_hosts import train; train({str(tmp_path)!r}, I, {ending!r})"
    processes = main, other = start_processes(code, num_devices=1, num_processes=2)
    try:
        if ending in ENDED:
            metrics = tmp_path / "metrics.jsonl"
            while not (metrics.exists() and len(metrics.read_text().splitlines()) >= 2):
                assert all(process.poll() is None for process in processes)
                time.sleep(0.1)
            processes[ENDED[ending]].send_signal(signal.SIGTERM if ending == "asked" else signal.SIGKILL)
        first, last = (main, other) if ending == "main killed" else (other, main)
        output = first.communicate(timeout=LIMIT)[0]
        more = last.communicate(timeout=LIMIT)[0]
        assert main.returncode
        assert other.returncode
        if ending == "raises":
            assert "ZeroDivisionError" in output
            assert "process 1 of 2 ends" in output
        if ending == "asked":
            assert main.returncode == other.returncode == 128 + signal.SIGTERM, output + more
            assert "stopped by SIGTERM" in more
            assert "is saved: the same command resumes from there" in more
    finally:
        for process in processes:
            process.kill()


@pytest.mark.slow
def test_slurm_runs_two_processes_as_one_job():
    """A scheduler on this machine; what it says to them is all that they know of each other."""
    done = subprocess.run([ROOT / "tests" / "slurm_loopback.sh", sys.executable], capture_output=True, text=True)
    if done.returncode == 77:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stdout + done.stderr
