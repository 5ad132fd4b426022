"""Qwen3 and Qwen2/2.5 (dense) as functions over a pytree of arrays.

Parameters keep their Hugging Face names and [out, in] layout; the arrays of a layer are stacked over the layers under
"model.layers". Tied models have no "lm_head.weight": one parameter, one tensor.

Letters: B rows, T tokens of a row, S cache columns, V vocabulary, L layers, H query heads, K key heads, C channels of
a head, D width.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange
from jax.sharding import Mesh
from jaxtyping import Bool, Float, Int

from models.attention import (
    LayerCache,
    PromptCache,
    causal_mask,
    choose_kernel,
    decode_attention,
    init_layer_cache,
    masked_attention,
    quantize_kv,
    train_attention,
)
from models.distribution import Distribution
from models.names import (
    CRITIC,
    EMBED,
    HEAD,
    LAYERS,
    NORM,
    TRANSPOSED,
    VALUE_HEAD,
    Array,
    Key,
    LayerParams,
    Params,
    PolicyParams,
    Weights,
)
from utils.devices.sharding import constrain, on_each


class Spec(NamedTuple):
    """A parameter's shape and, per dimension, the logical axis that utils/devices/sharding.py maps to the mesh."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]


LayerTable = dict[str, Spec]
Table = dict[str, Spec | LayerTable]


def is_spec(node: object) -> bool:
    """True if a node of a table is a parameter, for jax.tree functions."""
    return isinstance(node, Spec)


