"""A decoder as functions over a pytree of arrays, for all families: these differ in fields and in kinds of layers.

Parameters keep their Hugging Face names and [out, in] layout; the arrays of layers are stacked under "model.layers",
each over the layers that have it. Tied models have no "lm_head.weight": one parameter, one tensor.

Letters: B rows, T tokens of a row, S cache columns, V vocabulary, L layers, H query heads, K key heads, C channels of
a head, D width.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Bool, Float, Int, PyTree

from models.architecture import LINEAR, NO_ROPE, NORMS, SLIDING, Decoder, Spec, is_spec
from models.attention import (
    LayerCache,
    QuantizedKV,
    View,
    train_attention,
)
from models.distribution import Distribution, TokenOutputs
from models.logits import LMHeads, TargetColumns, chunked_outputs, project
from models.names import (
    ADAPTERS,
    CRITIC,
    EMBED,
    HEAD,
    LAYERS,
    LORA_A,
    NORM,
    SCALE,
    TEACHER,
    TRANSPOSED,
    VALUE_HEAD,
    Array,
    Extras,
    Hidden,
    Key,
    LayerNumbers,
    LayerParams,
    Params,
    Policy,
    PolicyParams,
    RecurrentState,
    Route,
    Weights,
    decode_axes,
    dtype_of,
    is_matrix,
)
from models.packing import (
    Packing,
    pack,
    pack_ids,
    packed_positions,
    target_columns,
    target_states,
    to_token_columns,
    unpack,
)
from models.rotary import Angles, apply_rotary, rotary_angles
from utils.devices.sharding import constrain, gather, is_on_each, look_up, on_each

if TYPE_CHECKING:
    from jax.extend.core import Primitive  # imports Pallas

ACTIVATIONS = {"silu": jax.nn.silu, "gelu_pytorch_tanh": partial(jax.nn.gelu, approximate=True)}
Heads = Float[Array, "B T H C"]
Layers = LayerParams | list[LayerParams]  # stacked, or one by one
Kept = LayerCache | RecurrentState | QuantizedKV | Float[Array, "n p heads C"]  # the last two: pools of models/pages.py
Mixed = tuple[Hidden, Kept | None]
Mixer = Callable[[LayerParams, Hidden], Mixed]  # mixes tokens: its output, and what the layer keeps for later tokens
Attention = Callable[..., Mixed]  # computes attention of queries, keys and values
Routes = Int[Array, "B T L k"]  # experts in all layers: see Route; k is 0 without experts


def init_params(model: Decoder, key: Key) -> Params:
    """Returns random float32 parameters as Hugging Face initializes them: normal(0, 0.02), norms 1, biases 0."""
    specs, tree = jax.tree.flatten_with_path(model.parameter_table(), is_leaf=is_spec)
    keys = [jax.random.fold_in(key, i) for i in range(len(specs))]
    params = [init_array(model, path[-1].key, spec.shape, k) for (path, spec), k in zip(specs, keys, strict=True)]
    return jax.tree.unflatten(tree, params)


def init_array(model: Decoder, name: str, shape: tuple[int, ...], key: Key) -> Array:
    """Returns the initial value of a parameter."""
    if name.endswith(("linear_attn.norm.weight", "linear_attn.dt_bias")):
        return jnp.ones(shape, jnp.float32)
    if name.endswith("A_log"):
        return jnp.log(jax.random.uniform(key, shape, jnp.float32, 0.01, 16))
    if "norm" in name:
        return jnp.full(shape, 1 - model.norm_offset, jnp.float32)
    if name.endswith("bias"):
        return jnp.zeros(shape, jnp.float32)
    return 0.02 * jax.random.normal(key, shape, jnp.float32)


def rms_norm(model: Decoder, x: Float[Array, "... D"], gain: Float[Array, "D"]) -> Float[Array, "... D"]:
    """Returns the vectors divided by their root mean square, computed in float32, times the gain."""
    # Without the first axis, of shards: after one of size 1 XLA:CPU adds up rows at a tenth of the speed.
    rows = x.reshape(-1, *x.shape[2:]) if x.ndim > 2 else x
    x32 = rows.astype(jnp.float32)
    mean_square = jnp.mean(x32 * x32, axis=-1, keepdims=True)
    x32 = x32 * jax.lax.rsqrt(mean_square + model.rms_norm_eps)
    gain = gain.astype(x.dtype)
    if model.norm_offset:
        return (x32 * (gain.astype(jnp.float32) + model.norm_offset)).astype(x.dtype).reshape(x.shape)
    return (gain * x32.astype(x.dtype)).reshape(x.shape)


def layer_norm(model: Decoder, layer: LayerParams, name: str, x: Hidden) -> Hidden:
    """Normalizes by a norm of the layer; without a name there is none."""
    return rms_norm(model, x, layer[f"{name}.weight"]) if name else x


def rotary_by_kind(model: Decoder, positions: Int[Array, "*B T"]) -> dict[str, Angles | None]:
    """Returns the rotation of tokens at these positions, for each kind of layer."""
    scaled = model.rope_theta, model.rope_scaling
    local = (model.local_rope_theta, None) if model.local_rope_theta else scaled
    num_rotated = int(model.partial_rotary_factor * model.head_dim)
    angles = {NO_ROPE: None}
    for kind in sorted(set(model.kinds) - {NO_ROPE, LINEAR}):
        angles[kind] = rotary_angles(*(local if kind == SLIDING else scaled), num_rotated, positions)
    return angles


def linear(layer: LayerParams, name: str, x: Float[Array, "... D"]) -> Float[Array, "... F"]:
    """Multiplies by the matrix of this name, stored [out, in] or transposed, and adds its bias if there is one."""
    # As one matrix: for gradients that are summed over rows and tokens XLA:CPU writes out what it multiplies,
    # transposed (an update took 15% longer).
    rows = x.reshape(-1, x.shape[-1])
    matrix = layer.get(f"{name}.weight{TRANSPOSED}")
    if matrix is None:
        matrix = layer[f"{name}.weight"].T
    y = rows @ matrix.astype(x.dtype)
    if name + SCALE in layer:
        y = y * layer[name + SCALE].astype(x.dtype)
    if name + LORA_A in layer:
        from models.lora import adapt

        y = adapt(layer, name, rows, y)
    y = y.reshape(*x.shape[:-1], -1)
    if f"{name}.bias" in layer:
        y = y + layer[f"{name}.bias"].astype(x.dtype)
    return y


def split_heads(model: Decoder, x: Hidden, axis: str) -> Heads:
    """Returns the heads of a projection, partitioned along this logical axis."""
    heads = rearrange(x, "B T (H C) -> B T H C", C=model.head_dim)
    return constrain(heads, "rows", None, axis)


def attend(model: Decoder, angles: Angles | None, attention: Attention, layer: LayerParams, x: Hidden) -> Mixed:
    """Computes the attention of a layer; `attention(q, k, v)` gets rotated heads, and returns the new cache too."""
    q, k, v = (linear(layer, f"self_attn.{name}_proj", x) for name in "qkv")
    gate = None
    if model.output_gate:
        q, gate = rearrange(q, "B T (H n C) -> n B T (H C)", n=2, C=model.head_dim)
    if model.qk_norm == "projection":
        q = rms_norm(model, q, layer["self_attn.q_norm.weight"])
        k = rms_norm(model, k, layer["self_attn.k_norm.weight"])
    q = split_heads(model, q, "heads")
    k = split_heads(model, k, "kv_heads")
    v = split_heads(model, v, "kv_heads")
    if model.qk_norm == "head":
        q = rms_norm(model, q, layer["self_attn.q_norm.weight"])
        k = rms_norm(model, k, layer["self_attn.k_norm.weight"])
    q = apply_rotary(q, angles)
    k = apply_rotary(k, angles)
    out, cache = attention(q, k, v)
    if gate is not None:
        out = out * jax.nn.sigmoid(gate)
    return linear(layer, "self_attn.o_proj", out), cache


def gated_deltanet(
    model: Decoder,
    state: RecurrentState,
    layer: LayerParams,
    x: Hidden,
    is_token: Bool[Array, "B T"] | None = None,
    packing: Packing | None = None,
) -> Mixed:
    """Computes a Gated DeltaNet from the state before these tokens; returns the state after them too.

    Padding right of a row's last token leaves the state as it is. Source: transformers, modeling_qwen3_5.py.
    """
    from models.deltanet import causal_conv, delta_inputs, delta_rule, gated_norm

    qkv, gate, write, step = (linear(layer, f"linear_attn.in_proj_{name}", x) for name in ("qkv", "z", "b", "a"))
    if is_token is not None:
        qkv = jnp.where(is_token[..., None], qkv, 0)
    qkv = constrain(qkv, "rows", None, "heads")
    qkv, write, step = (unpack(projection, packing) for projection in (qkv, write, step))
    qkv, columns = causal_conv(state.columns, qkv, layer["linear_attn.conv1d.weight"], is_token)
    beta = jax.nn.sigmoid(write.astype(jnp.float32))
    rate = jnp.exp(layer["linear_attn.A_log"])
    step = step.astype(jnp.float32) + layer["linear_attn.dt_bias"]
    log_decay = -rate * jax.nn.softplus(step)
    if is_token is not None:
        beta = jnp.where(is_token[..., None], beta, 0)
        log_decay = jnp.where(is_token[..., None], log_decay, 0)
    inputs = delta_inputs(model.delta, qkv, log_decay, beta)
    out, memory = delta_rule(inputs, state.memory)
    out = pack(rearrange(out, "B H T E -> B T H E"), packing)
    out = gated_norm(out, gate, layer["linear_attn.norm.weight"], model.rms_norm_eps)
    return linear(layer, "linear_attn.out_proj", out), RecurrentState(columns, memory)


def decoder_layer(
    model: Decoder, layer: LayerParams, x: Hidden, mixer: Mixer, recorded: Route | None = None
) -> tuple[Hidden, Kept | None, Int[Array, "B t k"]]:
    """Computes one decoder layer: a mixer of tokens, then an MLP or experts, recorded ones or chosen by the router.

    Returns the output, what the mixer keeps for later tokens, and the experts of each token.
    """
    before_mixer, after_mixer, before_mlp, after_mlp = NORMS[model.norms]
    h = layer_norm(model, layer, before_mixer, x)
    out, cache = mixer(layer, h)
    x = constrain(x + layer_norm(model, layer, after_mixer, out), "rows")

    h = layer_norm(model, layer, before_mlp, x)
    if model.num_experts:
        out, route = expert_mlp(model, layer, h, recorded)
    else:
        out, route = mlp(model, layer, h), jnp.zeros((*h.shape[:2], 0), jnp.int16)
    x = constrain(x + layer_norm(model, layer, after_mlp, out), "rows")
    return x, cache, route


def mlp(model: Decoder, layer: LayerParams, x: Hidden) -> Hidden:
    """Computes the gated MLP of a layer."""
    gate = constrain(linear(layer, "mlp.gate_proj", x), "rows", None, "mlp")
    up = constrain(linear(layer, "mlp.up_proj", x), "rows", None, "mlp")
    activation = ACTIVATIONS[model.hidden_act]
    return linear(layer, "mlp.down_proj", activation(gate) * up)


def expert_mlp(model: Decoder, layer: LayerParams, x: Hidden, recorded: Route | None) -> tuple[Hidden, Route]:
    """Computes the experts of a layer; also returns the numbers of each token's experts."""
    from models.experts import choose_experts, mix_experts, read_experts

    logits = linear(layer, "mlp.gate", x)
    routing = choose_experts(logits, model.num_experts_per_tok, model.norm_topk_prob, recorded)
    experts = read_experts(layer, x.dtype)
    activation = ACTIVATIONS[model.hidden_act]
    out = mix_experts(experts, x, routing, activation, model.expert_product, model.mesh)
    return out, (routing.ids + 1).astype(jnp.int16)


