"""Whether two pieces of mathematics are equal: exact numbers, words, LaTeX by math-verify."""

import functools
import importlib.util
import logging
import re
import unicodedata
from fractions import Fraction
from itertools import accumulate
from types import ModuleType
from typing import TYPE_CHECKING, TypeAlias

from envs.grading.answers import extract_answer, extract_boxed
from envs.grading.numerals import (
    CHANGING,
    EMPHASIS,
    EXACT,
    HARMFUL,
    MONEY,
    SUPERSCRIPTS,
    UNIT_OF,
    UNIT_PHRASE,
    VULGAR,
    Number,
    agree,
    digits_written,
    find_number,
    parse_number,
)
from envs.grading.prose import CLAUSE_END, PROSE, extract_last_number, last_hash
from envs.grading.words import (
    CHOICE_LABEL,
    LEAD,
    MAX_MATH,
    PLAIN_NAMES,
    SENTENCE,
    WRAPPER,
    choice,
    letters,
    simplified,
    words,
)

if TYPE_CHECKING:
    import sympy

Expression: TypeAlias = "sympy.Basic | sympy.MatrixBase | str"

MAX_OPERATORS = 200  # most operators in a text for math-verify
MAX_DEPTH = 10  # brackets within brackets; the parser's time doubles with each level
SEVERAL_BOXES = re.compile(r"\\boxed[^\n]{1,100}\\boxed")


def final_reference(text: str) -> str:
    r"""Returns the answer that a reference gives between tags, in a box or after ####; without these, the text itself.

    Several boxes on a line are all the answer (\boxed{1} and \boxed{2}); the text itself is then returned.
    """
    answers = (extract(text) for extract in (extract_answer, extract_boxed, last_hash))
    answer = next((answer for answer in answers if answer), text)
    if SEVERAL_BOXES.search(text[-MAX_MATH:]):
        return answer if len(text) > MAX_MATH else text
    return extract_boxed(answer) or answer


def same_math(reference: str, answer: str) -> bool:
    """True if two pieces of mathematics (LaTeX, or text that holds some) are equal: exact numbers, or by math-verify.

    Of a worked solution, the answer at its end is the reference. Texts that do not parse, or are too long or large to
    be computed, are equal only if they are written alike. It never raises.
    """
    try:
        return _same_math(final_reference(reference), answer)
    except Exception:  # of the parser or of sympy: OverflowError, RecursionError, MemoryError and others
        return False


def _same_math(reference: str, answer: str) -> bool:
    reference, answer = reference.rstrip(" \t\n\\"), answer.rstrip(" \t\n\\")  # a stray \\ at the end
    simple_reference = simplified(reference)
    if simple_reference and simple_reference == simplified(answer):
        return True
    reference, answer = EMPHASIS.sub(r"\2", reference), LEAD.sub("", EMPHASIS.sub(r"\2", answer))
    answer = re.sub(r"(?<=[^\W\d_]{2})!+$", "", answer)
    if not (is_tame(reference) and is_tame(answer)):
        return False
    if (chosen := choice(reference)) and choice(answer):
        return chosen == choice(answer)
    reference, answer = (CHOICE_LABEL.sub("", text) if choice(text) else text for text in (reference, answer))
    if (named := words(reference)) and letters(answer):
        return named == letters(answer)
    reference, reference_unit = split_unit(reference)
    answer, answer_unit = split_unit(answer)
    if reference_unit and answer_unit and reference_unit != answer_unit:
        return False
    digits = digits_written(reference, answer)
    reference_number = parse_number(reference)
    answer_number = parse_number(answer) or (reference_number and sentence_number(answer))
    if reference_number and answer_number:
        if reference_number.equals(answer_number, digits):
            return True
        # Commas may separate, and fractions may be ratios.
        if reference_number.value.denominator == answer_number.value.denominator == 1:
            return False
    if not may_be_same(reference, answer):
        return False
    reference_math, answer_math = parse_math(reference, is_reference=True), parse_math(answer)
    if not (reference_math and answer_math):
        return False
    return grader().verify(reference_math, answer_math, float_rounding=digits, timeout_seconds=None)


# differences that math-verify overlooks

POWER_OF = {"sq": 2, "square": 2, "squared": 2, "2": 2, "²": 2, "cu": 3, "cubic": 3, "cubed": 3, "3": 3, "³": 3}
UNIT = re.compile(rf"(?<=[\d}})$])(?P<space>(?:\s|\\[,;: ]|~)*){UNIT_PHRASE}\s*\}}?\s*$")
COUNTED = re.compile(r"(.*\S)\s+([^\W\d_]{3,})")  # 18 apples
MARKS = [  # signs that are units
    (re.compile(r"\s*(?:\\[$]|[$](?=[^$]*$))"), "dollar"),
    (re.compile(r"\s*€|.*€$", re.DOTALL), "euro"),
    (re.compile(r".*\\?%$", re.DOTALL), "percent"),
    (re.compile(r".*(?:°|\\circ\s*\}?|\\degree)$", re.DOTALL), "degree"),
]


