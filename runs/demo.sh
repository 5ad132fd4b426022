#!/usr/bin/env bash
# The tiny base model that is shipped here learns Countdown with three numbers; `make demo` installs and runs the same.
# Hardware: two CPU cores
# Minutes: 2 to 4, one of them compilation in a first run
# Score: held-out correct answers 0.218 -> 0.628, 95%: 0.59 to 0.66 (--seed 0)
set -euo pipefail
cd "$(dirname "$0")/.."
exec "${PYTHON:-python}" core/grpo.py --config configs/demo.py "$@"
