"""The only parser of model answers: tags, boxes, exact numbers, arithmetic without eval, LaTeX by math-verify.

Everything here takes any text whatever (megabytes, deep nesting, NUL, surrogates) and never raises. Everything but
`same_math` returns at once; that too, but for LaTeX that gets past its guards, which is what time limits are for.
"""

import ast
import functools
import importlib.util
import logging
import operator
import re
import unicodedata
from fractions import Fraction
from itertools import accumulate, pairwise
from types import ModuleType
from typing import TYPE_CHECKING, TypeAlias

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

if TYPE_CHECKING:
    import sympy

Expression: TypeAlias = "sympy.Basic | sympy.MatrixBase | str"

OPEN, CLOSE = "<answer>", "</answer>"
FORMS = ("tags", "boxed", "hash", "any")  # <answer>N</answer>, \boxed{N}, #### N, and the last of whatever is there
MAX_ARITHMETIC = 1000  # characters; a longer expression is nobody's answer, and the limit bounds the work below
MAX_MATH = 2000  # longest text for math-verify, in characters
MAX_OPERATORS = 200  # most operators in a text for math-verify
MAX_BOX = 5000
MAX_PHRASE = 100  # characters of an answer in words
MAX_DEPTH = 10  # brackets within brackets; the parser's time doubles with each level


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


def extract_hash(text: str, is_asked: bool = True) -> str | None:
    """Returns the answer behind the last #### whose line holds one (see `holds_answer`); None if there is none.

    A line of words is an answer if no text of its own follows it, as it follows a heading of Markdown. If the
    form `is_asked` for, the last line of words counts whatever follows.
    """
    end, headings = len(text), []
    for _ in range(100):  # lines that hold no answer; more are not looked at
        start = text.rfind("####", 0, end)
        if start < 0:
            break
        line, _, below = text[start + len("####") : end][:MAX_BOX].partition("\n")
        line = line.strip(" \t\r#")
        if holds_answer(line):
            return line
        if line and not re.search(r"\d", line):
            headings.append((bool(below.strip()), line))
        end = start
    answers = [line for has_text, line in headings if not has_text] or [line for _, line in headings if is_asked]
    return answers[0] if answers else None


last_hash = functools.partial(extract_hash, is_asked=False)
NUMBERED = re.compile(r"\W*\d+\s*(?:[.):]|[-–—]\s)\s*[*_]*[^\W\d_]{2}")  # "1. Add", a heading
NAMES_ANSWER = re.compile(r"\b(?:answer|result|total|solution|conclusion)\b(?:\W*(?:is|are)\b|[^\d]*[:=])\W*$", re.I)
PROSE = re.compile(r"(?<![\\a-zA-Z])[^\W\d_]{2,}")
WRAPPER = re.compile(r"\\(?:text\w*|math\w+|mbox)\s*\{([^{}]*)\}")
CURRENCIES = {"USD", "EUR", "GBP", "INR", "CNY", "JPY", "Rs", "US"}


def holds_answer(line: str) -> bool:
    """True if a line holds a box, formulas alone, or a number that at most its units follow; a heading does not.

    "36", "36 shells", "Answer: 36" and "x = 5" do; "Step 2", "1. Add them" and "Explanation" do not.
    """
    if "\\boxed" in line:
        return True
    if NUMBERED.match(line):
        return False
    formulas = WRAPPER.sub(r"\1", line)
    words = [*PROSE.finditer(formulas)]
    number = re.search(rf"[\d{VULGAR}]", formulas)
    if number is None:
        return bool(re.search(r"[^\s*_`.:-]", line)) and all(word[0] in PLAIN_NAMES for word in words)
    prose = [word.start() for word in words if word[0] not in CURRENCIES and not HARMFUL.fullmatch(word[0])]
    return not prose or number.start() < prose[0] or bool(NAMES_ANSWER.search(formulas[: number.start()][-80:]))


