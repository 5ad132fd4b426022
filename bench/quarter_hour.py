"""What a run says of its device, for bench/quarter_hour.sh: what it compiled, how fast its steps were, what it learned.

    python bench/quarter_hour.py model SHAPE FOLDER SHARE    # a random model; so much of its vocabulary ends a reply
    python bench/quarter_hour.py run FOLDER                  # tables of programs.jsonl and metrics.jsonl
    python bench/quarter_hour.py vllm MODEL_DIR --groups_per_batch 32 --prompt_tokens 96 --num_generation_tokens 256
"""

import json
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from statistics import median

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    import utils.settings.packages  # noqa: F401 (says what to install)

from bench.common import make_prompts, markdown_table, seconds_of, spread, write_random_model

METRICS = {  # of a step, and their names in the table
    "times/run": "s since the start", "times/step": "step, s", "times/compile": "compiled, s",
    "times/rollout": "rollout, s", "times/logprobs": "log-probabilities, s", "times/update": "update, s",
    "rollout/tokens_per_second": "tokens/s",
    "speed/mfu": "MFU", "speed/occupancy": "occupancy", "speed/rows_running": "rows that draw",
    "speed/pages_in_use": "pages in use", "rollout/recomputed": "tokens computed again",
    "speed/padding": "padding", "memory/peak_gb": "GB",
}  # fmt: skip


def program_table(file: Path) -> list[str]:
    """Returns a line for each kind of program: how many, how many after the first step, from the cache, seconds."""
    counts, late, cached, seconds = Counter(), Counter(), Counter(), Counter()
    for row in map(json.loads, file.read_text().splitlines()):
        for name in (row["program"], "all"):
            counts[name] += 1
            late[name] += row.get("num_steps", 0) > 0
            cached[name] += row["from_cache"]
            seconds[name] += row["seconds"]
    rows = [(name, counts[name], late[name], cached[name], x) for name, x in seconds.most_common()]
    return markdown_table(("program", "number", "after step 1", "from the cache", "seconds"), rows)


def step_table(file: Path) -> list[str]:
    """Returns a line for each metric, with a column for each of the first steps, and for the last one."""
    steps = [row for row in map(json.loads, file.read_text().splitlines()) if "times/step" in row]
    steps = [*steps[:3], *steps[3:][-1:]]
    columns = ("step", *(str(step["global_step"]) for step in steps))
    known = {name: label for name, label in METRICS.items() if any(name in step for step in steps)}
    rows = [(label, *(step.get(name, "") for step in steps)) for name, label in known.items()]
    return markdown_table(columns, rows)


def curve_table(file: Path) -> list[str]:
    """Returns a line for each held-out evaluation, and none if there was none."""
    tests = [row for row in map(json.loads, file.read_text().splitlines()) if "test_env/correct_answer" in row]
    names = ("global_step", "times/run", "test_env/correct_answer", "test_env/length")
    rows = [tuple(row.get(name, "") for name in names) for row in tests]
    return markdown_table(("step", "s since the start", "held out, correct", "tokens"), rows) if rows else []


def time_vllm(model_dir: str, *options: str) -> None:
    """Prints the tokens/s of vLLM, if it is installed, for prompts and lengths as in bench/peers.py."""
    if find_spec("vllm") is None:
        return print("vLLM is not installed")
    from vllm import LLM, SamplingParams

    sizes = {name: int(value) for name, value in zip(options[::2], options[1::2], strict=True)}
    num_prompts, num_samples = sizes["--groups_per_batch"], sizes.get("--group_size", 8)
    num_tokens = sizes["--num_generation_tokens"]
    ids = make_prompts(1000, num_prompts, sizes["--prompt_tokens"])
    prompts = [{"prompt_token_ids": prompt} for prompt in ids]
    length = sizes["--prompt_tokens"] + num_tokens
    model = LLM(model_dir, dtype="bfloat16", max_model_len=length, max_num_seqs=512, gpu_memory_utilization=0.8)
    params = SamplingParams(n=num_samples, max_tokens=num_tokens, ignore_eos=True, logprobs=0)
    found = seconds_of(lambda: model.generate(prompts, params, use_tqdm=False), sizes.get("--repeats", 3))
    print(f"vLLM: {num_prompts * num_samples * num_tokens / median(found):,.0f} tokens/s, seconds {spread(found)}")


def main(command: str, *arguments: str) -> None:
    if command == "model":
        name, folder, share = arguments
        print(write_random_model(name, folder, float(share)))
        return
    if command == "vllm":
        return time_vllm(*arguments)
    tables = (("programs.jsonl", program_table), ("metrics.jsonl", step_table), ("metrics.jsonl", curve_table))
    for name, table in tables:
        file = Path(arguments[0]) / name
        if file.exists():
            print("", *table(file), sep="\n")


if __name__ == "__main__":
    if "--help" in sys.argv or len(sys.argv) < 3:
        sys.exit(print(__doc__) if "--help" in sys.argv else __doc__)
    main(*sys.argv[1:])
