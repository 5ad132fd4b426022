"""Answers in words: choices, names and phrases, apart from formulas."""

import functools
import re

from envs.grading import MAX_BOX
from envs.grading.numerals import EMPHASIS, parse_number

MAX_MATH = 2000  # longest text for math-verify, in characters
MAX_PHRASE = 100  # characters of an answer in words
WRAPPER = re.compile(r"\\(?:text\w*|math\w+|mbox)\s*\{([^{}]*)\}")
SENTENCE = re.compile(r"(?:\b(?!and\b|or\b)[^\W\d_]{3,}.*?){2}", re.DOTALL)  # two words that are no mathematics
NAMES = (
    "pi alpha beta gamma delta epsilon theta lambda mu sigma phi psi omega infty"
    " sin cos tan cot sec csc sinh cosh tanh arcsin arccos arctan log ln"
)
PLAIN_NAMES = {name: f"\\{name} " for name in NAMES.split()}  # names that may be written without a backslash
PLAIN_NAMES |= {"asin": "\\arcsin ", "acos": "\\arccos ", "atan": "\\arctan ", "oo": "\\infty ", "inf": "\\infty "}
SO = r"(?:so|thus|hence|therefore)"
LEAD = re.compile(
    rf"^\s*(?:(?:{SO},?\s+)?(?:(?:the\s+)?(?:(?:final|correct|best|right)\s+)?"
    r"(?:(?:answer|choice|option|solution)s?(?:\s+(?:is|are)\b\s*:?|\s*[:=])|(?:it|this|that)(?:\s+is\b|['’]s\b)"
    r"|(?:choice|option)\s+(?=\W?[A-Z]\b))|we\s+(?:get|have|find|obtain)\s|(?:it|x)\s+equals\s|=)"
    rf"|[*•]\s|{SO}[,\s])\s*",
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


def simplified(text: str) -> str:
    """Returns a piece of LaTeX without parts that do not change its meaning, for a first look."""
    if len(text) > 2 * MAX_BOX:
        return ""
    text = re.sub(r"\\text\s*\{([^{}\\$]*)\}", r"\1", EMPHASIS.sub(r"\2", text.strip()))
    return re.sub(r"\s|\\[!,;: ]|\\left|\\right|\$|\.$|(?<=\\)[dt](?=frac)", "", text)


def one_spelling(answer: str) -> str:
    """Returns the same text for answers that are surely equal: numbers by their value, choices by their letter."""
    if letter := choice(answer):  # before "forty" of "E: forty"
        return letter
    if number := parse_number(answer, words=True):
        return f"{number.value}{'%' * number.percent}"
    return words(answer) or simplified(answer) or answer
