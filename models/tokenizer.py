"""Text to token ids and back: a thin wrapper of transformers' fast tokenizers."""

import contextlib
import json
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cached_property, lru_cache
from itertools import count, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, NamedTuple

os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # no warning that torch is missing
import numpy as np
from jaxtyping import Int

from models.messages import REPLY, Message, Schema, Tool, announce, content_of, is_begun, readable, tool_schema
from utils.metrics.jsonl import read_json
from utils.settings.errors import UserError, describe_error

if TYPE_CHECKING:
    import transformers  # imported late, since it takes longer than JAX: errors of options are printed first

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
CHAT_TEMPLATE = "chat_template.jinja"
VOCABULARIES = ("tokenizer.json", "vocab.json")  # a folder with a tokenizer has one of them
FILES = (
    *VOCABULARIES, TOKENIZER_CONFIG, "merges.txt", "added_tokens.json", "special_tokens_map.json", CHAT_TEMPLATE,
    GENERATION_CONFIG,
)  # fmt: skip
KEPT = ("bos_token_id", "do_sample", "temperature", "top_k", "top_p", "min_p")  # in a base's generation_config.json
THINKING_DEFAULT = "{%- if enable_thinking is not defined %}{%- set enable_thinking = VALUE %}{%- endif %}"
PREFIX_DEFAULT = "{% if add_generation_prompt %}{{ assistant_prefix | default(VALUE) }}{% endif %}"
PREFIX_PATTERN = re.compile(r'("(?:[^"\\]|\\.)*")'.join(map(re.escape, PREFIX_DEFAULT.split("VALUE"))) + r"\Z")
TAG = re.compile(r"</?\w+>")  # such as <think>: prompts quote them, and templates look for them
CONTENT, TURN = "lmpocontent", "lmpoturn"  # contents of messages that test what a template does
UNREAD = {"role": REPLY, "content": TURN}  # replaces a sampled reply, which templates do not render
SHORT = [{"role": "user", "content": "1"}, UNREAD]  # a conversation that shows how a template ends a reply


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """A tokenizer with its chat template and stop ids; `Tokenizer(hf)` wraps one that is in memory already."""

    hf: "transformers.PreTrainedTokenizerBase"
    files: Mapping[str, bytes] = field(default_factory=dict, repr=False)  # that it was loaded from, saved as they are
    plain: frozenset[str] = frozenset()  # special tokens that texts only quote

    @property
    def special_ids(self) -> dict[str, int]:
        """The ids of special tokens, which `decode` drops, by their text."""
        return {str(token): i for i, token in self.hf.added_tokens_decoder.items() if token.special}

    @property
    def added_ids(self) -> dict[str, int]:
        """The ids of tokens that are found in a text as a whole, special or not, by their text."""
        return self.hf.get_added_vocab()

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text; nothing is added before or after it."""
        first, *rest = self.pieces(text)
        ids = self.hf.encode(first, add_special_tokens=False)
        return sum([self.encode_behind(TURN, piece) for piece in rest], ids)

    def pieces(self, text: str) -> list[str]:
        """Returns a text, divided after the first character of each token of `plain`, so that none is found in it."""
        if not self.plain:
            return [text]
        places = [match.start() + 1 for match in re.finditer(f"(?={'|'.join(map(re.escape, self.plain))})", text)]
        return [text[start:end] for start, end in pairwise([0, *places, len(text)])]

    def encode_spans(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Returns the ids of a text, and the characters that each stands for."""
        found = self.hf(text, add_special_tokens=False, return_offsets_mapping=True)
        return found["input_ids"], found["offset_mapping"]

    def encode_behind(self, before: str, text: str) -> list[int]:
        """Returns the ids of a text after another one: SentencePiece would begin a separate text with a blank."""
        text, *rest = self.pieces(text)
        if rest:
            return sum([self.encode_behind(before, piece) for piece in (text, *rest)], [])
        ids, spans = self.encode_spans(before + text)
        first = next((i for i, (start, _) in enumerate(spans) if start >= len(before)), len(ids))
        is_apart = first == 0 or spans[first - 1][1] <= len(before)  # no token has characters of both
        return ids[first:] if is_apart else self.encode(text)

    @cached_property
    def first_ids(self) -> list[int]:
        """The ids that the tokenizer puts before a text, which base models expect."""
        alone, whole = self.encode(CONTENT), self.hf.encode(CONTENT)
        places = (i for i in range(len(whole)) if whole[i : i + len(alone)] == alone)
        return whole[: next(places, 0)]

    def decode(self, ids: Sequence[int] | Int[np.ndarray, "A"]) -> str:
        """Returns the text of the ids without special tokens (<|im_end|>); <think> is text, not a special token."""
        ids = [int(i) for i in ids]
        return self.hf.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def calls(self, ids: Sequence[int] | Int[np.ndarray, "A"], opening: str, closing: str) -> tuple[str, ...]:
        """Returns the texts of the tool calls in a reply, between these markers; one that is not closed is empty.

        If the markers are single tokens, only these tokens begin and end a call. Without markers a reply that begins
        with a brace, or whose code block does, is a call.
        """
        ids = [int(i) for i in ids]
        if not opening:
            body = self.decode(ids).strip().removeprefix("```json").removeprefix("```").removesuffix("```").strip()
            return (body,) if body.startswith("{") else ()
        vocabulary = self.added_ids
        if opening in vocabulary and closing in vocabulary:
            starts = [i for i, number in enumerate(ids) if number == vocabulary[opening]]
            pieces = [ids[start + 1 : end] for start, end in pairwise([*starts, len(ids)])]
            ends = [piece.index(vocabulary[closing]) if vocabulary[closing] in piece else 0 for piece in pieces]
            return tuple(self.hf.decode(piece[:end]) for piece, end in zip(pieces, ends, strict=True))
        pieces = self.hf.decode(ids).split(opening)[1:]
        bodies = [piece.partition(closing) for piece in pieces]
        return tuple(body if sign else "" for body, sign, _ in bodies)

    def results(self, messages: Sequence[Message], opening: str, closing: str) -> list[int]:
        """Returns the ids of results that are written after calls."""
        return self.encode_behind(TURN, "".join(opening + message["content"] + closing for message in messages))

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end a completion, from generation_config.json and the tokenizer, and the id that ends turns."""
        end = end_of_turns(self, self.template)
        return tuple(dict.fromkeys([*self.listed_stop_ids, *([] if end is None else [end])]))

    @property
    def listed_stop_ids(self) -> list[int]:
        """Ids that end a completion by the model's files, whatever the chat template writes."""
        ids = json.loads(self.files.get(GENERATION_CONFIG, b"{}")).get("eos_token_id")
        return [i for i in [*(ids if isinstance(ids, list) else [ids]), self.hf.eos_token_id] if i is not None]

    @property
    def template(self) -> str:
        """The chat template; empty if there is none. It is the cache key for properties of the template."""
        return str(self.hf.chat_template or "")

    @property
    def pad_id(self) -> int:
        """The id that fills unused columns; padding is known by masks and lengths, never by this id."""
        if self.hf.pad_token_id is not None:
            return self.hf.pad_token_id
        return next(iter(self.stop_ids), 0)

    def spelled(self, messages: Sequence[Message]) -> list[str]:
        """Returns the tokens spelled in messages that are special, or neither words nor tags."""
        special, contents = self.special_ids, [*map(content_of, messages)]
        signs = [sign for sign in self.added_ids if sign.strip() and (sign in special or not TAG.fullmatch(sign))]
        return [sign for sign in signs if any(sign in text for text in contents)]

    def prompt_notes(self, messages: Sequence[Message], plain: bool) -> list[str]:
        """Returns notes on prompts of such messages that users may not expect."""
        notes = []
        if not (self.template or plain):
            notes.append("the model has no chat template: messages are joined by newlines, as with plain=true")
        if spelled := self.spelled(messages):
            notes.append(f"prompts spell {spelled[0]}, which becomes this token, as in transformers")
        return notes

    def chat(
        self,
        messages: Sequence[Message],
        thinking: bool | None = False,
        prefix: str = "",
        plain: bool = False,
        tools: Sequence[Tool] = (),
    ) -> list[int]:
        """Returns the ids of a conversation up to the assistant's turn, or on within it, and then `prefix`.

        `thinking=False` closes Qwen3's thinking before it starts, None leaves it to the template. `plain` leaves the
        chat template out, as for a base model without one. Raises: UserError as `write`.
        """
        ids = self.encode(self.write(messages, thinking, plain, tools) + prefix)
        return ids if self.template and not plain else [*self.first_ids, *ids]

    def write(
        self, messages: Sequence[Message], thinking: bool | None, plain: bool = False, tools: Sequence[Tool] = ()
    ) -> str:
        """Returns the text of a conversation up to the assistant's turn, or on within it if it has begun.

        Raises: UserError if the chat template fails or leaves parts of messages out, and as `readable`, `tool_schema`.
        """
        if self.template and not plain:
            messages, schemas = self.prepare(messages, thinking, tools)
            return self.render(messages, thinking, tools=schemas)
        messages = [*map(readable, messages)]
        if keys := [key for message in messages for key in message if key not in ("role", "content")]:
            raise UserError(
                f"a message has {keys[0]}, which only chat templates show, and the model has none: remove it"
            )
        return "\n".join(message["content"] for message in announce(messages, [*map(tool_schema, tools)]))

    def prepare(
        self, messages: Sequence[Message], thinking: bool | None, tools: Sequence[Tool] = ()
    ) -> tuple[list[Message], list[Schema]]:
        """Returns messages and tools as the chat template reads them: see `readable`.

        Tools that it does not show are announced in the system message. Raises: UserError as `write`.
        """
        messages, schemas = [*map(readable, messages)], [*map(tool_schema, tools)]
        check_shown(self, messages, thinking, schemas)
        if schemas and self.render(messages, thinking, tools=schemas) == self.render(messages, thinking):
            messages, schemas = announce(messages, schemas), []
        return messages, schemas

    def bridge(
        self,
        before: Sequence[Message],
        messages: Sequence[Message],
        thinking: bool | None = False,
        prefix: str = "",
        plain: bool = False,
        tools: Sequence[Tool] = (),
    ) -> "Bridge":
        """Returns the ids of messages that follow a reply to the messages `before`, with all that the template adds.

        Raises: UserError as `write`, and if the template cannot be continued after what was sampled: see `behind`.
        """
        said = json.dumps([[*map(readable, before)], [*map(readable, messages)], [*map(tool_schema, tools)]])
        return make_bridge(self, self.template, said, thinking, prefix, plain)

    def read_stops(self, text: str) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """Returns the ids and the texts that end a completion: `stop_ids`, and those of --stop_strings.

        A special token counts by its id, since it is not part of the text that is searched for stop strings.
        Raises: UserError for a stop string that holds a special token and more.
        """
        ids, strings = [*self.stop_ids], []
        for stop in filter(None, text.split(",")):
            special = next((token for token in self.special_ids if token in stop), None)
            if special is None:
                strings.append(stop)
            elif stop == special:
                ids.append(self.special_ids[stop])
            else:
                raise UserError(
                    f"--stop_strings {stop!r} can never match, since {special} is a special token and not text: "
                    f"give {special} alone, or text without it"
                )
        return tuple(dict.fromkeys(ids)), tuple(strings)

    def render(
        self,
        messages: Sequence[Message],
        thinking: bool | None,
        is_open: bool = True,
        tools: Sequence[Schema] = (),
    ) -> str:
        """Renders a conversation with the chat template, up to the assistant's turn, or on within it, if it `is_open`.

        Raises UserError as `write`.
        """
        continues = is_open and is_begun(messages)
        try:
            return self.hf.apply_chat_template(
                list(messages),
                tools=list(tools) or None,
                add_generation_prompt=is_open and not continues,
                continue_final_message=continues,
                **({} if thinking is None else {"enable_thinking": thinking}),
                assistant_prefix="",  # `chat` adds it
                tokenize=False,
            )
        except Exception as error:  # a template is a program
            raise UserError(f"the model's chat template fails ({describe_error(error)})") from error

    @property
    def training_prompts(self) -> tuple[bool | None, str]:
        """Thinking and prefix of the prompts that this model was trained on here; without a record None and ""."""
        prefix = PREFIX_PATTERN.search(self.template)
        defaults = {value: THINKING_DEFAULT.replace("VALUE", str(value).lower()) for value in (True, False)}
        thinking = next((value for value, line in defaults.items() if self.template.startswith(line)), None)
        return thinking, json.loads(prefix[1]) if prefix else ""

    def save(self, directory: str | Path) -> None:
        """Writes the tokenizer's files and generation_config.json into a folder.

        The files that it was loaded from are written byte for byte: transformers 4 cannot read files of transformers 5.
        """
        directory = Path(directory)
        if not self.files:
            self.hf.save_pretrained(directory)
        for name, content in self.files.items():
            (directory / name).write_bytes(content)
        if GENERATION_CONFIG not in self.files:
            generation = {"eos_token_id": list(self.stop_ids), "pad_token_id": self.pad_id}
            (directory / GENERATION_CONFIG).write_text(json.dumps(generation, indent=2) + "\n")


