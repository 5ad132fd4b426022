"""What runs/kubernetes.yaml and runs/sky.yaml run on each node trains on two processes, and resumes."""

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from core.config import Config
from tests.helpers import ROOT, slow
from tests.kill_runs import FLAGS, arguments, records, virtual_devices
from utils.settings.config import parse

JOB, SKY = (yaml.safe_load((ROOT / f"runs/{name}.yaml").read_text()) for name in ("kubernetes", "sky"))
CLUSTERS = {"kubernetes": JOB["spec"]["trainer"]["args"][0], "sky": SKY["run"]}  # what each node runs


def node_script(cluster: str, flags: list[str]) -> str:
    """Returns what a node runs, with this Python and these flags last, and without what it installs."""
    script = re.sub(r"^.*(-m venv|pip install).*\n", "", CLUSTERS[cluster], flags=re.MULTILINE)
    script = re.sub(r"\S+/venv/bin/python|\.venv/bin/python", shlex.quote(sys.executable), script)
    return script.replace("cd /shared/lmpo", f"cd {shlex.quote(str(ROOT))}").rstrip() + " " + shlex.join(flags)


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_flags_of_a_cluster_hold(cluster):
    script = node_script(cluster, ["--max_steps", "3"]).replace(shlex.quote(sys.executable), "echo")
    env = os.environ | {"SKYPILOT_NUM_NODES": "1", "BUCKET": "gs://b"}
    said = subprocess.run(["bash", "-ec", script], cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    program, *flags = said.stdout.split()
    config = parse(Config, flags)
    assert program == "core/grpo.py"
    assert (config.max_steps, config.run.save_interval) == (3, 10)
    assert config.run.save_dir in ("/shared/runs/deepscaler", "gs://b/deepscaler")


def variables_of(cluster: str, rank: int, port: int) -> dict[str, str]:
    """Returns the variables that a cluster of two nodes sets on one of them."""
    if cluster == "sky":
        ranks = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": str(rank), "BUCKET": "unused"}
        return ranks | {"SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.1"}
    processes = {"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": str(rank), "JOB_COMPLETION_INDEX": str(rank)}
    return processes | {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}"}


def start_nodes(cluster: str, flags: list[str]) -> list[subprocess.Popen]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = ["bash", "-ec", node_script(cluster, flags).replace(":8476", f":{port}")]
    env = os.environ | virtual_devices(1)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return [
        subprocess.Popen(command, cwd=ROOT, env=env | variables_of(cluster, rank, port), **pipes) for rank in (0, 1)
    ]


def wait_for(is_done: Callable[[], bool], nodes: list[subprocess.Popen]) -> None:
    while not is_done():
        assert all(node.poll() is None for node in nodes), nodes[0].communicate()[0]
        time.sleep(0.1)


@pytest.mark.parametrize("cluster", slow(*CLUSTERS))
def test_two_nodes_of_a_cluster_end_together_and_resume(cluster, tmp_path):
    """By SIGTERM to both, as a cluster ends pods and machines; the same command starts them again."""
    run = tmp_path / "run"
    flags = arguments(**FLAGS | {"save_dir": run, "max_steps": 4000, "env_name": "poem", "save_interval": 0})
    nodes = start_nodes(cluster, flags)
    try:
        wait_for(lambda: (run / "metrics.jsonl").exists() and len(records(run)) >= 2, nodes)
        for node in nodes:
            node.send_signal(signal.SIGTERM)
        said = [node.communicate(timeout=300)[0] for node in nodes]
        assert [node.returncode for node in nodes] == [128 + signal.SIGTERM] * 2, said
        (saved,) = (int(path.name) for path in Path(run / "state").iterdir() if path.name.isdecimal())
        nodes = start_nodes(cluster, [*flags, "--max_steps", str(saved + 1)])
        said = [node.communicate(timeout=300)[0] for node in nodes]
        assert [node.returncode for node in nodes] == [0, 0], said
        assert records(run)[-1]["global_step"] == saved + 1
    finally:
        for node in nodes:
            node.kill()
