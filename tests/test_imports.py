"""The import law of the house, and what importing a file must not do."""

import ast
import importlib.metadata
import json
import re
import subprocess
import sys
import tomllib
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("core", "envs", "models", "utils", "configs", "bench")
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for package in PACKAGES
    for path in sorted((ROOT / package).rglob("*.py"))
}

# What a file may import of the project: the longest name on the left that begins its own decides.
LAW = {
    "core": (),
    "core.records": ("models.names", "utils.training.batching"),  # a leaf
    "core.objectives": ("core.records", "models.names", "utils.settings", "utils.training.batching"),
    "core.sampler": ("core.records", "envs.base", "models", "utils"),
    "core.rollout": (
        *("core.extensions.speculation", "core.extensions.turns", "core.records", "core.sampler"),
        *("envs.base", "models", "utils"),
    ),
    "core.evaluate": ("core.records", "core.rollout", "models", "utils"),
    "core.config": ("core.evaluate", "core.objectives", "core.sampler", "models.checkpoint", "models.lora", "utils"),
    "core.learner": ("core.config", "core.objectives", "core.records", "models", "utils"),
    "core.grpo": (
        *("core.config", "core.evaluate", "core.learner", "core.objectives", "core.records", "core.rollout"),
        *("core.extensions", "models", "utils"),
    ),
    "core.extensions": (  # what options attach, to the files of the loop
        *("core.config", "core.extensions", "core.learner", "core.objectives", "core.records", "core.rollout"),
        *("core.sampler", "envs.base", "models", "utils"),
    ),
    "core.extensions.speculation": ("core.records", "core.sampler", "models", "utils"),
    "core.extensions.turns": ("core.records", "core.sampler", "envs.base", "models", "utils"),
    # Commands, which nobody imports.
    "core.sampling": ("core.extensions", "core.records", "core.sampler", "envs", "models", "utils"),
    "core.replay": ("core.config", "core.records", "core.rollout", "core.sampler", "models", "utils"),
    "core.eval": ("core.evaluate", "core.replay", "core.rollout", "core.sampler", "envs", "models", "utils"),
    "core.population": (
        *("core.config", "core.extensions", "core.grpo", "core.learner", "core.records", "core.rollout"),
        *("core.sampler", "models", "utils"),
    ),
    "core.minimal": ("core.objectives", "core.records", "envs", "models", "utils"),
    "models": ("models", "utils"),
    "models.names": (),  # a leaf
    "models.make_tiny": ("envs", "models", "utils"),
    "models.make_player": ("envs", "models", "utils"),
    "utils": ("core.records", "models", "utils"),
    "utils.evaluation": ("core.records", "envs.base", "models.tokenizer", "utils"),
    # Workers hold an environment, and never import jax.
    "utils.rewards.helper": ("envs", "utils.rewards.processes"),
    "utils.settings": ("utils.evaluation.preview", "utils.settings"),
    "utils.settings.environments": ("envs", "utils.evaluation.preview", "utils.settings"),
    "utils.settings.checks": ("utils.settings.errors",),
    "utils.settings.errors": (),  # a leaf
    "utils.training.batching": (),  # a leaf
    "envs": ("envs", "utils.settings.checks", "utils.settings.errors"),
    "configs": ("configs",),
    "bench": ("bench", "core", "envs", "models", "utils"),
}
# And of everything else, where that is limited too. envs: the standard library, numpy, what loads and grades data.
OTHERS = {
    "core.records": {"dataclasses", "collections", "typing", "jax", "jaxtyping", "numpy"},
    "core.objectives": {"dataclasses", "collections", "functools", "typing", "jax", "jaxtyping", "numpy"},
    "envs": {
        *sys.stdlib_module_names,
        *("numpy", "jaxtyping", "datasets", "pandas", "pyarrow", "huggingface_hub"),
        *("math_verify", "latex2sympy2_extended", "sympy", "reasoning_gym", "yaml"),
    },
}


