"""Low-rank adapters: W x + alpha / r B A x for the matrices of the layers, over a frozen base.

The base is held once, in the layout that sampling reads (names.Weights), for sampling, updates and the reference model
of the KL. A policy is that base with the adapters under ADAPTERS. Source: LoRA, arXiv 2106.09685; alpha, the rank's
share and the initial values as in "LoRA Without Regret", doi 10.64434/tml.20250929.

Letters: L layers, E experts, r rank.
"""

import math

import jax
import jax.numpy as jnp

from models.architecture import Decoder, LayerTable, Spec
from models.names import (
    ADAPTERS,
    EXPERT,
    LAYERS,
    LORA_A,
    LORA_B,
    MEMBERS,
    ROUTER,
    SCALE,
    TRANSPOSED,
    Adapters,
    Array,
    Key,
    LayerParams,
    Params,
    Policy,
    Weights,
    decode_axes,
    is_matrix,
)


def adapted_layers(model: Decoder) -> dict[str, list[int]]:
    """Returns the matrices that get adapters, without their ".weight", and the numbers of the layers that have them."""
    layers = model.layers_with()
    return {name.removesuffix(".weight"): layers[name] for name in layers if is_adapted(name, model.adapts_experts)}


def is_adapted(name: str, adapts_experts: bool) -> bool:
    """True if a parameter of a layer is a matrix that gets an adapter: routers have none, experts if asked for."""
    is_router = name.removesuffix(TRANSPOSED) == ROUTER
    return is_matrix(name) and not is_router and (adapts_experts or EXPERT not in name)


def adapter_table(model: Decoder, rank: int) -> LayerTable:
    """Returns the shapes and axes of adapters, named and laid out as in PEFT, stacked over layers."""
    stacked = model.parameter_table()[LAYERS]
    table = {}
    for name in adapted_layers(model):
        spec = stacked[f"{name}.weight"]
        *stacks, num_outputs, num_inputs = spec.shape  # layers, and experts
        *stack_axes, outputs, inputs = spec.axes
        table[name + LORA_A] = Spec((*stacks, rank, num_inputs), (*stack_axes, None, inputs))
        table[name + LORA_B] = Spec((*stacks, num_outputs, rank), (*stack_axes, outputs, None))
    return table


def adapter_parameters(model: Decoder) -> float:
    """Returns the parameters of the adapters that each token is multiplied by, only its own experts' among them."""
    sizes = {name: math.prod(spec.shape) for name, spec in adapter_table(model, model.lora_rank).items()}
    in_experts = sum(size for name, size in sizes.items() if EXPERT in name)
    return sum(sizes.values()) - in_experts * (1 - model.num_experts_per_tok / max(1, model.num_experts))


def init_adapters(model: Decoder, rank: int, key: Key) -> Adapters:
    """Returns new adapters, float32: A uniform within 1 / sqrt(inputs), B zero, so that the policy is the base."""
    adapters = {}
    for i, (name, spec) in enumerate(adapter_table(model, rank).items()):
        if name.endswith(LORA_B):
            adapters[name] = jnp.zeros(spec.shape, jnp.float32)
            continue
        limit = spec.shape[-1] ** -0.5
        own_key = jax.random.fold_in(key, i)
        adapters[name] = jax.random.uniform(own_key, spec.shape, jnp.float32, -limit, limit)
    return adapters


def layer_adapters(model: Decoder, adapters: Adapters) -> list[LayerParams]:
    """Returns the adapters of each layer, B transposed, as the matrices are, and times alpha / r."""
    layers = [{} for _ in model.kinds]
    for name, numbers in adapted_layers(model).items():
        A, B = adapters[name + LORA_A], adapters[name + LORA_B]
        scale = model.lora_alpha / A.shape[-2]
        B = scale * B.swapaxes(-1, -2)
        for row, i in enumerate(numbers):
            layers[i] |= {name + LORA_A: A[row], name + LORA_B: B[row]}
    return layers


