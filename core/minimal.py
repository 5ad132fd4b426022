"""GRPO on one page: a naive sampler, one device, no options but the constants below. To print and to teach from.

    python core/minimal.py    # models/tiny learns eight problems of Countdown on two CPU cores in a few minutes

The same problems come at every step, so a few short samples suffice; `make demo` is tested on new ones.
core/grpo.py is the same algorithm with a KV cache, minibatches, several devices, evaluation, and runs that resume.

Letters: N prompts, G completions of each (a group), B = N G rows, T columns, V vocabulary.
"""

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    import utils.settings.packages  # noqa: F401 (says what to install)

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int

from core.advantages import ObjectiveConfig, compute_advantages
from core.objectives import policy_loss, set_loss_denominators
from core.records import Batch
from envs import make_env
from models.architecture import Decoder
from models.checkpoint import load_model
from models.decoder import Params, forward, head, logits
from models.distribution import TokenScores
from utils.settings.errors import user_errors

SEED = 0
NUM_STEPS = 25
NUM_PROMPTS = 8
GROUP_SIZE = 8
MAX_PROMPT_TOKENS = 24
MAX_NEW_TOKENS = 48
OPTIMIZER = optax.adam(1e-3)
OBJECTIVE = ObjectiveConfig(
    advantage="group_zscore",  # (reward - mean) / std of the group
    objective="ppo",
    clip_epsilon=0.2,
    entropy_coef=0.0,
)
TASKS = {
    "numbers": 3,
    "min_number": 1,
    "max_number": 15,
    "expression": "tree",
    "max_value": 30,
    "max_target": 30,
    "prompt": "bare",
}

Tokens = Int[Array, "B T"]
Lengths = Int[Array, "B"]
Metrics = dict[str, Float[Array, ""]]


