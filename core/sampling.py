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
from functools import partial

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
from utils.batching import bucket
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
    raw: bool = option(False, "Continue plain prompts as they are, without the chat template")
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
    if config.prompts.raw and "prompt" in row:
        return tokenizer.chat([{"role": "user", "content": row["prompt"]}], plain=True)
    messages = row.get("messages") or [{"role": "user", "content": row["prompt"]}]
    ((thinking, prefix),) = prompt_styles([tokenizer], config.model.thinking)
    return tokenizer.chat(messages, thinking, prefix, tools=getattr(messages, "tools", ()))


def sample_rows(
    sampler: Sampler, params: Params, prompts: Sequence[list[int]], config: SamplingCommand
) -> list[Completions]:
    """Returns the completions of all prompts, a call's together."""
    num_samples = config.prompts.num_samples
    row_length = bucket(max(map(len, prompts)) + sampler.max_new_tokens)
    sampler, most_rows = with_room(sampler, params, config, row_length, len(prompts) * num_samples)
    num_rows = config.sampling.inference_batch_per_device or most_rows
    weights = sampler.load_weights(params)
    per_call = max(1, num_rows * sampler.layout.row_shards // num_samples)
    key = make_key(config.model.seed)
    parts = []
    for start in range(0, len(prompts), per_call):
        calls = prompts[start : start + per_call]
        ids = start + np.arange(len(calls))
        memory = out_of_memory("inference_batch_per_device", num_rows)
        with waiting("sampling", len(ids) * num_samples, "rows") as wait, memory:
            watched = replace(sampler, on_segment=partial(count_rows, wait, start * num_samples))
            parts.append(watched.generate(weights, calls, ids, num_samples, key))
    return parts


def count_rows(wait: Wait, call_offset: int, segment: Segment) -> None:
    """Shows the progress of a call; `call_offset`: number of its first row."""
    wait.count_rows(call_offset + segment.first_row, segment.num_sampled, segment.lengths)


def completion_fields(completions: Completions, b: int, tokenizer: Tokenizer) -> JSONRow:
    """Returns the fields of completion `b` in files."""
    columns = slice(int(completions.prompt_lengths[b]), int(completions.lengths[b]))
    tokens = completions.tokens[b, columns].tolist()
    return {
        "prompt_tokens": completions.tokens[b, : columns.start].tolist(),
        "tokens": tokens,
        "logprobs": completions.logprobs[b, columns].tolist(),
        "text": tokenizer.decode(tokens),
        "finished": bool(completions.finished[b]),
    }


def main(config: SamplingCommand) -> None:
    layout = make_layout(config.devices, config.model.ckpt_dir)
    rows = read_prompts(config.prompts.prompts)
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    has_files = config.prompts.prompts or config.prompts.json
    if is_terminal and not has_files:
        return converse(*load_chat_models([config.model.ckpt_dir], config, layout))
    model, params, tokenizer = load_last(config.model.ckpt_dir, config, layout)
    if layout.is_main and not config.prompts.prompts:
        print("built-in prompts: --prompts FILE.jsonl names others, and on a terminal this is a chat", file=sys.stderr)
    sampler = make_text_sampler(config, model, tokenizer, layout, config.prompts.raw)
    prompts = [encode_row(row, tokenizer, config) for row in rows]
    written = []
    for completions in sample_rows(sampler, params, prompts, config):
        for b in range(len(completions.lengths)):
            row = rows[len(written) // config.prompts.num_samples]
            written.append(row | completion_fields(completions, b, tokenizer))
    if layout.is_main:
        write_rows(written, config.prompts.json, tokenizer)


def write_rows(rows: Sequence[JSONRow], path: str, tokenizer: Tokenizer) -> None:
    """Writes rows to a JSONL file, or prints prompts and completions if there is no file."""
    if path:
        Path(os.path.expanduser(path)).write_text("".join(json.dumps(row) + "\n" for row in rows))
        return
    for row in rows:
        prompt = tokenizer.decode(row["prompt_tokens"])
        print(f"{'#' * 25} {printable(prompt)}\n{printable(row['text'])}")


if __name__ == "__main__":
    with ending_together(), user_errors():
        main(parse(SamplingCommand, sys.argv[1:], __doc__, aliases={"model_dir": "ckpt_dir"}))
