"""The only parser of model answers: tags, boxes, exact numbers, arithmetic without eval, LaTeX by math-verify.

Everything here takes any text whatever (megabytes, deep nesting, NUL, surrogates) and never raises. Everything but
`same_math` returns at once; that too, but for LaTeX that gets past its guards, which is what time limits are for.
"""

import ast
import functools
import logging
import math
import re
from fractions import Fraction
from itertools import pairwise
from typing import Any

from envs.numerals import find_number, parse_number

OPEN, CLOSE = "<answer>", "</answer>"
FORMS = ("tags", "boxed", "hash", "any")  # <answer>N</answer>, \boxed{N}, #### N, and the last of whatever is there
MAX_ARITHMETIC = 1000  # characters; a longer expression is nobody's answer, and the limit bounds the work below
MAX_MATH = 2000  # characters that math-verify gets to see
MAX_OPERATORS = 200  # in what math-verify gets to see
MAX_BOX = 5000
MAX_DEPTH = 12  # brackets within brackets; the parser's time doubles with each level
MAX_WEIGHT = 20_000  # about the bits of the largest number that sympy may come to compute


# where the answer stands


def extract_answer(text: str) -> str | None:
    """What stands in the last complete <answer> ... </answer>, stripped; None where there is none."""
    start = text.rfind(OPEN, 0, max(text.rfind(CLOSE), 0))
    return text[start + len(OPEN) : text.find(CLOSE, start)].strip() if start >= 0 else None


def extract_boxed(text: str) -> str | None:
    r"""What stands in the last complete \boxed{...}, stripped; None where there is none."""
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


def extract_hash(text: str) -> str | None:
    """What stands behind the last ####, up to the end of the line; None where there is none."""
    _, found, rest = text.rpartition("####")
    return rest.lstrip(" \t").split("\n", 1)[0].strip() if found else None


NUMBERS = re.compile(r"\d[\d,]*(?:\.\d+)?|\.\d+")
CLAUSE_END = re.compile(r"[;\n]|[,.:?](?=\s)")
SEPARATE = re.compile(rf"[^\W\d_]{{2}}|{CLAUSE_END.pattern}")  # between numbers that do not belong together


def extract_last_number(text: str) -> str | None:
    """Returns the last number in the last 2000 characters of a text, with its sign; None where there is none.

    Its sign, scale and fraction belong to it ("18 thousand", "1 1/2"). Where something else changes it ("half of 18")
    all of its clause is returned.
    """
    text = text[-2000:]
    numbers = [*NUMBERS.finditer(text)]
    if not numbers:
        return None
    start = 0
    for before, number in pairwise(numbers):
        if SEPARATE.search(text[before.end() : number.start() + 1]):
            start = before.end()
    last = numbers[-1]
    clauses = [end.end() for end in CLAUSE_END.finditer(text, start, last.start())]
    end = CLAUSE_END.search(text, last.end())
    clause = text[max([start, *clauses]) : end.start() if end else len(text)].strip()
    found = find_number(clause, words=True)
    return found[1] if found else clause


def final_answer(text: str, form: str) -> str | None:
    r"""The answer that a text gives in this form (one of FORMS), without a \boxed{} around it; None where none is."""
    match form:
        case "tags":
            answer = extract_answer(text)
        case "hash":
            answer = extract_hash(text)
        case "boxed":
            return extract_boxed(text)
        case _:
            found = (extract(text) for extract in (extract_answer, extract_boxed, extract_hash, extract_last_number))
            answer = next((answer for answer in found if answer is not None), None)
    boxed = extract_boxed(answer) if answer and "\\boxed" in answer else None
    return answer if boxed is None else boxed


# arithmetic


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


# mathematics


def same_math(reference: str, answer: str) -> bool:
    """Whether two pieces of mathematics (LaTeX, or text that holds some) are equal: exact numbers, else math-verify.

    False for what is too long, too deeply nested or too large to be computed, unless both are written alike.
    """
    if (written := simplified(reference)) and written == simplified(answer):
        return True
    expected, given = parse_number(reference), parse_number(answer)
    if expected and given:
        if expected.equals(given):
            return True
        if expected.value.denominator == given.value.denominator == 1:  # fractions may be meant as roundings
            return False
    expressions = [*map(parse_math, (reference, answer))]
    if not all(expressions):
        return False
    from math_verify import verify

    return verify(*expressions, timeout_seconds=None)


def simplified(text: str) -> str:
    """A piece of LaTeX without what does not change its meaning, for a first look."""
    if len(text) > 2 * MAX_BOX:
        return ""
    return re.sub(r"\s|\\[!,;: ]|\\left|\\right|\$|\.$|(?<=\\)[dt](?=frac)", "", text.strip())


def parse_math(text: str) -> list[Any]:
    """What math-verify reads in a text, as sympy's expressions; nothing where that could take for ever."""
    return _expressions(text) if is_tame(text) else []


@functools.lru_cache(maxsize=1024)  # a reference is compared with every reply of its group
def _expressions(text: str) -> list[Any]:
    import math_verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own time limit, a signal, is off
    if not re.search(r"\$|\\boxed|\\\(|\\\[", text):
        text = f"${text}$"
    found = math_verify.parse(text, parsing_timeout=None)
    return [x for x in found if isinstance(x, str) or weight(x) <= MAX_WEIGHT]


def is_tame(text: str) -> bool:
    """Whether a piece of LaTeX can be parsed in reasonable time."""
    if len(text) > MAX_MATH or sum(map(text.count, "+-*/^|<=")) > MAX_OPERATORS:
        return False
    return nesting(text) <= MAX_DEPTH and not HUGE.search(text)


# What takes for ever before there is anything to weigh.
HUGE = re.compile(r"(?:[-+|]\s*){20}|\\[dt]?binom.*(?:\d{5}|\\infty)|\\choose|\d{5,}[\s})]*!|![\s})]*!", re.DOTALL)


def nesting(text: str) -> int:
    """How deep brackets of any kind stand within each other."""
    depth = deepest = 0
    for character in text:
        if character in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif character in ")]}":
            depth = max(depth - 1, 0)
    return deepest


def weight(expression: Any) -> float:
    """Roughly the bits of the largest number (or 64 for each term of an expanded power) in an evaluated expression."""
    parts = [weight(part) for part in getattr(expression, "args", expression)]  # a matrix is a sequence
    if not parts:
        return math.log2(2 + abs(expression)) if getattr(expression, "is_Rational", False) else 1.0
    match type(expression).__name__:
        case "Pow" | "MatPow" if expression.args[1].is_infinite:
            return math.inf
        case "Sum" | "Product" | "Integral" | "Limit" if "oo" in str(expression.args[1:]):
            return math.inf  # nobody's final answer, and sympy may look for its value for ever
        case "Pow" | "MatPow":
            terms = 64 if expression.args[0].is_Add and expression.args[0].free_symbols else 1
            return terms * parts[0] * 2 ** min(parts[1], 64)
        case "factorial" | "gamma" | "binomial" | "Sum" | "Product" | "factorial2" | "subfactorial":
            return sum(parts) * 2 ** min(max(parts), 64)
    return sum(parts)
