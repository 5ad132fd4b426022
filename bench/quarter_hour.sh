#!/usr/bin/env bash
# What a new accelerator says in a quarter of an hour, the most important first: are results right, how near to its
# limits are sampling and updates, how long do transformers and PyTorch take, what does a model learn on GSM8K.
#
#     bash bench/quarter_hour.sh FOLDER [MODEL_DIR [PART...]]
#
# FOLDER/page.md has it all, and FOLDER/PART.log what a part printed. A part that takes longer than its seconds is
# interrupted, and says what it has. PARTS: checks roofline peers gsm8k again, 770 seconds in all. MODEL_DIR is trained
# on GSM8K; runs/real_model.py makes one. Without it, or with "", the model is random, with the sizes of Qwen2.5-0.5B.
# OPTIONS in the environment are added to the command of training, for example OPTIONS="--max_steps 60 --lr 2e-6".
# Without an accelerator shapes are tiny: a rehearsal that shows that everything runs.
set -uo pipefail
cd "$(dirname "$0")/.."
folder=${1:?"bash bench/quarter_hour.sh FOLDER [MODEL_DIR [PART...]]"}
model=${2:-}
parts=("${@:3}")
[[ ${#parts[@]} == 0 ]] && parts=(checks roofline peers gsm8k again)
python=${PYTHON:-python}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
mkdir -p "$folder"
export JAX_COMPILATION_CACHE_DIR=${JAX_COMPILATION_CACHE_DIR:-$folder/cache} PYTHONUNBUFFERED=1
platform=$("$python" -c "import jax; print(jax.default_backend())") || exit

part() { # its name, the seconds that it may take, the command
    local name=$1 seconds=$2 start=$SECONDS
    shift 2
    timeout -s INT -k 25 "$seconds" "$python" "$@" > "$folder/$name.log" 2>&1
    echo "$name: status $?, $((SECONDS - start)) s of $seconds" | tee -a "$folder/seconds.log"
}

run() { # its name, the seconds that it may take, more options: trains, then says what was compiled and how fast it was
    local name=$1 seconds=$2
    shift 2
    [[ $model ]] || model=$("$python" bench/quarter_hour.py model $shape "$scratch" 0.0036)
    # shellcheck disable=SC2086  # several options
    part "$name" "$seconds" core/grpo.py --model_dir "$model" --env_name gsm8k \
        --env_options form=boxed,thinking=off --test_env_name gsm8k-test --save_interval 0 \
        --save_dir "$folder/runs/$name" "${training[@]}" ${OPTIONS:-} "$@"
    "$python" bench/quarter_hour.py run "$folder/runs/$name" >> "$folder/$name.log"
}

if [[ $platform == cpu ]]; then
    shape=tiny
    training=(--groups_per_batch 4 --ppo_minibatch 16 --num_generation_tokens 40 --page_size 16 --max_steps 2)
    training+=(--num_eval_tasks 8 --lr 1e-4)
    few=(--max_steps 1)
    sizes=(--slots 16,32 --pages 16 --groups_per_batch 2 --prompt_tokens 8 --num_generation_tokens 64 --repeats 1)
    checks=(--layers 1 --vocabulary 512 --shape tiny)
    work=(--groups_per_batch 2 --group_size 2 --prompt_tokens 8 --num_generation_tokens 8 --warmup 1 --repeats 1)
else
    shape=Qwen2.5-0.5B
    training=(--groups_per_batch 64 --group_size 8 --ppo_minibatch 128 --num_generation_tokens 400 --max_resampling 1)
    training+=(--num_eval_tasks 0 --test_interval 20 --lr 3e-6 --warmup_steps 8 --max_steps 100)
    few=(--max_steps 1 --test_env_name "")
    sizes=(--slots 512 --pages 64 --groups_per_batch 64 --prompt_tokens 96 --num_generation_tokens 400 --repeats 2)
    checks=()
    work=(--groups_per_batch 32 --prompt_tokens 96 --num_generation_tokens 256 --warmup 1 --repeats 3)
fi
for name in "${parts[@]}"; do
    case $name in
        checks) part checks 90 bench/device_checks.py "${checks[@]}" ;;
        roofline) part roofline 110 bench/roofline.py --shape $shape --stop_share 0.0036 --kernels 1 "${sizes[@]}" ;;
        # Two processes share the device's memory.
        peers) XLA_PYTHON_CLIENT_MEM_FRACTION=0.45 part peers 125 bench/peers.py --work rollout,update --peers torch \
            --variants torch=dynamic --shape $shape "${work[@]}" ;;
        gsm8k) run gsm8k 395 ;;
        again) run again 50 "${few[@]}" ;; # what a second start compiles
        *) echo "no part $name: checks, roofline, peers, gsm8k, again" >&2 && exit 1 ;;
    esac
done
for name in checks roofline peers gsm8k again; do
    [[ -e $folder/$name.log ]] || continue
    printf '\n## %s\n\n' "$name"
    grep -Ev "^(model|curves|chat|side by side|evaluate): |^--- |^$" "$folder/$name.log" | tail -n 120
done > "$folder/page.md"
echo "all is done: $folder/page.md"
