#!/usr/bin/env bash
# Qwen3-1.7B learns the Countdown of kvfrans/lmpo: four numbers of 0 to 99, targets up to 1,000.
# Hardware: one GPU of 80 GB; with several devices of a host, training uses all of them
# Minutes: not run by us
# Score: not run by us; the README of kvfrans/lmpo has 0.446 -> 0.75 at step 60, under another sampler. Its loss, a mean over all
#   columns, is the token mean here times the share of trained columns (about 0.4), entropy bonus included: the same
#   direction, a factor for each minibatch, which counts in the clip at norm 1 and in AdamW's averages
set -euo pipefail
cd "$(dirname "$0")/.."
exec "${PYTHON:-python}" core/grpo.py --env_name countdown --test_env_name countdown-test --model_dir Qwen/Qwen3-1.7B \
    --max_steps 60 "$@"