def with_training_prompts(tokenizer: Tokenizer, thinking: bool, prefix: str) -> Tokenizer:
    """Returns a tokenizer that saves a chat template with these defaults of `enable_thinking` and of `prefix`.

    Others then render the prompts of training without an argument. Templates by name are saved as they are.
    """
    before = tokenizer.hf.chat_template
    if not tokenizer.files or not isinstance(before, str):
        return tokenizer
    template = with_defaults(before, thinking, prefix)
    if template == before:
        return tokenizer
    if CHAT_TEMPLATE in tokenizer.files:
        return replace(tokenizer, files={**tokenizer.files, CHAT_TEMPLATE: template.encode()})
    config = json.loads(tokenizer.files[TOKENIZER_CONFIG]) | {"chat_template": template}
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    return replace(tokenizer, files={**tokenizer.files, TOKENIZER_CONFIG: text.encode()})


def with_generation(tokenizer: Tokenizer, settings: Mapping[str, object], stop_strings: str = "") -> Tokenizer:
    """Returns a tokenizer that saves how training sampled in generation_config.json.

    Of the base's file only KEPT stays, so that no penalty or constraint is saved that training did not apply.
    """
    if not tokenizer.files:
        return tokenizer
    base = json.loads(tokenizer.files.get(GENERATION_CONFIG, b"{}"))
    kept = {name: base[name] for name in KEPT if name in base}
    stop_ids, _ = tokenizer.read_stops(stop_strings)
    generation = kept | {"eos_token_id": list(stop_ids), "pad_token_id": tokenizer.pad_id} | settings
    text = json.dumps(generation, indent=2) + "\n"
    return replace(tokenizer, files={**tokenizer.files, GENERATION_CONFIG: text.encode()})


