"""Forms of files that other projects write: what RL asks of each, by which reference, and what SFT trains, as a table.

python bench/rows.py --model_dir models/tiny

What is not read is refused, and the table has the message.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    import utils.settings.packages  # noqa: F401 (says what to install)

import pyarrow
import pyarrow.parquet

from envs.data.files import RawRow
from envs.own.dataset import Dataset
from envs.own.written import DataConfig, read_written
from models.conversations import encode_rows
from models.tokenizer import Tokenizer, load_tokenizer
from utils.settings.errors import UserError

ASK, SAY = {"role": "user", "content": "Use 2 3 to make 5."}, {"role": "assistant", "content": "2+3"}
WRONG = {"role": "assistant", "content": "2-3"}
CALL = {"type": "function", "id": "c1", "function": {"name": "add", "arguments": '{"a": 2, "b": 3}'}}
CALLED = [ASK, {**SAY, "content": None, "tool_calls": [CALL]}, {"role": "tool", "tool_call_id": "c1", "content": "5"}]
SCHEMA = {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}}
TOOLS = json.dumps([{"type": "function", "function": SCHEMA}])
PAIR = {"prompt": ASK["content"], "completion": "2+3", "answer": "5"}
PARTS = {"role": "user", "content": [{"type": "text", "text": ASK["content"]}]}
ANSWER = {"answer": "5"}


def lines(row: RawRow) -> bytes:
    """Returns a file of JSON lines."""
    return (json.dumps(row) + "\n").encode()


def table(row: RawRow) -> bytes:
    """Returns a Parquet file."""
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), sink)
    return sink.getvalue().to_pybytes()


def several(row: RawRow) -> bytes:
    """Returns JSON lines of two rows."""
    other = {**row, "prompt": "Use 3 2 to make 5."}
    return lines(row) + lines(other)


FORMS: dict[str, tuple[str, Callable[[RawRow], bytes], RawRow]] = {
    "replies with `weight` 0 or 1, in `messages`": (
        "rows.jsonl", lines, {"messages": [ASK, {**WRONG, "weight": 0}, ASK, {**SAY, "weight": 1}]} | ANSWER
    ),
    "`loss` and `trainable` of replies": (
        "rows.jsonl", lines, {"messages": [ASK, {**WRONG, "loss": False}, ASK, {**SAY, "trainable": True}]} | ANSWER
    ),
    "column `loss_mask`": (
        "rows.jsonl", lines, {"messages": [ASK, WRONG, ASK, SAY], "loss_mask": [0, 0, 0, 1]} | ANSWER
    ),
    "`tool_calls` and `tools` (JSON text)": (
        "rows.jsonl", lines, {"messages": [*CALLED, SAY], "tools": TOOLS} | ANSWER
    ),
    "ShareGPT's `conversations`": (
        "rows.json", lambda row: json.dumps([row]).encode(),
        {"conversations": [{"from": "human", "value": ASK["content"]}, {"from": "gpt", "value": "2+3"}]} | ANSWER,
    ),
    "Alpaca's columns": (
        "rows.json", lambda row: json.dumps([row]).encode(),
        {"instruction": "Make 5.", "input": "2 3", "output": "2+3"},
    ),
    "verl's Parquet": (
        "rows.parquet", table,
        {"data_source": "mine", "prompt": [ASK], "reward_model": {"style": "rule", "ground_truth": "5"},
         "extra_info": {"index": 0}},
    ),
    "JSON lines in .json": ("rows.json", several, PAIR),
    "a list in .jsonl": ("rows.jsonl", lambda row: json.dumps([row]).encode(), PAIR),
    "`{\"version\": ..., \"data\": [...]}`, content in parts": (
        "rows.json", lambda row: json.dumps({"version": 1, "data": [row]}).encode(), {"messages": [PARTS, SAY]} | ANSWER
    ),
    "a prompt that ends with the begun reply": (
        "rows.jsonl", lines, {"prompt": [ASK, {**SAY, "content": "Let me see:"}]} | ANSWER
    ),
    "`images`": ("rows.jsonl", lines, {"messages": [ASK, SAY], "images": ["a.png"]} | ANSWER),
}  # fmt: skip


def asked(path: Path, tokenizer: Tokenizer) -> str:
    """Returns the messages of the first prompt of RL, which the chat template must show, and the references."""
    env = Dataset(path=str(path))
    problem = env.problem(0)
    tokenizer.chat(problem.messages, tools=problem.tools)
    said = [f"{x['role']}: {x['content'] or x.get('tool_calls', '')}" for x in problem.messages]
    tools = [f"tools: {', '.join(tool['function']['name'] for tool in problem.tools)}"] * bool(problem.tools)
    return f"{'; '.join([*said, *tools])!r}, reference {', '.join(env.references(problem))}"


def trained(path: Path, tokenizer: Tokenizer) -> str:
    """Returns the text of the tokens of the first row that SFT trains."""
    data, _ = read_written(DataConfig(str(path), test_fraction=0.0))
    rows, _ = encode_rows(tokenizer, "rows", data.env.conversations, 4096, "error")
    return repr(tokenizer.hf.decode(rows[0].tokens[rows[0].mask]))


def or_refusal(path: Path, read: Callable[[], str]) -> str:
    """Returns what a call returns, or the message by which it refuses a file."""
    try:
        return f"`{read()}`"
    except UserError as error:
        return f"refused: {str(error).replace(str(path), path.name).partition('. Correct it')[0]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model_dir", default="models/tiny", help="folder of the tokenizer and its chat template")
    tokenizer = load_tokenizer(parser.parse_args().model_dir)
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for form, (name, write, row) in FORMS.items():
            path = Path(folder) / name
            path.write_bytes(write(row))
            cells = [or_refusal(path, partial(read, path, tokenizer)) for read in (asked, trained)]  # by RL, and by SFT
            found.append((form, *(cell.replace("|", "\\|") for cell in cells)))
    print("| form | RL asks | SFT trains |\n|---|---|---|")
    print("\n".join(f"| {' | '.join(cells)} |" for cells in found))


if __name__ == "__main__":
    main()
