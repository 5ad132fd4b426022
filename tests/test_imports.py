"""The import law of the house, and what importing a file must not do."""

import ast
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from envs import ENVS
from utils.settings import packages

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("core", "envs", "models", "utils", "configs", "bench", "runs", "extras", "recipes")
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for package in PACKAGES
    for path in sorted((ROOT / package).rglob("*.py"))
    if not path.name.startswith("test_")
}

# The law of the house: what the files of a room may import of the project, its own room included; the longest name of a
# room counts. core/ is listed from below to above.
BELOW = ("models", "utils")
TASKS = ("utils.files", "utils.processes", "utils.settings")  # all that environments take of the program
LAW = {
    "utils": ("utils",),
    "utils.metrics": ("utils.metrics", "utils.files", "utils.settings"),
    "models": BELOW,
    "core.records": ("envs.base", *BELOW),
    "core.terms": ("core.terms", "core.records", *BELOW),
    "core.objectives": ("core.terms", "core.records", *BELOW),
    "core.advantages": ("core.objectives", "core.terms", "core.records", *BELOW),
    "core.learner": ("core.advantages", "core.objectives", "core.terms", "core.records", *BELOW),
    "core.slots": ("core.slots", "core.records", *BELOW),
    "core.sampler": ("core.slots", "core.records", *BELOW),
    "core.chains": ("core.chains", "core.sampler", "core.terms", "core.records", "envs", *BELOW),
    "core.rollout": ("core.chains", "core.sampler", "core.records", "envs", *BELOW),
    "core.config": ("core.advantages", "core.objectives", "core.sampler", "core.terms", "envs", *BELOW),
    "core.run": ("core.run", "core.rollout", "core.records", "envs", *BELOW),
    "core.chat": ("core.chat", "core.chains", "core.sampler", "envs", *BELOW),
    "core.minimal": (),
    "core.extensions": (
        *("core.extensions", "core.run", "core.chains", "core.terms", "core.records", "core.objectives"),
        *("core.advantages", "core.learner", "core.sampler", "core.rollout", "core.config", "envs", *BELOW),
    ),
    "core": ("core", "envs", *BELOW),  # the commands: grpo, eval, sampling, sft
    "envs": ("envs", *TASKS),
    "envs.grading": ("envs.grading", *TASKS),
    "envs.base": ("envs.grading", *TASKS),
    "envs.data": ("envs.data", "envs.base", "envs.grading", *TASKS),
    "envs.tools": ("envs.tools", "envs.data", "envs.base", "envs.grading", *TASKS),
    "recipes": ("recipes", "envs", *TASKS),  # environments, named in envs/__init__.py
    "recipes.games.make_player": ("recipes.games", "runs", "envs", *BELOW),
    "recipes.games.preset": ("configs",),
    "recipes.preferences": ("recipes.preferences", "core", "envs", *BELOW),
    "recipes.agents": ("recipes.agents", "core", "envs", *BELOW),
    "recipes.agents.agent": ("recipes.agents.keeper", "envs", *TASKS),
    "recipes.agents.keeper": ("envs", *TASKS),  # a process that does not start JAX, as that of the environment
    "recipes.agents.preset": ("recipes.games",),
    "recipes.offline": ("recipes.offline", "core", "envs", *BELOW),
    "configs": ("configs", "utils.devices.startup", "utils.settings.errors"),  # to choose by the device that is found
    "extras": ("extras", "core", "envs", *BELOW),
    "runs": ("runs", "core", "envs", *BELOW),
    "bench": ("bench", "extras", "recipes", "runs", "core", "envs", *BELOW),
}
NUMERICAL = {"flax", "jax", "jaxlib", "optax", "orbax"}  # which envs/ never imports: its processes start in no time


