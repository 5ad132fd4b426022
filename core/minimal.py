"""GRPO for Qwen3, Qwen2.5 and Llama in JAX, alone in one file: loop, loss, sampler, model, two tasks.

    python minimal.py    # models/tiny learns Countdown on two CPU cores in a few minutes
    python minimal.py --model_dir ~/Qwen2.5-0.5B-Instruct --env_name gsm8k --data_dir ~/gsm8k --lr 1e-6 \\
        --param_dtype bfloat16 --prompt_length 384 --num_generation_tokens 512 --num_eval_samples 1

It needs jax, numpy, optax, safetensors and transformers. All devices share rows, parameters and optimizer
state (FSDP). To change the loss: `policy_loss`; the advantage: `group_advantages`; the task: TASKS. LoRA,
several turns, several hosts, resuming and more are in core/grpo.py, whose options have these names.

Letters: N prompts, G completions of each (a group), B = N G rows, P columns of prompts, padded on the left,
A columns of completions, T = P + A, S columns attended to, L layers, D width, V vocabulary, H query heads,
K key heads, C channels of a head.
"""

import argparse
import ast
import ctypes
import json
import operator
import random
import re
import shutil
import sys
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, fields
from fractions import Fraction
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from safetensors.numpy import load_file, save_file
from transformers import AutoTokenizer

Params = dict  # arrays by their names in the files; "layers" has those of all layers, stacked [L, ...]
Problem = tuple[str, object]  # the user's message, and what replies are compared with


@dataclass(frozen=True)
class Settings:
    """Options: `--name value` replaces a default."""
    model_dir: str = "models/tiny"  # Hugging Face folder of the model to train
    save_dir: str = ""  # folder for the trained model, which transformers loads; empty: it is not saved
    env_name: str = "countdown"  # task: countdown, gsm8k
    data_dir: str = ""  # folder of train.jsonl and test.jsonl, for gsm8k
    seed: int = 0
    max_steps: int = 24  # each samples N x G completions and trains on them
    groups_per_batch: int = 16  # N
    group_size: int = 16  # G
    ppo_minibatch: int = 64  # completions of an optimizer step
    rows_per_microbatch: int = 8  # rows of a forward and backward pass on each device: as many as fit
    prompt_length: int = 32  # P, most tokens of a prompt
    num_generation_tokens: int = 192  # A, most tokens of a completion
    temperature: float = 1.0
    clip_epsilon: float = 0.2  # the ratio of new to old probability is clipped this far from 1
    lr: float = 6e-4  # peak learning rate; it falls linearly to 0 over the run
    param_dtype: str = "float32"  # of parameters and matrix products; bfloat16 takes half the memory
    test_interval: int = 6  # steps between two evaluations
    num_eval_tasks: int = 512  # held-out problems
    num_eval_samples: int = 2  # completions of each


