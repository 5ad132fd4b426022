"""Ends a command in one sentence where packages are missing, when it is imported: before any of them."""

import os
from importlib.util import find_spec

from utils.settings.errors import fail

if find_spec("jax") is None:
    fail(
        "jax is not installed for this Python: `make demo`, or `pip install -r requirements.txt`; "
        "after `make demo`, `source .venv/bin/activate`"
    )

# Products of NumPy are small here, and OpenBLAS's threads spin for as long as it is imported.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