STATED = re.compile(r"\banswer(?:\s+[a-z]+){0,6}?\s*(?:\bis\b|[:=])[\s:]*(?=\S)", re.IGNORECASE)
NO_ANSWER = {"correct", "right", "above", "below", "clear", "done"}
NOTE = re.compile(
    r"(?:\n[^\w\n]*|[(\[;,]\s*)(?:confidence|certainty|probability|explanation|reason(?:ing)?|rationale|note)\b.*",
    re.IGNORECASE | re.DOTALL,
)  # what models add to an answer
SURE = {"yes", "no", "true", "false"}  # labels, whatever numbers the explanation has
DOUBT = re.compile(
    r"\b(?:wait|actually|sorry|correction|mistake|instead|wrong|incorrect|however|rather|reconsider\w*|also|maybe"
    r"|perhaps|might|could|either|unsure|oops|second thought|no[,.!])",
    re.IGNORECASE,
)
OTHER_LETTER = re.compile(r"\b[B-HJ-Z]\b|\bA\b(?!\s+[a-z])|\bA(?=\s+(?:is|was|would|can|does)\b)")


def extract_prose(text: str) -> str | None:
    """Returns the answer that the end of a text gives without a form: None if there is none, or more than one.

    That is what follows the last "answer is" or "Answer:", or the text itself, if it is one short line (see `is_bare`).
    Then come a label on a line of its own beside its explanation (see `extract_label`), and the last
    number.
    """
    text = EMPHASIS.sub(r"\2", text.rpartition("</think>")[2][-MAX_MATH:].strip())
    *_, lead = [None, *STATED.finditer(text)]
    if lead:
        text = text[: lead.end()] + NOTE.sub("", text[lead.end() :])
    line = LEAD.sub("", text[lead.end() if lead else 0 :].rstrip(" .。"))
    if "\n" not in line and len(line) <= 2 * MAX_PHRASE and is_bare(line):
        return line
    label = extract_label(text)
    return extract_last_number(text) if label is None else label


def is_bare(line: str) -> bool:
    """True if a line is an answer as a whole: a choice, up to four words, three with a number, or a formula."""
    if choice(line) or (not re.search(r"\d", line) and len(line.split()) <= 4):
        return bool(re.search(r"\w", line)) and line.lower() not in NO_ANSWER
    words = PROSE.findall(WRAPPER.sub(r"\1", line))
    is_formula = all(word in PLAIN_NAMES or word in UNIT_OF for word in words)
    return (is_formula or len(line.split()) <= 3) and not re.search(r"[.:;]\s", line)


def extract_label(text: str) -> str | None:
    """Returns the choice or the word or two on the first or last line of a text whose other lines explain it.

    None if other lines name another choice, or doubt it, and if a number may be the answer as well.
    """
    lines = [STATED.split(line)[-1].strip() for line in text.splitlines() if line.strip()]
    labels = [line for line in lines if choice(line) or ("?" not in line and 0 < len(letters(line).split()) <= 3)]
    if len(labels) != 1 or labels[0] not in (lines[0], lines[-1]):
        return None
    rest = "\n".join(line for line in lines if line != labels[0])
    word, letter = letters(labels[0]), choice(labels[0])
    others = {name.lower() for name in re.findall(r"[^\W\d_]+", rest)} & (SURE - {word}) if word in SURE else ()
    if letter:
        others = {*OTHER_LETTER.findall(rest)} - {letter}
    is_sure = letter or word in SURE or not re.search(r"\d", rest)
    return None if others or not is_sure or DOUBT.search(rest) or not SENTENCE.search(rest) else labels[0]


NUMBERS = re.compile(r"\d[\d,]*(?:\.\d+)?|\.\d+")
CLAUSE_END = re.compile(r"[;\n。！？；।]|[,.:?](?=\s)")
SEPARATE = re.compile(rf"{PROSE.pattern}|{CLAUSE_END.pattern}")  # between numbers that do not belong together
TOGETHER = re.compile(
    rf"\W*(?:(?:[^\W\d_]+[\s,]+)?(?:and|or|to|through|until)\b\W*|,\s+\W{{0,3}}|(?:{'|'.join(UNIT_OF)})\s+)"
)  # between numbers of an interval, a list, or a length in feet and inches


