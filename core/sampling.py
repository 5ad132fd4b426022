"""Samples from a checkpoint: a chat on a terminal, or completions of prompts from a file.

    python core/sampling.py --ckpt_dir ~/checkpoints/Qwen3-1.7B/     # a chat on a terminal, or built-in prompts
    python core/sampling.py --ckpt_dir models/tiny --prompts prompts.jsonl --json out.jsonl    # a file of prompts
"""

import gc
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    gc.disable()  # while modules are imported: `ending_together` enables it
    import utils.settings.packages  # noqa: F401 (says what to install)

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from core.chat.models import ChatCommand, load_chat_models, load_last, make_text_sampler, prompt_styles, with_room
from core.chat.terminal import converse
from core.records import Completions
from core.sampler import Sampler, Segment
from envs.data.files import read_file
from envs.data.messages import Columns, Messages, as_messages, read_exchange
from envs.data.rows import check_text
from models.memory import out_of_memory
from models.names import Params
from models.tokenizer import Tokenizer
from utils.devices.startup import ending_together, make_layout
from utils.metrics.jsonl import JSONRow
from utils.metrics.logger import printable
from utils.metrics.terminal import Wait, waiting
from utils.settings.config import parse
from utils.settings.errors import UserError, user_errors
from utils.settings.options import group, option
from utils.threefry import make_key

BUILT_IN = ("Use 3 7 12 to make 24.", "Write a poem about the sea.", "What is the capital of France?")


@dataclass(frozen=True)
class PromptConfig:
    """Prompts and output."""

    prompts: str = option(
        "",
        'File of {"prompt": text} or {"messages": [...]} (JSONL, JSON, CSV, Parquet); empty: a few built-in prompts',
        essential=True,
    )
    json: str = option("", "JSONL file for the rows of --prompts with their completions; empty: print only")
    num_samples: int = option(1, "Number of completions of each prompt")

    def __post_init__(self):
        if self.num_samples < 1:
            raise UserError(f"--num_samples {self.num_samples} must be at least 1: raise it")


@dataclass(frozen=True)
class SamplingCommand(ChatCommand):
    """Sampling from a checkpoint."""

    prompts: PromptConfig = group(PromptConfig)


def read_prompts(path: str) -> list[JSONRow]:
    """Returns the rows of a file, each with "prompt" or "messages". Raises: UserError for one without, or no text."""
    if not path:
        return [{"prompt": prompt} for prompt in BUILT_IN]
    rows = []
    for location, row in read_file(Path(os.path.expanduser(path))):
        try:
            if isinstance(row, Exception):
                raise row
            check_text(row)
            exchange = read_exchange(row, Columns(needs_answer=False, begins_with_messages=True))
        except KeyError:
            raise UserError(f'{location} has neither "prompt" nor "messages": add one of them') from None
        except (ValueError, RecursionError) as error:
            raise UserError(f"{location}: {error}") from error
        if exchange.prompt != row.get("prompt"):
            messages = [*as_messages(exchange.prompt, "user"), *exchange.reply]
            row = {**row, "messages": Messages.of(messages, exchange.tools)}
        rows.append(row)
    if not rows:
        raise UserError(f'--prompts {path} has no rows: write one with "prompt" or "messages"')
    return rows


def encode_row(row: JSONRow, tokenizer: Tokenizer, config: SamplingCommand) -> list[int]:
    """Returns the prompt of a row, token ids."""
    messages = row.get("messages") or [{"role": "user", "content": row["prompt"]}]
    ((thinking, prefix),) = prompt_styles([tokenizer], config.model.thinking)
    return tokenizer.chat(messages, thinking, prefix, tools=getattr(messages, "tools", ()))


def sample_rows(
    sampler: Sampler, params: Params, prompts: Sequence[list[int]], config: SamplingCommand
) -> list[Completions]:
    """Returns the completions of all prompts, a call's together."""
    num_samples = config.prompts.num_samples
    row_length, all_rows = sampler.max_prompt_tokens + sampler.max_new_tokens, len(prompts) * num_samples
    sampler, most_rows = with_room(sampler, params, config, row_length, all_rows)
    num_rows = config.sampling.inference_batch_per_device or most_rows
    num_slots = num_rows * sampler.layout.row_shards
    sampler = replace(sampler, paging=replace(sampler.paging, num_slots=min(num_slots, all_rows)))
    weights, key, parts = sampler.load_weights(params), make_key(config.model.seed), []
    per_call = max(1, num_slots // num_samples)
    for start in range(0, len(prompts), per_call):
        calls = prompts[start : start + per_call]
        ids = start + np.arange(len(calls))
        memory = out_of_memory("inference_batch_per_device", num_rows)
        with waiting("sampling", len(ids) * num_samples, "rows") as wait, memory:

            def count_rows(segment: Segment, first: int = start * num_samples, wait: Wait = wait) -> None:
                wait.count_rows(first + segment.first_row, segment.num_sampled, segment.lengths)

            watched = replace(sampler, on_segment=count_rows)
            parts.append(watched.generate(weights, calls, ids, num_samples, key))
    return parts


def main(config: SamplingCommand) -> None:
    name, options = config.model.model_dir, config.prompts
    layout, rows = make_layout(config.devices, name), read_prompts(options.prompts)
    if sys.stdin.isatty() and sys.stdout.isatty() and not (options.prompts or options.json):
        return converse(*load_chat_models([name], config, layout))
    model, params, tokenizer = load_last(name, config, layout)
    if layout.is_main and not options.prompts:
        print("built-in prompts: --prompts FILE.jsonl names others, and on a terminal this is a chat", file=sys.stderr)
    sampler = make_text_sampler(config, model, tokenizer, layout)
    prompts = [encode_row(row, tokenizer, config) for row in rows]
    written = []
    for completions in sample_rows(sampler, params, prompts, config):
        for b, (start, end) in enumerate(zip(completions.prompt_lengths, completions.lengths, strict=True)):
            tokens = completions.tokens[b, start:end].tolist()
            written.append({
                **rows[len(written) // options.num_samples],
                "prompt_tokens": completions.tokens[b, :start].tolist(),
                "tokens": tokens,
                "logprobs": completions.logprobs[b, start:end].tolist(),
                "text": tokenizer.decode(tokens),
                "finished": bool(completions.finished[b]),
            })  # fmt: skip
    if layout.is_main and options.json:
        Path(os.path.expanduser(options.json)).write_text("".join(json.dumps(row) + "\n" for row in written))
    elif layout.is_main:
        for row in written:
            prompt = tokenizer.decode(row["prompt_tokens"])
            print(f"{'#' * 25} {printable(prompt)}\n{printable(row['text'])}")


if __name__ == "__main__":
    with ending_together(), user_errors():
        main(parse(SamplingCommand, sys.argv[1:], __doc__, aliases={"ckpt_dir": "model_dir"}))
