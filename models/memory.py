"""Memory of a device: settings chosen from sizes before the first step, and a sentence if something does not fit.

Letters: T row length, L layers, D width, F width of the MLP, H query heads, K key heads, C channels of a head, V
vocabulary.
"""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from models.architecture import LINEAR, Decoder, is_spec
from models.attention import SKIPPING
from models.names import LAYERS
from models.pages import Paging, page_bytes
from utils.batching import MicrobatchShape, choose_shapes, power_above
from utils.devices.sharding import Layout, bytes_on_device
from utils.settings.errors import UserError, fail
from utils.settings.options import option

USABLE = 0.9  # share of the memory: the rest is for fragments and compiled programs
TIGHT = 0.8  # share of the usable memory above which start-up prints a note
PLENTY, ENOUGH = 16384, 4096  # packed tokens of a micro-batch: with more nothing is gained, with fewer by recomputing
PLENTY_ON_CPU, ENOUGH_ON_CPU = 1024, 256
FEW_SUMS = 8  # micro-batches whose sum in bfloat16 keeps five of its eight bits of each
MOST_SLOTS = 1024  # slots of a device: on an H100 a step of 1,024 rows took 1.5 times as long as one of 512
MOST_ROWS_ON_CPU = 512  # sampled at once: more gain nothing, and other programs share a CPU's memory
FEW_ROWS = 16  # sampled at once: up to these, start-up prints a note
SMALLER = "take --optimizer adafactor, --grad_dtype bfloat16, shorter rows (--num_generation_tokens) or more devices"
# Copies of a layer's experts that each device holds if fsdp shards them: gathered, in the order of their product, and
# of their gradients. Fitted to programs of Qwen3-30B-A3B: eight H200 take 0.89 of the estimate, eight v5p 1.04.
GATHERED_EXPERTS = 13
LOGITS = 3 * 4 * (1 << 27)  # bytes of a chunk of the head, its softmax and its gradient: see LOGIT_ELEMENTS


@dataclass(frozen=True)
class MemoryConfig:
    """Memory."""

    remat: str = option(
        "auto",
        "What the backward pass recomputes to save memory; none: nothing; dots: all but matrix products; full: each "
        "layer (least memory, most work); auto: the first of these that fits in memory",
        ["auto", "none", "dots", "full"],
        resumable=True,
    )
    tokens_per_microbatch: int = option(
        0,
        "Packed tokens on each device in one forward and backward pass; a prompt that rows share counts once; results "
        "differ by rounding only; 0: as many as fit in memory",
        resumable=True,
    )
    offload: str = option(
        "",
        "What is kept in the host's memory; optimizer: its state, which is on the devices during its step only; "
        "results are the same; empty: nothing",
        ["", "optimizer"],
        resumable=True,
    )
    grad_dtype: str = option(
        "", "Data type of the sum of gradients over micro-batches; empty: float32", ["", "bfloat16", "float32"]
    )

    def __post_init__(self):
        if self.tokens_per_microbatch < 0:
            raise UserError("--tokens_per_microbatch must not be negative: give 1 or more, or 0 to have it chosen")


# When rollouts are sampled: between updates, with --ahead 1 at the same time, or on devices outside of --mesh.
BETWEEN, BESIDE, ELSEWHERE = "between", "beside", "elsewhere"


class Room(NamedTuple):
    """The mesh that samples, and the bytes that each of its devices has for the rows that are sampled at once."""

    layout: Layout
    num_bytes: int


class Sizes(NamedTuple):
    """Bytes on one device."""

    held: int  # parameters, optimizer state, reference, a copy that samples beside updates: there all the time
    gradients: int  # gradients of a micro-batch, and their sum
    sampling_copy: int
    kv_row: int  # cache and state of a row of full length, with the copies that they were gathered from
    available: int
    step: int = 0  # at the peak of the optimizer's step, whose state is held by the host meanwhile; 0: it is held here
    schedule: str = BETWEEN  # when rollouts are sampled
    num_chains: int = 1  # micro-batches at the same time
    rollout: Layout | None = None  # the mesh that samples

    def without_rows(self, update: int) -> int:
        """Bytes in use while rows are sampled, without the rows' own; `update`: bytes of an update."""
        between = self.held + self.sampling_copy
        return max(update, between) if self.schedule == BESIDE else between