def pad_prompts(prompts: list[list[int]]) -> tuple[Tokens, Lengths]:
    """Returns prompts [B, T], padded on the right to a fixed width, and their lengths [B]."""
    lengths = np.array([len(prompt) for prompt in prompts])
    assert lengths.max() <= MAX_PROMPT_TOKENS, "a prompt is too long: raise MAX_PROMPT_TOKENS"
    tokens = np.zeros((len(prompts), MAX_PROMPT_TOKENS + MAX_NEW_TOKENS), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    return tokens, lengths


@partial(jax.jit, static_argnames="model")
def next_logits(model: Decoder, params: Params, tokens: Tokens, lengths: Lengths) -> Float[Array, "B V"]:
    """Returns the logits [B, V] of the token behind each row, by a full forward pass: there is no KV cache."""
    hidden = forward(model, params, tokens)
    rows = jnp.arange(len(tokens))
    return head(model, params, hidden[rows, lengths - 1])


def sample(
    model: Decoder,
    params: Params,
    prompts: Tokens,
    prompt_lengths: Lengths,
    stop_ids: tuple[int, ...],
    key: Array,
) -> tuple[Tokens, Lengths]:
    """Returns prompts with completions [B, T], drawn at temperature 1, and their lengths [B], stop token included."""
    tokens = prompts.copy()
    lengths = prompt_lengths.copy()
    is_live = np.ones(len(tokens), bool)
    for step_key in jax.random.split(key, MAX_NEW_TOKENS):
        step_logits = next_logits(model, params, tokens, lengths)
        drawn = np.asarray(jax.random.categorical(step_key, step_logits))
        live_rows = np.flatnonzero(is_live)
        tokens[live_rows, lengths[live_rows]] = drawn[live_rows]
        lengths[live_rows] += 1
        is_live &= ~np.isin(drawn, stop_ids)
        if not is_live.any():
            break
    return tokens, lengths


def completion_mask(tokens: Tokens, prompt_lengths: Lengths, lengths: Lengths) -> Bool[Array, "B T"]:
    """True for the tokens that the policy chose [B, T]."""
    columns = np.arange(tokens.shape[1])
    is_after_prompt = columns >= prompt_lengths[:, None]
    return is_after_prompt & (columns < lengths[:, None])


def make_batch(
    tokens: Tokens,
    prompt_lengths: Lengths,
    lengths: Lengths,
    rewards: Float[Array, "B"],
) -> Batch:
    """Returns what the loss reads: tokens, mask and advantages, all [B, T]; groups of equal rewards are masked."""
    mask = completion_mask(tokens, prompt_lengths, lengths)
    sample_logprobs = np.zeros(mask.shape, np.float32)  # the sampler's; this loss does not read them
    batch = Batch(
        tokens,
        mask,
        sample_logprobs,
        rewards,
        lengths,
        prompt_lengths,
        row=np.arange(len(tokens)),
        group_size=GROUP_SIZE,
    )
    kept = compute_advantages(batch, OBJECTIVE)
    # Masks the rows that are dropped: with all rows in each batch, only one program is compiled.
    batch = replace(batch, mask=np.zeros_like(mask), advantages=np.zeros(mask.shape, np.float32))
    batch.mask[kept.row] = kept.mask
    batch.advantages[kept.row] = kept.advantages
    return set_loss_denominators(batch, len(tokens), MAX_NEW_TOKENS, OBJECTIVE)


def token_scores(model: Decoder, params: Params, tokens: Tokens) -> TokenScores:
    """Returns the log-probability of each token given those left of it, and the entropy there, both [B, T]."""
    all_logprobs = jax.nn.log_softmax(logits(model, params, tokens))
    all_logprobs = all_logprobs[:, :-1]  # logits of column t are of the token in column t + 1
    logprobs = jnp.take_along_axis(all_logprobs, tokens[:, 1:, None], axis=2)
    entropy = -jnp.sum(jnp.exp(all_logprobs) * all_logprobs, axis=2)
    first_column = ((0, 0), (1, 0))
    return TokenScores(jnp.pad(logprobs[:, :, 0], first_column), jnp.pad(entropy, first_column))


@partial(jax.jit, static_argnames="model")
def policy_gradient(model: Decoder, params: Params, batch: Batch) -> tuple[Params, Metrics]:
    """Returns the gradient of the clipped loss, and the metrics of the loss."""

    def loss(params: Params) -> tuple[Float[Array, ""], Metrics]:
        scores = token_scores(model, params, batch.tokens)
        # Old log-probabilities are left out: at the first update after sampling they equal the new ones, ratio = 1.
        return policy_loss(scores, batch, OBJECTIVE.loss)

    return jax.grad(loss, has_aux=True)(params)


@jax.jit
def apply_gradient(
    params: Params,
    opt_state: optax.OptState,
    grads: Params,
) -> tuple[Params, optax.OptState]:
    """Returns parameters and optimizer state after one step of Adam."""
    updates, opt_state = OPTIMIZER.update(grads, opt_state)
    return optax.apply_updates(params, updates), opt_state


def main():
    model, params, tokenizer = load_model("models/tiny", remat="none", unroll=True)
    env = make_env("countdown", **TASKS)
    problems = [env.problem(row // GROUP_SIZE) for row in range(NUM_PROMPTS * GROUP_SIZE)]
    chats = [tokenizer.chat(p.messages, p.thinking, p.prefix, p.plain) for p in problems]
    prompts, prompt_lengths = pad_prompts(chats)
    opt_state = OPTIMIZER.init(params)
    key = jax.random.key(SEED)

    for step in range(NUM_STEPS):
        # Sample a group of completions for each prompt.
        step_key = jax.random.fold_in(key, step)
        tokens, lengths = sample(model, params, prompts, prompt_lengths, tokenizer.stop_ids, step_key)

        # Score them.
        rewards = np.zeros(len(problems), np.float32)
        for row, problem in enumerate(problems):
            completion = tokens[row, prompt_lengths[row] : lengths[row]]
            scores = env.score(problem, problem.prefix + tokenizer.decode(completion))
            rewards[row] = scores["return"]

        # Advantages within each group, then one gradient step.
        batch = make_batch(tokens, prompt_lengths, lengths, rewards)
        grads, metrics = policy_gradient(model, params, batch)
        params, opt_state = apply_gradient(params, opt_state, grads)

        num_tokens = np.mean(lengths - prompt_lengths)
        entropy = metrics["entropy"].item()
        print(f"step {step + 1:2}  reward {rewards.mean():.3f}  tokens {num_tokens:.1f}  entropy {entropy:.3f}")


if __name__ == "__main__":
    if {"-h", "--help"} & set(sys.argv):
        print(__doc__)
    elif sys.argv[1:]:
        sys.exit("error: core/minimal.py has no options: change its constants, or run core/grpo.py")
    else:
        user_errors()(main)()
