#!/usr/bin/env bash
# A ladder on Countdown: models/tiny imitates written searches (SFT), then prefers its own better ones (IPO), then RLOO.
# Hardware: two CPU cores
# Minutes: 3
# Score: held-out correct answers of each rung, and paired differences to IPO: docs/lab/countdown.md
set -euo pipefail
cd "$(dirname "$0")/.."
python="${PYTHON:-python}"
seed="${SEED:-0}"
runs="${RUNS:-runs/ladder}/seed$seed"
options=numbers=3,min_number=1,max_number=15,max_target=30,expression=tree,max_value=30,prompt=bare,truncation_penalty=0
played=(--env_name countdown --env_options "$options" --prompt_length 32 --num_generation_tokens 192 --force_answer_at 0
    --test_interval 0 --save_interval 0 --seed "$seed")
"$python" - "$runs" "$seed" <<'END'
import json, random, sys
from pathlib import Path

sys.path[0] = "."
from envs.countdown import Countdown
from runs.make_tiny import COUNTDOWN, reply

folder, seed = Path(sys.argv[1]), int(sys.argv[2])
env, rng = Countdown(**COUNTDOWN), random.Random(seed)
problems = [env.problem(i) for i in range(4000)]
pairs = [(problem, reply(*problem.answer, rng)) for problem in problems]
rows = [{"prompt": problem.messages, "completion": text} for problem, text in pairs if "✓" in text]
folder.mkdir(parents=True, exist_ok=True)
(folder / "replies.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:400]))
END
"$python" core/sft.py --data "$runs/replies.jsonl" "${played[@]}" --test_fraction 0 --num_epochs 2 --lr 3e-4 \
    --save_dir "$runs/sft"
# At a rate of 0 a run samples, and trains nothing.
"$python" core/grpo.py --config configs/demo.py --model_dir "$runs/sft" --lr 0 --ppo_minibatch 0 --do_group_filter 0 \
    --groups_per_batch 64 --group_size 8 --max_steps 12 --test_interval 0 --num_eval_tasks 8 --save_interval 0 \
    --save_rollouts all --seed "$seed" --save_dir "$runs/sampled"
"$python" recipes/preferences/dpo.py --model_dir "$runs/sft" --pairs_from "$runs/sampled" --loss ipo --lr 3e-4 --num_epochs 1 \
    --batch_size 32 "${played[@]}" --save_dir "$runs/ipo"
"$python" core/grpo.py --config configs/demo.py --config configs/rloo.py --model_dir "$runs/ipo" --seed "$seed" \
    --save_interval 0 --save_dir "$runs/rloo" "$@"
exec "$python" core/eval.py --model_dir "$runs/ipo,models/tiny,$runs/sft,$runs/rloo" --num_eval_tasks 1024 \
    --num_eval_samples 4 --json "$runs/scores.json"
