"""The command lines of the scripts in runs/ hold."""

import os
import subprocess

import pytest

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
