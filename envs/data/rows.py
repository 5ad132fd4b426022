"""Rows of data sets: from local files in the formats of the public repositories, or from the Hugging Face hub."""

import codecs
import csv
import gzip
import json
import os
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from utils.settings.errors import UserError, check_installed, counted, is_installed

READERS = ".jsonl, .json, .csv and .parquet; the first three also .gz"
MAX_ROW_BYTES = 1 << 22  # of a line, and of a field of CSV that goes over several
MAX_EXPANSION = 100  # bytes for each byte of a compressed file, where text has 3 to 20 and gzip can reach 1,032 ...
MIN_EXPANDED = 1 << 24  # ... and as much in any case
NOT_UTF8 = "not UTF-8; from Latin-1, `iconv -f latin1 -t utf-8 FILE > NEW` converts it"
ESCAPED_BYTES = ("\udc80", "\udcff")  # what bytes of other encodings become
SKIP = "or leave such rows out with --env_options skip_bad_rows=true"
QUESTIONS = ("prompt", "question", "messages", "problem", "query", "instruction", "input", "text")
ANSWERS = ("answer", "solution", "response", "output", "completion", "label", "target")

JSON = str | int | float | bool | None | list["JSON"] | dict[str, "JSON"]
RawRow = dict[str, JSON]  # of a file, by column


@dataclass(frozen=True)
class Source:
    """Location of the rows of one split.

    `files`: names to look for in --data_dir, the first that is there counts. `hub`: "owner/name" or
    "owner/name:config" of the data set there, and its `hub_split`. `url`: where the files can be found.
    """

    files: tuple[str, ...]
    hub: str = ""
    hub_split: str = "train"
    url: str = ""

    @property
    def advice(self) -> str:
        """Returns the sentence that names the files and where to get them."""
        name = self.hub.partition(":")[0]
        ways = [f"`hf download {name} --repo-type dataset` on a machine with a network"] * bool(self.hub)
        ways += [self.url] * bool(self.url)
        if not self.files:  # the data set was named, not an environment
            return f"get it by {ways[0]}, and name a file of it"
        return f"put {self.files[0]} into a folder FOLDER (from {', or from '.join(ways)}), and give --data_dir FOLDER"


class Row(NamedTuple):
    """A problem of a data set: the prompt (text, or chat messages), and the reference that grades the reply."""

    prompt: str | list[dict[str, str]]
    answer: Any


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
    """Returns the rows of a source in order, without those that repeat a prompt or lack one or an answer; and a note.

    `may_repeat`: those that repeat a prompt stay, as games that are drawn anew. `noun`: what a row is, in the note;
    `skip`: what may be done about a malformed one, beside correcting it.

    Raises: UserError when there is no data (with what to do), when a file cannot be read to its end, and, unless
    `skip_bad_rows`, for the first malformed row, by file and line.
    """
    path = find_file(source, data_dir)
    if not path and (data_dir or not source.hub):
        raise UserError(f"--data_dir {data_dir} has none of {', '.join(source.files)}: {source.advice}")
    rows = []
    seen = set()
    left_out = Counter()
    total = 0
    for location, raw in read_file(path) if path else read_hub(name, source):
        total += 1
        try:
            if isinstance(raw, Exception):
                raise raw
            check_text(raw)
            row = convert(raw)
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            if not skip_bad_rows:
                raise UserError(explain_bad_row(location, error, raw, skip)) from error
            left_out["malformed"] += 1
            continue
        key = json.dumps(row.prompt)
        is_repeated = key in seen and not may_repeat
        why = "empty" if not row.prompt or row.answer in ("", None) else "repeated" if is_repeated else ""
        seen.add(key)
        if why:
            left_out[why] += 1
        else:
            rows.append(row)
    reasons = ", ".join(f"{count:,} {why}" for why, count in left_out.items())
    if not rows:
        raise UserError(f"{name}: {path or source.hub} holds no usable row" + (f", but {reasons}" if reasons else ""))
    rest = f" of {counted(total, 'row')} (left out: {reasons})" if reasons else ""
    return rows, f"{name}: {counted(len(rows), noun)}{rest}"


