#!/usr/bin/env bash
# Qwen2.5-Coder-0.5B-Instruct, from wheels of the package index, learns short replies to GSM8K, or a tool, as adapters.
# Hardware: two CPU cores, 18 GB of memory
# Minutes: 67, and 12 for the scores
# Score: of 64 test problems, 0.06 -> 0.25 with a box, 0.17 -> 0.25 with or without (docs/lab/language_models.md).
#     The calculator: 18 minutes, as a program 13; 0.33 -> 1.00
#
#     GSM8K_DIR=FOLDER bash runs/coder.sh   # the problems that take at most two calculations
#     TASK=calculator bash runs/coder.sh    # arithmetic by calls in JSON, several turns; needs no data
#     TASK=agent bash runs/coder.sh         # the same as a program of its own: pip install openai starlette uvicorn
#
# Then the models before and after solve 256 held-out problems greedily, and 64 of them four times each. The same
# command again goes on where it stopped. Options are added to training: UNTIL=training bash runs/coder.sh --lr 3e-5
set -euo pipefail
export GLIBC_TUNABLES="${GLIBC_TUNABLES:-glibc.malloc.hugetlb=1}"  # large pages: 20% less time for an update
cd "$(dirname "$0")/.."
python="${PYTHON:-python}"
model="${MODEL_DIR:-coder-0.5b}"
task="${TASK:-gsm8k}"
runs="${RUNS:-runs/coder-$task}"
mkdir -p "$runs"
[[ $model != coder-0.5b ]] || "$python" runs/real_model.py "$model"
env=dataset
case $task in
gsm8k)
    gsm8k="${GSM8K_DIR:?the folder of train.jsonl: github.com/openai/grade-school-math, grade_school_math/data}"
    "$python" - "$gsm8k" "$runs" <<'END'
import json, sys
from pathlib import Path

source, target = map(Path, sys.argv[1:])
for name in ("train.jsonl", "test.jsonl"):
    rows = [json.loads(line) for line in (source / name).open()]
    short = [row for row in rows if row["answer"].count("<<") <= 2]  # these mark the calculations of a solution
    problems = [{"prompt": row["question"], "answer": row["answer"].rpartition("####")[2].strip()} for row in short]
    (target / name).write_text("".join(json.dumps(problem) + "\n" for problem in problems))
END
    example="Question: Tom has 3 boxes of 12 pens and gives 6 away. How many are left?"
    example+=" Reply: He has 3 * 12 = 36 pens. Then 36 - 6 = 30 are left. \\boxed{30}"
    options="path=$runs/train.jsonl,test_path=$runs/test.jsonl"
    options+=",form=boxed,thinking=off,prefix=Reply:,system=Answer as in this example. $example"
    limits=(--prompt_length 176 --num_generation_tokens 80 --force_answer_at 0)
    batch=(--groups_per_batch 8 --max_steps 60 --test_interval 20)
    tests="dataset-test,dataset-test(form=any)"
    ;;
calculator | agent)
    "$python" - "$runs" <<'END'
import json, sys
from pathlib import Path

sys.path.insert(0, ".")
from envs import make_env

for name, number in {"calculator": 2000, "calculator-test": 300}.items():
    env = make_env(name, prompt="bare", max_operations=2)
    found = {env.problem(i).messages[0]["content"].removesuffix(" = ?"): env.problem(i).answer for i in range(number)}
    rows = [{"prompt": f"What is {text}? Call the calculator once, then say the result.", "answer": str(value)}
            for text, value in found.items()]
    file = "test.jsonl" if "test" in name else "train.jsonl"
    Path(sys.argv[1], file).write_text("".join(json.dumps(row) + "\n" for row in rows))
END
    options="path=$runs/train.jsonl,test_path=$runs/test.jsonl,dialect=json,thinking=off"
    limits=(--prompt_length 256 --num_generation_tokens 128)
    if [[ $task == agent ]]; then
        env=agent
        limits+=(--agent recipes/calculator/calculator.py:play)
    else
        options+=",max_turns=3"
        limits+=(--episode recipes/calculator/calculator.py:Calculator)
    fi
    batch=(--groups_per_batch 4 --max_steps 10 --test_interval 10)
    tests="$env-test"
    ;;
*)
    echo "TASK=$task: choose gsm8k, calculator or agent" >&2
    exit 2
    ;;
esac
shared=(--env_options "$options" --dtype float32 "${limits[@]}")
"$python" core/grpo.py --model_dir "$model" --env_name "$env" --test_env_name "$tests" "${shared[@]}" \
    "${batch[@]}" --lora_rank 16 --lr 1e-4 --temperature 0.6 --group_size 8 --max_resampling 1 --ppo_minibatch 0 \
    --tokens_per_microbatch 512 --num_eval_tasks 64 --save_interval 5 --keep 1 --save_dir "$runs/run" "$@"
[[ ${UNTIL:-} != training ]] || exit 0

score() { # a name, options: scores of both models, unless they are there
    [[ -f $runs/$1.json ]] || "$python" core/eval.py --model_dir "$model,$runs/run" --env_name "$tests" \
        "${shared[@]}" --json "$runs/$1.json" --save_samples "$runs/$1.jsonl" "${@:2}"
}
score greedy --num_eval_tasks 256 --temperature 0
score four --num_eval_tasks 64 --num_eval_samples 4 --temperature 0.6