def attach(base: Weights, adapters: list[LayerParams]) -> Weights:
    """Returns weights with each layer's adapters beside its matrices, which are not copied."""
    layers = [layer | adapter for layer, adapter in zip(base[LAYERS], adapters, strict=True)]
    return base | {LAYERS: layers}


def split_policy(policy: Policy) -> tuple[Weights, Adapters]:
    """Returns the base and the adapters of a policy."""
    base = {name: x for name, x in policy.items() if name != ADAPTERS}
    return base, policy[ADAPTERS]


def with_adapters(model: Decoder, policy: Policy) -> Policy:
    """Returns the weights of a policy with its adapters in its layers."""
    base, adapters = split_policy(policy)
    return attach(base, layer_adapters(model, adapters))


def adapt(layer: LayerParams, name: str, rows: Array, y: Array) -> Array:
    """Returns `y`, the products of rows with a matrix, plus those with its adapter."""
    A, B = layer[name + LORA_A], layer[name + LORA_B]
    states = rows @ A.astype(y.dtype).T
    if MEMBERS in layer:
        is_own = jnp.repeat(layer[MEMBERS], len(rows) // len(layer[MEMBERS]), axis=0)
        states = jnp.where(is_own, states, 0)
    return y + states @ B.astype(y.dtype)


def merge(weights: Weights) -> Weights:
    """Returns weights with the adapters in their layers added to the matrices, in float32 and then rounded once."""
    layers = []
    for layer in weights[LAYERS]:
        merged = {name: x for name, x in layer.items() if not name.endswith((LORA_A, LORA_B))}
        for name in (name.removesuffix(LORA_A) for name in layer if name.endswith(LORA_A)):
            matrix = merged[f"{name}.weight{TRANSPOSED}"]
            delta = layer[name + LORA_B].swapaxes(-1, -2) @ layer[name + LORA_A]
            updated = matrix.astype(jnp.float32) + delta.transpose(decode_axes(name))
            merged[f"{name}.weight{TRANSPOSED}"] = updated.astype(matrix.dtype)
        layers.append(merged)
    return weights | {LAYERS: layers}


def merge_stacked(model: Decoder, params: Params, adapters: Adapters) -> Params:
    """Returns parameters with adapters added, in float32 and then rounded once, over the base that they belong to."""
    layers = dict(params[LAYERS])
    for name in adapted_layers(model):
        A, B = adapters[name + LORA_A], adapters[name + LORA_B]
        scale = model.lora_alpha / A.shape[-2]
        matrix = layers[f"{name}.weight"]
        base = matrix.astype(jnp.float32)
        if model.base_dtype and EXPERT not in name:
            int8, int8_scale = quantize(matrix.astype(model.dtype), -1)
            base = int8 * int8_scale
        merged = (base + scale * jnp.matmul(B, A)).astype(matrix.dtype)
        layers[f"{name}.weight"] = jax.device_put(merged, matrix.sharding)
    return params | {LAYERS: layers}


def quantize_layer(layer: LayerParams) -> LayerParams:
    """Returns a layer whose matrices are int8, each with its scales. Norms, routers and experts stay as they are."""
    quantized = dict(layer)
    for name, matrix in layer.items():
        if is_adapted(name, adapts_experts=False):
            quantized[name], scale = quantize(matrix, 0)
            quantized[name.removesuffix(f".weight{TRANSPOSED}") + SCALE] = scale[0]
    return quantized


def quantize(matrix: Array, inputs: int) -> tuple[Array, Array]:
    """Returns int8, and a float32 scale for each output channel: its largest number is 127 scales.

    `inputs`: the axis of the input channels.
    """
    scale = jnp.maximum(jnp.abs(matrix).max(inputs, keepdims=True), 1e-30).astype(jnp.float32) / 127
    return jnp.round(matrix.astype(jnp.float32) / scale).astype(jnp.int8), scale


jit_layer_adapters = jax.jit(layer_adapters, static_argnums=0)
jit_merge = jax.jit(merge)
