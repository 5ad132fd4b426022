"""Each command that kvfrans/lmpo's README prints runs after this README's install: with requirements.txt alone."""

import importlib.metadata
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from core.config import Config
from core.eval import EvalCommand
from core.sft import SFTConfig
from tests.helpers import write_one_layer
from tests.local_hub import local_hub, put
from tests.published import published
from utils.settings.arguments import GONE, WERE_ON
from utils.settings.config import parse
from utils.settings.lmpo import LMPO

ROOT = Path(__file__).resolve().parents[1]
TINY = ROOT / "models" / "tiny"
README = next((ROOT.parent / "shared" / "seeds").glob("000*"), None)
BLOCKS = re.findall(r"^```bash\n(.*?)^```", README.read_text() if README else "", re.MULTILINE | re.DOTALL)
LINES = [line.strip() for block in BLOCKS for line in block.splitlines()]
PRINTED = [line for line in LINES if line and not line.startswith(("#", "pip install"))]
QUICK = re.compile(r".*(--wandb_name|gsm8k|deepscaler)|TPU_")  # `make test-all` runs the others
COMMANDS = [line if QUICK.match(line) else pytest.param(line, marks=pytest.mark.slow) for line in PRINTED]

SHORT = "--num_generation_tokens 8 --prompt_length 2048 --num_eval_tasks 2 --num_score_workers 1 "
FURTHER = {  # program: flags that come last, and so win
    "core/grpo.py": SHORT + "--max_steps 1 --groups_per_batch 2 --group_size 2 --ppo_minibatch 0 --max_resampling 1",
    "core/eval.py": SHORT,
    "core/sampling.py": "--num_generation_tokens 8",
}
HIDE = """
import sys
from importlib.machinery import PathFinder

HIDDEN = frozenset({hidden!r})


class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in HIDDEN else super().find_spec(name, path, target)


sys.meta_path[:] = [Finder if finder is PathFinder else finder for finder in sys.meta_path]
"""


def installed_by(file: Path) -> set[str]:
    """Names of the distributions that `pip install -r FILE` brings, of those that are here."""
    lines = [line.partition("#")[0].strip() for line in file.read_text().splitlines()]
    todo = [Requirement(line) for line in lines if line]
    found = set()
    while todo:
        wanted = todo.pop()
        for extra in ("", *wanted.extras):
            name = re.sub(r"[-_.]+", "-", wanted.name).lower()
            if (name, extra) in found:
                continue
            found.add((name, extra))
            try:
                needs = map(Requirement, importlib.metadata.requires(name) or [])
            except importlib.metadata.PackageNotFoundError:  # of a marker that another version has
                continue
            todo += [need for need in needs if not need.marker or need.marker.evaluate({"extra": extra})]
    return {name for name, _ in found}


def hidden_modules() -> list[str]:
    """Modules of this environment that requirements.txt does not bring."""
    brought = installed_by(ROOT / "requirements.txt") | {"pip", "setuptools"}
    return [
        module
        for module, owners in importlib.metadata.packages_distributions().items()
        if not {re.sub(r"[-_.]+", "-", owner).lower() for owner in owners} & brought
    ]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """The environment of a user who installed requirements.txt, and a small model where it has Qwen3-1.7B."""
    folder = tmp_path_factory.mktemp("seed")
    (folder / "hidden").mkdir()
    (folder / "hidden" / "sitecustomize.py").write_text(HIDE.format(hidden=hidden_modules()))
    for name in ("hf/Qwen3-1.7B", "Qwen3-1.7B", "countdown/step60"):
        model = write_one_layer(folder / "checkpoints" / name)
    published(folder / "hub")
    put(folder / "hub", "Qwen/Qwen3-1.7B", {path.name: path.read_bytes() for path in model.iterdir()})
    asked = []
    with local_hub(folder / "hub", asked) as env:
        names = {
            "HOME": str(folder),
            "PYTHONPATH": str(folder / "hidden"),
            "NETRC": os.devnull,
        }
        yield {name: value for name, value in env.items() if not name.startswith("WANDB")} | names


def run(command: str, env: Mapping[str, str], *further: str) -> subprocess.CompletedProcess:
    words = shlex.split(command)
    program = words.index("python")
    settings = dict(word.split("=", 1) for word in words[:program])
    paths = [word.replace("~", env["HOME"]) for word in words[program + 1 :]]
    paths += FURTHER.get(paths[0], "").split() + list(further)
    return subprocess.run(
        [sys.executable, *paths], cwd=ROOT, env=env | settings, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )


@pytest.mark.skipif(not README, reason="needs the README of kvfrans/lmpo in ../shared/seeds")
@pytest.mark.parametrize("command", COMMANDS or [""])
def test_a_printed_command_runs(command, home, tmp_path):
    is_training = "core/grpo.py" in command
    done = run(command, home, *(["--save_dir", str(tmp_path / "run")] if is_training else []))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert "HTTP Request" not in done.stderr
    if is_training:
        records = list(map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()))
        assert records[-1]["global_step"] == 1
        assert (tmp_path / "run" / "step1" / "model.safetensors").exists()
        assert bool(list(tmp_path.glob("run/wandb/offline-run-*"))) == ("--wandb_name" in command)
        found = "step 1, held out: prompt" in done.stdout
        assert found == any("test_env/return" in record for record in records)


@pytest.mark.parametrize("config", [Config, SFTConfig, EvalCommand])
def test_a_flag_that_is_gone_is_refused_with_the_reason(config, tmp_path, capsys):
    """By all commands, and in a preset; in a config.json it may have been off."""
    file = tmp_path / "config.json"
    for flag, advice in GONE.items():
        file.write_text(json.dumps({flag: "" if flag in WERE_ON else "x"}))
        for argv in ([f"--{flag}", "1"], [f"--{flag.replace('_', '-')}=1"], ["--config", str(file)]):
            with pytest.raises(SystemExit, match="^2$"):
                parse(config, argv)
            assert re.search(rf"there is no option (--)?{flag}: {re.escape(advice)}", capsys.readouterr().err)
    unchanged = dict.fromkeys(GONE, "") | dict.fromkeys(WERE_ON, True)
    file.write_text(json.dumps(unchanged | ({"data": "rows.jsonl"} if config is SFTConfig else {})))
    assert parse(config, ["--config", str(file)])


@pytest.mark.parametrize("name", ["wandb_project", "wandb_name", "wandb_group"])
def test_the_names_of_wandb_are_taken(name):
    assert getattr(parse(Config, [f"--{name}", "Default"], spellings=LMPO).run, name) == "Default"


def test_a_pickle_of_kvfrans_lmpo_is_refused(home, tmp_path):
    shutil.copytree(TINY, tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").rename(tmp_path / "model" / "params.pkl")
    done = run(f"python core/grpo.py --env_name poem --model_dir {tmp_path / 'model'}", home)
    assert done.returncode == 2
    assert "params.pkl is a pickle, which could run code" in done.stderr
