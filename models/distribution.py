"""The distribution over next tokens that is sampled and trained: drawing from it, and scoring under it, in float32.

Letters: R rows, V vocabulary, S ids of a truncated distribution.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from utils.devices.sharding import constrain, num_shards
from utils.settings.errors import UserError
from utils.training.batching import Array

MAX_SUPPORT = 128  # ids that truncated sampling considers at most


@dataclass(frozen=True)
class Distribution:
    """Softmax of logits / temperature, cut to top-k, then top-p, then min-p ids as in transformers; 0 is greedy."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self):
        if self.temperature < 0 or not 0 <= self.top_k <= MAX_SUPPORT:
            raise UserError(f"--temperature must be at least 0, and --top_k 0 (all ids) to {MAX_SUPPORT}")
        if not 0 < self.top_p <= 1 or not 0 <= self.min_p < 1:
            raise UserError("--top_p must be above 0 and up to 1, --min_p from 0 to below 1")

    @property
    def is_whole(self) -> bool:
        """Whether every token can be drawn."""
        return self.temperature > 0 and self.top_k == 0 and self.top_p == 1 and self.min_p == 0

    @property
    def note(self) -> str:
        """For people, at the start of training: what is left out; empty for the whole distribution."""
        if self.is_whole:
            return ""
        limit = f"the {self.top_k or MAX_SUPPORT} likeliest tokens" + " at most" * (not self.top_k)
        return f"sampled and trained: {limit}, with top_p {self.top_p:g} and min_p {self.min_p:g} of them"

    def support_size(self, vocab_size: int) -> int:
        """The most ids that can be drawn; 0: all of them, or only the likeliest."""
        return 0 if self.is_whole or self.temperature == 0 else min(self.top_k or MAX_SUPPORT, vocab_size)

    def draw(
        self, logits: Float[Array, "R V"], uniforms: Float[Array, "R 2"]
    ) -> tuple[Int[Array, "R"], Float[Array, "R"], Int[Array, "R S"]]:
        """A token for each row, its log-probability under the distribution it came from, and the support.

        The support are the `support_size` ids that could be drawn, filled up with -1. Greedy tokens come with their
        log-probability at temperature 1.
        """
        size = self.support_size(logits.shape[-1])
        everything = jnp.zeros((len(logits), 0), jnp.int32)
        if self.temperature == 0:
            tokens = logits.argmax(-1)
            return tokens, log_softmax_at(logits, tokens), everything
        logits = logits / self.temperature
        if not size:
            return *categorical(logits, uniforms), everything
        top, ids = jax.lax.top_k(logits, size)
        normalizer = jax.nn.logsumexp(top if self.top_k else logits, axis=-1, keepdims=True)
        probs = jnp.exp(top - normalizer)
        keep = (jnp.cumsum(probs, axis=-1) - probs < self.top_p) & (probs >= self.min_p * probs[:, :1])
        choice, logprobs = categorical(jnp.where(keep, top, -jnp.inf), uniforms)
        return jnp.take_along_axis(ids, choice[:, None], axis=-1)[:, 0], logprobs, jnp.where(keep, ids, -1)


def uniform_numbers(keys, steps: Int[Array, "A"]) -> Float[Array, "A R 2"]:
    """What draws of these steps are made from, for each row's key: float32 in [0, 1)."""
    return jax.vmap(lambda t: jax.vmap(lambda key: jax.random.uniform(jax.random.fold_in(key, t), (2,)))(keys))(steps)


def categorical(
    logits: Float[Array, "R V"], uniforms: Float[Array, "R 2"]
) -> tuple[Int[Array, "R"], Float[Array, "R"]]:
    """Inverse-CDF draws in two levels, one of 128 blocks and then an id in it: two uniforms a row, not V Gumbels.

    The sum over the blocks is the softmax's denominator, so the log-probability costs nothing more. Devices that share
    the vocabulary hold whole blocks each: blocks of 128 ids would have to be gathered for every token.
    """
    R, V = logits.shape
    top = logits.max(-1, keepdims=True)
    mass = jnp.pad(jnp.exp(logits - top), ((0, 0), (0, -V % 128))).reshape(R, 128, -1)

    def pick(mass, u):
        cumulative = jnp.cumsum(mass, axis=-1)
        return jnp.argmax((cumulative > u[:, None] * cumulative[:, -1:]) & (mass > 0), axis=-1)

    blocks = replicate(mass.sum(-1))
    block = pick(blocks, uniforms[:, 0])
    chosen = constrain(jnp.take_along_axis(mass, block[:, None, None], axis=1)[:, 0], "rows")
    tokens = block * mass.shape[2] + pick(chosen, uniforms[:, 1])
    return tokens, jnp.take_along_axis(logits - top, tokens[:, None], axis=-1)[:, 0] - jnp.log(blocks.sum(-1))


def replicate(x: Float[Array, "R N"]) -> Float[Array, "R N"]:
    """Whole on each of the devices that share the vocabulary, as a sum of what each has.

    XLA would cut what is computed from it again, and talk about every little result.
    """
    mesh = jax.typeof(x).sharding.mesh
    if mesh.empty or num_shards(mesh, "vocab") == 1:
        return x
    return constrain((x[:, :, None] * jnp.eye(x.shape[1])).sum(1), "rows")


def truncate(
    logits: Float[Array, "... V"], support: Int[Array, "... S"], tokens: Int[Array, "..."]
) -> tuple[Float[Array, "... S"], Int[Array, "..."]]:
    """The logits of the support, and the place of each token in it."""
    kept = jnp.take_along_axis(logits, jnp.maximum(support, 0), axis=-1)
    return jnp.where(support < 0, -1e30, kept), jnp.argmax(support == tokens[..., None], axis=-1)


def log_softmax_at(logits: Float[Array, "... V"], tokens: Int[Array, "..."]) -> Float[Array, "..."]:
    """Log-probability of one token per row, nats; the others' are not kept."""
    picked = jnp.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0]
    return picked - jax.nn.logsumexp(logits, axis=-1)


def entropy(logits: Float[Array, "... V"]) -> Float[Array, "..."]:
    """Entropy of the softmax, nats."""
    return jax.nn.logsumexp(logits, axis=-1) - (jax.nn.softmax(logits) * logits).sum(-1)