@dataclass(frozen=True)
class Qwen:
    """Architecture from config.json and settings of its computation; hashable, so itself the static argument of jit."""

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
    mesh: Mesh | None = None  # on which kernels run that XLA cannot partition by itself; None: plain attention

    def parameter_table(self) -> Table:
        """Returns every parameter: its Hugging Face name, its shape and its logical axes."""
        vocabulary = Spec((self.vocab_size, self.hidden_size), ("vocab", "embed"))
        stacked = {}
        for name, spec in self.layer_table().items():
            shape = (self.num_hidden_layers, *spec.shape)
            stacked[name] = Spec(shape, ("layers", *spec.axes))
        table = {EMBED: vocabulary, LAYERS: stacked, NORM: Spec((self.hidden_size,), (None,))}
        if not self.tie_word_embeddings:
            table[HEAD] = vocabulary
        return table

    def layer_table(self) -> LayerTable:
        """Returns the parameters of one layer."""
        D = self.hidden_size
        F = self.intermediate_size
        C = self.head_dim
        q = self.num_attention_heads * C
        kv = self.num_key_value_heads * C
        table = {
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
            table["self_attn.q_proj.bias"] = Spec((q,), ("heads",))
            table["self_attn.k_proj.bias"] = Spec((kv,), ("kv_heads",))
            table["self_attn.v_proj.bias"] = Spec((kv,), ("kv_heads",))
        if self.qk_norm:
            table["self_attn.q_norm.weight"] = Spec((C,), (None,))
            table["self_attn.k_norm.weight"] = Spec((C,), (None,))
        return table

    def weights_table(self) -> dict[str, Spec | list[LayerTable]]:
        """Returns the table of what `decode_weights` makes: layers as a list, their matrices transposed."""
        layer = {}
        for name, spec in self.layer_table().items():
            if len(spec.shape) == 2:
                layer[name + TRANSPOSED] = Spec(spec.shape[::-1], spec.axes[::-1])
            else:
                layer[name] = spec
        layers = [layer] * self.num_hidden_layers
        return self.parameter_table() | {LAYERS: layers}

    @property
    def kernel(self) -> str:
        """The kernel for attention of training rows. Raises UserError where it cannot run."""
        dtype = jnp.dtype(self.dtype)
        return choose_kernel(self.attention, self.mesh, dtype, self.head_dim, self.num_key_value_heads)

    @property
    def num_parameters(self) -> int:
        """Parameters in all, the tied embedding counted once."""
        specs = jax.tree.leaves(self.parameter_table(), is_leaf=is_spec)
        return sum(math.prod(spec.shape) for spec in specs)

    @property
    def num_matrix_parameters(self) -> int:
        """Parameters that each token is multiplied by: all but an untied embedding (norms are few)."""
        if self.tie_word_embeddings:
            return self.num_parameters
        return self.num_parameters - self.vocab_size * self.hidden_size

    @property
    def cache_bytes(self) -> int:
        """Bytes of keys and values of a token, in all layers."""
        itemsize = jnp.dtype(self.dtype).itemsize
        head_bytes = self.head_dim * itemsize
        if self.kv_dtype == "int8":
            head_bytes = self.head_dim + itemsize  # with its scale
        return 2 * self.num_hidden_layers * self.num_key_value_heads * head_bytes


Hidden = Float[Array, "B T D"]
Heads = Float[Array, "B T H C"]
Rotary = tuple[Float[Array, "*B T 1 R"], Float[Array, "*B T 1 R"]]  # cosines and sines, R = C / 2
Attention = Callable[..., tuple[Hidden, LayerCache | None]]  # of queries, keys and values


def init_params(model: Qwen, key: Key) -> Params:
    """Returns random float32 parameters as Hugging Face initialises them: normal(0, 0.02), norms 1, biases 0."""
    specs, tree = jax.tree.flatten_with_path(model.parameter_table(), is_leaf=is_spec)
    params = []
    for i, (path, spec) in enumerate(specs):
        name = path[-1].key
        if "norm" in name:
            array = jnp.ones(spec.shape, jnp.float32)
        elif name.endswith("bias"):
            array = jnp.zeros(spec.shape, jnp.float32)
        else:
            own_key = jax.random.fold_in(key, i)
            array = 0.02 * jax.random.normal(own_key, spec.shape, jnp.float32)
        params.append(array)
    return jax.tree.unflatten(tree, params)


def rms_norm(x: Float[Array, "... D"], gain: Float[Array, "D"], eps: float) -> Float[Array, "... D"]:
    """Returns the vectors divided by their root mean square, computed in float32, times `gain`."""
    x32 = x.astype(jnp.float32)
    mean_square = jnp.mean(x32 * x32, axis=-1, keepdims=True)
    x32 = x32 * jax.lax.rsqrt(mean_square + eps)
    return gain.astype(x.dtype) * x32.astype(x.dtype)


def rotary_embedding(model: Qwen, positions: Int[Array, "*B T"]) -> Rotary:
    """Returns cosines and sines that rotate the heads of tokens at these positions, once for all layers."""
    positions = positions[..., None, None]
    exponents = -jnp.arange(0, model.head_dim, 2) / model.head_dim
    angles = positions * model.rope_theta**exponents
    # Without the barrier XLA computes them again for every head of every layer: 6% of a decode step on a CPU.
    return jax.lax.optimization_barrier((jnp.cos(angles), jnp.sin(angles)))


def apply_rotary(x: Heads, rotary: Rotary) -> Heads:
    """Rotates the halves of heads against each other as Hugging Face's models do. Source: arXiv 2104.09864."""
    cos, sin = rotary
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = [a * cos - b * sin, b * cos + a * sin]
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)


def linear(layer: LayerParams, name: str, x: Float[Array, "... D"]) -> Float[Array, "... F"]:
    """Multiplies by the matrix of this name, stored [out, in] or transposed, and adds its bias if there is one."""
    # As one matrix: for gradients that are summed over rows and tokens XLA:CPU writes out what it multiplies,
    # transposed (an update took 15% longer).
    rows = x.reshape(-1, x.shape[-1])
    matrix = layer.get(f"{name}.weight{TRANSPOSED}")
    if matrix is None:
        matrix = layer[f"{name}.weight"].astype(x.dtype).T
    y = rows @ matrix
    y = y.reshape(*x.shape[:-1], -1)
    if f"{name}.bias" in layer:
        y = y + layer[f"{name}.bias"].astype(x.dtype)
    return y


