"""GRPO on one page: sampler, advantages, loss and update on one device. Only the model and the problems are imported.

    python core/minimal.py    # models/tiny learns eight problems of Countdown on two CPU cores in a few minutes

The same problems come at every step, so a few short samples suffice; `make demo` is tested on new ones.
core/grpo.py is the same algorithm with a KV cache, minibatches, several devices, evaluation, and runs that resume.

Letters: N prompts, G completions of each (a group), B = N x G rows, T columns, V vocabulary.
"""

import sys
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

from envs import make_env
from models.architecture import Decoder
from models.checkpoint import load_model
from models.decoder import Params, forward, head, logits
from utils.settings.errors import user_errors

SEED = 0
NUM_STEPS = 25
NUM_PROMPTS = 8
GROUP_SIZE = 8
MAX_PROMPT_TOKENS = 24
MAX_NEW_TOKENS = 48
CLIP_EPSILON = 0.2
OPTIMIZER = optax.adam(1e-3)
NUMBERS = {"numbers": 3, "min_number": 1, "max_number": 15}
TASKS = NUMBERS | {"expression": "tree", "max_value": 30, "max_target": 30, "prompt": "bare"}

Tokens = Int[Array, "B T"]
Lengths = Int[Array, "B"]


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
    return head(model, params, hidden[jnp.arange(len(tokens)), lengths - 1])


def sample(
    model: Decoder, params: Params, prompts: Tokens, prompt_lengths: Lengths, stop_ids: tuple[int, ...], key: Array
) -> tuple[Tokens, Lengths]:
    """Returns prompts with completions [B, T], sampled at temperature 1, and their lengths [B], stop token included."""
    tokens = prompts.copy()
    lengths = prompt_lengths.copy()
    is_live = np.ones(len(tokens), bool)
    for step_key in jax.random.split(key, MAX_NEW_TOKENS):
        step_logits = next_logits(model, params, tokens, lengths)
        sampled = np.asarray(jax.random.categorical(step_key, step_logits))
        live_rows = np.flatnonzero(is_live)
        tokens[live_rows, lengths[live_rows]] = sampled[live_rows]
        lengths[live_rows] += 1
        is_live &= ~np.isin(sampled, stop_ids)
        if not is_live.any():
            break
    return tokens, lengths


def completion_mask(tokens: Tokens, prompt_lengths: Lengths, lengths: Lengths) -> Bool[Array, "B T"]:
    """True for the tokens that the policy chose [B, T]."""
    columns = np.arange(tokens.shape[1])
    return (columns >= prompt_lengths[:, None]) & (columns < lengths[:, None])


def group_advantages(rewards: Float[np.ndarray, "B"]) -> tuple[Float[np.ndarray, "B"], Bool[np.ndarray, "B"]]:
    """Returns (reward - mean) / std within each group, and whether the rewards of the row's group differ."""
    groups = rewards.reshape(-1, GROUP_SIZE)
    centered = groups - groups.mean(axis=1, keepdims=True)
    has_signal = np.ptp(groups, axis=1) > 0
    deviation = np.sqrt((centered**2).mean(axis=1))
    advantages = centered / np.where(has_signal, deviation, 1)[:, None]
    return advantages.ravel(), np.repeat(has_signal, GROUP_SIZE)


def token_logprobs(model: Decoder, params: Params, tokens: Tokens) -> tuple[Float[Array, "B T-1"], ...]:
    """Returns log-probabilities of the tokens from column 1 on, given those left of them, and the entropies there."""
    all_logprobs = jax.nn.log_softmax(logits(model, params, tokens))
    all_logprobs = all_logprobs[:, :-1]  # logits of column t are of the token in column t + 1
    logprobs = jnp.take_along_axis(all_logprobs, tokens[:, 1:, None], axis=2)
    entropy = -jnp.sum(jnp.exp(all_logprobs) * all_logprobs, axis=2)
    return logprobs[:, :, 0], entropy


@partial(jax.jit, static_argnames="model")
def policy_gradient(
    model: Decoder, params: Params, tokens: Tokens, mask: Bool[Array, "B T"], advantages: Float[Array, "B"]
) -> tuple[Params, Float[Array, ""]]:
    """Returns the gradient of PPO's clipped loss, a mean over the tokens of `mask`, and their mean entropy."""

    def loss(params: Params) -> tuple[Float[Array, ""], Float[Array, ""]]:
        logprobs, entropy = token_logprobs(model, params, tokens)
        old_logprobs = jax.lax.stop_gradient(logprobs)  # one update a step: the ratio is 1, and nothing is clipped
        ratio = jnp.exp(logprobs - old_logprobs)
        A = advantages[:, None]
        losses = jnp.maximum(-ratio * A, -jnp.clip(ratio, 1 - CLIP_EPSILON, 1 + CLIP_EPSILON) * A)
        is_target = mask[:, 1:]
        return losses.mean(where=is_target), entropy.mean(where=is_target)

    return jax.grad(loss, has_aux=True)(params)


@jax.jit
def apply_gradient(params: Params, opt_state: optax.OptState, grads: Params) -> tuple[Params, optax.OptState]:
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

        # A reward for each completion: 1 for a solution. The prompt ends with the prefix of the reply.
        rewards = np.zeros(len(problems), np.float32)
        for row, problem in enumerate(problems):
            completion = tokens[row, prompt_lengths[row] : lengths[row]]
            rewards[row] = env.score(problem, problem.prefix + tokenizer.decode(completion))["return"]

        # Advantages within each group, then one gradient step. Groups of equal rewards teach nothing.
        advantages, has_signal = group_advantages(rewards)
        summary = f"step {step + 1:2}  reward {rewards.mean():.3f}  tokens {np.mean(lengths - prompt_lengths):.1f}"
        if not has_signal.any():
            print(f"{summary}  no update: the rewards of each group are equal")
            continue
        mask = completion_mask(tokens, prompt_lengths, lengths) & has_signal[:, None]
        grads, entropy = policy_gradient(model, params, tokens, mask, advantages)
        params, opt_state = apply_gradient(params, opt_state, grads)
        print(f"{summary}  entropy {entropy:.3f}")


if __name__ == "__main__":
    if {"-h", "--help"} & set(sys.argv):
        print(__doc__)
    elif sys.argv[1:]:
        sys.exit("error: core/minimal.py has no options: change its constants, or run core/grpo.py")
    else:
        user_errors()(main)()
