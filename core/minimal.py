"""GRPO for Qwen3, Qwen2.5 and Llama in JAX, in one file that stands alone.

    python minimal.py    # models/tiny learns Countdown on two CPU cores in a few minutes
    python minimal.py --model_dir ~/Qwen2.5-0.5B-Instruct --env_name gsm8k --data_dir ~/gsm8k --lr 1e-6 \\
        --dtype bfloat16 --prompt_length 384 --num_generation_tokens 512 --num_eval_samples 1

It needs jax, numpy, optax, safetensors and transformers. To try an idea, change `policy_loss`,
`group_advantages` or TASKS. LoRA, several turns or hosts, resuming and more: core/grpo.py, same options.

Shapes: N prompts, G completions of each (a group), B = N G rows, P columns of prompts, padded on the left,
A columns of completions, T = P + A, S columns that are attended to, L layers, D width, V vocabulary, H query
heads, K key heads, C channels of a head.
"""

import argparse
import ast
import ctypes
import json
import operator
import random
import re
import sys
import time
import zlib
from fractions import Fraction
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.sharding import AxisType, PartitionSpec
from safetensors.numpy import load_file, save_file
from transformers import AutoTokenizer

Params = dict  # arrays by their names in the files; "layers" has those of all layers, stacked [L, ...]
WHOLE, BY_ROWS = PartitionSpec(), PartitionSpec("devices")  # of an array on each device
Problem = tuple[str, object]  # the user's message, and the answer that replies are compared with


class Settings(NamedTuple):
    """Options: `--name value` replaces a default."""
    model_dir: str = "models/tiny"  # Hugging Face folder of the model to train
    save_dir: str = ""  # folder for the trained model; empty: it is not saved
    env_name: str = "countdown"  # task: countdown, gsm8k
    data_dir: str = ""  # folder of train.jsonl and test.jsonl, for gsm8k
    seed: int = 0
    max_steps: int = 24  # each samples N x G completions and trains on them
    groups_per_batch: int = 16  # N
    group_size: int = 16  # G
    ppo_minibatch: int = 64  # completions of an optimizer step
    rows_per_microbatch: int = 8  # rows of a forward and backward pass on each device: as many as fit
    prompt_length: int = 24  # P, most tokens of a prompt
    num_generation_tokens: int = 192  # A, most tokens of a completion
    temperature: float = 1.0
    clip_epsilon: float = 0.2  # the ratio of new to old probability is clipped this far from 1
    lr: float = 6e-4  # peak learning rate; it falls linearly to 0 over the run
    dtype: str = "float32"  # of matrix products; bfloat16 on accelerators. Parameters are float32 in any case
    test_interval: int = 6  # steps between two evaluations
    num_eval_tasks: int = 512  # held-out problems
    num_eval_samples: int = 2  # completions of each


class Model(NamedTuple):
    """Fields of config.json, by their names there, and how the model is computed; jit takes it as static."""
    num_hidden_layers: int  # L
    num_key_value_heads: int  # K
    head_dim: int  # C
    rope_theta: float
    rms_norm_eps: float
    tie_word_embeddings: bool
    stop_ids: tuple[int, ...]
    dtype: str  # of products and activations


class Batch(NamedTuple):
    """Rows. A [B, A] array has the values of a token of the completion in the token's own column."""
    tokens: Array  # [B, T]
    starts: Array  # [B], column of the first token, after padding
    mask: Array  # [B, A], True for tokens that are trained on
    logprobs: Array  # [B, A], log-probabilities before the update
    advantages: Array  # [B], before they are computed the rewards


