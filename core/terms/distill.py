"""Distillation: options, divergences of whole next-token distributions, and what they add to the loss.

The teacher itself, its second prompt and its average: core/extensions/teacher.py.
Letters: R rows of logits, V vocabulary, B rows of a batch, T row length; p the policy, q the teacher.
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Float

from core.records import Batch, sum_over_rows, token_mean
from models.distribution import Distribution, Ids, Logits, Support, TokenOutputs
from models.names import TEACHER, Array, Extras
from utils.settings.errors import refuse
from utils.settings.options import option

SELF, SIBLING = "self", "sibling"
SAMPLED = "sampled"
BETAS = {"forward": 0.0, "reverse": 1.0, "jsd": 0.5}  # by --distill: see `divergence`
TEACHER_COEFFICIENTS = "teacher_coefficients"  # in batch.extras, [B]: of the teacher's term in each row
TEACHER_LOGPROBS = "teacher_logprobs"  # in batch.extras, [B, T]: of the sampled tokens, for --distill sampled


@dataclass(frozen=True)
class DistillConfig:
    """Distillation."""

    teacher: str = option(
        "",
        "Teacher model q; the policy p learns q's next-token distributions on p's own completions. A Hugging Face "
        "folder, hub id, run folder (its last step) or adapter folder; self: the policy with --teacher_prefix, or "
        "averaged (--teacher_decay); empty: none",
    )
    distill: str = option(
        "reverse",
        "Loss of --teacher, over the whole vocabulary; reverse: KL(p || q); forward: KL(q || p); jsd: the mean of "
        "KL(p || m) and KL(q || m), m = (p + q) / 2. sampled: no loss of its own, but log q - log p of the sampled "
        "tokens is added to their advantages",
        [*BETAS, SAMPLED],
    )
    distill_coef: float = option(
        1.0, "Coefficient of the divergence in the loss; with --distill sampled, of the addition to advantages"
    )
    teacher_prefix: str = option(
        "",
        "System message before the prompt that only the teacher reads: a text, or @FILE with the text; sibling: "
        "another completion of the group whose reward is 1 or more; empty: none",
    )
    teacher_decay: float = option(
        0.0,
        "Decay per step of the average of policies that --teacher self uses; 0: no average, the policy of each step",
    )


def check_distillation(config: DistillConfig, advantage: str, group_size: int) -> None:
    """Raises UserError for options of distillation that contradict each other or the advantage."""
    options = [name for name, value in vars(config).items() if value != getattr(type(config), name)]
    is_self = config.teacher == "self"
    refuse([
        (not config.teacher and advantage == "none",
         "--advantage none learns nothing without --teacher: give --teacher, or another advantage"),
        (not config.teacher and options != [],
         f"--{' --'.join(options)} has no effect without --teacher: give --teacher, or leave it out"),
        (config.distill_coef <= 0, f"--distill_coef {config.distill_coef} must be above 0: raise it"),
        (not 0 <= config.teacher_decay < 1,
         f"--teacher_decay {config.teacher_decay} must be from 0 to below 1: correct it"),
        (config.teacher_decay > 0 and not is_self,
         "--teacher_decay averages the policies of --teacher self: give --teacher self, or leave it out"),
        (is_self and not config.teacher_prefix and not config.teacher_decay,
         "--teacher self is the policy itself and teaches nothing new: give it another prompt by --teacher_prefix, or "
         "--teacher_decay"),
        (config.teacher_prefix == "sibling" and group_size < 2,
         "--teacher_prefix sibling shows another completion of the group: raise --group_size above 1"),
        (config.teacher != "" and advantage == "best_k",
         "--advantage best_k drops the other completions, which --teacher is to teach: choose another advantage"),
    ])  # fmt: skip


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
