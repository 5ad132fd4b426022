#!/usr/bin/env bash
# SmolLM2-135M-Instruct, from a wheel of the package index, learns to answer sums of two numbers up to 20.
# Hardware: two CPU cores, 9 GB of memory
# Minutes: 10, of which compilation 1 (AMD EPYC)
# Score: held-out correct answers 0.228 -> 0.816 (--seed 0), 0.184 -> 0.658, 0.307 -> 0.877 (--seed 1, 2), ± 0.06 to 0.09; docs/lab/language_models.md
set -euo pipefail
export GLIBC_TUNABLES="${GLIBC_TUNABLES:-glibc.malloc.hugetlb=1}"  # large pages: 20% less time for an update
cd "$(dirname "$0")/.."
python="${PYTHON:-python}"
folder="${SMOLLM_DIR:-$HOME/checkpoints/smollm2-tasks}"  # of the problems
model=smollm2-135m
"$python" runs/real_model.py "$model"
"$python" - "$folder" <<'END'
import json, random, sys
from pathlib import Path

NAMES = "Ann", "Ben", "Carla", "Deniz", "Emre", "Fatou", "Grace", "Hugo"
THINGS = "apples", "books", "coins", "marbles", "pencils", "shells"
STORIES = (
    ("{name} has {a} {things} and gets {b} more. How many {things} does {name} have now?", lambda a, b: a + b),
    ("{name} has {a} {things}. {other} has {b} more than {name}. How many does {other} have?", lambda a, b: a + b),
    ("{name} had {sum} {things} and gave {b} away. How many {things} are left?", lambda a, b: a),
    ("{name} has {a} boxes with {b} {things} in each. How many {things} are there?", lambda a, b: a * b),
    ("{product} {things} are shared equally by {b} children. How many does each child get?", lambda a, b: a),
)


def write(name, prompts):
    rows = [{"prompt": f"{prompt} Answer with the number only.", "answer": str(answer)} for prompt, answer in prompts]
    Path(sys.argv[1], name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def sums(pairs):
    for a, b in sorted({order for a, b in pairs for order in ((a, b), (b, a))}):
        yield f"What is {a} + {b}?", a + b


def stories(pairs, rng):
    for a, b in pairs:
        for text, answer in STORIES:
            name, other = rng.sample(NAMES, 2)
            things = rng.choice(THINGS)
            yield text.format(a=a, b=b, name=name, other=other, things=things, sum=a + b, product=a * b), answer(a, b)


Path(sys.argv[1]).mkdir(parents=True, exist_ok=True)
pairs = [(a, b) for a in range(21) for b in range(a, 21)]
random.Random(0).shuffle(pairs)
write("sums_test.jsonl", sums(pairs[:60]))
write("sums_train.jsonl", sums(pairs[60:]))
rng = random.Random(0)
pairs = [(a, b) for a in range(2, 13) for b in range(2, 13)]
rng.shuffle(pairs)
write("stories_test.jsonl", stories(pairs[:24], rng))
write("stories_train.jsonl", stories(pairs[24:], rng))
END
task="${SMOLLM_TASK:-sums}"  # or stories: word problems of one step, 0.07, 0.09, 0.13 -> 0.63, 0.58, 0.68
exec "$python" "${SMOLLM_PROGRAM:-core/grpo.py}" --model_dir "$model" --env_name dataset --test_env_name dataset-test \
    --env_options "path=$folder/${task}_train.jsonl,test_path=$folder/${task}_test.jsonl" \
    --num_generation_tokens 24 --temperature 0.7 --groups_per_batch 12 --group_size 8 --max_resampling 1 \
    --ppo_minibatch 0 --inference_batch_per_device 96 --tokens_per_microbatch 2048 \
    --lr 2e-5 --advantage group_mean --loss_normalization constant \
    --max_steps 20 --test_interval 5 --num_eval_tasks 114 --num_eval_samples 1 "$@"
