#!/usr/bin/env bash
# The tiny model learns to write long poems: the reward is the number of characters, 256 at most. A sanity check.
# Hardware: two CPU cores
# Minutes: 2
# Score: held-out return 51 -> 256 of 256 (seed 0)
set -euo pipefail
cd "$(dirname "$0")/.."
exec "${PYTHON:-python}" core/grpo.py --config configs/poem.py "$@"
