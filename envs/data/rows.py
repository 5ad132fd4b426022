"""Rows of data sets: from local files in the formats of the public repositories, or from the Hugging Face hub."""

import json
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from envs.data.files import JSON, NOT_UTF8, Located, RawRow, read_file
from envs.data.hub import read_split
from utils.settings.errors import UserError, counted, describe_error

SKIP = "or skip malformed rows with skip_bad_rows=true in --env_options"
QUESTIONS = ("prompt", "question", "messages", "problem", "query", "instruction", "input", "text")
ANSWERS = ("answer", "solution", "response", "output", "completion", "label", "target")


class LeftOut(ValueError):
    """Raised for a row that is left out, and counted under this reason."""


@dataclass(frozen=True)
class Source:
    """Location of the rows of a split: `files` of --data_dir, or "owner/name[:config]" of the `hub` or its folder."""

    files: tuple[str, ...]
    hub: str = ""
    hub_split: str = "train"
    url: str = ""

    @property
    def advice(self) -> str:
        """Returns the sentence that names the files and where to get them."""
        name = self.hub.partition(":")[0]
        folder = f"FOLDER/{name}" if self.files else "FOLDER"
        download = f"`hf download {name} --repo-type dataset --local-dir {folder}` on a machine with a network"
        if not self.files:  # the data set was named, not an environment
            return f"get it by {download}, and name the folder"
        ways = [f"put {self.files[0]} (from {self.url}) into a folder FOLDER"] * bool(self.url)
        ways += [f"get it by {download}"] * bool(self.hub)
        return f"{', or '.join(ways)}, and give --data_dir FOLDER"


class Row(NamedTuple):
    """A problem of a data set: the prompt (text, or chat messages), and the reference that grades the reply."""

    prompt: str | list[dict[str, Any]]
    answer: Any
    place: str = ""  # file and line of the row


Convert = Callable[[RawRow], Row]  # raises KeyError, TypeError or ValueError for a malformed row


def load_rows(
    name: str,
    source: Source,
    data_dir: str,
    convert: Convert,
    skip_bad_rows: bool,
    may_repeat: bool = False,
    noun: str = "problem",
    skip: str = SKIP,
) -> tuple[list[Row], str]:
    """Returns the rows of a source in order, and a note on those left out: repeated, empty, or without an answer.

    `may_repeat`: prompts may repeat. `noun`: what the note calls a row; `skip`: advice on a malformed row. Raises:
    UserError without data or rows; for a malformed row, by file and line, unless `skip_bad_rows`.
    """
    origin, located = read_source(name, source, data_dir)
    rows, seen, left_out, total = [], set(), Counter(), 0
    for total, (location, raw) in enumerate(located, 1):  # noqa: B007 (read below)
        try:
            if isinstance(raw, Exception):
                raise raw
            check_text(raw)
            row = convert(raw)
            key = json.dumps(row.prompt)
        except LeftOut as reason:
            left_out[str(reason)] += 1
            continue
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            if not skip_bad_rows:
                raise UserError(explain_bad_row(location, error, raw, skip)) from error
            left_out["malformed"] += 1
            continue
        is_repeated = key in seen and not may_repeat
        why = "empty" if not row.prompt or row.answer in ("", None) else "repeated" if is_repeated else ""
        seen.add(key)
        if why:
            left_out[why] += 1
        else:
            rows.append(row._replace(place=location))
    reasons = ", ".join(f"{count:,} {why}" for why, count in left_out.items())
    if not rows:
        found = f"no usable row, but {reasons}: correct them" if total else "no row: write rows into it"
        raise UserError(f"{name}: {origin} holds {found}")
    rest = f" of {counted(total, 'row')} (left out: {reasons})" if reasons else ""
    return rows, f"{name}: {counted(len(rows), noun)}{rest}"


def check_text(row: RawRow) -> None:
    """Raises UserError for text with half a surrogate pair, which JSON can hold, and which other encodings become."""
    try:
        json.dumps(row, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError as error:
        character = error.object[error.start]
        is_byte = "\udc80" <= character <= "\udcff"  # of another encoding
        raise UserError(f"it holds {character!a}, which is {NOT_UTF8 if is_byte else 'not UTF-8'}") from error


def explain_bad_row(location: str, error: Exception, row: RawRow | Exception, skip: str) -> str:
    """Returns why a row cannot be used, and advice; for a missing column, the names of the existing ones."""
    if not isinstance(error, KeyError):
        return f"{location} is malformed: {error}. Correct it, {skip}"
    columns = ", ".join(map(repr, row))[:200]
    prompt, answer = first_of(QUESTIONS, row), first_of(ANSWERS, row)
    reward = "" if answer else " (with a --reward, or an --episode that has get_reward or step, rows need no answer)"
    names = f"prompt={prompt or 'COLUMN'},answer={answer or 'COLUMN'}{reward}"
    name_them = f"the environment dataset takes their names by --env_options {names}"
    return f"{location} has no column {error}, only {columns}: {name_them}. Name them, correct the row, {skip}"


def first_of(names: Sequence[str], row: RawRow) -> str:
    """Returns the first of these names that is a column of a row; "" if none is."""
    return next((name for name in names if name in row), "")


def find_local(source: Source, data_dir: str) -> Path | None:
    """Returns the first of a source's files, or a copy of the hub's folder, in --data_dir or in the current folder."""
    root = Path(os.path.expanduser(data_dir)).absolute()
    hub = source.hub.partition(":")[0]
    places = [path for path in map(root.joinpath, source.files) if path.is_file() and (data_dir or not hub)]
    if hub:
        name = Path(hub).name
        copies = [root / hub, root / name, *[root] * (root.name == name)] if data_dir else [root / hub]
        places += filter(Path.is_dir, copies)
    return next(iter(places), None)


def read_source(name: str, source: Source, data_dir: str) -> tuple[str, Located]:
    """Returns where the rows of a source are, and these with their locations. Raises: UserError with what to do."""
    place = find_local(source, data_dir)
    hub, _, config = source.hub.partition(":")
    if place and place.is_file():
        return str(place), read_file(place)
    if not place and (data_dir or not hub):
        raise UserError(f"--data_dir {data_dir} has none of {', '.join(source.files)}: {source.advice}")
    origin = str(place or hub)
    try:
        return origin, read_split(origin, config, source.hub_split)
    except UserError:
        raise
    except Exception as error:  # noqa: BLE001 (those of the hub's client and of its network libraries)
        reason = describe_error(error)
        raise UserError(f"{name} could not load {hub} from the hub ({reason}). Without it: {source.advice}") from error


def text_answer(value: JSON) -> str:
    """Returns a reference as text: 142.0 is "142", "025" "25". Raises TypeError unless it is text or a number."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise TypeError(f"its answer is a {type(value).__name__}, not text or a number")
    value = str(value).strip()
    return str(int(value)) if value.isascii() and value.isdigit() and len(value) < 20 else value


def text_prompt(value: JSON) -> str:
    """Returns a question as text. Raises TypeError for anything else."""
    if not isinstance(value, str):
        raise TypeError(f"its question is a {type(value).__name__}, not text")
    return value if value.strip() else ""
