"""Train, valid and test splits without common problems; overlap of a training set with test problems is removed."""

import json
import re
import zlib
from collections.abc import Iterable
from typing import TYPE_CHECKING

from utils.settings.errors import UserError

if TYPE_CHECKING:
    from envs.data.rows import Row

LATEX_SPELLINGS = {
    "\\left": " ", "\\right": " ", "\\dfrac": "\\frac", "\\tfrac": "\\frac",
    "\\(": " ", "\\)": " ", "\\[": " ", "\\]": " ", "\\,": " ", "\\!": " ",
}  # fmt: skip
MEANINGLESS = re.compile(r"\.+(?!\d)|[,;:?]+(?!\s*\d)|[$\\{}]+")  # punctuation, but not in 3.5 or (1, 2); braces
MATH = re.compile(r"\$+[^$]*\$+|\\\(.*?\\\)|\\\[.*?\\\]", re.DOTALL)
LETTER = r"[^\W\d_]"  # $A B C$ is printed as ABC
BETWEEN_LETTERS = re.compile(rf"(?<=(?<!{LETTER}){LETTER})[\s{{}}]+(?={LETTER}(?!{LETTER}))")
SYMBOL = re.compile(r"\d+|[^\W\d_]+|[^\w\s]|_")  # a number, a word, or one other character


def split_rows(
    rows: "list[Row]", one_in: float, tests: "list[Row] | None", by_row: bool = False
) -> "dict[str, list[Row]]":
    """Returns the rows of each split in their order: those with the smallest digests of their prompts are held out.

    One prompt in `one_in` is for test, unless there are `tests`, and half as many for valid; at least one each. All
    rows of a prompt are in one split; `by_row`: each counts alone.
    """
    prompts = [(json.dumps(row.prompt), i * by_row) for i, row in enumerate(rows)]
    ranked = sorted(dict.fromkeys(prompts), key=lambda prompt: zlib.crc32(prompt[0].encode()))
    num_prompts = len(ranked)
    by_split = {} if tests is None else {"test": tests}
    for name, divisor in {"test": one_in, "valid": 2 * one_in}.items():
        if name in by_split:
            continue
        size = min(max(round(num_prompts / divisor), 1), len(ranked) - 1)
        held_out, ranked = set(ranked[:size]), ranked[size:]
        by_split[name] = [row for row, prompt in zip(rows, prompts, strict=True) if prompt in held_out]
    trained = set(ranked)
    return by_split | {"train": [row for row, prompt in zip(rows, prompts, strict=True) if prompt in trained]}


def select_split(
    rows: "list[Row]", split: str, one_in: int, tests: "list[Row] | None" = None, may_overlap: bool = False
) -> "tuple[list[Row], str]":
    """Returns the rows of a split, without those that another split holds in another spelling, and a note on both.

    `tests`: rows of a test file. `may_overlap`: no row is removed. Raises: UserError if none is left.
    """
    by_split = split_rows(rows, one_in, tests, by_row=may_overlap)
    held_out = {"train": by_split["valid"] + by_split["test"], "valid": by_split["test"], "test": []}
    selected, num_removed = remove_overlap(by_split[split], [] if may_overlap else held_out[split])
    note = f"; {len(selected):,} {'to train on' if split == 'train' else f'in the {split} split'}"
    if num_removed:
        note += f", {num_removed:,} removed because a held-out split has them"
    if split == "train":
        sizes = {name: len(by_split[name]) for name in ("valid", "test")}
        note += "".join(f"; {size:,} in the {name} split" for name, size in sizes.items() if size)
    if not selected:
        raise UserError(f"no row is left for the {split} split, of {len(rows):,} rows in the data{note}: add rows")
    return selected, note


def remove_overlap(rows: "list[Row]", others: "Iterable[Row]") -> "tuple[list[Row], int]":
    """Returns the rows whose problem is not among `others`, whatever its spelling, and how many were removed."""
    taken = {normal_form(row.prompt) for row in others}
    unseen = [row for row in rows if normal_form(row.prompt) not in taken]
    return unseen, len(rows) - len(unseen)


def normal_form(prompt: str | list[dict[str, str]]) -> str:
    """Returns the numbers, words and symbols of a prompt, with a blank between them, in one of LaTeX's spellings.

    Without case and most punctuation. White space counts only where it separates two numbers or two words.
    """
    text = prompt if isinstance(prompt, str) else "\n".join(message["content"] for message in prompt)
    text = MATH.sub(lambda math: BETWEEN_LETTERS.sub("", math[0]), text)
    for spelling, plain in LATEX_SPELLINGS.items():
        text = text.replace(spelling, plain)
    symbols = SYMBOL.findall(MEANINGLESS.sub(" ", text.casefold()))
    return " ".join(symbols) or text  # a prompt of such characters alone stays as it is
