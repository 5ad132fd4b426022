"""Qwen3 and Qwen2/2.5 (dense) as functions over a pytree of arrays.

Parameters keep their Hugging Face names and [out, in] layout; the arrays of a layer are stacked over the layers under
"model.layers". Tied models have no "lm_head.weight": one parameter, one tensor.

Letters: B rows, T tokens of a row, S cache columns, V vocabulary, L layers, H query heads, K key heads, C channels of
a head, D width.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange
from jax.sharding import Mesh
from jaxtyping import Bool, Float, Int

from models.attention import Cache, Prompts, attend, attend_cache, attend_rows, causal_mask, choose_kernel, compress
from models.distribution import entropy, log_softmax_at, truncate
from utils.devices.sharding import constrain, on_each
from utils.training.batching import Array

Params = dict  # {"model.embed_tokens.weight": [V, D], "model.layers": {"mlp.up_proj.weight": [L, F, D], ...}, ...}
LAYERS, EMBED, NORM, HEAD = "model.layers", "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
TRANSPOSED = ".T"  # behind the name of a matrix [in, out]
CRITIC, VALUE_HEAD = "critic", "v_head.weight"  # in training only: params["critic"] is no part of the saved model


class Spec(NamedTuple):
    """A parameter's shape and, per dimension, the logical axis that utils/devices/sharding.py maps to the mesh."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]


def is_spec(x) -> bool:
    return isinstance(x, Spec)


