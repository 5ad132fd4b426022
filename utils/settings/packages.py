"""Ends a command in one sentence where packages are missing; settings of NumPy, which it reads when it is imported.

Imported before any package.
"""

import os
from importlib.util import find_spec

from utils.settings.errors import fail

if find_spec("jax") is None:
    fail(
        "jax is not installed for this Python: `make demo`, or `pip install -r requirements.txt`; "
        "after `make demo`, `source .venv/bin/activate`"
    )

# Products of NumPy are small here, and threads of OpenBLAS spin during its import. Processes of rewards inherit this.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
