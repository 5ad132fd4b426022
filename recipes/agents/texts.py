"""What the endpoint reads from the tokenizer and its chat template: prompts, texts of tokens, names of speakers."""

import codecs
import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from envs.base import Problem
from models.tokenizer import TURN, UNREAD, Tokenizer
from utils.settings.errors import UserError


def chat_prompt(tokenizer: Tokenizer, problem: Problem) -> list[int]:
    """Returns the tokens of a conversation, without thoughts of earlier replies if the template does not take them.

    Raises: UserError as `Tokenizer.chat`.
    """
    messages, *style = problem.messages, problem.thinking, "", problem.plain, problem.tools
    thoughtless = [{key: x for key, x in message.items() if key != "reasoning_content"} for message in messages]
    with contextlib.suppress(UserError):
        return tokenizer.chat(messages, *style)
    return tokenizer.chat(thoughtless, *style)


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


@lru_cache(maxsize=64)
def shows_name(tokenizer: Tokenizer, _template: str, role: str) -> bool:
    """True if the chat template shows the `name` of a message of this role; if not, that is printed."""
    call = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": {}}}
    user = {"role": "user", "content": "1"}
    before = {"assistant": [user], "tool": [user, UNREAD | {"tool_calls": [call]}]}.get(role, [])
    said = [*before, {"role": role, "content": "1", "name": TURN}, *[user] * (role == "system")]
    with contextlib.suppress(UserError):
        if tokenizer.render(said, None, is_open=False).count(TURN) > (role == "tool"):
            return True
    print(f"the chat template shows no names of messages of the role {role}: they are left out", flush=True)
    return False


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
