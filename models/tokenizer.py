"""Text to token ids and back: a thin wrapper of transformers' fast tokenizers."""

import json
import os
import re
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # no warning that torch is missing
import numpy as np
from jaxtyping import Int
from jinja2.exceptions import TemplateError

from models.templates import render_apart
from utils.settings.errors import UserError, describe_error

if TYPE_CHECKING:
    import transformers  # which takes longer than JAX: an error of the options does not wait for it

GENERATION_CONFIG = "generation_config.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
CHAT_TEMPLATE = "chat_template.jinja"
VOCABULARIES = ("tokenizer.json", "vocab.json")  # a folder with a tokenizer has one of them
FILES = (
    *VOCABULARIES, TOKENIZER_CONFIG, "merges.txt", "added_tokens.json", "special_tokens_map.json", CHAT_TEMPLATE,
    GENERATION_CONFIG,
)  # fmt: skip
KEPT = ("bos_token_id", "do_sample", "temperature", "top_k", "top_p", "min_p")  # of a base's generation_config.json
THINKING_DEFAULT = "{%- if enable_thinking is not defined %}{%- set enable_thinking = VALUE %}{%- endif %}"
PREFIX_DEFAULT = "{% if add_generation_prompt %}{{ assistant_prefix | default(VALUE) }}{% endif %}"
PREFIX_PATTERN = re.compile(r'("(?:[^"\\]|\\.)*")'.join(map(re.escape, PREFIX_DEFAULT.split("VALUE"))) + r"\Z")
MAX_JSON_BYTES = 10**8  # the largest tokenizers have a third of it
MAX_CACHED = 4000  # characters of a text whose ids are kept
CUT = "\ufdd0"  # no character: divides a text where someone spelled a token in it
TAG = re.compile(r"</?\w+>")  # such as <think>: prompts quote them, and templates look for them
CONTENT, TURN = "lmpo{}content", "lmpoturn"  # of a conversation that shows how a template frames its messages
ANNOUNCEMENT = """# Tools

These functions can be called; the JSON schema of each is on a line of its own:
<tools>
SCHEMAS
</tools>

To call one, write its name and its arguments as JSON between two tags, and end the turn:
<tool_call>
{"name": "FUNCTION", "arguments": {"ARGUMENT": "VALUE"}}
</tool_call>"""
Message = Mapping[str, str]  # role and content
Tool = Callable[..., object]
Schema = Mapping[str, object]  # of a tool, JSON


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """A tokenizer with its chat template and stop ids; `Tokenizer(hf)` wraps one that is in memory already."""

    hf: "transformers.PreTrainedTokenizerBase"
    files: Mapping[str, bytes] = field(default_factory=dict, repr=False)  # that it was loaded from, saved unchanged

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end a completion: those of generation_config.json, then the tokenizer's own end of sequence."""
        ids = [*listed_stop_ids(self.files), self.hf.eos_token_id]
        unique = dict.fromkeys(ids)
        unique.pop(None, None)
        return tuple(unique)

    @property
    def has_template(self) -> bool:
        """True if the model's folder has a chat template."""
        return bool(self.hf.chat_template)

    @property
    def pad_id(self) -> int:
        """The id that fills unused columns; padding is known by masks and lengths, never by this id."""
        if self.hf.pad_token_id is not None:
            return self.hf.pad_token_id
        return next(iter(self.stop_ids), 0)

    @property
    def special_ids(self) -> dict[str, int]:
        """The ids of special tokens, which `decode` drops, by their text."""
        return {str(token): i for i, token in self.hf.added_tokens_decoder.items() if token.special}

    @property
    def added_ids(self) -> dict[str, int]:
        """The ids of tokens that are found in a text as a whole, special or not, by their text."""
        return self.hf.get_added_vocab()

    @cached_property
    def signs(self) -> tuple[str, ...]:
        """Texts of added tokens of two characters or more that are not blank."""
        return tuple(sign for sign in self.added_ids if len(sign) > 1 and sign.strip())

    @cached_property
    def control_signs(self) -> tuple[str, ...]:
        """Returns the `signs` that are special tokens or look like one (<|fim_pad|>), without tags."""
        return tuple(sign for sign in self.signs if sign in self.special_ids or not TAG.fullmatch(sign))

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text, of each piece between CUT; nothing is added before or after it."""
        pieces = text.split(CUT)
        return [i for piece in pieces for i in self.hf.encode(piece, add_special_tokens=False)]

    def cut(self, text: str, signs: Sequence[str]) -> str:
        """Returns a text with CUT within each of these signs, so that `encode` makes no tokens of them."""
        text = text.replace(CUT, "")
        found = [sign for sign in signs if sign in text]
        cuts = "|".join(f"(?<={re.escape(sign[0])})(?={re.escape(sign[1:])})" for sign in found)
        text = re.sub(cuts, CUT, text) if found else text
        spelled = self.normalize(text)  # which drops no CUT
        return CUT.join(text) if any(self.normalize(sign) in spelled for sign in signs) else text

    def spelled(self, messages: Sequence[Message]) -> str:
        """Returns the first of `control_signs` that messages spell; empty: none."""
        return next((sign for sign in self.control_signs if any(sign in m["content"] for m in messages)), "")

    def prompt_notes(self, messages: Sequence[Message], plain: bool) -> list[str]:
        """Returns facts on prompts of such messages that users may not expect."""
        notes = []
        if not (self.has_template or plain):
            notes.append("the model has no chat template: messages are joined by newlines, as with plain=true")
        if spelled := self.spelled(messages):
            notes.append(f"prompts spell {spelled}, which stays text: only the chat template writes special tokens")
        return notes

    @cached_property
    def normalize(self) -> Callable[[str], str]:
        """Returns a text as it is searched for added tokens."""
        are_normalized = any(token.normalized for token in self.hf.added_tokens_decoder.values())
        normalizer = self.hf.backend_tokenizer.normalizer if are_normalized else None
        return normalizer.normalize_str if normalizer else str

    def decode(self, ids: Sequence[int] | Int[np.ndarray, "A"]) -> str:
        """Returns the text of the ids without special tokens (<|im_end|>); <think> is text, not a special token."""
        ids = [int(i) for i in ids]
        return self.hf.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def chat(
        self,
        messages: Sequence[Message],
        thinking: bool | None = False,
        prefix: str = "",
        plain: bool = False,
        tools: Sequence[Tool] = (),
    ) -> list[int]:
        """Returns the ids of a conversation up to the assistant's turn, then `prefix`, the beginning of its answer.

        `thinking=False` closes Qwen3's thinking before it starts, None leaves it to the template. `plain` leaves the
        chat template out, as for a base model without one: then the contents of the messages are joined by newlines.
        Tools that the chat template does not show are announced in the system message. What a message spells stays
        text, but for tags (<think>): see `control_signs`.

        Raises: UserError when the chat template fails, or writes far more than the messages; for a tool without type
        hints or a docstring.
        """
        messages = [{**message, "content": self.cut(message["content"], self.control_signs)} for message in messages]
        schemas = [tool_schema(tool) for tool in tools]
        if plain or not self.has_template:
            text = "\n".join(message["content"] for message in announce(messages, schemas))
        else:
            text = self.render(messages, thinking, tools=schemas)
            if schemas and text == self.render(messages, thinking):
                text = self.render(announce(messages, schemas), thinking)
        return self.encode(text) + self.encode(prefix)

    def calls(
        self, ids: Sequence[int] | Int[np.ndarray, "A"], opening: str, closing: str
    ) -> tuple[str, ...]:
        """Returns the texts of the calls of tools in a reply, between these signs; one that is not closed is empty.

        Where the signs are single tokens, only these begin and end a call.
        """
        ids = [int(i) for i in ids]
        vocabulary = self.added_ids
        if opening in vocabulary and closing in vocabulary:
            pieces = split_at(ids, vocabulary[opening])[1:]
            bodies = [split_at(piece, vocabulary[closing]) for piece in pieces]
            return tuple(self.hf.decode(body[0]) if len(body) > 1 else "" for body in bodies)
        pieces = self.hf.decode(ids).split(opening)[1:]
        bodies = [piece.partition(closing) for piece in pieces]
        return tuple(body if sign else "" for body, sign, _ in bodies)

    def encode_plain(self, text: str) -> list[int]:
        """Returns the ids of a text in which special and other added tokens are text, as others wrote it."""
        ids = plain_ids if len(text) <= MAX_CACHED else plain_ids.__wrapped__
        return list(ids(self, text))

    def bridge(
        self, messages: Sequence[Message], thinking: bool = False, prefix: str = "", plain: bool = False
    ) -> "Bridge":
        """Returns the ids of these messages, with all that stands between two turns of the assistant.

        Raises: UserError when the chat template fails, or cannot be continued behind what was written: see `frame`.
        """
        roles = tuple(message["role"] for message in messages)
        closing, pieces = frame(self, roles, thinking, plain or not self.has_template)
        ids = list(pieces[0])
        for message, piece in zip(messages, pieces[1:], strict=True):
            ids += self.encode_plain(message["content"])
            ids += piece
        return Bridge(closing, ids + self.encode(prefix))

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

    def results(self, messages: Sequence[Message], opening: str, closing: str) -> list[int]:
        """Returns the ids of results that are written behind calls; special tokens in their text are text."""
        ids = []
        for message in messages:
            ids += self.encode(opening)
            ids += self.encode_plain(message["content"])
            ids += self.encode(closing)
        return ids

    def render(
        self,
        messages: Sequence[Message],
        thinking: bool | None,
        is_open: bool = True,
        tools: Sequence[Schema] = (),
    ) -> str:
        """Renders a conversation with the chat template, up to the assistant's turn if it `is_open`.

        Raises UserError as `chat`.
        """
        render_apart()
        try:
            return self.hf.apply_chat_template(
                list(messages),
                tools=list(tools) or None,
                add_generation_prompt=is_open,
                **({} if thinking is None else {"enable_thinking": thinking}),
                assistant_prefix="",  # `chat` adds it, in ids
                tokenize=False,
            )
        except (TemplateError, TypeError, ValueError) as error:  # the last two: of what transformers checks
            reason = error if isinstance(error, TemplateError) else describe_error(error)
            raise UserError(f"the model's chat template fails ({reason})") from error

    @property
    def training_prompts(self) -> tuple[bool | None, str]:
        """Thinking and prefix of the prompts that this model was trained on here; without a record None and ""."""
        template = self.hf.chat_template
        if not isinstance(template, str):
            return None, ""
        prefix = PREFIX_PATTERN.search(template)
        defaults = {value: THINKING_DEFAULT.replace("VALUE", str(value).lower()) for value in (True, False)}
        thinking = next((value for value, line in defaults.items() if template.startswith(line)), None)
        return thinking, json.loads(prefix[1]) if prefix else ""

    def with_training_prompts(self, thinking: bool, prefix: str) -> Self:
        """Returns a tokenizer that saves a chat template with these defaults of `enable_thinking` and of `prefix`.

        So others render the prompts of training without an argument. A template that does not read `enable_thinking`
        gets no default of it; those that are one of several by name are saved as they are.
        """
        before = self.hf.chat_template
        if not self.files or not isinstance(before, str):
            return self
        template = before
        if "enable_thinking" in template:
            for value in ("true", "false"):
                template = template.removeprefix(THINKING_DEFAULT.replace("VALUE", value))
            template = THINKING_DEFAULT.replace("VALUE", str(thinking).lower()) + template
        template = PREFIX_PATTERN.sub("", template)
        if prefix:  # Jinja drops a newline at the end of a template, but not before what is appended here
            template = template.removesuffix("\n") + PREFIX_DEFAULT.replace("VALUE", json.dumps(prefix))
        if template == before:
            return self
        if CHAT_TEMPLATE in self.files:
            return replace(self, files={**self.files, CHAT_TEMPLATE: template.encode()})
        config = json.loads(self.files[TOKENIZER_CONFIG]) | {"chat_template": template}
        text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
        return replace(self, files={**self.files, TOKENIZER_CONFIG: text.encode()})

    def with_generation(self, settings: Mapping[str, object], stop_strings: str = "") -> Self:
        """Returns a tokenizer that saves how training sampled in generation_config.json.

        `settings`: of sampling; `stop_strings`: --stop_strings, whose special tokens are stop ids. Of the base's file
        only KEPT stays, so that no penalty or constraint is saved that training did not apply.
        """
        if not self.files:
            return self
        base = json.loads(self.files.get(GENERATION_CONFIG, b"{}"))
        kept = {name: base[name] for name in KEPT if name in base}
        stop_ids, _ = self.read_stops(stop_strings)
        generation = kept | {"eos_token_id": list(stop_ids), "pad_token_id": self.pad_id} | settings
        text = json.dumps(generation, indent=2) + "\n"
        return replace(self, files={**self.files, GENERATION_CONFIG: text.encode()})

    def save(self, directory: str | Path) -> None:
        """Writes the tokenizer's files and generation_config.json into a folder.

        Files it was loaded from are written byte for byte: those that transformers 5 writes, version 4 cannot read.
        """
        directory = Path(directory)
        if not self.files:
            self.hf.save_pretrained(directory)
        for name, content in self.files.items():
            (directory / name).write_bytes(content)
        if GENERATION_CONFIG not in self.files:
            generation = {"eos_token_id": list(self.stop_ids), "pad_token_id": self.pad_id}
            (directory / GENERATION_CONFIG).write_text(json.dumps(generation, indent=2) + "\n")


def tool_schema(tool: Tool) -> Schema:
    """Returns the JSON schema of a function. Raises: UserError where it has no type hints or no docstring for one."""
    from transformers.utils import get_json_schema

    try:
        return get_json_schema(tool)
    except Exception as error:  # of several classes, and what the evaluation of type hints raises
        name = getattr(tool, "__name__", repr(tool))
        raise UserError(
            f"the tool {name} cannot be announced ({describe_error(error)}): write type hints, and a docstring that "
            "describes it and, below Args:, each argument"
        ) from error


def announce(messages: Sequence[Message], schemas: Sequence[Schema]) -> list[Message]:
    """Returns messages whose system message announces tools, in the format of Qwen's chat templates."""
    messages = list(messages)
    if not schemas:
        return messages
    lines = "\n".join(json.dumps(schema, ensure_ascii=False) for schema in schemas)
    text = ANNOUNCEMENT.replace("SCHEMAS", lines)
    if messages and messages[0]["role"] == "system":
        text = f"{messages[0]['content']}\n\n{text}"
        messages = messages[1:]
    return [{"role": "system", "content": text}, *messages]


