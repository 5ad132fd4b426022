"""The architecture of a decoder: its fields, its kinds of layers, and the table of its parameters.

Letters: V vocabulary, L layers, H query heads, K key heads, C channels of a head, D width, F width of an MLP,
E experts.
"""

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from models.attention import choose_kernel
from models.names import EMBED, EXPERT, HEAD, LAYERS, NORM, TRANSPOSED, LayerNumbers, decode_axes, is_matrix
from models.rotary import Scaling
from utils.settings.errors import UserError


class Spec(NamedTuple):
    """A parameter's shape and, per dimension, the logical axis that utils/devices/sharding.py maps to the mesh."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]


LayerTable = dict[str, Spec]
Table = dict[str, Spec | LayerTable]


def is_spec(node: object) -> bool:
    """True if a node of a table is a parameter, for jax.tree functions."""
    return isinstance(node, Spec)


FULL, SLIDING, NO_ROPE = "full_attention", "sliding_attention", "attention_without_rope"  # kinds of layers
LINEAR = "linear_attention"  # Gated DeltaNet
NORMS = {  # names of a layer's norms: before and after attention, before and after the MLP
    "pre": ("input_layernorm", "", "post_attention_layernorm", ""),
    "post": ("", "post_attention_layernorm", "", "post_feedforward_layernorm"),
    "both": (
        "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
    ),
}  # fmt: skip


class DeltaShape(NamedTuple):
    """Sizes of a Gated DeltaNet layer."""

    num_key_heads: int
    num_value_heads: int  # a multiple of the key heads: adjacent ones share one
    key_channels: int
    value_channels: int
    kernel: int  # tokens that the convolution reads

    @property
    def key_width(self) -> int:
        """Channels of the keys of all heads."""
        return self.num_key_heads * self.key_channels

    @property
    def value_width(self) -> int:
        """Channels of the values of all heads."""
        return self.num_value_heads * self.value_channels

    @property
    def conv_width(self) -> int:
        """Channels of the convolution: queries, keys, values."""
        return 2 * self.key_width + self.value_width

    @property
    def memory_size(self) -> int:
        """Numbers in the memories of a row."""
        return self.value_width * self.key_channels


@dataclass(frozen=True)
class Decoder:
    """Architecture from config.json and settings of its computation; hashable, so it can be a static argument of jit.

    models/families.py has the values of each family.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1e6
    max_position_embeddings: int = 32768
    tie_word_embeddings: bool = True
    family: str = "Qwen3ForCausalLM"  # name of the class in transformers
    qkv_bias: bool = False  # Qwen2
    qk_norm: str = "head"  # norm of queries and keys: head (Qwen3), projection (OLMo 3), or none
    norms: str = "pre"  # a row of NORMS
    norm_offset: float = 0.0  # added to the gains of norms
    hidden_act: str = "silu"
    scale_embeddings: bool = False  # multiplied by the root of the width (Gemma)
    attention_scale: float = 0.0  # factor of the products of queries and keys; 0: one over the root of the channels
    rope_scaling: Scaling | None = None
    local_rope_theta: float = 0.0  # for layers with a window, which are not scaled; 0: as in the others
    layer_types: tuple[str, ...] = ()  # kind of each layer; empty: full attention
    sliding_window: int = 0  # tokens that a token of a sliding_attention layer sees, itself included
    num_experts: int = 0  # experts of each layer, instead of an MLP; 0: an MLP
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0  # width of an expert
    norm_topk_prob: bool = False  # the weights of a token's experts have sum 1
    output_gate: bool = False  # gates the outputs of attention; the projection of queries computes it too (Qwen3.5)
    partial_rotary_factor: float = 1.0  # share of the channels of a head that is rotated
    delta: DeltaShape | None = None  # sizes of linear_attention layers
    dtype: str = "float32"  # dtype of the matmuls; parameters stay as they were loaded
    remat: str = "full"  # none | dots | full: what the backward pass of a layer recomputes
    unroll: bool | None = None  # layers of the training pass as straight code; None: see `is_unrolled`
    attention: str = "auto"  # auto | plain: kernel for training rows
    kv_dtype: str = ""  # dtype of the cache: int8, or empty for that of the matmuls
    lora_rank: int = 0  # rank of the trained adapters: see models/lora.py; 0: all parameters are trained
    lora_alpha: float = 32.0
    adapts_experts: bool = True
    base_dtype: str = ""  # dtype of the matrices below adapters: int8, or empty for that of the matmuls
    merges_adapters: bool = False  # for sampling, adapters are added to a copy of their base
    has_images: bool = field(default=False, compare=False)  # in the model's file; saved adapters keep its names
    config: str = field(default="", compare=False, repr=False)  # JSON that it was read from, which saved models keep
    mesh: Mesh | None = None  # mesh of the kernels that XLA cannot partition by itself; None: no kernels

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kind of each layer."""
        return self.layer_types or (FULL,) * self.num_hidden_layers

    @property
    def period(self) -> int:
        """Layers after which their kinds repeat."""
        kinds = self.kinds
        return next(p for p in range(1, len(kinds) + 1) if kinds[p:] == kinds[:-p])

    @property
    def num_positions(self) -> int:
        """Most tokens of a row: the number in config.json, or more by a scaling that this number leaves out."""
        scaling = self.rope_scaling
        is_counted = scaling is None or scaling.rope_type == "llama3" or self.family == "Gemma3ForCausalLM"
        scaled = 0 if is_counted else int(scaling.factor * scaling.original_max_position_embeddings)
        return max(self.max_position_embeddings, scaled)

    def check_positions(self, what: str, num_tokens: int, remedy: str) -> None:
        """Raises UserError if rows of this many tokens have more than there are positions."""
        if num_tokens > self.num_positions:
            raise UserError(
                f"{what} has up to {num_tokens:,} tokens, and the model has {self.num_positions:,} positions "
                f"(max_position_embeddings in its config.json): {remedy}"
            )

    def parameter_table(self) -> Table:
        """Returns every parameter: its Hugging Face name, its shape and its logical axes."""
        vocabulary = Spec((self.vocab_size, self.hidden_size), ("vocab", "embed"))
        stacked = {}
        for name, layers in self.layers_with().items():
            spec = self.layer_table(self.kinds[layers[0]])[name]
            stacked[name] = Spec((len(layers), *spec.shape), ("layers", *spec.axes))
        table = {EMBED: vocabulary, LAYERS: stacked, NORM: Spec((self.hidden_size,), (None,))}
        if not self.tie_word_embeddings:
            table[HEAD] = vocabulary
        return table

    @property
    def layer_numbers(self) -> LayerNumbers:
        return tuple(range(self.num_hidden_layers))

    def layers_with(self) -> dict[str, list[int]]:
        """Returns the numbers of the layers that have each parameter: those whose arrays are stacked."""
        layers = {}
        for i, kind in enumerate(self.kinds):
            for name in self.layer_table(kind):
                layers.setdefault(name, []).append(i)
        return layers

    def layer_table(self, kind: str) -> LayerTable:
        """Returns the parameters of a layer of this kind."""
        width = Spec((self.hidden_size,), (None,))
        norms = {f"{name}.weight": width for name in NORMS[self.norms] if name}
        mixer = delta_table(self) if kind == LINEAR else attention_table(self)
        return norms | mixer | mlp_table(self)

    def weights_table(self) -> dict[str, Spec | list[LayerTable]]:
        """Returns the table of the arrays of `decode_weights`: layers as a list, their matrices transposed."""
        layers = []
        for kind in self.kinds:
            layer = {}
            for name, spec in self.layer_table(kind).items():
                if is_matrix(name):
                    order = decode_axes(name)
                    name += TRANSPOSED
                    spec = Spec(*(tuple(x[i] for i in order) for x in spec))
                layer[name] = spec
            layers.append(layer)
        return self.parameter_table() | {LAYERS: layers}

    @property
    def kernel(self) -> str:
        """The kernel for attention of training rows."""
        dtype = jnp.dtype(self.dtype)
        return choose_kernel(self.attention, self.mesh, dtype, self.head_dim, self.num_key_value_heads)

    @property
    def is_unrolled(self) -> bool:
        """True if layers of the training pass are straight code, which takes longer to compile than a loop.

        On a GPU a loop copies all that the backward pass keeps of its layers: with --remat none, half of an update's
        bytes. Small models on a CPU take a sixth less time; the tiny models of tests run too briefly to gain.
        """
        if self.unroll is not None:
            return self.unroll
        if self.mesh is None:
            return False
        platform = self.mesh.devices.flat[0].platform
        if platform == "gpu":
            return self.remat == "none" and self.mesh.shape["fsdp"] == 1
        is_small = self.num_hidden_layers <= 8 and 10**5 < self.num_parameters < 2**25
        return is_small and platform == "cpu"

    @property
    def expert_product(self) -> str:
        """The product of tokens with their experts."""
        from models.experts import choose_product

        return choose_product(self.mesh)

    @property
    def route_shape(self) -> tuple[int, int]:
        """Layers, and experts of a token in each."""
        return self.num_hidden_layers, self.num_experts_per_tok

    @property
    def num_parameters(self) -> int:
        """Parameters in all, the tied embedding counted once."""
        specs = jax.tree.leaves(self.parameter_table(), is_leaf=is_spec)
        return sum(math.prod(spec.shape) for spec in specs)

    @property
    def num_matrix_parameters(self) -> int:
        """Parameters that each token is multiplied by, without other tokens' experts and an untied embedding.

        Norms, which are few, are counted.
        """
        num_active = self.num_parameters - self.expert_parameters(self.num_experts - self.num_experts_per_tok)
        return num_active - (0 if self.tie_word_embeddings else self.vocab_size * self.hidden_size)

    def expert_parameters(self, num_experts: int) -> int:
        """Returns the parameters of `num_experts` of each layer."""
        return 3 * self.num_hidden_layers * num_experts * self.hidden_size * self.moe_intermediate_size

    @property
    def num_attention_layers(self) -> int:
        """Layers with keys and values."""
        return sum(kind != LINEAR for kind in self.kinds)

    @property
    def num_linear_layers(self) -> int:
        """Layers with a state of constant size."""
        return self.num_hidden_layers - self.num_attention_layers

    @property
    def cache_bytes(self) -> int:
        """Bytes of keys and values of a token, in all layers."""
        itemsize = jnp.dtype(self.dtype).itemsize
        head_bytes = self.head_dim + itemsize if self.kv_dtype else self.head_dim * itemsize  # int8 has a scale
        return 2 * self.num_attention_layers * self.num_key_value_heads * head_bytes

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of a row in all layers of linear attention, however many tokens it has."""
        if self.delta is None:
            return 0
        columns = (self.delta.kernel - 1) * self.delta.conv_width
        layer_bytes = 4 * self.delta.memory_size + jnp.dtype(self.dtype).itemsize * columns
        return self.num_linear_layers * layer_bytes


