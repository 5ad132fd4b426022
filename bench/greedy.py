"""transformers' greedy replies beside ours: a folder's replies of core/eval.py --temperature 0 --save_samples.

    python core/eval.py --model_dir FOLDER --temperature 0 --save_samples samples.jsonl ...
    python bench/greedy.py samples.jsonl --limit 80 --prefix Reply:    # needs torch and transformers

The model is the Hugging Face folder that the file names, in float32; a run's adapters are merged into one before:
`python models/hf_to_jax.py --hf_dir RUN/step60 --ckpt_dir FOLDER`. Replies are compared as text. Exit status 1: one
differs.
"""

import argparse
import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("samples", type=Path, help="what --save_samples wrote")
    parser.add_argument("--limit", type=int, required=True, help="--num_generation_tokens of the evaluation")
    parser.add_argument("--prefix", default="", help="the environment option prefix: what replies begin with")
    options = parser.parse_args()
    rows = [json.loads(line) for line in options.samples.read_text("utf-8").splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(rows[0]["model_dir"])
    model = AutoModelForCausalLM.from_pretrained(rows[0]["model_dir"], dtype=torch.float32)
    num_equal = 0
    for row in rows:
        prompt = tokenizer(row["prompt"], return_tensors="pt", add_special_tokens=False)
        settings = dict(do_sample=False, repetition_penalty=1.0, temperature=None, top_p=None, top_k=None)
        tokens = model.generate(**prompt, **settings, max_new_tokens=options.limit)[0, prompt.input_ids.shape[1] :]
        theirs = tokenizer.decode(tokens, skip_special_tokens=True)
        ours = row["completions"][0]["text"].removeprefix(options.prefix)
        num_equal += theirs == ours
        if theirs != ours:
            print(f"task {row['task']}:\n  ours   {ours!r}\n  theirs {theirs!r}", flush=True)
    print(f"{num_equal} of {len(rows)} greedy replies are equal")
    raise SystemExit(num_equal < len(rows))


if __name__ == "__main__":
    main()