@dataclass(frozen=True)
class Qwen:
    """The numbers of a config.json that make the architecture; hashable, so itself the static argument of jit."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1e6
    max_position_embeddings: int = 32768  # of no effect here; saved for those who load the model elsewhere
    tie_word_embeddings: bool = True
    qkv_bias: bool = False  # Qwen2
    qk_norm: bool = True  # Qwen3
    dtype: str = "float32"  # of the matmuls; parameters stay as they were loaded
    remat: str = "full"  # none | dots | full: what the backward pass of a layer recomputes
    unroll: bool = False  # layers of the training pass as straight code: faster for small models, slow to compile
    attention: str = "auto"  # auto | plain | cudnn | splash: of training rows
    kv_dtype: str = ""  # of the cache: int8, or empty for that of the matmuls
    mesh: Mesh | None = None  # on which kernels run that XLA cannot cut by itself; None: plain attention

    def table(self) -> dict:
        """Every parameter: its Hugging Face name, its shape and its logical axes."""
        D, F, C = self.hidden_size, self.intermediate_size, self.head_dim
        q, kv = self.num_attention_heads * C, self.num_key_value_heads * C
        layer = {
            "input_layernorm.weight": Spec((D,), (None,)),
            "self_attn.q_proj.weight": Spec((q, D), ("heads", "embed")),
            "self_attn.k_proj.weight": Spec((kv, D), ("kv_heads", "embed")),
            "self_attn.v_proj.weight": Spec((kv, D), ("kv_heads", "embed")),
            "self_attn.o_proj.weight": Spec((D, q), ("embed", "heads")),
            "post_attention_layernorm.weight": Spec((D,), (None,)),
            "mlp.gate_proj.weight": Spec((F, D), ("mlp", "embed")),
            "mlp.up_proj.weight": Spec((F, D), ("mlp", "embed")),
            "mlp.down_proj.weight": Spec((D, F), ("embed", "mlp")),
        }
        if self.qkv_bias:
            for name, width in (("q", q), ("k", kv), ("v", kv)):
                layer[f"self_attn.{name}_proj.bias"] = Spec((width,), ("heads" if name == "q" else "kv_heads",))
        if self.qk_norm:
            for name in ("q", "k"):
                layer[f"self_attn.{name}_norm.weight"] = Spec((C,), (None,))
        stacked = {n: Spec((self.num_hidden_layers, *s.shape), ("layers", *s.axes)) for n, s in layer.items()}
        top = {EMBED: Spec((self.vocab_size, D), ("vocab", "embed")), LAYERS: stacked, NORM: Spec((D,), (None,))}
        return top if self.tie_word_embeddings else top | {HEAD: Spec((self.vocab_size, D), ("vocab", "embed"))}

    def unstacked_table(self) -> dict:
        """The table of what `unstack` makes: layers as a list, their matrices transposed."""
        table, layer = self.table(), {}
        for name, (shape, axes) in table[LAYERS].items():
            is_matrix = len(shape) == 3
            layer[name + TRANSPOSED * is_matrix] = Spec(*((x[:0:-1] if is_matrix else x[1:]) for x in (shape, axes)))
        return table | {LAYERS: [layer] * self.num_hidden_layers}

    @property
    def kernel(self) -> str:
        """What computes the attention of training rows."""
        heads = self.head_dim, self.num_key_value_heads
        return choose_kernel(self.attention, self.mesh, jnp.dtype(self.dtype), *heads)

    @property
    def num_parameters(self) -> int:
        """Parameters in all, the tied embedding counted once."""
        return sum(math.prod(spec.shape) for spec in jax.tree.leaves(self.table(), is_leaf=is_spec))

    @property
    def num_matrix_parameters(self) -> int:
        """Parameters that each token is multiplied by: all but an untied embedding (norms are few)."""
        return self.num_parameters - (0 if self.tie_word_embeddings else self.vocab_size * self.hidden_size)

    @property
    def cache_bytes(self) -> int:
        """Bytes of keys and values of a token, in all layers."""
        item = jnp.dtype(self.dtype).itemsize
        head = self.head_dim + item if self.kv_dtype == "int8" else self.head_dim * item  # with its scale
        return 2 * self.num_hidden_layers * self.num_key_value_heads * head


def init_params(model: Qwen, key) -> Params:
    """Random float32 parameters as Hugging Face initialises them: normal(0, 0.02), norms 1, biases 0."""
    specs, tree = jax.tree.flatten_with_path(model.table(), is_leaf=is_spec)

    def init(i, path, spec):
        name = path[-1].key
        if "norm" in name or name.endswith("bias"):
            return jnp.full(spec.shape, float("norm" in name), jnp.float32)
        return 0.02 * jax.random.normal(jax.random.fold_in(key, i), spec.shape, jnp.float32)

    return jax.tree.unflatten(tree, [init(i, path, spec) for i, (path, spec) in enumerate(specs)])


def rms_norm(x: Float[Array, "... D"], gain: Float[Array, "D"], eps: float) -> Float[Array, "... D"]:
    x32 = x.astype(jnp.float32)
    x32 = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return gain.astype(x.dtype) * x32.astype(x.dtype)


def rotations(model: Qwen, positions: Int[Array, "*B T"]) -> tuple[Float[Array, "*B T 1 R"], Float[Array, "*B T 1 R"]]:
    """Cosines and sines that turn the heads of tokens at these positions, once for all layers. R = C / 2."""
    angles = positions[..., None, None] * model.rope_theta ** (-jnp.arange(0, model.head_dim, 2) / model.head_dim)
    # Without the barrier XLA computes them again for every head of every layer: 6% of a decode step on a CPU.
    return jax.lax.optimization_barrier((jnp.cos(angles), jnp.sin(angles)))


def rope(x: Float[Array, "B T H C"], cos: Float[Array, "*B T 1 R"], sin: Float[Array, "*B T 1 R"]):
    """Rotary embedding, halves rotated against each other as in Hugging Face's models. Source: arXiv 2104.09864."""
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def linear(w: dict, name: str, x: Float[Array, "... D"]) -> Float[Array, "... F"]:
    turned = w.get(f"{name}.weight{TRANSPOSED}")
    # As one matrix: for gradients that are summed over rows and tokens XLA:CPU writes out what it multiplies,
    # transposed (an update took 15% longer).
    y = x.reshape(-1, x.shape[-1]) @ (w[f"{name}.weight"].astype(x.dtype).T if turned is None else turned)
    y = y.reshape(*x.shape[:-1], -1)
    return y + w[f"{name}.bias"].astype(x.dtype) if f"{name}.bias" in w else y


