"""Rows of data sets: from local files in the formats of the public repositories, or from the Hugging Face hub."""

import csv
import gzip
import json
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

READERS = ".jsonl, .json, .csv and .parquet; the first three also .gz"


@dataclass(frozen=True)
class Source:
    """Where the rows of one split are.

    `files`: names to look for in --data_dir, the first that is there counts. `hub`: "owner/name" or
    "owner/name:config" of the data set there, and its `hub_split`. `url`: where people find the files.
    """

    files: tuple[str, ...]
    hub: str = ""
    hub_split: str = "train"
    url: str = ""

    @property
    def advice(self) -> str:
        """What to do when there is no data."""
        name = self.hub.partition(":")[0]
        ways = [f"`hf download {name} --repo-type dataset` on a machine with a network"] * bool(self.hub)
        ways += [self.url] * bool(self.url)
        return f"put {self.files[0]} into a folder FOLDER (from {', or from '.join(ways)}), and give --data_dir FOLDER"


class Row(NamedTuple):
    """A problem of a data set: what the model is asked (text, or chat messages), and what the reply is graded by."""

    prompt: str | list[dict[str, str]]
    answer: Any


Convert = Callable[[dict[str, Any]], Row]  # raises KeyError, TypeError or ValueError for a malformed row


def load(name: str, source: Source, data_dir: str, convert: Convert, skip_bad_rows: bool) -> tuple[list[Row], str]:
    """The rows of a source in its order, without those that repeat a prompt or lack one or an answer; and a note.

    Raises: ValueError when there is no data (with what to do), and, unless `skip_bad_rows`, for the first malformed
    row, by file and line.
    """
    path = find_file(source, data_dir) if data_dir or not source.hub else None
    rows, seen, left_out, total = [], set(), Counter(), 0
    for place, raw in read_file(path) if path else read_hub(name, source):
        total += 1
        try:
            if isinstance(raw, Exception):
                raise raw
            row = convert(raw)
        except (KeyError, TypeError, ValueError) as error:
            if not skip_bad_rows:
                reason = f"it has no {error}" if isinstance(error, KeyError) else error
                raise ValueError(
                    f"{place} is malformed: {reason}. Mend it, or leave such rows out with --env_options "
                    "skip_bad_rows=true"
                ) from error
            left_out["malformed"] += 1
            continue
        key = json.dumps(row.prompt)
        why = "empty" if not row.prompt or row.answer in ("", None) else "repeated" if key in seen else ""
        seen.add(key)
        if why:
            left_out[why] += 1
        else:
            rows.append(row)
    if not rows:
        raise ValueError(f"{name}: {path or source.hub} holds no usable row")
    reasons = ", ".join(f"{count:,} {why}" for why, count in left_out.items())
    return rows, f"{name}: {len(rows):,} problems" + (f" of {total:,} rows; left out: {reasons}" if reasons else "")


def find_file(source: Source, data_dir: str) -> Path:
    """The first file of a source that is in the folder. Raises ValueError when none is."""
    folder = Path(data_dir).expanduser()
    found = next((folder / file for file in source.files if (folder / file).is_file()), None)
    if found is None:
        raise ValueError(f"--data_dir {data_dir} has none of {', '.join(source.files)}: {source.advice}")
    return found


def read_file(path: Path) -> Iterator[tuple[str, dict[str, Any] | Exception]]:
    """Each row of a file with its place (file:line), or the reason why there is none. Raises ValueError, OSError."""
    kind = path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix
    if kind == ".parquet":
        import pyarrow.parquet

        batches = pyarrow.parquet.ParquetFile(path).iter_batches()
        rows = enumerate((row for batch in batches for row in batch.to_pylist()), 1)
        yield from ((f"{path}, row {i}", row) for i, row in rows)
        return
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        if kind == ".jsonl":
            yield from ((f"{path}:{i}", parse_json(line)) for i, line in enumerate(file, 1) if line.strip())
        elif kind == ".json":
            rows = json.loads(file.read())
            if isinstance(rows, dict) and len(rows) == 1:  # {"data": [...]}
                rows = next(iter(rows.values()))
            if not isinstance(rows, list):
                raise ValueError(f"{path} must hold a list of objects")
            yield from ((f"{path}, row {i}", check_row(row)) for i, row in enumerate(rows, 1))
        elif kind == ".csv":
            rows = csv.DictReader((line.decode("utf-8-sig") for line in file), strict=True)
            yield from ((f"{path}:{rows.line_num}", row) for row in rows)
        else:
            raise ValueError(f"{path}: a file of rows is one of {READERS}")


def parse_json(line: bytes) -> dict[str, Any] | Exception:
    """The object in a line, or what is wrong with it."""
    try:
        return check_row(json.loads(line))
    except (ValueError, RecursionError) as error:
        return ValueError(f"not JSON ({error})")


def check_row(row: Any) -> dict[str, Any] | Exception:
    return row if isinstance(row, dict) else ValueError("it is not an object with named columns")


def read_hub(name: str, source: Source) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each row of a data set of the hub (or of its cache on this machine). Raises ValueError with what to do."""
    hub, _, config = source.hub.partition(":")
    try:
        import datasets

        rows = datasets.load_dataset(hub, config or None, split=source.hub_split)
    except ImportError as error:
        raise ValueError(f"{name}: `pip install datasets` to load {hub}, or {source.advice}") from error
    except Exception as error:  # noqa: BLE001 (its own, those of three network libraries, and OSError)
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"{name} could not load {hub} from the hub ({reason}). Without it: {source.advice}") from error
    yield from ((f"{hub}, {source.hub_split} row {i}", row) for i, row in enumerate(rows, 1))


def is_held_out(prompt: Any, one_in: int) -> bool:
    """Whether a problem belongs to the test split of a data set that comes in one piece: a function of its prompt."""
    return zlib.crc32(json.dumps(prompt).encode()) % one_in == 0


def split_rows(rows: list[Row], split: str, one_in: int) -> list[Row]:
    """The rows of this split, about one in `one_in` for the test; no prompt is in both."""
    return [row for row in rows if is_held_out(row.prompt, one_in) == (split == "test")]


def text_answer(value: Any) -> str:
    """A reference as text: 142.0 is "142", "025" is "25". Raises TypeError for what is neither text nor number."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise TypeError(f"its answer is a {type(value).__name__}, not text or a number")
    value = str(value).strip()
    return str(int(value)) if value.isascii() and value.isdigit() and len(value) < 20 else value


def text_prompt(value: Any) -> str:
    """A question as text. Raises TypeError for anything else."""
    if not isinstance(value, str):
        raise TypeError(f"its question is a {type(value).__name__}, not text")
    return value if value.strip() else ""
