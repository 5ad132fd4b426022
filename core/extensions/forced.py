"""Forced answers: a reply that comes near its limit without an answer gets the beginning of one."""


import numpy as np
from jaxtyping import Int

from core.sampler import Chain
from envs.base import ForcedAnswer, Problem
from models.messages import content_of, is_begun

CONTEXT = 100  # characters of a reply, behind which its answer is encoded


class ForcingChain(Chain):
    """Completions whose segment at `force_answer_at` begins with the answer, in rows that have none."""

    def __init__(self, answer: ForcedAnswer, *arguments: object):
        super().__init__(*arguments)
        self.answer = answer

    def forced_tokens(self, start: int, steps: int) -> Int[np.ndarray, "S s"]:
        """Returns tokens to write in place of drawn ones, for rows without an answer, and -1 elsewhere."""
        sampler = self.sampler
        forced = np.full((len(self.slots), steps), -1, np.int32)
        if start != sampler.max_new_tokens - sampler.force_answer_at:
            return forced
        for slot in np.flatnonzero(self.slots >= 0):
            reply = sampler.tokenizer.decode(self.drawn.tokens[self.slots[slot], :start])
            answer = sampler.tokenizer.encode_behind(reply[-CONTEXT:], self.answer.text_after(reply))
            forced[slot, : len(answer)] = answer[:steps]
        return forced


def reply_opening(problem: Problem, prompt: str) -> str:
    """Returns the text between the last message of a prompt and the reply: end of the chat template, and prefix."""
    asked = problem.messages[:-1] if is_begun(problem.messages) else problem.messages
    last_message = content_of(asked[-1]).strip() if asked else ""
    if not last_message or last_message not in prompt:
        return problem.prefix
    return prompt.rpartition(last_message)[2]
