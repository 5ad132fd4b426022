#!/usr/bin/env bash
# The tiny base model that is shipped here learns Countdown with three numbers; `make demo` installs and runs the same.
# Hardware: two CPU cores
# Minutes: 3 to 5, one of them evaluation
# Score: held-out correct answers 0.218, 0.216, 0.211 -> 0.642, 0.679, 0.679 (--seed 0, 1, 2), each ± 0.018
set -euo pipefail
cd "$(dirname "$0")/.."
"${PYTHON:-python}" core/grpo.py --config configs/demo.py "$@"