def extract_last_number(text: str) -> str | None:
    """Returns the last number in a text, with its sign; None if there is none.

    Its sign, scale, fraction and unit belong to it ("18 thousand", "1 1/2 km"). If something else changes it ("half of
    18"), or it is one of several ("between 5 and 7"), its whole clause is returned.
    """
    numbers = [*NUMBERS.finditer(text)]
    if not numbers:
        return None
    start, first = 0, numbers[0]
    for before, number in pairwise(numbers):
        between = text[before.end() : number.start()]
        if SEPARATE.search(between + number[0][0]) and not TOGETHER.fullmatch(between):
            start, first = before.end(), number
    clauses = [end.end() for end in CLAUSE_END.finditer(text, start, first.start())]
    end = CLAUSE_END.search(text, numbers[-1].end())
    clause = text[max([start, *clauses]) : end.start() if end else len(text)].strip()
    match = find_number(clause, words=True)
    return match[1] if match else LEAD.sub("", clause.rstrip(" ."))


def final_answer(text: str, form: str) -> str | None:
    r"""Returns the answer that a text gives in a form of FORMS, without a \boxed{} around it; None without one."""
    match form:
        case "tags":
            answer = extract_answer(text)
        case "hash":
            answer = extract_hash(text)
        case "boxed":
            return extract_boxed(text)
        case _:
            extractors = (extract_answer, extract_boxed, last_hash, extract_prose)
            answers = (extract(text) for extract in extractors)
            answer = next((answer for answer in answers if answer is not None), None)
    boxed = extract_boxed(answer or "")
    return answer if boxed is None else boxed


SEVERAL_BOXES = re.compile(r"\\boxed[^\n]{1,100}\\boxed")


def final_reference(text: str) -> str:
    r"""Returns the answer that a reference gives between tags, in a box or behind ####; without these, the text itself.

    Several boxes on a line are all the answer (\boxed{1} and \boxed{2}); the text itself is then returned.
    """
    answers = (extract(text) for extract in (extract_answer, extract_boxed, last_hash))
    answer = next((answer for answer in answers if answer), text)
    if SEVERAL_BOXES.search(text[-MAX_MATH:]):
        return answer if len(text) > MAX_MATH else text
    return extract_boxed(answer) or answer


def one_spelling(answer: str) -> str:
    """Returns the same text for answers that are surely equal: numbers by their value, choices by their letter."""
    if number := parse_number(answer, words=True):
        return f"{number.value}{'%' * number.percent}"
    return choice(answer) or words(answer) or simplified(answer) or answer


# arithmetic

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}

