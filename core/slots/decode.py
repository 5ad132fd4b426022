"""Samples a segment of tokens of rows whose cache is in pages.

To change which token is sampled (a penalty, another truncation): the step of `draw_tokens`.

S lanes, s steps of a segment, n slots, V vocabulary.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int, PyTree, UInt32

from models import decoder
from models.architecture import Decoder
from models.distribution import Distribution, sampling_uniforms
from models.names import Array, Weights
from models.pages import Pages, State, begin, end, page_attention, read_slots, write_slots

# Tokens, their log-probabilities, the ids that could be sampled, and the experts that computed the samples.
SampledTokens = tuple[Int[Array, "S s"], Float[Array, "S s"], Int[Array, "S s U"], Int[Array, "S s L k"]]


@partial(jax.jit, static_argnums=(0, 1, 2, 3), donate_argnums=(5, 6))
def decode_pages(
    model: Decoder,
    distribution: Distribution,
    num_steps: int,
    stop_ids: tuple[int, ...],
    weights: Weights,
    state: State,
    last_tokens: Int[Array, "n"],
    pages: Pages,
    given: Int[Array, "S"],
    numbers: Int[Array, "S"],
    keys: UInt32[Array, "S 2"],
) -> tuple[State, Int[Array, "n"], SampledTokens]:
    """Samples tokens number `numbers`, ... of each lane, after the token that is `given`; -1: the slot's last one.

    Returns the state, the last token of each slot, and the columns. States of linear attention stop before the last
    token that counts, or before the first of `stop_ids`.
    """
    last = jnp.where(given >= 0, given, read_slots(last_tokens, pages.slots))
    before, layers = map(list, zip(*begin(model, state, pages, num_steps), strict=True))
    has_states = model.delta is not None

    def forward(i: Int[Array, ""], cache: tuple, last: Int[Array, "S"]) -> tuple[Float[Array, "S V"], tuple, Array]:
        layers, is_live = cache
        if has_states:
            is_live &= (i < pages.counts) & ((i == 0) | ~jnp.isin(last, jnp.array(stop_ids, jnp.int32)))
        attention = partial(page_attention, model=model, pages=pages, number=i)
        is_token = is_live[:, None] if has_states else None
        hidden, layers, routes = decoder.decode_states(
            model, weights, before, layers, last[:, None], pages.columns + i, attention, is_token
        )
        return decoder.head(model, weights, hidden[:, -1]), (layers, is_live), routes

    cache = layers, jnp.ones(len(keys), bool)
    (layers, _), last, columns = draw_tokens(model, distribution, num_steps, forward, cache, last, keys, numbers)
    last_tokens = write_slots(last_tokens, last, pages.slots)
    return end(model, state, layers, pages), last_tokens, columns


def draw_tokens(
    model: Decoder,
    distribution: Distribution,
    num_steps: int,
    forward: Callable[..., tuple],
    cache: PyTree,
    last: Int[Array, "S"],
    keys: UInt32[Array, "S 2"],
    numbers: Int[Array, "S"],
) -> tuple[PyTree, Int[Array, "S"], SampledTokens]:
    """Samples tokens number `numbers`, ... of each row; returns the cache, the last token of each, and the columns.

    `forward` computes the logits after the last tokens of step i, the new cache, and the experts.
    """
    # All at once: in the loop these would be twenty small programs for a token.
    uniforms = sampling_uniforms(keys, numbers + jnp.arange(num_steps)[:, None])

    def step(i: Int[Array, ""], state: tuple) -> tuple:
        cache, last, columns = state
        logits, cache, route = forward(i, cache, last)
        token, logprob, ids = distribution.draw(logits, uniforms[i])
        token = token.astype(jnp.int32)
        new = token, logprob, ids, route[:, 0]
        columns = jax.tree.map(lambda column, x: column.at[:, i].set(x), columns, new)
        return cache, token, columns

    shape = len(keys), num_steps
    support = jnp.zeros((*shape, distribution.support_size(model.vocab_size)), jnp.int32)
    routes = jnp.zeros((*shape, *model.route_shape), jnp.int16)
    columns = jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32), support, routes
    # The number of steps is static: on a GPU, the host would read a condition after every token.
    return jax.lax.fori_loop(0, num_steps, step, (cache, last, columns))
