"""Results of this device against references: kernels against plain attention, sampler against trainer, float32 on CPU.

    python bench/device_checks.py                            # heads of 128 channels, as kernels need them
    python bench/device_checks.py --layers 28 --vocabulary 151936

Differences are of log-probabilities in nats, and of a gradient as a fraction of its norm. The command ends with status
1 if one is above its limit.
"""

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    import utils.settings.packages  # noqa: F401 (says what to install)

import jax
import numpy as np
from jaxtyping import Float, Int

from bench.bitwise import token_gaps
from bench.common import Figure, environment, make_prompts, report, shape
from core.sampler import Sampler
from models.architecture import Decoder, is_spec
from models.decoder import init_params, token_outputs
from models.names import Array, Params
from utils.devices.sharding import Layout, single_device
from utils.devices.startup import DeviceConfig, make_layout
from utils.settings.config import parse
from utils.settings.options import group, option

NUM_ROWS, NUM_COLUMNS = 8, 256  # of training rows; of sampled ones a quarter is prompt, and one completion
NATS = 0.01  # mean difference of log-probabilities in bfloat16
GRADIENT = 0.03  # difference of gradients in bfloat16
ROUNDING = 1e-4  # of float32, whose products are summed in another order
Result = tuple[Float[np.ndarray, "B T"], Float[np.ndarray, "n"]]


@dataclass(frozen=True)
class Command:
    """Device checks."""

    shape: str = option("Qwen3-0.6B", "Shape of the random model")
    layers: int = option(2, "Layers of the model")
    vocabulary: int = option(4096, "Ids of the model's vocabulary")
    json: str = option("", "File for the figures; empty: not written")
    devices: DeviceConfig = group(DeviceConfig)


def lay_out(model: Decoder, params: Params, layout: Layout) -> Params:
    """Returns parameters that the host holds on the devices, as training has them."""

    def put(spec: tuple, x: np.ndarray) -> jax.Array:
        return jax.device_put(x, layout.sharding(*spec))

    return jax.tree.map(put, model.parameter_table(), params, is_leaf=is_spec)


def train(model: Decoder, params: Params, layout: Layout, tokens: Int[np.ndarray, "B T"]) -> Result:
    """Returns log-probabilities, and the gradient of their sum with a random sign for each row, on the host."""
    model = replace(model, mesh=layout.mesh)
    signs = np.random.default_rng(0).choice([-1.0, 1.0], (len(tokens), 1)).astype(np.float32)

    def loss(params: Params, tokens: Array) -> tuple[Float[Array, ""], Float[Array, "B T"]]:
        logprobs = token_outputs(model, params, tokens).logprobs
        return (signs * logprobs).sum(), logprobs

    gradient = jax.jit(jax.grad(loss, has_aux=True))
    grads, logprobs = layout.fetch(gradient(lay_out(model, params, layout), layout.put(tokens)))
    return logprobs, np.concatenate([np.ravel(x) for x in jax.tree.leaves(grads)])


def compare(name: str, found: Result, expected: Result, nats: float, gradient: float) -> list[tuple[Figure, ...]]:
    """Returns a row of the table for log-probabilities, and one for gradients."""
    logprobs = np.abs(found[0] - expected[0])
    of_norm = np.linalg.norm(found[1] - expected[1]) / np.linalg.norm(expected[1])
    return [
        (f"{name}, log-probabilities", float(logprobs.mean()), float(logprobs.max()), nats),
        (f"{name}, gradient", float(of_norm), float(of_norm), gradient),
    ]


def sampler_gap(model: Decoder, params: Params, layout: Layout, limit: float) -> tuple[Figure, ...]:
    """Returns the row of |log p of the sampler - log p of the trainer| of drawn tokens."""
    model = replace(model, mesh=layout.mesh)
    prompts = make_prompts(model.vocab_size, NUM_ROWS, NUM_COLUMNS // 4)
    settings = NUM_COLUMNS // 4, tuple(range(model.vocab_size // 256))
    sampler = Sampler(model, *settings, max_prompt_tokens=NUM_COLUMNS // 4, layout=layout)
    gap = token_gaps(sampler, lay_out(model, params, layout), prompts, group_size=4)
    cache = model.kv_dtype or model.dtype
    return f"sampler with a cache in {cache}, trainer in {model.dtype}", float(gap.mean()), float(gap.max()), limit


def check(config: Command, layout: Layout) -> Iterator[tuple[Figure, ...]]:
    """Yields what was compared, mean and largest difference, and the limit of the mean."""
    model = replace(shape(config.shape), num_hidden_layers=config.layers, vocab_size=config.vocabulary)
    params = jax.device_get(jax.jit(init_params, static_argnums=0)(model, jax.random.key(0)))
    tokens = np.array(make_prompts(model.vocab_size, NUM_ROWS * layout.row_shards, NUM_COLUMNS), np.int32)
    exact = replace(model, dtype="float32")
    half = replace(model, dtype="bfloat16", mesh=layout.mesh)

    def exactly(work: Callable, *arguments: object) -> Result | tuple[Figure, ...]:
        with jax.default_matmul_precision("highest"):
            return work(*arguments)

    with ThreadPoolExecutor() as pool:  # most of the time is compilation
        in_float32 = pool.submit(exactly, train, exact, params, layout, tokens)
        on_cpu = pool.submit(exactly, train, exact, params, single_device("cpu"), tokens)
        plain = pool.submit(train, replace(half, attention="plain"), params, layout, tokens)
        by_kernel = pool.submit(train, half, params, layout, tokens)
        gaps = [
            pool.submit(sampler_gap, half, params, layout, NATS),
            pool.submit(sampler_gap, replace(half, kv_dtype="int8"), params, layout, 3 * NATS),
            pool.submit(exactly, sampler_gap, exact, params, layout, ROUNDING),
        ]
        # A row is printed as soon as it is there, should the time of a device end before all are.
        yield from compare("bfloat16 against float32", plain.result(), in_float32.result(), NATS, GRADIENT)
        name = f"attention by {half.kernel} against plain"
        yield from compare(name, by_kernel.result(), plain.result(), NATS, GRADIENT)
        yield from compare("float32 against CPU", in_float32.result(), on_cpu.result(), ROUNDING, ROUNDING)
        yield from (gap.result() for gap in gaps)


def main(config: Command) -> None:
    layout = make_layout(config.devices)
    rows = []
    for row in check(config, layout):
        rows.append((*row, "yes" if row[1] <= row[3] else "NO"))
        print(*rows[-1], sep="  ", flush=True)
    columns = ("compared", "mean", "largest", "limit of the mean", "within")
    title = f"Checks of a device, {config.shape} with {config.layers} layers and {config.vocabulary:,} ids"
    report(title, columns, rows, environment(), config.json)
    sys.exit(any(row[-1] == "NO" for row in rows))


if __name__ == "__main__":
    main(parse(Command, sys.argv[1:], __doc__))
