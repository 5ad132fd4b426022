"""Conversations with written replies, from files or the hub: the data of core/sft.py."""

import re
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
from utils.settings.errors import UserError, shorten
from utils.settings.options import option

THINK_END = "</think>"
UNUSED = ("functions", "weights", "sample_weight", "loss_weight", "labels", "assistant_masks", "completion_mask")
USUAL = Columns(usual_answers=("completion",), begins_with_messages=True)


@dataclass(frozen=True)
class DataConfig:
    """Data."""

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
    train_on: str = option("all", "Replies of a conversation to train on", ["all", "last"])
    columns: str = option(
        "",
        "Names of columns, as prompt=COLUMN,completion=COLUMN or messages=COLUMN, with dots before nested names; "
        "empty: prompt and completion, messages, or the columns of ShareGPT and Alpaca",
    )
    max_length: int = option(1024, "Maximum number of tokens of a row: a conversation up to its last reply")
    long_rows: str = option(
        "error",
        "Treatment of rows longer than --max_length; error: end the command; cut: truncate them; drop: leave them out",
        ["error", "cut", "drop"],
    )

    def __post_init__(self):
        if not self.data:
            raise UserError("--data is empty: name the replies to train on, a file of rows or owner/name on the hub")
        if self.max_length < 2 or not 0 <= self.test_fraction < 1:
            raise UserError(
                "--max_length must be at least 2, and --test_fraction from 0 to below 1: correct the one that is not"
            )
        self.named_columns  # noqa: B018 (raises)

    @property
    def named_columns(self) -> Columns:
        """Returns the columns that --columns names. Raises: UserError for another form."""
        pairs = [item.partition("=")[::2] for item in filter(None, map(str.strip, self.columns.split(",")))]
        names = {"completion": "answer"} | {name: name for name in ("prompt", "answer", "messages")}
        if not all(name in names and column for name, column in pairs):
            raise UserError(f"--columns {self.columns}: write prompt=COLUMN,completion=COLUMN or messages=COLUMN")
        return replace(USUAL, **{names[name]: column for name, column in pairs})

    @property
    def encoding(self) -> dict[str, str | int]:
        """Returns the arguments of `encode_rows` that these settings are."""
        return {"train_on": self.train_on, "max_length": self.max_length, "long_rows": self.long_rows}


class Written(Env):
    """Conversations as problems: the messages before the first reply, and all that follows."""

    form = "any"

    def __init__(self, rows: list[Row], note: str):
        self.rows, self.note, self.num_tasks = rows, note, len(rows)
        for row in rows:
            row.answer.place = row.place
        replies = [message for row in rows for message in row.answer if message["role"] == REPLY]
        self.thinking = any(THINK_END in reply["content"] or "reasoning_content" in reply for reply in replies)

    @property
    def conversations(self) -> list[Messages]:
        return [row.answer for row in self.rows]

    def problem(self, index: int) -> Problem:
        messages = self.rows[index].answer
        first = [message["role"] for message in messages].index(REPLY)
        return Problem(messages[:first], messages[first:], thinking=self.thinking, tools=messages.tools)


class WrittenSettings(RolloutSettings):
    """Data that takes the place of an environment to train on."""

    @property
    def manner(self) -> str:
        """Returns a description of the rows."""
        system = " ".join(system_prompt(self.env.problem(0).messages).split())
        shown = f", system prompt {shorten(system, 60)}" if system else ""
        return f"rows of at most {self.max_new_tokens} tokens, {self.options['train_on']} replies trained{shown}"


def read_written(config: DataConfig) -> tuple[WrittenSettings, list[Messages]]:
    """Returns the data to train on, and the held-out conversations.

    Raises: UserError if a file cannot be read, or a row holds no reply or parts that would be left out.
    """
    style = {"skip_bad_rows": False, "may_repeat": True, "noun": "conversation", "skip": "or remove it"}
    convert = partial(read_conversation, columns=config.named_columns)
    load = partial(load_rows, data_dir="", convert=convert, **style)
    rows, note = load("data", find_source(config.data, "train"))
    tests = [] if config.test_fraction == 0 else None
    if config.test_data:
        tests, _ = load("test_data", find_source(config.test_data, "test"))
    if tests != []:
        by_split = split_rows(rows, 1 / (config.test_fraction or 1), tests)
        tests = by_split["test"]
        rows, num_removed = remove_overlap(by_split["train"] + by_split["valid"], tests)
        note += f"; {len(rows):,} to train on; {len(tests):,} held out"
        note += f", {num_removed:,} removed that are held out, too" if num_removed else ""
    if not rows:
        raise UserError(f"{config.data} leaves no row to train on{note}: add rows")
    options = {"data": config.data, "train_on": config.train_on}
    options |= {"columns": config.columns} if config.columns else {}
    name = re.sub(r"[^\w-]", "-", Path(config.data).name.partition(".")[0]) or "sft"
    settings = WrittenSettings(name, options, Written(rows, note), config.max_length, 0, ForcedAnswer())
    return settings, Written(tests, "").conversations


def read_conversation(row: RawRow, columns: Columns = USUAL) -> Row:
    """Returns a row of data: its prompt, by which it is held out, and all messages.

    Raises: ValueError for a row that cannot be trained on as it is.
    """
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
    return Row(unweighted(exchange.prompt), Messages.of(weighted(row, messages), exchange.tools))
