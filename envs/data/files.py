"""Files of rows: JSON, JSON lines, CSV and Parquet, recognized by their content, not by their names."""

import csv
import gzip
import io
import json
import zlib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import BinaryIO

from utils.settings.errors import UserError, check_installed, describe_error

JSON = str | int | float | bool | None | list["JSON"] | dict[str, "JSON"]
RawRow = dict[str, JSON]  # values of a row, by column
Located = Iterator[tuple[str, RawRow | Exception]]  # each row with its location (file:line), or why there is none

BATCH = 256  # rows of Parquet that are decoded at once
GZIP, PARQUET = b"\x1f\x8b", b"PAR1"  # how such files begin
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
MAX_FIELD = 1 << 30  # characters of a value of CSV: the limit of the module csv is 131,072
NOT_UTF8 = "not UTF-8; from Latin-1, `iconv -f latin1 -t utf-8 FILE > NEW` converts it"
LISTS = ("data", "rows", "train", "test", "examples", "instances", "questions", "problems", "samples")
SPEAKERS = ("role", "from")  # keys of a message that name who speaks


def read_file(path: Path) -> Located:
    """Yields the rows of a file in the format that its beginning shows. Raises: UserError; OSError."""
    try:
        with open_file(path) as file:
            is_parquet = file.read(len(PARQUET)) == PARQUET
        first = b"" if is_parquet else next((line for _, line in read_lines(path)), b"")
        separator = next((sign for sign in ",;\t|" if sign.encode() in first), "," if ".csv" in path.suffixes else "")
        if is_parquet:
            yield from read_parquet(path)
        elif not first:
            raise UserError(f"{path} is empty: write rows into it")
        elif first.startswith((b"{", b"[")):
            yield from read_json(path)
        elif separator and b"\0" not in first:
            yield from read_csv(path, separator)
        else:
            raise UserError(
                f"{path} begins with {first[:40]!r}, which is neither JSON nor a line of names: write its rows as "
                "JSON, JSON lines, CSV or Parquet, in UTF-8"
            )
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{path} is not a whole .gz file ({error}): copy it again") from error


def open_file(path: Path) -> BinaryIO:
    """Opens a file to read; a gzip file is decompressed."""
    with open(path, "rb") as file:
        is_gzip = file.read(len(GZIP)) == GZIP
    return gzip.open(path) if is_gzip else open(path, "rb")


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yields the number and the content of each line that is not blank, stripped, and without a mark of UTF-8."""
    with open_file(path) as file:
        for number, line in enumerate(file, 1):
            if content := line.removeprefix(BYTE_ORDER_MARK).strip():
                yield number, content


# JSON


def read_json(path: Path) -> Located:
    """Yields the objects of a file: one on each line, in a list, or in {"data": [...]}. Raises: UserError."""
    lines = [line for _, line in islice(read_lines(path), 2)]
    first_rows = [*map(parse_json, lines)]
    has_row = any(isinstance(row, dict) for row in first_rows)  # the other line may be broken
    if lines[0].startswith(b"{") and has_row and find_rows(first_rows) == first_rows:
        yield from ((f"{path}:{number}", parse_json(line)) for number, line in read_lines(path))
        return
    try:
        with open_file(path) as file:
            value = json.loads(file.read().decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is {NOT_UTF8}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not JSON ({error}): correct it, or copy it again") from error
    yield from ((f"{path}, row {i}", check_row(row)) for i, row in enumerate(find_rows([value]), 1))


def find_rows(values: list[JSON]) -> list[JSON]:
    """Returns the rows among the values of a file."""
    match values:
        case [list(rows)]:
            return rows
        case [dict(value)]:
            named = [x for name, x in value.items() if name in LISTS or len(value) == 1]
            lists = [x for x in named if is_list_of_objects(x) and not is_conversation(x)]
            return lists[0] if len(lists) == 1 else values
    return values


def is_list_of_objects(value: JSON) -> bool:
    return isinstance(value, list) and all(isinstance(x, dict) for x in value)


def is_conversation(value: JSON) -> bool:
    """True for a list of objects with the name of a speaker."""
    return bool(value) and is_list_of_objects(value) and all(any(key in x for key in SPEAKERS) for x in value)


def parse_json(line: bytes) -> RawRow | Exception:
    """Returns the object in a line, or an error if there is none."""
    try:
        return check_row(json.loads(line.decode()))
    except UnicodeDecodeError as error:
        return ValueError(f"it is {NOT_UTF8} ({error.reason} at byte {error.start})")
    except (ValueError, RecursionError) as error:
        return ValueError(f"not JSON ({error})")


def check_row(row: JSON) -> RawRow | Exception:
    return row if isinstance(row, dict) else ValueError("it is not an object with named columns")


# CSV and Parquet


def read_csv(path: Path, separator: str) -> Located:
    """Yields the rows below a line of names. Raises: UserError if a quote does not end well."""
    csv.field_size_limit(MAX_FIELD)
    with open_file(path) as file:
        # A byte that is not UTF-8 becomes half a surrogate pair, which `load_rows` rejects with its row.
        text = io.TextIOWrapper(file, "utf-8-sig", "surrogateescape", newline="")
        rows = csv.reader(text, strict=True, delimiter=separator)
        names, first = [], 1  # line that begins a row
        try:
            for values in rows:
                location, first = f"{path}:{first}", rows.line_num + 1
                if not names:
                    names = values
                    check_columns(path, names)
                elif len(values) == len(names):
                    yield location, dict(zip(names, values, strict=True))
                elif values:
                    yield location, ValueError(f"it has {len(values)} columns, and the first line names {len(names)}")
        except csv.Error as error:
            raise UserError(f"{path}:{first} begins a row that is not CSV ({error}): correct it") from error


def read_parquet(path: Path) -> Located:
    """Yields the rows of a file."""
    check_installed("pyarrow", f"a Parquet file ({path})")
    import pyarrow.parquet

    try:
        with open_file(path) as file:
            opened = pyarrow.parquet.ParquetFile(file)
            check_columns(path, opened.schema_arrow.names)
            rows = (row for batch in opened.iter_batches(BATCH, use_threads=False) for row in batch.to_pylist())
            for i, row in enumerate(rows, 1):
                yield f"{path}, row {i}", without_nulls(row)
    except UserError:
        raise
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        reason = describe_error(error)
        raise UserError(f"{path} is not a whole Parquet file ({reason}): correct it, or copy it again") from error


def check_columns(path: Path, names: list[str]) -> None:
    """Raises UserError if two columns have one name; columns without a name are not read."""
    if repeated := next((name for name in names if names.count(name) > 1), ""):
        raise UserError(f"{path} has several columns {repeated!r}: give each a name of its own")


def without_nulls(value: JSON, is_within: bool = False) -> JSON:
    """Returns a value without the keys of messages and tools that are null: Parquet adds those that others have."""
    if isinstance(value, dict):
        kept = {key: x for key, x in value.items() if x is not None or not is_within}
        return {key: without_nulls(x, is_within or key == "tools" or is_conversation(x)) for key, x in kept.items()}
    return [without_nulls(x, True) for x in value] if is_within and isinstance(value, list) else value
