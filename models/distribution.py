"""The distribution over next tokens that is sampled and trained: samples and log-probabilities, in float32.

Letters: *R rows (of a batch, or rows and columns), V vocabulary, S ids of a truncated distribution.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int, UInt32

from models.names import Array, Extras
from utils.devices.sharding import constrain, num_shards
from utils.settings.errors import UserError
from utils.threefry import threefry

MAX_SUPPORT = 128  # ids that truncated sampling considers at most
MANY_IDS = 1 << 14  # of a vocabulary; with fewer a lookup is faster, on a CPU by 8% of the softmax
Logits = Float[Array, "*R V"]
Uniforms = Float[Array, "*R 2"]
Ids = Int[Array, "*R"]  # ids of tokens
Nats = Float[Array, "*R"]
Support = Int[Array, "*R S"]  # ids that could be sampled, padded with -1


class TokenOutputs(NamedTuple):
    """Outputs of the model that the loss reads, for each token; in rows [B, T] column t is of tokens[:, t]."""

    logprobs: Nats  # given the tokens to the left
    entropy: Nats  # of the distribution that the token was sampled from
    values: Float[Array, "*R"] | None = None  # critic's value of the state it was chosen in, if there is a critic
    divergence: Nats | None = None  # from the teacher's distribution, if there is a teacher
    teacher_logprobs: Nats | None = None  # the teacher's, of the same token


@dataclass(frozen=True)
class Distribution:
    """Softmax of logits / temperature (0: greedy), limited to top-k, then top-p, then min-p ids as in transformers."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self):
        is_temperature = self.temperature == 0 or 1e-30 <= self.temperature <= 1e30  # logits / it are finite
        if not (is_temperature and 0 <= self.top_k <= MAX_SUPPORT):
            raise UserError(
                f"--temperature must be 0, or 1e-30 to 1e30, and --top_k 0 (all ids) to {MAX_SUPPORT}: correct the one "
                "that is not"
            )
        if not (0 < self.top_p <= 1 and 0 <= self.min_p < 1):
            raise UserError(
                "--top_p must be above 0 and up to 1, and --min_p from 0 to below 1: correct the one that is not"
            )

    @property
    def is_whole(self) -> bool:
        """True if every token can be sampled."""
        is_cut = self.top_k > 0 or self.top_p < 1 or self.min_p > 0
        return self.temperature > 0 and not is_cut

    def describe(self) -> str:
        """Returns which tokens can be sampled, for the log; empty for the whole distribution."""
        if self.is_whole:
            return ""
        limit = f"the {self.top_k or MAX_SUPPORT} likeliest tokens"
        if not self.top_k:
            limit += " at most"
        return f"sampled and trained: {limit}, with top_p {self.top_p:g} and min_p {self.min_p:g} of them"

    def support_size(self, vocab_size: int) -> int:
        """Returns the largest number of ids that can be sampled; 0: all of them, or only the likeliest."""
        if self.is_whole or self.temperature == 0:
            return 0
        return min(self.top_k or MAX_SUPPORT, vocab_size)

    def draw(self, logits: Logits, uniforms: Uniforms) -> tuple[Ids, Nats, Support]:
        """Samples a token for each row; returns it, its log-probability under this distribution, and the support.

        The support is the ids that could be sampled, `support_size` columns padded with -1. Greedy tokens have their
        log-probability at temperature 1.
        """
        everything = jnp.zeros((len(logits), 0), jnp.int32)
        if self.temperature == 0:
            tokens = logits.argmax(-1)
            return tokens, logits.max(-1) - jax.nn.logsumexp(logits, axis=-1), everything
        logits = logits / self.temperature
        if self.support_size(logits.shape[-1]):
            return self.draw_truncated(logits, uniforms)
        tokens, logprobs = inverse_cdf_sample(logits, uniforms)
        return tokens, logprobs, everything

    def draw_truncated(self, logits: Logits, uniforms: Uniforms) -> tuple[Ids, Nats, Support]:
        """Samples from top-k, top-p and min-p ids; the logits are divided by the temperature already."""
        kept_logits, ids = self.candidates(logits)
        choice, logprobs = inverse_cdf_sample(kept_logits, uniforms)
        tokens = jnp.take_along_axis(ids, choice[:, None], axis=-1)[:, 0]
        return tokens, logprobs, jnp.where(jnp.isfinite(kept_logits), ids, -1)

    def candidates(self, logits: Logits) -> tuple[Float[Array, "*R S"], Support]:
        """Returns the logits of the likeliest ids, -inf for those that cannot be sampled, and the ids."""
        top, ids = jax.lax.top_k(logits, min(self.top_k or MAX_SUPPORT, logits.shape[-1]))
        normalizer = jax.nn.logsumexp(top if self.top_k else logits, axis=-1, keepdims=True)
        probs = jnp.exp(top - normalizer)
        mass_before = jnp.cumsum(probs, axis=-1) - probs
        keep = (mass_before < self.top_p) & (probs >= self.min_p * probs[..., :1])
        return jnp.where(keep, top, -jnp.inf), ids

    def outputs(
        self, logits: Logits, tokens: Ids, support: Support | None = None, extras: Extras | None = None
    ) -> TokenOutputs:
        """Returns the outputs for each token under this distribution.

        `support` holds the ids that `draw` returned; None: all. A greedy distribution has temperature 1 here.
        `extras` [*R] of the batch are for forks, and 1 in padding; extras[TEACHER] [*R V] are a teacher's logits.
        """
        logits = logits / (self.temperature or 1.0)
        if support is not None:
            logits = jnp.take_along_axis(logits, jnp.maximum(support, 0), axis=-1)
            logits = jnp.where(support < 0, -1e30, logits)
            tokens = jnp.argmax(support == tokens[..., None], axis=-1)
        return softmax_outputs(logits, tokens)


