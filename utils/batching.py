"""Shapes: few of them, so that little is compiled, and rows of similar length together, so that little is padding."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import jax
import numpy as np
from jaxtyping import Bool, Int, Shaped

Tree = TypeVar("Tree")  # a pytree of [B, ...] arrays
RowNumbers = Int[np.ndarray, "_"]  # numbers of rows
EMPTY = -1  # stands for no row


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def bucket(n: int) -> int:
    """Returns the next of 32, 48, 64, 96, 128, 192, ...: at most a third of it is padding."""
    power = max(32, power_above(n))
    three_quarters = power * 3 // 4
    return three_quarters if 32 < power and n <= three_quarters else power


def power_above(n: int) -> int:
    """Returns the first of 1, 2, 4, 8, ... from n on."""
    return 1 << (n - 1).bit_length()


def group_counts(largest: int) -> list[int]:
    """Returns the numbers of groups that may be sampled at once: a call of fewer takes hardly less time."""
    return [-(-largest // divisor) for divisor in (1, 2, 4, 8)]


def padding_of(path: Sequence[object]) -> int:
    """Returns the padding of an array at this path of a pytree: 1 in `extras`, which may be divisors; 0 elsewhere."""
    return int(any(getattr(key, "name", "") == "extras" for key in path))


def resize_columns(x: Shaped[np.ndarray, "..."], width: int, padding_value: int = 0) -> Shaped[np.ndarray, "..."]:
    """Returns a [B, T, ...] array cut or padded to a number of columns; a [B] array as it is."""
    if x.ndim == 1:
        return x
    padding = [(0, 0), (0, max(0, width - x.shape[1])), *[(0, 0)] * (x.ndim - 2)]
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


class RowSizes(NamedTuple):
    """Prompts and lengths of rows, and the target tokens: those whose log-probability is computed."""

    prompts: Int[np.ndarray, "B"]  # number of the prompt
    prompt_lengths: Int[np.ndarray, "B"]
    lengths: Int[np.ndarray, "B"]  # of prompt and completion
    is_target: Bool[np.ndarray, "B T"]  # tokens of completions: neither those of observations nor forced ones

    def select(self, rows: Int[np.ndarray, "R"]) -> "RowSizes":
        """Returns the sizes of these rows; sizes of EMPTY are 0."""
        is_row = rows != EMPTY
        return RowSizes(*(x[rows] * is_row.reshape(-1, *[1] * (x.ndim - 1)) for x in self))


def measure_rows(
    tokens: Int[np.ndarray, "B T"],
    prompt_lengths: Int[np.ndarray, "B"],
    lengths: Int[np.ndarray, "B"],
    is_target: Bool[np.ndarray, "B T"],
) -> RowSizes:
    """Returns the lengths of rows, which of them have the same prompt, and which tokens are targets."""
    prompts = [row[:length].tobytes() for row, length in zip(tokens, prompt_lengths, strict=True)]
    numbers = {prompt: i for i, prompt in enumerate(dict.fromkeys(prompts))}
    return RowSizes(np.array([numbers[prompt] for prompt in prompts]), prompt_lengths, lengths, is_target)


def empty_rows(num_rows: int, width: int) -> RowSizes:
    """Returns the sizes of rows without tokens."""
    return RowSizes(*np.zeros((3, num_rows), int), np.zeros((num_rows, width), bool))


class MicrobatchShape(NamedTuple):
    """What a micro-batch has room for on each shard."""

    num_rows: int
    width: int  # columns of a row
    num_packed: int  # packed tokens: see Packing


class Microbatch(NamedTuple):
    """Rows in equal parts for each shard, and the shape of these parts."""

    rows: Int[np.ndarray, "B"]  # EMPTY: none
    shape: MicrobatchShape


CALL = 1024  # packed tokens that take as long as what a micro-batch costs besides: its launch, its sum of gradients
COLUMNS, COLUMNS_OF_WIDTHS = 6, 2  # columns of rows for each packed token


def choose_shapes(num_packed: int, longest: int, most_rows: int, skips_padding: bool) -> tuple[MicrobatchShape, ...]:
    """Returns the shapes of micro-batches of `num_packed` tokens: all that a run compiles.

    `longest`: most columns of a row; `most_rows`: of an optimizer batch on a shard. If attention skips padding, all
    rows have one width, and a second shape has a quarter of the tokens; otherwise there are three widths.
    """

    def shape_of(width: int, num_packed: int, columns: int) -> MicrobatchShape:
        num_rows = max(1, min(most_rows, columns * num_packed // width))
        return MicrobatchShape(num_rows, width, max(width, min(num_packed, num_rows * width)))  # any row fits

    whole = round_up(longest, 32)
    if skips_padding:
        shape = shape_of(whole, num_packed, COLUMNS)
        part = MicrobatchShape(-(-shape.num_rows // 2), whole, round_up(-(-shape.num_packed // 4), 32))
        return shape, part
    widths = [max(64, round_up(-(-longest // divisor), 32)) for divisor in (2, 4)]
    widths = [whole, *(width for width in dict.fromkeys(widths) if width < whole)]
    return tuple(shape_of(width, num_packed, COLUMNS_OF_WIDTHS) for width in widths)


def plan_microbatches(sizes: RowSizes, shapes: Sequence[MicrobatchShape], shards: int) -> list[Microbatch]:
    """Puts all rows into the cheapest micro-batches of these shapes, equally full, with prompts shared.

    Each width, longest first, gets as many micro-batches as the rows need that are longer than the next width, of
    shapes that hold any of them. Shorter rows fill the room that is left. Raises: ValueError for a row longer than all.
    """
    if (longest := int(sizes.lengths.max())) > shapes[0].width:
        raise ValueError(f"a row has {longest} tokens, more than the {shapes[0].width} columns that are compiled")
    order = np.lexsort((-sizes.lengths, sizes.prompts))
    groups = np.split(order, np.flatnonzero(np.diff(sizes.prompts[order])) + 1)
    is_left = np.ones(order.size, bool)
    plan = []
    widths = [*dict.fromkeys(shape.width for shape in shapes), -1]
    for width, narrower in itertools.pairwise(widths):
        of_width = [shape for shape in shapes if shape.width == width and shape.num_packed >= min(longest, width)]
        is_needed = is_left & (sizes.lengths > narrower)
        needed = sizes.select(np.flatnonzero(is_needed))
        groups_left = select_groups(groups, is_needed, sizes) + select_groups(groups, is_left & ~is_needed, sizes)
        for attempt in itertools.count(64):  # a 64th more room each time
            room = [-(-x * attempt // 64 // shards) for x in (packed_tokens(needed), needed.lengths.size)]
            bins = choose_bins(of_width, *room)
            filled = fill(groups_left, sizes, [shape for shape in bins for _ in range(shards)])
            is_filled = np.isin(np.arange(order.size), np.concatenate([[], *filled]))
            if not (is_needed & ~is_filled).any():
                break
        is_left &= ~is_filled
        for i, shape in enumerate(bins):
            rows = np.full((shards, shape.num_rows), EMPTY)
            for row, part in zip(rows, filled[i * shards : (i + 1) * shards], strict=True):
                row[: len(part)] = part
            plan.append(Microbatch(rows.ravel(), shape))
    return plan


def select_groups(groups: Sequence[RowNumbers], is_chosen: Bool[np.ndarray, "B"], sizes: RowSizes) -> list[RowNumbers]:
    """Returns the rows of each group that are chosen, groups in the order of their longest rows."""
    parts = [part for group in groups if (part := group[is_chosen[group]]).size]
    return sorted(parts, key=lambda part: -sizes.lengths[part[0]])


def choose_bins(shapes: Sequence[MicrobatchShape], num_tokens: int, num_rows: int) -> list[MicrobatchShape]:
    """Returns the cheapest micro-batches of a large and a small shape that hold so many tokens and rows of a shard."""
    large, small = shapes[0], shapes[-1]

    def number(shape: MicrobatchShape, num_tokens: int, num_rows: int) -> int:
        return max(0, -(-num_tokens // shape.num_packed), -(-num_rows // shape.num_rows))

    choices = []
    for n in range(number(large, num_tokens, num_rows) + 1):
        num_small = number(small, num_tokens - n * large.num_packed, num_rows - n * large.num_rows)
        choices.append([large] * n + [small] * num_small)
    return min(choices, key=lambda bins: sum(CALL + shape.num_packed for shape in bins))


def fill(groups: Sequence[RowNumbers], sizes: RowSizes, bins: Sequence[MicrobatchShape]) -> list[RowNumbers]:
    """Returns the rows of each bin. Rows of a group go into the emptiest bin, as many as fit, and so on."""
    room = np.array([shape.num_packed for shape in bins])
    room_for_rows = np.array([shape.num_rows for shape in bins])
    completions = sizes.lengths - sizes.prompt_lengths
    filled = [[np.zeros(0, int)] for _ in bins]
    for group in groups if bins else []:
        prompt = max(0, int(sizes.prompt_lengths[group[0]]) - 1)
        while group.size:
            emptiest = int(np.argmax(np.where(room_for_rows > 0, room, -1)))
            num_tokens = prompt + np.cumsum(completions[group[: room_for_rows[emptiest]]])
            num_fitting = int(np.searchsorted(num_tokens, room[emptiest], side="right"))
            if not num_fitting:
                break
            filled[emptiest].append(group[:num_fitting])
            room[emptiest] -= num_tokens[num_fitting - 1]
            room_for_rows[emptiest] -= num_fitting
            group = group[num_fitting:]
    return [np.concatenate(rows) for rows in filled]


def packed_tokens(sizes: RowSizes) -> int:
    """Returns the tokens of a packing: of completions, with the last token of the prompt, and of each prompt."""
    _, firsts = np.unique(sizes.prompts, return_index=True)
    prompts = np.maximum(sizes.prompt_lengths[firsts] - 1, 0)
    return int((sizes.lengths - sizes.prompt_lengths).sum() + prompts.sum())
