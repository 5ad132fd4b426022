"""Sampling without cache, batch or compilation of more than one token: the whole model on one row, again and again."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import NamedTuple, Protocol

import jax
import numpy as np
from jaxtyping import Float, Int

from models import decoder
from models.architecture import Decoder
from models.distribution import Distribution
from models.names import Array, Params
from tests.helpers import random_params

WHOLE = Distribution()
NO_TOKENS: Mapping[int, int] = MappingProxyType({})


@partial(jax.jit, static_argnums=0)
def next_logits(model: Decoder, params: Params, tokens: Int[Array, "T"], length: int) -> Float[Array, "1 V"]:
    """Returns the logits behind `length` tokens of a row; what stands right of them is not seen."""
    return decoder.logits(model, params, tokens[None])[:, length - 1]


draw_one = jax.jit(Distribution.draw, static_argnums=0)


def next_token(
    model: Decoder, tokens: Sequence[int], width: int, key: jax.Array, distribution: Distribution = WHOLE
) -> int:
    """Returns the token that a key samples behind a row of tokens, which is padded to `width`."""
    padded = np.zeros(width, np.int32)
    padded[: len(tokens)] = tokens
    logits = next_logits(model, random_params(model), padded, len(tokens))
    token, *_ = draw_one(distribution, logits, jax.random.uniform(key, (1, 2)))
    return int(token[0])


def key_of_token(key: jax.Array, task: int, sample: int, number: int) -> jax.Array:
    """Returns the key of a token by its address."""
    for address in (task, sample, number):
        key = jax.random.fold_in(key, address)
    return key


class Address(NamedTuple):
    """What addresses the random numbers of a completion."""

    key: jax.Array
    task: int
    sample: int


class Limits(NamedTuple):
    tokens: int  # of a completion, or of an episode with its observations
    width: int  # of a row, padding included


def reply(
    model: Decoder,
    prompt: Sequence[int],
    address: Address,
    limits: Limits,
    distribution: Distribution,
    forced: Mapping[int, int] = NO_TOKENS,
) -> list[int]:
    """Returns a completion of `limits.tokens` tokens. `forced`: tokens that are not sampled, by their number."""
    tokens = list(prompt)
    for number in range(limits.tokens):
        token = next_token(model, tokens, limits.width, key_of_token(*address, number), distribution)
        tokens.append(forced.get(number, token))
    return tokens[len(prompt) :]


class Said(Protocol):
    """What an environment answers to a turn: no tokens end the episode."""

    tokens: Sequence[int]
    finished: bool


def conversation(
    model: Decoder,
    prompt: Sequence[int],
    address: Address,
    limits: Limits,
    ends_turn: Callable[[Sequence[int]], bool],
    answer: Callable[[Sequence[Sequence[int]], int], Said],
) -> tuple[list[int], list[bool], bool]:
    """Returns the tokens of an episode, which of them were sampled, and whether the episode ended by itself.

    `answer` is given the turns so far and the number of tokens that are left.
    """
    tokens = list(prompt)
    mask = [False] * len(prompt)
    turns = []
    turn = []
    while True:
        number = len(tokens) - len(prompt)
        turn.append(next_token(model, tokens, limits.width, key_of_token(*address, number)))
        tokens.append(turn[-1])
        mask.append(True)
        num_left = limits.tokens - number - 1
        if num_left and not ends_turn(turn):
            continue
        turns.append(turn)
        said = answer(turns, num_left)
        if not said.tokens:
            return tokens, mask, said.finished
        tokens += said.tokens
        mask += [False] * len(said.tokens)
        turn = []


def truncated(logits: Float[Array, " V"], d: Distribution) -> dict[int, float]:
    """Returns the ids that may be sampled, with log-probabilities in float64: a cut at a time, as transformers does."""
    logits = np.asarray(logits, np.float64) / d.temperature
    ids = np.argsort(-logits, kind="stable")

    def logprobs(ids: np.ndarray) -> np.ndarray:
        return logits[ids] - np.logaddexp.reduce(logits[ids])

    if d.top_k:
        ids = ids[: d.top_k]
    if d.top_p < 1:  # the fewest ids that hold this much
        ids = ids[: 1 + np.searchsorted(np.cumsum(np.exp(logprobs(ids))), d.top_p)]
    ids = ids[logprobs(ids) >= logprobs(ids)[0] + np.log(max(d.min_p, 1e-300))]
    return dict(zip(ids.tolist(), logprobs(ids).tolist(), strict=True))
