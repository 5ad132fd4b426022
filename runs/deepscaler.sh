#!/usr/bin/env bash
# Qwen3-1.7B on DeepScaleR's competition mathematics with 4,096 tokens, evaluated on AIME 2024, by DAPO.
# Hardware: eight GPUs of 80 GB on one host. A TPU slice: runs/tpu_pod.sh, Slurm: runs/slurm.sh, with the flags below
# Minutes: not run by us
# Score: not run by us
set -euo pipefail
cd "$(dirname "$0")/.."
exec "${PYTHON:-python}" core/grpo.py --config configs/dapo.py --env_name deepscaler --test_env_name aime-test \
    --model_dir Qwen/Qwen3-1.7B --num_generation_tokens 4096 --prompt_length 512 --groups_per_batch 128 \
    --ppo_minibatch 512 --num_eval_samples 16 --max_steps 500 "$@"