def parse_arithmetic(text: str) -> tuple[Fraction | None, list[int]]:
    """Returns the exact value of an expression in + - * / ( ) over non-negative integers, and these integers in order.

    Signs before a number or a bracket are allowed ("-(2-5)*4" is 12). (None, []) for anything else: names, powers,
    decimals, a number straight after another, division by zero, more than MAX_ARITHMETIC characters.
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


# mathematics


def same_math(reference: str, answer: str, may_be_alike: bool = True) -> bool:
    """True if two pieces of mathematics (LaTeX, or text that holds some) are equal: exact numbers, or by math-verify.

    If the reference is a worked solution, the answer at its end counts: see `final_reference`. False for texts that do
    not parse, or are too long, too deeply nested or too large to be computed, unless both are written alike. With
    `may_be_alike` false only short texts with words may be. It never raises.
    """
    try:
        return _same_math(final_reference(reference), answer, may_be_alike)
    except Exception:  # of the parser or of sympy: OverflowError, RecursionError, MemoryError and others
        return False


def _same_math(reference: str, answer: str, may_be_alike: bool) -> bool:
    reference, answer = reference.rstrip(" \t\n\\"), answer.rstrip(" \t\n\\")  # a stray \\ at the end
    simple_reference = simplified(reference)
    if may_be_alike and simple_reference and simple_reference == simplified(answer):
        return True
    if not may_be_alike and phrase(reference) and phrase(reference) == phrase(answer):
        return True
    if not (is_tame(reference) and is_tame(answer)):
        return False
    reference, answer = EMPHASIS.sub(r"\2", reference), LEAD.sub("", EMPHASIS.sub(r"\2", answer))
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
    if not may_be_alike:  # texts that do not parse are compared as they are
        reference_math = [x for x in reference_math if not isinstance(x, str)]
    if not (reference_math and answer_math):
        return False
    return grader().verify(reference_math, answer_math, float_rounding=digits, timeout_seconds=None)


# answers in words

LEAD = re.compile(
    r"^\s*(?:(?:so|thus|hence|therefore),?\s+)?(?:the\s+)?(?:(?:final|correct|best|right)\s+)?"
    r"(?:(?:answer|choice|option|solution)s?(?:\s+(?:is|are)\b\s*:?|\s*[:=])|(?:it|this|that)(?:\s+is\b|['’]s\b)"
    r"|(?:choice|option)\s+(?=\W?[A-Z]\b))\s*",
    re.IGNORECASE,
)  # before an answer
CHOICE = re.compile(
    r"[\s$\"'“”]*(?:(?:\((?P<enclosed>[A-Za-z])\)|\[(?P<bracketed>[A-Za-z])\]|(?P<labelled>[A-Z])\s*[.:)])(?P<text>.*)"
    r"|(?P<alone>[A-Z])(?:\s+[-–—]\s+(?P<behind>.*)|[\s$\"'“”.,]*|\s+is\s+(?:correct|right)\.?))",
    re.DOTALL,
)
CHOICE_LABEL = re.compile(r"^(?:\\(?:text|math)bf\s*\{)?\s*(?:\([A-Z]\)\}?(?=\\?\s)|[A-Z]\s*[.:)])\s*(?=\S)")
OTHER_CHOICE = re.compile(
    r"[(\[]\s*[A-Z]\s*[)\]]|(?<![\w.])[A-Z][.:)](?!\w)|(?:\b(?:or|and|not|is|option|choice|answer)|[,;/&])\W*[A-Z]\b"
    r"|\b(?:wrong|incorrect)\b|^\W*[A-Z]\W*$"
)


@functools.lru_cache(maxsize=4096)
def choice(text: str) -> str:
    r"""Returns the letter of a choice: E in "(E)", "E: forty", "E. forty", "\textbf{(E)}\ 14"; empty for anything else.

    What follows the letter is that choice's text; if it names another letter, no choice is made.
    """
    match = CHOICE.fullmatch(re.sub(r"\\[ ,;:!]|\\quad|~", " ", WRAPPER.sub(r"\1", text)))
    if match is None or OTHER_CHOICE.search(match["text"] or match["behind"] or ""):
        return ""
    return next(filter(None, match.group("enclosed", "bracketed", "labelled", "alone"))).upper()


def letters(text: str) -> str:
    """Returns a text of letters alone, in lower case and without marks around it; empty for any other text."""
    plain = " ".join(WRAPPER.sub(r"\1", text).split()).strip(" .,;:!?$\"'“”‘’")
    return plain.lower() if re.fullmatch(r"[^\W\d_]+(?:[ '’-]+[^\W\d_]+)*", plain) else ""


def words(text: str) -> str:
    """Returns a text of words, as `letters` does; empty for a formula, whose letters are variables.

    Words have four letters or more, or are written as names are.
    """
    names = letters(text).split()
    is_word = any(len(name) > 3 or name in ("yes", "no") for name in names) or re.search(r"\b[A-Z][a-z]", text)
    return " ".join(names) if is_word and not any(name in PLAIN_NAMES for name in names) else ""


def phrase(text: str) -> str:
    """Returns a short text with words, in lower case and without marks around it; empty for formulas and long texts."""
    plain = " ".join(text[: 2 * MAX_PHRASE].split()).strip(" .,;:!?\"'“”‘’*_")
    has_words = re.search(r"[^\W\d_]{2}", plain) and not re.search(r"[\\{}$]", plain)
    return plain.casefold() if has_words and len(plain) <= MAX_PHRASE else ""


def simplified(text: str) -> str:
    """Returns a piece of LaTeX without parts that do not change its meaning, for a first look."""
    if len(text) > 2 * MAX_BOX:
        return ""
    text = re.sub(r"\\text\s*\{([^{}\\$]*)\}", r"\1", EMPHASIS.sub(r"\2", text.strip()))
    return re.sub(r"\s|\\[!,;: ]|\\left|\\right|\$|\.$|(?<=\\)[dt](?=frac)", "", text)


# differences that math-verify overlooks

POWER_OF = {"sq": 2, "square": 2, "squared": 2, "2": 2, "²": 2, "cu": 3, "cubic": 3, "cubed": 3, "3": 3, "³": 3}
UNIT = re.compile(rf"(?<=[\d}})])(?P<space>(?:\s|\\[,;: ]|~)*){UNIT_PHRASE}\s*\}}?\s*$")
COUNTED = re.compile(r"(.*\S)\s+([^\W\d_]{3,})")  # 18 apples
MARKS = [  # signs that are units
    (re.compile(r"\s*(?:\\[$]|[$](?=[^$]*$))"), "dollar"),
    (re.compile(r"\s*€|.*€$", re.DOTALL), "euro"),
    (re.compile(r".*\\?%$", re.DOTALL), "percent"),
    (re.compile(r".*(?:°|\\circ\s*\}?|\\degree)$", re.DOTALL), "degree"),
]


def split_unit(text: str) -> tuple[str, tuple[str, int, str] | None]:
    r"""Returns a text without the unit at its end, and that unit with its power; None for an unknown unit or none.

    "15\text{ cm}^2" is ("15", ("cm", 2, "")), and "3 km/h" is ("3", ("km", 1, "h")). A letter straight after a number
    stays, as it may be a variable, and so do signs ($, %, °).
    """
    text = text.strip()
    for mark, unit in MARKS:
        if mark.match(text):
            return text, (unit, 1, "")
    match = UNIT.search(text)
    if match is None:
        counted = COUNTED.fullmatch(text)
        if counted and not HARMFUL.fullmatch(counted[2]) and parse_number(counted[1]):
            return counted[1], (counted[2].lower().rstrip("s"), 1, "")
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
SENTENCE = re.compile(r"(?:\b(?!and\b|or\b)[^\W\d_]{3,}.*?){2}", re.DOTALL)  # two words that are no mathematics
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
    if re.search(r"[\\{}\[\]()+*=^<>|!#&_/@]", text):
        return None
    if number := parse_number(text, words=True):
        return number
    return None if LIST.search(text) else parse_number(extract_last_number(text) or "", words=True)


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


NAMES = (
    "pi alpha beta gamma delta epsilon theta lambda mu sigma phi psi omega infty"
    " sin cos tan cot sec csc sinh cosh tanh arcsin arccos arctan log ln"
)
PLAIN_NAMES = {name: f"\\{name} " for name in NAMES.split()}  # names that may be written without a backslash
PLAIN_NAMES |= {"asin": "\\arcsin ", "acos": "\\arccos ", "atan": "\\arctan ", "oo": "\\infty ", "inf": "\\infty "}
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

    Values that are no fractions are computed to 50 digits and compared to EXACT ones. Of formulas of something unknown
    the coefficients are compared, if the terms are written alike.
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
    r"(?:[-+|]\s*){20}|\\[dt]?binom.*(?:\d{5}|\\infty)|\\choose|\d{5,}[\s})]*!|![\s})]*!"
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
