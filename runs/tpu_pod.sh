#!/usr/bin/env bash
# Training on all hosts of a Cloud TPU slice; JAX finds the hosts by itself.
#     gcloud compute tpus tpu-vm create pod --zone us-east5-a --accelerator-type v5p-64 --version v2-alpha-tpuv5
#     POD=pod ZONE=us-east5-a runs/tpu_pod.sh --env_name deepscaler --model_dir Qwen/Qwen3-1.7B --save_dir /shared/run
# --save_dir must be on storage that all hosts share; the same command goes on where a run ended.
set -euo pipefail
cd "$(dirname "$0")/.."
: "${POD:?the name of the TPU}" "${ZONE:?its zone}"
on_all() { gcloud compute tpus tpu-vm ssh "$POD" --zone "$ZONE" --worker all --command "$1"; }
tar czf /tmp/lmpo.tar.gz --exclude .git --exclude .venv --exclude 'runs/*/' .
gcloud compute tpus tpu-vm scp /tmp/lmpo.tar.gz "$POD:" --zone "$ZONE" --worker all
on_all "mkdir -p lmpo && tar xzf lmpo.tar.gz -C lmpo && python3 -m venv lmpo/.venv &&
    lmpo/.venv/bin/pip install -q -r lmpo/requirements.txt 'jax[tpu]'"
on_all "cd lmpo && .venv/bin/python core/grpo.py$(printf ' %q' "$@")"
