"""Settings of JAX and the C library before the first array: compilation cache, freed memory, open files."""

import contextlib
import ctypes
import functools
import glob
import importlib.util
import mmap
import os
import resource
import sys
from collections.abc import Sequence
from pathlib import Path

import jax

MANY_FILES = 1024  # open at a time
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -3, -4, -8  # of glibc's malloc.h
ACCELERATORS = ("accel[0-9]*", "vfio/[0-9]*", "nvidia[0-9]*", "dxg", "kfd")  # in /dev: TPU, NVIDIA (WSL: dxg), AMD
LARGE = 1 << 30  # bytes: what is larger goes back to the system when it is freed
SMALL = 1 << 24  # bytes of a model whose temporaries take less than the 64 MiB that any arena of malloc can keep
NUM_ARENAS = 16  # of a SMALL model, at most: enough that no two threads that compile share one
TPU_OPTIONS = ("--xla_tpu_scoped_vmem_limit_kib=32768", "--xla_tpu_msa_inefficient_use_to_copy_ratio=0.9")
CPU_OPTIONS = ("--xla_backend_optimization_level=1",)  # of LLVM: programs are as fast, and compile a tenth faster


def prepare(model_dir: str = "") -> None:
    """Keeps compiled programs in the user's cache, and, if there is no accelerator, freed memory in the process.

    JAX_COMPILATION_CACHE_DIR names another folder, JAX_ENABLE_COMPILATION_CACHE=0 keeps nothing. A small model in
    `model_dir` is compiled faster. A preset may call this before the command does.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MANY_FILES if hard == resource.RLIM_INFINITY else min(hard, MANY_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    if jax.config.jax_enable_compilation_cache:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        if not jax.config.jax_compilation_cache_dir:
            keep_programs(Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "lmpo")
    set_tpu_options()
    if runs_on_cpu():
        add_options("XLA_FLAGS", CPU_OPTIONS)
        if sys.platform == "linux":
            keep_memory(model_dir)


@functools.cache  # so that it warns once
def keep_programs(folder: Path) -> None:
    """Makes `folder` the cache of compiled programs; one that cannot be written is named, and there is none."""
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    if os.access(folder, os.W_OK):  # otherwise JAX warns of each program
        jax.config.update("jax_compilation_cache_dir", str(folder))
    else:
        advice = "name a folder for compiled programs in JAX_COMPILATION_CACHE_DIR"
        print(f"warning: {folder} cannot be written, so each start compiles anew: {advice}", file=sys.stderr)


def set_tpu_options() -> None:
    """Gives fusions up to 32 MiB of a TPU's VMEM, and keeps only arrays there that are read more than copied.

    Without the second one, on v5e, each decode step brings the KV cache of a layer to VMEM, adds a token, and writes
    all of it back. An option that the installed library does not know would end the process, so it is left out.
    """
    if package := importlib.util.find_spec("libtpu"):
        library = Path(package.origin).with_name("libtpu.so")
        with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as code:
            known = [option for option in TPU_OPTIONS if code.find(f"{option[2:].split('=')[0]}\0".encode()) >= 0]
        add_options("LIBTPU_INIT_ARGS", known)


def add_options(variable: str, options: Sequence[str]) -> None:
    """Adds options to a variable of the environment; those that the user has set there win."""
    given = os.environ.get(variable, "")
    missing = [option for option in options if option.split("=")[0] not in given]
    os.environ[variable] = " ".join([*missing, given]).strip()


def runs_on_cpu(devices: Path = Path("/dev")) -> bool:
    """True if JAX will compute on the CPU: it was told to, or there is no accelerator, or no plugin for one."""
    if jax.config.jax_platforms:
        return jax.config.jax_platforms.startswith("cpu")
    has_plugin = any(map(importlib.util.find_spec, ("jax_plugins", "libtpu")))
    return not has_plugin or not any(path for name in ACCELERATORS for path in devices.glob(name))


def cuda_capability(device: jax.Device | None) -> float:
    """Returns the compute capability of an NVIDIA GPU; 0: it is another device, or none (AMD's are names)."""
    text = str(getattr(device, "compute_capability", ""))
    return float(text) if text.replace(".", "").isdigit() else 0.0


def keep_memory(model_dir: str) -> None:
    """Keeps freed memory for temporaries of the next program: zeroing fresh pages took 40% of an update on two cores.

    LARGE temporaries are excepted: smaller arrays would take the space of a freed one, and the heap would grow (with
    135M parameters an update peaked at 9 GB, now at 5). A SMALL model gets several arenas, since threads that compile
    wait for one another at the lock of one; larger temporaries would be fresh pages in all but the first.
    """
    files = glob.glob(f"{glob.escape(os.path.expanduser(model_dir))}/model*.safetensors")
    num_bytes = sum(os.path.getsize(file) for file in files if os.path.isfile(file))
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # not in every C library
        libc.mallopt(M_ARENA_MAX, NUM_ARENAS if 0 < num_bytes < SMALL else 1)
        libc.mallopt(M_TRIM_THRESHOLD, -1)
        if not libc.mallopt(M_MMAP_THRESHOLD, LARGE):  # which older releases of glibc refuse
            libc.mallopt(M_MMAP_MAX, 0)


def set_matmul_precision(dtype: str) -> None:
    """Makes products of a float32 model exact to float32; a precision that the user has set is kept.

    By default TPUs multiply float32 matrices in one pass of bfloat16, and NVIDIA GPUs in TF32; CPUs in float32.
    """
    is_set = jax.config.jax_default_matmul_precision is not None
    if dtype == "float32" and jax.default_backend() != "cpu" and not is_set:
        jax.config.update("jax_default_matmul_precision", "highest")
