"""The answer of a text that gives it after ####, or in no form at all."""

import functools
import re
from itertools import pairwise

from envs.grading import MAX_BOX
from envs.grading.numerals import EMPHASIS, HARMFUL, UNIT_OF, VULGAR, find_number
from envs.grading.words import LEAD, MAX_MATH, MAX_PHRASE, PLAIN_NAMES, SENTENCE, WRAPPER, choice, letters


def extract_hash(text: str, is_asked: bool = True) -> str | None:
    """Returns the answer after the last #### whose line holds one (see `holds_answer`); None if there is none.

    A line of words counts if no text follows it, as it follows a heading; if the form `is_asked` for, whatever follows.
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
    """Returns the answer that the end of a text gives without a form; None if there is none, or more than one.

    It is what follows the last "answer is"; the text, if it is one short line; a label on a line of its own; the last
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
    is_short = len(line.split()) <= 3 and not re.search("[()=]", line)
    return (is_formula or is_short) and not re.search(r"[.:;]\s", line)


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
    """Returns the last number in a text, with its sign, scale, fraction and unit; None if there is none.

    If something else changes it ("half of 18"), or it is one of several, its whole clause is returned.
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
