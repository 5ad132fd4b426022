"""Rows that others wrote: formats of files, forms of rows, what a row says about itself, and references."""

import gzip
import json
import re
from pathlib import Path

import pytest

from envs.data.files import read_file
from utils.settings.errors import UserError

ROWS = [{"prompt": f"What is {i} + 1?", "answer": str(i + 1)} for i in range(6)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)
CSV = "prompt,answer\n" + "".join(f"{row['prompt']},{row['answer']}\n" for row in ROWS)


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


# Files


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("lines.json", LINES),
        ("list.jsonl", json.dumps(ROWS)),
        ("list.txt", json.dumps(ROWS, indent=2)),
        ("pretty.jsonl", "\n".join(json.dumps(row, indent=2) for row in ROWS)),
        ("versioned.json", json.dumps({"version": "1", "data": ROWS})),
        ("only.json", json.dumps({"anything": ROWS})),
        ("marked.json", "\ufeff" + LINES),
        ("no_suffix", CSV),
        ("table.jsonl", CSV),
        ("packed.jsonl", gzip.compress(LINES.encode())),
        ("unpacked.jsonl.gz", LINES),
    ],
)
def test_format_of_a_file_is_told_by_its_content(tmp_path, name, content):
    assert [row for _, row in read_file(write(tmp_path / name, content))] == ROWS


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
        {"conversations": [{"from": "human", "value": "a"}]},
        {"prompt": "a", "answer": "b", "tests": [{"in": 1}]},
    ],
)
@pytest.mark.parametrize("indent", [None, 1])
def test_an_object_alone_is_a_row(tmp_path, row, indent):
    assert [row for _, row in read_file(write(tmp_path / "one.json", json.dumps(row, indent=indent)))] == [row]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.jsonl", "", "a.jsonl is empty"),
        ("a.csv", " \n\n", "a.csv is empty"),
        ("a.jsonl", gzip.compress(b""), "a.jsonl is empty"),
        ("a.json", '{"train": [{"q": 1}], "test": [{"q": 2}]}', "several lists of rows, train, test: write each"),
        ("a.json", '{"q": {"0": "x"}, "a": {"0": "y"}}', "columns, not rows: .*orient='records'"),
        ("a.json", '"text"', "neither JSON nor a line of names"),
        ("a.json", '[{"q": 1},\n{"q": 2', "a.json is not JSON .*copy it again"),
        ("a.parquet", "version https://git-lfs.github.com/spec/v1\n", "a pointer of Git LFS .*`git lfs pull`"),
        ("a.jsonl", "<!DOCTYPE html>", "a web page"),
        ("a.csv", b"PK\x03\x04\x14\0", "a ZIP archive, as Excel files are"),
        ("a.parquet", b"ARROW1\0\0", "an Arrow file: write it as Parquet"),
        ("a.pkl", b"\x80\x04\x95", "a pickle, which can run code"),
        ("a.bin", b"abc\0\1\2", "holds a zero byte, and is of no known format: .*JSON, JSON lines, CSV or Parquet"),
    ],
)
def test_what_is_no_file_of_rows_is_named_with_what_to_do(tmp_path, name, content, words):
    with pytest.raises(UserError, match=words):
        list(read_file(write(tmp_path / name, content)))


def test_a_broken_line_is_named_wherever_it_stands(tmp_path):
    lines = LINES.splitlines()
    for place in (0, 3, 6):
        path = write(tmp_path / "rows.json", "\n".join([*lines[:place], '{"prompt": ', *lines[place:]]))
        faults = {where: str(row) for where, row in read_file(path) if isinstance(row, Exception)}
        assert list(faults) == [f"{path}:{place + 1}"] and re.search("not JSON", *faults.values())
