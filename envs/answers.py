"""The only parser of model answers: tags, and arithmetic without eval.

Everything here takes any text whatever (megabytes, deep nesting, NUL, surrogates), returns at once and never raises.
"""

import ast
from fractions import Fraction

OPEN, CLOSE = "<answer>", "</answer>"
MAX_ARITHMETIC = 1000  # characters; a longer expression is nobody's answer, and the limit bounds the work below


def extract_answer(text: str) -> str | None:
    """What stands in the last complete <answer> ... </answer>, stripped; None where there is none."""
    start = text.rfind(OPEN, 0, max(text.rfind(CLOSE), 0))
    return text[start + len(OPEN) : text.find(CLOSE, start)].strip() if start >= 0 else None


def parse_arithmetic(text: str) -> tuple[Fraction | None, list[int]]:
    """The exact value of an expression in + - * / ( ) over non-negative integers, and the integers as they occur in it.

    Signs before a number or a bracket are allowed ("-(2-5)*4" is 12). (None, []) for anything else: names, powers,
    decimals, a number straight after another, division by zero, more than MAX_ARITHMETIC characters.
    """
    if len(text) > MAX_ARITHMETIC:
        return None, []
    text = " ".join(text.split())  # on one line, else Python reads a line break as the end or as an indentation
    if not set(text) <= set("0123456789+-*/() "):
        return None, []
    numbers: list[int] = []
    try:
        return _value(ast.parse(text, mode="eval").body, numbers), numbers
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):  # the last two: nesting
        return None, []


def _value(node: ast.expr, numbers: list[int]) -> Fraction:
    """The value of a syntax tree; appends the integers in it to `numbers`. Raises ValueError on other syntax."""
    match node:
        case ast.Constant(value=int(number)):
            numbers.append(number)
            return Fraction(number)
        case ast.UnaryOp(ast.UAdd(), operand):
            return _value(operand, numbers)
        case ast.UnaryOp(ast.USub(), operand):
            return -_value(operand, numbers)
        case ast.BinOp(left, ast.Add(), right):
            return _value(left, numbers) + _value(right, numbers)
        case ast.BinOp(left, ast.Sub(), right):
            return _value(left, numbers) - _value(right, numbers)
        case ast.BinOp(left, ast.Mult(), right):
            return _value(left, numbers) * _value(right, numbers)
        case ast.BinOp(left, ast.Div(), right):
            return _value(left, numbers) / _value(right, numbers)
    raise ValueError(f"not arithmetic: {type(node).__name__}")
