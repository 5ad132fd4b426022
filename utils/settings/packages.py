"""Ends a command in one sentence if Python or packages are missing or too old; settings that NumPy reads when imported.

Imported before any package. Python 3.8 must parse this file, and the files of commands, to get that sentence.
"""

import os
import re
import sys
from importlib.util import find_spec

PYTHON = (3, 11)  # the oldest that runs lmpo
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
# Every command imports these. Their ranges stand in requirements.txt.
NEEDED = (
    "jax", "jaxlib", "numpy", "optax", "einops", "jaxtyping", "transformers", "jinja2", "safetensors",
    "huggingface-hub", "orbax-checkpoint", "filelock",
)  # fmt: skip

if sys.version_info < PYTHON:
    running, needed = (".".join(map(str, version)) for version in (sys.version_info[:3], PYTHON))
    print(
        f"error: this is Python {running}, and lmpo needs {needed} or newer: `make demo PYTHON=python3.12`, or run the "
        "command with another Python",
        file=sys.stderr,
    )
    raise SystemExit(2)

from utils.settings.errors import fail  # noqa: E402 (older versions of Python cannot import it)


def read_ranges(text):
    """Returns the ranges of versions in a requirements file, as {"jax": ">=0.10,<0.12"}."""
    lines = re.findall(r"^([\w-]+)(?:\[[^]]*\])?([<>=][^\s;#]*)", text, re.MULTILINE)
    return {name.lower().replace("_", "-"): versions for name, versions in lines}


def find_versions(folders):
    """Returns the installed versions of packages, of the first folder that has them.

    They are in the names of folders: importlib.metadata takes a millisecond for each.
    """
    found = {}
    for folder in folders:
        names = os.listdir(folder or ".") if os.path.isdir(folder or ".") else []
        for name in names:
            if name.endswith(".dist-info"):
                package, _, version = name[: -len(".dist-info")].partition("-")
                found.setdefault(package.lower().replace("_", "-").replace(".", "-"), version)
    return found


def is_within(version, versions):
    """True if a version is in a range like ">=0.10,<0.12", of whose bounds only the numbers count."""

    def numbers(text):
        return [int(part) for part in re.findall(r"\d+", re.match(r"[\d.]*", text).group())]

    compare = {">=": numbers(version).__ge__, "<": numbers(version).__lt__, "==": numbers(version).__eq__}
    bounds = (re.match(r"([<>=]+)(.*)", bound).groups() for bound in versions.split(","))
    return all(compare[sign](numbers(bound)) for sign, bound in bounds)


def find_wrong(versions, ranges):
    """Returns the packages that every command imports and whose version is outside its range, in words."""
    wrong = [name for name in NEEDED if name in versions and not is_within(versions[name], ranges[name])]
    return [f"{name} {versions[name]} is installed, and {ranges[name]} is needed" for name in wrong]


INSTALL = "`make demo`, or `pip install -r requirements.txt`; after `make demo`, `source .venv/bin/activate`"
if find_spec("jax") is None:
    fail(f"jax is not installed for this Python: {INSTALL}")
with open(os.path.join(ROOT, "requirements.txt"), encoding="utf-8") as file:
    wrong = find_wrong(find_versions(sys.path), read_ranges(file.read()))
if wrong:
    fail(f"{'; '.join(wrong)}: {INSTALL}")

# Without HOME and without an entry for the user, as in some containers, `~` and the caches are in this folder.
if not os.path.isabs(os.path.expanduser("~")):
    os.environ["HOME"] = os.getcwd()
# Products of NumPy are small here, and threads of OpenBLAS spin during its import. Processes of rewards inherit this.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