def block(model: Qwen, w: dict, x: Float[Array, "B T D"], turns, attention):
    """One decoder layer; `attention(q, k, v)` sees heads turned by `turns`, returns its output and the new cache."""
    h = rms_norm(x, w["input_layernorm.weight"], model.rms_norm_eps)
    q, k, v = (linear(w, f"self_attn.{n}_proj", h) for n in "qkv")
    q, k, v = (rearrange(x, "B T (H C) -> B T H C", C=model.head_dim) for x in (q, k, v))
    q, k, v = (constrain(x, "rows", None, axis) for x, axis in ((q, "heads"), (k, "kv_heads"), (v, "kv_heads")))
    if model.qk_norm:
        q = rms_norm(q, w["self_attn.q_norm.weight"], model.rms_norm_eps)
        k = rms_norm(k, w["self_attn.k_norm.weight"], model.rms_norm_eps)
    out, cache = attention(rope(q, *turns), rope(k, *turns), v)
    x = constrain(x + linear(w, "self_attn.o_proj", out), "rows")
    h = rms_norm(x, w["post_attention_layernorm.weight"], model.rms_norm_eps)
    gate, up = (constrain(linear(w, f"mlp.{n}_proj", h), "rows", None, "mlp") for n in ("gate", "up"))
    return constrain(x + linear(w, "mlp.down_proj", jax.nn.silu(gate) * up), "rows"), cache