def activation_bytes(model: Decoder, remat: str, shape: MicrobatchShape) -> tuple[int, int]:
    """Bytes of a micro-batch: kept from the forward pass, and in use by one layer's backward pass.

    Matrix products are of packed tokens, attention of rows with their padding. The factors come from compiled programs:
    see bench/memory.py.
    """
    D = model.hidden_size
    F, copies = mlp_activations(model)
    is_tpu = runs_on(model, "tpu")
    has_no_copies = runs_on(model, "gpu") and replace(model, remat=remat).is_unrolled
    num_tokens = shape.num_packed
    num_columns = shape.num_rows * shape.width
    padding = max(0, num_columns - num_tokens)
    kept = working = 0
    for kind in model.kinds:
        heads, inner = mixer_activations(model, kind, shape.width)
        products = heads + 3 * D + 2 * F  # results of matrix products, and the layer's input
        everything = 2 * heads + 9 * D + 9 * F
        if is_tpu:  # whose compiler keeps more of attention and less of MLPs, with gaps between: a tenth, fitted
            everything = 3 * heads + 8 * D + 6 * F
            products *= 1.1
        if has_no_copies:  # fitted to Qwen2.5-0.5B and Qwen3-1.7B, 4 and 8 layers
            everything = 2 * heads + 9 * D + 3 * F
        of_rows = num_columns * inner + padding * 2 * heads
        per_token = {"none": everything, "dots": products, "full": D}[remat]
        kept += num_tokens * per_token + (of_rows if remat == "none" else 0)
        working = max(working, num_tokens * (products + copies) + of_rows + padding * 2 * heads)
    item = jnp.dtype(model.dtype).itemsize
    return int(item * kept), int(item * working)


def runs_on(model: Decoder, platform: str) -> bool:
    """True if the model's mesh is of this platform: cpu, gpu or tpu."""
    return model.mesh is not None and model.mesh.devices.flat[0].platform == platform


def mlp_activations(model: Decoder) -> tuple[int, int]:
    """Returns the numbers for each token of an MLP or of experts: width of the hidden layer, and copies."""
    if not model.num_experts:
        return model.intermediate_size, 0
    if model.expert_product == "dense":
        width = model.num_experts * model.moe_intermediate_size
        return width, 4 * width  # both factors of the hidden layer, weighted and not
    width = model.num_experts_per_tok * model.moe_intermediate_size
    return width, 3 * model.num_experts_per_tok * model.hidden_size  # of tokens, and of outputs in two orders


def mixer_activations(model: Decoder, kind: str, width: int) -> tuple[int, int]:
    """Returns the numbers for each token of attention or of a Gated DeltaNet.

    They are the results of matrix products, and scores of attention or numbers in chunks. The latter are float32 and
    count as several of the dtype of the matmuls.
    """
    if kind != LINEAR:
        num_queries = (1 + model.output_gate) * model.num_attention_heads
        scores = 2 * model.num_attention_heads * width if model.kernel == "plain" else 0  # in quarters
        return (num_queries + 2 * model.num_key_value_heads) * model.head_dim, scores
    from models.deltanet import CHUNK

    shape = model.delta
    # Fitted to float32 programs that XLA:CPU compiled, 8 heads of 64 channels: from 0.9 to 1.2 of what they take. Those
    # of Qwen3.5-4B in bfloat16 for an H200 take twice as much (bench/compiled.py).
    head_size = 12 * shape.key_channels + 10 * shape.value_channels + 20 * CHUNK
    num_matmul_numbers = 1 if jnp.dtype(model.dtype).itemsize == 4 else 4
    heads = shape.conv_width + shape.value_width + 2 * shape.num_value_heads
    return heads, num_matmul_numbers * shape.num_value_heads * head_size


def update_bytes(sizes: Sizes, model: Decoder, remat: str, shape: MicrobatchShape) -> int:
    """Bytes in use on a device at the peak of an update with micro-batches of this shape."""
    kept, working = activation_bytes(model, remat, shape)
    activations = kept + max(working, LOGITS)
    return max(sizes.held + sizes.num_chains * (sizes.gradients + activations), sizes.step)


def gradient_bytes(model: Decoder, layout: Layout, trained: PyTree) -> int:
    """Bytes on a device of a micro-batch's gradients, and of weights that are gathered or cast for them."""
    params = bytes_on_device(trained)
    tp = layout.mesh.shape["tp"]
    item = jnp.dtype(model.dtype).itemsize
    head_size = model.vocab_size * model.hidden_size // tp
    head = experts = 0
    if layout.mesh.shape["fsdp"] > 1:  # the head is gathered, and its gradient is summed before it is sharded
        head = (item + 4) * head_size
        layer = model.expert_parameters(model.num_experts) // model.num_hidden_layers // tp
        experts = GATHERED_EXPERTS * layer * item
    num_bytes = params + max(head, experts)
    if not runs_on(model, "tpu") or LAYERS not in trained:
        return num_bytes
    # XLA for TPU casts all layers before its loops over them, and holds the head's gradient in two layouts. Where the
    # layers get their gradients, the gathered head has gone.
    cast = params // 4 * item
    second_layout = 4 * head_size
    return num_bytes - min(params, head) + cast + second_layout