def embed(model: Decoder, params: Params | Weights, tokens: Int[Array, "B T"]) -> Hidden:
    """Returns the embeddings of tokens in the dtype of the matmuls."""
    embeddings = look_up(params[EMBED], tokens, model.hidden_size, model.dtype)
    if model.scale_embeddings:
        embeddings = embeddings * jnp.asarray(model.hidden_size**0.5, model.dtype)
    return constrain(embeddings, "rows")


def head(model: Decoder, params: Params | Weights, x: Float[Array, "... D"]) -> Float[Array, "... V"]:
    """Computes float32 logits of hidden states; the weight is cast here, so that its gradient is summed in float32."""
    return project(params[head_name(model)], rms_norm(model, x, params[NORM]))


def head_name(model: Decoder) -> str:
    """Returns the name of the matrix that makes logits: the embedding itself in a tied model."""
    return EMBED if model.tie_word_embeddings else HEAD


# Operations that gather a weight and convert it for a product: saving their results would keep whole weights, and
# recomputing them for activations is cheap. `gather` is a custom_vjp_call.
OF_GATHERED = ("custom_vjp_call", "reduce_precision", "convert_element_type", "transpose", "reshape")


def keep_all(layer: Callable[..., Hidden]) -> Callable[..., Hidden]:
    """Returns a layer that recomputes hardly anything in the backward pass, but gathers its weights again."""

    def is_kept(primitive: "Primitive", *_, **__) -> bool:
        return primitive.name not in OF_GATHERED

    return jax.checkpoint(layer, policy=is_kept) if is_on_each() else layer