def embed(model: Qwen, params: Params, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
    return constrain(params[EMBED][tokens].astype(model.dtype), "rows")


def head(model: Qwen, params: Params, x: Float[Array, "... D"]) -> Float[Array, "... V"]:
    """Float32 logits of final hidden states; the weight is cast here, so that its gradient sums in float32."""
    x = rms_norm(x, params[NORM], model.rms_norm_eps)
    weight = params[EMBED if model.tie_word_embeddings else HEAD].astype(model.dtype)
    logits = jnp.matmul(x, weight.T, preferred_element_type=jnp.float32)
    return constrain(logits, "rows", *[None] * (x.ndim - 2), "vocab")


REMAT = {
    "none": lambda f: f,
    "dots": lambda f: jax.checkpoint(f, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable),
    "full": jax.checkpoint,
}


def forward(model: Qwen, params: Params, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
    """Hidden states before the final norm of right-padded rows: plain causal attention, positions from 0."""
    turns = rotations(model, jnp.arange(tokens.shape[1]))

    def attention(q, k, v):
        return attend_rows(q, k, v, model.kernel, model.mesh), None

    def layer(x, w):
        return block(model, w, x, turns, attention)[0], None

    x = embed(model, params, tokens)
    return jax.lax.scan(REMAT[model.remat](layer), x, params[LAYERS], unroll=model.unroll or 1)[0]


def logits(model: Qwen, params: Params, tokens: Int[Array, "B T"]) -> Float[Array, "B T V"]:
    """Float32 next-token logits of right-padded rows, for tests and small models: [B, T, V] in memory."""
    return head(model, params, forward(model, params, tokens))


def unstack(model: Qwen, params: Params) -> Params:
    """The weights that sampling reads: cast once, layers as a list, since slicing a stack in the loop would copy.

    Matrices are [in, out]: products of few rows are 10 to 20% faster so on a CPU.
    """
    params = jax.tree.map(lambda x: x.astype(model.dtype), params)

    def layer(i: int) -> dict:
        each = {name: x[i] for name, x in params[LAYERS].items()}
        return {name + TRANSPOSED * (x.ndim == 2): x.T for name, x in each.items()}

    return params | {LAYERS: [layer(i) for i in range(model.num_hidden_layers)]}


def prefill(model: Qwen, weights: Params, tokens: Int[Array, "B T"], starts: Int[Array, "B"]) -> list[Cache]:
    """The cache of left-padded rows whose first token stands in column `starts`; positions count from there."""
    columns = jnp.arange(tokens.shape[1])
    mask: Bool[Array, "B T T"] = causal_mask(tokens.shape[1]) & (columns >= starts[:, None])[:, None]
    turns = rotations(model, jnp.maximum(columns - starts[:, None], 0))
    x, caches = embed(model, weights, tokens), []
    for w in weights[LAYERS]:
        x, cache = block(model, w, x, turns, lambda q, k, v: attend(q, k, v, mask))
        caches.append(tuple(compress(x, model.kv_dtype) for x in cache))
    return caches


def decode(
    model: Qwen,
    weights: Params,
    prompts: list[Prompts],
    caches: list[Cache],
    tokens: Int[Array, "B"],
    column: Int[Array, ""],
    starts: Int[Array, "N"],
) -> tuple[Float[Array, "B V"], list[Cache]]:
    """Logits after one more token per row, written at `column` of its cache; B / N rows in turn share a prompt."""
    x, new = embed(model, weights, tokens[:, None]), []
    num_columns = jax.tree.leaves(prompts)[0].shape[2]
    num_left = jnp.repeat(num_columns - starts, len(tokens) // len(starts))  # tokens of each prompt
    turns = rotations(model, (num_left + column)[:, None])
    for w, prompt, old in zip(weights[LAYERS], prompts, caches, strict=True):
        attention = partial(attend_cache, prompts=prompt, cache=old, starts=starts, column=column, dtype=model.kv_dtype)
        x, cache = block(model, w, x, turns, attention)
        new.append(cache)
    return head(model, weights, x[:, 0]), new


LOGIT_ELEMENTS = 1 << 27  # of the head at a time on a device (0.5 GB in float32): [B, T, V] never exists


class TokenScores(NamedTuple):
    """What the model says of each token of a row; column t speaks of tokens[:, t]."""

    logprobs: Float[Array, "B T"]  # given what stands left of it
    entropy: Float[Array, "B T"]  # of the distribution it came from, nats
    values: Float[Array, "B T"] | None  # of the state it was chosen in, where there is a critic


def score_tokens(
    model: Qwen,
    params: Params,
    tokens: Int[Array, "B T"],
    temperature: float = 1.0,
    first: int = 1,
    support: Int[Array, "B T S"] | None = None,
) -> TokenScores:
    """Log-probabilities, entropies and values, under the distribution that was sampled: temperature and support.

    The one place where next-token logits are shifted. Columns left of `first` are not computed and 0 (prompt tokens
    need no logits).
    """
    T = tokens.shape[1]

    def score(weights, chunk):
        hidden, targets, support = chunk
        scaled = head(model, weights, hidden) / temperature
        if support is not None:
            scaled, targets = truncate(scaled, support, targets)
        return log_softmax_at(scaled, targets), entropy(scaled)

    def score_rows(weights, rows):
        B = len(rows[0])
        width = max(1, min(T - first, LOGIT_ELEMENTS // (B * model.vocab_size)))
        num_chunks = -(-(T - first) // width)

        def chunked(x):
            x = jnp.pad(x, [(0, 0), (0, num_chunks * width - (T - first))] + [(0, 0)] * (x.ndim - 2))
            return rearrange(x, "B (n w) ... -> n B w ...", w=width)

        if num_chunks == 1:
            return score(weights, rows)
        results = jax.lax.map(jax.checkpoint(partial(score, weights)), jax.tree.map(chunked, rows))
        return jax.tree.map(lambda x: rearrange(x, "n B w -> B (n w)")[:, : T - first], results)

    support = None if support is None else support[:, first:]
    rows = forward(model, params, tokens)[:, first - 1 : -1], tokens[:, first:], support
    weights = {name: params[name] for name in (NORM, EMBED if model.tie_word_embeddings else HEAD)}
    value = values(model, params[CRITIC], tokens)[:, first - 1 : -1] if CRITIC in params else None
    results = *on_each(model.mesh, score_rows, weights, rows), value
    return TokenScores(*jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (first, 0))), results))


def make_critic(model: Qwen, params: Params) -> Params:
    """A critic: a copy of the policy's trunk under a linear head of zeros."""
    trunk = {name: jnp.copy(x) if name != LAYERS else jax.tree.map(jnp.copy, x) for name, x in params.items()}
    trunk.pop(HEAD, None)
    return trunk | {VALUE_HEAD: jnp.zeros((1, model.hidden_size), jnp.float32, device=params[NORM].sharding)}


def values(model: Qwen, critic: Params, tokens: Int[Array, "B T"]) -> Float[Array, "B T"]:
    """Float32 values of the states that end with each token."""
    hidden = rms_norm(forward(model, critic, tokens).astype(jnp.float32), critic[NORM], model.rms_norm_eps)
    return hidden @ critic[VALUE_HEAD][0]
