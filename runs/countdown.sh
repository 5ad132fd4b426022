#!/usr/bin/env bash
# Qwen3-1.7B learns lmpo's Countdown: four numbers of 0 to 99, targets up to 1,000.
# Hardware: one GPU of 80 GB; with several devices of a host, training uses all of them
# Minutes: not run by us
# Score: not run by us; lmpo's README has 0.446 -> 0.75 at step 60, under another loss mask, constant and sampler
set -euo pipefail
cd "$(dirname "$0")/.."
exec "${PYTHON:-python}" core/grpo.py --env_name countdown --test_env_name countdown-test --model_dir Qwen/Qwen3-1.7B \
    --loss_normalization constant --max_steps 60 "$@"
