"""TRL's GRPOTrainer as a side of bench/peers.py.

Its best settings, as far as known: float32 as ours (on CPU), no gradient checkpointing, fused AdamW, micro-batches of
8 rows, no KL, no logging, transformers' dynamic cache (the fastest on CPU), rewards by a function that costs nothing.
"""

import os
import tempfile

try:
    import datasets
    import torch
    import trl
    from transformers import AutoTokenizer, TrainerCallback, TrainingArguments
except ImportError:  # then this side is left out
    trl, TrainerCallback, TrainingArguments = None, object, None

from bench.side_torch import MICROBATCH, load


class BetweenSteps(TrainerCallback):
    """Lets each step of the trainer wait for its turn."""

    def __init__(self, gate, tokens: int):
        self.gate, self.tokens = gate, tokens

    def on_step_begin(self, args, state, control, **_) -> None:
        self.gate(self.tokens)


def even_tokens(completion_ids, **_) -> list[float]:
    return [sum(i % 2 == 0 for i in ids) / len(ids) for ids in completion_ids]


def run(work: dict, variant: str, gate) -> None:
    """Steps of the trainer; those of "update" are given the completions instead of generating them."""
    if trl is None:
        raise ImportError("trl is not installed")
    model, group_size, limit = load(work), work["group_size"], work["limit"]
    prompts, num_rows = work["prompts"], len(work["prompts"]) * work["group_size"]
    # With two optimiser steps per generation it computes old log-probabilities; here each step generates, as ours.
    with tempfile.TemporaryDirectory() as folder:
        config = trl.GRPOConfig(
            output_dir=folder, report_to="none", save_strategy="no", logging_strategy="no", disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(), bf16=torch.cuda.is_available(), optim="adamw_torch_fused",
            learning_rate=1e-6, lr_scheduler_type="constant", max_steps=10**6, max_grad_norm=1.0,
            per_device_train_batch_size=MICROBATCH, gradient_accumulation_steps=num_rows // MICROBATCH,
            num_generations=group_size, max_completion_length=limit, beta=0.0, gradient_checkpointing=False,
            temperature=1.0, top_k=0, top_p=1.0, shuffle_dataset=False, dataloader_pin_memory=False,
        )  # fmt: skip
        problems = datasets.Dataset.from_list([{"prompt": str(i)} for i in range(len(prompts))])
        trainer = trl.GRPOTrainer(
            model, even_tokens, config, problems, callbacks=[BetweenSteps(gate, num_rows * limit)],
            processing_class=AutoTokenizer.from_pretrained(work["model_dir"], padding_side="left"),
        )  # fmt: skip
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        trainer.eos_token_id = trainer.generation_config.eos_token_id = model.generation_config.eos_token_id = None
        trainer.eos_token_id = -1  # no completion ends before the limit
        trainer._tokenize_prompts = lambda texts: ([prompts[int(text)] for text in texts], None, {})
        if work["name"].startswith("update"):
            completions = [row[-limit:] for row in work["rows"]]
            trainer._generate_single_turn = lambda *_, **__: (completions, None)
        if work["name"] == "update":
            score, generate = trainer._get_per_token_logps_and_entropies, trainer._generate_and_score_completions

            def with_old(inputs):
                out = generate(inputs)
                ids = torch.cat([out["prompt_ids"], out["completion_ids"]], 1)
                mask = torch.cat([out["prompt_mask"], out["completion_mask"]], 1)
                with torch.no_grad():
                    old = score(trainer.model, ids, mask, out["completion_ids"].shape[1], batch_size=MICROBATCH)[0]
                return out | {"old_per_token_logps": old}

            trainer._generate_and_score_completions = with_old
        trainer.train()
