"""TRL's GRPOTrainer as a side of bench/peers.py, of turns with an environment.

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
    from trl import chat_template_utils
    from trl.trainer import grpo_trainer
except ImportError:  # then this side is left out
    trl, TrainerCallback, TrainingArguments = None, object, None

from bench.side_torch import MICROBATCH, load

CALL = {"type": "function", "function": {"name": "act", "arguments": {}}}


class BetweenSteps(TrainerCallback):
    """Lets each step of the trainer wait for its turn."""

    def __init__(self, gate, tokens: int):
        self.gate, self.tokens = gate, tokens

    def on_step_begin(self, args, state, control, **_) -> None:
        self.gate(self.tokens)


class Environment:
    """An environment as TRL takes them: its public method is a tool, here one that is called after every turn."""

    def reset(self, **_) -> None:
        """Starts an episode."""

    def act(self) -> str:
        """Acts."""
        return "0"


def even_tokens(completion_ids, **_) -> list[float]:
    return [sum(i % 2 == 0 for i in ids) / len(ids) for ids in completion_ids]


def run(work: dict, variant: str, gate) -> None:
    """Steps of the trainer; those of "update" are given the completions instead of generating them."""
    if trl is None:
        raise ImportError("trl is not installed")
    has_turns = work["name"].startswith("turns")
    num_tokens = work["limit"] * len(work["prompts"]) * work["group_size"]
    if has_turns:
        num_tokens = num_tokens // work["limit"] * work["turn_tokens"] * work["num_turns"]
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(work, folder, BetweenSteps(gate, num_tokens), has_turns)
        if has_turns:
            fix_turns(trainer, work, num_tokens)
        if work["name"] == "turns":
            rows = [row for row in trainer.train_dataset for _ in range(work["group_size"])]
            trainer.model.train()
            while gate(num_tokens):
                trainer._generate_and_score_completions(rows)
        if work["name"].startswith("update"):
            fix_completions(trainer, work)
        trainer.train()


def make_trainer(work: dict, folder: str, callback: TrainerCallback, has_turns: bool):
    """A trainer of these prompts, in which no turn ends before its limit."""
    model, prompts = load(work), work["prompts"]
    num_rows = len(prompts) * work["group_size"]
    # With two optimizer steps per generation it computes old log-probabilities; here each step generates, as ours.
    settings = dict(
        output_dir=folder, report_to="none", save_strategy="no", logging_strategy="no", disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(), bf16=torch.cuda.is_available(), optim="adamw_torch_fused",
        learning_rate=1e-6, lr_scheduler_type="constant", max_steps=10**6, max_grad_norm=1.0,
        per_device_train_batch_size=MICROBATCH, gradient_accumulation_steps=num_rows // MICROBATCH,
        num_generations=work["group_size"], max_completion_length=work["limit"], beta=0.0,
        gradient_checkpointing=False, temperature=1.0, top_k=0, top_p=1.0, shuffle_dataset=False,
        dataloader_pin_memory=False,
    )  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(work["model_dir"], padding_side="left")
    if has_turns:
        tokenizer.chat_template = chat_template_utils.qwen3_chat_template  # one whose calls it can parse
        settings |= dict(max_tool_calling_iterations=work["num_turns"] - 1)
        # Its only limit is that of all turns, up to which it would draw each turn, and cut off what is too much.
        settings |= dict(generation_kwargs={"max_new_tokens": work["turn_tokens"]})
    problems = datasets.Dataset.from_list(
        [{"prompt": [{"role": "user", "content": str(i)}] if has_turns else str(i)} for i in range(len(prompts))]
    )
    trainer = trl.GRPOTrainer(
        model, even_tokens, trl.GRPOConfig(**settings), problems, callbacks=[callback], processing_class=tokenizer,
        environment_factory=Environment if has_turns else None,
    )  # fmt: skip
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    trainer.generation_config.eos_token_id = model.generation_config.eos_token_id = None
    trainer.eos_token_ids = [-1]  # no completion ends before the limit, or is truncated at such a token

    def tokenize(texts):
        numbers = [text[-1]["content"] for text in texts] if has_turns else texts
        return [prompts[int(number)] for number in numbers], None, {}

    trainer._tokenize_prompts = tokenize
    return trainer


def fix_turns(trainer, work: dict, num_tokens: int) -> None:
    """Makes every turn a call, and each answer as long as ours; TRL's parser and template do their work all the same.

    Rows of equal length are what its loop is fastest with: it waits for the longest turn, and pads prompts to the left.
    """
    parse, render = grpo_trainer.parse_response, trainer._get_tool_suffix_ids
    generate = trainer._generate_and_score_completions

    def parse_call(*arguments, **settings):
        return parse(*arguments, **settings) | {"tool_calls": [CALL]}

    def fixed_suffix(messages):
        render(messages)
        return work["observation"]

    def checked(inputs):
        out = generate(inputs)
        lengths, drawn = out["completion_mask"].sum(1), out["tool_mask"].sum()
        assert (lengths == work["limit"]).all() and drawn == num_tokens, (lengths, drawn)
        return out

    grpo_trainer.parse_response, trainer._get_tool_suffix_ids = parse_call, fixed_suffix
    trainer._generate_and_score_completions = checked


def fix_completions(trainer, work: dict) -> None:
    """Gives the trainer the completions to learn from, and has it compute old log-probabilities if the work says so."""
    completions = [row[-work["limit"] :] for row in work["rows"]]
    trainer._generate_single_turn = lambda *_, **__: (completions, None)
    if work["name"] != "update":
        return
    score, generate = trainer._get_per_token_logps_and_entropies, trainer._generate_and_score_completions

    def with_old(inputs):
        out = generate(inputs)
        ids = torch.cat([out["prompt_ids"], out["completion_ids"]], 1)
        mask = torch.cat([out["prompt_mask"], out["completion_mask"]], 1)
        with torch.no_grad():
            old = score(trainer.model, ids, mask, out["completion_ids"].shape[1], batch_size=MICROBATCH)[0]
        return out | {"old_per_token_logps": old}

    trainer._generate_and_score_completions = with_old
