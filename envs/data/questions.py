"""Questions with a short answer in one of several forms: the base of GSM8K and of competition mathematics.

Source: the prompt for tags is that of github.com/kvfrans/lmpo, `hash` is the form of nanochat and of GSM8K itself.
"""

from envs.base import Env, Problem, check_choice, shown_form
from envs.data.rows import Row
from envs.grading.answers import FORMS, final_answer

TAGS_PROMPT = """
Respond in the following format. {task} the <answer> tag{note}.
<think>
...
</think>
<answer>
...
</answer>"""
PROMPTS = {
    "tags": TAGS_PROMPT.format(task="Put a single number in", note=""),
    "boxed": "Please reason step by step, and put your final answer within \\boxed{}.",
    "hash": "Think step by step, then give the final number on a last line of its own, after ####.",
    "any": "",
}
WRITTEN = {"tags": "<answer>\n{}\n</answer>", "boxed": "\\boxed{{{}}}", "hash": "#### {}", "any": "The answer is {}."}
WRITTEN["alone"] = "{}"


class Questions(Env):
    """Reward 1.0 for the right answer, `partial` for another one in the required format.

    Subclasses define which answers are right (`is_equal`), and may have other prompts (`prompts`, by form).
    """

    tokens_per_action = 512
    force_answer_at = 50
    prompts = PROMPTS

    def __init__(self, rows: list[Row], note: str, form: str, partial: float):
        check_choice("form", form, FORMS)
        self.rows = rows
        self.note = note
        self.form = form
        self.partial = partial
        self.num_tasks = len(rows)

    def is_equal(self, reference: str, answer: str) -> bool:
        """True if an answer equals the reference; never raises, whatever the answer."""
        raise NotImplementedError

    def problem(self, index: int) -> Problem:
        question, answer, place = self.rows[index]
        system, user = self.prompts[self.form], {"role": "user", "content": question}
        messages = [{"role": "system", "content": system}, user] if system else [user]
        prefix = "<think>" if self.form == "tags" else ""  # the prompts of other forms do not ask for the tag
        return Problem(messages, answer, thinking=True, prefix=prefix, place=place)

    def score(self, problem: Problem, text: str) -> dict[str, float]:
        answer = final_answer(text, self.form)
        formed = answer is not None  # the text holds an answer in the required form
        correct = formed and self.is_equal(problem.answer, answer)
        value = 1.0 if correct else self.partial * formed
        return {"return": value, "correct_answer": float(correct), "format": float(formed)}

    def examples(self, problem: Problem) -> dict[str, str]:
        return written_answers(self.form, problem.answer)

    def trials(self, problem: Problem) -> list[str]:
        return written_trials(problem, self.form, problem.answer)


def written_answers(form: str, answer: str) -> dict[str, str]:
    """Returns a right and a wrong reply in this form, and a reply without any answer."""
    return {
        "right": f"<think>\nLet me see.\n</think>\n{WRITTEN[form].format(answer)}",
        "wrong": f"<think>\nLet me see.\n</think>\n{WRITTEN[form].format('-12345678.9')}",
        "formless": "I would rather not say.",
    }


def written_trials(problem: Problem, form: str, answer: str) -> list[str]:
    """Returns replies with an answer in a form; in the form any as the prompt shows it, or in those of models."""
    shown = shown_form(problem.messages) if form == "any" else form
    return [WRITTEN[way].format(answer) for way in ([shown] if shown else ["any", "alone", "boxed"])]