REMAT = {
    "none": keep_all,
    "dots": partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable),
    "full": jax.checkpoint,
}


class LayerInputs(NamedTuple):
    """Tokens that layers compute, with their recorded experts and packing."""

    tokens: Int[Array, "S M"]
    routes: Int[Array, "S M L k"] | None
    packing: Packing | None


def forward(
    model: Decoder, params: Policy, tokens: Int[Array, "B T"], packing: Packing | None = None
) -> Float[Array, "S M D"]:
    """Computes hidden states, before the final norm, of right-padded rows: causal attention, positions from 0.

    With a packing, only its tokens are computed, and returned in its order [S, M, D].
    """
    if ADAPTERS in params:
        from models.lora import with_adapters

        params = with_adapters(model, params)
    inputs = LayerInputs(pack_ids(tokens, packing), None, packing)
    weights, table = weights_of(model, params, EMBED, LAYERS)
    return on_each(model.mesh, partial(apply_layers, model), weights, inputs, table)


def weights_of(model: Decoder, params: Params | Weights, *names: str) -> tuple[Params | Weights, PyTree]:
    """Returns some of the weights for `on_each`, and their shapes and axes if they are sharded, or None."""
    weights = {name: params[name] for name in names}
    if isinstance(params[LAYERS], list):  # below adapters
        return weights, None
    table = model.parameter_table()
    if TEACHER in names:
        table[TEACHER] = Spec(params[TEACHER].shape, ("vocab", None))
    return weights, {name: table[name] for name in weights}


