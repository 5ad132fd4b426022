"""Pairs of replies, of which one is preferred, from files or the hub: the data of dpo.py."""

from dataclasses import dataclass

from envs.data.files import RawRow
from envs.data.messages import CONVERSATIONS, PROMPTS, REPLY, as_messages, get_column, read_prompt
from envs.data.rows import LeftOut, Row, first_of
from envs.own.written import DataConfig, parse_columns, read_conversation
from utils.settings.errors import UserError
from utils.settings.options import option

SIDES = ("chosen", "rejected")
FORM = "prompt=COLUMN,chosen=COLUMN,rejected=COLUMN"
STORED = ("ref_chosen_logps", "ref_rejected_logps")  # columns of TRL that are not read


@dataclass(frozen=True)
class PairConfig(DataConfig):
    """Pairs."""

    noun = "pair"

    pairs_from: str = option(
        "",
        "Run folder whose stored rollouts (--save_rollouts all) are the pairs, instead of --data: the best and the "
        "worst of each group",
        essential=True,
    )

    def __post_init__(self):
        if bool(self.data) == bool(self.pairs_from):
            raise UserError("pairs come from --data or from --pairs_from: give one of the two")
        self.check()

    @property
    def source(self) -> str:
        return self.data or self.pairs_from

    @property
    def named_columns(self) -> dict[str, str]:
        return parse_columns(self.columns, {name: name for name in ("prompt", *SIDES)}, FORM)

    def read(self, row: RawRow) -> Row:
        """Returns the prompt and the two conversations of a row: see `read_pair`."""
        return read_pair(row, self.named_columns)

    @property
    def encoding(self) -> dict[str, str | int]:
        return super().encoding | {"group_size": 2}


def read_pair(row: RawRow, columns: dict[str, str]) -> Row:
    """Returns a row of data: its prompt, by which it is held out, and the chosen and the rejected conversation.

    Replies of the prompt are not trained. Raises: ValueError for a row that is no pair.
    """
    names = [columns.get(name, name) for name in SIDES]
    try:
        sides = [as_messages(get_column(row, name), REPLY) for name in names]
        prompt = columns.get("prompt") or first_of(PROMPTS, row)
        said = read_prompt(get_column(row, prompt)) if prompt else ""
    except KeyError as error:
        found = f"it has no column {error}, only {', '.join(map(repr, row))[:200]}"
        raise ValueError(f"{found}: name the columns by --columns {FORM}") from error
    if wrong := next((name for name in STORED if row.get(name) is not None), ""):
        raise ValueError(f"its column {wrong} is not used, since the reference model is computed here: remove it")
    if all(side and side[0]["role"] != REPLY for side in sides):  # they begin with the prompt, whatever its column has
        num_shared = next((i for i, (a, b) in enumerate(zip(*sides, strict=False)) if a != b), min(map(len, sides)))
        said, sides = sides[0][:num_shared], [side[num_shared:] for side in sides]
    if not said:
        raise ValueError("it has no prompt: write a column prompt, or begin chosen and rejected with the same messages")
    if sides[0] == sides[1]:
        raise LeftOut("with equal replies")
    said = [{**message, "weight": 0} if message["role"] == REPLY else message for message in as_messages(said, "user")]
    rest = {name: x for name, x in row.items() if name not in (*CONVERSATIONS, *PROMPTS, *names, prompt)}
    pair = [read_conversation(rest | {"prompt": said, "completion": side}) for side in sides]
    return Row(pair[0].prompt, [conversation for side in pair for conversation in side.answer])
