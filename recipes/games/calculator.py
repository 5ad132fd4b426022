"""Calculator: arithmetic that a tool does better than the policy, with an optional cost for each call."""

import random
from dataclasses import dataclass
from fractions import Fraction
from functools import partial

from envs.base import DIALECTS, Env, Episode, Problem, check_choice, choose_split
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


@dataclass(eq=False)
class Calculator(Env):
    """Reward 1 for the exact value as the last number of a reply without a call, minus `call_cost` for each call.

    One in five expressions is for the test split.
    """

    is_generated = True
    tokens_per_action = 256
    form = "any"

    split: str = "train"
    max_number: int = 99
    min_operations: int = 1
    max_operations: int = 3
    operators: str = "+-*"  # some of + - * /; values of quotients are fractions
    dialect: str = "qwen"  # form of calls: qwen, python or json
    prompt: str = "full"  # full; bare: does not mention the calculator
    max_turns: int = 4
    call_cost: float = 0.0
    tool_error_reward: float = 0.0  # added for each call that fails

    def __post_init__(self):
        check_choice("prompt", self.prompt, PROMPTS)
        check_choice("dialect", self.dialect, DIALECTS)
        if not self.operators or not set(self.operators) <= set(OPERATORS):
            raise UserError(f"Calculator has no operators {self.operators!r}: write some of {OPERATORS}")
        if not 1 <= self.min_operations <= self.max_operations <= 50:
            raise UserError("Calculator needs 1 <= min_operations <= max_operations <= 50: correct --env_options")
        if not 2 <= self.max_number <= 10**9 or self.max_turns < 2:
            raise UserError("Calculator needs 2 <= max_number <= 10**9, and max_turns >= 2: correct --env_options")
        self.num_tasks = NUM_TASKS[self.split]
        self.problem(0)  # options that leave a split without an expression fail here

    def problem(self, index: int) -> Problem:
        rng = random.Random(f"calculator {self.split} {index}")  # by the text's digest: the same in every process
        for _ in range(1000):
            words = [str(rng.randint(1, self.max_number))]
            for _ in range(rng.randint(self.min_operations, self.max_operations)):
                words += rng.choice(self.operators), str(rng.randint(1, self.max_number))
            expression = " ".join(words)
            if (choose_split(expression) == "test") == (self.split == "test"):
                value, _ = parse_arithmetic(expression)
                return self.ask(expression, value)
        raise UserError(f"no expression of Calculator is left for the {self.split} split: raise max_number")

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
        settings = ToolSettings(self.dialect, error_reward=self.tool_error_reward, call_cost=self.call_cost)
        return ToolEpisode([calculate], settings, partial(self.score, problem))

    def score(self, problem: Problem, text: str) -> dict[str, float]:
        answer = final_answer(text, self.form)
        is_right = answer is not None and same_number(str(problem.answer), answer)
        return {"return": float(is_right), "correct_answer": float(is_right)}

    def examples(self, problem: Problem) -> dict[str, str]:
        return {"right": str(problem.answer), "wrong": str(problem.answer + 1)}


def calculate(expression: str) -> str:
    """
    Computes the exact value of an arithmetic expression.

    Args:
        expression: Whole numbers with + - * / and brackets, for example "2 * (3 + 4)".
    """
    value, _ = parse_arithmetic(str(expression))
    if value is None:
        raise ValueError("this is not an expression of whole numbers with + - * / and brackets")
    return str(value)
