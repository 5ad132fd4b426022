"""A calculator as a tool of a class in the form of TRL's environment_factory: --episode calculator.py:Calculator.

Its result says what to do with it. Qwen2.5-Coder-0.5B gives a bare number to the calculator again, up to the limit.
"""

from envs.grading.answers import parse_arithmetic


class Calculator:
    """Rows have a prompt with an expression, and its value as the answer."""

    def reset(self, **row: object) -> None:
        """Begins an episode."""

    def calculate(self, expression: str) -> str:
        """
        Computes the exact value of an arithmetic expression.

        Args:
            expression: Whole numbers with + - * and brackets.
        """
        value, _ = parse_arithmetic(str(expression))
        if value is None:
            raise ValueError("this is no expression of whole numbers with + - * and brackets")
        return f"The result is {value}. Now write it in a sentence, without a call."
