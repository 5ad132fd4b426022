"""Conversations whose replies somebody has written, from files or the hub: what core/sft.py trains on."""

import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from envs.base import Env, ForcedAnswer, Problem
from envs.data.rows import RawRow, Row, load_rows
from envs.data.splits import remove_overlap, split_rows
from envs.dataset import check_prompt, find_source
from envs.settings import RolloutSettings, system_prompt
from utils.settings.errors import UserError, shorten
from utils.settings.options import option

REPLY = "assistant"  # role of what is trained on
THINK_END = "</think>"
UNSUPPORTED = ("tools", "chat_template_kwargs", "images", "videos")  # columns that others render with the messages


@dataclass(frozen=True)
class DataConfig:
    """Data."""

    data: str = option(
        "",
        "Rows to train on: a file (JSONL, JSON, CSV, Parquet; .gz) or owner/name of the hub, with a column messages, "
        "or prompt and completion, text or lists of messages",
        essential=True,
    )
    test_data: str = option("", "Held-out rows, as --data; of the hub the split test; empty: a part of --data")
    test_fraction: float = option(
        0.1, "Share of --data that is held out where there is no --test_data, as dataset-test holds it out; 0: none"
    )
    train_on: str = option("all", "Replies of a conversation that are trained on", ["all", "last"])
    max_length: int = option(1024, "Most tokens of a row: a conversation up to its last reply")
    long_rows: str = option(
        "error", "Treatment of longer rows; cut: to that length, drop: left out", ["error", "cut", "drop"]
    )

    def __post_init__(self):
        if not self.data:
            raise UserError("--data names the replies to train on: a file of rows, or owner/name on the hub")
        if self.max_length < 2 or not 0 <= self.test_fraction <= 0.5:
            raise UserError("--max_length must be at least 2, and --test_fraction goes from 0 to 0.5")

    @property
    def encoding(self) -> dict[str, str | int]:
        """Returns the arguments of `encode_rows` that these settings are."""
        return {"train_on": self.train_on, "max_length": self.max_length, "long_rows": self.long_rows}


class Written(Env):
    """Conversations as problems: the messages before the first reply, and all that follows."""

    form = "any"

    def __init__(self, rows: list[Row], note: str):
        self.rows, self.note, self.num_tasks = rows, note, len(rows)
        replies = (message["content"] for row in rows for message in row.answer if message["role"] == REPLY)
        self.thinking = any(THINK_END in reply for reply in replies)

    @property
    def conversations(self) -> list[list[dict[str, str]]]:
        return [row.answer for row in self.rows]

    def problem(self, index: int) -> Problem:
        messages = self.rows[index].answer
        first = [message["role"] for message in messages].index(REPLY)
        return Problem(messages[:first], messages[first:], thinking=self.thinking)


class WrittenSettings(RolloutSettings):
    """Data in the place of an environment to train on."""

    @property
    def manner(self) -> str:
        """Returns what its rows are, in words."""
        system = " ".join(system_prompt(self.env.problem(0).messages).split())
        shown = f", system prompt {shorten(system, 60)}" if system else ""
        return f"rows of at most {self.max_new_tokens} tokens, {self.options['train_on']} replies trained{shown}"


def read_written(config: DataConfig) -> tuple[WrittenSettings, list[list[dict[str, str]]]]:
    """Returns the data to train on, and the held-out conversations.

    Raises: UserError where a file cannot be read, or a row holds no reply or what would be left out.
    """
    style = {"skip_bad_rows": False, "may_repeat": True, "noun": "conversation", "skip": "or remove it"}
    load = partial(load_rows, data_dir="", convert=read_conversation, **style)
    rows, note = load("data", find_source(config.data, "train"))
    tests = [] if config.test_fraction == 0 else None
    if config.test_data:
        tests, _ = load("test_data", find_source(config.test_data, "test"))
    if tests != []:
        by_split = split_rows(rows, round(1 / (config.test_fraction or 1)), tests)
        tests = by_split["test"]
        rows, num_removed = remove_overlap(by_split["train"] + by_split["valid"], tests)
        note += f"; {len(rows):,} to train on; {len(tests):,} held out"
        note += f", {num_removed:,} removed that are held out, too" if num_removed else ""
    if not rows:
        raise UserError(f"{config.data} leaves no row to train on{note}: add rows")
    options = {"data": config.data, "train_on": config.train_on}
    name = re.sub(r"[^\w-]", "-", Path(config.data).name.partition(".")[0]) or "sft"
    settings = WrittenSettings(name, options, Written(rows, note), config.max_length, 0, ForcedAnswer())
    return settings, Written(tests, "").conversations


def read_conversation(row: RawRow) -> Row:
    """Returns a row of data: its prompt, by which it is held out, and all messages.

    Raises: ValueError for what cannot be trained on as it is.
    """
    if wrong := next((name for name in UNSUPPORTED if row.get(name)), ""):
        raise ValueError(f"its column {wrong} is not rendered: write what the model is to see into the messages")
    if "messages" in row:
        messages = read_messages(row["messages"], "user")
        prompt = messages[:-1]
    elif "prompt" in row and "completion" in row:
        messages = read_messages(row["prompt"], "user") + read_messages(row["completion"], REPLY)
        prompt = check_prompt(row["prompt"])
    else:
        raise ValueError(f"it has neither messages nor prompt and completion, only {', '.join(map(repr, row))[:200]}")
    roles = [message["role"] for message in messages]
    if REPLY not in roles:
        raise ValueError("it has no turn of the assistant")
    if roles[0] == REPLY or (REPLY, REPLY) in zip(roles, roles[1:], strict=False):
        raise ValueError("a turn of the assistant needs one of another role before it")
    if not all(message["content"].strip() for message in messages if message["role"] == REPLY):
        raise ValueError("a turn of the assistant is empty")
    return Row(prompt, messages)


def read_messages(value: object, role: str) -> list[dict[str, str]]:
    """Returns messages, or a text as one message of this role. Raises: ValueError for anything else, and other keys."""
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    messages = check_prompt(value)
    extra = {key for message in value for key, x in message.items() if key not in ("role", "content") and x}
    if extra:
        keys = ", ".join(sorted(extra))
        raise ValueError(f"its messages have {keys}, which is not rendered: write it into their content")
    return messages