def split_unit(text: str) -> tuple[str, tuple[str, int, str] | None]:
    r"""Returns a text without the unit at its end, and that unit: "15\text{ cm}^2" is ("15", ("cm", 2, "")).

    A letter straight after a number stays, as it may be a variable, and so do signs ($, %, °).
    """
    text = text.strip()
    for mark, unit in MARKS:
        if mark.match(text):
            return text, (unit, 1, "")
    match = UNIT.search(text)
    if match is None:
        counted = COUNTED.fullmatch(text)
        if counted and not HARMFUL.fullmatch(counted[2]) and parse_number(counted[1]):
            return counted[1], split_unit(counted[1])[1] or (counted[2].lower().rstrip("s"), 1, "")
        number = PROSE.search(text) and find_number(text, words=True)  # 3 km long
        return text, split_unit(number[1])[1] if number and number[1] != text else None
    power = match["kind"] or re.sub(r"[\^{}\s]", "", match["power"] or "")
    is_variable = len(match["name"]) == 1 and match["name"].isascii() and not (match["wrapper"] or match["space"])
    name = UNIT_OF[match["name"]]
    unit = name, POWER_OF.get(power, 1), "" if name in MONEY else UNIT_OF.get(match["per"] or "", match["per"] or "")
    return text if is_variable else text[: match.start()], unit


ENVIRONMENT = re.compile(r"\$|\\boxed|\\\(|\\\[")
WORD = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]{2,}|\.\.\.|…|\\[lc]?dots")
LIST = re.compile(r"\d\s*(?:,|,?\s*(?:and|or))\s+\d")
SAID = re.compile(rf"{PROSE.pattern}|^\s*[a-zA-Z]\s*=")  # what makes a sentence, unless it has NOTATION
NOTATION = re.compile(r"[\[\]+*<>|#&_@]|=.*=|\([^()]*,|\\(?![dtc]?frac\s*[{\d]|text|circ(?!.*text)|[$%,;! ])")
BASE = re.compile(r"\d_\s*\{?\s*(?:\\text\s*\{)?\s*(\d+)[\s}]*$")


def may_be_same(reference: str, answer: str) -> bool:
    """False if math-verify overlooks a difference: another base, a word that changes the number, 4 = 5."""
    bases = [base[1] for base in map(BASE.search, (reference, answer)) if base]
    if len(bases) == 2 and bases[0] != bases[1]:
        return False
    sides = re.split(r"(?<![<>!:=])=(?![=>])", answer)
    if any(not side.strip(" $") for side in sides[1:]):
        return False
    numbers = [*map(parse_number, sides)]
    if all(numbers) and not all(number.equals(numbers[0]) for number in numbers):
        return False
    starts = [mark.start() for mark in ENVIRONMENT.finditer(answer.rstrip(" .$"))]
    clauses = [end.end() for end in CLAUSE_END.finditer(answer, 0, starts[-1] if starts else 0)]
    clause = answer[clauses[-1] if clauses else 0 :]  # the clause of the last formula
    # Words that make another number of the one beside them, and dots that go on.
    changing = {word.lower() for word in WORD.findall(clause) if CHANGING.fullmatch(word) or not word.isalpha()}
    known = {word.lower() for word in WORD.findall(reference)}
    return changing <= known or sentence_number(answer) is not None


def sentence_number(text: str) -> Number | None:
    """Returns the number that a sentence gives, as in "it is not 10, it is 12 dollars"; None if there is none."""
    is_formula = re.search(r"[\\{}\[\]()+*=^<>|!#&_/@]", text)
    is_read = not is_formula or (SAID.search(text) and not NOTATION.search(text))
    number = parse_number(text, words=True) if is_read else None
    if number or is_formula or LIST.search(text):
        return number
    return parse_number(extract_last_number(text) or "", words=True)


# math-verify