# --- The algorithm
def train(settings: Settings, model: "Model", params: Params, tokenizer: AutoTokenizer) -> Params:
    """The loop: rollouts, advantages, old log-probabilities, updates. Returns the trained parameters."""
    make_problems, _ = TASKS[settings.env_name]
    N, G, norm = settings.groups_per_batch, settings.group_size, 0.0
    optimizer = make_optimizer(settings.lr)
    opt_state = jax.jit(lambda params: shard(model.mesh, optimizer.init(params)))(params)
    for step in range(settings.max_steps + 1):
        if step % settings.test_interval == 0 or step == settings.max_steps:
            evaluate(settings, model, params, tokenizer, step)
        if step == settings.max_steps:
            return params

        # Rollouts: a group of completions for each prompt, and a reward for each completion.
        clock, key = time.perf_counter(), jax.random.fold_in(jax.random.key(settings.seed), step)
        problems = make_problems(settings, "train", range(step * N, (step + 1) * N))
        rollout = roll_out(settings, model, params, tokenizer, problems, G, key)
        tokens, starts, lengths, sample_logprobs, rewards = rollout
        seconds = time.perf_counter() - clock

        # Advantages: the reward beside those of its group. A group of equal rewards teaches nothing.
        advantages, has_signal = group_advantages(rewards.reshape(N, G))
        mask = (np.arange(settings.num_generation_tokens) < lengths[:, None]) & has_signal.repeat(G)[:, None]
        batch = Batch(tokens, starts, mask, advantages.ravel(), np.zeros_like(sample_logprobs))

        # Old log-probabilities, by the program that is trained: those of the sampler differ by rounding.
        order = np.random.default_rng((settings.seed, step)).permutation(N * G)
        for rows, part in microbatches(settings, model, batch, order):
            logprobs = token_logprobs(model, params, part, settings.temperature)
            batch.old_logprobs[rows, : logprobs.shape[1]] = logprobs

        # Updates: an optimizer step per minibatch, whose gradient is summed over micro-batches.
        for minibatch in order.reshape(-1, settings.ppo_minibatch):
            num_tokens, parts = int(batch.mask[minibatch].sum()), []
            grads = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32, device=x.sharding), params)
            for _, part in microbatches(settings, model, batch, minibatch):
                grads, metrics = add_gradients(model, settings, params, grads, part, num_tokens)
                parts.append(metrics)
            if not parts:
                continue
            rate = 1 - step / settings.max_steps
            params, opt_state, norm = apply_gradients(optimizer, model.mesh, params, opt_state, grads, rate)

        entropy = -sample_logprobs.sum() / lengths.sum()
        kl, clipped = (sum(x[name] for x in parts) for name in ("approx_kl", "clip_fraction"))  # of the last
        print(
            f"step {step + 1:3}  reward {rewards.mean():.3f}  solved {np.mean(rewards == 1):.3f}  "
            f"signal {has_signal.mean():.2f}  length {lengths.mean():.1f}  entropy {entropy:.3f}  "
            f"approx_kl {kl:.1e}  clipped {clipped:.4f}  norm {norm:.2f}  "
            f"{lengths.sum() / seconds:,.0f} tokens/s  {time.perf_counter() - clock:.1f} s"
        )


def evaluate(settings: Settings, model: "Model", params: Params, tokenizer: AutoTokenizer, step: int) -> None:
    """Prints the share of replies that solve held-out problems, and its standard error over problems."""
    clock, num_samples = time.perf_counter(), settings.num_eval_samples
    problems = TASKS[settings.env_name][0](settings, "test", range(settings.num_eval_tasks))
    at_once = settings.groups_per_batch * settings.group_size // num_samples  # as many rows as in training
    rewards = []
    for start in range(0, len(problems), at_once):
        part = [problems[i % len(problems)] for i in range(start, start + at_once)]  # the last is filled up
        key = jax.random.fold_in(jax.random.key(settings.seed), start)
        rewards.extend(roll_out(settings, model, params, tokenizer, part, num_samples, key)[-1])
    shares = np.mean(np.reshape(rewards, (-1, num_samples))[: len(problems)] == 1, axis=1)
    error = shares.std(ddof=1) / len(shares) ** 0.5
    print(f"step {step:3}  held-out {shares.mean():.3f} ± {error:.3f}  {time.perf_counter() - clock:.1f} s")