def within(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


def imports(path: Path) -> set[str]:
    """Returns the modules that a file imports, anywhere in it; `from core import eval` is core.eval."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import; packages here have plain names"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in FILES else node.module for name in names}
    return found


def run(code: str) -> str:
    """What a fresh interpreter prints, in the repository, with arguments that are no flags of ours."""
    command = [sys.executable, "-B", "-c", code, "--no_such_flag=1", "no-such-file"]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    return process.stdout


def room(name: str) -> str:
    """Returns the room of a file: the longest name in LAW that its own begins with."""
    return max((prefix for prefix in LAW if within(name, prefix)), key=len)


def faults(files: dict[str, Path]) -> list[str]:
    """Returns the imports that the law does not allow, as "file -> file", those within functions too.

    Only commands, and measurements, import commands: files that can be run.
    """
    commands = {name for name, path in files.items() if "\nif __name__ ==" in path.read_text(encoding="utf-8")}
    found = []
    for name, path in files.items():
        for module in sorted(imports(path)):
            is_ours = module.split(".")[0] in PACKAGES
            is_lawful = any(within(module, prefix) for prefix in LAW[room(name)])
            is_command = module in commands and name not in commands and not within(name, "bench")
            has_jax = room(name).split(".")[0] not in ("envs", "recipes") or "models" in LAW[room(name)]
            starts_jax = not has_jax and module.split(".")[0] in NUMERICAL
            if is_ours and (not is_lawful or is_command) or starts_jax:
                found.append(f"{name} -> {module}")
    return found


def test_no_import_runs_back_up():
    assert faults(FILES) == []
    TopologicalSorter({name: imports(path) & FILES.keys() for name, path in FILES.items()}).prepare()  # or CycleError


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("core.terms.critic", "from core.learner import Learner"),
        ("core.sampler", "def late():\n    from core.chains.turns import Conversations"),
        ("core.extensions.teacher", "from core import grpo"),
        ("envs.poem", "import jax.numpy"),
        ("utils.metrics.health", "from utils.reporting.page import PANELS"),
    ],
)
def test_a_wrong_import_is_found(name, line, tmp_path):
    wrong = tmp_path / "wrong.py"
    wrong.write_text(f"{FILES[name].read_text(encoding='utf-8')}\n\n{line}\n")
    assert [fault.partition(" ")[0] for fault in faults(FILES | {name: wrong})] == [name]


def test_environments_of_recipes_are_named_and_not_imported():
    """envs/__init__.py imports its environments by name, so that recipes are found though nothing imports them."""
    modules = {module for module, _, _ in ENVS.values()}
    assert modules <= FILES.keys()
    assert {room(module).split(".")[0] for module in modules} == {"envs", "recipes"}


def test_name_of_a_class_has_one_meaning():
    """It is defined in one file of the house, and others import it; minimal.py stands alone."""
    names = []
    for module, path in FILES.items():
        if module.split(".")[0] in ("core", "models", "utils", "envs", "extras") and module != "core.minimal":
            nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            names += {node.name for node in nodes if isinstance(node, ast.ClassDef)}
    assert "Decoder" in names
    assert {name for name in names if names.count(name) > 1} == set()


TEST_FOLDERS = ("tests", "bench", "extras", "recipes")
TESTS = {path: path.read_text("utf-8").splitlines() for name in TEST_FOLDERS for path in (ROOT / name).rglob("*.py")}
FROM_TEST_FILE = re.compile(r"\s*(from|import) ([\w.]+ import )?[\w., ]*\btest_\w+")


def test_no_file_imports_a_test_file():
    """What tests share stands in modules of its own; tests/oracles/ has what they compare with."""
    lines = [line for lines in TESTS.values() for line in lines if "from envs import" not in line]
    assert [line for line in lines if FROM_TEST_FILE.match(line)] == []


def requirements(file: str) -> set[str]:
    """Names of packages in a requirements file."""
    return set(re.findall(r"^[\w.-]+", (ROOT / file).read_text(), re.MULTILINE))


def test_every_requirement_is_imported():
    modules = {module.split(".")[0] for path in FILES.values() for module in imports(path)}
    packages = importlib.metadata.packages_distributions()
    imported = {package.replace("_", "-").lower() for module in modules for package in packages.get(module, [])}
    unused = {name for name in requirements("requirements.txt") if name.replace("_", "-").lower() not in imported}
    assert unused == {"jaxlib", "jinja2"}, "which jax and transformers import"


def test_the_project_table_reads_the_requirements():
    """setuptools reads names and ranges only, no `-r other-file`: tests repeat what environments need."""
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())
    dynamic = table["tool"]["setuptools"]["dynamic"]
    extras = dynamic["optional-dependencies"]
    files = dynamic["dependencies"]["file"], extras["envs"]["file"], extras["test"]["file"]
    assert files == ("requirements.txt", "requirements-envs.txt", "requirements-test.txt")
    assert not re.search("^-", "".join((ROOT / file).read_text() for file in files), re.MULTILINE)
    assert requirements(files[1]) <= requirements(files[2])
    assert table["project"]["requires-python"] == f">={'.'.join(map(str, packages.PYTHON))}"


def test_user_without_a_home_has_the_current_folder():
    """Neither HOME nor an entry in the list of users, as in a container."""
    code = "import os, pwd; del os.environ['HOME']; pwd.getpwuid = {}.__getitem__; import utils.settings.packages\n"
    assert run(f"{code}print(os.path.expanduser('~/x'))") == f"{ROOT}/x\n"


def test_no_package_takes_the_name_of_a_standard_module():
    assert not {part for name in FILES for part in name.split(".")} & sys.stdlib_module_names
    assert not (ROOT / "__init__.py").exists(), "the root is no package"


def test_envs_import_no_jax_and_no_environment_early():
    modules = [name for name in FILES if within(name, "envs")]
    code = (
        "import sys, importlib, envs\n"
        "assert not {'envs.countdown', 'envs.gsm8k'} & set(sys.modules), 'the table imports lazily'\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        "assert not {'jax', 'flax', 'transformers', 'core', 'models'} & set(sys.modules)\n"
        "assert not {'math_verify', 'huggingface_hub', 'reasoning_gym', 'pyarrow'} & set(sys.modules)\n"
    )
    run(code)


COMMANDS = ("core/grpo", "core/eval", "core/sampling", "core/sft", "core/dpo", "extras/population")
WRONG_OPTION = """
import gc, runpy, sys

collections = []
gc.callbacks.append(lambda phase, info: collections.append(phase))
for command in COMMANDS:
    try:
        runpy.run_path(f"{command}.py", run_name="__main__")
    except SystemExit as end:
        print(end.code, gc.isenabled(), gc.get_freeze_count() > 100_000, len(collections) < 20)
        gc.unfreeze()
print(sorted(LATE & set(sys.modules)))
"""


def test_wrong_option_is_told_before_slow_imports():
    """Options are read after the imports, in which nothing is garbage."""
    late = {"transformers", "matplotlib", "plotly", "orbax.checkpoint", "huggingface_hub", "flax", "wandb", "yaml"}
    late |= {"pyarrow", "math_verify", "sympy"}
    output = run(WRONG_OPTION.replace("LATE", repr(late)).replace("COMMANDS", repr(COMMANDS)))
    assert output == len(COMMANDS) * "2 True True True\n" + "[]\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_without_packages_says_what_to_install(command):
    arguments = [sys.executable, "-B", "-S", f"{command}.py"]  # -S: without site-packages
    done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: jax is not installed")
    assert "make demo" in done.stderr


CHECKED = [path for path in FILES.values() if "import utils.settings.packages" in path.read_text("utf-8")]


@pytest.mark.parametrize("command", ["core/sft.py", "models/hf_to_jax.py"])
def test_command_names_a_package_of_another_version(command, tmp_path):
    """Before it is imported: the folder that stands for it is empty."""
    (tmp_path / "jax-0.6.1.dist-info").mkdir()
    (tmp_path / "jax-0.6.1.dist-info" / "METADATA").write_text("Name: jax\nVersion: 0.6.1\n")
    environment = os.environ | {"PYTHONPATH": tmp_path}
    done = subprocess.run([sys.executable, command], cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: jax 0.6.1 is installed, and >=0.10,<0.12 is needed: `make demo`, or `pip")


def test_versions_are_compared_as_numbers(monkeypatch):
    expected = {"0.9.2": True, "0.10": False, "0.10.2rc1": False, "0.11.9": False, "0.12.0": True}
    text = (ROOT / "requirements.txt").read_text()
    for version, is_wrong in expected.items():
        versions = {"jax": version}
        with monkeypatch.context() as patched:
            installed = packages.metadata.version
            patched.setattr(packages.metadata, "version", lambda name: versions.get(name) or installed(name))  # noqa: B023
            assert bool(packages.find_wrong(text)) == is_wrong


OLD_PYTHON = "import runpy, sys; sys.version_info = (3, 8, 18); runpy.run_path(sys.argv[1], run_name='__main__')"


@pytest.mark.parametrize("file", CHECKED, ids=lambda file: str(file.relative_to(ROOT)))
def test_old_python_parses_a_command_and_reads_which_is_needed(file):
    for source in (file, ROOT / "utils/settings/packages.py"):
        ast.parse(source.read_text("utf-8"), feature_version=(3, 8))
    if file.parent.name in ("core", "extras", "models"):
        command = [sys.executable, "-S", "-c", OLD_PYTHON, file]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
        assert done.stderr.startswith("error: this is Python 3.8.18, and lmpo needs 3.11 or newer: ")


IMPORT_ALL = """
import importlib.util, json, sys
from pathlib import Path

opened, faults = [], {}
sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" else None)
root = str(Path.cwd())
for name, path in json.loads(FILES):
    opened.clear()
    try:
        if path.split("/")[0] in ("core", "envs", "extras", "models", "recipes", "utils"):
            importlib.import_module(name)
        else:
            spec = importlib.util.spec_from_file_location(name, path)
            spec.loader.exec_module(importlib.util.module_from_spec(spec))
    except BaseException as error:
        others = isinstance(error, ModuleNotFoundError) and error.name.split(".")[0] in ("peft", "torch", "trl")
        if not (others and path.startswith("bench/")):  # what a measurement compares with is not installed for tests
            faults[name] = f"{type(error).__name__}: {error}"
        continue
    files = [f for f in opened if f.startswith(root) and "/.venv/" not in f and not f.endswith((".py", ".pyc"))]
    files = [] if name == "utils.settings.packages" else files  # it reads requirements.txt
    if files:
        faults[name] = f"opens {files}"
    if "absl.flags" in sys.modules and sys.modules["absl.flags"].FLAGS.is_parsed():
        faults[name] = "parses flags"
    if "jax._src.xla_bridge" in sys.modules and sys.modules["jax._src.xla_bridge"]._backends:
        faults[name] = "initializes a JAX backend"
        break
print(json.dumps(faults))
"""


def test_importing_a_file_does_nothing():
    files = [(name, path.relative_to(ROOT).as_posix()) for name, path in FILES.items()]
    output = run(IMPORT_ALL.replace("FILES", repr(json.dumps(files))))
    assert json.loads(output.splitlines()[-1]) == {}


# Budgets: sizes that may fall and must not rise. Whoever adds lines takes others away; whoever takes away lowers them.
BUDGETS = {
    "lines of the main floor": 23774,
    "lines that core/grpo.py reaches": 15986,
    "files that core/grpo.py reaches": 96,
    "lines of tests": 25067,
    "lines of bench": 5692,
    "lines of Python": 63106,
    "options": 131,
    "lines of the longest class": 248,
}
LOADED = {"files": 113, "lines": 16630}  # of the house, by a run of a step with evaluation and saving


def num_lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def runs_on_import(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that run when a file is imported: not those of functions, of a command or for type checkers."""
    for node in body:
        if isinstance(node, ast.If):
            if not re.search("__main__|TYPE_CHECKING", ast.unparse(node.test)):
                yield from runs_on_import(node.body + node.orelse)
        elif isinstance(node, ast.Try | ast.With):
            yield from runs_on_import(node.body)
        elif not isinstance(node, ast.FunctionDef):
            yield node


def reach(name: str) -> set[str]:
    """Returns the other files of ours that are imported when a file is, with the packages that they lie in."""
    seen, queue = {name}, [name]
    while queue:
        for node in runs_on_import(ast.parse(FILES[queue.pop()].read_text(encoding="utf-8")).body):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                modules = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            new = {module for module in modules if module in FILES} - seen
            seen |= new
            queue += new
    return seen - {name}


def sizes() -> dict[str, int]:
    """Returns the sizes that BUDGETS bounds."""
    every = [path for path in ROOT.rglob("*.py") if not path.relative_to(ROOT).parts[0].startswith(".")]
    tests = [path for path in every if path.name.startswith("test_") or "tests" in path.relative_to(ROOT).parts]
    scripts = [path for path in (ROOT / "bench").glob("*.py") if path not in tests]
    floor = [
        path for name, path in FILES.items()
        if name.split(".")[0] in ("core", "envs", "models", "utils") and name != "core.minimal"
    ]  # fmt: skip
    nodes = {path: [*ast.walk(ast.parse(path.read_text(encoding="utf-8")))] for path in FILES.values()}
    declared = [
        node
        for path in FILES.values()
        if path.relative_to(ROOT).parts[0] in ("core", "envs", "extras", "models", "recipes", "utils")
        for node in nodes[path]
        if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Call)
    ]
    classes = [node for path in floor for node in nodes[path] if isinstance(node, ast.ClassDef)]
    reached = reach("core.grpo")
    return {
        "lines of the main floor": sum(map(num_lines, floor)),
        "lines that core/grpo.py reaches": sum(num_lines(FILES[name]) for name in reached),
        "files that core/grpo.py reaches": len(reached),
        "lines of tests": sum(map(num_lines, tests)),
        "lines of bench": sum(map(num_lines, scripts)),
        "lines of Python": sum(map(num_lines, every)),
        "options": sum(getattr(node.value.func, "id", "") == "option" for node in declared),
        "lines of the longest class": max(node.end_lineno - node.lineno + 1 for node in classes),
    }


