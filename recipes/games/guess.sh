#!/usr/bin/env bash
# A tiny model that guesses carelessly learns to find a number by halving the range: run.sh, cut to two minutes.
# Hardware: two CPU cores
# Minutes: 2, at the pace of run.sh (140 steps in 4); 10 beside other programs
# Score: held-out correct answers 0.484 -> 0.951 ± 0.019 (--seed 0), 0.949 after 20 steps
set -euo pipefail
cd "$(dirname "$0")/../.."
exec "${PYTHON:-python}" core/grpo.py --config recipes/games/preset.py --max_steps 60 "$@"
