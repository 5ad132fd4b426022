"""GSM8K: grade-school word problems with a number as answer, graded exactly; from openai/grade-school-math (GitHub)."""

from envs.data.questions import Questions
from envs.data.rows import RawRow, Row, Source, load_rows, text_answer, text_prompt
from envs.data.splits import select_split
from envs.grading.numerals import same_number
from utils.settings.errors import UserError

URL = "https://github.com/openai/grade-school-math/tree/master/grade_school_math/data"
SOURCES = {
    split: Source(
        (f"gsm8k/{split}.jsonl", f"{split}.jsonl", f"main/{split}.parquet", f"main/{split}-00000-of-00001.parquet"),
        "openai/gsm8k:main", split, URL,
    )
    for split in ("train", "test")
}  # fmt: skip


class Gsm8k(Questions):
    """A reply with the right number, in any spelling, is correct. One in 32 training problems is for validation."""

    splits = ("train", "valid", "test")

    num_eval_tasks = 0  # all 1,319, as is usual

    def __init__(
        self,
        split: str = "train",
        data_dir: str = "",
        form: str = "tags",  # form of answers that prompts ask for: tags, boxed, hash or any
        partial: float = 0.1,
        skip_bad_rows: bool = False,
    ):
        source = SOURCES["test" if split == "test" else "train"]
        rows, note = load_rows("gsm8k", source, data_dir, read_row, skip_bad_rows)
        if split != "test":
            rows, selected = select_split(rows, split, 16, tests=[])
            note += selected
        super().__init__(rows, note, form, partial)

    def is_equal(self, reference: str, answer: str) -> bool:
        return same_number(reference, answer)


def read_row(row: RawRow) -> Row:
    """Returns the problem in a row of the data set: the number is after #### at the end of the worked solution."""
    _, mark, answer = text_answer(row["answer"]).rpartition("####")
    if not mark:
        raise UserError("its answer has no #### before the final number")
    return Row(text_prompt(row["question"]), answer.strip())
