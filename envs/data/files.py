"""Files of rows: JSON, JSON lines, CSV and Parquet, recognized by their content, not by their names."""

import codecs
import contextlib
import csv
import gzip
import json
import re
import shlex
import zlib
from collections import Counter
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from utils.settings.checks import open_file as open_regular
from utils.settings.errors import UserError, check_installed

if TYPE_CHECKING:
    import pyarrow

JSON = str | int | float | bool | None | list["JSON"] | dict[str, "JSON"]
RawRow = dict[str, JSON]  # values of a row, by column

READ = "write its rows as JSON, JSON lines, CSV or Parquet; the first three may be compressed by gzip"
MAX_ROW_BYTES = 1 << 22  # limit of a line, and of a CSV field that spans several lines
BATCH = 256  # rows of Parquet that are decoded at once
MAX_JSON = 1 << 28  # bytes of a file that holds one value, since it is read at once
NUM_START = 1 << 12  # bytes by which formats are recognized
GZIP, PARQUET = b"\x1f\x8b", b"PAR1"  # how such files begin
NOT_UTF8 = "not UTF-8; from Latin-1, `iconv -f latin1 -t utf-8 FILE > NEW` converts it"
FOREIGN = {  # how files of other formats begin, what they are, and what to do
    b"version https://git-lfs": "a pointer of Git LFS to a file: fetch the file by `git lfs pull`",
    b"PK\x03\x04": "a ZIP archive, as Excel files are: unpack it, or save the table as CSV",
    b"\x28\xb5\x2f\xfd": "compressed by Zstandard: unpack it by `unzstd FILE`",
    b"BZh": "compressed by bzip2: unpack it by `bunzip2 FILE`",
    b"\xfd7zXZ": "compressed by xz: unpack it by `unxz FILE`",
    b"ARROW1": "an Arrow file: write it as Parquet, by `pyarrow.parquet.write_table`",
    b"\xff\xff\xff\xff": "an Arrow stream, as the cache of datasets has them: write it by its `to_parquet`",
    b"SQLite format": "a SQLite database: export the table as CSV",
    b"\x80": "a pickle, which can run code: write the rows as JSON lines",
    b"<": "a web page or XML: download the file itself",
}
LISTS = ("data", "rows", "train", "test", "examples", "instances", "questions", "problems", "samples")
SPEAKERS = ("role", "from")  # keys of a message that name who speaks
SPACE = re.compile(r"\s*")


def read_file(path: Path) -> Iterator[tuple[str, RawRow | Exception]]:
    """Yields each row of a file with its location (file:line), or the reason why there is none.

    Raises: UserError if the file, or the rest of it, cannot be read; OSError.
    """
    try:
        yield from read_rows(path)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{path} is not a whole .gz file ({error}): copy it again") from error


def read_rows(path: Path) -> Iterator[tuple[str, RawRow | Exception]]:
    """Yields the rows of a file as its first bytes show them to be written."""
    with open_file(path) as file:
        start = file.read(NUM_START)
    text = start.removeprefix(codecs.BOM_UTF8).lstrip()
    if start.startswith(PARQUET):
        if begins_with(path, GZIP):
            raise UserError(f"{path} is a Parquet file that is compressed by gzip: unpack it by `gunzip`")
        yield from read_parquet(path)
        return
    if not text:
        raise UserError(f"{path} is empty: write rows into it")
    if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise UserError(f"{path} is UTF-16: convert it by `iconv -f utf-16 -t utf-8 {shlex.quote(str(path))} > NEW`")
    if other := next((what for sign, what in FOREIGN.items() if text.startswith(sign)), ""):
        raise UserError(f"{path} is {other}")
    if b"\0" in start.partition(b"\n")[0]:
        raise UserError(f"{path} holds a zero byte and has no known format: {READ}")
    yield from read_json(path) if looks_like_json(path) else read_csv(path)


def begins_with(path: Path, sign: bytes) -> bool:
    with open_regular(path) as file:
        return file.read(len(sign)) == sign


def looks_like_json(path: Path) -> bool:
    """True for JSON and JSON lines, whose first line may be broken; False for CSV. Raises: UserError for neither."""
    first, second = islice(chain((line for _, line in full_lines(path)), [b"", b""]), 2)
    is_named_csv = ".csv" in path.suffixes
    if first.startswith((b"{", b"[")) or (second.startswith(b"{") and not is_named_csv):
        return True
    if not is_named_csv and not any(sign in first for sign in (b",", b";", b"\t")):
        raise UserError(f"{path} begins with {first[:40]!r}, which is neither JSON nor a line of names: {READ}")
    return False