def apply_layers(model: Decoder, weights: Params | Weights, inputs: LayerInputs) -> Hidden:
    """Embeds the tokens of a device, and applies all layers."""
    tokens, routes, packing = inputs
    layers = weights[LAYERS]
    x = embed(model, weights, tokens)
    num_rows, num_columns = tokens.shape if packing is None else packing.numbers.shape
    angles = rotary_by_kind(model, packed_positions(num_columns, packing))
    if routes is not None:
        routes = rearrange(routes, "B T L k -> L B T k")
    remat = REMAT[model.remat]

    def apply_layer(x: Hidden, layers: Layers, route: Route | None, number: int) -> Hidden:
        kind = model.kinds[number]
        layer = gather_layer(model, layers, number)
        if kind == LINEAR:
            from models.deltanet import init_state

            state = init_state(model.delta, num_rows, x.dtype)
            mixer = partial(gated_deltanet, model, state, packing=packing)
        else:
            attention = partial(row_attention, model, kind, packing)
            mixer = partial(attend, model, angles[kind], attention)
        return decoder_layer(model, layer, x, mixer, route)[0]

    def apply_in_order(x: Hidden, layers: Layers, routes: Array | None, numbers: range) -> Hidden:
        for i in numbers:
            route = None if routes is None else routes[i]
            # The layer is selected inside: as an argument it would be kept for the backward pass, all layers in a copy.
            x = remat(partial(apply_layer, number=i))(x, layers, route)
        return x

    num_scanned = 0
    if not isinstance(layers, list):  # below adapters they are held one by one, as sampling reads them
        x, num_scanned = scan_periods(model, apply_in_order, x, layers, routes)
    return apply_in_order(x, layers, routes, range(num_scanned, model.num_hidden_layers))


