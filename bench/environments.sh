#!/usr/bin/env bash
# Trains models/tiny for two steps on every environment, from the command line:
#
#     bench/environments.sh FOLDER [python]
#
# FOLDER holds the data sets as docs/tasks.md says. Ends with one line for each run.
set -uo pipefail
cd "$(dirname "$0")/.."
data=$1 python=${2:-python} runs=$(mktemp -d)
reward=$runs/my_reward.py
printf 'def reward(completion, **row):\n    return {"short": 1 / (1 + len(completion))}\n' >"$reward"

train() { # environment, its options, and more flags
    local run=$runs/$1 options=$2
    WANDB_MODE=disabled "$python" core/grpo.py --env_name "$1" --env_options "$options" --model_dir models/tiny --max_steps 2 \
        --groups_per_batch 2 --group_size 4 --ppo_minibatch 0 --num_generation_tokens 16 --force_answer_at 0 \
        --prompt_length 8192 --do_group_filter 0 --save_interval 0 --save_dir "$run" \
        "${@:3}" >"$run.log" 2>&1
    local status=$?
    echo "$1: exit status $status, $(wc -l <"$run/metrics.jsonl" 2>/dev/null || echo 0) steps logged"
    [ $status = 0 ] || tail -3 "$run.log"
}

for name in countdown countdown3 countdown6 poem; do train $name ""; done
train reasoning_gym "datasets=leg_counting+spell_backward*2(min_word_len=3;max_word_len=6)"
for name in countdown34 gsm8k deepscaler aime aime25 amc amc23 math500; do
    train $name "data_dir=$data"
done
train dataset "path=$data/gsm8k/train.jsonl,prompt=question,reward=$reward:reward"
echo "logs: $runs"