def sampling_uniforms(keys: UInt32[Array, "R 2"], steps: Int[Array, "A R"]) -> Float[Array, "A R 2"]:
    """Returns the uniform random numbers in [0, 1) of each row's key at these steps, float32.

    They are jax.random.uniform's under fold_in(key, step).
    """
    high, low = threefry((keys[:, 0], keys[:, 1]), steps)
    high, low = threefry((high[..., None], low[..., None]), jnp.arange(2))
    mantissa = (high ^ low) >> 9
    return jax.lax.bitcast_convert_type(mantissa | 0x3F800000, jnp.float32) - 1  # 1 + mantissa / 2^23, less 1


def inverse_cdf_sample(logits: Logits, uniforms: Uniforms) -> tuple[Ids, Nats]:
    """Samples by the inverse CDF in two levels, one of 128 blocks and then an id in it; returns ids and logprobs.

    That takes two uniforms a row, not V Gumbels, and the sum over the blocks is the softmax's denominator. Devices that
    share the vocabulary hold whole blocks each: blocks of 128 ids would have to be gathered for every token.
    """
    R, V = logits.shape
    padding = (0, 0), (0, -V % 128)
    blocks = jnp.pad(logits, padding, constant_values=-jnp.inf)
    blocks = blocks.reshape(R, 128, -1)
    top = logits.max(-1, keepdims=True)
    block_mass = jnp.exp(blocks - top[:, None]).sum(-1)
    # A value of its own: XLA would add up all of the exponentials a second time for the sum of these sums.
    block_mass = jax.lax.optimization_barrier(replicate(block_mass))
    block = invert_cdf(block_mass, uniforms[:, 0])
    logits_in_block = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    logits_in_block = constrain(logits_in_block, "rows") - top
    in_block = invert_cdf(jnp.exp(logits_in_block), uniforms[:, 1])
    tokens = block * blocks.shape[2] + in_block
    token_logits = jnp.take_along_axis(logits_in_block, in_block[:, None], axis=-1)[:, 0]
    normalizer = jnp.log(block_mass.sum(-1))
    return tokens, token_logits - normalizer


def invert_cdf(mass: Float[Array, "R N"], uniforms: Float[Array, "R"]) -> Int[Array, "R"]:
    """Returns the first index with mass and a cumulative share above the row's uniform."""
    cumulative = jnp.cumsum(mass, axis=-1)
    threshold = uniforms[:, None] * cumulative[:, -1:]
    return jnp.argmax((cumulative > threshold) & (mass > 0), axis=-1)


def replicate(x: Float[Array, "R N"]) -> Float[Array, "R N"]:
    """Returns the array whole on each of the devices that share the vocabulary, as a sum of their parts.

    XLA would partition what is computed from it again, with a collective for every small result.
    """
    mesh = jax.typeof(x).sharding.mesh
    if mesh.empty or num_shards(mesh, "vocab") == 1:
        return x
    whole = (x[:, :, None] * jnp.eye(x.shape[1])).sum(1)
    return constrain(whole, "rows")


def softmax_outputs(logits: Logits, tokens: Ids) -> TokenOutputs:
    """Returns the log-probability of one token per row, and the entropy of the softmax, nats.

    One pass computes two sums: with m the largest logit and e = exp(l - m), s is the sum of e, and u that of e (l - m).
    Then log p = l - m - log s, and H = log s - u / s.
    """
    # As a matrix: XLA:CPU adds up rows after a first axis of size 1 at a fifth of the speed.
    rows = logits.reshape(-1, logits.shape[-1])
    top = jax.lax.stop_gradient(rows.max(-1, keepdims=True))
    shifted = rows - top
    ids = tokens.reshape(-1, 1)
    if rows.shape[-1] < MANY_IDS:
        chosen = jnp.take_along_axis(shifted, ids, axis=-1)[:, 0]
    else:  # the gradient of a lookup is another pass
        chosen = jnp.where(jnp.arange(rows.shape[-1]) == ids, shifted, 0).sum(-1)
    mass = jnp.exp(shifted)
    total = mass.sum(-1)
    mean = (mass * shifted).sum(-1) / total
    normalizer = jnp.log(total)
    logprobs, entropies = chosen - normalizer, normalizer - mean
    return TokenOutputs(logprobs.reshape(tokens.shape), entropies.reshape(tokens.shape))
