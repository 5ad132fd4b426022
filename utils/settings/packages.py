"""Ends a command in one sentence where packages are missing, when it is imported: before any of them."""

from importlib.util import find_spec

from utils.settings.errors import fail

if find_spec("jax") is None:
    fail(
        "jax is not installed for this Python: `make demo`, or `pip install -r requirements.txt`; "
        "after `make demo`, `source .venv/bin/activate`"
    )
