"""Models to chat with: their options, how they are loaded, and their replies."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count

import numpy as np
from jaxtyping import PyTree

from core.chains.attach import with_forced_answer
from core.sampler import Sampler, SamplingConfig, Segment, make_sampler
from envs.data.rows import check_text
from models.architecture import Decoder
from models.checkpoint import find_checkpoints, load_model
from models.memory import FEW_ROWS, describe_rollout, rows_that_fit, sampling_room
from models.messages import Message
from models.names import Key, Params
from models.oracle import check_prompt
from models.tokenizer import Tokenizer
from utils.batching import bucket
from utils.devices.sharding import Layout
from utils.devices.startup import DeviceConfig
from utils.settings.groups import ComputeConfig, ModelConfig
from utils.settings.options import group, option
from utils.threefry import make_key

ShowText = Callable[[str], None]  # called with all of a reply so far; what it raises ends the reply
PromptStyle = tuple[bool | None, str]  # thinking (None: the default of the template), and prefix of the reply


@dataclass(frozen=True)
class ChatModelConfig(ModelConfig):
    """Prompts."""

    thinking: str = option(
        "",
        "Thinking mode of the chat template; empty: the mode in which a model was trained here, or the template's "
        "default",
        ["", "on", "off"],
    )


@dataclass(frozen=True)
class ChatCommand:
    """A chat with models."""

    model: ChatModelConfig = group(ChatModelConfig)
    sampling: SamplingConfig = group(SamplingConfig)
    compute: ComputeConfig = group(ComputeConfig)
    devices: DeviceConfig = group(DeviceConfig)


class ChatModel:
    """A model to chat with; each reply is sampled with a number of its own under the key."""

    def __init__(self, name: str, sampler: Sampler, params: Params, key: Key, style: PromptStyle):
        self.name, self.sampler, self.key, self.style = name, sampler, key, style
        self.weights = sampler.load_weights(params)
        self.numbers = count()

    def reply(self, messages: list[Message], show_text: ShowText) -> str:
        """Returns the reply to a conversation; `show_text` gets it so far after each segment, and whole at the end."""
        check_text([message["content"] for message in messages])
        sampler, tokenizer = self.sampler, self.sampler.tokenizer
        thinking, prefix = self.style
        prompt = tokenizer.chat(messages, thinking, prefix)

        def on_segment(segment: Segment) -> None:
            show_text(tokenizer.decode(segment.tokens[0, : segment.num_sampled]))

        most = bucket(len(prompt)) if sampler.layout.is_cpu else sampler.max_prompt_tokens  # in the cache that is read
        streaming = replace(sampler, on_segment=on_segment, max_prompt_tokens=min(most, sampler.max_prompt_tokens))
        completions = streaming.generate(self.weights, [prompt], np.array([next(self.numbers)]), 1, self.key)
        reply = tokenizer.decode(completions.tokens[0, len(prompt) : completions.lengths[0]].tolist())
        show_text(reply)
        return reply


def load_chat_models(
    names: Sequence[str], config: ChatCommand, layout: Layout, kind: type[ChatModel] = ChatModel
) -> list[ChatModel]:
    """Loads models to talk to, each a `kind`, whose replies are shown in short segments."""
    loaded = [load_last(name, config, layout) for name in names]
    styles = prompt_styles([tokenizer for _, _, tokenizer in loaded], config.model.thinking)
    key = make_key(config.model.seed)
    models = []
    for name, style, (model, params, tokenizer) in zip(names, styles, loaded, strict=True):
        sampler = make_text_sampler(config, model, tokenizer, layout)
        sampler = replace(sampler, segment=8, max_prompt_tokens=model.num_positions - sampler.max_new_tokens)
        row_length = bucket(sampler.max_prompt_tokens + sampler.max_new_tokens)
        sampler, _ = with_room(sampler, [params for _, params, _ in loaded], config, row_length, 1)
        models.append(kind(name, sampler, params, key, style))
    return models


def load_last(name: str, config: ChatCommand, layout: Layout) -> tuple[Decoder, Params, Tokenizer]:
    """Loads a model; from a run folder, the model of the last step."""
    _, folder = find_checkpoints(name)[-1]
    return load_model(folder, layout, **config.compute.arguments, param_dtype=config.compute.dtype)


def make_text_sampler(config: ChatCommand, model: Decoder, tokenizer: Tokenizer, layout: Layout) -> Sampler:
    """Returns the sampler of replies without an environment, of 256 tokens by default.

    A chat is compared with transformers' rendering first.
    """
    limit = config.sampling.num_generation_tokens
    sampler = make_sampler(config.sampling, model, tokenizer, layout, 256 if limit < 0 else limit)
    if layout.is_main:
        style, *_ = prompt_styles([tokenizer], config.model.thinking)
        said = [{"role": role, "content": f" {role}: 1 + 1?\n"} for role in ("user", "assistant", "user")]
        ids = tokenizer.chat(said, *style)
        notes = check_prompt(tokenizer, ids, said, *style, what="the prompt of a chat's second turn")
        sys.stderr.writelines(f"{note}\n" for note in notes)
    return with_forced_answer(sampler, max(0, config.sampling.force_answer_at))


def prompt_styles(tokenizers: Sequence[Tokenizer], thinking: str) -> list[PromptStyle]:
    """Returns the prompt style of each model: of its training here, or of the first other model with such training."""
    known = [tokenizer.training_prompts for tokenizer in tokenizers]
    trained = next((style for style in known if style != (None, "")), (None, ""))
    styles = [trained if style == (None, "") else style for style in known]
    return [({"on": True, "off": False}.get(thinking, was), prefix) for was, prefix in styles]


def with_room(
    sampler: Sampler, held: PyTree, config: ChatCommand, row_length: int, num_rows: int
) -> tuple[Sampler, int]:
    """Returns a sampler on the mesh that has room for these rows or a few, and how many fit on each device of it."""
    model, layout = sampler.model, sampler.layout
    num_rows = min(num_rows, FEW_ROWS)
    rollout, num_bytes = sampling_room(model, layout, held, row_length, config.devices.rollout_tp, num_rows)
    if layout.is_main:
        sys.stderr.writelines(f"{line}\n" for line in describe_rollout(model, layout, rollout))
    return sampler.on(rollout), rows_that_fit(num_bytes, model, rollout, row_length)