# --- The algorithm
def train(settings: Settings, model: Model, params: Params, tokenizer: AutoTokenizer) -> Params:
    """The loop: rollouts, advantages, old log-probabilities, updates. Returns the trained parameters."""
    make_problems, _ = TASKS[settings.env_name]
    N, G = settings.groups_per_batch, settings.group_size
    optimizer = make_optimizer(settings)
    opt_state = optimizer.init(params)
    for step in range(settings.max_steps):
        if step % settings.test_interval == 0:
            evaluate(settings, model, params, tokenizer, step)
        clock = time.perf_counter()

        # Rollouts: a group of completions for each prompt, and a reward for each completion.
        key = jax.random.fold_in(jax.random.key(settings.seed), step)
        problems = make_problems(settings, "train", range(step * N, (step + 1) * N))
        problems = [problem for problem in problems for _ in range(G)]
        batch, rewards = roll_out(settings, model, params, tokenizer, problems, key)
        num_tokens, entropy = batch.mask.sum(), -batch.logprobs.sum() / batch.mask.sum()
        speed = num_tokens / (time.perf_counter() - clock)

        # Advantages: each reward beside those of its group. A group of equal rewards teaches nothing.
        advantages, has_signal = group_advantages(rewards.reshape(N, G))
        mask = batch.mask & has_signal.repeat(G)[:, None]

        # Old log-probabilities, by the program that is trained: those of the sampler differ by rounding.
        old = np.zeros_like(batch.logprobs)
        batch = batch._replace(mask=mask, advantages=advantages.ravel(), logprobs=old)
        order = np.random.default_rng((settings.seed, step)).permutation(N * G)
        for rows, microbatch in split_microbatches(settings, batch, order):
            logprobs = token_logprobs(settings, model, params, microbatch)
            old[rows, : logprobs.shape[1]] = logprobs

        # Updates: an optimizer step for each minibatch, whose gradient is summed over micro-batches.
        metrics, norm = np.zeros(3), 0.0
        for minibatch in order.reshape(-1, settings.ppo_minibatch):
            size = mask[minibatch].sum()
            if size == 0:
                continue  # there is no token to train on
            grads = jax.tree.map(jnp.zeros_like, params)
            metrics = np.zeros(3)
            for _, microbatch in split_microbatches(settings, batch, minibatch):
                grads, new = add_gradients(settings, model, params, grads, microbatch, size)
                metrics = metrics + new
            params, opt_state, norm = apply_gradients(optimizer, params, opt_state, grads)

        _, approx_kl, clipped = metrics  # of the last update
        print(
            f"step {step + 1:3}  reward {rewards.mean():.3f}  solved {np.mean(rewards == 1):.3f}  "
            f"signal {has_signal.mean():.2f}  length {num_tokens / len(rewards):.1f}  entropy {entropy:.3f}  "
            f"approx_kl {approx_kl:.1e}  clipped {clipped:.4f}  norm {norm:.2f}  "
            f"{speed:,.0f} tokens/s  {time.perf_counter() - clock:.1f} s"
        )
    evaluate(settings, model, params, tokenizer, settings.max_steps)
    return params


def evaluate(settings: Settings, model: Model, params: Params, tokenizer: AutoTokenizer, step: int) -> None:
    """Prints the share of replies that solve held-out problems, and its standard error over problems."""
    clock = time.perf_counter()
    problems = TASKS[settings.env_name][0](settings, "test", range(settings.num_eval_tasks))
    num_samples = settings.num_eval_samples
    rows = [problem for problem in problems for _ in range(num_samples)]
    size = settings.groups_per_batch * settings.group_size  # as many rows at once as in training
    rewards = []
    for start in range(0, len(rows), size):
        part = (rows[start:] + rows * size)[:size]  # the last one is filled up
        key = jax.random.fold_in(jax.random.key(settings.seed), start)
        rewards.extend(roll_out(settings, model, params, tokenizer, part, key)[1])
    shares = np.mean(np.reshape(rewards[: len(rows)], (-1, num_samples)) == 1, axis=1)
    error = shares.std(ddof=1) / len(shares) ** 0.5
    print(f"step {step:3}  held-out {shares.mean():.3f} ± {error:.3f}  {time.perf_counter() - clock:.1f} s")