def with_defaults(template: str, thinking: bool, prefix: str) -> str:
    """Returns a chat template with these defaults of `enable_thinking` and of `prefix`, instead of earlier ones."""
    if "enable_thinking" in template:
        for value in ("true", "false"):
            template = template.removeprefix(THINKING_DEFAULT.replace("VALUE", value))
        template = THINKING_DEFAULT.replace("VALUE", str(thinking).lower()) + template
    template = PREFIX_PATTERN.sub("", template)
    if prefix:  # Jinja drops a newline at the end of a template, but not before what is appended here
        template = template.removesuffix("\n") + PREFIX_DEFAULT.replace("VALUE", json.dumps(prefix))
    return template


def date_prompts(time: str) -> None:
    """Makes chat templates write the date of this time (ISO 8601), not that of each rendering."""
    from transformers.utils import chat_template_utils

    moment = datetime.fromisoformat(time[:19])
    chat_template_utils.datetime = SimpleNamespace(now=lambda: moment)  # what `strftime_now` reads


class Bridge(NamedTuple):
    """Ids between two replies."""

    end: list[int]  # ids that end the first reply; the last one is a stop token. Empty: replies have no end
    ids: list[int]  # ids after the end

    def after(self, last_token: int) -> list[int]:
        """Returns the ids after a sampled reply; a reply that was truncated, or ended differently, is ended first."""
        return self.ids if self.end[-1:] in ([], [last_token]) else self.end + self.ids


