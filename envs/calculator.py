"""Calculator: arithmetic that a tool does better than the policy, and a price for each call if there is to be one."""

import random
from collections.abc import Mapping
from fractions import Fraction

from envs.base import DIALECTS, Env, Episode, Problem
from envs.data.splits import choose_split
from envs.grading.answers import final_answer, parse_arithmetic
from envs.grading.numerals import same_number
from envs.tools.episode import ToolEpisode, ToolSettings
from utils.settings.errors import UserError

PROMPTS = {
    "bare": "{expression} = ?",
    "full": "What is {expression}? Compute it with the calculator, then answer with the number.",
}
INLINE_PROMPT = " Call it by an expression between two signs, as in {opening}2 * (3 + 4){closing}."
OPERATORS = "+-*/"
NUM_TASKS = {"train": 100_000, "test": 512}


class Calculator(Env):
    """Pays 1 for the exact value as the last number of a reply without a call, less `call_cost` for each call.

    One in five expressions is for the test split.
    """

    is_generated = True
    tokens_per_action = 256
    form = "any"

    def __init__(
        self,
        split: str = "train",
        max_number: int = 99,
        min_operations: int = 1,
        max_operations: int = 3,
        operators: str = "+-*",  # of + - * /; values of quotients are fractions
        dialect: str = "qwen",  # of calls: qwen or python
        prompt: str = "full",  # full, or bare: without a word on the calculator
        max_turns: int = 4,
        call_cost: float = 0.0,
        tool_error_reward: float = 0.0,  # for each call that fails
    ):
        if prompt not in PROMPTS or dialect not in DIALECTS:
            raise UserError(f"Calculator has the prompts {', '.join(PROMPTS)} and the dialects {', '.join(DIALECTS)}")
        if not operators or not set(operators) <= set(OPERATORS):
            raise UserError(f"Calculator has no operators {operators!r}: write some of {OPERATORS}")
        if not 1 <= min_operations <= max_operations <= 50 or not 2 <= max_number <= 10**9 or max_turns < 2:
            raise UserError(
                "Calculator needs 1 <= min_operations <= max_operations <= 50, 2 <= max_number <= 10**9, max_turns >= 2"
            )
        self.split = split
        self.max_number = max_number
        self.num_operations = (min_operations, max_operations)
        self.operators = operators
        self.dialect = dialect
        self.prompt = prompt
        self.max_turns = max_turns
        self.settings = ToolSettings(dialect, error_reward=tool_error_reward, call_cost=call_cost)
        self.num_tasks = NUM_TASKS[split]
        self.problem(0)  # options that leave a split without an expression fail here

    def problem(self, index: int) -> Problem:
        rng = random.Random(f"calculator {self.split} {index}")  # by the text's digest: the same in every process
        for _ in range(1000):
            words = [str(rng.randint(1, self.max_number))]
            for _ in range(rng.randint(*self.num_operations)):
                words += rng.choice(self.operators), str(rng.randint(1, self.max_number))
            expression = " ".join(words)
            if (choose_split(expression, 5) == "test") == (self.split == "test"):
                value, _ = parse_arithmetic(expression)
                return self.ask(expression, value)
        raise UserError(f"Calculator: no expression is left for the {self.split} split: raise max_number")

    def ask(self, expression: str, value: Fraction) -> Problem:
        """Returns the problem of an expression. Full prompts explain inline calls, and announce others by a schema."""
        content = PROMPTS[self.prompt].format(expression=expression)
        dialect = DIALECTS[self.dialect]
        tools = ()
        if self.prompt == "full" and dialect.is_inline:
            content += INLINE_PROMPT.format(opening=dialect.opening, closing=dialect.closing)
        elif self.prompt == "full":
            tools = (calculate,)
        return Problem([{"role": "user", "content": content}], value, tools=tools)

    def episode(self, problem: Problem, seed: int) -> Episode:
        return CalculatorEpisode(problem.answer, self.settings)

    def examples(self, problem: Problem) -> dict[str, str]:
        return {"right": str(problem.answer), "wrong": str(problem.answer + 1)}


class CalculatorEpisode(ToolEpisode):
    """A question: the last number of the last reply is its answer."""

    def __init__(self, value: Fraction, settings: ToolSettings):
        super().__init__([calculate], settings)
        self.value = value

    def final_reward(self, text: str) -> Mapping[str, float]:
        answer = final_answer(text, "any")
        is_right = answer is not None and same_number(str(self.value), answer)
        return {"return": float(is_right), "correct_answer": float(is_right)}


def calculate(expression: str) -> str:
    """
    Computes the exact value of an arithmetic expression.

    Args:
        expression: Whole numbers with + - * / and brackets, for example "2 * (3 + 4)".
    """
    value, _ = parse_arithmetic(str(expression))
    if value is None:
        raise ValueError("this is no expression of whole numbers with + - * / and brackets")
    return str(value)
