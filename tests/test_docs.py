"""The pages agree with the code: the quoted loop, the walk of CONTRIBUTING.md, links, file names, diffs.

    python tests/test_docs.py    # writes the loop and the walk's line numbers of today into the pages

What the script does not write, such as a dead link, is corrected by hand.
"""

import importlib
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from packaging.specifiers import SpecifierSet

if __name__ == "__main__":  # this repository, wherever the command is given
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from tests.markdown import FILE, FOLDERS, LINK, ROOT, anchors

DOCS = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))
RECIPES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "recipes").glob("*/README.md"))
PAGES = ["README.md", "CONTRIBUTING.md", "AGENTS.md", *DOCS, *RECIPES]
LOOP = re.compile(r"^```py\n(.*?)^```\n", re.DOTALL | re.MULTILINE)
STOP = re.compile(r"`([\w/]+\.py):(\d+)(\s+)(\w+)`")  # file, line, a space or a line break, name
DIFF = re.compile(r"^```diff\n(.*?)^```", re.DOTALL | re.MULTILINE)
GONE = re.compile(r"\bbench/\w+\.py(?=[^`#]{0,80}(?:`|# )\s*of commit)")  # scripts that git has
MADE = re.compile(r"(?:# |\+\+\+ b/)([\w/]+\.py)\n")  # files that an example of a page makes


def read(page: str) -> str:
    """Returns the text of a file of the tree."""
    return (ROOT / page).read_text(encoding="utf-8")


def loop() -> str:
    """Returns a step of `train` in core/minimal.py, from its rollouts to its updates."""
    train = read("core/minimal.py").partition("\ndef train(")[2]
    return textwrap.dedent(train[train.index("        # Rollouts:") : train.index("\n        _, approx_kl")])


def line_of(file: str, name: str) -> int:
    """Returns the first line of `file` that defines `name`, 0 where none does."""
    definition = re.compile(rf" *(?:def|class) {name}\b")
    lines = enumerate(read(file).splitlines(), 1)
    return next((number for number, line in lines if definition.match(line)), 0)


def walk() -> list[tuple[str, str, str]]:
    """Returns the stops of the walk: file, line, name."""
    stops = STOP.findall(read("CONTRIBUTING.md"))
    return [(file, line, name) for file, line, _, name in stops]


def test_the_front_page_is_short():
    assert len(read("README.md").splitlines()) <= 150


def test_the_loop_is_quoted_as_it_is():
    assert LOOP.findall(read("docs/grpo.md")) == [loop()], "python tests/test_docs.py writes it"


def test_the_walk_has_the_lines_of_today():
    stops = walk()
    assert 0 < len({file for file, _, _ in stops}) <= 10
    found = [(file, str(line_of(file, name)), name) for file, _, name in stops]
    assert stops == found, "python tests/test_docs.py corrects the numbers in CONTRIBUTING.md; 0: not defined"


@pytest.mark.parametrize("page", PAGES)
def test_links_and_named_files_exist(page: str):
    text = read(page)
    folder = (ROOT / page).parent
    links = LINK.findall(text)
    targets = [folder / file for file, _ in links]
    files = set(FILE.findall(GONE.sub("", text))) - set(MADE.findall(text))
    targets += [ROOT / file for file in files]
    missing = [str(target) for target in targets if not target.exists()]
    assert not missing
    for file, heading in links:
        assert not heading or heading in anchors(folder / file if file else ROOT / page), heading


def test_files_in_the_drawing_of_the_loop_exist():
    files = re.findall(r">([^<>]*/[^<>]*)<", read("imgs/loop.svg"))
    assert len(files) == 6
    assert all((ROOT / file).exists() for file in files)


CONFIGS = "core.config:Config core.sft:SFTConfig recipes.preferences.dpo:DPOConfig core.eval:EvalCommand"


@pytest.mark.parametrize("config", [*CONFIGS.split(), "core.sampling:SamplingCommand"])
def test_each_option_is_on_a_page_of_docs(config: str):
    """A guide tells what it is for; pages of measurements and help texts do not count."""
    from utils.settings.config import options_of  # which needs more than this file's own command

    guides = [read(page) for page in DOCS if "/lab/" not in page]
    told = set(re.findall(r"--(\w+)", " ".join(guides)))
    module, name = config.split(":")
    options = options_of(getattr(importlib.import_module(module), name))
    assert len(options) > 20
    assert not options.keys() - told


def test_the_comparison_names_what_the_code_has():
    """The column of lmpo and the lists of its methods and environments in docs/lab/comparison.md."""
    from core.advantages import ADVANTAGES
    from core.config import Config
    from core.objectives import OBJECTIVES
    from envs import ENVS
    from utils.settings.config import options_of

    page = read("docs/lab/comparison.md").partition("## Speed")[0]
    options = options_of(Config)
    tables = {"objective": OBJECTIVES, "advantage": ADVANTAGES, "env_name": ENVS}
    rows = dict(re.findall(r"^\| `--(\w+)` \| (.*) \|$", page, re.MULTILINE))
    listed = {name: set(re.findall(r"`(.*?)`", row)) for name, row in rows.items()}
    assert listed == {name: set(table) for name, table in tables.items()}
    ours = " ".join(row.split(" | ")[1] for row in re.findall(r"^\| .* \|$", page, re.MULTILINE))
    named = re.findall(r"--(\w+)(?: (\w+))?", ours)
    assert len(named) > 12
    for name, value in named:
        assert name == "config" or name in options, f"there is no option --{name}"
        assert not value or value in tables.get(name, [value]), f"--{name} has no {value}"