VULGAR_SIGN = re.compile(f"[{VULGAR}]")
SUPERSCRIPT = re.compile(f"⁻?[{SUPERSCRIPTS}]+")
REPEATING = re.compile(r"(\d*)\.(\d*)\\overline\s*\{(\d+)\}")
ORDINAL = re.compile(r"(?<=\d)\s*(?:\^\s*\{)?\s*\\(?:text|mathrm|mbox)\s*\{\s*(?:st|nd|rd|th)\s*\}(?:\s*\})?")
DEGREES = r"(\d+(?:\.\d+)?)\s*(?:\^\s*(?:\\circ|\{\s*\\circ\s*\})|°|\\degree)"
ANGLE = re.compile(rf"\\(sin|cos|tan|cot|sec|csc)\s*(?:\(\s*{DEGREES}\s*\)|\{{\s*{DEGREES}\s*\}}|{DEGREES})")
SYMBOLS = str.maketrans(
    {"π": r"\pi ", "∞": r"\infty ", "√": r"\sqrt ", "×": r"\times ", "·": r"\cdot ", "÷": r"\div ", "−": "-", "–": "-",
     "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "°": r"^{\circ}", "⁄": "/"}
)  # fmt: skip


def to_latex(text: str) -> str:
    """Returns a text with its symbols, superscripts and vulgar fractions as LaTeX, and degrees in functions as radians.

    Raises ValueError for other characters that stand for a number, as circled digits do.
    """
    text = plain_to_latex(text.translate(SYMBOLS))
    text = VULGAR_SIGN.sub(lambda sign: to_frac(Fraction(unicodedata.numeric(sign[0])).limit_denominator(10)), text)
    text = SUPERSCRIPT.sub(lambda match: f"^{{{unicodedata.normalize('NFKC', match[0])}}}".replace("−", "-"), text)
    for match in reversed([*REPEATING.finditer(text)]):
        whole, first, period = match.groups()
        ninths = Fraction(int(whole + first + period) - int(whole + first or 0), 10 ** len(period) - 1)
        text = text[: match.start()] + to_frac(ninths / 10 ** len(first)) + text[match.end() :]
    text = re.sub(ORDINAL, "", re.sub(r"\\text\s*\{\s*(\d+)\s*\}", r"\1", text))
    if any(unicodedata.category(character) in ("No", "Nl") for character in text):
        raise ValueError("a character that is a number of its own")
    return ANGLE.sub(lambda match: rf"\{match[1]}(\frac{{{match[2] or match[3] or match[4]}\pi}}{{180}})", text)


CALLS = {"sqrt": (r"\sqrt{", "}"), "cbrt": (r"\sqrt[3]{", "}"), "exp": ("e^{", "}"), "abs": (r"\left|", r"\right|")}
PLAIN_NAME = re.compile(rf"{WRAPPER.pattern}|(?<![\\a-zA-Z])(?:{'|'.join(PLAIN_NAMES)})(?![a-zA-Z])")
PLAIN_CALL = re.compile(rf"(?<![\\a-zA-Z])({'|'.join(CALLS)})\s*\(")
PLAIN_SCIENTIFIC = re.compile(r"(?<![\w.])(\d+\.\d+)[eE]([-+]?\d{1,3})(?![\w.])")
PLAIN_POWER = re.compile(r"\*\*\s*(?:([-+]?(?:\d+(?:\.\d+)?|\\?[a-zA-Z]+\b))|(?=\())")


def plain_to_latex(text: str) -> str:
    """Returns a text whose calculator's notation is LaTeX: pi, 3*sin(x), exp(2), sqrt(5), 2**10, 1.5e-3."""
    text = PLAIN_SCIENTIFIC.sub(r"\1 \\times 10^{\2}", text)
    text = PLAIN_NAME.sub(lambda match: PLAIN_NAMES.get(match[0], match[0]), text)
    for call in reversed([*PLAIN_CALL.finditer(text)]):  # those within others first
        depths = accumulate(text[call.end() :], lambda depth, sign: depth + (sign == "(") - (sign == ")"), initial=1)
        end = next((call.end() + index - 1 for index, depth in enumerate(depths) if not depth), None)
        if end is not None:
            before, after = CALLS[call[1]]
            text = text[: call.start()] + before + text[call.end() : end] + after + text[end + 1 :]
    if len(re.findall(r"\*\*|\^", text)) > 1 and re.search(r"(?:\*\*|\^)[^-+/,=<>\s]*\*\*", text):
        return text  # powers of powers: no answer
    return PLAIN_POWER.sub(lambda match: f"^{{{match[1]}}}" if match[1] else "^", text)


def to_frac(value: Fraction) -> str:
    """Returns a fraction as LaTeX."""
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


@functools.lru_cache(maxsize=1024)  # a reference is compared with every reply of its group
def parse_math(text: str, is_reference: bool = False) -> list[Expression]:
    """Returns sympy's expressions that math-verify reads in a text, which must be tame.

    Text that does not parse has no answer. Only a reference, which no policy wrote, then stands for its last number.
    """
    import math_verify
    import sympy

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own time limit, a signal, is off
    number = sentence_number(text)
    if number and SENTENCE.search(text):
        return [sympy.Rational(number.value)]
    latex = to_latex(text)
    if not ENVIRONMENT.search(latex):
        latex = f"${' '.join(latex.split()).rstrip('., ')}$"
    # LaTeX only: among plain numbers it would find the last one of a formula that does not parse.
    expressions = math_verify.parse(latex, [math_verify.LatexExtractionConfig()], parsing_timeout=None)
    if all(isinstance(expression, str) for expression in expressions):
        if is_reference and not number:
            number = parse_number(extract_last_number(text) or "", words=True)
        if number:
            expressions.append(sympy.Rational(number.value))
    return expressions


# values


@functools.cache
def grader() -> ModuleType:
    """Returns math-verify's grader with numbers compared by `same_value`: a copy, since rewards may use the other."""
    spec = importlib.util.find_spec("math_verify.grader")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.sympy_numeric_eq = same_value
    return module


def same_value(a: Expression, b: Expression, digits: int, _precision: int = 0) -> bool:
    """True if two values agree in `digits` significant digits (see `agree`); with EXACT if they are equal.

    Irrational values are compared to EXACT digits; of formulas of something unknown the coefficients, term by term.
    """
    import sympy

    if isinstance(a, sympy.MatrixBase | sympy.MatrixExpr) and isinstance(b, sympy.MatrixBase | sympy.MatrixExpr):
        a, b = a.doit(), b.doit()
        return a.shape == b.shape and all(same_value(x, y, digits) for x, y in zip(a.flat(), b.flat(), strict=True))
    hundredth = sympy.UnevaluatedExpr(sympy.Rational(1, 100))
    plain = [x.args[0] if x.is_Mul and x.args[1:] == (hundredth,) else x for x in (a, b)]
    if all(x.is_Integer for x in plain):  # 9% is 9
        return plain[0] == plain[1]
    a, b = (x.replace(lambda part: part.is_Float, lambda part: sympy.Rational(str(part))).doit() for x in (a, b))
    if a.free_symbols or b.free_symbols:
        terms = [{term: Fraction(str(x)) for term, x in side.as_coefficients_dict().items()} for side in (a, b)]
        return terms[0].keys() == terms[1].keys() and all(agree(x, terms[1][t], digits) for t, x in terms[0].items())
    if a.is_Rational and b.is_Rational:
        return agree(Fraction(str(a)), Fraction(str(b)), digits)
    parts = [[Fraction(str(part)) for part in x.evalf(EXACT + 10).as_real_imag()] for x in (a, b)]
    noise = max(abs(part) for value in parts for part in value) / 10**EXACT
    return all(abs(x - y) <= noise or agree(x, y, digits) for x, y in zip(*parts, strict=True))


def is_tame(text: str) -> bool:
    """True if a piece of LaTeX can be parsed in reasonable time."""
    if len(text) > MAX_MATH or sum(map(text.count, "+-*/^|<=")) > MAX_OPERATORS:
        return False
    return nesting(text) <= MAX_DEPTH and not HUGE.search(text)


POWER = r"(?:\^|\*\*)\s*[{(]?\s*-?\s*"
# Input that takes forever, before or after it is parsed; some of it is what a policy writes.
HUGE = re.compile(
    r"(?:[-+|]\s*){20}|\\[dt]?binom.*(?:\d{5}|\\infty)|\\choose|(?:\d{5}|!|\d\s*\}|\^\s*\d+)[\s})]*!"
    r"|\\l(?:floor|ceil).*\^\s*\{?\s*-?\d{4}|\\(?:gcd|lcm).*(?:\^|\\int|\\sum|\\prod|\\lim)"
    # powers of powers, large ones, those of sums, and beside functions
    rf"|\d[\s)}}]*{POWER}\d+[\s)}}]*{POWER}|{POWER}\d{{5}}|[-+][^()]*\)\s*{POWER}\d{{3}}"
    rf"|[-+][^()]*[-+][^()]*\)\s*{POWER}\d\d|{POWER}\d{{3}}.*\\(?:sin|cos|tan|cot|sec|csc|ln|log)"
    rf"|\\(?:sin|cos|tan|cot|sec|csc).*{POWER}\d\d|\\log.*\d{{6}}"
    # what sympy looks for by trying, and sums of many terms
    rf"|\\int|\\frac\s*\{{\s*d\b.*\d|\\lim|\\Gamma.*\d\s*\^|\\(?:sum|prod).*(?:\\infty|\d{{4}}|\d\s*{POWER}\d)",
    re.DOTALL,
)


def nesting(text: str) -> int:
    """Returns the depth of nested brackets, of any kind."""
    return max(accumulate(text, lambda depth, sign: max(depth + (sign in "([{") - (sign in ")]}"), 0), initial=0))