def test_the_house_is_within_its_budgets():
    found = sizes()
    assert {name: size for name, size in found.items() if size > BUDGETS[name]} == {}, "larger than BUDGETS allows"


LOAD = """
import atexit, runpy, sys
from pathlib import Path

def report():
    files = {Path(str(getattr(module, "__file__", None))) for module in list(sys.modules.values())}
    files = [file for file in files if file.suffix == ".py" and file.is_relative_to(ROOT) and ".venv" not in file.parts]
    print(len(files), sum(len(file.read_text("utf-8").splitlines()) for file in files))

ROOT = Path.cwd()
atexit.register(report)
sys.argv = ["core/grpo.py", *ARGUMENTS]
sys.path.insert(0, str(ROOT / "core"))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.slow
def test_a_basic_run_loads_what_it_uses(tmp_path):
    """One step of the demo with evaluation and saving, at its smallest."""
    arguments = (
        "--config configs/demo.py --max_steps 1 --groups_per_batch 4 --group_size 4 --ppo_minibatch 0 "
        f"--test_interval 1 --num_eval_tasks 8 --save_interval 1 --save_dir {tmp_path / 'run'}"
    ).split()
    files, lines = map(int, run(LOAD.replace("ARGUMENTS", repr(arguments))).splitlines()[-1].split())
    assert (files <= LOADED["files"], lines <= LOADED["lines"]) == (True, True), (files, lines)