def split_at(ids: list[int], sign: int) -> list[list[int]]:
    """Returns the parts of a list between the signs."""
    parts = [[]]
    for i in ids:
        if i == sign:
            parts.append([])
        else:
            parts[-1].append(i)
    return parts


class Bridge(NamedTuple):
    """Ids between two turns of the assistant."""

    closing: int | None  # the stop token that ends a turn; None: turns have none
    ids: list[int]  # behind it


@lru_cache(maxsize=1024)  # environments say the same to many episodes
def plain_ids(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    """Returns the ids of a text in which added tokens are text: see `Tokenizer.encode_plain`."""
    return tuple(tokenizer.encode(tokenizer.cut(text, tokenizer.signs)))


@lru_cache(maxsize=256)
def frame(
    tokenizer: Tokenizer, roles: tuple[str, ...], thinking: bool, is_plain: bool
) -> tuple[int | None, tuple[tuple[int, ...], ...]]:
    """Returns the stop token of a turn, and the ids before, between and behind the contents of messages that follow.

    They are read off a conversation with other contents, so that a turn is continued by the ids that were drawn,
    whatever the template would make of their text. Raises: UserError where the template ends a turn in another way
    when messages follow it, leaves a content out, or says nothing.
    """
    if is_plain:
        newline = tuple(tokenizer.encode("\n"))
        return None, (newline,) * (len(roles) + 1)
    said = [CONTENT.format(i) for i in range(len(roles))]
    turn = [{"role": "user", "content": CONTENT.format("first")}, {"role": "assistant", "content": TURN}]
    following = [{"role": role, "content": content} for role, content in zip(roles, said, strict=True)]
    _, has_turn, end = tokenizer.render(turn, thinking, is_open=False).rpartition(TURN)
    _, has_turn_too, rest = tokenizer.render(turn + following, thinking).rpartition(TURN)
    texts = []
    for content in said:
        text, found, rest = rest.partition(content)
        if not found:
            raise UserError(f"the model's chat template does not show messages of the role {roles[len(texts)]}")
        texts.append(text)
    if not (has_turn and has_turn_too and texts[0].startswith(end.rstrip())):
        raise UserError(
            "the model's chat template ends a reply in another way when messages follow it, so that a conversation "
            "cannot go on behind the tokens that were drawn: choose an environment, or rows, with one reply"
        )
    first, *pieces = [tuple(tokenizer.encode(text)) for text in (*texts, rest)]
    closing = first[0] if first and first[0] in tokenizer.stop_ids else None
    return closing, (first[closing is not None :], *pieces)


def listed_stop_ids(files: Mapping[str, bytes]) -> list[int]:
    """Returns the ids in generation_config.json that end a completion, as they are written there."""
    generation = json.loads(files.get(GENERATION_CONFIG, b"{}"))
    ids = generation.get("eos_token_id")
    if ids is None:
        return []
    return ids if isinstance(ids, list) else [ids]


def load_tokenizer(folder: str | Path, vocab_size: int | None = None) -> Tokenizer:
    """Loads the tokenizer of a Hugging Face folder, for a model with ids below `vocab_size` (None: not compared).

    Raises: UserError when the folder holds none, or one that is malformed or of another model.
    """
    from transformers import AutoTokenizer

    folder = Path(os.path.expanduser(folder))
    names = [name for name in FILES if (folder / name).is_file()]
    if not {*VOCABULARIES} & {*names}:
        raise UserError(f"{folder} has no tokenizer.json: copy the tokenizer files of the model into it")
    for name in names:
        check_file(folder, name)
    files = {name: (folder / name).read_bytes() for name in names}
    try:
        hf = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except BaseException as error:  # of transformers, of tokenizers, and panics of the latter, which are no Exception
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise
        message = f"the tokenizer in {folder} cannot be read ({describe_error(error)}): copy its files again"
        raise UserError(message) from error
    tokenizer = Tokenizer(hf, files)
    check_ids(tokenizer, folder, vocab_size)
    check_template(tokenizer, folder)
    return tokenizer


def check_template(tokenizer: Tokenizer, folder: Path) -> None:
    """Raises UserError if a first conversation cannot be rendered within limits, or has no ids."""
    messages = [{"role": "user", "content": "1 + 1"}]
    try:
        if tokenizer.has_template:
            tokenizer.render(messages, thinking=False)
    except ValueError as error:
        message = f"{folder}: {error}: correct {CHAT_TEMPLATE} or chat_template in {TOKENIZER_CONFIG}"
        raise UserError(message) from error
    if not tokenizer.chat(messages):
        raise UserError(f"{folder}: the tokenizer makes no ids of a text: copy its files again")


def check_file(folder: Path, name: str) -> None:
    """Raises UserError for a file of a tokenizer that is a link out of its folder, or malformed JSON.

    It would be copied into saved models. Links into the hub's cache, whose files are all in `blobs`, are allowed.
    """
    parent = (folder / name).resolve().parent
    if parent != folder.resolve() and parent.name != "blobs":
        raise UserError(f"{folder / name} is a link out of the folder: put a copy of the file in its place")
    if name.endswith(".json"):
        read_json(folder / name)


def check_ids(tokenizer: Tokenizer, folder: Path, vocab_size: int | None) -> None:
    """Raises UserError for ids that the model does not have."""
    most = float("inf") if vocab_size is None else vocab_size
    highest = max(tokenizer.hf.get_vocab().values(), default=0)
    if highest >= most:
        message = f"{folder}: the tokenizer has ids up to {highest:,}, but vocab_size in config.json is {vocab_size:,}"
        raise UserError(f"{message}: they are of different models")
    for i in listed_stop_ids(tokenizer.files):
        if type(i) is not int or not 0 <= i < most:
            message = f"{folder / GENERATION_CONFIG}: eos_token_id holds {reprlib.repr(i)}"
            raise UserError(f"{message}, which is no id of the vocabulary")


def read_json(file: Path) -> dict[str, Any]:
    """Reads the object in a JSON file of a model's folder. Raises UserError when there is none."""
    if not file.is_file():
        raise UserError(f"{file.parent} has no {file.name}: it is not a complete Hugging Face model folder")
    if file.stat().st_size > MAX_JSON_BYTES:
        raise UserError(f"{file} has more than {MAX_JSON_BYTES:,} bytes: download it again")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file} is not JSON ({describe_error(error)}): download it again") from error
    if not isinstance(content, dict):
        raise UserError(f"{file} holds {reprlib.repr(content)}, not an object: download it again")
    return content