@lru_cache(maxsize=4096)  # environments return equal messages in many episodes
def make_bridge(
    tokenizer: Tokenizer, _template: str, said: str, thinking: bool | None, prefix: str, plain: bool
) -> Bridge:
    """Returns the bridge of messages before and after a reply, and of tools, as JSON: see `Tokenizer.bridge`."""
    before, messages, tools = json.loads(said)
    if plain or not tokenizer.template:
        text = tokenizer.write(messages, thinking, plain)
        return Bridge([], tokenizer.encode_behind(TURN, f"\n{text}\n{prefix}"))
    mark = unused_mark(said)
    turn = {"role": REPLY, "content": mark}
    if is_begun(before):
        *before, begun = before
        turn = {**begun, "content": content_of(begun) + mark}
    bare = [{"role": message["role"], "content": content_of(message)} for message in messages]
    check_shown(tokenizer, [*before, turn, *bare], thinking, tools)
    end = short_end(tokenizer, _template, thinking)
    _, rest = behind(tokenizer, [*before, turn], messages, thinking, tools, mark, end)
    ids = tokenizer.encode_behind(TURN, rest + prefix)
    place = end_place(tokenizer, ids, tokenizer.stop_ids)
    return Bridge(ids[:place], ids[place:])


def behind(
    tokenizer: Tokenizer,
    before: Sequence[Message],
    messages: Sequence[Message],
    thinking: bool | None,
    schemas: Sequence[Schema],
    mark: str,
    end: str | None = None,
) -> tuple[str, str]:
    """Returns the template's text after a mark in a last reply: to the reply's end, and up to the reply to messages.

    `end`: the template's text after a reply that nothing follows; None: it is rendered.
    Raises: UserError if it closes a reply differently when messages follow.
    """
    if end is None:
        end = tokenizer.render(before, thinking, is_open=False, tools=schemas).rpartition(mark)[2]
    _, is_shown, rest = tokenizer.render([*before, *messages], thinking, tools=schemas).rpartition(mark)
    number = end_of_turns(tokenizer, tokenizer.template)
    text, sign, _ = end.partition("\0" if number is None else tokenizer.hf.convert_ids_to_tokens(number))
    if not (is_shown and rest.startswith(text + sign if sign else end.rstrip())):
        raise UserError(
            "the model's chat template closes a reply differently when messages follow, so a conversation cannot "
            "continue after the sampled tokens: use an environment, or data, with one reply"
        )
    return text + sign, rest


