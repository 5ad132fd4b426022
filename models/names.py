"""Names of parameters and types of arrays: a leaf that imports nothing of the project."""

from typing import NamedTuple

import jax
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Float, Int

EMBED = "model.embed_tokens.weight"
NORM = "model.norm.weight"
HEAD = "lm_head.weight"  # untied models only
LAYERS = "model.layers"
CRITIC = "critic"  # params[CRITIC] exists in training only and is not saved with the model
VALUE_HEAD = "v_head.weight"  # head of the critic
TRANSPOSED = ".T"  # suffix of the name of a matrix in the layout of `decode_axes`
SCALE = ".scale"  # suffix of the name of an int8 matrix, for its output channels' factors
ADAPTERS = "adapters"  # policy[ADAPTERS]: adapters that are trained over a base
TEACHER = "teacher"  # policy[TEACHER]: the head of another model, [V, D], whose states are extras[TEACHER]
LORA_A, LORA_B = ".lora_A.weight", ".lora_B.weight"  # after the name of an adapted matrix
MEMBERS = "members"  # weights[MEMBERS]: the member that each rank belongs to, if policies share a base
ROUTER = "mlp.gate.weight"
EXPERT = "*"  # replaces an expert's number in the name of a parameter that is stacked over experts


def is_matrix(name: str) -> bool:
    """True if states are multiplied by the parameter of this name: a matrix, or one of each expert.

    All others are vectors: norms, biases, decay rates, and the kernels of convolutions, one of each channel.
    """
    return name.removesuffix(TRANSPOSED).endswith(".weight") and "norm" not in name and "conv1d" not in name


def dtype_of(name: str, dtype: DTypeLike) -> DTypeLike:
    """Returns the dtype of a parameter whose matrices are cast to this one: vectors stay float32, and are cast in use.
    """
    return dtype if is_matrix(name) else "float32"


def decode_axes(name: str) -> tuple[int, ...]:
    """Returns the order of axes in which sampling reads a matrix: [in, out]; of experts [expert, width, hidden]."""
    if EXPERT not in name:
        return 1, 0
    return (0, 2, 1) if "down_proj" in name else (0, 1, 2)


Array = jax.Array | np.ndarray  # arrays of signatures: a host array is accepted wherever a device array is
Key = jax.Array  # key of jax.random
Hidden = Float[Array, "B T D"]  # states between two layers
Route = Int[Array, "B T k"]  # numbers of the experts of each token, from 1 on; 0: the router is free to choose
LayerNumbers = tuple[int | Array, ...]  # traced if they are arguments of jit
Extras = dict[str, Array]  # arrays of rows or their tokens, by name: see EXTRAS in core/records.py
Memory = Float[Array, "B H C E"]  # of a Gated DeltaNet: see models/deltanet.py

# {"model.embed_tokens.weight": [V, D], "model.layers": {"mlp.up_proj.weight": [L, F, D], ...}, ...}
LayerParams = dict[str, Array]
PolicyParams = dict[str, Array | LayerParams]
Params = dict[str, Array | LayerParams | PolicyParams]  # params[CRITIC] is a second trunk
Weights = dict[str, Array | list[LayerParams]]  # what sampling reads: cast, layers as a list, matrices transposed
Adapters = dict[str, Array]  # {"mlp.up_proj.lora_A.weight": [L, r, D], "mlp.up_proj.lora_B.weight": [L, F, r], ...}
Policy = dict[str, Array | LayerParams | list[LayerParams] | Adapters]  # Params, or Weights with Adapters


def make_policy(base: Weights | None, trained: Adapters | Policy) -> Policy:
    """Returns the policy of what is trained: adapters over a base, or, if there is no base, all parameters."""
    return base | {ADAPTERS: trained} if base else trained


class RecurrentState(NamedTuple):
    """State of a layer after the last token of each row, instead of a cache of keys and values."""

    columns: Float[Array, "B W F"]  # inputs of the convolution: those of the last tokens
    memory: Memory  # float32
