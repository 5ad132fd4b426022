"""Shapes: few of them, so that little is compiled, and rows of similar length together, so that little is padding."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeVar

import jax
import numpy as np
from jaxtyping import Bool, Int, Shaped

Tree = TypeVar("Tree")  # a pytree of [B, ...] arrays
EMPTY = -1  # in the place of a row's number


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def bucket(n: int) -> int:
    """Returns the next of 32, 48, 64, 96, 128, 192, ...: at most a third of it is padding."""
    power = max(32, power_above(n))
    three_quarters = power * 3 // 4
    return three_quarters if 32 < power and n <= three_quarters else power


def few_widths(n: int, longest: int) -> int:
    """Returns the next of five widths from n on: quarters of the longest row, and half a quarter; 64 at least."""
    quarter = max(64, round_up(-(-longest // 4), 32))
    step = quarter // 2 if n <= quarter // 2 and quarter >= 128 else quarter
    return min(round_up(n, step), round_up(max(n, longest), 32))


def row_width(n: int, longest: int) -> int:
    """Returns the width of rows of n columns in an update: one of four quarters, whose padding only attention reads."""
    return few_widths(max(n, -(-longest // 4)), longest)


def power_above(n: int) -> int:
    """Returns the first of 1, 2, 4, 8, ... from n on."""
    return 1 << (n - 1).bit_length()


def group_counts(largest: int) -> list[int]:
    """Returns the numbers of groups that may be sampled at once: a call of fewer takes hardly less time."""
    return [-(-largest // divisor) for divisor in (1, 2, 4, 8)]


def padding_of(path: Sequence[object]) -> int:
    """Returns what pads an array at this path of a pytree: 1 in `extras`, so that dividing by it is safe, else 0."""
    return int(any(getattr(key, "name", "") == "extras" for key in path))


def resize_columns(x: Shaped[np.ndarray, "..."], width: int, padding_value: int = 0) -> Shaped[np.ndarray, "..."]:
    """Returns a [B, T, ...] array cut or padded to a number of columns; a [B] array as it is."""
    if x.ndim == 1:
        return x
    missing = max(0, width - x.shape[1])
    padding = [(0, 0)] * x.ndim
    padding[1] = (0, missing)
    return np.pad(x[:, :width], padding, constant_values=padding_value)


def select_rows(tree: Tree, rows: Int[np.ndarray, "B"], width: int | None = None) -> Tree:
    """Returns these rows of every array of a pytree, resized to `width` columns if that is given."""
    if width is None:
        return jax.tree.map(lambda x: x[rows], tree)
    return jax.tree.map_with_path(lambda path, x: resize_columns(x[rows], width, padding_of(path)), tree)


def concatenate(trees: Sequence[Tree]) -> Tree:
    """Returns pytrees of [B, ...] arrays one below the other, columns padded to the widest; a single one as it is."""
    if len(trees) == 1:
        return trees[0]
    widths = [x.shape[1] for tree in trees for x in jax.tree.leaves(tree) if x.ndim > 1]

    def join(path: Sequence[object], *arrays: np.ndarray) -> np.ndarray:
        return np.concatenate([resize_columns(x, max(widths), padding_of(path)) for x in arrays])

    return jax.tree.map_with_path(join, *trees)


def live_slots(
    slots: Int[np.ndarray, "S"], done: Bool[np.ndarray, "B"], shards: int, fewest: int
) -> Int[np.ndarray, "K"] | None:
    """Returns the slots to continue with after compaction, -1 for an empty one; None while too many rows are live.

    `slots` holds the row of each sampler slot (-1: empty), cut into equal shards; a row stays in its shard. The sizes
    of shards are ..., 256, 192, 128, 96, 64, 32, 16, and so on until `fewest` slots are left in all: few, so that all
    of them can be compiled ahead.
    """
    size = len(slots) // shards
    is_live = slots >= 0
    is_live[is_live] = ~done[slots[is_live]]
    places = [shard * size + np.flatnonzero(live) for shard, live in enumerate(is_live.reshape(shards, size))]
    smaller = smaller_size(size)
    if smaller < max(-(-fewest // shards), *map(len, places)):
        return None
    kept = np.full((shards, smaller), -1)
    for row, shard_places in zip(kept, places, strict=True):
        row[: len(shard_places)] = shard_places
    return kept.ravel()


def smaller_size(size: int) -> int:
    """Returns the next of ..., 256, 192, 128, 96, 64, 32, 16, ... below: steps of few rows cost hardly less."""
    half = power_above(size) // 2
    three_quarters = half * 3 // 2
    return three_quarters if 64 < three_quarters < size else half


class RowSizes(NamedTuple):
    """Prompts and lengths of rows, and the tokens that are scored."""

    prompts: Int[np.ndarray, "B"]  # number of the prompt
    prompt_lengths: Int[np.ndarray, "B"]
    lengths: Int[np.ndarray, "B"]  # of prompt and completion
    scored: Bool[np.ndarray, "B T"]  # tokens of completions: neither those of observations nor forced ones

    def select(self, rows: Int[np.ndarray, "R"]) -> "RowSizes":
        """Returns the sizes of these rows; those of EMPTY are 0."""
        is_row = rows != EMPTY
        return RowSizes(*(x[rows] * is_row.reshape(-1, *[1] * (x.ndim - 1)) for x in self))


def measure_rows(
    tokens: Int[np.ndarray, "B T"],
    prompt_lengths: Int[np.ndarray, "B"],
    lengths: Int[np.ndarray, "B"],
    scored: Bool[np.ndarray, "B T"],
) -> RowSizes:
    """Returns the lengths of rows, which of them have the same prompt, and which tokens are scored."""
    numbers = {}
    prompts = [row[:length].tobytes() for row, length in zip(tokens, prompt_lengths, strict=True)]
    prompt_numbers = [numbers.setdefault(prompt, len(numbers)) for prompt in prompts]
    return RowSizes(np.array(prompt_numbers), prompt_lengths, lengths, scored)


def full_rows(num_rows: int, width: int) -> RowSizes:
    """Returns the sizes of rows that fill all columns, each with a prompt of one token of its own; all is scored."""
    scored = np.ones((num_rows, width), bool)
    return RowSizes(np.arange(num_rows), np.ones(num_rows, int), np.full(num_rows, width), scored)


class Fractions(NamedTuple):
    """Sizes of packings: eighths of a micro-batch's columns for tokens, and of the packed tokens for scored ones.

    Each pair is a shape to compile, for each width of rows.
    """

    packed: Sequence[int] = (2, 3, 4, 6, 8)
    scored: Sequence[int] = (4, 8)


ON_ACCELERATORS = Fractions(packed=(2, 4))  # they compile a gradient for up to three minutes
FEW_SHAPES = Fractions(packed=(4, 8), scored=(8,))
ONE_SHAPE = Fractions(packed=(8,), scored=(8,))
SEVERAL, MANY = 4, 8  # micro-batches of a batch from which on the padding of the last one counts less: one packing


class Microbatch(NamedTuple):
    """Rows of similar length in equal parts for each shard, and the shape that they are packed in: see Packing."""

    rows: Int[np.ndarray, "B"]  # EMPTY: none
    width: int
    num_scored: int  # tokens of a shard
    num_packed: int


class Room(NamedTuple):
    """Limits of micro-batches: of columns of rows, of rows on a shard, and of columns of a row."""

    tokens_per_shard: int
    shards: int
    most_rows: int
    longest: int
    attention_cost: float  # of a pair of columns of a row, in packed tokens
    fractions: Fractions


def plan_microbatches(
    sizes: RowSizes,
    tokens_per_shard: int,
    shards: int,
    max_rows: int,
    attention_cost: float = 0.0,
    longest: int = 0,
    fractions: Fractions = Fractions(),  # noqa: B008 (frozen)
) -> list[Microbatch]:
    """Cuts rows into micro-batches of at most `tokens_per_shard` columns of rows for each shard, longest first.

    The cheaper of two orders is taken: by length, which leaves little padding to attention, or prompt by prompt, which
    shares most. `attention_cost` is that of a pair of columns of a row, in packed tokens.

    A run has few shapes to compile. The width of a micro-batch, one of `row_width` with `longest` (most columns of a
    row; 0: of these), gives its rows, no more than hold `max_rows`. The packed tokens that it has room for are one of
    the `fractions`; where a batch has SEVERAL micro-batches a half, where it has MANY five eighths, which rows of
    nearly all widths fill.
    """
    most_rows = power_above(-(-max_rows // shards))
    longest = longest or int(sizes.lengths.max())
    num_microbatches = most_rows * longest / tokens_per_shard
    if num_microbatches >= SEVERAL:
        fractions = fractions._replace(packed=(5,) if num_microbatches >= MANY else (4,))
    room = Room(tokens_per_shard, shards, most_rows, longest, attention_cost, fractions)
    num_prompts = sizes.prompts.max() + 1
    longest_of_prompt = np.zeros(num_prompts, int)
    np.maximum.at(longest_of_prompt, sizes.prompts, sizes.lengths)
    longest = longest_of_prompt[sizes.prompts]
    by_length = np.argsort(-sizes.lengths, kind="stable")
    by_prompt = np.lexsort((sizes.prompts, -longest))
    plans = [list(cut_rows(order, sizes, room)) for order in (by_prompt, by_length)]

    def plan_cost(plan: list[Microbatch]) -> float:
        return sum(cost(len(part.rows) // shards, part.width, part.num_packed, room) for part in plan)

    return with_scored(min(plans, key=plan_cost), sizes, room)


def cost(num_rows: int, width: int, num_packed: int, room: Room) -> float:
    """Returns the cost of a micro-batch of this shape for a shard, in packed tokens."""
    return num_packed + room.attention_cost * num_rows * width**2


def cut_rows(order: Int[np.ndarray, "B"], sizes: RowSizes, room: Room) -> Iterator[Microbatch]:
    """Yields micro-batches of rows in this order, of the same room for each width."""
    shapes: dict[int, tuple[int, int]] = {}
    while order.size:
        width = row_width(int(sizes.lengths[order].max()), room.longest)
        if width not in shapes:
            shapes[width] = choose_shape(order, sizes, width, room)
        num_rows, num_packed = shapes[width]
        parts = fill(order, sizes, num_rows, num_packed, room.shards)
        order = order[sum(map(len, parts)) :]
        yield Microbatch(pad_rows(parts, num_rows), width, num_packed, num_packed)


def choose_shape(order: Int[np.ndarray, "B"], sizes: RowSizes, width: int, room: Room) -> tuple[int, int]:
    """Returns the rows and packed tokens of a shard that hold most tokens of the next rows for their cost."""
    fitting = max(1, room.tokens_per_shard // width)
    num_rows = min(room.most_rows, 1 << fitting.bit_length() - 1)  # the power of two below

    def tokens_for_cost(num_packed: int) -> float:
        parts = fill(order, sizes, num_rows, num_packed, room.shards)
        num_tokens = sum(packed_tokens(sizes.select(part)) for part in parts)
        return num_tokens / cost(num_rows, width, num_packed, room)

    choices = [max(width, -(-num_rows * width * eighths // 8)) for eighths in room.fractions.packed]  # any row fits
    return num_rows, max(choices, key=tokens_for_cost)


def fill(
    order: Int[np.ndarray, "B"], sizes: RowSizes, num_rows: int, num_packed: int, shards: int
) -> list[Int[np.ndarray, "..."]]:
    """Returns the first rows for each shard: as many as it has room for, or equally many where that is enough."""
    equal_parts = np.array_split(order[: shards * num_rows], shards)
    if all(packed_tokens(sizes.select(part)) <= num_packed for part in equal_parts):
        return equal_parts
    parts = []
    for _ in range(shards):
        num_tokens = cumulative_tokens(sizes.select(order[:num_rows]))
        end = int(np.searchsorted(num_tokens, num_packed, side="right"))
        parts.append(order[:end])
        order = order[end:]
    return parts


def with_scored(plan: list[Microbatch], sizes: RowSizes, room: Room) -> list[Microbatch]:
    """Returns the micro-batches with room for the largest share of scored tokens, however full each packing is."""
    parts = [sizes.select(rows) for part in plan for rows in np.split(part.rows, room.shards)]
    share = max(part.scored[:, 1:].sum() / max(1, packed_tokens(part)) for part in parts)
    eighths = next(eighths for eighths in room.fractions.scored if eighths >= 8 * share)
    return [part._replace(num_scored=-(-part.num_packed * eighths // 8)) for part in plan]


def packed_tokens(sizes: RowSizes) -> int:
    """Returns the tokens of a packing: those of completions, with the last one of the prompt, and of each prompt."""
    return int(cumulative_tokens(sizes)[-1]) if sizes.prompts.size else 0


def cumulative_tokens(sizes: RowSizes) -> Int[np.ndarray, "B"]:
    """Returns the tokens of packings of the first row, of the first two, and so on."""
    _, firsts = np.unique(sizes.prompts, return_index=True)
    num_tokens = sizes.lengths - sizes.prompt_lengths
    num_tokens[firsts] += np.maximum(sizes.prompt_lengths[firsts] - 1, 0)
    return np.cumsum(num_tokens)


def pad_rows(parts: Sequence[Int[np.ndarray, "..."]], num_rows: int) -> Int[np.ndarray, "B"]:
    """Returns the rows of all shards, `num_rows` of each, EMPTY ones behind those that are there."""
    rows = np.full((len(parts), num_rows), EMPTY)
    for row, part in zip(rows, parts, strict=True):
        row[: len(part)] = part
    return rows.ravel()
