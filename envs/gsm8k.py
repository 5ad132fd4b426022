"""GSM8K: grade-school word problems whose answer is a number, graded exactly.

Source: github.com/openai/grade-school-math; the prompt for tags is that of github.com/kvfrans/lmpo, `hash` is the form
that nanochat and the data set itself use.
"""

from typing import Any

from envs.answers import FORMS, final_answer, same_number
from envs.base import Env, Problem
from envs.data import Row, Source, load, text_answer, text_prompt

URL = "https://github.com/openai/grade-school-math/tree/master/grade_school_math/data"
SOURCES = {
    split: Source((f"gsm8k/{split}.jsonl", f"{split}.jsonl", f"main/{split}.parquet"), "openai/gsm8k:main", split, URL)
    for split in ("train", "test")
}
TAGS_PROMPT = """
Respond in the following format. Put {what} in the <answer> tag{note}.
<think>
...
</think>
<answer>
...
</answer>"""
PROMPTS = {
    "tags": TAGS_PROMPT.format(what="a single number", note=""),
    "boxed": "Please reason step by step, and put your final answer within \\boxed{}.",
    "hash": "Think step by step, then give the final number on a last line of its own, after ####.",
    "any": "",
}
WRITTEN = {"tags": "<answer>\n{}\n</answer>", "boxed": "\\boxed{{{}}}", "hash": "#### {}", "any": "The answer is {}"}


class Gsm8k(Env):
    """Reward 1.0 for the right number in the asked form, `partial` for a wrong answer in that form."""

    tokens_per_action = 512
    force_answer_at = 50

    def __init__(
        self,
        split: str = "train",
        data_dir: str = "",
        form: str = "tags",  # in which the answer is asked for: tags, boxed, hash or any
        partial: float = 0.1,
        skip_bad_rows: bool = False,
    ):
        check_form(form)
        self.form, self.partial = form, partial
        self.rows, self.note = load("gsm8k", SOURCES[split], data_dir, read_row, skip_bad_rows)
        self.num_tasks = len(self.rows)

    def problem(self, index: int) -> Problem:
        question, answer = self.rows[index]
        return Problem(ask(PROMPTS[self.form], question), answer, thinking=True)

    def score(self, problem: Problem, text: str) -> dict[str, float]:
        answer = final_answer(text, self.form)
        correct = answer is not None and same_number(problem.answer, answer)
        return outcome(correct, answer is not None, self.partial)

    def examples(self, problem: Problem) -> dict[str, str]:
        return written_answers(self.form, problem.answer)


def read_row(row: dict[str, Any]) -> Row:
    """A row of the data set: the number stands after #### at the end of the worked solution."""
    _, mark, answer = text_answer(row["answer"]).rpartition("####")
    if not mark:
        raise ValueError("its answer has no #### before the final number")
    return Row(text_prompt(row["question"]), answer.strip())


def check_form(form: str) -> None:
    if form not in FORMS:
        raise ValueError(f"form={form}: choose one of {', '.join(FORMS)}")


def ask(system: str, question: str) -> list[dict[str, str]]:
    """Chat messages: the system prompt, where there is one, and the question."""
    return [{"role": "system", "content": system}] * bool(system) + [{"role": "user", "content": question}]


def outcome(correct: bool, formed: bool, partial: float) -> dict[str, float]:
    """The scores of a reply: "format" tells that it holds an answer in the asked form."""
    value = 1.0 if correct else partial * formed
    return {"return": value, "correct_answer": float(correct), "format": float(formed)}


def written_answers(form: str, answer: str) -> dict[str, str]:
    """A right and a wrong reply in this form, and a right answer out of form."""
    return {
        "right": f"<think>\nLet me see.\n</think>\n{WRITTEN[form].format(answer)}",
        "wrong": f"<think>\nLet me see.\n</think>\n{WRITTEN[form].format('-12345678.9')}",
        "formless": "I would rather not say.",
    }
