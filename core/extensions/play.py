"""Shows replies while they are drawn, and plays an episode on the terminal: a person or the model writes the turns.

python core/sampling.py --env_name guess --env_options prompt=bare
"""

from collections.abc import Sequence
from dataclasses import replace

import jax
import numpy as np
from jaxtyping import Int

from core.extensions.preview import example_calls
from core.extensions.turns import Conversations, answering_calls
from core.records import Message
from core.rollout import encode_prompt
from core.sampler import Sampler
from envs.base import DIALECTS
from envs.scoring.scorer import Scorer, ScoringStream
from envs.settings import RolloutSettings
from models.names import Key, Params, Weights
from utils.evaluation.chat import ShowText, StreamPrinter
from utils.metrics.logger import printable
from utils.settings.errors import UserError


def play_episode(sampler: Sampler, params: Params, settings: RolloutSettings, task: int, key: Key) -> None:
    """Plays the episode of a task until it ends, or the input does.

    Raises: UserError for an environment of one turn, and for a task that it does not have.
    """
    env, tokenizer = settings.env, sampler.tokenizer
    if env.max_turns == 1:
        raise UserError(f"{settings.name} has one turn, and nothing to play: see core/eval.py --show 5")
    if not 0 <= task < env.num_tasks:
        raise UserError(f"--task {task}: {settings.name} has 0 to {env.num_tasks - 1}")
    problem = env.problem(task)
    if env.dialect:
        sampler = answering_calls(sampler, DIALECTS[env.dialect], problem)
    weights = sampler.load_weights(params)
    print("A line is your turn, an empty one lets the model write it, Ctrl-D ends the episode.")
    with Scorer(settings.name, settings.options, num_workers=1) as scorer, ScoringStream(scorer) as stream:
        conversations = Conversations(env, tokenizer, sampler.layout, [problem], np.array([task]), [0], stream)
        (problem,) = conversations.open(range(1))
        show(problem.messages)
        show([{"role": "a call", "content": call.text} for call in example_calls(env, problem)])
        observed = prompt = encode_prompt(tokenizer, problem)
        tokens = list(prompt)
        while observed:
            try:
                turn = write_turn(sampler, weights, tokens, key)
            except (EOFError, KeyboardInterrupt):
                return print()
            tokens += turn
            num_left = settings.max_new_tokens - (len(tokens) - len(prompt))
            conversations.end_turn(0, np.array(turn), num_left)
            observed = conversations.observe({0}, is_blocking=True)[0].tokens
            tokens += observed
            if observed:
                show(conversations.episodes[0].messages[-1])
        (rewards,), _ = conversations.finish()
    stop = conversations.episodes[0].stop
    scores = ", ".join(f"{name} {value:g}" for name, value in (rewards or {}).items())
    print(f"\nstop {stop}: {scores}")


def write_turn(sampler: Sampler, weights: Weights, tokens: list[int], key: Key) -> list[int]:
    """Returns the tokens of a turn: of a line of input, or where it is empty, of the model. Raises EOFError."""
    text = input("\n> ").strip()
    if text:
        return sampler.tokenizer.encode(text)
    turn_key = jax.random.fold_in(key, len(tokens))
    turn = stream_reply(sampler, weights, tokens, 0, turn_key, StreamPrinter())
    print()
    return turn


def show(messages: Sequence[Message]) -> None:
    """Prints messages, made harmless for a terminal."""
    for message in messages:
        print(printable(f"\n[{message['role']}] {message['content']}"))


def stream_reply(
    sampler: Sampler, weights: Weights, prompt: list[int], number: int, key: Key, show_text: ShowText
) -> list[int]:
    """Returns the tokens of a reply; `show_text` gets its text so far after each segment, and all of it at the end."""
    tokenizer = sampler.tokenizer

    def on_segment(
        row_offset: int, tokens: Int[np.ndarray, "B A"], num_drawn: int, lengths: Int[np.ndarray, "B"]
    ) -> None:
        end = sampler.completion_end(tokens[0], 0, num_drawn) or num_drawn
        show_text(tokenizer.decode(tokens[0, :end]))

    streaming = replace(sampler, on_segment=on_segment)
    completions = streaming.generate(weights, [prompt], np.array([number]), 1, key)
    reply = completions.tokens[0, len(prompt) : completions.lengths[0]].tolist()
    show_text(tokenizer.decode(reply))
    return reply