def check_text(value: JSON) -> None:
    """Raises UserError for text, at any depth, with a zero byte or with what UTF-8 cannot express.

    That is half a surrogate pair, which JSON can hold, and which bytes of other encodings become.
    """
    if isinstance(value, str):
        if "\0" in value:
            raise UserError("it holds a zero byte")
        try:
            value.encode()
        except UnicodeEncodeError as error:
            character = value[error.start]
            is_byte = ESCAPED_BYTES[0] <= character <= ESCAPED_BYTES[1]
            raise UserError(f"it holds {character!a}, which is {NOT_UTF8 if is_byte else 'not UTF-8'}") from error
    elif isinstance(value, dict):
        check_text([*value, *value.values()])
    elif isinstance(value, list):
        for item in value:
            check_text(item)


def explain_bad_row(location: str, error: Exception, row: RawRow | Exception, skip: str) -> str:
    """Returns why a row cannot be used, and advice; for a missing column, the names of the existing ones."""
    if not isinstance(error, KeyError):
        return f"{location} is malformed: {error}. Correct it, {skip}"
    columns = ", ".join(map(repr, row))[:200]
    prompt, answer = first_of(QUESTIONS, row), first_of(ANSWERS, row)
    reward = "" if answer else " (a --reward needs no answer)"
    names = f"prompt={prompt or 'COLUMN'},answer={answer or 'COLUMN'}{reward}"
    name_them = f"the environment dataset takes their names by --env_options {names}"
    return f"{location} has no column {error}, only {columns}: {name_them}. Name them, correct the row, {skip}"


def first_of(names: Sequence[str], row: RawRow) -> str:
    """Returns the first of these names that is a column of a row, "" where none is."""
    return next((name for name in names if name in row), "")


def find_file(source: Source, data_dir: str) -> Path | None:
    """Returns the first file of a source that is in the folder; None if none is, or there is no folder but a hub."""
    paths = [Path(os.path.expanduser(data_dir)) / name for name in source.files if data_dir or not source.hub]
    return next(filter(Path.is_file, paths), None)


def read_file(path: Path) -> Iterator[tuple[str, RawRow | Exception]]:
    """Yields each row of a file with its location (file:line), or the reason why there is none.

    Raises: UserError where the file, or the rest of it, cannot be read; OSError.
    """
    kind = path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix
    readers = {".parquet": read_parquet, ".jsonl": read_jsonl, ".json": read_json, ".csv": read_csv}
    if kind not in readers or (kind == ".parquet" and path.suffix == ".gz"):
        raise UserError(f"{path}: a file of rows is one of {READERS}")
    if path.suffix == ".gz":
        check_compressed(path)
    with open_file(path) as file:
        begins_as_utf16 = file.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
    if begins_as_utf16:
        raise UserError(f"{path} is UTF-16: `iconv -f utf-16 -t utf-8 {path} > NEW` converts it")
    yield from readers[kind](path)


def check_compressed(path: Path) -> None:
    """Raises UserError for a .gz file that is damaged, cut off, or a bomb. It keeps nothing of it in memory."""
    most, size = max(MIN_EXPANDED, MAX_EXPANSION * path.stat().st_size), 0
    try:
        with gzip.open(path) as file:
            while block := file.read(1 << 20):
                size += len(block)
                if size > most:
                    raise UserError(f"{path} expands to more than {most:,} bytes, which no file of rows does")
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{path} is not a whole .gz file ({error}): copy it again") from error


def open_file(path: Path) -> BinaryIO:
    """Opens a file to read, decompressed where it ends in .gz."""
    return gzip.open(path) if path.suffix == ".gz" else path.open("rb")


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


def read_jsonl(path: Path) -> Iterator[tuple[str, RawRow | Exception]]:
    yield from ((f"{path}:{i}", parse_json(line)) for i, line in read_lines(path) if line.strip())


def read_json(path: Path) -> Iterator[tuple[str, RawRow | Exception]]:
    """Yields the objects of a list, also of one that is the only value of an object: {"data": [...]}."""
    with open_file(path) as file:
        try:
            rows = json.loads(file.read().decode("utf-8-sig"))
        except UnicodeDecodeError as error:
            raise UserError(f"{path} is {NOT_UTF8}") from error
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path} is not JSON ({error})") from error
    if isinstance(rows, dict) and len(rows) == 1:
        rows = next(iter(rows.values()))
    if not isinstance(rows, list):
        raise UserError(f"{path} must hold a list of objects")
    yield from ((f"{path}, row {i}", check_row(row)) for i, row in enumerate(rows, 1))


