"""Samples from a checkpoint: a chat on a terminal or in a browser, or completions of prompts from a file.

    python core/sampling.py --ckpt_dir ~/checkpoints/Qwen3-1.7B/     # a chat on a terminal, or built-in prompts
    python core/sampling.py --ckpt_dir models/tiny,runs/demo/step24 --web 8000    # a chat with both, in a browser
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
from itertools import count

import numpy as np
from jaxtyping import Int, PyTree

from core.chains.attach import with_forced_answer
from core.chains.pages import with_pages
from core.chat.terminal import ShowText, converse
from core.records import Completions
from core.run.foreign import find_run, settings_with_code
from core.sampler import Sampler, SamplingConfig, make_sampler
from envs import make_env, test_name
from envs.base import Env
from envs.data.files import read_file
from envs.data.messages import Columns, Messages, as_messages, read_exchange
from envs.data.rows import check_text
from envs.scoring.scorer import Scorer
from envs.settings import EnvConfig
from extras.chat_web import serve
from models.architecture import Decoder
from models.checkpoint import find_checkpoints, load_model
from models.memory import FEW_ROWS, describe_rollout, out_of_memory, rows_that_fit, sampling_room
from models.messages import Message
from models.names import Key, Params
from models.oracle import check_prompt
from models.tokenizer import Tokenizer
from utils.batching import bucket
from utils.devices.sharding import Layout
from utils.devices.startup import DeviceConfig, ending_together, make_layout
from utils.metrics.jsonl import JSONRow
from utils.metrics.logger import printable
from utils.metrics.terminal import waiting
from utils.settings.config import parse
from utils.settings.errors import UserError, user_errors
from utils.settings.groups import ComputeConfig
from utils.settings.options import group, option
from utils.settings.presets import demo_of_tiny
from utils.threefry import make_key

BUILT_IN = ("Use 3 7 12 to make 24.", "Write a poem about the sea.", "What is the capital of France?")
NUM_EXAMPLES = 6  # held-out problems on the page
PromptStyle = tuple[bool | None, str]  # thinking (None: the default of the template), and prefix of the reply


@dataclass(frozen=True)
class PromptConfig:
    """Prompts and output."""

    ckpt_dir: str = option(
        "models/tiny",
        "Model to sample from: Hugging Face folder, hub id, or run folder (its last step); with --web several, "
        "separated by commas",
        essential=True,
    )
    prompts: str = option(
        "",
        'File of {"prompt": text} or {"messages": [...]} (JSONL, JSON, CSV, Parquet); empty: a few built-in prompts',
        essential=True,
    )
    json: str = option("", "JSONL file for the rows of --prompts with their completions; empty: print only")
    raw: bool = option(False, "Continue plain prompts as they are, without the chat template")
    thinking: str = option(
        "",
        "Thinking mode of the chat template; empty: the mode in which a model was trained here, or the template's "
        "default",
        ["", "on", "off"],
    )
    num_samples: int = option(1, "Number of completions of each prompt")
    web: int = option(
        0, "Port of a chat page for the models of --ckpt_dir side by side, on this machine only; 0: no page"
    )
    seed: int = option(0, "Seed of sampling")

    def __post_init__(self):
        if self.num_samples < 1 or not 0 <= self.web < 2**16:
            raise UserError(
                "--num_samples must be at least 1, and --web a port from 1 to 65535, or 0 for none: correct the one "
                "that is not"
            )


@dataclass(frozen=True)
class SamplingCommand:
    """Sampling from a checkpoint."""

    prompts: PromptConfig = group(PromptConfig)
    sampling: SamplingConfig = group(SamplingConfig)
    compute: ComputeConfig = group(ComputeConfig)
    devices: DeviceConfig = group(DeviceConfig)


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


def encode_row(row: JSONRow, tokenizer: Tokenizer, config: PromptConfig) -> list[int]:
    """Returns the prompt of a row, token ids."""
    if config.raw and "prompt" in row:
        return tokenizer.chat([{"role": "user", "content": row["prompt"]}], plain=True)
    messages = row.get("messages") or [{"role": "user", "content": row["prompt"]}]
    (style,) = prompt_styles([tokenizer], config.thinking)
    return tokenizer.chat(messages, *style, tools=getattr(messages, "tools", ()))


def prompt_styles(tokenizers: Sequence[Tokenizer], thinking: str) -> list[PromptStyle]:
    """Returns the prompt style of each model: of its training here, or of the first other model with such training."""
    known = [tokenizer.training_prompts for tokenizer in tokenizers]
    trained = next((style for style in known if style != (None, "")), (None, ""))
    styles = [trained if style == (None, "") else style for style in known]
    return [({"on": True, "off": False}.get(thinking, was), prefix) for was, prefix in styles]


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
    key = make_key(config.prompts.seed)
    parts = []
    for start in range(0, len(prompts), per_call):
        calls = prompts[start : start + per_call]
        ids = start + np.arange(len(calls))
        memory = out_of_memory("inference_batch_per_device", num_rows)
        with waiting("sampling", len(ids) * num_samples, "rows") as wait, memory:
            watched = replace(sampler, on_segment=partial(wait.on_segment, start * num_samples))
            parts.append(watched.generate(weights, calls, ids, num_samples, key))
    return parts


def with_room(
    sampler: Sampler, held: PyTree, config: SamplingCommand, row_length: int, num_rows: int
) -> tuple[Sampler, int]:
    """Returns a sampler on the mesh that has room for these rows or a few, and how many fit on each device of it."""
    model, layout = sampler.model, sampler.layout
    num_rows = min(num_rows, FEW_ROWS)
    rollout, num_bytes = sampling_room(model, layout, held, row_length, config.devices.rollout_tp, num_rows)
    if layout.is_main:
        sys.stderr.writelines(f"{line}\n" for line in describe_rollout(model, layout, rollout))
    return sampler.on(rollout), rows_that_fit(num_bytes, model, rollout, row_length)


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


class Examples:
    """Held-out problems of an environment, by their text, and its grader; for episodes of several turns it has none."""

    def __init__(self, env: Env | None = None, scorer: Scorer | None = None):
        problems = [env.problem(index).messages for index in range(min(NUM_EXAMPLES, env.num_tasks))] if env else []
        self.numbers = {said[0]["content"]: number for number, said in enumerate(problems) if len(said) == 1}
        self.scorer = scorer

    def grade(self, prompt: str, reply: str) -> bool | None:
        """Returns True if a reply is right; None if that is not known."""
        if self.scorer is None or prompt not in self.numbers:
            return None
        (rewards,), _ = self.scorer.score_replies([self.numbers[prompt]], [reply])
        return None if rewards is None else rewards["correct_answer"] > 0


def trained_settings(name: str) -> EnvConfig | None:
    """Returns the environment that a model was trained on; None if it is unknown, or would run code of others."""
    settings = find_run(name)[1] or demo_of_tiny({"model_dir": name}, is_announced=False)
    first, _, _ = str(settings.get("env_name", "")).partition(",")
    if not first or settings_with_code(settings):
        return None
    return EnvConfig(first.strip(), str(settings.get("env_options", "")), str(settings.get("data_dir", "")))


def load_examples(config: EnvConfig) -> tuple[Examples, bool]:
    """Returns problems of an environment, and True if they have one turn; none if it cannot be made here."""
    name = test_name(config.env_name)
    try:
        options = config.options(name)
        env = make_env(name, **options)
        has_one_turn = env.max_turns == 1
        scorer = Scorer(name, options, num_workers=1, max_error_share=1.0) if has_one_turn else None
        return Examples(None if env.opens else env, scorer), has_one_turn
    except (ValueError, OSError, ImportError):
        return Examples(), False


class ChatModel:
    """A model to chat with; each reply is sampled with a number of its own under the key."""

    has_one_turn = False
    examples = Examples()

    def __init__(self, name: str, sampler: Sampler, params: Params, key: Key, style: PromptStyle):
        self.name, self.sampler, self.key, self.style = name, sampler, key, style
        self.weights = sampler.load_weights(params)
        self.numbers = count()

    def reply(self, messages: list[Message], show_text: ShowText) -> str:
        """Returns the reply to a conversation; `show_text` gets it so far after each segment, and whole at the end."""
        check_text([message["content"] for message in messages])
        sampler, tokenizer = self.sampler, self.sampler.tokenizer
        prompt = tokenizer.chat(messages, *self.style)

        def on_segment(
            row_offset: int, tokens: Int[np.ndarray, "B A"], num_drawn: int, lengths: Int[np.ndarray, "B"]
        ) -> None:
            end = sampler.completion_end(tokens[0], 0, num_drawn) or num_drawn
            show_text(tokenizer.decode(tokens[0, :end]))

        streaming = replace(sampler, on_segment=on_segment)
        completions = streaming.generate(self.weights, [prompt], np.array([next(self.numbers)]), 1, self.key)
        reply = tokenizer.decode(completions.tokens[0, len(prompt) : completions.lengths[0]].tolist())
        show_text(reply)
        return reply

    def grade(self, messages: list[Message], reply: str) -> bool | None:
        """Returns True if the environment grades a reply as right; None if the problem is not the environment's."""
        return self.examples.grade(messages[0]["content"], self.style[1] + reply) if len(messages) == 1 else None

    def change(self, name: str, value: str) -> None:
        """Changes a setting of the sampling distribution. Raises: UserError."""
        settings = vars(self.sampler.distribution)
        if name not in settings:
            raise UserError(f"/set {name}: there is no such setting: choose one of {', '.join(settings)}")
        try:
            number = type(settings[name])(value)
        except ValueError as error:
            raise UserError(f"/set {name} {value} is not a number: give one (now {settings[name]})") from error
        self.sampler = replace(self.sampler, distribution=replace(self.sampler.distribution, **{name: number}))

    def describe(self) -> str:
        """Returns the settings of sampling, in words."""
        return ", ".join(f"{name} {value:g}" for name, value in vars(self.sampler.distribution).items())