def split_heads(model: Qwen, x: Hidden, axis: str) -> Heads:
    """Returns the heads of a projection, partitioned along this logical axis."""
    heads = rearrange(x, "B T (H C) -> B T H C", C=model.head_dim)
    return constrain(heads, "rows", None, axis)


def decoder_layer(
    model: Qwen, layer: LayerParams, x: Hidden, rotary: Rotary, attention: Attention
) -> tuple[Hidden, LayerCache | None]:
    """Computes one decoder layer; `attention(q, k, v)` gets rotated heads and returns its output and the new cache."""
    h = rms_norm(x, layer["input_layernorm.weight"], model.rms_norm_eps)
    q = linear(layer, "self_attn.q_proj", h)
    k = linear(layer, "self_attn.k_proj", h)
    v = linear(layer, "self_attn.v_proj", h)
    q = split_heads(model, q, "heads")
    k = split_heads(model, k, "kv_heads")
    v = split_heads(model, v, "kv_heads")
    if model.qk_norm:
        q = rms_norm(q, layer["self_attn.q_norm.weight"], model.rms_norm_eps)
        k = rms_norm(k, layer["self_attn.k_norm.weight"], model.rms_norm_eps)
    q = apply_rotary(q, rotary)
    k = apply_rotary(k, rotary)
    out, cache = attention(q, k, v)
    x = constrain(x + linear(layer, "self_attn.o_proj", out), "rows")

    h = rms_norm(x, layer["post_attention_layernorm.weight"], model.rms_norm_eps)
    gate = linear(layer, "mlp.gate_proj", h)
    gate = constrain(gate, "rows", None, "mlp")
    up = linear(layer, "mlp.up_proj", h)
    up = constrain(up, "rows", None, "mlp")
    down = linear(layer, "mlp.down_proj", jax.nn.silu(gate) * up)
    return constrain(x + down, "rows"), cache


def embed(model: Qwen, params: Params | Weights, tokens: Int[Array, "B T"]) -> Hidden:
    """Returns the embeddings of tokens in the dtype of the matmuls."""
    embeddings = params[EMBED][tokens].astype(model.dtype)
    return constrain(embeddings, "rows")


def head(model: Qwen, params: Params | Weights, x: Float[Array, "... D"]) -> Float[Array, "... V"]:
    """Computes float32 logits of hidden states; the weight is cast here, so that its gradient is summed in float32."""
    x = rms_norm(x, params[NORM], model.rms_norm_eps)
    weight = params[head_name(model)].astype(model.dtype)
    logits = jnp.matmul(x, weight.T, preferred_element_type=jnp.float32)
    columns = [None] * (x.ndim - 2)
    return constrain(logits, "rows", *columns, "vocab")


def head_name(model: Qwen) -> str:
    """Returns the name of the matrix that makes logits: the embedding itself in a tied model."""
    return EMBED if model.tie_word_embeddings else HEAD


SAVE_DOTS = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
REMAT = {
    "none": lambda layer: layer,
    "dots": partial(jax.checkpoint, policy=SAVE_DOTS),
    "full": jax.checkpoint,
}


def forward(model: Qwen, params: Params, tokens: Int[Array, "B T"]) -> Hidden:
    """Computes hidden states, before the final norm, of right-padded rows: causal attention, positions from 0."""
    rotary = rotary_embedding(model, jnp.arange(tokens.shape[1]))

    def attention(q: Heads, k: Float[Array, "B T K C"], v: Float[Array, "B T K C"]) -> tuple[Hidden, None]:
        return train_attention(q, k, v, model.kernel, model.mesh), None

    def apply_layer(x: Hidden, layer: LayerParams) -> tuple[Hidden, None]:
        return decoder_layer(model, layer, x, rotary, attention)

    remat = REMAT[model.remat]
    x = embed(model, params, tokens)
    x, _ = jax.lax.scan(remat(apply_layer), x, params[LAYERS], unroll=model.unroll or 1)
    return x


def logits(model: Qwen, params: Params, tokens: Int[Array, "B T"]) -> Float[Array, "B T V"]:
    """Computes float32 next-token logits of right-padded rows, for tests and small models: [B, T, V] in memory."""
    hidden = forward(model, params, tokens)
    return head(model, params, hidden)