def within(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


def imports(path: Path) -> set[str]:
    """Modules that a file imports, anywhere in it."""
    return imported_modules(ast.parse(path.read_text(encoding="utf-8")))


def imported_modules(tree: ast.Module) -> set[str]:
    """Modules that a syntax tree imports; `from core import eval` is core.eval."""
    found = set()
    for node in ast.walk(tree):
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


@pytest.mark.parametrize("name", FILES)
def test_import_law(name):
    rule = max((prefix for prefix in LAW if within(name, prefix)), key=len)
    imported = imports(FILES[name])
    own = {module for module in imported if module.split(".")[0] in PACKAGES}
    forbidden = {module for module in own if not any(within(module, allowed) for allowed in LAW[rule])}
    assert not forbidden, f"{name} may import of this project only {LAW[rule]}"
    for prefix, allowed in OTHERS.items():
        if within(name, prefix):
            foreign = {module.split(".")[0] for module in imported - own}
            assert foreign <= allowed, f"{prefix} may not import {foreign - allowed}"


def test_no_file_imports_itself_through_others():
    """Where files are imported: a command, and a function that is called later, may import what imports its file."""
    graph = {}
    for name, path in FILES.items():
        statements = ast.parse(path.read_text(encoding="utf-8")).body
        module = ast.Module([node for node in statements if isinstance(node, ast.Import | ast.ImportFrom)], [])
        graph[name] = imported_modules(module) & FILES.keys()
    TopologicalSorter(graph).prepare()  # raises CycleError


def requirements(file: str) -> set[str]:
    """Names of packages in a requirements file."""
    return set(re.findall(r"^[\w.-]+", (ROOT / file).read_text(), re.MULTILINE))


def test_every_requirement_is_imported():
    modules = {module.split(".")[0] for path in FILES.values() for module in imports(path)}
    packages = importlib.metadata.packages_distributions()
    imported = {package.replace("_", "-").lower() for module in modules for package in packages.get(module, [])}
    unused = {name for name in requirements("requirements.txt") if name.replace("_", "-").lower() not in imported}
    assert unused == {"jaxlib"}, "which jax imports"


def test_the_project_table_reads_the_requirements():
    """setuptools reads names and ranges only, no `-r other-file`."""
    dynamic = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["dynamic"]
    files = dynamic["dependencies"]["file"], dynamic["optional-dependencies"]["test"]["file"]
    assert files == ("requirements.txt", "requirements-test.txt")
    assert not [line for file in files for line in (ROOT / file).read_text().splitlines() if line.startswith("-")]


def test_no_package_takes_the_name_of_a_standard_module():
    assert not {part for name in FILES for part in name.split(".")} & sys.stdlib_module_names
    assert not (ROOT / "__init__.py").exists(), "the root is no package"


def test_envs_import_no_jax_and_no_environment_before_it_is_made():
    modules = [name for name in FILES if within(name, "envs")]
    code = (
        "import sys, importlib, envs\n"
        "assert not {'envs.countdown', 'envs.gsm8k'} & set(sys.modules), 'the table imports lazily'\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        "assert not {'jax', 'flax', 'transformers', 'core', 'models'} & set(sys.modules)\n"
        "assert not {'math_verify', 'datasets', 'reasoning_gym', 'pyarrow'} & set(sys.modules)\n"
    )
    run(code)


@pytest.mark.parametrize("command", ["core.grpo", "core.eval", "core.sampling", "core.population"])
def test_a_wrong_option_waits_for_no_library_that_only_a_run_needs(command):
    """Options are read after the imports; bench/startup.py measures them."""
    late = {"transformers", "matplotlib", "plotly", "orbax.checkpoint", "huggingface_hub", "flax", "wandb", "datasets"}
    assert run(f"import sys, {command}; print(sorted({late} & set(sys.modules)))") == "[]\n"


IMPORT_ALL = """
import importlib.util, json, sys
from pathlib import Path

opened, faults = [], {}
sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" else None)
root = str(Path.cwd())
for name, path in json.loads(FILES):
    opened.clear()
    try:
        if path.split("/")[0] in ("core", "envs", "models", "utils"):
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
    if files:
        faults[name] = f"opens {files}"
    if "absl.flags" in sys.modules and sys.modules["absl.flags"].FLAGS.is_parsed():
        faults[name] = "parses flags"
    if "jax._src.xla_bridge" in sys.modules and sys.modules["jax._src.xla_bridge"]._backends:
        faults[name] = "initialises a JAX backend"
        break
print(json.dumps(faults))
"""


def test_importing_a_file_does_nothing():
    files = [(name, path.relative_to(ROOT).as_posix()) for name, path in FILES.items()]
    output = run(IMPORT_ALL.replace("FILES", repr(json.dumps(files))))
    assert json.loads(output.splitlines()[-1]) == {}