def gather_layer(model: Decoder, layers: Layers, i: int) -> LayerParams:
    """Returns the arrays of a layer; arrays that fsdp shards are gathered."""
    layer = select_layer(model, layers, i)
    if isinstance(layers, list):
        return layer
    table = model.layer_table(model.kinds[i])
    return {name: gather(x, table[name].shape, model.dtype) for name, x in layer.items()}


def scan_periods(
    model: Decoder,
    apply_in_order: Callable[[Hidden, LayerParams, Array | None, range], Hidden],
    x: Hidden,
    stacked: LayerParams,
    routes: Array | None,
) -> tuple[Hidden, int]:
    """Applies the layers of whole periods in a loop; returns their number too."""
    num_periods = model.num_hidden_layers // model.period
    if not num_periods:
        return x, 0
    num_layers = num_periods * model.period
    periods = {}  # arrays stacked by period, and by layer within it
    for name, layers in model.layers_with().items():
        whole = stacked[name][: num_periods * sum(i < model.period for i in layers)]
        periods[name] = whole.reshape(num_periods, -1, *whole.shape[1:])
    if routes is not None:
        routes = rearrange(routes[:num_layers], "(n p) B T k -> n p B T k", p=model.period)

    def apply_period(x: Hidden, period: tuple[LayerParams, Array | None]) -> tuple[Hidden, None]:
        return apply_in_order(x, *period, range(model.period)), None

    x, _ = jax.lax.scan(apply_period, x, (periods, routes), unroll=model.is_unrolled or 1)
    return x, num_layers


def row_attention(
    model: Decoder,
    kind: str,
    packing: Packing | None,
    q: Heads,
    k: Float[Array, "B T K C"],
    v: Float[Array, "B T K C"],
) -> tuple[Hidden, None]:
    """Computes attention of right-padded rows in a layer of this kind; with a packing, of its tokens."""
    q = unpack(q, packing, with_shared=False)  # the outputs there are those of the first row
    k = unpack(k, packing)
    v = unpack(v, packing)
    lengths = packing.lengths if packing else None
    out = train_attention(q, k, v, view_of(model, kind), model.kernel, model.mesh, lengths)
    return pack(out, packing), None


def view_of(model: Decoder, kind: str) -> View:
    """Returns the scale of products and the window of attention in layers of this kind."""
    scale = model.attention_scale or model.head_dim**-0.5
    return View(scale, model.sliding_window if kind == SLIDING else 0)


