"""Demonstrations, which are conversations with replies to learn from: the data of core/sft.py."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from envs.base import Env, ForcedAnswer, Problem
from envs.data.files import RawRow
from envs.data.messages import REPLY, Columns, Messages, as_messages, read_exchange, unweighted, weighted
from envs.data.rows import Row, load_rows
from envs.data.splits import remove_overlap, split_rows
from envs.own.dataset import find_source
from envs.settings import RolloutSettings, system_prompt
from utils.settings.errors import UserError, counted, shorten
from utils.settings.options import option

THINK_END = "</think>"
UNUSED = ("functions", "weights", "sample_weight", "loss_weight", "labels", "assistant_masks", "completion_mask")
USUAL = Columns(usual_answers=("completion",), begins_with_messages=True)
NAMES = {"prompt": "prompt", "completion": "answer", "answer": "answer", "messages": "messages"}  # of --columns


@dataclass(frozen=True)
class DataConfig:
    """Data."""

    noun = "conversation"  # what notes call a row
    data: str = option(
        "",
        "Rows to train on: a file (JSONL, JSON, CSV, Parquet; .gz) or owner/name on the hub. Columns are messages, or "
        "prompt and completion, as text or lists of messages",
        essential=True,
    )
    test_data: str = option(
        "",
        "Held-out rows, in the forms of --data; of a data set on the hub the split test is read; empty: hold out a "
        "part of --data",
    )
    test_fraction: float = option(
        0.1,
        "Share of the prompts of --data to hold out, from 0 to below 1; 0.1: the same prompts as dataset-test. Not "
        "used with --test_data; 0: none",
    )
    columns: str = option(
        "",
        "Names of columns, as prompt=COLUMN,completion=COLUMN or messages=COLUMN, with dots before nested names; "
        "empty: prompt and completion, messages, or the columns of ShareGPT and Alpaca",
    )
    max_length: int = option(1024, "Maximum number of tokens of a row: a conversation up to its last reply")
    long_rows: str = option(
        "error",
        "Treatment of rows longer than --max_length; error: end the command; cut: truncate them; drop: skip them",
        ["error", "cut", "drop"],
    )

    def __post_init__(self):
        if not self.data:
            raise UserError("--data is empty: name the replies to train on, a file of rows or owner/name on the hub")
        self.check()

    def check(self) -> None:
        """Raises UserError for lengths, shares and columns that cannot be."""
        if self.max_length < 2 or not 0 <= self.test_fraction < 1:
            raise UserError(
                "--max_length must be at least 2, and --test_fraction from 0 to below 1: correct the one that is not"
            )
        self.named_columns  # noqa: B018 (raises)

    @property
    def source(self) -> str:
        """Returns the file, data set or run that the rows are from."""
        return self.data

    @property
    def named_columns(self) -> dict[str, str]:
        """Returns the columns that --columns names. Raises: UserError for another form."""
        return parse_columns(self.columns, NAMES, "prompt=COLUMN,completion=COLUMN or messages=COLUMN")

    def read(self, row: RawRow) -> Row:
        """Returns the prompt and the conversations of a row: see `read_conversation`."""
        return read_conversation(row, replace(USUAL, **self.named_columns))

    @property
    def encoding(self) -> dict[str, str | int]:
        """Returns the arguments of `encode_rows` that these settings are."""
        return {"max_length": self.max_length, "long_rows": self.long_rows}


def parse_columns(text: str, names: Mapping[str, str], form: str) -> dict[str, str]:
    """Returns columns by their names here, which `names` has. Raises: UserError for another form than `form`."""
    pairs = [item.partition("=")[::2] for item in filter(None, map(str.strip, text.split(",")))]
    if not all(name in names and column for name, column in pairs):
        raise UserError(f"--columns {text}: write {form}")
    return {names[name]: column for name, column in pairs}


class Written(Env):
    """Conversations as problems: the messages before the first reply, and all that follows."""

    form = "any"

    def __init__(self, rows: list[Row], note: str):
        for row in rows:
            for messages in row.answer:
                messages.place = row.place
        self.conversations: list[Messages] = [messages for row in rows for messages in row.answer]
        self.note, self.num_tasks = note, len(self.conversations)
        replies = [message for messages in self.conversations for message in messages if message["role"] == REPLY]
        self.thinking = any(THINK_END in reply["content"] or "reasoning_content" in reply for reply in replies)

    def problem(self, index: int) -> Problem:
        messages = self.conversations[index]
        first = [message["role"] for message in messages].index(REPLY)
        return Problem(messages[:first], messages[first:], thinking=self.thinking, tools=messages.tools)


class WrittenSettings(RolloutSettings):
    """Data that takes the place of an environment to train on."""

    @property
    def manner(self) -> str:
        """Returns a description of the rows."""
        system = " ".join(system_prompt(self.env.problem(0).messages).split())
        shown = f", system prompt {shorten(system, 60)}" if system else ""
        return f"rows of at most {self.max_new_tokens} tokens, all replies trained{shown}"


def read_written(config: DataConfig, stored: list[Row] | None = None) -> tuple[WrittenSettings, list[Messages]]:
    """Returns the data to train on, and the held-out conversations; `stored` rows take the place of those of --data.

    Raises: UserError if a file cannot be read, or a row holds no reply or parts that would be left out.
    """
    style = {"skip_bad_rows": False, "may_repeat": True, "noun": config.noun, "skip": "or remove it"}
    load = partial(load_rows, data_dir="", convert=config.read, **style)
    if stored is None:
        rows, note = load("data", find_source(config.data, "train"))
    else:
        rows, note = stored, f"data: {counted(len(stored), config.noun)}"
    tests = [] if config.test_fraction == 0 else None
    if config.test_data:
        tests, _ = load("test_data", find_source(config.test_data, "test"))
    if tests != []:
        by_split = split_rows(rows, 1 / (config.test_fraction or 1), tests)
        tests = by_split["test"]
        rows, num_removed = remove_overlap(by_split["train"] + by_split["valid"], tests)
        note += f"; {len(rows):,} to train on; {len(tests):,} held out"
        note += f", {num_removed:,} removed because they are also held out" if num_removed else ""
    if not rows:
        raise UserError(f"{config.source} leaves no row to train on{note}: add rows")
    options = {"data": config.source}
    options |= {"columns": config.columns} if config.columns else {}
    name = re.sub(r"[^\w-]", "-", Path(config.source).name.partition(".")[0]) or "sft"
    settings = WrittenSettings(name, options, Written(rows, note), config.max_length, 0, ForcedAnswer())
    return settings, Written(tests, "").conversations


def read_conversation(row: RawRow, columns: Columns = USUAL) -> Row:
    """Returns a row of data: its prompt, and its messages as a list of one conversation. Raises: ValueError."""
    try:
        exchange = read_exchange(row, columns)
    except KeyError as error:
        found = f"it has neither messages nor prompt and completion, only {', '.join(map(repr, row))[:200]}"
        advice = "name them by --columns prompt=COLUMN,completion=COLUMN or messages=COLUMN"
        raise ValueError(f"{found}: {advice}") from error
    if wrong := next((name for name in UNUSED if row.get(name) is not None), ""):
        raise ValueError(f"its column {wrong} is not used: write tools, or a loss_mask with a 0 or 1 for each reply")
    if isinstance(row.get("label"), bool):  # KTO's
        raise ValueError("its column label says whether its reply is wanted: keep rows with true, without the column")
    messages = as_messages(exchange.prompt, "user")
    answer = [] if exchange.answer is None else as_messages(exchange.answer, REPLY)
    messages = [*messages, *(exchange.reply or answer)]
    roles = [message["role"] for message in messages]
    if REPLY not in roles:
        raise ValueError("it has no turn of the assistant")
    if roles[0] == REPLY or (REPLY, REPLY) in zip(roles, roles[1:], strict=False):
        raise ValueError("a turn of the assistant needs one of another role before it")
    replies = (message for message in messages if message["role"] == REPLY)
    if not all(reply["content"].strip() or "tool_calls" in reply for reply in replies):
        raise ValueError("a turn of the assistant is empty")
    return Row(unweighted(exchange.prompt), [Messages.of(weighted(row, messages), exchange.tools)])