def main(config: SamplingCommand) -> None:
    layout = make_layout(config.devices, config.prompts.ckpt_dir)
    rows = read_prompts(config.prompts.prompts)
    if config.prompts.web:
        return serve_chat(config, layout)
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    has_files = config.prompts.prompts or config.prompts.json
    if is_terminal and not has_files:
        return converse(*load_chat_models([config.prompts.ckpt_dir], config, layout))
    model, params, tokenizer = load_last(config.prompts.ckpt_dir, config, layout)
    if layout.is_main and not config.prompts.prompts:
        print("built-in prompts: --prompts FILE.jsonl names others, and on a terminal this is a chat", file=sys.stderr)
    sampler = make_text_sampler(config, model, tokenizer, layout)
    prompts = [encode_row(row, tokenizer, config.prompts) for row in rows]
    written = []
    for completions in sample_rows(sampler, params, prompts, config):
        for b in range(len(completions.lengths)):
            row = rows[len(written) // config.prompts.num_samples]
            written.append(row | completion_fields(completions, b, tokenizer))
    if layout.is_main:
        write_rows(written, config.prompts.json, tokenizer)


def serve_chat(config: SamplingCommand, layout: Layout) -> None:
    """Serves the page for the models, with problems of the environment of the last trained one."""
    names = config.prompts.ckpt_dir.split(",")
    models = load_chat_models(names, config, layout)
    trained = [trained_settings(name) for name in names]
    loaded = {env: load_examples(env) for env in dict.fromkeys(filter(None, trained))}
    for model, env in zip(models, trained, strict=True):
        _, model.has_one_turn = loaded.get(env, (None, False))
    examples = next((examples for examples, _ in reversed(loaded.values())), Examples())
    for model in models:
        model.examples = examples
    serve(models, config.prompts.web, [*examples.numbers])


def load_last(name: str, config: SamplingCommand, layout: Layout) -> tuple[Decoder, Params, Tokenizer]:
    """Loads a model; from a run folder, the model of the last step."""
    _, folder = find_checkpoints(name)[-1]
    return load_model(folder, layout, **config.compute.arguments, param_dtype=config.compute.dtype)


def make_text_sampler(config: SamplingCommand, model: Decoder, tokenizer: Tokenizer, layout: Layout) -> Sampler:
    """Returns the sampler of replies without an environment, of 256 tokens by default."""
    limit = config.sampling.num_generation_tokens
    limit = 256 if limit < 0 else limit
    force_answer_at = max(0, config.sampling.force_answer_at)
    sampler = make_sampler(config.sampling, model, tokenizer, layout, limit)
    for note in () if config.prompts.raw else compare_chat(tokenizer, config.prompts.thinking):
        if layout.is_main:
            print(note, file=sys.stderr)
    return with_pages(with_forced_answer(sampler, force_answer_at), config.sampling.page_size)


def compare_chat(tokenizer: Tokenizer, thinking: str) -> list[str]:
    """Compares a chat of two turns with transformers' rendering: see models/oracle.py."""
    ((thinks, prefix),) = prompt_styles([tokenizer], thinking)
    said = [{"role": role, "content": f" {role}: 1 + 1?\n"} for role in ("user", "assistant", "user")]
    ids = tokenizer.chat(said, thinks, prefix)
    return check_prompt(tokenizer, ids, said, thinks, prefix, what="the prompt of a chat's second turn")


def load_chat_models(names: Sequence[str], config: SamplingCommand, layout: Layout) -> list[ChatModel]:
    """Loads models to talk to, whose replies are shown in short segments."""
    loaded = [load_last(name, config, layout) for name in names]
    styles = prompt_styles([tokenizer for _, _, tokenizer in loaded], config.prompts.thinking)
    key = make_key(config.prompts.seed)
    models = []
    for name, style, (model, params, tokenizer) in zip(names, styles, loaded, strict=True):
        sampler = make_text_sampler(config, model, tokenizer, layout)
        sampler = replace(sampler, segment=8, max_prompt_tokens=model.num_positions - sampler.max_new_tokens)
        row_length = bucket(sampler.max_prompt_tokens + sampler.max_new_tokens)
        sampler, _ = with_room(sampler, [params for _, params, _ in loaded], config, row_length, 1)
        models.append(ChatModel(name, sampler, params, key, style))
    return models


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
