#!/usr/bin/env bash
# Looks at a new accelerator, in six minutes, the most important first: what a run compiles and how fast it is, kernels
# of a segment, shares of the roofline by slots and pages, what a second start compiles, whether results are right.
#
#     bash bench/first_hour.sh FOLDER
#
# FOLDER/page.md has it all, and FOLDER/PART.log what a part printed. A part that takes longer than its seconds is
# interrupted, and says what it has. The model is random, with the sizes of Qwen2.5-0.5B, replies have 280 tokens on
# average, and the reward is their number of characters. Without an accelerator shapes are tiny: then it only shows that
# everything runs.
set -uo pipefail
cd "$(dirname "$0")/.."
folder=${1:?"bash bench/first_hour.sh FOLDER"}
python=${PYTHON:-python}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
mkdir -p "$folder"
export JAX_COMPILATION_CACHE_DIR=$scratch/cache PYTHONUNBUFFERED=1
platform=$("$python" -c "import jax; print(jax.default_backend())") || exit

part() { # its name, the seconds that it may take, the command
    local name=$1 seconds=$2 start=$SECONDS
    shift 2
    timeout -s INT -k 25 "$seconds" "$python" "$@" > "$folder/$name.log" 2>&1
    echo "$name: status $?, $((SECONDS - start)) s of $seconds"
}

run() { # its name, the seconds that it may take, steps: trains, then says what was compiled and how fast it was
    local name=$1
    part "$name" "$2" core/grpo.py --model_dir "$scratch/$shape" --env_name poem --max_steps "$3" --save_interval 0 \
        --save_dir "$scratch/$name" "${training[@]}"
    cp "$scratch/$name/programs.jsonl" "$folder/$name.programs.jsonl"
    "$python" bench/first_hour.py run "$scratch/$name" >> "$folder/$name.log"
}

if [[ $platform == cpu ]]; then
    shape=tiny
    training=(--groups_per_batch 4 --ppo_minibatch 16 --num_generation_tokens 40 --page_size 16)
    sizes=(--slots 16,32,8 --pages 16,8 --groups_per_batch 2 --prompt_tokens 8 --num_generation_tokens 64 --repeats 1)
    checks=(--layers 1 --vocabulary 512 --shape tiny)
else
    shape=Qwen2.5-0.5B
    training=(--groups_per_batch 64 --ppo_minibatch 128 --num_generation_tokens 400)
    sizes=(--slots 512,1024,128 --pages 64,16 --groups_per_batch 16 --prompt_tokens 96 --num_generation_tokens 400 --repeats 2)
    checks=()
fi
part model 40 bench/first_hour.py model $shape "$scratch" 0.0036
run run 110 3
part roofline 120 bench/roofline.py --shape $shape --stop_share 0.0036 --kernels 1 "${sizes[@]}"
run again 50 1
part checks 60 bench/device_checks.py "${checks[@]}"
for name in run roofline again checks; do
    printf '\n## %s\n\n' $name
    grep -Ev "^(model|curves|chat|side by side|evaluate): |^--- |^$" "$folder/$name.log" | tail -n 120
done > "$folder/page.md"
echo "all is done: $folder/page.md"