def attention_table(model: Decoder) -> LayerTable:
    """Returns the parameters of attention."""
    D = model.hidden_size
    C = model.head_dim
    q = model.num_attention_heads * C
    kv = model.num_key_value_heads * C
    table = {
        "self_attn.q_proj.weight": Spec(((1 + model.output_gate) * q, D), ("heads", "embed")),
        "self_attn.k_proj.weight": Spec((kv, D), ("kv_heads", "embed")),
        "self_attn.v_proj.weight": Spec((kv, D), ("kv_heads", "embed")),
        "self_attn.o_proj.weight": Spec((D, q), ("embed", "heads")),
    }
    if model.qkv_bias:
        table["self_attn.q_proj.bias"] = Spec((q,), ("heads",))
        table["self_attn.k_proj.bias"] = Spec((kv,), ("kv_heads",))
        table["self_attn.v_proj.bias"] = Spec((kv,), ("kv_heads",))
    if model.qk_norm:
        is_head = model.qk_norm == "head"
        table["self_attn.q_norm.weight"] = Spec((C,), (None,)) if is_head else Spec((q,), ("heads",))
        table["self_attn.k_norm.weight"] = Spec((C,), (None,)) if is_head else Spec((kv,), ("kv_heads",))
    return table


def delta_table(model: Decoder) -> LayerTable:
    """Returns the parameters of a Gated DeltaNet."""
    D = model.hidden_size
    H = model.delta.num_value_heads
    conv = model.delta.conv_width
    values = model.delta.value_width
    return {
        "linear_attn.in_proj_qkv.weight": Spec((conv, D), ("heads", "embed")),
        "linear_attn.in_proj_z.weight": Spec((values, D), ("heads", "embed")),
        "linear_attn.in_proj_b.weight": Spec((H, D), ("heads", "embed")),
        "linear_attn.in_proj_a.weight": Spec((H, D), ("heads", "embed")),
        "linear_attn.conv1d.weight": Spec((conv, 1, model.delta.kernel), ("heads", None, None)),
        "linear_attn.A_log": Spec((H,), ("heads",)),
        "linear_attn.dt_bias": Spec((H,), ("heads",)),
        "linear_attn.norm.weight": Spec((model.delta.value_channels,), (None,)),
        "linear_attn.out_proj.weight": Spec((D, values), ("embed", "heads")),
    }


def mlp_table(model: Decoder) -> LayerTable:
    """Returns the parameters of an MLP, or of a router and its experts, each with tensors of its own in the file."""
    D = model.hidden_size
    if not model.num_experts:
        F = model.intermediate_size
        return {
            "mlp.gate_proj.weight": Spec((F, D), ("mlp", "embed")),
            "mlp.up_proj.weight": Spec((F, D), ("mlp", "embed")),
            "mlp.down_proj.weight": Spec((D, F), ("embed", "mlp")),
        }
    F = model.moe_intermediate_size
    E = model.num_experts
    experts = f"mlp.experts.{EXPERT}"
    return {
        "mlp.gate.weight": Spec((E, D), ("experts", "embed")),
        f"{experts}.gate_proj.weight": Spec((E, F, D), ("experts", "mlp", "embed")),
        f"{experts}.up_proj.weight": Spec((E, F, D), ("experts", "mlp", "embed")),
        f"{experts}.down_proj.weight": Spec((E, D, F), ("experts", "embed", "mlp")),
    }