def unused_mark(said: str) -> str:
    """Returns a text that replaces a reply, and that the conversation does not contain."""
    return next(mark for mark in map(f"{TURN}{{}}".format, count()) if mark not in said)


@lru_cache(maxsize=64)
def short_end(tokenizer: Tokenizer, _template: str, thinking: bool | None) -> str | None:
    """Returns the chat template's text after the reply of a short conversation; None if it refuses that."""
    with contextlib.suppress(UserError):
        return tokenizer.render(SHORT, thinking, is_open=False).rpartition(TURN)[2]
    return None


def end_place(tokenizer: Tokenizer, ids: Sequence[int], ends: Collection[int]) -> int:
    """Returns how many of the ids after a reply end it: up to one of `ends` with nothing but blanks before it."""
    place = next((i for i, number in enumerate(ids) if number in ends), -1)
    return 0 if tokenizer.hf.decode(ids[: max(place, 0)]).strip() else place + 1


@lru_cache(maxsize=64)
def end_of_turns(tokenizer: Tokenizer, template: str) -> int | None:
    """Returns the token by which the chat template ends a reply: the first special one after it; None: it has none."""
    special = {*tokenizer.special_ids.values(), *tokenizer.listed_stop_ids}
    for messages in (SHORT, [*SHORT, SHORT[0]]) if template else ():
        with contextlib.suppress(UserError):
            _, found, rest = tokenizer.render(messages, None, is_open=False).rpartition(TURN)
            ids = tokenizer.encode_behind(TURN, rest) if found else []
            if place := end_place(tokenizer, ids, special):
                return ids[place - 1]
    return None