def select_layer(model: Decoder, stacked: Layers, i: int, numbers: LayerNumbers = ()) -> LayerParams:
    """Returns the arrays of layer number `i` from those stacked over layers, or from a list of layers."""
    if isinstance(stacked, list):
        return stacked[i]
    numbers = numbers or model.layer_numbers
    layers_with = model.layers_with()
    return {name: stacked[name][numbers[layers.index(i)]] for name, layers in layers_with.items() if i in layers}


def logits(model: Decoder, params: Params, tokens: Int[Array, "B T"]) -> Float[Array, "B T V"]:
    """Computes float32 next-token logits of right-padded rows, for tests and small models: [B, T, V] in memory."""
    hidden = forward(model, params, tokens)
    return head(model, params, hidden)


def decode_weights(model: Decoder, params: Params, numbers: LayerNumbers = ()) -> Weights:
    """Returns the weights that sampling reads: cast once, layers as a list, since slicing a stack in the loop copies.

    Matrices are [in, out]: products of few rows are 10 to 20% faster so on a CPU. `numbers`, the model's layer_numbers
    as arguments of jit, let all layers share kernels: slices at constants would be compiled one by one.
    """
    cast = cast_params(model, params)
    layers = []
    for i in model.layer_numbers:
        layer = select_layer(model, cast[LAYERS], i, numbers)
        matrices = {name + TRANSPOSED: x.transpose(decode_axes(name)) for name, x in layer.items() if is_matrix(name)}
        layers.append(matrices | {name: x for name, x in layer.items() if not is_matrix(name)})
    return cast | {LAYERS: layers}


def cast_params(model: Decoder, params: Params) -> Params:
    """Returns parameters in the data types that sampling reads."""
    return jax.tree.map_with_path(lambda path, x: x.astype(dtype_of(path[-1].key, model.dtype)), params)


def decode_states(
    model: Decoder,
    weights: Weights,
    before: list[PyTree],
    caches: list[Kept],
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B"],
    attention: Callable[..., Mixed],
    is_token: Bool[Array, "B T"] | None = None,
    routes: Routes | None = None,
) -> tuple[Hidden, list[Kept], Routes]:
    """Computes hidden states, before the final norm, of some new tokens per row; `positions`: of each row's first.

    `attention(q, k, v, before, cache, view)` reads what is `before` and changes the cache. Also returns the tokens'
    experts, which are those of `routes` if it is given. Padding on the right (`is_token` False) leaves states alone.
    """
    x = embed(model, weights, tokens)
    angles = rotary_by_kind(model, positions[:, None] + jnp.arange(tokens.shape[1]))
    new_caches, new_routes = [], []
    for i, (kind, layer) in enumerate(zip(model.kinds, weights[LAYERS], strict=True)):
        if kind == LINEAR:
            mixer = partial(gated_deltanet, model, caches[i], is_token=is_token)
        else:
            of_layer = partial(attention, before=before[i], cache=caches[i], view=view_of(model, kind))
            mixer = partial(attend, model, angles[kind], of_layer)
        recorded = None if routes is None else routes[:, :, i]
        x, new_cache, route = decoder_layer(model, layer, x, mixer, recorded)
        new_caches.append(new_cache)
        new_routes.append(route)
    return x, new_caches, jnp.stack(new_routes, axis=2)


def target_hidden(
    model: Decoder, params: Policy, tokens: Int[Array, "B T"], packing: Packing | None = None
) -> Hidden:
    """Computes the normed state that each target token was sampled from, in the token's column; 0 elsewhere."""
    hidden = target_states(forward(model, params, tokens, packing=packing), packing)
    return to_token_columns(rms_norm(model, hidden, params[NORM]), packing)


SOFTMAX = Distribution()


class RowInputs(NamedTuple):
    """Rows of target tokens: inputs of layers, the tokens, the ids that could be sampled there, and extras of each."""

    layers: LayerInputs
    targets: Int[Array, "B T"]
    support: Int[Array, "B T S"] | None
    extras: Extras


