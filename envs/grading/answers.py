"""The only parser of model answers: tags, boxes, exact numbers, arithmetic without eval; the rest is beside this file.

Everything here and in prose.py, words.py, numerals.py and equality.py takes any text whatever (megabytes, deep nesting,
NUL, surrogates) and never raises. Everything but `same_math` of equality.py returns at once; that too, but for LaTeX
that gets past its guards, which is what time limits are for.
"""

import ast
import operator
import re
from fractions import Fraction

from envs.grading import MAX_BOX

OPEN, CLOSE = "<answer>", "</answer>"
FORMS = ("tags", "boxed", "hash", "any")  # <answer>N</answer>, \boxed{N}, #### N, and the last of whatever is there
MAX_ARITHMETIC = 1000  # characters; a longer expression is nobody's answer, and the limit bounds the work below


# where the answer stands


def extract_answer(text: str) -> str | None:
    """Returns the text of the last complete <answer> ... </answer>, stripped; None if there is none."""
    start = text.rfind(OPEN, 0, max(text.rfind(CLOSE), 0))
    return text[start + len(OPEN) : text.find(CLOSE, start)].strip() if start >= 0 else None


def extract_boxed(text: str) -> str | None:
    r"""Returns the text of the last complete \boxed{...}, stripped; None if there is none."""
    end = len(text)
    for _ in range(100):  # boxes that never close; more are not looked at
        start = text.rfind("\\boxed", 0, end)
        if start < 0:
            break
        body, depth = text[start + len("\\boxed") :][:MAX_BOX].lstrip(), 0
        for brace in re.finditer(r"\\.|[{}]", body if body.startswith("{") else "", re.DOTALL):
            depth += {"{": 1, "}": -1}.get(brace[0], 0)
            if depth == 0 and brace[0] == "}":
                return body[1 : brace.start()].strip()
        end = start
    return None


def final_answer(text: str, form: str) -> str | None:
    r"""Returns the answer that a text gives in a form of FORMS, without a \boxed{} around it; None without one."""
    match form:
        case "tags":
            answer = extract_answer(text)
        case "hash":
            from envs.grading.prose import extract_hash

            answer = extract_hash(text)
        case "boxed":
            return extract_boxed(text)
        case _:
            from envs.grading.prose import extract_prose, last_hash

            extractors = (extract_answer, extract_boxed, last_hash, extract_prose)
            answers = (extract(text) for extract in extractors)
            answer = next((answer for answer in answers if answer is not None), None)
    boxed = extract_boxed(answer or "")
    return answer if boxed is None else boxed


# arithmetic

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def parse_arithmetic(text: str) -> tuple[Fraction | None, list[int]]:
    """Returns the exact value of an expression in + - * / ( ) over non-negative integers, and these integers in order.

    (None, []) for anything else, such as names, powers, decimals, division by zero, or more than MAX_ARITHMETIC
    characters.
    """
    if len(text) > MAX_ARITHMETIC:
        return None, []
    text = " ".join(text.split())  # on one line: Python would read a line break as the end or as an indentation
    if not set(text) <= set("0123456789+-*/() "):
        return None, []
    numbers: list[int] = []
    try:
        return _value(ast.parse(text, mode="eval").body, numbers), numbers
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):  # the last two: nesting
        return None, []


def _value(node: ast.expr, numbers: list[int]) -> Fraction:
    """Returns the value of a syntax tree; appends its integers to `numbers`. Raises ValueError on other syntax."""
    match node:
        case ast.Constant(value=int(number)):
            numbers.append(number)
            return Fraction(number)
        case ast.UnaryOp(ast.UAdd(), operand):
            return _value(operand, numbers)
        case ast.UnaryOp(ast.USub(), operand):
            return -_value(operand, numbers)
        case ast.BinOp(left, sign, right) if type(sign) in OPERATORS:
            return OPERATORS[type(sign)](_value(left, numbers), _value(right, numbers))
    raise ValueError(f"not arithmetic: {type(node).__name__}")
