"""The gradient of the clipped loss by one plain expression: all rows at once, no packing, no micro-batches."""

import jax
import jax.numpy as jnp

from core.records import Batch
from models import decoder
from models.names import Params
from tests.helpers import MODEL
from tests.learning import CONFIG


@jax.jit
def plain_gradient(params: Params, batch: Batch) -> Params:
    """Returns the gradient of the clipped loss with entropy bonus, averaged over tokens (settings: CONFIG)."""

    def loss(params: Params) -> jax.Array:
        temperature = CONFIG.sampling.temperature
        if batch.extras:
            temperature = (batch.extras["of_row"][:, None] * batch.extras["of_token"])[:, 1:, None]
        logprobs = jax.nn.log_softmax(decoder.logits(MODEL, params, batch.tokens)[:, :-1] / temperature)
        entropy = -(jnp.exp(logprobs) * logprobs).sum(-1)
        chosen = jnp.take_along_axis(logprobs, batch.tokens[:, 1:, None], axis=-1)[..., 0]
        mask = batch.mask[:, 1:]
        a = batch.advantages[:, 1:]
        ratio = jnp.exp(jnp.where(mask, chosen - batch.old_logprobs[:, 1:], 0))
        surrogate = jnp.minimum(ratio * a, jnp.clip(ratio, 0.8, 1.2) * a)
        return -jnp.sum((surrogate + CONFIG.objective.policy.entropy_coef * entropy) * mask) / mask.sum()

    return jax.grad(loss)(params)