def decode_weights(model: Qwen, params: Params) -> Weights:
    """Returns the weights that sampling reads: cast once, layers as a list, since slicing a stack in the loop copies.

    Matrices are [in, out]: products of few rows are 10 to 20% faster so on a CPU.
    """
    cast = jax.tree.map(lambda x: x.astype(model.dtype), params)
    layers = [layer_weights(cast[LAYERS], i) for i in range(model.num_hidden_layers)]
    return cast | {LAYERS: layers}


def layer_weights(stacked: LayerParams, i: int) -> LayerParams:
    """Returns the arrays of layer number `i` from the stacked ones, matrices transposed."""
    layer = {name: arrays[i] for name, arrays in stacked.items()}
    weights = {}
    for name, array in layer.items():
        if array.ndim == 2:
            weights[name + TRANSPOSED] = array.T
        else:
            weights[name] = array
    return weights


def init_cache(model: Qwen, num_rows: int, num_columns: int) -> list[LayerCache]:
    """Returns a cache of zeros for each layer, in the layout and dtype of those that `prefill` returns."""
    shape = (num_rows, model.num_key_value_heads, num_columns, model.head_dim)
    dtype = jnp.dtype(model.dtype)
    return [init_layer_cache(shape, dtype, model.kv_dtype) for _ in range(model.num_hidden_layers)]


def prefill(model: Qwen, weights: Weights, tokens: Int[Array, "B T"], starts: Int[Array, "B"]) -> list[LayerCache]:
    """Computes the cache of left-padded rows whose first token is in column `starts`; positions count from there."""
    columns = jnp.arange(tokens.shape[1])
    causal = causal_mask(tokens.shape[1])
    is_token = columns >= starts[:, None]
    mask: Bool[Array, "B T T"] = causal & is_token[:, None]
    positions = jnp.maximum(columns - starts[:, None], 0)
    rotary = rotary_embedding(model, positions)
    attention = partial(masked_attention, mask=mask)
    x = embed(model, weights, tokens)
    caches = []
    for layer in weights[LAYERS]:
        x, (keys, values) = decoder_layer(model, layer, x, rotary, attention)
        keys = quantize_kv(keys, model.kv_dtype)
        values = quantize_kv(values, model.kv_dtype)
        caches.append((keys, values))
    return caches


def decode(
    model: Qwen,
    weights: Weights,
    prompts: list[PromptCache],
    caches: list[LayerCache],
    tokens: Int[Array, "B"],
    column: Int[Array, ""],
    starts: Int[Array, "N"],
) -> tuple[Float[Array, "B V"], list[LayerCache]]:
    """Computes logits after one more token per row, written at `column` of its cache.

    B / N adjacent rows share a prompt, which occupies columns [starts, P) of its cache.
    """
    x = embed(model, weights, tokens[:, None])
    num_columns = jax.tree.leaves(prompts)[0].shape[2]
    group_size = len(tokens) // len(starts)
    prompt_lengths = jnp.repeat(num_columns - starts, group_size)
    positions = prompt_lengths + column
    rotary = rotary_embedding(model, positions[:, None])
    write = partial(decode_attention, starts=starts, column=column, kv_dtype=model.kv_dtype)
    new_caches = []
    for layer, prompt, cache in zip(weights[LAYERS], prompts, caches, strict=True):
        attention = partial(write, prompts=prompt, cache=cache)
        x, new_cache = decoder_layer(model, layer, x, rotary, attention)
        new_caches.append(new_cache)
    return head(model, weights, x[:, 0]), new_caches


LOGIT_ELEMENTS = 1 << 27  # of the head at a time on a device (0.5 GB in float32): [B, T, V] never exists
SOFTMAX = Distribution()
ColumnScores = Float[Array, "B T"]
Support = Int[Array, "B T S"]