def measure_sizes(
    config: MemoryConfig,
    model: Decoder,
    layout: Layout,
    state: PyTree,
    others: PyTree,
    row_length: int,
    schedule: str = BETWEEN,
    rollout_tp: int = 0,
) -> Sizes:
    """Returns the sizes of a training run; held arrays are looked up, not estimated."""
    available = int(USABLE * layout.device_memory)
    gradient_item = jnp.dtype(config.grad_dtype or "float32").itemsize
    summed = bytes_on_device(state.params) // 4 * gradient_item
    held = bytes_on_device((state, others))
    offloaded = bytes_on_device(state.opt_state) if config.offload else 0
    rollout, sampling_copy, kv_row = layout, 0, 0
    if schedule != ELSEWHERE:
        rollout = choose_rollout(model, layout, available - held + offloaded, row_length, rollout_tp)
        kv_row = kv_row_bytes(model, rollout, row_length)
        has_copy = LAYERS in state.params or model.merges_adapters
        sampling_copy = weights_bytes(model, rollout) if has_copy else 0
    if schedule == BESIDE:  # a held-out evaluation makes another one
        held += sampling_copy
    step = held + summed if config.offload else 0
    held -= offloaded
    return Sizes(
        held=held,
        gradients=summed + gradient_bytes(model, layout, state.params),
        sampling_copy=sampling_copy,
        kv_row=kv_row,
        available=available,
        step=step,
        schedule=schedule,
        num_chains=layout.num_chains(model.num_parameters),
        rollout=rollout,
    )


def weights_bytes(model: Decoder, layout: Layout) -> int:
    """Bytes on a device of this mesh of a copy of the weights that samples; what tp does not divide is whole."""
    specs = jax.tree.leaves(model.weights_table(), is_leaf=is_spec)
    shards = (layout.sharding(*spec, rollout=True).shard_shape(spec.shape) for spec in specs)
    return jnp.dtype(model.dtype).itemsize * sum(map(math.prod, shards))


def choose_rollout(
    model: Decoder, layout: Layout, free: int, row_length: int, rollout_tp: int, num_rows: int = FEW_ROWS
) -> Layout:
    """Returns the mesh that samples: a copy of the weights lies on the fewest devices that have room for rows beside.

    `free`: bytes of a device beside what is held. Weights below adapters are sampled as they are sharded.
    Raises: UserError for a --rollout_tp by which weights cannot be sharded.
    """
    fsdp, tp = layout.mesh.shape["fsdp"], layout.mesh.shape["tp"]
    # From fsdp=4,tp=2 to tp=4 XLA returns whole arrays: these two shardings do not nest.
    factors = [n for n in range(1, fsdp + 1) if fsdp % n == 0 and (tp == 1 or n in (1, fsdp))]
    choices = {tp * n: layout.with_tp(tp * n) for n in ([1] if model.lora_rank else factors)}
    if rollout_tp in choices:
        return choices[rollout_tp]
    if rollout_tp:
        reason = "weights below adapters are sampled as --mesh tp shards them, which" if model.lora_rank else "the mesh"
        raise UserError(
            f"--rollout_tp {rollout_tp} is invalid, since {reason} allows {', '.join(map(str, choices))}: give one of "
            "these, or 0 to have it chosen"
        )
    for rollout in choices.values():
        if (free - weights_bytes(model, rollout)) // row_bytes(model, rollout, row_length) >= num_rows:
            break
    return rollout  # the last one shards most


def kv_row_bytes(model: Decoder, layout: Layout, row_length: int) -> int:
    """Bytes per device of a full-length row's KV cache and state, with their copies during a gather."""
    cache = model.cache_bytes // num_parts(layout, model.num_key_value_heads)
    state = model.state_bytes // num_parts(layout, model.delta.num_value_heads) if model.delta else 0
    return cache * row_length * 5 // 3 + 2 * state


def row_bytes(model: Decoder, layout: Layout, row_length: int) -> int:
    """Bytes per device of a row that is sampled: its cache and state, its logits, and the arrays of sampling."""
    return kv_row_bytes(model, layout, row_length) + 3 * 4 * model.vocab_size // num_parts(layout, model.vocab_size)


