"""What fits into a device's memory: decided from sizes before the first step, and said in a sentence when it does not.

Letters: T row length, L layers, D width, F width of the MLP, H query heads, K key heads, C channels of a head, V
vocabulary.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from utils.devices.sharding import Layout, bytes_on_device
from utils.settings.config import option
from utils.settings.errors import UserError, fail
from utils.training.batching import bucket

USABLE = 0.9  # of the memory: the rest is fragments, and what was compiled
PLENTY, ENOUGH = 32768, 8192  # tokens of a micro-batch: more gain nothing; with fewer it pays to recompute instead
PLENTY_ON_CPU, ENOUGH_ON_CPU = 2048, 512  # 768 to 3072 were equally fast on two cores, and 4096 and more slower
SMALLER = "take --optimizer adafactor, --grad_dtype bfloat16, shorter rows (--num_generation_tokens) or more devices"
LOGITS = 3 * 4 * (1 << 27)  # bytes of a chunk of the head, its softmax and its gradient: see LOGIT_ELEMENTS


@dataclass(frozen=True)
class MemoryConfig:
    """Memory."""

    remat: str = option(
        "auto", "what the backward pass of a layer recomputes: less memory, more work; auto: by the memory there is",
        ["auto", "none", "dots", "full"],
    )  # fmt: skip
    tokens_per_microbatch: int = option(
        0, "tokens, with padding, per device in one forward and backward pass; changes results by rounding, since sums "
        "have another order; 0: by the memory there is"
    )
    grad_dtype: str = option("", "of gradients summed over micro-batches; empty: float32", ["", "bfloat16", "float32"])

    def __post_init__(self):
        if self.tokens_per_microbatch < 0:
            raise UserError("--tokens_per_microbatch must be at least 1, or 0 to be chosen")


class Sizes(NamedTuple):
    """Bytes on one device."""

    held: int  # parameters, optimiser state, reference: there all the time
    gradients: int  # of a micro-batch, and their sum
    sampling_copy: int
    kv_row: int  # the cache of a row of full length, and of what it grew from
    available: int


def activation_bytes(model, remat: str, width: int) -> tuple[int, int]:
    """Bytes for each token of rows of `width`: kept from the forward pass, and in use by one layer's backward pass.

    The factors are those of compiled programs: see bench/memory.py.
    """
    D, F = model.hidden_size, model.intermediate_size
    heads = (model.num_attention_heads + 2 * model.num_key_value_heads) * model.head_dim
    scores = 2 * model.num_attention_heads * width if model.kernel == "plain" else 0  # in quarters
    products = heads + 3 * D + 2 * F  # results of matrix products, and the layer's input
    kept = {"none": 2 * heads + 9 * D + 9 * F + scores, "dots": products, "full": D}[remat]
    item = jnp.dtype(model.dtype).itemsize
    return item * model.num_hidden_layers * kept, item * (products + scores)


def update_bytes(sizes: Sizes, model, remat: str, num_tokens: int, width: int) -> int:
    """Bytes in use on a device at the peak of an update with micro-batches of `num_tokens`."""
    kept, working = activation_bytes(model, remat, width)
    return sizes.held + sizes.gradients + num_tokens * kept + max(num_tokens * working, LOGITS)


def measure(config, model, layout: Layout, state, reference=None) -> Sizes:
    """The sizes of a training run; what is held is looked up, not estimated."""
    params, tp = bytes_on_device(state.params), layout.mesh.shape["tp"]
    item = jnp.dtype(model.dtype).itemsize
    return Sizes(
        bytes_on_device((state, reference)),
        params + params // 4 * jnp.dtype(config.grad_dtype or "float32").itemsize,
        model.num_parameters * item // tp,
        model.cache_bytes // tp * longest_row(config) * 5 // 3,
        int(USABLE * layout.device_memory),
    )


def longest_row(config) -> int:
    return bucket(config.prompt_length + config.num_generation_tokens)


def fit_memory(config, model, layout: Layout, state, reference=None) -> tuple[Any, Any, list[str]]:
    """The settings and the model with what is left open decided, and what to say about memory.

    --remat recomputes as little as leaves room for ENOUGH tokens in a micro-batch.
    """
    sizes, width = measure(config, model, layout, state, reference), longest_row(config)
    plenty, enough = (PLENTY_ON_CPU, ENOUGH_ON_CPU) if layout.is_cpu else (PLENTY, ENOUGH)
    plenty = max(plenty, width)

    def tokens(remat: str) -> int:
        """The largest power of two that fits, `plenty` at most; 0: not even one row does."""
        sums = (plenty >> i for i in range((plenty // width).bit_length()))
        return next((n for n in sums if update_bytes(sizes, model, remat, n, width) < sizes.available), 0)

    choices = [config.remat] if config.remat != "auto" else ["none", "dots", "full"]
    wanted = config.tokens_per_microbatch or enough
    remat = next((remat for remat in choices if tokens(remat) >= min(wanted, plenty)), choices[-1])
    chosen = config.tokens_per_microbatch or tokens(remat) or width
    config = replace(config, remat=remat, tokens_per_microbatch=chosen)
    return config, replace(model, remat=remat), describe(sizes, config, model)


def describe(sizes: Sizes, config, model) -> list[str]:
    """Bytes of sampling and update in words, and what to lower where they do not fit."""
    rows, tokens, width = config.inference_batch_per_device, config.tokens_per_microbatch, longest_row(config)
    fixed = sizes.held + sizes.sampling_copy
    sampling, update = fixed + rows * sizes.kv_row, update_bytes(sizes, model, config.remat, tokens, width)
    said = [
        f"memory of a device: {gigabytes(sizes.available)} GB to use, {gigabytes(sizes.held)} held; sampling "
        f"{gigabytes(sampling)} with {rows} rows, update {gigabytes(update)} with --remat {config.remat} "
        f"--tokens_per_microbatch {tokens}; attention: {model.kernel}"
    ]
    if sampling > sizes.available:
        fitting = max(0, sizes.available - fixed) // sizes.kv_row
        said.append(
            f"the KV cache of {rows} rows x {width} tokens will not fit when all are long: lower "
            f"--inference_batch_per_device to {fitting}" if fitting else f"sampling will not fit: {SMALLER}"
        )  # fmt: skip
    if update > sizes.available:
        lower = [f"--tokens_per_microbatch to {max(width, tokens // 2)}"] * (tokens > width)
        lower += ["--remat to full"] * (config.remat != "full")
        said.append(f"the update will not fit: lower {' or '.join(lower)}" if lower else f"no update fits: {SMALLER}")
    return said


def gigabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.3g}"


@contextlib.contextmanager
def out_of_memory(flag: str, value: int, more: str = "") -> Iterator[None]:
    """Ends the program with what to lower to what, instead of a traceback, when a device has no memory left."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        what = f"lower --{flag} from {value} to {value // 2}" if value > 1 else SMALLER
        fail(f"a device ran out of memory: {what}{more}; the same command then goes on from what was saved last")
