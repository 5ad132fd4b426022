"""Python in processes of its own, which see several CPU devices or are one job; and whether processes are gone."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

from tests.kill_runs import ROOT, virtual_devices


def on_four_devices(test_file: str, call: str) -> None:
    """Evaluates `call` with the names of a test file, in a process that sees four CPU devices."""
    module = ".".join(Path(test_file).relative_to(ROOT).with_suffix("").parts)
    code = f"from {module} import *; {call}"
    env = os.environ | virtual_devices(4) | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def start_processes(code: str, num_devices: int, num_processes: int = 1) -> list[subprocess.Popen]:
    """Python with the tests' names in processes of so many CPU devices, of one job; `code` knows I, its number."""
    env = os.environ | virtual_devices(num_devices) | {"PYTHONPATH": str(ROOT)}
    if num_processes > 1:
        with socket.socket() as free:
            free.bind(("localhost", 0))
            env["JAX_COORDINATOR_ADDRESS"] = f"localhost:{free.getsockname()[1]}"
        env["JAX_NUM_PROCESSES"] = str(num_processes)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    processes = []
    for i in range(num_processes):
        own = env | {"JAX_PROCESS_ID": str(i)} if num_processes > 1 else env
        processes.append(subprocess.Popen([sys.executable, "-c", f"I = {i}\n{code}"], env=own, **pipes))
    return processes


def wait(processes: list[subprocess.Popen], timeout: float = 600) -> None:
    """Waits for the ends of processes, which must be good."""
    try:
        outputs = [process.communicate(timeout=timeout)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert not any(process.returncode for process in processes), "\n".join(outputs)


def is_alive(pid: int) -> bool:
    """Whether the process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_gone(*pids: int, seconds: float = 5) -> None:
    deadline = time.monotonic() + seconds
    while any(map(is_alive, pids)):
        assert time.monotonic() < deadline, f"still there: {[pid for pid in pids if is_alive(pid)]}"
        time.sleep(0.05)
