"""CPU seconds that it takes to trace, lower and compile a gradient and a decode segment, and what parts of them add.

    python bench/compile.py                                            # models/tiny, in shapes of the demo
    python bench/compile.py --models small,SmolLM2-135M --rows 16

Each row leaves a part out and says what the rest takes less. Parts share kernels, so that these do not add up. CPU
seconds are of all threads of the process, which other programs of the machine change little.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    import utils.settings.packages  # noqa: F401 (says what to install)

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, PyTree

from bench.common import SHAPES, environment, read_shape, report, shape
from core import learner as learning
from core import sampler as sampling
from core.config import Config
from core.extensions.programs import row_shape, zero_batch
from core.learner import Learner
from core.records import Batch
from core.sampler import SEGMENT
from models import attention, decoder
from models.architecture import Decoder, is_spec
from models.attention import KeyHeads, RowHeads, View
from models.distribution import Distribution, TokenOutputs
from models.logits import LMHeads, TargetColumns
from models.names import Array
from models.optimizers import make_optimizer
from utils.batching import MicrobatchShape
from utils.devices.sharding import Layout, single_device
from utils.settings.config import parse
from utils.settings.options import option

Program = tuple[Callable, tuple]  # a jitted function, and its arguments or their shapes
Patches = Mapping[tuple[object, str], Callable]  # what takes the place of a function of a module or class
STAGES = ("trace", "lower", "XLA")


@dataclass(frozen=True)
class Command:
    """Compile times."""

    models: str = option("models/tiny", f"Folders or shapes, with commas between: {', '.join(SHAPES)}, or published")
    rows: int = option(32, "Rows of the micro-batch, and slots of the sampler")
    columns: int = option(192, "Columns of the rows, and of the completions' cache")
    json: str = option("", "File for the figures; empty: not written")


# Stand-ins, which keep the shapes and compute next to nothing.


def add_heads(q: RowHeads, k: KeyHeads, v: KeyHeads, *_: object) -> Float[Array, "B T H*C"]:
    out = q + jnp.repeat(k + v, q.shape[2] // k.shape[2], axis=2)
    return out.reshape(*out.shape[:2], -1)


def add_new_heads(q: RowHeads, k: KeyHeads, v: KeyHeads, cache: PyTree, **_: object) -> tuple[Array, PyTree]:
    return add_heads(q, k, v), cache


def attend_at_once(q: RowHeads, k: KeyHeads, v: KeyHeads, view: View, *_: object) -> Float[Array, "B T H*C"]:
    mask = attention.causal_mask(q.shape[1], view.window)
    return attention.masked_attention(q, k, v, mask, view.scale)


def sum_of_states(
    _: Distribution, heads: LMHeads, columns: TargetColumns, num_targets: Array | None, is_trained: bool
) -> TokenOutputs:
    total = columns.states.sum(-1)
    return TokenOutputs(total, total)


def weighted_logprobs(outputs: TokenOutputs, batch: Batch, _: object) -> tuple[Float[Array, ""], dict]:
    return (outputs.logprobs * batch.advantages * batch.mask).sum(), {}


def draw_likeliest(_: Distribution, logits: Float[Array, "S V"], uniforms: Float[Array, "S 2"]) -> tuple[Array, ...]:
    return logits.argmax(-1), logits.max(-1) + uniforms[:, 0], jnp.zeros((len(logits), 0), jnp.int32)


LAYER_PARTS = {
    "MLP": {(decoder, "mlp"): lambda model, layer, x: x},
    "norms": {(decoder, "rms_norm"): lambda model, x, gain: x * gain},
    "rotation": {(decoder, "apply_rotary"): lambda heads, angles: heads},
}
GRADIENT_PARTS = LAYER_PARTS | {
    "attention": {(decoder, "train_attention"): add_heads},
    "attention in quarters: at once": {(attention, "plain_attention"): attend_at_once},
    "head and log-probabilities": {(decoder, "chunked_outputs"): sum_of_states},
    "loss and metrics": {(learning, "policy_loss"): weighted_logprobs},
}
DECODE_PARTS = LAYER_PARTS | {
    "attention": {(decoder, "decode_attention"): add_new_heads},
    "draw": {(Distribution, "draw"): draw_likeliest},
    "uniforms": {(sampling, "sampling_uniforms"): lambda keys, steps: jnp.zeros((*steps.shape, 2))},
}


def seconds_of(function: Callable, arguments: tuple, patches: Patches) -> Float[np.ndarray, "3"]:
    """Returns the CPU seconds of the stages of a jitted function, compiled anew with other functions inside."""
    jax.clear_caches()
    with contextlib.ExitStack() as stack:
        for (place, name), other in patches.items():
            stack.enter_context(mock.patch.object(place, name, other))
        clocks = [time.process_time()]
        traced = function.trace(*arguments)
        clocks.append(time.process_time())
        lowered = traced.lower()
        clocks.append(time.process_time())
        lowered.compile()
        clocks.append(time.process_time())
    return np.diff(clocks)


def weight_shapes(table: PyTree) -> PyTree:
    """Returns the shapes of the arrays of a table of weights."""
    return jax.tree.map(lambda spec: jax.ShapeDtypeStruct(spec.shape, jnp.float32), table, is_leaf=is_spec)


def gradient(command: Command, layout: Layout, model: Decoder, is_packed: bool = True) -> Program:
    """Returns the program of a micro-batch, with shapes of its arguments."""
    config = Config()
    num_tokens = command.columns - config.sampling.prompt_length  # so that rows have these columns
    settings = make_optimizer(config.optimizer), layout, config, num_tokens, command.rows * command.columns
    learner = Learner(model, *settings)
    shape_of_rows = MicrobatchShape(command.rows, command.columns, command.rows * command.columns)
    batch, packing = zero_batch(learner, shape_of_rows)
    params = weight_shapes(model.parameter_table())
    sums = params, jax.ShapeDtypeStruct((), jnp.float32)
    arguments = config.objective.loss, config.sampling.distribution, params, sums, batch
    return learning.accumulate, (model, *arguments, packing if is_packed else None)


def decode_segment(command: Command, layout: Layout, model: Decoder) -> Program:
    """Returns the program of 32 decode steps, with shapes of its arguments."""
    slots = row_shape(layout, command.rows)
    heads = model.num_key_value_heads, command.columns, model.head_dim
    cache = [(jax.ShapeDtypeStruct((command.rows, *heads), model.dtype),) * 2] * model.num_hidden_layers
    state = sampling.SlotState(np.int32(0), slots, slots, row_shape(layout, command.rows, 2, dtype=np.uint32))
    weights = weight_shapes(model.weights_table())
    return sampling.decode_segment, (model, Distribution(), SEGMENT, weights, cache, cache, state)


def rows_of(make: Callable[..., Program], parts: Mapping[str, Patches], command: Command, name: str) -> list[list]:
    """Returns the rows of the table of a program: of the whole, and what is saved without each part."""
    layout = single_device()
    model = read_shape(name) if Path(name).is_dir() else shape(name)
    model = replace(model, dtype="float32", remat="none", unroll=model.num_hidden_layers <= 8, mesh=layout.mesh)
    make = partial(make, command, layout)
    seconds_of(*make(replace(model, num_hidden_layers=1)), {})  # imports, and JAX's own first calls
    whole = seconds_of(*make(model), {})
    without = {"all layers but one": seconds_of(*make(replace(model, num_hidden_layers=1)), {})}
    if make.func is gradient:
        without["packing"] = seconds_of(*make(model, is_packed=False), {})
    for part, patches in parts.items():
        without[part] = seconds_of(*make(model), patches)
    rows = [(name, make.func.__name__, "whole", *whole, whole.sum())]
    for part, seconds in without.items():
        saved = whole - seconds
        rows.append((name, make.func.__name__, part, *saved, saved.sum()))
    return rows


def main(command: Command) -> None:
    jax.config.update("jax_enable_compilation_cache", False)
    rows = []
    for name in command.models.split(","):
        rows += rows_of(gradient, GRADIENT_PARTS, command, name)
        rows += rows_of(decode_segment, DECODE_PARTS, command, name)
    title = f"CPU seconds of compiling {command.rows} x {command.columns}, and what each part adds"
    report(title, ("model", "program", "part", *STAGES, "all"), rows, environment(), command.json)


if __name__ == "__main__":
    main(parse(Command, sys.argv[1:], __doc__))
