"""Experts instead of an MLP (MoE): a router sends each token to a few of many small MLPs.

Letters: B rows, T tokens of a row, E experts, k experts of a token, D width, F width of an expert, M pairs of a token
and one of its experts.
"""

from collections.abc import Callable
from importlib.util import find_spec
from typing import NamedTuple

import jax
import jax.numpy as jnp
from absl import flags
from einops import rearrange, reduce
from jax.sharding import Mesh, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from models.names import EXPERT, LORA_A, LORA_B, TRANSPOSED, Array, Hidden, LayerParams, Route, decode_axes
from utils.devices.sharding import ROWS, on_devices

Activation = Callable[[Array], Array]
Product = Callable[[Float[Array, "M D"], Float[Array, "E D F"], Int[Array, "E"]], Float[Array, "M F"]]
# A dense product of this few tokens takes no longer than reading the weights, and a batch reads nearly all: H100
# and TPU v5e make 300 and 240 multiplications for each byte that they read.
FEW_TOKENS = 256
TILE = 64  # tokamax's kernels for an H100 multiply matrices of whole tiles; adapters are narrower


class LowRank(NamedTuple):
    """Adapters of one matrix of all experts: they add x A^T B to the products of rows x."""

    A: Float[Array, "E r _"]
    B: Float[Array, "E r _"]


class Experts(NamedTuple):
    """Matrices of all experts of a layer, as one MLP of width E F; rows of an expert are adjacent in memory."""

    gate: Float[Array, "E F D"]
    up: Float[Array, "E F D"]
    down: Float[Array, "E F D"]
    gate_adapter: LowRank | None = None
    up_adapter: LowRank | None = None
    down_adapter: LowRank | None = None


class Routing(NamedTuple):
    """Experts of each token, and the weights of their outputs in the sum."""

    ids: Int[Array, "B T k"]
    weights: Float[Array, "B T k"]


def read_experts(layer: LayerParams, dtype: DTypeLike) -> Experts:
    """Returns the matrices of a layer's experts, which are stored as in the file or transposed."""
    matrices, adapters = [], []
    for projection in ("gate_proj", "up_proj", "down_proj"):
        module = f"mlp.experts.{EXPERT}.{projection}"
        name = f"{module}.weight"
        matrix = layer.get(name + TRANSPOSED)
        if matrix is None:
            matrix = layer[name].astype(dtype).transpose(decode_axes(name))
        matrices.append(matrix)
        is_adapted = module + LORA_A in layer
        parts = [layer[module + part].astype(dtype) for part in (LORA_A, LORA_B) if is_adapted]
        adapters.append(LowRank(*parts) if is_adapted else None)
    return Experts._make([*matrices, *adapters])


def choose_experts(
    logits: Float[Array, "B T E"], experts_per_token: int, normalize: bool, recorded: Route | None = None
) -> Routing:
    """Chooses the likeliest experts of each token, weighted by their probabilities, or those divided by their sum.

    Recorded experts replace the likeliest ones, with the weights of these logits. Sources: Qwen3MoeTopKRouter of
    transformers; arXiv 2510.11370 (rollout routing replay).
    """
    probs = jax.nn.softmax(logits.astype(jnp.float32))
    _, ids = jax.lax.top_k(probs, experts_per_token)
    if recorded is not None:
        ids = jnp.where(recorded > 0, recorded - 1, ids)
    weights = jnp.take_along_axis(probs, ids, axis=-1)
    if normalize:
        weights = weights / weights.sum(-1, keepdims=True)
    return Routing(ids, weights.astype(logits.dtype))


def choose_product(mesh: Mesh | None) -> str:
    """Returns the product of tokens with their experts: tokamax's on NVIDIA if installed, ragged on TPU, or dense.

    jax.lax.ragged_dot is no choice elsewhere: XLA computes it as a dense product with k copies of each token. On
    two cores it took 4 to 7 times as long as `dense_experts` with 64 experts, 8 of a token.
    """
    device_kind = mesh.devices.flat[0].device_kind.lower() if mesh else ""
    if "nvidia" in device_kind and find_spec("tokamax"):
        return "tokamax"
    return "ragged" if "tpu" in device_kind else "dense"


