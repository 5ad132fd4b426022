"""Forced answers: if a reply comes near its limit without an answer, the beginning of one is written."""

import numpy as np
from jaxtyping import Int

from envs.base import ForcedAnswer, Problem
from models.messages import content_of, is_begun
from models.tokenizer import Tokenizer

CONTEXT = 100  # characters of a reply, after which its answer is encoded


def forced_answer(tokenizer: Tokenizer, answer: ForcedAnswer, reply_tokens: Int[np.ndarray, "A"]) -> list[int]:
    """Returns the tokens to write after a reply's tokens; none if the reply has an answer."""
    reply = tokenizer.decode(reply_tokens)
    return tokenizer.encode_behind(reply[-CONTEXT:], answer.text_after(reply))


def reply_opening(problem: Problem, prompt: str) -> str:
    """Returns the text between the last message of a prompt and the reply: end of the chat template, and prefix."""
    asked = problem.messages[:-1] if is_begun(problem.messages) else problem.messages
    last_message = content_of(asked[-1]).strip() if asked else ""
    if not last_message or last_message not in prompt:
        return problem.prefix
    return prompt.rpartition(last_message)[2]