def num_parts(layout: Layout, size: int) -> int:
    """Returns into how many parts tp shards a dimension of this size; a size that it does not divide stays whole."""
    tp = layout.mesh.shape["tp"]
    return tp if size % tp == 0 else 1


def rows_that_fit(room: int, model: Decoder, layout: Layout, row_length: int) -> int:
    """Returns how many rows each device can sample at once in `room` bytes when all get long; 1 at least."""
    num_rows = room // row_bytes(model, layout, row_length)
    return max(1, min(num_rows // 2, MOST_ROWS_ON_CPU) if layout.is_cpu else num_rows)


def pages_that_fit(room: int, model: Decoder, layout: Layout, paging: Paging, longest: int, num_rows: int) -> Paging:
    """Returns the slots and pages of a cache in `room` bytes of each device, for at most `num_rows` at once.

    Raises: UserError if not even one row of the `longest` tokens fits.
    """
    shards = layout.row_shards
    bytes_of_page = page_bytes(model, paging.page) // num_parts(layout, model.num_key_value_heads)
    bytes_of_slot = row_bytes(model, layout, 0)
    width = -(-longest // paging.page)  # pages of the longest row
    pages_beside = room // bytes_of_page
    # More slots than rows that the pages hold would be computed for nothing: rows have a quarter of the most tokens.
    num_slots = min(power_above(-(-num_rows // shards)), MOST_SLOTS, power_above(4 * max(1, pages_beside // width)))
    while num_slots > 1 and num_slots * bytes_of_slot > room // 4:
        num_slots //= 2
    num_pages = min((room - num_slots * bytes_of_slot) // max(1, bytes_of_page), num_slots * width)
    if num_pages < width:
        raise UserError(
            f"the cache of one row of {longest:,} tokens needs {gigabytes(width * bytes_of_page)} GB of a device, and "
            f"{gigabytes(room)} GB are free: lower --num_generation_tokens or --prompt_length, or {SMALLER}"
        )
    return replace(paging, num_pages=num_pages * shards, num_slots=num_slots * shards)


def sampling_room(
    model: Decoder, layout: Layout, params: PyTree, row_length: int, rollout_tp: int = 0, num_rows: int = FEW_ROWS
) -> Room:
    """Returns devices and room for rows of this length, at least `num_rows` at once if they fit, without training."""
    free = int(USABLE * layout.device_memory) - bytes_on_device(params)
    rollout = choose_rollout(model, layout, free, row_length, rollout_tp, num_rows)
    return Room(rollout, max(0, free - weights_bytes(model, rollout)))


def describe_rollout(model: Decoder, layout: Layout, rollout: Layout) -> list[str]:
    """Returns a line on how many devices shard the sampling weights, if training shards them differently."""
    (before, whole), (now, part) = ((x.mesh.shape["tp"], gigabytes(weights_bytes(model, x))) for x in (layout, rollout))
    line = f"sampling: tp shards the weights over {now} devices, {part} GB on each; a copy on {before} takes {whole}"
    return [f"{line} (--rollout_tp)"] if now != before else []


def describe_whole(model: Decoder, *layouts: Layout) -> list[str]:
    """Returns a line for each tp of these meshes that leaves something whole, because it does not divide its number."""
    sizes = {
        "attention heads": model.num_attention_heads,
        "key heads": model.num_key_value_heads,
        "MLP columns": model.moe_intermediate_size or model.intermediate_size,
        "ids of the vocabulary": model.vocab_size,
        "heads of linear attention": model.delta.num_value_heads if model.delta else 0,
    }
    lines = []
    for tp in sorted({layout.mesh.shape["tp"] for layout in layouts}):
        whole = [f"{size:,} {name}" for name, size in sizes.items() if size % tp]
        if whole:
            lines.append(f"tp={tp} does not divide {', '.join(whole)}: each of the {tp} devices computes all of them")
    return lines


class MemoryPlan(NamedTuple):
    """Settings chosen by the available memory, and notes printed at the start."""

    remat: str
    tokens_per_microbatch: int
    sampling_room: Room
    notes: tuple[str, ...]


def fit_memory(
    config: MemoryConfig,
    model: Decoder,
    layout: Layout,
    state: PyTree,
    others: PyTree,
    row_length: int,
    most_rows: int,
    num_sampled_rows: int,
    schedule: str = BETWEEN,
    rollout_tp: int = 0,
) -> MemoryPlan:
    """Chooses unset options: the --remat that recomputes least while ENOUGH tokens fit at once.

    `others`: a reference, the base below adapters. `most_rows`: rows of an optimizer batch on a device.
    `num_sampled_rows`, `rollout_tp`: 0 to have them chosen. `schedule`: when rows are sampled.
    """
    sizes = measure_sizes(config, model, layout, state, others, row_length, schedule, rollout_tp)
    plenty, enough = (PLENTY_ON_CPU, ENOUGH_ON_CPU) if layout.is_cpu else (PLENTY, ENOUGH)
    plenty = max(plenty, row_length)

    limit = (sizes.held + sizes.available) // 2 if schedule == BESIDE else sizes.available  # rows get half of the rest

    def update(remat: str, num_tokens: int) -> int:
        """Returns the bytes of the largest micro-batch."""
        shapes = choose_shapes(num_tokens, row_length, most_rows, model.kernel in SKIPPING)
        return max(update_bytes(sizes, model, remat, shape) for shape in shapes)

    def fitting_tokens(remat: str) -> int:
        """Returns the largest power of two that fits, `plenty` at most; 0: not even one row does."""
        choices = (plenty >> i for i in range((plenty // row_length).bit_length()))
        return next((n for n in choices if update(remat, n) < limit), 0)

    choices = ["none", "dots", "full"] if config.remat == "auto" else [config.remat]
    requested = min(config.tokens_per_microbatch or enough, plenty)
    remat = next((remat for remat in choices if fitting_tokens(remat) >= requested), choices[-1])
    num_tokens = config.tokens_per_microbatch or fitting_tokens(remat) or row_length
    num_bytes = update(remat, num_tokens)
    room = max(0, sizes.available - sizes.without_rows(num_bytes))
    num_rows = num_sampled_rows or min(rows_that_fit(room, model, sizes.rollout, row_length), FEW_ROWS)
    notes = describe_whole(model, layout, sizes.rollout)
    num_sums = -(-most_rows * row_length // num_tokens)
    if config.grad_dtype == "bfloat16" and num_sums > FEW_SUMS:
        notes.append(
            f"--grad_dtype bfloat16 sums up to {num_sums} micro-batches in bfloat16, and above {FEW_SUMS} rounding may "
            "lose what they add: raise --tokens_per_microbatch, or leave out --grad_dtype"
        )
    notes += describe_memory(sizes, model, remat, num_tokens, num_bytes, row_length, num_rows)
    return MemoryPlan(remat, num_tokens, Room(sizes.rollout, room), tuple(notes))


def describe_memory(
    sizes: Sizes, model: Decoder, remat: str, num_tokens: int, update: int, row_length: int, num_sampled_rows: int
) -> list[str]:
    """Returns, if memory is tight, the bytes of sampling and of an `update` in words, and what to lower."""
    sampling = sizes.without_rows(update) + num_sampled_rows * sizes.kv_row
    if max(sampling, update) < TIGHT * sizes.available:
        return []
    notes = [
        f"memory of a device: {gigabytes(sizes.available)} GB to use, {gigabytes(sizes.held)} held; sampling "
        f"{gigabytes(sampling)} with {num_sampled_rows} rows at once, update {gigabytes(update)} with --remat {remat} "
        f"--tokens_per_microbatch {num_tokens}; attention: {model.kernel}"
    ]
    if sampling > sizes.available and sizes.kv_row:  # 0: rows are sampled elsewhere
        fitting = max(0, sizes.available - sizes.without_rows(update)) // sizes.kv_row
        advice = (
            f"the KV cache of {num_sampled_rows} rows x {row_length} tokens will not fit when all are long: lower "
            f"--inference_batch_per_device to {fitting}"
        )
        notes.append(advice if fitting else f"sampling will not fit: {SMALLER}")
    if update > sizes.available:
        lower = []
        if num_tokens > row_length:
            lower.append(f"--tokens_per_microbatch to {max(row_length, num_tokens // 2)}")
        if remat != "full":
            lower.append("--remat to full")
        notes.append(f"the update will not fit: lower {' or '.join(lower)}" if lower else f"no update fits: {SMALLER}")
    return notes


def gigabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.3g}"


@contextlib.contextmanager
def out_of_memory(flag: str, value: int, more: str = "") -> Iterator[None]:
    """Ends the program with the option to lower, instead of a traceback, when a device has no memory left."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        what = f"lower --{flag} from {value} to {value // 2}" if value > 1 else SMALLER
        resume = "with the folder of this run as --save_dir it then resumes from the last save"
        fail(f"a device ran out of memory: {what}{more}; {resume}")