def roll_out(
    settings: Settings, model: "Model", params: Params, tokenizer: AutoTokenizer,
    problems: list[Problem], num_samples: int, key: Array,
) -> tuple[np.ndarray, ...]:  # fmt: skip
    """Samples and scores replies: returns tokens [B, T], the columns of the first ones [B], lengths of
    completions [B], log-probabilities as they were sampled [B, A], and rewards [B]."""
    _, score = TASKS[settings.env_name]
    chats = [[{"role": "user", "content": text}] for text, _ in problems]
    texts = tokenizer.apply_chat_template(chats, tokenize=False, add_generation_prompt=True)
    ids, most = tokenizer(texts, add_special_tokens=False)["input_ids"], settings.prompt_length
    refuse(max(map(len, ids)) > most, f"a prompt has more tokens than --prompt_length {most}: raise it")
    starts = np.int32([most - len(row) for row in ids]).repeat(num_samples)
    prompts = np.int32([[0] * (most - len(row)) + row for row in ids]).repeat(num_samples, axis=0)
    limits = settings.num_generation_tokens, settings.temperature
    rows = jax.device_put((prompts, starts), NamedSharding(model.mesh, PartitionSpec("devices")))
    completions, logprobs, lengths = map(np.asarray, sample(model, params, *rows, key, *limits))
    replies = [row[:length] for row, length in zip(completions, lengths, strict=True)]
    replies = tokenizer.batch_decode(replies, skip_special_tokens=True)
    rewards = [score(problems[row // num_samples][1], reply) for row, reply in enumerate(replies)]
    return np.concatenate([prompts, completions], axis=1), starts, lengths, logprobs, np.float32(rewards)


# --- Advantages, loss and gradient: a fork begins here
def group_advantages(rewards: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns (reward - mean) / deviation [N, G], and if a group's rewards differ [N]: arXiv 2402.03300."""
    centered = rewards - rewards.mean(axis=1, keepdims=True)
    deviation = np.sqrt(np.mean(centered**2, axis=1, keepdims=True))
    has_signal = np.ptp(rewards, axis=1) > 1e-6
    return centered / np.where(has_signal[:, None], deviation, 1), has_signal


class Batch(NamedTuple):
    """Rows to train on; a [B, A] array speaks of the token in its own column of the completion."""
    tokens: Array  # [B, T]
    starts: Array  # [B]
    mask: Array  # [B, A], True for tokens that are trained on
    advantages: Array  # [B]
    old_logprobs: Array  # [B, A]


def microbatches(settings: Settings, model: "Model", batch: Batch, rows: np.ndarray) -> Iterator[tuple]:
    """Yields numbers of rows, some of similar length at a time, and the Batch of them, on the devices."""
    lengths, num_columns = batch.mask.sum(axis=1), batch.mask.shape[1]
    rows = rows[np.argsort(lengths[rows], kind="stable")]
    unit = max(32, num_columns // 8)  # few widths, since each of them is compiled
    for part in rows.reshape(-1, settings.rows_per_microbatch * model.mesh.size):
        width = min(-(-int(lengths[part].max()) // unit) * unit, num_columns)
        if width:  # otherwise there is no token to train on
            tokens, columns = batch.tokens[part, : settings.prompt_length + width], (part, slice(width))
            others = batch.mask[columns], batch.advantages[part], batch.old_logprobs[columns]
            by_rows = NamedSharding(model.mesh, PartitionSpec("devices"))
            yield part, jax.device_put(Batch(tokens, batch.starts[part], *others), by_rows)


def policy_loss(logprobs: Array, batch: Batch, clip_epsilon: float) -> dict[str, Array]:
    """Returns PPO's clipped loss of each token and metrics, all [B, A]. Source: arXiv 1707.06347, eq. 7."""
    log_ratio, advantages = logprobs - batch.old_logprobs, batch.advantages[:, None]
    ratio = jnp.exp(log_ratio)
    unclipped = -ratio * advantages
    losses = jnp.maximum(unclipped, -jnp.clip(ratio, 1 - clip_epsilon, 1 + clip_epsilon) * advantages)
    return {"loss": losses, "approx_kl": ratio - 1 - log_ratio, "clip_fraction": losses != unclipped}


@partial(jax.jit, static_argnames=("model", "temperature"))
def token_logprobs(model: "Model", params: Params, batch: Batch, temperature: float) -> Array:
    """Returns log-probabilities of completions [B, A]; the state before a token predicts it."""
    num_rows, num_columns = batch.mask.shape
    hidden = forward(model, params, batch.tokens, batch.starts)[0][:, -num_columns - 1 : -1]
    targets = batch.tokens[:, -num_columns:]

    @jax.checkpoint  # the backward pass computes logits again
    def of_columns(columns: tuple[Array, Array]) -> Array:
        hidden, targets = columns
        scores = logits(model, params, hidden) / temperature
        chosen = jnp.take_along_axis(scores, targets[..., None], axis=-1)[..., 0]
        return chosen - jax.nn.logsumexp(scores, axis=-1)

    # Logits [B, A, V] would be the largest array of all: some columns at a time, about 2^27 numbers a device.
    least = -(-num_rows * num_columns * model.vocab_size // (model.mesh.size << 27))
    num_chunks = next(n for n in range(least, num_columns + 1) if num_columns % n == 0 or n == num_columns)
    columns = [jnp.stack(jnp.split(x, num_chunks, axis=1)) for x in (hidden, targets)]
    return jnp.concatenate(jax.lax.map(of_columns, tuple(columns)), axis=1)


@partial(jax.jit, static_argnames=("model", "settings"), donate_argnames="grads")
def add_gradients(
    model: "Model", settings: Settings, params: Params, grads: Params, batch: Batch, num_tokens: int
) -> tuple[Params, dict[str, Array]]:
    """Adds the gradient of a micro-batch to the sum, and returns its share of the means over all tokens."""

    def loss(params: Params) -> tuple[Array, dict[str, Array]]:
        logprobs = token_logprobs(model, params, batch, settings.temperature)
        losses = policy_loss(logprobs, batch, settings.clip_epsilon)
        means = {name: jnp.sum(x, where=batch.mask) / num_tokens for name, x in losses.items()}
        return means["loss"], means

    new, metrics = jax.grad(loss, has_aux=True)(params)
    return shard(model.mesh, jax.tree.map(lambda x, new: x + new.astype(x.dtype), grads, new)), metrics


def make_optimizer(lr: float) -> optax.GradientTransformation:
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adam(lr, b2=0.95, mu_dtype="float32"))


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=(2, 3))
def apply_gradients(
    optimizer: optax.GradientTransformation, mesh: Mesh, params: Params, opt_state: optax.OptState,
    grads: Params, rate: float,
) -> tuple[Params, optax.OptState, Array]:  # fmt: skip
    """Returns parameters and state after an optimizer step at this share of the peak rate, and the norm."""
    grads = jax.tree.map(lambda grad, x: grad.astype(x.dtype), grads, params)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    params = optax.apply_updates(params, jax.tree.map(lambda x: rate * x, updates))
    return shard(mesh, params), shard(mesh, opt_state), optax.tree.norm(grads)


# --- The sampler
@partial(jax.jit, static_argnames=("model", "num_new", "temperature"))
def sample(
    model: "Model", params: Params, prompts: Array, starts: Array, key: Array,
    num_new: int, temperature: float,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """Samples completions of prompts [B, P] with a KV cache; temperature 0: the most likely tokens.

    Returns tokens and log-probabilities [B, A], 0 behind the stop token, and lengths [B], up to there.
    """
    num_rows, num_columns = prompts.shape
    params = replicate(model.mesh, params)  # whole on each device, and a layer at a time, once for all tokens
    layers = [{name: x[i] for name, x in params["layers"].items()} for i in range(model.num_hidden_layers)]
    params = params | {"layers": layers}
    shape = num_rows, model.num_key_value_heads, num_columns + num_new, model.head_dim
    caches = [(jnp.zeros(shape, model.dtype),) * 2] * model.num_hidden_layers
    hidden, caches = forward(model, params, prompts, starts, caches)
    # A slot for each row: its number, start, state that predicts the next token, caches, and if it has ended.
    slots = jnp.arange(num_rows), starts, hidden[:, -1], caches, jnp.zeros(num_rows, bool)
    outputs = jnp.zeros((num_rows, num_new), jnp.int32), jnp.zeros((num_rows, num_new)), 0 * starts

    def step(state: tuple) -> tuple:
        i, (rows, starts, hidden, caches, has_ended), (tokens, logprobs, lengths) = state
        scores = logits(model, params, hidden) / (temperature or 1.0)
        noise = jax.random.gumbel(jax.random.fold_in(key, i), scores.shape) if temperature else 0.0
        token = jnp.argmax(scores + noise, axis=-1).astype(jnp.int32)  # a sample of the softmax of `scores`
        logprob = jnp.take_along_axis(scores, token[:, None], axis=1)[:, 0] - jax.nn.logsumexp(scores, axis=1)
        tokens = tokens.at[rows, i].set(jnp.where(has_ended, 0, token))
        logprobs = logprobs.at[rows, i].set(jnp.where(has_ended, 0.0, logprob))
        lengths = lengths.at[rows].add(~has_ended)
        has_ended |= jnp.isin(token, jnp.array(model.stop_ids))
        hidden, caches = forward(model, params, token[:, None], starts, caches, num_columns + i)
        return i + 1, (rows, starts, hidden[:, -1], caches, has_ended), (tokens, logprobs, lengths)

    # When half of the rows have ended, half of the slots are given up: few rows are as long as the longest.
    state = 0, slots, outputs
    for size in sorted({num_rows // 2, num_rows // 4, num_rows // 8, 0}, reverse=True):
        is_on = lambda state, size=size: (state[0] < num_new) & (jnp.sum(~state[1][-1]) > size)  # noqa: E731
        i, slots, outputs = jax.lax.while_loop(is_on, step, state)
        kept = jnp.argsort(slots[-1])[:size]  # rows that go on come first
        state = i, jax.tree.map(lambda x, kept=kept: x[kept], slots), outputs
    return outputs


# --- The model
class Model(NamedTuple):
    """Fields of config.json, by their names there, and how the model is computed; jit takes it as static."""
    num_hidden_layers: int  # L
    num_key_value_heads: int  # K
    head_dim: int  # C
    vocab_size: int  # V
    rope_theta: float
    rms_norm_eps: float
    tie_word_embeddings: bool
    stop_ids: tuple[int, ...]
    dtype: str  # of parameters, products and activations
    mesh: Mesh


def forward(
    model: Model, params: Params, tokens: Array, starts: Array,
    caches: list | None = None, first: Array | int = 0,
) -> tuple[Array, list | None]:  # fmt: skip
    """Returns the normed states [B, T, D] of tokens [B, T], and caches with their keys and values.

    `starts` [B]: column of a row's first token, behind padding. `first`: column of tokens[:, 0] in caches.
    """
    columns = first + jnp.arange(tokens.shape[1])
    attended = jnp.arange(tokens.shape[1] if caches is None else caches[0][0].shape[2])
    mask = (attended <= columns[:, None]) & (attended >= starts[:, None, None, None, None])  # [B, 1, 1, T, S]
    frequencies = model.rope_theta ** -jnp.linspace(0, 1, model.head_dim // 2, endpoint=False)
    angles = jnp.maximum(columns - starts[:, None], 0)[:, None, :, None] * frequencies  # [B, 1, T, C/2]
    x = replicate(model.mesh, params["model.embed_tokens.weight"])[tokens]
    if caches is None:

        @jax.checkpoint  # the backward pass computes a layer again instead of keeping what is in it
        def body(x: Array, layer: Params) -> tuple[Array, None]:
            layer = replicate(model.mesh, layer)  # FSDP: a layer is whole while it is used
            return block(model, angles, mask, x, layer)[0], None

        x, _ = jax.lax.scan(body, x, params["layers"])
    else:
        caches = list(caches)
        for i, layer in enumerate(params["layers"]):
            x, caches[i] = block(model, angles, mask, x, layer, caches[i], first)
    return rms_norm(model, x, params["model.norm.weight"]), caches


def block(
    model: Model, angles: Array, mask: Array, x: Array, layer: Params,
    cache: tuple[Array, Array] | None = None, first: Array | int = 0,
) -> tuple[Array, tuple[Array, Array] | None]:  # fmt: skip
    """Computes a layer on x [B, T, D]: attention, over the cache's columns if there is one, and MLP."""
    num_rows, num_columns, _ = x.shape
    h = rms_norm(model, x, layer["input_layernorm.weight"])

    def heads(name: str) -> Array:
        """Projects to [B, H or K, T, C]; Qwen3 norms queries and keys."""
        y = linear(layer, f"self_attn.{name}_proj", h).reshape(num_rows, num_columns, -1, model.head_dim)
        gain = layer.get(f"self_attn.{name}_norm.weight")
        return (y if gain is None else rms_norm(model, y, gain)).swapaxes(1, 2)

    q, k, v = rotate(heads("q"), angles), rotate(heads("k"), angles), heads("v")
    if cache is not None:
        write = partial(jax.lax.dynamic_update_slice_in_dim, start_index=first, axis=2)
        k, v = cache = write(cache[0], k), write(cache[1], v)
    # H/K query heads share a key head.
    q = q.reshape(num_rows, model.num_key_value_heads, -1, num_columns, model.head_dim)
    scores = jnp.einsum("bkgtc,bksc->bkgts", q, k, preferred_element_type=jnp.float32) * model.head_dim**-0.5
    probs = jax.nn.softmax(jnp.where(mask, scores, -1e30))  # not -inf: a column of padding attends to nothing
    out = jnp.einsum("bkgts,bksc->bkgtc", probs.astype(v.dtype), v)
    out = out.reshape(num_rows, -1, num_columns, model.head_dim).swapaxes(1, 2)
    x += linear(layer, "self_attn.o_proj", out.reshape(num_rows, num_columns, -1))

    h = rms_norm(model, x, layer["post_attention_layernorm.weight"])
    h = jax.nn.silu(linear(layer, "mlp.gate_proj", h)) * linear(layer, "mlp.up_proj", h)
    return x + linear(layer, "mlp.down_proj", h), cache


def rms_norm(model: Model, x: Array, gain: Array) -> Array:
    x32 = x.astype(jnp.float32)
    x32 *= jax.lax.rsqrt(jnp.mean(x32**2, axis=-1, keepdims=True) + model.rms_norm_eps)
    return gain * x32.astype(x.dtype)


def linear(layer: Params, name: str, x: Array) -> Array:
    """Multiplies x [..., in] by a matrix, stored [out, in], and adds a bias if the model has one."""
    y = x @ layer[f"{name}.weight"].T
    return y + layer[f"{name}.bias"] if f"{name}.bias" in layer else y


def rotate(x: Array, angles: Array) -> Array:
    """Rotary position embedding of heads [B, H, T, C]. Source: arXiv 2104.09864, in Hugging Face's halves."""
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def logits(model: Model, params: Params, hidden: Array) -> Array:
    """Returns float32 logits [..., V] of the tokens behind these states [..., D]."""
    matrix = params["model.embed_tokens.weight" if model.tie_word_embeddings else "lm_head.weight"]
    return jnp.matmul(hidden, replicate(model.mesh, matrix).T, preferred_element_type=jnp.float32)


def by_size(mesh: Mesh, x: Array | np.ndarray) -> NamedSharding:
    """FSDP: cuts the larger of the last two axes that the devices divide; without one an array is whole."""
    axes = [axis for axis, size in enumerate(x.shape) if size % mesh.size == 0 and x.ndim - axis <= 2]
    axis = max(axes, key=lambda axis: x.shape[axis], default=x.ndim)
    return NamedSharding(mesh, PartitionSpec(*[None] * axis, *["devices"] * (axis < x.ndim)))


def shard(mesh: Mesh, tree: Params) -> Params:
    """Lays arrays out by `by_size`, inside of jit."""
    return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, by_size(mesh, x)), tree)


def replicate(mesh: Mesh, tree: Params) -> Params:
    """Gathers arrays whole on each device, inside of jit."""
    return jax.lax.with_sharding_constraint(tree, NamedSharding(mesh, PartitionSpec()))


def read_model(folder: Path, dtype: str, mesh: Mesh) -> Model:
    """Returns the model that config.json describes, with the stop tokens of generation_config.json."""
    file = folder / "config.json"
    refuse(not file.is_file(), f"{folder} is no Hugging Face folder: it has no config.json")
    config = {"tie_word_embeddings": False, "hidden_act": "silu"} | json.loads(file.read_text())
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}  # as the release has it
    scaling = rope.get("rope_type", rope.get("type", "default"))
    windows = config.get("use_sliding_window") or "sliding_attention" in (config.get("layer_types") or ())
    kind, act = config.get("model_type"), config["hidden_act"]
    refuse(kind not in ("llama", "qwen2", "qwen3"), f"{file}: {kind} is none of llama, qwen2 and qwen3")
    refuse(scaling != "default", f"{file}: rope scaling ({scaling}) is not computed here: run core/grpo.py")
    refuse(windows or act != "silu", f"{file}: windows and {act} are not computed here: run core/grpo.py")
    generation = folder / "generation_config.json"
    stop = json.loads(generation.read_text()).get("eos_token_id") if generation.is_file() else None
    stop = config["eos_token_id"] if stop is None else stop
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    config |= rope | {"stop_ids": tuple(stop) if isinstance(stop, list) else (stop,), "head_dim": head_dim}
    return Model(**{name: config[name] for name in Model._fields[:-2]}, dtype=dtype, mesh=mesh)


def load_params(folder: Path, model: Model) -> Params:
    """Returns the parameters of *.safetensors, sharded."""
    tensors = {name: x for file in folder.glob("*.safetensors") for name, x in load_file(file).items()}
    refuse(not tensors, f"{folder} has no *.safetensors: download the weights")

    def load(x: np.ndarray) -> Array:
        return jax.device_put(x.astype(model.dtype), by_size(model.mesh, x))

    params = {name: load(x) for name, x in tensors.items() if ".layers." not in name}
    names = [name.removeprefix("model.layers.0.") for name in tensors if name.startswith("model.layers.0.")]
    layers = {}
    for name in names:
        parts = [tensors[f"model.layers.{i}.{name}"] for i in range(model.num_hidden_layers)]
        layers[name] = load(np.stack(parts))
    return params | {"layers": layers}


def save_params(params: Params, source: Path, folder: Path) -> None:
    """Writes a folder that transformers loads: the parameters, and the other files of the source."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.suffix in (".json", ".jinja", ".txt", ".model") and "safetensors" not in file.name:
            shutil.copy(file, folder)
    tensors = {name: np.asarray(x) for name, x in params.items() if name != "layers"}
    for name, stacked in params["layers"].items():
        tensors |= {f"model.layers.{i}.{name}": x for i, x in enumerate(np.asarray(stacked))}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


# --- Tasks: a function that makes problems of a split, and one that scores a reply, which is hostile text
def countdown_problems(settings: Settings, split: str, numbers: range) -> list[Problem]:
    """Returns three numbers each and a target to make of them; test problems are all distinct."""
    found: dict[object, Problem] = {}
    for i in numbers if split == "train" else range(3 * numbers.stop):
        values, target = countdown_problem(split, i)
        problem = f"Use {' '.join(map(str, values))} to make {target}.", (values, target)
        found.setdefault(i if split == "train" else (*sorted(values), target), problem)
    return [*found.values()][: len(numbers)]


@cache
def countdown_problem(split: str, number: int) -> tuple[tuple[int, ...], int]:
    """Returns the numbers and the target of a problem. A fifth of all sets of numbers is for the test."""
    rng = random.Random(f"countdown {split} {number}")
    while True:
        values = tuple(rng.randint(1, 15) for _ in range(3))
        is_test = zlib.crc32(repr(sorted(values)).encode()) % 5 == 0
        target = combine([*values], rng) if is_test == (split == "test") else None
        if target:
            return values, target


def combine(values: list[int], rng: random.Random) -> int | None:
    """Returns the result of a random expression over all values; None if a part of it is not in 1 to 30."""
    while len(values) > 1:
        a, b = (values.pop(rng.randrange(len(values))) for _ in range(2))
        results = {"+": a + b, "-": a - b, "*": a * b, "/": a // b if a % b == 0 else 0}
        values.append(results[rng.choice("+-*/")])
        if not 1 <= values[-1] <= 30:
            return None
    return values[0]


def countdown_score(answer: tuple[tuple[int, ...], int], reply: str) -> float:
    """Returns 1 for an expression over all numbers that makes the target, 0.1 for one that misses it."""
    numbers, target = answer
    opened, closing, _ = reply.rpartition("</answer>")
    _, opening, text = opened.rpartition("<answer>")
    expression, equals, right = text.partition("=")
    is_arithmetic = len(expression) <= 100 and set(expression) <= set("0123456789+-*/() \n")
    if not (opening and closing and is_arithmetic) or (equals and right.strip() != str(target)):
        return 0.0
    used: list[int] = []
    try:
        value = evaluate_tree(ast.parse(" ".join(expression.split()), mode="eval").body, used)
    except (SyntaxError, ValueError, ZeroDivisionError, MemoryError, RecursionError):
        return 0.0
    return (1.0 if value == target else 0.1) if sorted(used) == sorted(numbers) else 0.0


OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
OPERATORS |= {ast.USub: operator.neg, ast.UAdd: operator.pos}


def evaluate_tree(node: ast.expr, used: list[int]) -> Fraction:
    """Returns the exact value of + - * / over integers, which it adds to `used`. Raises: ValueError."""
    match node:
        case ast.Constant(value=int(number)):
            used.append(number)
            return Fraction(number)
        case ast.BinOp(left, op, right) if type(op) in OPERATORS:
            return OPERATORS[type(op)](evaluate_tree(left, used), evaluate_tree(right, used))
        case ast.UnaryOp(op, operand) if type(op) in OPERATORS:
            return OPERATORS[type(op)](evaluate_tree(operand, used))
    raise ValueError("not arithmetic")


def gsm8k_problems(settings: Settings, split: str, numbers: range) -> list[Problem]:
    """Returns word problems of GSM8K: for training in a new order each epoch, for the test in the file's."""
    rows = read_gsm8k(Path(settings.data_dir).expanduser() / f"{split}.jsonl")
    if split == "test":
        return rows[: len(numbers)]
    places = [divmod(number, len(rows)) for number in numbers]  # epoch, and place in it
    return [rows[np.random.default_rng((settings.seed, i)).permutation(len(rows))[j]] for i, j in places]


@cache
def read_gsm8k(file: Path) -> list[Problem]:
    """Returns the problems of JSON lines with the columns question and answer, which ends in "#### 72"."""
    refuse(not file.is_file(), f"there is no {file}: name the folder of GSM8K's files by --data_dir")
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    ask = "\nReason step by step, and put the final number in \\boxed{}."
    return [(row["question"] + ask, row["answer"].rpartition("####")[2]) for row in rows]


def gsm8k_score(answer: str, reply: str) -> float:
    """Returns 1 if the last \\boxed{} of a reply holds the number, perhaps with commas or a dollar sign."""
    *_, boxed = ["", *re.findall(r"\\boxed\{([^{}]{1,40})\}", reply)]
    number = re.sub(r"[\s,$\\]", "", boxed)
    is_number = bool(re.fullmatch(r"-?\d+(\.\d+)?", number, re.ASCII))
    return float(is_number and Fraction(number) == Fraction(answer.strip().replace(",", "")))


TASKS = {"countdown": (countdown_problems, countdown_score), "gsm8k": (gsm8k_problems, gsm8k_score)}


def refuse(is_wrong: object, sentence: str) -> None:
    """Ends the program with a sentence if something is wrong."""
    if is_wrong:
        sys.exit(f"error: {sentence}")


def main(settings: Settings) -> None:
    """Checks the sizes, loads the model, trains it and saves it."""
    programs = jax.config.jax_compilation_cache_dir or str(Path.home() / ".cache/lmpo")
    jax.config.update("jax_compilation_cache_dir", programs)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    if jax.default_backend() == "cpu" and hasattr(ctypes.CDLL(None), "mallopt"):
        for option, value in ((-8, 1), (-1, -1), (-3, 1 << 30)):  # keeps freed memory: fresh pages cost zeros
            ctypes.CDLL(None).mallopt(option, value)
    mesh = jax.make_mesh((jax.device_count(),), ("devices",), axis_types=(AxisType.Auto,))
    num_rows, part = settings.groups_per_batch * settings.group_size, settings.ppo_minibatch
    samples, dtype, name = settings.num_eval_samples, settings.param_dtype, settings.env_name
    refuse(name not in TASKS, f"--env_name {name} is unknown: give {' or '.join(TASKS)}")
    refuse(dtype not in ("float32", "bfloat16"), f"--param_dtype {dtype}: give float32 or bfloat16")
    for size, what in ((part, "--ppo_minibatch"), (samples, "--num_eval_samples"), (mesh.size, "devices")):
        refuse(size < 1 or num_rows % size, f"{what}: {size} does not divide the {num_rows} rows of a step")
    is_even = part % (settings.rows_per_microbatch * mesh.size) == 0
    refuse(not is_even, f"--rows_per_microbatch x {mesh.size} does not divide --ppo_minibatch {part}")
    folder = Path(settings.model_dir).expanduser()
    model = read_model(folder, dtype, mesh)
    params, tokenizer = load_params(folder, model), AutoTokenizer.from_pretrained(folder)
    print(f"{folder}: {sum(x.size for x in jax.tree.leaves(params)):,} parameters on {mesh.size} devices")
    params = train(settings, model, params, tokenizer)
    if settings.save_dir:
        save_params(params, folder, Path(settings.save_dir).expanduser())


if __name__ == "__main__":
    print = partial(print, flush=True)  # each line at once, into a file too
    form = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
    parser = argparse.ArgumentParser(description=__doc__, **form)
    for field in fields(Settings):
        parser.add_argument(f"--{field.name}", type=field.type, default=field.default)
    main(Settings(**vars(parser.parse_args())))
