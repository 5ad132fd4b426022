"""What the endpoint reads from the tokenizer and its chat template: prompts, texts of tokens, names of speakers."""

import codecs
import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from envs.base import Problem
from models.tokenizer import TURN, Tokenizer
from utils.settings.errors import UserError


def chat_prompt(tokenizer: Tokenizer, problem: Problem) -> list[int]:
    """Returns the tokens of a conversation, without thoughts of earlier replies and names if the template hides them.

    Raises: UserError as `Tokenizer.chat`.
    """
    for hidden in ((), ("reasoning_content",), ("name",), ("reasoning_content", "name")):
        messages = [{key: x for key, x in said.items() if key not in hidden} for said in problem.messages]
        with contextlib.suppress(UserError):
            ids = tokenizer.chat(messages, problem.thinking, "", problem.plain, problem.tools)
            if "name" in hidden:
                remark("the chat template shows no names of messages: they are left out")
            return ids
    return tokenizer.chat(messages, problem.thinking, "", problem.plain, problem.tools)


@lru_cache
def remark(text: str) -> None:
    """Prints a line once."""
    print(text, flush=True)


def check_forged(tokenizer: Tokenizer, said: Sequence[Mapping[str, Any]]) -> Tokenizer:
    """Returns a tokenizer to which special tokens in messages are text.

    Raises: UserError for tokens that the chat template writes itself: a message must not forge a turn.
    """
    spelled = tokenizer.spelled([{"role": "user", "content": json.dumps(said, ensure_ascii=False)}])
    if not spelled:
        return tokenizer
    written = tokenizer.template + tokenizer.hf.decode(tokenizer.stop_ids)
    with contextlib.suppress(UserError):
        written += tokenizer.render([{**message, "content": ""} for message in said if "role" in message], None)
    if forged := next((sign for sign in spelled if sign in written), ""):
        raise UserError(f"a message spells {forged}, which is a token of the chat template: leave it out")
    return replace(tokenizer, plain=frozenset(spelled))


@lru_cache(maxsize=64)
def joint_of_parts(tokenizer: Tokenizer, _template: str) -> str:
    """Returns what the chat template writes between two texts of a message; a new line if it takes one text only."""
    parts = [{"type": "text", "text": TURN + number} for number in "12"]
    with contextlib.suppress(UserError):
        _, is_shown, rest = tokenizer.render([{"role": "user", "content": parts}], None).partition(TURN + "1")
        between, is_next, _ = rest.partition(TURN + "2")
        if is_shown and is_next and "'" not in between and '"' not in between:
            return between
    return "\n"


def token_bytes(tokenizer: Tokenizer, number: int) -> bytes:
    """Returns the bytes of a token's text; none for an id that only pads the vocabulary."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    token = tokenizer.hf.convert_ids_to_tokens(number)
    if token is None or token in tokenizer.added_ids:
        return (token or "").encode()
    if "ByteLevel" in str(tokenizer.hf.backend_tokenizer.decoder):
        byte_of = {char: byte for byte, char in bytes_to_unicode().items()}
        return bytes(byte_of[char] for char in token)
    if token.startswith("<0x") and len(token) == 6:
        return bytes([int(token[3:5], 16)])
    return token.replace("\u2581", " ").encode()


def texts_of(tokenizer: Tokenizer, ids: Sequence[int], text: str) -> list[str]:
    """Returns the text of each token; they make `text` together. A character is of the token that completes it."""
    decoder, special = codecs.getincrementaldecoder("utf-8")("replace"), {*tokenizer.special_ids.values()}
    texts = [decoder.decode(b"" if i in special else token_bytes(tokenizer, i)) for i in ids]
    if texts:
        texts[-1] += decoder.decode(b"", final=True)
        if texts[0].startswith(" ") and text and not text.startswith(" "):
            texts[0] = texts[0][1:]  # SentencePiece begins a text with a blank
    return texts
