"""Attaches forced answers and conversations to a sampler by the settings; refuses options that do not combine."""

import importlib
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import NamedTuple

import jax

from core.chains.forced import forced_answer, reply_opening
from core.chains.replies import Replies
from core.sampler import Sampler
from envs.base import DIALECTS, TURN_DIALECTS, ForcedAnswer
from envs.prompts import Encode
from envs.settings import RolloutSettings
from models.oracle import check_prompt, check_result
from models.tokenizer import Tokenizer
from utils.settings.errors import refuse

NUM_PROMPTS = 4  # prompts that are compared with transformers' rendering
SAID = ' It is "7" & so on.\n'  # message of an environment or a tool in such a comparison


class Attached(NamedTuple):
    """Fields of a RolloutWorker that depend on options of chains."""

    sampler: Sampler
    make_replies: type[Replies]
    notes: tuple[str, ...]  # remarks on prompts


def attach(sampler: Sampler, settings: RolloutSettings, encode: Encode) -> Attached:
    """Returns the sampler, with forced answers and ends of turns, and what takes its replies.

    Raises: UserError for options that cannot be combined.
    """
    env, problem = settings.env, settings.env.problem(0)
    opening = reply_opening(problem, sampler.tokenizer.decode(encode(problem)))
    answer = replace(settings.forced_answer, opening=opening)
    sampler = with_forced_answer(sampler, settings.force_answer_at, answer)
    make_replies = Replies
    if env.has_turns:
        from core.chains.turns import Conversations, answering_calls, form_of

        make_replies = Conversations
        has_calls = env.dialect in TURN_DIALECTS and not env.rollouts
        refuse([
            (has_calls and form_of(sampler.tokenizer, env.dialect) is None,
             f"{settings.name} calls tools, and the model's chat template writes calls in a form that is not read: "
             "choose another model, or give --env_options dialect=json if it writes calls as JSON objects"),
        ])  # fmt: skip
        sampler = replace(sampler, tokens_per_turn=0 if env.rollouts else env.tokens_per_turn)
        sampler = answering_calls(sampler, DIALECTS[env.dialect]) if env.dialect else sampler
        start = f"{settings.name} has several turns, and"
        refuse([
            (sampler.model.delta is not None and bool(sampler.stop_strings),
             f"{start} the state of a Gated DeltaNet cannot go back to where the text of a turn stops: leave "
             "--stop_strings out, or name special tokens"),
            (settings.force_answer_at > 0, f"{start} forced answers do not support them: --force_answer_at 0"),
        ])  # fmt: skip
    if env.rollouts:
        make_replies = getattr(importlib.import_module(env.rollouts.module), env.rollouts.name)
    refuse([(bool(env.rollouts) and jax.process_count() > 1, f"{settings.name} runs on one host: use one process")])
    return Attached(sampler, make_replies, compare_samples(settings, sampler.tokenizer, encode))


def compare_samples(settings: RolloutSettings, tokenizer: Tokenizer, encode: Encode) -> tuple[str, ...]:
    """Compares prompts, and the tokens after a turn, with transformers' rendering; returns notes on prompts.

    Raises: UserError if they differ: see models/oracle.py.
    """
    env, notes = settings.env, []
    dialect = DIALECTS.get(env.dialect)
    role = "tool" if dialect and not dialect.is_inline else "user"
    for number in range(min(NUM_PROMPTS, env.num_tasks)):
        problem = env.problem(number)
        if env.opens:
            problem = replace(problem, messages=[{"role": "user", "content": SAID}])
        check = partial(
            check_prompt,
            tokenizer,
            encode(problem),
            problem.messages,
            thinking=problem.thinking,
            prefix=problem.prefix,
            plain=problem.plain,
            tools=problem.tools,
        )
        notes += tokenizer.prompt_notes(problem.messages, problem.plain)
        notes += check(what=f"the prompt of problem {number}")
    if env.max_turns > 1:
        said = {"role": role, "content": SAID}
        notes += check(following=[said], what=f"the observation after a turn of problem {number}")
    if dialect and dialect.is_inline:
        check_result(tokenizer, SAID, dialect.result_opening, dialect.result_closing)
    return tuple(f"{settings.name}: {note}" for note in dict.fromkeys(notes))


def with_forced_answer(
    sampler: Sampler,
    force_answer_at: int,
    answer: ForcedAnswer = ForcedAnswer(),  # noqa: B008 (frozen)
) -> Sampler:
    """Returns a sampler with an answer that is forced so many tokens before the limit; 0: without."""
    refuse([
        (not 0 <= force_answer_at < sampler.max_new_tokens,
         f"--force_answer_at {force_answer_at} must be below the {sampler.max_new_tokens} tokens of a completion"),
    ])  # fmt: skip
    if not force_answer_at:
        return sampler
    return replace(sampler, force_answer_at=force_answer_at, forced_answer=answer_function(sampler.tokenizer, answer))


@cache
def answer_function(tokenizer: Tokenizer, answer: ForcedAnswer) -> Callable[..., list[int]]:
    """Returns `forced_answer` with these arguments: one object, so that samplers with equal settings are equal."""
    return partial(forced_answer, tokenizer, answer)
