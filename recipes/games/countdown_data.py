"""Countdown on the problems of a data set, by default the one of TinyZero: 3 or 4 numbers, 490,000 rows."""

from envs.base import Problem, check_choice
from envs.countdown import PROMPTS, Countdown, set_split
from envs.data.rows import RawRow, Row, Source, find_local, load_rows
from utils.settings.errors import UserError

HUB = "Jiayi-Pan/Countdown-Tasks-3to4"
SOURCES = {
    "train": Source(("countdown/train.jsonl", "train.jsonl", "train.parquet"), HUB),
    "test": Source(("countdown/test.jsonl", "test.jsonl", "test.parquet", "test_tinyzero_format.parquet")),
}


class CountdownData(Countdown):
    """The same rewards on the problems of a data set.

    Training leaves out the rows with the numbers of a problem in a test file; without one, a fifth of all sets of
    numbers is kept for the test. A tenth is kept for the valid split.
    """

    is_generated = False
    truncation_penalty = 0.0  # replaces the field of Countdown

    def __init__(
        self,
        split: str = "train",
        data_dir: str = "",
        prompt: str = "full",
        partial: float = 0.1,
        num_tasks: int = 0,  # 0: all
        skip_bad_rows: bool = False,
    ):
        check_choice("prompt", prompt, PROMPTS)
        self.prompt, self.partial = prompt, partial
        has_test_file = data_dir and find_local(SOURCES["test"], data_dir)
        source = SOURCES["test" if split == "test" and has_test_file else "train"]
        rows, self.note = load_rows("countdown34", source, data_dir, read_row, skip_bad_rows)
        if not has_test_file:
            rows = [row for row in rows if set_split(row.answer[0]) == split]
        elif split != "test":
            tests, _ = load_rows("countdown34", SOURCES["test"], data_dir, read_row, skip_bad_rows)
            taken = {tuple(sorted(row.answer[0])) for row in tests}
            rows = [row for row in rows if tuple(sorted(row.answer[0])) not in taken]
            rows = [row for row in rows if (set_split(row.answer[0]) == "valid") == (split == "valid")]
        self.instances = [row.answer for row in rows[: num_tasks or None]]
        self.num_tasks = len(self.instances)

    def problem(self, index: int) -> Problem:
        return self.make_problem(*self.instances[index])

    def bins(self) -> list[str]:
        """Returns how many numbers each problem has."""
        return [str(len(numbers)) for numbers, _ in self.instances]


def read_row(row: RawRow) -> Row:
    """Returns the problem in a row with the columns nums and target."""
    numbers, target = row["nums"], row["target"]
    if not numbers or not isinstance(numbers, list) or any(type(x) is not int or x < 0 for x in [*numbers, target]):
        raise UserError("nums must be a list of integers, and target an integer")
    return Row(f"{numbers} {target}", (tuple(numbers), target))