def roll_out(
    settings: Settings, model: Model, params: Params, tokenizer: AutoTokenizer, problems: list, key: Array
) -> tuple[Batch, np.ndarray]:
    """Samples a reply to each Problem, and scores it. Returns the rows, and their rewards [B]."""
    chats = [[{"role": "user", "content": text}] for text, _ in problems]
    texts = tokenizer.apply_chat_template(chats, tokenize=False, add_generation_prompt=True)
    ids, P = tokenizer(texts, add_special_tokens=False)["input_ids"], settings.prompt_length
    refuse(max(map(len, ids)) > P, f"a prompt has more tokens than --prompt_length {P}: raise it")
    starts = np.int32([P - len(prompt) for prompt in ids])
    prompts = np.int32([[0] * (P - len(prompt)) + prompt for prompt in ids])
    rows = jax.device_put((prompts, starts), BY_ROWS)
    completions, logprobs, lengths = jax.device_get(sample(settings, model, params, *rows, key))
    replies = [row[:length] for row, length in zip(completions, lengths, strict=True)]
    replies = tokenizer.batch_decode(replies, skip_special_tokens=True)
    _, score = TASKS[settings.env_name]
    rewards = np.float32([score(answer, reply) for (_, answer), reply in zip(problems, replies, strict=True)])
    tokens = np.concatenate([prompts, completions], axis=1)
    mask = np.arange(settings.num_generation_tokens) < lengths[:, None]
    return Batch(tokens, starts, mask, logprobs, rewards), rewards


# --- Advantages, loss and gradient: a fork begins here
def group_advantages(rewards: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns (reward - mean) / deviation [N, G], and if a group's rewards differ [N]: arXiv 2402.03300."""
    centered = rewards - rewards.mean(axis=1, keepdims=True)
    deviation = np.sqrt(np.mean(centered**2, axis=1, keepdims=True))
    has_signal = np.ptp(rewards, axis=1) > 1e-6
    return centered / np.where(has_signal[:, None], deviation, 1), has_signal


def split_microbatches(settings: Settings, batch: Batch, rows: np.ndarray):
    """Yields some rows of similar length at a time: their numbers, and a Batch of them on the devices."""
    lengths, A = batch.mask.sum(axis=1), batch.mask.shape[1]
    rows = rows[np.argsort(lengths[rows], kind="stable")]
    for part in rows.reshape(-1, settings.rows_per_microbatch * jax.device_count()):
        eighths = -(-8 * int(lengths[part].max()) // A)  # few widths, since each of them is compiled
        width = eighths * A // 8
        if width == 0:
            continue
        tokens = batch.tokens[part, : settings.prompt_length + width]
        mask, logprobs = batch.mask[part, :width], batch.logprobs[part, :width]
        microbatch = Batch(tokens, batch.starts[part], mask, logprobs, batch.advantages[part])
        yield part, jax.device_put(microbatch, BY_ROWS)


def policy_loss(logprobs: Array, batch: Batch, clip_epsilon: float) -> tuple[Array, Array, Array]:
    """Returns PPO's loss (arXiv 1707.06347, eq. 7) of each token, and metrics: `train` prints their means."""
    advantages = batch.advantages[:, None]
    log_ratio = logprobs - batch.logprobs
    ratio = jnp.exp(log_ratio)
    unclipped = -ratio * advantages
    clipped = -jnp.clip(ratio, 1 - clip_epsilon, 1 + clip_epsilon) * advantages
    losses = jnp.maximum(unclipped, clipped)
    return losses, ratio - 1 - log_ratio, losses != unclipped


@partial(jax.jit, static_argnames=("settings", "model"))
def token_logprobs(settings: Settings, model: Model, params: Params, batch: Batch) -> Array:
    """Returns the log-probabilities of completions [B, A]."""
    A = batch.mask.shape[1]
    params = jax.tree.map(lambda x: x.astype(model.dtype), params)  # before devices send them
    head = replicate(model, params | {"layers": {}})  # once for all columns
    hidden, _ = forward(model, params, batch.tokens, batch.starts)
    before = hidden[:, -A - 1 : -1].swapaxes(0, 1)  # the state before a token predicts it
    targets = batch.tokens[:, -A:].T

    @jax.checkpoint  # the backward pass computes logits again
    def of_column(column: tuple[Array, Array]) -> Array:
        hidden, targets = column
        return select_logprobs(logits(model, head, hidden) / (settings.temperature or 1), targets)

    # 64 columns at a time: logits of all of them, [B, A, V], would be the largest array.
    return jax.lax.map(of_column, (before, targets), batch_size=64).T


def select_logprobs(logits: Array, tokens: Array) -> Array:
    """Returns log-probabilities [...] of tokens [...] under logits [..., V]."""
    chosen = jnp.take_along_axis(logits, tokens[..., None], axis=-1)
    return chosen[..., 0] - jax.nn.logsumexp(logits, axis=-1)


@partial(jax.jit, static_argnames=("settings", "model"), donate_argnames="grads")
def add_gradients(settings: Settings, model: Model, params: Params, grads: Params, batch: Batch, size: int):
    """Adds the gradient of a micro-batch to the sum, and returns its share of means over `size` tokens."""
    def loss(params: Params) -> tuple[Array, Array]:
        logprobs = token_logprobs(settings, model, params, batch)
        outputs = policy_loss(logprobs, batch, settings.clip_epsilon)
        means = [jnp.sum(x, where=batch.mask) / size for x in outputs]
        return means[0], jnp.stack(means)

    new, means = jax.grad(loss, has_aux=True)(params)
    grads = jax.tree.map(lambda x, new: jax.lax.with_sharding_constraint(x + new, spec(x)), grads, new)
    return grads, means


def make_optimizer(settings: Settings) -> optax.GradientTransformation:
    """Returns Adam, whose learning rate falls from the peak to 0, after clipping of the gradient's norm."""
    num_rows = settings.groups_per_batch * settings.group_size
    num_updates = settings.max_steps * num_rows // settings.ppo_minibatch
    rate = optax.linear_schedule(settings.lr, 0.0, num_updates)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rate, b2=0.95))


