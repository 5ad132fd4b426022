r"""Competition mathematics with short answers, numbers or LaTeX: DeepScaleR to train on; AIME, AMC, MATH-500 to test.

Source: github.com/agentica-project/deepscaler (training set, AMC, MATH-500), the MAA's AIME 2024 and 2025.
"""

from envs.base import check_choice
from envs.data.questions import PROMPTS, TAGS_PROMPT, Questions
from envs.data.rows import RawRow, Row, Source, find_local, load_rows, text_answer, text_prompt
from envs.data.splits import remove_overlap, select_split
from envs.grading.answers import extract_boxed
from envs.grading.equality import same_math
from utils.settings.errors import UserError, check_installed

DEEPSCALER = "https://github.com/agentica-project/deepscaler/tree/main/deepscaler/data"
QWEN = "https://github.com/QwenLM/Qwen2.5-Math/tree/main/evaluation/data"
SOURCES = {
    "deepscaler": Source(
        ("deepscaler/deepscaler.jsonl.gz", "deepscaler/deepscaler.jsonl", "deepscaler.jsonl.gz", "deepscaler.json"),
        "agentica-org/DeepScaleR-Preview-Dataset", url="https://github.com/nick7nlp/FastCuRL",
    ),
    "aime": Source(("aime/aime24.jsonl", "aime24.jsonl", "aime24/test.jsonl"), "HuggingFaceH4/aime_2024", url=QWEN),
    "aime25": Source(("aime/aime25.jsonl", "aime25.jsonl"), "MathArena/aime_2025", url="https://github.com/QwenLM/QwQ"),
    "amc": Source(("amc/amc_2022_2023.jsonl", "amc_2022_2023.jsonl", "test/amc.json", "amc.json"),
                  "AI-MO/aimo-validation-amc", url=DEEPSCALER),
    "amc23": Source(("amc/amc23.jsonl", "amc23.jsonl", "amc23/test.jsonl"), "zwhe99/amc23", "test", QWEN),
    "math500": Source(("math500/math500.jsonl", "math500.jsonl", "test/math.json", "math.json"),
                      "HuggingFaceH4/MATH-500", "test", DEEPSCALER),
}  # fmt: skip
TRAINING = {"deepscaler": 4096}  # sets to train on, with the tokens of a reply; the others are benchmarks
TASK, NOTE = "Put the final answer within", ", use latex \\frac{a}{b} for fractions"


class Mathematics(Questions):
    """An answer that math-verify finds equal to the reference is correct.

    One in 64 problems of a training set is kept for its test split, and one in 128 for its valid split. Problems of a
    benchmark are removed from training sets. A benchmark has test problems only: both of its splits are the whole set,
    so do not train on it.
    """

    splits = ("train", "valid", "test")

    prompts = PROMPTS | {"tags": TAGS_PROMPT.format(task=TASK, note=NOTE)}

    def __init__(
        self,
        split: str = "train",
        data_set: str = "deepscaler",
        data_dir: str = "",
        form: str = "tags",  # form of answers that prompts ask for: tags, boxed, hash or any
        partial: float = 0.1,
        skip_bad_rows: bool = False,
    ):
        check_choice("data_set", data_set, SOURCES)
        if split == "valid" and data_set not in TRAINING:
            raise UserError(
                f"{data_set} has no -valid, since it is a benchmark with test problems only: give {data_set}-test"
            )
        rows, note = load_rows(data_set, SOURCES[data_set], data_dir, read_row, skip_bad_rows)
        if data_set in TRAINING:
            rows, selected = select_split(rows, split, 64)
            note += selected
            if split != "test":
                rows, compared = remove_benchmarks(rows, data_dir)
                note += compared
            self.tokens_per_action = TRAINING[data_set]
        elif split == "train":
            note += "; a benchmark, with the same problems in its test split: not to train on"
        super().__init__(rows, note, form, partial)
        check_installed("math_verify", f"the environment {data_set}")
        same_math("x+1", "1+x")  # loads the grader, which takes a second, before any clock runs

    def is_equal(self, reference: str, answer: str) -> bool:
        return same_math(reference, answer)


def remove_benchmarks(rows: list[Row], data_dir: str) -> tuple[list[Row], str]:
    """Returns the rows that stand in none of the benchmarks whose files are in `data_dir`, and a note on the others."""
    benchmarks = [name for name in SOURCES if name not in TRAINING]
    compared = [name for name in benchmarks if find_local(SOURCES[name], data_dir)]
    unknown = [name for name in benchmarks if name not in compared]
    tests = []
    for name in compared:
        benchmark, _ = load_rows(name, SOURCES[name], data_dir, read_row, skip_bad_rows=True)
        tests += benchmark
    rows, num_removed = remove_overlap(rows, tests)
    note = f"; {num_removed} removed that {', '.join(compared)} have, too" if compared else ""
    return rows, note + (f"; not compared with {', '.join(unknown)}: no file in --data_dir" if unknown else "")


def read_row(row: RawRow) -> Row:
    """Returns the problem in a row of any of these sets: problem or question, and answer."""
    answer = text_answer(row["answer"])
    return Row(text_prompt(row["problem" if "problem" in row else "question"]), extract_boxed(answer) or answer)