@lru_cache(maxsize=64)
def shown_roles(_tokenizer: Tokenizer, _template: str) -> set[tuple[str, bool]]:
    """Returns the roles that `check_shown` has found in the chat template's text, before and after calls of tools."""
    return set()


def check_shown(
    tokenizer: Tokenizer, messages: Sequence[Message], thinking: bool | None, schemas: Sequence[Schema]
) -> None:
    """Raises UserError for a message, or a key of it, that makes no difference to what the chat template writes.

    Of messages with no more than a role and content, the first of each role is looked at. Thinking may be left out if
    other messages follow; so may the parts of a result that its call repeats.
    """

    def makes_no_difference(given: Sequence[Message], i: int, key: str) -> bool:
        given = [{"content": "", **message} for message in given]
        other = {**given[i], "content": ""} if key == "content" else {k: x for k, x in given[i].items() if k != key}
        try:
            others = [*given[:i], other, *given[i + 1 :]]
            texts = [tokenizer.render(x, thinking, is_open=False, tools=schemas) for x in (given, others)]
        except UserError:  # a key is read if the message is refused without it
            return False
        return texts[0] == texts[1]

    said, shown = [], shown_roles(tokenizer, tokenizer.template)
    for i, message in enumerate(messages):
        keys = [key for key in message if key != "role" and message[key] not in (*said, "")]
        role, is_bare = message["role"], message.keys() <= {"role", "content"}
        place = role, bool(said)
        if is_bare and (place in shown or not content_of(message).strip()):
            continue
        said += [text for call in message.get("tool_calls", []) for text in (call["function"]["name"], call.get("id"))]
        wholes = [messages] if role == "system" else [messages, messages[: i + 1]]
        for key in keys:
            if all(makes_no_difference(whole, i, key) for whole in wholes):
                raise UserError(
                    f"the model's chat template does not show messages of the role {role}: leave them out, or choose "
                    "another model"
                    if is_bare
                    else f"the model's chat template leaves out the {key} of a message of the role {role}: write what "
                    "the model is to read into its content, without this key"
                )
        shown |= {place} if "content" in keys else set()


def load_tokenizer(folder: str | Path, vocab_size: int | None = None) -> Tokenizer:
    """Loads the tokenizer of a Hugging Face folder, for a model with ids below `vocab_size` (None: not compared).

    Raises: UserError when the folder holds none, or one that is malformed or of another model.
    """
    from transformers import AutoTokenizer

    folder = Path(os.path.expanduser(folder))
    names = [name for name in FILES if (folder / name).is_file()]
    if not {*VOCABULARIES} & {*names}:
        raise UserError(f"{folder} has no tokenizer.json: copy the tokenizer files of the model into it")
    files = {name: (folder / name).read_bytes() for name in names}
    if GENERATION_CONFIG in files:
        read_json(folder / GENERATION_CONFIG)
    try:
        # Without the last argument transformers 5.17 warns of Mistral's tokenizer for any model.
        hf = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, fix_mistral_regex=False)
    except BaseException as error:  # errors of transformers and tokenizers; panics of the latter are no Exception
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise
        message = f"the tokenizer in {folder} cannot be read ({describe_error(error)}): copy its files again"
        raise UserError(message) from error
    tokenizer = Tokenizer(hf, files)
    highest = max(hf.get_vocab().values())
    if vocab_size is not None and highest >= vocab_size:
        message = f"{folder}: the tokenizer has ids up to {highest:,}, but vocab_size in config.json is {vocab_size:,}"
        raise UserError(f"{message}: copy both from one model")
    if tokenizer.template:
        try:
            tokenizer.render([{"role": "user", "content": "1 + 1"}], thinking=False)
        except UserError as error:
            message = f"{folder}: {error}: correct {CHAT_TEMPLATE} or chat_template in {TOKENIZER_CONFIG}"
            raise UserError(message) from error
    return tokenizer
