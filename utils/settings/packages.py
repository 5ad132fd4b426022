"""Ends a command in one sentence if Python or packages are missing or too old; settings that NumPy reads when imported.

Imported before any package. Python 3.8 must parse this file, and the files of commands, to get that sentence.
"""

import contextlib
import os
import re
import sys
from importlib import metadata
from importlib.util import find_spec

PYTHON = (3, 11)  # the oldest that runs lmpo
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
# Every command imports these. Their ranges stand in requirements.txt.
NEEDED = (
    "jax", "jaxlib", "numpy", "optax", "einops", "jaxtyping", "transformers", "jinja2", "safetensors",
    "huggingface_hub", "orbax-checkpoint", "filelock",
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


def find_wrong(requirements):
    """Returns in words the packages that every command imports and whose version is outside its range."""
    from packaging.specifiers import SpecifierSet  # which transformers installs

    ranges = dict(re.findall(r"^([\w-]+)(?:\[[^]]*\])?([<>=][^\s;#]*)", requirements, re.MULTILINE))
    wrong = []
    for name in NEEDED:
        with contextlib.suppress(metadata.PackageNotFoundError):
            version = metadata.version(name)
            if not SpecifierSet(ranges[name]).contains(version, prereleases=True):
                wrong.append(f"{name} {version} is installed, and {ranges[name]} is needed")
    return wrong


INSTALL = "`make demo`, or `pip install -r requirements.txt`; after `make demo`, `source .venv/bin/activate`"
if find_spec("jax") is None:
    fail(f"jax is not installed for this Python: {INSTALL}")
with open(os.path.join(ROOT, "requirements.txt"), encoding="utf-8") as file:
    wrong = find_wrong(file.read())
if wrong:
    fail(f"{'; '.join(wrong)}: {INSTALL}")

# Without HOME and without an entry for the user, as in some containers, `~` and the caches are in this folder.
if not os.path.isabs(os.path.expanduser("~")):
    os.environ["HOME"] = os.getcwd()
# Products of NumPy are small here, and threads of OpenBLAS spin during its import. Processes of rewards inherit this.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
