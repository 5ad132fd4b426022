#!/usr/bin/env bash
# SmolLM2-135M-Instruct learns the form `#### answer` from 400 written solutions of GSM8K, then word problems by GRPO.
# Hardware: two CPU cores, 9 GB of memory
# Minutes: of CPU time 9 for the solutions, 4 for 6 steps of GRPO (AMD EPYC)
# Score: not stored. `FROM=base` is GRPO without the demonstrations, `UNTIL=sft` ends after them
set -euo pipefail
export GLIBC_TUNABLES="${GLIBC_TUNABLES:-glibc.malloc.hugetlb=1}"  # large pages: 20% less time for an update
cd "$(dirname "$0")/.."
python="${PYTHON:-python}"
folder="${SMOLLM_DIR:-$HOME/checkpoints/smollm2-tasks}"
gsm8k="${GSM8K_DIR:?the folder of train.jsonl: github.com/openai/grade-school-math, grade_school_math/data}"
runs="${RUNS:-runs/sft}"
SMOLLM_PROGRAM=-cpass bash runs/smollm.sh  # which gets the model and writes the stories, and here runs nothing more
"$python" - "$folder" "$gsm8k" <<'END'
import json, random, re, sys
from pathlib import Path

folder, gsm8k = map(Path, sys.argv[1:])
system = "Think step by step, then give the final number on a last line of its own, after ####."
(folder / "system.txt").write_text(system)


def write(name, rows):
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


rows = [json.loads(line) for line in (gsm8k / "train.jsonl").open()]
for row in rows:
    row["answer"] = re.sub(r"<<.*?>>", "", row["answer"])  # marks for a calculator
short = sorted(rows, key=lambda row: len(row["question"] + row["answer"]))[:440]  # 100 tokens a row
random.Random(0).shuffle(short)
said = [[("system", system), ("user", row["question"]), ("assistant", row["answer"])] for row in short]
said = [{"messages": [{"role": role, "content": text} for role, text in row]} for row in said]
write("replies.jsonl", said[:400])
write("replies_test.jsonl", said[400:])
for split in ("train", "test"):
    stories = [json.loads(line) for line in (folder / f"stories_{split}.jsonl").open()]
    write(f"words_{split}.jsonl", [row | {"prompt": row["prompt"].rpartition(" Answer ")[0]} for row in stories])
END
words="path=$folder/words_train.jsonl,test_path=$folder/words_test.jsonl,form=hash,system=@$folder/system.txt"
played=(--env_name dataset --env_options "$words" --num_generation_tokens 64 --temperature 0.7 --num_eval_tasks 120)
start=smollm2-135m
if [ "${FROM:-sft}" = sft ]; then
    written="$runs/sft_seed${SEED:-0}"
    [ -d "$written/step50" ] || "$python" core/sft.py --model_dir "$start" "${played[@]}" --save_dir "$written" \
        --data "$folder/replies.jsonl" --test_data "$folder/replies_test.jsonl" --batch_size 8 --num_epochs 1 \
        --lr 5e-5 --tokens_per_microbatch 1024 --test_interval 0 --save_interval 0 --seed "${SEED:-0}"
    start="$written"
fi
[ "${UNTIL:-grpo}" = grpo ] || exit 0
exec "$python" core/grpo.py --model_dir "$start" "${played[@]}" --test_env_name dataset-test \
    --groups_per_batch 6 --group_size 8 --max_resampling 1 --ppo_minibatch 0 --inference_batch_per_device 48 \
    --tokens_per_microbatch 2048 --lr 2e-5 --advantage group_mean --loss_normalization constant \
    --max_steps 6 --test_interval 0 --save_interval 0 --seed "${SEED:-0}" \
    --save_dir "$runs/grpo_${FROM:-sft}_seed${SEED:-0}" "$@"