class TokenScores(NamedTuple):
    """Scores of each token of a row by the model; column t holds those of tokens[:, t]."""

    logprobs: ColumnScores  # given the tokens left of it, nats
    entropy: ColumnScores  # of the distribution it came from, nats
    values: ColumnScores | None  # of the state it was chosen in, where there is a critic


class HeadInputs(NamedTuple):
    """Columns to score: the hidden state before each token, the token, and the ids that could be drawn there."""

    hidden: Hidden
    targets: Int[Array, "B T"]
    support: Support | None


def score_tokens(
    model: Qwen,
    params: Params,
    tokens: Int[Array, "B T"],
    distribution: Distribution = SOFTMAX,
    first_scored: int = 1,
    support: Support | None = None,
) -> TokenScores:
    """Computes log-probabilities, entropies and values under the distribution that was sampled from.

    The one place where next-token logits are shifted. Columns left of `first_scored` are not computed and 0 (prompt
    tokens need no logits). `support` holds the ids that could be drawn for each token; None: all.
    """
    if support is not None:
        support = support[:, first_scored:]
    states = slice(first_scored - 1, -1)
    hidden = forward(model, params, tokens)[:, states]
    rows = HeadInputs(hidden, tokens[:, first_scored:], support)
    weights = {name: params[name] for name in (NORM, head_name(model))}
    values = None
    if CRITIC in params:
        values = state_values(model, params[CRITIC], tokens)[:, states]
    score_rows = partial(score_in_chunks, model, distribution)
    logprobs, entropies = on_each(model.mesh, score_rows, weights, rows)
    scores = TokenScores(logprobs, entropies, values)
    padding = (0, 0), (first_scored, 0)
    return jax.tree.map(lambda x: jnp.pad(x, padding), scores)


def score_in_chunks(
    model: Qwen, distribution: Distribution, weights: PolicyParams, rows: HeadInputs
) -> tuple[ColumnScores, ColumnScores]:
    """Returns log-probabilities and entropies, from the logits of LOGIT_ELEMENTS at a time."""
    num_rows, num_columns = rows.targets.shape
    most_columns = LOGIT_ELEMENTS // (num_rows * model.vocab_size)
    width = max(1, min(num_columns, most_columns))
    num_chunks = -(-num_columns // width)
    score = partial(score_chunk, model, distribution, weights)
    if num_chunks == 1:
        return score(rows)

    def split(x: Array) -> Array:
        other_axes = [(0, 0)] * (x.ndim - 2)
        padding = [(0, 0), (0, num_chunks * width - num_columns), *other_axes]
        return rearrange(jnp.pad(x, padding), "B (n w) ... -> n B w ...", w=width)

    def join(x: Float[Array, "n B w"]) -> ColumnScores:
        return rearrange(x, "n B w -> B (n w)")[:, :num_columns]

    chunks = jax.tree.map(split, rows)
    scores = jax.lax.map(jax.checkpoint(score), chunks)
    return jax.tree.map(join, scores)


def score_chunk(
    model: Qwen, distribution: Distribution, weights: PolicyParams, chunk: HeadInputs
) -> tuple[ColumnScores, ColumnScores]:
    """Returns log-probabilities and entropies, from the logits of all columns at once."""
    scores = head(model, weights, chunk.hidden)
    return distribution.logprobs(scores, chunk.targets, chunk.support)


def make_critic(model: Qwen, params: Params) -> PolicyParams:
    """Returns a critic: a copy of the policy's trunk under a linear head of zeros."""
    critic = jax.tree.map(jnp.copy, {name: params[name] for name in (EMBED, LAYERS, NORM)})
    shape = (1, model.hidden_size)
    critic[VALUE_HEAD] = jnp.zeros(shape, jnp.float32, device=params[NORM].sharding)
    return critic


def state_values(model: Qwen, critic: PolicyParams, tokens: Int[Array, "B T"]) -> ColumnScores:
    """Computes float32 values of the states that end with each token."""
    hidden = forward(model, critic, tokens).astype(jnp.float32)
    hidden = rms_norm(hidden, critic[NORM], model.rms_norm_eps)
    return hidden @ critic[VALUE_HEAD][0]