def mix_experts(
    experts: Experts, x: Hidden, routing: Routing, activation: Activation, product: str, mesh: Mesh | None
) -> Hidden:
    """Computes the weighted sum of the outputs of each token's experts with the product that was chosen.

    On a mesh those of each device's rows are computed there, since XLA cannot partition a kernel, and `tp` shards the
    width of every expert. Whole experts on each device would not be as much work: routers are not balanced.
    """

    def compute(experts: Experts, x: Hidden, routing: Routing) -> Hidden:
        if product == "dense" or x.shape[0] * x.shape[1] <= FEW_TOKENS:
            return dense_experts(experts, x, routing, activation)
        return grouped_experts(experts, x, routing, activation, PRODUCTS[product])

    if mesh is None:
        return compute(experts, x, routing)
    is_cut = experts.down.shape[1] % mesh.shape["tp"] == 0
    axis = "tp" if is_cut else None

    def compute_shard(experts: Experts, x: Hidden, routing: Routing) -> Hidden:
        out = compute(experts, x, routing)
        return jax.lax.psum(out, "tp") if is_cut else out

    cut, whole, rows = PartitionSpec(None, axis), PartitionSpec(), PartitionSpec(ROWS)
    inputs, outputs = LowRank(whole, PartitionSpec(None, None, axis)), LowRank(PartitionSpec(None, None, axis), whole)
    specs = Experts(cut, cut, cut, gate_adapter=inputs, up_adapter=inputs, down_adapter=outputs)
    specs = Experts._make(None if x is None else spec for x, spec in zip(experts, specs, strict=True))
    return on_devices(mesh, compute_shard, (specs, rows, rows), rows)(experts, x, routing)


def dense_experts(experts: Experts, x: Hidden, routing: Routing, activation: Activation) -> Hidden:
    """Computes all experts of all tokens, as one wide MLP; experts that a token is not sent to have weight 0."""
    num_experts = len(experts.down)
    is_chosen = jax.nn.one_hot(routing.ids, num_experts, dtype=x.dtype)
    weights = jnp.einsum("btk,btke->bte", routing.weights, is_chosen)
    weights = rearrange(weights, "B T E -> (B T) E 1")
    wide = jax.tree.map(lambda matrices: rearrange(matrices, "E F D -> (E F) D"), experts)
    tokens = rearrange(x, "B T D -> (B T) D")

    def by_expert(matrix: Float[Array, "EF D"], adapter: LowRank | None) -> Float[Array, "M E F"]:
        y = rearrange(tokens @ matrix.T, "M (E F) -> M E F", E=num_experts)
        if adapter is None:
            return y
        low = rearrange(tokens @ adapter.A.T, "M (E r) -> M E r", E=num_experts)
        B = rearrange(adapter.B, "(E r) F -> E r F", E=num_experts)
        return y + jnp.einsum("mer,erf->mef", low, B)

    hidden = activation(by_expert(wide.gate, wide.gate_adapter)) * by_expert(wide.up, wide.up_adapter)
    hidden = hidden * weights
    out = rearrange(hidden, "M E F -> M (E F)") @ wide.down
    if experts.down_adapter is not None:
        low = jnp.einsum("mef,erf->mer", hidden, experts.down_adapter.A)
        out = out + rearrange(low, "M E r -> M (E r)") @ wide.down_adapter.B
    return out.reshape(x.shape)


def grouped_experts(experts: Experts, x: Hidden, routing: Routing, activation: Activation, product: Product) -> Hidden:
    """Computes only the experts that each token is sent to: pairs of a token and an expert are sorted by expert."""
    B, T, k = routing.ids.shape
    expert_of_pair = routing.ids.reshape(-1)
    order = jnp.argsort(expert_of_pair)
    sizes = jnp.bincount(expert_of_pair, length=experts.down.shape[0])
    tokens = rearrange(x, "B T D -> (B T) D")
    tokens = tokens[order // k]

    def multiply(rows: Float[Array, "M _"], matrices: Float[Array, "E _ _"], adapter: LowRank | None) -> Array:
        y = product(rows, matrices, sizes)
        if adapter is None:
            return y
        return y + product(product(rows, adapter.A.swapaxes(1, 2), sizes), adapter.B, sizes)

    gate = multiply(tokens, experts.gate.swapaxes(1, 2), experts.gate_adapter)
    up = multiply(tokens, experts.up.swapaxes(1, 2), experts.up_adapter)
    hidden = activation(gate) * up
    outputs = multiply(hidden, experts.down, experts.down_adapter)
    inverse_order = jnp.argsort(order)
    outputs = rearrange(outputs[inverse_order], "(B T k) D -> B T k D", B=B, T=T)
    return reduce(outputs * routing.weights[..., None], "B T k D -> B T D", "sum")


def tokamax_ragged_dot(
    rows: Float[Array, "M D"], matrices: Float[Array, "E D F"], sizes: Int[Array, "E"]
) -> Float[Array, "M F"]:
    """Multiplies each group of adjacent rows by its matrix with the kernels of the package tokamax."""
    import tokamax

    flags.FLAGS.mark_as_parsed()  # otherwise tokamax reads the command line, whose options it would refuse
    _, num_inputs, num_outputs = matrices.shape
    more_inputs, more_outputs = -num_inputs % TILE, -num_outputs % TILE
    rows = jnp.pad(rows, [(0, 0), (0, more_inputs)])
    matrices = jnp.pad(matrices, [(0, 0), (0, more_inputs), (0, more_outputs)])
    return tokamax.ragged_dot(rows, matrices, sizes)[:, :num_outputs]


PRODUCTS = {"ragged": jax.lax.ragged_dot, "tokamax": tokamax_ragged_dot}
