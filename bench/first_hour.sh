#!/usr/bin/env bash
# Asks a machine with a new accelerator whether results are right, then how fast it is, the most important first.
#
#     bash bench/first_hour.sh FOLDER      # again until it says that all is done
#
# A call takes at most MINUTES (9), and goes on where the last one ended or was killed. What a part found is in
# FOLDER/PART.json, what it printed in PART.log; PART.failed is the log of one that failed, which is tried again when
# that file is removed. FOLDER/page.md and page.json hold all of them. On a machine without an accelerator shapes are
# tiny: then it only shows that everything runs. Parts whose packages are absent (torch, the compilers that
# bench/compiled.py needs) are left out.
set -uo pipefail
cd "$(dirname "$0")/.."
folder=${1:?"bash bench/first_hour.sh FOLDER"}
python=${PYTHON:-python}
limit=$((${MINUTES:-9} * 60))
left=()
ran=0
mkdir -p "$folder"
platform=$("$python" -c "import jax; print(jax.default_backend())") || exit

part() { # its name, the seconds that it may take, the command
    local name=$1 seconds=$2
    shift 2
    [[ -e $folder/$name.json || -e $folder/$name.failed ]] && return
    if ((ran && SECONDS + seconds > limit)); then
        left+=("$name")
        return
    fi
    echo "$name: $*"
    ran=1
    local start=$SECONDS
    if timeout -k 10 "$seconds" "$python" "$@" --json "$folder/$name.part" > "$folder/$name.log" 2>&1; then
        mv "$folder/$name.part" "$folder/$name.json"
    else
        mv "$folder/$name.log" "$folder/$name.failed"
        tail -n 3 "$folder/$name.failed"
    fi
    echo "    $((SECONDS - start)) s"
}

if [[ $platform == cpu ]]; then
    part checks 400 bench/device_checks.py --layers 1 --vocabulary 512
    part decode_and_update 120 bench/roofline.py --groups_per_batch 2 --repeats 1
    part lengths_100_to_1024 120 bench/rollout.py --lengths 10,40 --groups_per_batch 16 --group_size 1 --repeats 1
    part step 120 bench/grpo_step.py --groups_per_batch 2 --num_generation_tokens 32 --repeats 1
    part step_int8 120 bench/grpo_step.py --groups_per_batch 2 --num_generation_tokens 32 --repeats 1 --kv_dtype int8 \
        --importance_correction truncate
    part transformers 300 bench/peers.py --work rollout --peers torch --groups_per_batch 2 --num_generation_tokens 16 \
        --repeats 1
else
    part checks 300 bench/device_checks.py
    part decode_and_update 300 bench/roofline.py --shape Qwen3-0.6B --groups_per_batch 32 --prompt_tokens 512 \
        --num_generation_tokens 512
    part lengths_100_to_1024 400 bench/rollout.py --shape Qwen3-0.6B --lengths 100,1024 --groups_per_batch 256 \
        --group_size 1 --repeats 3
    part update_1.7B 300 bench/roofline.py --shape Qwen3-1.7B --groups_per_batch 2 --prompt_tokens 512 \
        --num_generation_tokens 512 --repeats 3
    part step_1.7B 400 bench/grpo_step.py --shape Qwen3-1.7B --groups_per_batch 32 --prompt_tokens 256 \
        --num_generation_tokens 768 --repeats 3
    part step_1.7B_int8 400 bench/grpo_step.py --shape Qwen3-1.7B --groups_per_batch 32 --prompt_tokens 256 \
        --num_generation_tokens 768 --repeats 3 --kv_dtype int8 \
        --importance_correction truncate
    part transformers 500 bench/peers.py --work rollout --peers torch --shape Qwen3-0.6B --groups_per_batch 16 \
        --num_generation_tokens 512 --repeats 2
    target=$("$python" bench/first_hour.py target)
    if [[ -n $target ]]; then
        JAX_PLATFORMS=cpu part predicted 500 bench/compiled.py --target "$target" --models 0.6B,1.7B --devices 1 \
            --layers 1,2
    fi
fi
"$python" bench/first_hour.py page "$folder"
if ((${#left[@]})); then
    echo "left for the next call: ${left[*]}"
else
    echo "all is done: $folder/page.md"
fi
