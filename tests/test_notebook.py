"""lmpo.ipynb: small, without outputs, names only what exists; and executed, cell by cell, in a fresh clone."""

import ast
import json
import re

from core import grpo, minimal
from tests import readme
from tests.helpers import ROOT, slow
from tests.markdown import FILE, LINK, anchors
from utils.settings.config import options_of

NOTEBOOK = json.loads((ROOT / "lmpo.ipynb").read_text(encoding="utf-8"))
CELLS = {cell["id"]: "".join(cell["source"]) for cell in NOTEBOOK["cells"]}
CODE = {cell["id"]: ast.parse(CELLS[cell["id"]]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"}


def words(node: ast.AST) -> list[str]:
    """Returns the texts in a piece of code, in order."""
    return [x.value for x in ast.walk(node) if isinstance(x, ast.Constant) and isinstance(x.value, str)]


def test_the_notebook_is_small_and_has_no_outputs():
    assert len(CELLS) == len(NOTEBOOK["cells"]) <= 12
    assert (NOTEBOOK["nbformat"], NOTEBOOK["nbformat_minor"]) == (4, 5)
    for cell in NOTEBOOK["cells"]:
        assert cell["cell_type"] == "markdown" or (cell["outputs"], cell["execution_count"]) == ([], None), cell["id"]
        assert len(cell["source"]) <= 60
        assert not cell["metadata"]
    citation = (ROOT / "CITATION.cff").read_text()
    address = re.search(r'^repository-code: "?([^"\n]*)', citation, re.MULTILINE)
    found = f'REPOSITORY = "{address[1] if address else ""}"'
    assert found in CELLS["install"], "the address is that of CITATION.cff"


def test_the_notebook_names_files_and_options_that_exist():
    text = "\n".join(CELLS.values())
    files = {file for file in FILE.findall(text) if not file.startswith("runs/notebook")}
    assert {"core/minimal.py", "core/grpo.py", "configs/demo.py", "configs/one_chip.py"} < files
    files |= set(re.findall(r"requirements[\w-]*\.txt", text))
    links = LINK.findall(text)
    assert not [file for file in files | {file for file, _ in links} if not (ROOT / file).exists()]
    assert all(not heading or heading in anchors(ROOT / file) for file, heading in links)
    calls = [node for tree in CODE.values() for node in ast.walk(tree) if isinstance(node, ast.Call)]
    trainings = [call for call in calls if getattr(call.func, "id", "") == "learn"]
    assert len(trainings) == 3
    for training in trainings:
        named = {word[2:] for word in words(training) if word.startswith("--")}
        assert named
        assert named <= {"config", *options_of(grpo.Config)}, named


def test_the_notebook_takes_names_of_the_file_that_it_goes_through():
    calls = [node for tree in CODE.values() for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    named = {node.attr for node in calls if isinstance(node.value, ast.Name) and node.value.id == "minimal"}
    assert {"roll_out", "group_advantages", "token_logprobs", "add_gradients", "policy_loss", "train"} <= named
    assert not [name for name in named if not hasattr(minimal, name)]


@slow
def test_the_notebook_runs_in_a_fresh_clone(tmp_path):
    """As a user runs it, on this CPU: one update, then it learns by its own loss, the demo and its own reward."""
    import nbformat
    from nbclient import NotebookClient

    readme.clone(tmp_path)
    notebook = nbformat.read(tmp_path / "lmpo.ipynb", as_version=4)
    nbformat.validate(notebook)
    NotebookClient(notebook, timeout=1800, resources={"metadata": {"path": str(tmp_path)}}).execute()
    printed = {
        cell.id: "".join(output.get("text", "") for output in cell.outputs)
        for cell in notebook.cells
        if cell.cell_type == "code"
    }
    assert "where they were better than their group" in printed["update"]
    assert printed["own-loss"].count("held-out") == 3
    for name in ("demo", "own-reward"):
        assert printed[name].find("Learned: held-out correct answers went from") >= 0, printed[name]
    assert "this is a CPU" in printed["one-chip"]
