"""The command lines of the scripts in runs/ hold, those for clusters too."""

import os
import re
import subprocess

import pytest
import yaml

from core.config import Config
from envs import ENVS, parse_environments
from tests.helpers import ROOT
from utils.settings.config import parse

SCRIPTS = sorted(path for path in (ROOT / "runs").glob("*.sh") if path.stem not in ("slurm", "tpu_pod"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_trains_with_flags_that_hold_and_passes_more(script, tmp_path):
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\nprintf "%s\\n" python "$@"\n')
    python.chmod(0o755)
    env = os.environ | {"PYTHON": str(python), "GSM8K_DIR": str(tmp_path)}
    command = ["bash", script, "--seed", "7"]
    said = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    commands = [command.splitlines() for command in said.stdout.split("python\n")]  # others make data, or evaluate
    trained = [flags for program, *flags in filter(None, commands) if program == "core/grpo.py"]
    assert len(trained) == 1 + (script.stem == "ladder"), "which samples by a run of its own"
    flags = trained[-1]
    config = parse(Config, flags)
    assert config.seed == 7
    test_env_name = config.held_out.test_env_name
    tests = [name for name, _ in parse_environments(test_env_name).values()]
    assert tests, "a result needs held-out problems"
    assert {f"{config.env.env_name}-test", *tests} <= {f"{name}-test" for name in ENVS}


CLUSTERS = {  # file, where it holds what each node runs
    "kubernetes": lambda job: job["spec"]["trainer"]["args"][0],
    "sky": lambda task: task["run"],
}


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_a_node_of_a_cluster_joins_the_others_with_flags_that_hold(cluster):
    """tests/utils/test_hosts.py runs two processes that are told of each other by these variables."""
    node = CLUSTERS[cluster](yaml.safe_load((ROOT / f"runs/{cluster}.yaml").read_text()))
    node = re.sub(r"^.*(cd /shared|-m venv|pip install).*\n", "", node, flags=re.MULTILINE)
    joined = 'env "$JAX_COORDINATOR_ADDRESS,$JAX_NUM_PROCESSES,$JAX_PROCESS_ID"'
    node = re.sub(r"exec \S+/python", f"echo {joined}", node)
    sky = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"}
    env = os.environ | sky | {"BUCKET": "gs://b"} if cluster == "sky" else os.environ
    said = subprocess.run(["bash", "-ec", node], env=env, capture_output=True, text=True, check=True).stdout
    _, variables, program, *flags = said.split()
    config = parse(Config, flags)
    assert variables == ("10.0.0.1:8476,2,1" if cluster == "sky" else ",,"), "Kubeflow sets them"
    assert program == "core/grpo.py"
    assert config.run.save_interval == 10
    assert config.run.save_dir in ("/shared/runs/deepscaler", "gs://b/deepscaler")
