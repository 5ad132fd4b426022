"""Train, valid and test splits that share no problem, and what a training set has in common with test problems."""

import json
import re
import zlib
from collections.abc import Iterable

from envs.data import Row
from utils.settings.errors import UserError

LATEX_SPELLINGS = {
    "\\left": "", "\\right": "", "\\dfrac": "\\frac", "\\tfrac": "\\frac",
    "\\(": "", "\\)": "", "\\[": "", "\\]": "", "\\,": "", "\\!": "",
}  # fmt: skip
MEANINGLESS = re.compile(r"[.,;:?]+(?!\s*\d)|[\s$\\{}]+")  # punctuation, but not in 3.5 or (1, 2); white space; braces


def choose_split(identity: str, one_in: int) -> str:
    """Returns the split of a problem, by a digest of the text that must not be in two of them.

    One in `one_in` (2 or more) is for test, half as many are for valid.
    """
    digest = zlib.crc32(identity.encode())
    if digest % one_in == 0:
        return "test"
    return "valid" if digest % (2 * one_in) == 1 else "train"


def select_split(rows: list[Row], split: str, one_in: int, tests: list[Row] | None = None) -> tuple[list[Row], str]:
    """Returns the rows of a split, without those that another split holds in another spelling, and a note on both.

    `tests`: the rows of a test file; without one, some of `rows` are for test.
    Raises: UserError where no row is left.
    """
    by_split = {"train": [], "valid": [], "test": []}
    for row in rows:
        name = choose_split(json.dumps(row.prompt), one_in)
        if name == "test" and tests is not None:
            name = "train"
        by_split[name].append(row)
    if tests is not None:
        by_split["test"] = tests
    held_out = {"train": by_split["valid"] + by_split["test"], "valid": by_split["test"], "test": []}
    selected, num_removed = remove_overlap(by_split[split], held_out[split])
    note = f"; {len(selected):,} in the {split} split"
    if num_removed:
        note += f", {num_removed:,} removed that a held-out split has, too"
    if not selected:
        for_test = "none" if tests is not None else f"one in {one_in}"
        raise UserError(
            f"no row is left for the {split} split{note}: of {len(rows):,} rows, one in {2 * one_in} is for valid, and "
            f"{for_test} for test"
        )
    return selected, note


def remove_overlap(rows: list[Row], others: Iterable[Row]) -> tuple[list[Row], int]:
    """Returns the rows whose problem is not among `others`, whatever its spelling, and how many were removed."""
    taken = {normal_form(row.prompt) for row in others}
    unseen = [row for row in rows if normal_form(row.prompt) not in taken]
    return unseen, len(rows) - len(unseen)


def normal_form(prompt: str | list[dict[str, str]]) -> str:
    """Returns a prompt without case, white space, most punctuation, and LaTeX's spellings of one thing."""
    text = prompt if isinstance(prompt, str) else "\n".join(message["content"] for message in prompt)
    for spelling, plain in LATEX_SPELLINGS.items():
        text = text.replace(spelling, plain)
    return MEANINGLESS.sub("", text.casefold()) or text  # which is made of other characters alone