def open_file(path: Path) -> BinaryIO:
    """Opens a file to read; a gzip file is decompressed."""
    return gzip.open(path) if begins_with(path, GZIP) else open_regular(path)


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yields the number and the content of each line, cut after MAX_ROW_BYTES + 1 bytes."""
    with open_file(path) as file:
        number = 0
        while line := file.readline(MAX_ROW_BYTES + 1):
            number += 1
            rest = line
            while len(rest) > MAX_ROW_BYTES and not rest.endswith(b"\n"):
                rest = file.readline(MAX_ROW_BYTES + 1)
            yield number, line


def full_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yields the number and the content of each line that is not blank, stripped, and without a mark of UTF-8."""
    for number, line in read_lines(path):
        if content := line.removeprefix(codecs.BOM_UTF8).strip():
            yield number, content


# JSON


def read_json(path: Path) -> Iterator[tuple[str, RawRow | Exception]]:
    """Yields the objects of a file: one on each line, in a list, or one behind the other.

    A list may also be in an object: {"data": [...]}.
    """
    first, second = islice(chain((line for _, line in full_lines(path)), [b"", b""]), 2)
    row, is_next_row = parse_json(first), isinstance(parse_json(second), dict)
    if isinstance(row, dict):
        is_by_lines = bool(second) or find_rows(path, [row]) == [row]
    else:  # the first line is broken, or a part of a value
        is_broken = len(first) <= MAX_ROW_BYTES and (is_next_row or not second)
        is_by_lines = is_broken and not first.startswith(b"[")
    if is_by_lines:
        yield from ((f"{path}:{number}", parse_json(line)) for number, line in full_lines(path))
    else:
        rows = find_rows(path, read_values(path))
        yield from ((f"{path}, row {i}", check_row(row)) for i, row in enumerate(rows, 1))


def read_values(path: Path) -> list[JSON]:
    """Returns the values of a file, one or several behind each other. Raises: UserError if it is not JSON."""
    decoder, values = json.JSONDecoder(), []
    with open_file(path) as file:
        try:
            content = file.read(MAX_JSON + 1)
            if len(content) > MAX_JSON:
                raise UserError(
                    f"{path} has more than {MAX_JSON:,} bytes, and one value of JSON is read at once: write one row a "
                    "line"
                )
            text = content.decode("utf-8-sig")
            end = SPACE.match(text).end()
            while end < len(text):
                value, end = decoder.raw_decode(text, end)
                values.append(value)
                end = SPACE.match(text, end).end()
        except UserError:
            raise
        except UnicodeDecodeError as error:
            raise UserError(f"{path} is {NOT_UTF8}") from error
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path} is not JSON ({error}): correct it, or copy it again") from error
    return values


def find_rows(path: Path, values: list[JSON]) -> list[JSON]:
    """Returns the rows among the values of a file. Raises: UserError if there are none."""
    match values:
        case [list(rows)]:
            return rows
        case [dict(value)]:
            lists = [name for name, x in value.items() if (name in LISTS or len(value) == 1) and is_list_of_rows(x)]
            if len(lists) > 1:
                names = ", ".join(lists)
                raise UserError(f"{path} has several lists of rows, {names}: write each to a file of its own")
            if not lists and value and all(isinstance(x, dict) and "0" in x for x in value.values()):
                advice = "pandas writes rows by to_json(FILE, orient='records', lines=True)"
                raise UserError(f"{path} holds columns, not rows: {advice}")
            return value[lists[0]] if lists else [value]
        case [_]:
            raise UserError(f"{path} must hold a list of objects: write one object for each row")
    return values


def is_list_of_rows(value: JSON) -> bool:
    """True for a list of objects, none of which is a message."""
    return isinstance(value, list) and all(isinstance(x, dict) for x in value) and not is_conversation(value)


def is_conversation(value: JSON) -> bool:
    """True for a list of objects with the name of a speaker."""
    is_list = isinstance(value, list) and bool(value)
    return is_list and all(isinstance(x, dict) and any(key in x for key in SPEAKERS) for x in value)


def parse_json(line: bytes) -> RawRow | Exception:
    """Returns the object in a line, or an error if there is none."""
    if len(line) > MAX_ROW_BYTES:
        return ValueError(f"it is longer than {MAX_ROW_BYTES:,} bytes")
    try:
        return check_row(json.loads(line.decode("utf-8")))
    except UnicodeDecodeError as error:
        return ValueError(f"it is {NOT_UTF8} ({error.reason} at byte {error.start})")
    except (ValueError, RecursionError) as error:
        return ValueError(f"not JSON ({error})")


def check_row(row: JSON) -> RawRow | Exception:
    return row if isinstance(row, dict) else ValueError("it is not an object with named columns")


# CSV


