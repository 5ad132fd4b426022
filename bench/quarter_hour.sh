#!/usr/bin/env bash
# Measures an accelerator in two quarters of an hour, the most important first. It writes FOLDER/page.md.
#
#     bash bench/quarter_hour.sh FOLDER [MODEL_DIR [PART...]]
#
# PARTS, with their seconds; `first` (the default) and `second` name those of a quarter:
#   first    checks 60 (results against references), decode 200, cublas 110 (products by cuBLAS), graph 60 (a segment is
#            one CUDA graph), before 60 (the checkout in $BEFORE), roofline 60, gsm8k 120 (10 steps), minimal 60 (10
#            steps of core/minimal.py), torch 70 (PyTorch's update on the same rows)
#   second   curve 230 (GSM8K, seed 1), greedy 60, pass4 60 (each before and after the curve, strict and lenient),
#            before 60, roofline 60, generate 150 (transformers, and vLLM if it is installed)
#
# A line at least every 10 seconds says what runs. A part that takes longer than its seconds is interrupted, and says
# what it has; after LIMIT seconds (870) nothing is begun. MODEL_DIR is trained on GSM8K with the data of $DATA
# (runs/real_model.py makes a model); without it, or with "", the model is random. $OPTIONS are added to the command of
# training. $WHEELS is a folder of packages to install first. Without an accelerator shapes are tiny: a rehearsal.
set -uo pipefail
cd "$(dirname "$0")/.."
folder=${1:?"bash bench/quarter_hour.sh FOLDER [MODEL_DIR [PART...]]"}
model=${2:-}
first=(checks decode cublas graph before roofline gsm8k minimal torch)
second=(curve greedy pass4 before roofline generate)
parts=("${@:3}")
[[ ${parts[*]:-first} == first ]] && parts=("${first[@]}")
[[ ${parts[*]} == second ]] && parts=("${second[@]}")
python=${PYTHON:-python}
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
export JAX_COMPILATION_CACHE_DIR=${JAX_COMPILATION_CACHE_DIR:-$folder/cache} PYTHONUNBUFFERED=1
[[ ${WHEELS:-} ]] && "$python" -m pip install -q --no-index --no-deps "$WHEELS"/*.whl
needed="import antlr4, jax, latex2sympy2_extended, math_verify, optax, orbax.checkpoint, safetensors, transformers"
platform=$("$python" -c "$needed; print(jax.default_backend())") || exit

part() { # its name, the seconds that it may take, the command
    local name=$1 seconds=$2 start=$SECONDS left=$((${LIMIT:-870} - SECONDS))
    local log=$folder/$name.log
    shift 2
    ((left < 15)) && echo "$name: not begun, $SECONDS s are over" | tee -a "$folder/seconds.log" && return
    ((seconds > left)) && seconds=$left
    echo "$name: begins, $seconds s" && : > "$log"
    while sleep 8; do
        echo "$name: $((SECONDS - start)) s of $seconds: $(tail -c 200 "$log" | tr '\r' '\n' | tail -n 1 | cut -c 1-90)"
    done &
    timeout -s INT -k 15 "$seconds" "$@" > "$log" 2>&1
    echo "$name: status $?, $((SECONDS - start)) s of $seconds" | tee -a "$folder/seconds.log"
    kill $! 2> /dev/null
}

train() { # its name, seconds, more options: trains, then says what was compiled and how fast it was
    local name=$1 seconds=$2
    shift 2
    # shellcheck disable=SC2086  # several options
    part "$name" "$seconds" "$python" core/grpo.py --model_dir "$model" --env_name gsm8k "${data[@]}" \
        --env_options form=boxed,thinking=off --test_env_name gsm8k-test --save_interval 0 \
        --save_dir "$folder/runs/$name" "${training[@]}" "$@" ${OPTIONS:-}
    "$python" bench/quarter_hour.py run "$folder/runs/$name" >> "$folder/$name.log"
}

roofline() { # its name, seconds, options; the checkout is the folder that we are in
    local name=$1 seconds=$2
    shift 2
    part "$name" "$seconds" "$python" bench/roofline.py --shape $shape --stop_share 0.0036 "${sizes[@]}" "$@"
}

score() { # its name, seconds, options: the model before and after training
    local name=$1 seconds=$2
    shift 2
    part "$name" "$seconds" "$python" core/eval.py --model_dir "$model,$folder/runs/curve" "${data[@]}" \
        --env_name "gsm8k-test(form=boxed,thinking=off),gsm8k-test(form=any,thinking=off)" "${scoring[@]}" "$@"
}

data=()
[[ ${DATA:-} ]] && data=(--data_dir "$DATA")
if [[ $platform == cpu ]]; then
    shape=tiny slots=16,32 all=(--max_steps 2 --num_eval_tasks 8) few=(--max_steps 2 --num_eval_tasks 4)
    training=(--groups_per_batch 4 --group_size 4 --ppo_minibatch 16 --num_generation_tokens 40 --lr 1e-4)
    small=(--groups_per_batch 2 --group_size 2 --ppo_minibatch 4 --num_generation_tokens 16 --prompt_length 384
        --rows_per_microbatch 4 --num_eval_tasks 4 --num_eval_samples 1 --max_steps 2)
    scoring=(--num_eval_tasks 8 --num_generation_tokens 40)
    sizes=(--pages 16 --groups_per_batch 2 --prompt_tokens 8 --num_generation_tokens 64 --repeats 1)
    checks=(--layers 1 --vocabulary 512 --shape tiny)
    work=(--groups_per_batch 2 --group_size 2 --prompt_tokens 8 --num_generation_tokens 8 --warmup 1 --repeats 1)
else
    shape=Qwen2.5-0.5B slots=512,256,128 few=(--max_steps 10 --test_env_name "")
    all=(--max_steps 60 --num_eval_tasks 512 --test_interval 20)
    training=(--groups_per_batch 64 --group_size 8 --ppo_minibatch 128 --num_generation_tokens 400 --max_resampling 1
        --lr 3e-6 --warmup_steps 8)
    small=(--groups_per_batch 64 --group_size 8 --ppo_minibatch 128 --num_generation_tokens 400 --prompt_length 384
        --rows_per_microbatch 32 --num_eval_tasks 8 --num_eval_samples 1 --dtype bfloat16 --lr 3e-6 --max_steps 10)
    scoring=(--num_eval_tasks 512 --num_generation_tokens 400)
    sizes=(--pages 64 --groups_per_batch 64 --prompt_tokens 96 --num_generation_tokens 400 --repeats 2)
    checks=()
    work=(--groups_per_batch 32 --prompt_tokens 96 --num_generation_tokens 256 --warmup 1 --repeats 3)
fi
[[ $model ]] || model=$("$python" bench/quarter_hour.py model $shape "$folder/model" 0.0036)
peers=("$python" bench/peers.py --peers torch --shape $shape "${work[@]}")
for name in "${parts[@]}"; do
    case $name in
        checks) part checks 60 "$python" bench/device_checks.py "${checks[@]}" ;;
        decode) roofline decode 200 --slots $slots --kernels 1 ;;
        cublas) XLA_FLAGS=--xla_gpu_enable_triton_gemm=false roofline cublas 110 --slots ${slots%%,*} --kernels 1 ;;
        graph) XLA_FLAGS=--xla_gpu_enable_command_buffer=+WHILE roofline graph 60 --slots ${slots%%,*} ;;
        before)
            [[ ${BEFORE:-} ]] || continue
            pushd "$BEFORE" > /dev/null && roofline before 60 --slots ${slots%%,*} && popd > /dev/null
            ;;
        roofline) roofline roofline 60 --slots ${slots%%,*} ;;
        gsm8k) train gsm8k 120 "${few[@]}" ;;
        minimal)
            part minimal 60 "$python" core/minimal.py --model_dir "$model" --env_name gsm8k "${data[@]}" "${small[@]}"
            ;;
        # Two processes share the device's memory.
        torch) XLA_PYTHON_CLIENT_MEM_FRACTION=0.45 part torch 70 "${peers[@]}" --work update ;;
        curve) train curve 230 --seed 1 "${all[@]}" ;;
        greedy) score greedy 60 --temperature 0 ;;
        pass4) score pass4 60 --num_eval_samples 4 ;;
        generate)
            XLA_PYTHON_CLIENT_MEM_FRACTION=0.45 part generate 90 "${peers[@]}" --work rollout --variants torch=dynamic
            part vllm 60 "$python" bench/quarter_hour.py vllm "$model" "${work[@]}"
            ;;
        *) echo "no part $name: ${first[*]} ${second[*]}" >&2 && exit 1 ;;
    esac
done
for log in $(ls -tr "$folder"/*.log); do
    printf '\n## %s\n\n' "$(basename "$log" .log)"
    grep -Ev "^(model|curves|chat|side by side|evaluate): |^--- |^$" "$log" | tail -n 120
done > "$folder/page.md"
echo "all is done: $folder/page.md"
