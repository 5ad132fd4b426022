#!/usr/bin/env bash
# Qwen3-1.7B on GSM8K's training problems, evaluated on its test problems.
# Hardware: one GPU of 24 GB (that it fits was computed, see configs/small_gpu.py)
# Minutes: not run by us
# Score: not run by us
set -euo pipefail
cd "$(dirname "$0")/.."
export XLA_PYTHON_CLIENT_MEM_FRACTION="${XLA_PYTHON_CLIENT_MEM_FRACTION:-0.92}"
exec "${PYTHON:-python}" core/grpo.py --config configs/small_gpu.py --test_env_name gsm8k-test --max_steps 100 "$@"
