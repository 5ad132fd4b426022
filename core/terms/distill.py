"""Distillation: divergences of whole next-token distributions, and what they add to the loss.

Its options: utils/settings/groups.py. The teacher, its second prompt and its average: core/extensions/teacher.py.
Letters: R rows of logits, V vocabulary, B rows of a batch, T row length; p the policy, q the teacher.
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Float

from core.records import TEACHER_COEFFICIENTS, Batch, sum_over_rows, token_mean
from models.distribution import Distribution, Ids, Logits, Support, TokenOutputs
from models.names import TEACHER, Array, Extras

TEACHER_LOGPROBS = "teacher_logprobs"  # in batch.extras, [B, T]: of the sampled tokens, for --distill sampled


@dataclass(frozen=True)
class ComparedDistribution(Distribution):
    """The distribution that is sampled, compared with a teacher's at the same temperature."""

    beta: float = 1.0  # see `divergence`

    def outputs(
        self, logits: Logits, tokens: Ids, support: Support | None = None, extras: Extras | None = None
    ) -> TokenOutputs:
        """Returns the outputs for each token; with logits of a teacher among `extras` also the divergence."""
        outputs = super().outputs(logits, tokens, support, extras)
        if TEACHER not in (extras or {}):
            return outputs
        # As matrices: see `softmax_outputs`.
        log_p, log_q = (
            jax.nn.log_softmax(x.reshape(-1, x.shape[-1]) / (self.temperature or 1.0))
            for x in (logits, extras[TEACHER])
        )
        chosen = jnp.take_along_axis(log_q, tokens.reshape(-1, 1), axis=-1)
        distances = divergence(log_p, log_q, self.beta)
        return outputs._replace(
            divergence=distances.reshape(tokens.shape), teacher_logprobs=chosen.reshape(tokens.shape)
        )


def divergence(log_p: Float[Array, "R V"], log_q: Float[Array, "R V"], beta: float) -> Float[Array, "R"]:
    """Returns the divergence of the distributions of each row, nats.

    It is KL(q || p) for beta 0 and KL(p || q) for beta 1. Between these it is (1 - beta) KL(p || m) + beta KL(q || m)
    with m = (1 - beta) p + beta q. Source: arXiv 2306.13649, eq. 1 and table 1, as in TRL's DistillationTrainer.
    """
    if beta == 0:
        return kl(log_q, log_p)
    if beta == 1:
        return kl(log_p, log_q)
    log_m = jnp.logaddexp(log_p + math.log1p(-beta), log_q + math.log(beta))
    return (1 - beta) * kl(log_p, log_m) + beta * kl(log_q, log_m)


def kl(log_p: Float[Array, "R V"], log_q: Float[Array, "R V"]) -> Float[Array, "R"]:
    """Returns KL(p || q), nats."""
    return (jnp.exp(log_p) * (log_p - log_q)).sum(-1)


def distillation(outputs: TokenOutputs, batch: Batch) -> dict[str, Array]:
    """Returns the teacher's part of a micro-batch's loss, as "distill/loss", and its metrics.

    With --distill sampled this part is 0, because the teacher's part is in the advantages. The divergence that is then
    logged is an estimate of the reverse KL.
    """
    coefficients = batch.extras[TEACHER_COEFFICIENTS][:, None]
    logprobs, distances, loss = outputs.teacher_logprobs, outputs.divergence, jnp.zeros(())
    if distances is None:
        logprobs = batch.extras[TEACHER_LOGPROBS]
        distances = jax.lax.stop_gradient(outputs.logprobs) - logprobs
    else:
        loss = sum_over_rows(coefficients * distances, batch, batch.denominator)
    is_taught = coefficients > 0
    return {
        "distill/loss": loss,
        "distill/divergence": token_mean(is_taught * distances, batch),
        "distill/teacher_logprob": token_mean(is_taught * logprobs, batch),
    }
