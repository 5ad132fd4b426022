"""Commands of bench/: each starts and prints its help; on its smallest size each runs to its end."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FILES = [file for file in sorted((ROOT / "bench").glob("*.py")) if not file.name.startswith("test_")]
COMMANDS = [file for file in FILES if '__name__ == "__main__"' in file.read_text("utf-8")]
HELP = """
import contextlib, io, json, runpy, sys, traceback

found = {}
for file in sys.argv[1:]:
    sys.argv, out = [file, "--help"], io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            runpy.run_path(file, run_name="__main__")
            code = 0
        except SystemExit as end:
            code = end.code
        except BaseException:
            code = traceback.format_exc()
    found[file] = code, out.getvalue()
print(json.dumps(found))
"""
SHAPE = "--shape tiny --prompt_tokens 8 --repeats 1"
ROWS = "--groups_per_batch 2 --group_size 2 --num_generation_tokens 8"
TINY_RUN = "--max_steps 1 --groups_per_batch 2 --group_size 2 --ppo_minibatch 0 --num_generation_tokens 16"
SMALLEST = {  # options of each command; FOLDER: an empty one
    "ab": f"--dir FOLDER --seeds 3 --a= --b=--lr=1e-3 --config configs/demo.py {TINY_RUN} --num_eval_tasks 4",
    "agents": "--env countdown --model_dir models/tiny --groups 2 --samples 2 --slots 4 --tokens 16",
    "bitwise": f"--model_dirs {ROOT}/tests/fixtures/qwen3-tied --dtypes float32 --rows 64 --num_generation_tokens 8",
    "compiled": "--target v5e --models 0.6B --devices 1 --layers 1,2",
    "device_checks": "--shape tiny --layers 1 --vocabulary 512",
    "endpoint": "",
    "families": "--num_models 1",
    "gyms": "",
    "minimal_compiled": "",
    "minutes": "FOLDER/run",
    "objectives": "--dir FOLDER --short",
    "peers": f"--work rollout,update,step,turns,turns_step --turns 2 --peers= --warmup 1 {SHAPE} {ROWS}",
    "quarter_hour": "run FOLDER/run",
    "rewards_of_others": "",
    "roofline": f"{SHAPE} {ROWS} --slots 4,2 --pages -1,8 --kernels 1",
    "rows": "--model_dir models/tiny",
    "scaling": "--devices 1 --tokens 64 --rows 1",
    "serving": "--conversations 2 --tokens 8 --repeats 1",
    "side": "lmpo VARIANT",
    "templates": f"--folders TRL/chat_templates {ROOT.parent}/shared/audit/correct/templates --tokenizer models/tiny",
    "train_step": f"{SHAPE} {ROWS}",
    "trl_losses": "",
    "trl_sft": "",
}
NEEDS = {  # packages that are not installed for tests
    "compiled": ("libtpu",),
    "endpoint": ("openai", "smolagents", "minisweagent"),
    "families": ("torch",),
    "gyms": ("gem", "textarena", "gymnasium", "skyrl_gym", "openenv"),
    "minimal_compiled": ("jax_plugins",),
    "trl_losses": ("torch", "trl"),
    "trl_sft": ("torch", "trl", "datasets"),
    "templates": ("trl",),
}


def test_every_command_prints_its_help():
    command = [sys.executable, "-c", HELP, *map(str, COMMANDS)]
    found = json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout)
    absent = ("PyTorch", "torch", "TRL")
    for file, (code, text) in found.items():
        needs_more = any(word in f"{code}{text}" for word in absent) and Path(file).stem in NEEDS
        first_line = Path(file).read_text("utf-8").splitlines()[0].removeprefix('"""')
        assert needs_more or code in (0, None) and first_line[:40] in " ".join(text.split()), f"{file}: {code}\n{text}"


def test_every_command_has_a_smallest_size():
    assert SMALLEST.keys() == {file.stem for file in COMMANDS}


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALLEST)
def test_command_runs_on_its_smallest_size(name, tmp_path):
    for package in NEEDS.get(name, ()):
        if find_spec(package) is None:
            pytest.skip(f"needs {package}, which is not installed for tests")
    if name == "templates" and not (ROOT.parent / "shared").is_dir():
        pytest.skip("needs the files of ../shared")
    if name == "side":
        pytest.skip("is started by peers")
    (tmp_path / "run").mkdir()
    (tmp_path / "run/metrics.jsonl").write_text('{"global_step": 1, "test_env/correct_answer": 1, "times/run": 60}\n')
    (tmp_path / "run/config.json").write_text('{"run": {}}')
    options = SMALLEST[name].replace("FOLDER", str(tmp_path)).split()
    if name == "templates":
        options = [option.replace("TRL", str(Path(find_spec("trl").origin).parent)) for option in options]
    command = [sys.executable, f"bench/{name}.py", *options]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "|" in done.stdout, done.stdout