def test_scores_of_readme_are_those_of_its_runs():
    """Before and after training: the demo by seed, and a user's own data with the interval of its change."""
    from utils.evaluation.estimates import paired_difference  # not on the path of this file's own command

    def scores(run: str, step: int) -> np.ndarray:
        return np.load(ROOT / f"docs/lab/runs/tiny_{run}/held_out.npz")[f"correct_answer_{step}"]

    before, after = ([100 * scores(f"demo_cpu_seed{seed}", step).mean() for seed in range(3)] for step in (0, 24))
    own = [scores("own_data_cpu", step) for step in (0, 40)]
    change = {name: 100 * value for name, value in paired_difference(*own).items()}
    told = [
        f"{min(before):.0f}-{max(before):.0f}% of the held-out problems before training and "
        f"{min(after):.0f}-{max(after):.0f}% after",
        f"{100 * own[0].mean():.1f}% of them before training and {100 * own[1].mean():.1f}% after 40 steps, a change "
        f"of {change['mean']:.1f} points [{change['low']:.1f}, {change['high']:.1f}]",
    ]
    page = " ".join(read("README.md").split())
    assert not [figure for figure in told if figure not in page]


def test_each_picture_is_on_a_page():
    shown = {Path(file).name for page in PAGES for file in re.findall(r"!\[[^]]*\]\((.*?)\)", read(page))}
    assert shown == {path.name for path in (ROOT / "imgs").iterdir()} - {"make.py", "__pycache__"}


def test_sizes_that_pages_tell_are_those_of_the_files():
    """Within 5%, in the pages' order: the book of eight files, all of core/, minimal.py."""

    def num_lines(*files: Path) -> int:
        return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)

    book = "grpo", "objectives", "advantages", "sampler", "rollout", "learner", "records", "config"
    core = ROOT / "core"
    sizes = num_lines(*(core / f"{name}.py" for name in book)), num_lines(*core.rglob("*.py"))
    sizes += (num_lines(core / "minimal.py"),)
    (row,) = re.findall(r"^\| code of the loop \| (.*?) \|", read("docs/lab/comparison.md"), re.MULTILINE)
    (of_book,) = re.findall(r"They have ([\d,]+)\s+lines", read("README.md"))
    (of_minimal,) = re.findall(r"`core/minimal.py` first: (\d+) lines", read("README.md"))
    told = [*re.findall(r"\d[\d,]+", row), of_book, of_minimal]
    found = [int(number.replace(",", "")) for number in told]
    assert found == pytest.approx([*sizes, sizes[0], sizes[2]], rel=0.05)


def test_the_other_lmpo_has_its_owner_before_its_name():
    """`lmpo` alone is this repository; kvfrans/lmpo is the one whose commands it keeps."""
    files = [ROOT / page for page in PAGES]
    files += [path for folder in FOLDERS.split("|") for path in (ROOT / folder).rglob("*.[ps][yh]")]
    assert not [file for file in files if re.search(r"(?<!kvfrans/)\blmpo's\b", file.read_text(encoding="utf-8"))]


def test_index_links_each_page_and_each_page_names_the_next():
    links = re.findall(r"^\| \[.*?\]\((.*?)\)", read("docs/README.md"), re.MULTILINE)
    found = sorted(f"docs/{link}" for link in links)
    assert found == [page for page in DOCS if page != "docs/README.md"]
    assert sum("/" not in link for link in links) <= 12
    assert all(read(page).splitlines()[-1].startswith("Next: ") for page in [*DOCS, *RECIPES])
    assert "docs/README.md" in re.findall(r"\]\(([^)]*)\)", read("README.md"))


@pytest.mark.parametrize("page", ["README.md", "docs/tasks.md"])
def test_diffs_apply(page: str):
    diffs = DIFF.findall(read(page))
    assert diffs
    for diff in diffs:
        done = subprocess.run(["git", "apply", "--check"], cwd=ROOT, input=diff, capture_output=True, text=True)
        assert not done.returncode, done.stderr


def test_pinned_versions_are_those_of_the_requirements():
    """JAX in docs/devices.md and in bench/compiled.py, and its range in the README."""
    allowed = re.search(r"^jax(\S+)", read("requirements.txt"), re.MULTILINE)[1]
    assert f"jax[cuda13]{allowed}" in read("README.md")
    files = "docs/devices.md", "bench/compiled.py"
    (pin,) = {pin for file in files for pin in re.findall(r"\bjax[\w\[\]-]*==([\d.]+)", read(file)) or [file]}
    assert pin in SpecifierSet(allowed)


def refresh() -> None:
    """Writes the loop and the lines of today into the pages."""

    def today(stop: re.Match[str]) -> str:
        file, _, space, name = stop.groups()
        return f"`{file}:{line_of(file, name)}{space}{name}`"

    contributing = STOP.sub(today, read("CONTRIBUTING.md"))
    (ROOT / "CONTRIBUTING.md").write_text(contributing, encoding="utf-8")
    page = LOOP.sub(lambda _: f"```py\n{loop()}```\n", read("docs/grpo.md"))
    (ROOT / "docs" / "grpo.md").write_text(page, encoding="utf-8")


if __name__ == "__main__":
    refresh()