def read_csv(path: Path) -> Iterator[tuple[str, RawRow | Exception]]:
    """Yields the rows below a line of names. After a line that cannot be parsed, the next one begins a new row."""
    csv.field_size_limit(MAX_ROW_BYTES)
    rows = csv.reader(csv_lines(path), strict=True)
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
            error = f"it has {len(values)} columns, where the first line names {len(names)}"
            yield f"{path}:{first}", ValueError(error)


def check_names(path: Path, names: list[str]) -> None:
    """Raises UserError where the line of names has other separators than commas, or names a column twice."""
    repeated = [name for name, count in Counter(names).items() if count > 1]
    if repeated:
        raise UserError(f"{path} has several columns {repeated[0]!r}: give each a name of its own")
    separator = next((sign for sign in ";\t|" if sign in names[0]), "") if len(names) == 1 else ""
    if separator:
        try:
            path.read_text("utf-8")
            encoding = "utf-8"
        except UnicodeDecodeError:
            encoding = "latin-1"
        arguments = f"{str(path)!r}, sep={separator!r}, encoding={encoding!r}"
        convert = f"pandas.read_csv({arguments}).to_csv('commas.csv', index=False)"
        raise UserError(
            f"{path} has {separator!r} between its columns, not commas: convert it, for example by `python -c \"import "
            f'pandas; {convert}"`, and take commas.csv'
        )


def csv_lines(path: Path) -> Iterator[str]:
    """Yields the lines as text, with half a surrogate pair for each byte that is not UTF-8.

    Raises: UserError for a line that is too long.
    """
    for i, line in read_lines(path):
        if len(line) > MAX_ROW_BYTES:
            raise UserError(f"{path}:{i} is longer than {MAX_ROW_BYTES:,} bytes")
        yield line.decode("utf-8-sig", "surrogateescape")


def read_parquet(path: Path) -> Iterator[tuple[str, RawRow]]:
    check_installed("pyarrow", f"a Parquet file ({path})")
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
        if file.metadata.num_rows > path.stat().st_size:
            raise UserError(f"it claims {file.metadata.num_rows:,} rows")
        rows = (row for batch in file.iter_batches(1024) for row in batch.to_pylist())
        yield from ((f"{path}, row {i}", row) for i, row in enumerate(rows, 1))
    except (ValueError, OSError, pyarrow.ArrowException) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{path} is not a whole Parquet file ({reason}): copy it again") from error


def parse_json(line: bytes) -> RawRow | Exception:
    """Returns the object in a line, or an error where there is none."""
    if len(line) > MAX_ROW_BYTES:
        return ValueError(f"it is longer than {MAX_ROW_BYTES:,} bytes")
    try:
        return check_row(json.loads(line.decode("utf-8-sig")))
    except UnicodeDecodeError as error:
        return ValueError(f"it is {NOT_UTF8} ({error.reason} at byte {error.start})")
    except (ValueError, RecursionError) as error:
        return ValueError(f"not JSON ({error})")


def check_row(row: JSON) -> RawRow | Exception:
    return row if isinstance(row, dict) else ValueError("it is not an object with named columns")


def read_hub(name: str, source: Source) -> Iterator[tuple[str, RawRow]]:
    """Yields each row of a data set of the hub (or of its cache on this machine). Raises UserError with what to do."""
    hub, _, config = source.hub.partition(":")
    if not is_installed("datasets"):
        raise UserError(f"{name}: `pip install datasets` to load {hub}, or {source.advice}")
    try:
        import datasets

        rows = datasets.load_dataset(hub, config or None, split=source.hub_split)
    except Exception as error:  # noqa: BLE001 (its own, those of three network libraries, and OSError)
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{name} could not load {hub} from the hub ({reason}). Without it: {source.advice}") from error
    yield from ((f"{hub}, {source.hub_split} row {i}", row) for i, row in enumerate(rows, 1))


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