@partial(jax.jit, static_argnames="optimizer", donate_argnames=("params", "state"))
def apply_gradients(optimizer: optax.GradientTransformation, params: Params, state: tuple, grads: Params):
    """Returns parameters and state after an optimizer step, and the norm of the gradient."""
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state, optax.tree.norm(grads)


# --- The sampler
@partial(jax.jit, static_argnames=("settings", "model"))
def sample(settings: Settings, model: Model, params: Params, prompts: Array, starts: Array, key: Array):
    """Samples. Returns tokens and log-probabilities [B, A], 0 after a stop token, and lengths [B]."""
    layers = [{name: x[i] for name, x in params["layers"].items()} for i in range(model.num_hidden_layers)]
    params = replicate(model, params | {"layers": layers})  # once for all tokens, and a layer at a time
    specs = {"in_specs": (WHOLE, BY_ROWS, BY_ROWS, WHOLE), "out_specs": BY_ROWS, "check_vma": False}
    return jax.shard_map(partial(sample_rows, settings, model), **specs)(params, prompts, starts, key)


def sample_rows(settings: Settings, model: Model, params: Params, prompts: Array, starts: Array, key: Array):
    """Samples the rows of one device, which waits for no other: its loop ends with its longest row."""
    B, P = prompts.shape
    A, L, temperature = settings.num_generation_tokens, model.num_hidden_layers, settings.temperature
    key = jax.random.fold_in(key, jax.lax.axis_index("devices"))
    empty = jnp.zeros((B, model.num_key_value_heads, P + A, model.head_dim), model.dtype)
    hidden, caches = forward(model, params, prompts, starts, [(empty, empty)] * L)
    # A slot for each row: its number, start, state that predicts the next token, caches, and has it ended.
    slots = jnp.arange(B), starts, hidden[:, -1], caches, jnp.zeros(B, bool)
    outputs = jnp.zeros((B, A), jnp.int32), jnp.zeros((B, A)), jnp.zeros(B, jnp.int32)

    def step(state: tuple) -> tuple:
        i, slots, outputs = state
        rows, starts, hidden, caches, has_ended = slots
        tokens, logprobs, lengths = outputs
        scores = logits(model, params, hidden) / (temperature or 1.0)
        noise = jax.random.gumbel(jax.random.fold_in(key, i), scores.shape) if temperature else 0.0
        token = jnp.argmax(scores + noise, axis=-1).astype(jnp.int32)  # a sample of the softmax of `scores`
        logprob = select_logprobs(scores, token)
        tokens = tokens.at[rows, i].set(jnp.where(has_ended, 0, token))
        logprobs = logprobs.at[rows, i].set(jnp.where(has_ended, 0.0, logprob))
        lengths = lengths.at[rows].add(~has_ended)
        has_ended |= jnp.isin(token, jnp.array(model.stop_ids))
        hidden, caches = forward(model, params, token[:, None], starts, caches, P + i)
        slots = rows, starts, hidden[:, -1], caches, has_ended
        return i + 1, slots, (tokens, logprobs, lengths)

    # When half of the rows have ended, half of the slots are given up: few rows are as long as the longest.
    state = 0, slots, outputs
    for size in sorted({B // 2, B // 4, B // 8, B // 16, 0}, reverse=True):
        goes_on = lambda state, size=size: (state[0] < A) & (jnp.sum(~state[1][-1]) > size)  # noqa: E731
        i, slots, outputs = jax.lax.while_loop(goes_on, step, state)
        kept = jnp.argsort(slots[-1])[:size]  # rows that go on come first
        state = i, jax.tree.map(lambda x, kept=kept: x[kept], slots), outputs
    return outputs


# --- The model
def forward(model: Model, params: Params, tokens: Array, starts: Array, caches: list = (), first: int = 0):
    """Returns the normed states [B, T, D] of tokens [B, T], and caches with their keys and values.

    `starts` [B]: column of a row's first token. `first`: column of tokens[:, 0] in the caches.
    """
    columns = first + jnp.arange(tokens.shape[1])
    positions = jnp.maximum(columns - starts[:, None], 0)  # [B, T], 0 in padding
    frequencies = model.rope_theta ** -jnp.linspace(0, 1, model.head_dim // 2, endpoint=False)
    angles = positions[:, :, None, None] * frequencies  # [B, T, 1, C / 2], the same in all layers
    attended = jnp.arange(caches[0][0].shape[2] if caches else tokens.shape[1])
    mask = (attended <= columns[:, None]) & (attended >= starts[:, None, None])  # [B, T, S]
    x = replicate(model, params["model.embed_tokens.weight"])[tokens]
    if not caches:
        @jax.checkpoint  # the backward pass computes a layer again instead of keeping what is in it
        def body(x: Array, layer: Params) -> tuple[Array, None]:
            layer = replicate(model, layer)  # FSDP: a layer is whole while it is used
            x, _ = block(model, layer, x, angles, mask, (), 0)
            return x, None

        x, _ = jax.lax.scan(body, x, params["layers"])
    else:
        caches = list(caches)
        for i, layer in enumerate(params["layers"]):
            x, caches[i] = block(model, layer, x, angles, mask, caches[i], first)
    return rms_norm(model, x, params["model.norm.weight"].astype(x.dtype)), caches


def block(model: Model, layer: Params, x: Array, angles: Array, mask: Array, cache: tuple, first: int):
    """Returns x [B, T, D] after a layer, attention and MLP, and its cache: keys and values [B, K, S, C]."""
    B, T, C = *x.shape[:2], model.head_dim
    h = rms_norm(model, x, layer["input_layernorm.weight"])
    q = linear(layer, "self_attn.q_proj", h).reshape(B, T, -1, C)
    k = linear(layer, "self_attn.k_proj", h).reshape(B, T, -1, C)
    v = linear(layer, "self_attn.v_proj", h).reshape(B, T, -1, C).swapaxes(1, 2)
    if "self_attn.q_norm.weight" in layer:  # Qwen3
        q = rms_norm(model, q, layer["self_attn.q_norm.weight"])
        k = rms_norm(model, k, layer["self_attn.k_norm.weight"])
    q = rotate(q, angles).swapaxes(1, 2)  # [B, H, T, C]
    k = rotate(k, angles).swapaxes(1, 2)  # [B, K, T, C]
    if cache:
        k = jax.lax.dynamic_update_slice_in_dim(cache[0], k, first, axis=2)
        v = jax.lax.dynamic_update_slice_in_dim(cache[1], v, first, axis=2)
        cache = k, v
    q = q.reshape(B, model.num_key_value_heads, -1, T, C)  # H / K query heads share a key head
    scores = jnp.einsum("bkgtc,bksc->bkgts", q, k, preferred_element_type=jnp.float32) * C**-0.5
    scores = jnp.where(mask[:, None, None], scores, -1e30)  # not -inf: padding attends to nothing
    probs = jax.nn.softmax(scores).astype(v.dtype)
    out = jnp.einsum("bkgts,bksc->bkgtc", probs, v)
    x += linear(layer, "self_attn.o_proj", out.reshape(B, -1, T, C).swapaxes(1, 2).reshape(B, T, -1))

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
    """Applies rotary position embedding to heads [B, T, H, C]. Source: arXiv 2104.09864."""
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)  # halves, as in Hugging Face's files
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def logits(model: Model, params: Params, hidden: Array) -> Array:
    """Returns float32 logits [..., V] of the tokens after these states [..., D]."""
    name = "model.embed_tokens.weight" if model.tie_word_embeddings else "lm_head.weight"
    return jnp.matmul(hidden, replicate(model, params[name]).T, preferred_element_type=jnp.float32)


def spec(x: Array | np.ndarray) -> PartitionSpec:
    """FSDP: the devices share the last axis of each parameter, if they divide it."""
    is_even = x.shape[-1] % jax.device_count() == 0
    return PartitionSpec(*[None] * (x.ndim - 1), "devices") if is_even else WHOLE


def replicate(model: Model, tree: Params) -> Params:
    """Gathers arrays whole on each device, in the type of the products, inside of jit."""
    tree = jax.tree.map(lambda x: x.astype(model.dtype), tree)
    return jax.lax.with_sharding_constraint(tree, WHOLE)


def read_model(folder: Path, dtype: str) -> Model:
    """Returns the model that config.json describes, with the stop tokens of generation_config.json."""
    file = folder / "config.json"
    refuse(not file.is_file(), f"{folder} is no Hugging Face folder: it has no config.json")
    defaults = {"tie_word_embeddings": False, "hidden_act": "silu", "rope_theta": 1e4, "eos_token_id": None}
    config = defaults | json.loads(file.read_text())
    kind = config.get("model_type")
    refuse(kind not in ("llama", "qwen2", "qwen3"), f"{file}: {kind} is none of llama, qwen2 and qwen3")
    config |= config.get("rope_parameters") or config.get("rope_scaling") or {}  # as the release has it
    scaling = config.get("rope_type", config.get("type", "default"))
    refuse(scaling != "default", f"{file}: rope scaling ({scaling}) is not computed here: run core/grpo.py")
    has_windows = config.get("use_sliding_window") or "sliding_attention" in (config.get("layer_types") or ())
    act, is_quantized = config["hidden_act"], config.get("quantization_config")
    is_other = has_windows or act != "silu" or is_quantized
    refuse(is_other, f"{file}: windows, {act} and quantized weights are not computed here: run core/grpo.py")
    stop = config["eos_token_id"]
    generation = folder / "generation_config.json"
    if generation.is_file():
        stop = json.loads(generation.read_text()).get("eos_token_id") or stop
    config["stop_ids"] = tuple(stop) if isinstance(stop, list) else (stop,)
    config["head_dim"] = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return Model(*[config[name] for name in Model._fields[:-1]], dtype)


def load_params(folder: Path, model: Model) -> Params:
    """Returns the parameters of *.safetensors in float32, shared out to the devices."""
    tensors = {name: x for file in folder.glob("*.safetensors") for name, x in load_file(file).items()}
    refuse(not tensors, f"{folder} has no *.safetensors: download the weights")
    if model.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)  # some files have it twice
    params, layers = {}, {}
    for name, x in tensors.items():
        prefix, _, rest = name.partition(".layers.0.")
        if rest:
            layers[rest] = np.stack([tensors[f"{prefix}.layers.{i}.{rest}"] for i in range(model.num_hidden_layers)])
        elif ".layers." not in name:
            params[name] = x
    params["layers"] = layers
    return jax.tree.map(lambda x: jax.device_put(x.astype(np.float32), spec(x)), params)


def save_params(params: Params, source: Path, folder: Path) -> None:
    """Writes a folder that transformers loads: the parameters, and the other files of the source."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.suffix in (".json", ".jinja", ".txt", ".model") and "safetensors" not in file.name:
            (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((source / "config.json").read_text()) | {"dtype": "float32", "torch_dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    params = jax.tree.map(np.ascontiguousarray, jax.device_get(params))  # `save_file` takes the memory as it is
    tensors = {name: x for name, x in params.items() if name != "layers"}
    for name, stacked in params["layers"].items():
        tensors |= {f"model.layers.{i}.{name}": x for i, x in enumerate(stacked)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


# --- Tasks: a function that makes problems of a split, and one that scores a reply, which is hostile text
def countdown_problems(settings: Settings, split: str, numbers: range) -> list[Problem]:
    """Returns three numbers each and a target to make of them; test problems are all distinct."""
    found: dict[object, Problem] = {}
    for i in numbers if split == "train" else range(3 * numbers.stop):
        values, target = countdown_problem(split, i)
        problem = f"Use {' '.join(map(str, values))} to make {target}.", (values, target)
        found.setdefault(i if split == "train" else (*sorted(values), target), problem)
    return list(found.values())[: len(numbers)]


@cache
def countdown_problem(split: str, number: int) -> tuple[tuple[int, ...], int]:
    """Returns the numbers and the target of a problem. A fifth of all sets of numbers is for the test."""
    rng = random.Random(f"countdown {split} {number}")
    while True:
        values = tuple(rng.randint(1, 15) for _ in range(3))
        is_test = zlib.crc32(repr(sorted(values)).encode()) % 5 == 0
        if is_test == (split == "test"):
            target = combine(list(values), rng)
            if target:
                return values, target


def combine(values: list[int], rng: random.Random) -> int | None:
    """Returns the result of a random expression over all values; None if a part of it is not in 1 to 30."""
    while len(values) > 1:
        a = values.pop(rng.randrange(len(values)))
        b = values.pop(rng.randrange(len(values)))
        results = {"+": a + b, "-": a - b, "*": a * b, "/": a // b if a % b == 0 else 0}
        values.append(results[rng.choice("+-*/")])
        if not 1 <= values[-1] <= 30:
            return None
    return values[0]


def countdown_score(answer: tuple[tuple[int, ...], int], reply: str) -> float:
    """Returns 1 for an expression over all numbers that makes the target, 0.1 for one that misses it."""
    numbers, target = answer
    before, closing, _ = reply.rpartition("</answer>")
    _, opening, text = before.rpartition("<answer>")
    expression, equals, right = text.partition("=")
    is_arithmetic = len(expression) <= 100 and set(expression) <= set("0123456789+-*/() \n")
    if not (opening and closing and is_arithmetic) or (equals and right.strip() != str(target)):
        return 0.0
    used: list[int] = []
    try:
        tree = ast.parse(" ".join(expression.split()), mode="eval")
        value = evaluate_tree(tree.body, used)
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
    """Returns word problems in the order of a JSON lines file; training begins again at its end."""
    file = Path(settings.data_dir).expanduser() / f"{split}.jsonl"
    refuse(not file.is_file(), f"there is no {file}: name the folder of GSM8K's files by --data_dir")
    lines = file.read_text(encoding="utf-8").strip().split("\n")
    problems = []
    for i in numbers if split == "train" else numbers[: len(lines)]:
        row = json.loads(lines[i % len(lines)])
        text = row["question"] + "\nReason step by step, and put the final number in \\boxed{}."
        _, _, answer = row["answer"].rpartition("####")
        problems.append((text, answer.strip().replace(",", "")))
    return problems


def gsm8k_score(answer: str, reply: str) -> float:
    """Returns 1 if the last \\boxed{} of a reply holds the number, perhaps with commas or a dollar sign."""
    boxes = re.findall(r"\\boxed\{([^{}]{1,40})\}", reply)
    number = re.sub(r"[\s,$\\]", "", boxes[-1]) if boxes else ""
    is_number = re.fullmatch(r"-?\d+(\.\d+)?", number, re.ASCII)
    return float(is_number is not None and Fraction(number) == Fraction(answer))


TASKS = {"countdown": (countdown_problems, countdown_score), "gsm8k": (gsm8k_problems, gsm8k_score)}


# --- The command
def refuse(is_wrong: object, sentence: str) -> None:
    """Ends the program with a sentence if something is wrong."""
    if is_wrong:
        sys.exit(f"error: {sentence}")


def main(settings: Settings) -> None:
    """Checks the settings, loads the model, trains it and saves it."""
    programs = jax.config.jax_compilation_cache_dir or str(Path.home() / ".cache/lmpo")
    jax.config.update("jax_compilation_cache_dir", programs)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    if jax.default_backend() == "cpu" and hasattr(ctypes.CDLL(None), "mallopt"):
        for option, value in ((-8, 1), (-1, -1), (-3, 1 << 30)):
            ctypes.CDLL(None).mallopt(option, value)  # keeps freed memory: fresh pages cost zeros
    num_devices = jax.device_count()
    refuse(settings.env_name not in TASKS, f"--env_name {settings.env_name}: give {' or '.join(TASKS)}")
    refuse(settings.dtype not in ("float32", "bfloat16"), f"--dtype {settings.dtype}: float32 or bfloat16")
    num_rows = settings.groups_per_batch * settings.group_size
    batch, samples = settings.ppo_minibatch, settings.num_eval_samples
    for what, n in {"devices": num_devices, "--ppo_minibatch": batch, "--num_eval_samples": samples}.items():
        refuse(n < 1 or num_rows % n, f"{what}: {n} does not divide the {num_rows} rows of a step")
    is_uneven = batch % max(settings.rows_per_microbatch * num_devices, 1)
    refuse(is_uneven, f"--rows_per_microbatch x {num_devices} does not divide --ppo_minibatch {batch}")

    folder = Path(settings.model_dir).expanduser()
    model = read_model(folder, settings.dtype)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with jax.set_mesh(jax.make_mesh((num_devices,), ("devices",), axis_types=(AxisType.Auto,))):
        params = load_params(folder, model)
        print(f"{folder}: {optax.tree.size(params):,} parameters on {num_devices} devices")
        params = train(settings, model, params, tokenizer)
        if settings.save_dir:
            save_params(params, folder, Path(settings.save_dir).expanduser())


if __name__ == "__main__":
    print = partial(print, flush=True)  # each line at once, into a file too
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form, allow_abbrev=False)
    for name, default in Settings._field_defaults.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    main(Settings(**vars(parser.parse_args())))
