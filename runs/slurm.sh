#!/usr/bin/env bash
# Training on hosts of a Slurm cluster, one process for each host; JAX learns of them from Slurm.
#     sbatch --nodes 4 runs/slurm.sh --env_name deepscaler --model_dir Qwen/Qwen3-1.7B --save_dir /shared/deepscaler
# --save_dir must be on storage that all hosts share; the same command goes on where a job ended.
#SBATCH --job-name=lmpo
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-$(dirname "$0")/..}"
srun --kill-on-bad-exit=1 "${PYTHON:-python}" core/grpo.py "$@"