def read_csv(path: Path) -> Iterator[tuple[str, RawRow | Exception]]:
    """Yields the rows below a line of names. After a line that cannot be parsed, the next one begins a new row.

    Columns are separated by commas, or, if the line of names has none, by its semicolons, tabs or bars.
    """
    csv.field_size_limit(MAX_ROW_BYTES)
    first_line = next(filter(str.strip, csv_lines(path)), "")
    separator = next((sign for sign in ",;\t|" if sign in first_line), ",")
    rows = csv.reader(csv_lines(path), strict=True, delimiter=separator)
    names = None
    while True:
        first = rows.line_num + 1
        try:
            values = next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            if rows.line_num > first:  # a quote that is closed elsewhere, or never
                message = f"{path}:{first} begins a quote that does not end well ({error}): correct it"
                raise UserError(message) from error
            yield f"{path}:{first}", ValueError(f"it is not CSV ({error})")
            continue
        if names is None:
            names = values
            check_names(path, names)
        elif len(values) == len(names):
            yield f"{path}:{first}", dict(zip(names, values, strict=True))
        elif values:
            error = f"it has {len(values)} columns, and the first line names {len(names)}"
            yield f"{path}:{first}", ValueError(error)


def check_names(path: Path, names: list[str]) -> None:
    """Raises UserError if the line of names names a column twice."""
    repeated = [name for name, count in Counter(names).items() if count > 1]
    if repeated:
        raise UserError(f"{path} has several columns {repeated[0]!r}: give each a name of its own")


def csv_lines(path: Path) -> Iterator[str]:
    """Yields the lines as text, with half a surrogate pair for each byte that is not UTF-8.

    Raises: UserError for a line that is too long.
    """
    for i, line in read_lines(path):
        if len(line) > MAX_ROW_BYTES:
            raise UserError(f"{path}:{i} is longer than {MAX_ROW_BYTES:,} bytes: shorten the line")
        yield line.decode("utf-8-sig", "surrogateescape")


# Parquet


def read_parquet(path: Path) -> Iterator[tuple[str, RawRow | Exception]]:
    """Yields the rows of a file."""
    check_installed("pyarrow", f"a Parquet file ({path})")
    for i, row in enumerate(parquet_rows(path), 1):
        yield f"{path}, row {i}", row if isinstance(row, Exception) else without_nulls(decoded(row))


def explain_damage(error: Exception) -> str:
    """Returns what is wrong with a file of Parquet, behind its name."""
    reason = " ".join(str(error).split())[:200] or type(error).__name__
    return reason if isinstance(error, UserError) else f"is not a whole Parquet file ({reason}): copy it again"


def parquet_batches(file: str | Path) -> "Iterator[pyarrow.RecordBatch]":
    """Yields the rows of a file, some at a time. Raises: what pyarrow raises for a damaged one, UserError."""
    import pyarrow.parquet

    opened = pyarrow.parquet.ParquetFile(file)
    repeated = [name for name, count in Counter(opened.schema_arrow.names).items() if count > 1]
    if repeated:
        raise UserError(f"has several columns {repeated[0]!r}: give each a name of its own")
    for batch in opened.iter_batches(BATCH, use_threads=False):
        batch.validate(full=True)
        yield batch


def parquet_rows(path: Path) -> Iterator[RawRow | Exception]:
    """Yields rows. Large batches are read row by row, since a dictionary may hold one long value for all rows.

    Raises: UserError if the file is damaged, or holds values that Python lacks.
    """
    try:
        for batch in parquet_batches(path):
            if batch.nbytes <= MAX_ROW_BYTES:
                yield from batch.to_pylist()
                continue
            for i in range(batch.num_rows):
                columns = [column.slice(i, 1) for column in batch.columns]
                columns = [x.dictionary_decode() if hasattr(x, "dictionary_decode") else x for x in columns]
                if sum(column.nbytes for column in columns) > MAX_ROW_BYTES:
                    yield ValueError(f"it is longer than {MAX_ROW_BYTES:,} bytes")
                else:
                    yield {name: column[0].as_py() for name, column in zip(batch.schema.names, columns, strict=True)}
    except Exception as error:  # noqa: BLE001 (of pyarrow, which raises many kinds for damage)
        raise UserError(f"{path} {explain_damage(error)}") from error


def decoded(row: RawRow) -> RawRow:
    """Returns a row whose bytes become text if they are UTF-8: some programs write text into Parquet so."""
    texts = {}
    for name, value in row.items():
        with contextlib.suppress(UnicodeDecodeError):
            texts |= {name: value.decode()} if isinstance(value, bytes) else {}
    return row | texts


def without_nulls(value: JSON, is_within: bool = False) -> JSON:
    """Returns a value without the keys of messages and tools that are null: Parquet adds those that others have."""
    if isinstance(value, dict):
        kept = {key: x for key, x in value.items() if x is not None or not is_within}
        return {key: without_nulls(x, is_within or key == "tools" or is_conversation(x)) for key, x in kept.items()}
    return [without_nulls(x, True) for x in value] if is_within and isinstance(value, list) else value
