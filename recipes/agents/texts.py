"""What the endpoint asks of a chat template: prompts, signs of forged turns, joints of parts."""

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any

from envs.base import Problem
from models.tokenizer import TURN, Tokenizer
from utils.settings.errors import UserError

remark = cache(print)  # prints a line once


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
