"""The distribution over next tokens that is sampled and trained: drawing from it, and scoring under it, in float32.

Letters: S rows, V vocabulary.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from utils.batching import Array

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
            raise ValueError(f"--temperature must be at least 0, and --top_k 0 (all ids) to {MAX_SUPPORT}")
        if not 0 < self.top_p <= 1 or not 0 <= self.min_p < 1:
            raise ValueError("--top_p must be above 0 and up to 1, --min_p from 0 to below 1")

    @property
    def is_whole(self) -> bool:
        """Whether every token can be drawn."""
        return self.temperature > 0 and self.top_k == 0 and self.top_p == 1 and self.min_p == 0

    def draw(self, logits: Float[Array, "S V"], keys) -> tuple[Int[Array, "S"], Float[Array, "S"]]:
        """A token for each row with its key, and its log-probability under the distribution that it came from.

        Greedy tokens come with their log-probability at temperature 1.
        """
        if self.temperature == 0:
            tokens = logits.argmax(-1)
            return tokens, log_softmax_at(logits, tokens)
        logits = logits / self.temperature
        if self.is_whole:
            return categorical(logits, keys)
        top, ids = jax.lax.top_k(logits, min(self.top_k or MAX_SUPPORT, logits.shape[-1]))
        normalizer = jax.nn.logsumexp(top if self.top_k else logits, axis=-1, keepdims=True)
        probs = jnp.exp(top - normalizer)
        keep = (jnp.cumsum(probs, axis=-1) - probs < self.top_p) & (probs >= self.min_p * probs[:, :1])
        choice, logprobs = categorical(jnp.where(keep, top, -jnp.inf), keys)
        return jnp.take_along_axis(ids, choice[:, None], axis=-1)[:, 0], logprobs


def categorical(logits: Float[Array, "S V"], keys) -> tuple[Int[Array, "S"], Float[Array, "S"]]:
    """Inverse-CDF draws in two levels, a block of 128 ids and then an id in it: two uniforms a row, not V Gumbels.

    The sum over the blocks is the softmax's denominator, so the log-probability costs nothing more.
    """
    S, V = logits.shape
    top = logits.max(-1, keepdims=True)
    mass = jnp.pad(jnp.exp(logits - top), ((0, 0), (0, -V % 128))).reshape(S, -1, 128)
    uniform = jax.vmap(lambda key: jax.random.uniform(key, (2,)))(keys)

    def pick(mass, u):
        cumulative = jnp.cumsum(mass, axis=-1)
        return jnp.argmax((cumulative > u[:, None] * cumulative[:, -1:]) & (mass > 0), axis=-1)

    blocks = mass.sum(-1)
    block = pick(blocks, uniform[:, 0])
    tokens = block * 128 + pick(jnp.take_along_axis(mass, block[:, None, None], axis=1)[:, 0], uniform[:, 1])
    return tokens, jnp.take_along_axis(logits - top, tokens[:, None], axis=-1)[:, 0] - jnp.log(blocks.sum(-1))


def log_softmax_at(logits: Float[Array, "... V"], tokens: Int[Array, "..."]) -> Float[Array, "..."]:
    """Log-probability of one token per row, nats; the others' are not kept."""
    picked = jnp.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0]
    return picked - jax.nn.logsumexp(logits, axis=-1)


def entropy(logits: Float[Array, "... V"]) -> Float[Array, "..."]:
    """Entropy of the softmax, nats."""
    return jax.nn.logsumexp(logits, axis=-1) - (jax.nn.softmax(logits) * logits).sum(-1)