def token_outputs(
    model: Decoder,
    params: Policy,
    tokens: Int[Array, "B T"],
    distribution: Distribution = SOFTMAX,
    support: Int[Array, "B T S"] | None = None,
    routes: Routes | None = None,
    packing: Packing | None = None,
    extras: Extras | None = None,
) -> TokenOutputs:
    """Computes log-probabilities and other outputs for all tokens under the distribution that was sampled from.

    Only this function shifts next-token logits. `support`: the ids that could be sampled for each token; None: all.
    `routes`: the experts that computed its logits, those of the token before it; None: routers choose. With a packing,
    tokens that are no targets have 0. `extras` reach the distribution, those of rows repeated for their tokens.
    """
    if routes is not None:
        routes = jnp.roll(routes, -1, axis=1)  # the last token gets the first one's, which are 0
        routes = pack_ids(routes, packing)
    if support is not None:
        support = target_columns(support, packing)
    values = None
    if CRITIC in params:
        values = target_states(state_values(model, params[CRITIC], tokens, packing), packing)
    if ADAPTERS in params:
        from models.lora import with_adapters

        params = with_adapters(model, params)
    columns = {}
    for name, x in (extras or {}).items():
        of_tokens = jnp.broadcast_to(x.reshape(len(x), -1), tokens.shape) if x.ndim < 3 else x
        columns[name] = target_columns(of_tokens, packing, padding_value=1)
    inputs = LayerInputs(pack_ids(tokens, packing), routes, packing)
    rows = RowInputs(inputs, target_columns(tokens, packing), support, columns)
    names = [name for name in (EMBED, LAYERS, NORM, head_name(model), TEACHER) if name in params]
    weights, table = weights_of(model, params, *names)
    outputs = on_each(model.mesh, partial(row_outputs, model, distribution), weights, rows, table)
    outputs = outputs._replace(values=values)
    return jax.tree.map(partial(to_token_columns, packing=packing), outputs)


def row_outputs(
    model: Decoder, distribution: Distribution, weights: Params | Weights, rows: RowInputs
) -> TokenOutputs:
    """Returns the outputs for the rows of a device.

    Both uses of a tied embedding are in here, so that their gradients are added before they are summed over copies.
    """
    hidden = apply_layers(model, weights, rows.layers)
    packing = rows.layers.packing
    states = rms_norm(model, target_states(hidden, packing), weights[NORM])
    own = gather(weights[head_name(model)], (model.vocab_size, model.hidden_size), model.dtype)
    is_trained = not isinstance(weights[LAYERS], list)  # below adapters it is not
    columns = TargetColumns(states, rows.targets, rows.support, rows.extras)
    num_targets = packing.num_targets if packing else None
    return chunked_outputs(distribution, LMHeads(own, weights.get(TEACHER)), columns, num_targets, is_trained)


def make_critic(model: Decoder, params: Params) -> PolicyParams:
    """Returns a critic: a copy of the policy's trunk under a linear head of zeros."""
    critic = jax.tree.map(jnp.copy, {name: params[name] for name in (EMBED, LAYERS, NORM)})
    shape = (1, model.hidden_size)
    critic[VALUE_HEAD] = jnp.zeros(shape, jnp.float32, device=params[NORM].sharding)
    return critic


def state_values(
    model: Decoder, critic: PolicyParams, tokens: Int[Array, "B T"], packing: Packing | None = None
) -> Float[Array, "S M"]:
    """Computes float32 values of the states that end with each token, in the order of the packing if there is one."""
    hidden = forward(model, critic, tokens, packing=packing).astype(jnp.float32)
    hidden = rms_norm(model, hidden, critic[NORM])
    return jnp.matmul(hidden, critic[VALUE_HEAD][0], precision="highest")  # the default is bfloat16 on TPU, and TF32
