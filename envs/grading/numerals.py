r"""Exact numbers in text: "1,000", "-$5.50", "25%", "two and a half", "1.5 million", "\frac{3}{4}", "18 dollars".

A number that something before or after it changes is not that number; units and harmless words do not count. The rule
is written out in docs/grading.md. Every function takes any text whatever and never raises.
"""

import functools
import math
import re
import unicodedata
from fractions import Fraction
from typing import NamedTuple

MAX_NUMBER = 200  # characters of a text that may be a number
FEWEST_DIGITS, MOST_DIGITS = 6, 12  # significant digits that count: short decimals are exact, long ones have noise
EXACT = 40  # if no decimal is written; fractions are then compared exactly, other values to 40 digits


def digits_written(*texts: str) -> int:
    """Returns how many significant digits count: those of the least precise decimal in the texts; EXACT without one."""
    decimals = [a + b for text in texts for a, b in re.findall(r"(\d*)\.(\d+)(?!\s*\\overline)", text)]
    return min(max(min(len(x.lstrip("0")) for x in decimals), FEWEST_DIGITS), MOST_DIGITS) if decimals else EXACT


def agree(a: Fraction, b: Fraction, digits: int) -> bool:
    """True if two numbers are equal, or differ by at most half a unit of the last of their significant digits.

    They never differ by more than half a unit of the sixth decimal place. With EXACT they are equal.
    """
    if a == b or digits == EXACT:
        return a == b
    largest = max(abs(a), abs(b))
    exponent = math.floor(math.log10(largest.numerator) - math.log10(largest.denominator))
    return abs(a - b) <= min(Fraction(10) ** (exponent + 1 - digits), Fraction(1, 10**FEWEST_DIGITS)) / 2


class Number(NamedTuple):
    """An exact number; `percent` is true if a percent sign follows it (25% has the value 25)."""

    value: Fraction
    percent: bool = False

    def equals(self, number: "Number", digits: int = EXACT) -> bool:
        """True if both agree to that many digits (see `agree`); 25% is both 25 and 1/4."""
        if self.percent == number.percent:
            return agree(self.value, number.value, digits)
        percent, plain = (self, number) if self.percent else (number, self)
        return any(agree(plain.value, value, digits) for value in (percent.value, percent.value / 100))


# words: numbers, those that change a number, units

ONES = """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen
seventeen eighteen nineteen"""
TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
VALUE = {name: k for k, name in enumerate(ONES.split())} | {name: 10 * k for k, name in enumerate(TENS.split(), 2)}
SCALE = {"dozen": 12, "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
SHORT = {"k": 10**3, "K": 10**3, "M": 10**6, "mn": 10**6, "B": 10**9, "bn": 10**9}
FRACTIONS = "hal(?:f|ves?)|thirds?|fourths?|fifths?|sixths?|sevenths?|eighths?|ninths?|tenths?|quarters?|hundredths?"
SCALES = "|".join(f"{name}s?" for name in SCALE)
NEGATION = "not|no|never|cannot|neither|nor|wrong|incorrect|false|untrue|unequal|[a-z]+n['’]t"
# Words that change a number: wherever they stand; straight before it, with nothing but fillers between, or anywhere
# after it; straight before it or after it; straight before it.
ANYWHERE = "|".join([NEGATION, *({*VALUE} - {"one"}), SCALES, f"(?-i:{'|'.join(SHORT)})", "minus|negative"])
BOTH = rf"(?!quarters)(?:{FRACTIONS})|thousandths?|least|most|or|plus|factorial|choose|pi|hex|binary|lakh|crore|grand"
BESIDE = "squared|cubed|doubled|tripled|halved|th|st|nd|rd|divided|multiplied|raised|point|dot|mod|modulo|power|factors"
BEFORE = (
    "sqrt|sin|cos|tan|cot|arcsin|arccos|arctan|log|ln|exp|abs|max|min|floor|ceil|gcd|lcm|root|square|cube|reciprocal"
    "|inverse|opposite|absolute|double|triple|twice|thrice|base|factor|multiples?|divisors?|than|over|under|above|below"
    "|beyond|exceeds?|up|without|except|but|between|times|per|out|subtract|add|percent"
)
FILLER = (
    "of|to|by|the|an?|be|is|are|was|were|equals?|exactly|about|around|approximately|roughly|only|just|her|his|its|their"
    "|our|my|your|this|that|these|those|I"
)
# Words that change a number in mathematics too; there, others (or, sin, over) belong to the formula.
CHANGING = re.compile(
    f"{NEGATION}|{SCALES}|{FRACTIONS}|squared|cubed|doubled|tripled|factorial|twice|thrice|th", re.IGNORECASE
)
HARMFUL = re.compile(f"{ANYWHERE}|{BOTH}|{BESIDE}|{BEFORE}|{FILLER}|quarters", re.IGNORECASE)
UNITS = """cm centimeter centimetre 厘米, mm millimeter millimetre, m meter metre 米 м, km kilometer kilometre 公里 км,
in inch inches, ft foot feet, yd yard, mi mile, g gram 克, kg kilogram 公斤 кг, lb lbs pound, s sec second 秒,
min mins minute 分钟, h hr hrs hour 小时 時間, day days 天 日, week 周, month 个月, year 年, dollar USD 美元, cent,
euro EUR 欧元, yuan CNY RMB 元 块, yen JPY 円, rouble руб рубль рубля рублей, won 원, rad radian, degree, percent"""
UNIT_OF = {name: names.split()[0] for names in UNITS.split(",") for name in names.split()}  # its first spelling
UNIT_OF |= {f"{name}s": unit for name, unit in UNIT_OF.items() if len(name) > 3}
MONEY = {"dollar", "cent", "euro", "yuan", "yen", "rouble", "won"}  # what it is paid for is no part of the unit
NAMED_UNIT = f"(?:{'|'.join(sorted(UNIT_OF, key=len, reverse=True))})"
UNIT_PHRASE = (
    rf"(?P<wrapper>\\(?:text|mbox|mathrm|textnormal)\s*\{{\s*)?(?:(?P<kind>sq|square|cu|cubic)\.?\s+)?"
    rf"(?P<name>(?!in\s+[a-z]){NAMED_UNIT})(?![^\W\d_²³])\.?(?:\s*\}})?"
    r"(?P<power>\s+squared|\s+cubed|[23²³]|\s*\^\{?[23]\}?)?"
    rf"(?:(?:\s*/\s*|\s*\bper\s+)(?P<per>{NAMED_UNIT}(?:\^?[23²³])?)(?![^\W\d_]))?"
)
# Words of other scripts that change no number; any other may.
OTHER_WORDS = re.compile(
    "答案|结果|所以|因此|最终|一共|总共|共有|等于|约|共|是|为|有|个|人|岁|歳|個|答え|は|です|정답은|입니다|ответ|равен"
    rf"|равна|итого|الجواب|الإجابة|هو|هي|{NAMED_UNIT}",
    re.IGNORECASE,
)
SPELLED = re.compile(
    rf"(?<![\w-])(?:({TENS.replace(' ', '|')})[ -])?({'|'.join(VALUE)})(?![\w-]| quarters?\b)", re.IGNORECASE
)


def spelled(match: re.Match[str]) -> str:
    """Writes a number in words with digits: "twenty-three" as 23. What is none stays: "twenty eleven", "this one"."""
    tens, ones = (VALUE[word.lower()] if word else 0 for word in match.groups())
    is_pronoun = ones == 1 and not tens and match[0] != match.string
    return match[0] if is_pronoun or (tens and not 0 < ones < 10) else str(tens + ones)


# one spelling

VULGAR = "".join(map(chr, [0xBC, 0xBD, 0xBE, *range(0x2150, 0x215F)]))  # one half and its like
SUPERSCRIPTS = "⁰¹²³⁴⁵⁶⁷⁸⁹"
LETTER = rf"[^\W\d_{SUPERSCRIPTS}]"
DECIMAL = r"(?:\d+(?:\.\d+)?|\.\d+)"
GROUPED = r"[1-9]\d{0,2}(?:,\d{3}|\s\d{3}|['’]\d{3})+"
PLAIN = rf"(?:{GROUPED}(?:\.\d+)?|\d+,\d+|{DECIMAL})(?:[eE][-+]?\d{{1,3}})?(?![.,]?\d)"
FRACTION = rf"\\[dtc]?frac\s*(?:\{{\s*(-?{DECIMAL})\s*\}}|(\d))\s*(?:\{{\s*({DECIMAL})\s*\}}|(\d)(?!\d))"
SPELLINGS = dict.fromkeys(map(ord, "\u200b\u200c\u200d\u2060\ufeff\xad\u200e\u200f"))  # not seen: dropped
SPELLINGS |= {0xFF01 + k: 0x21 + k for k in range(94)}  # of full width
SPELLINGS |= str.maketrans("−–‐‑⁄∕。。।،、º", "----//...,,°")
EMPHASIS = re.compile(r"(?<![\w*_`])(\*{1,3}|_{1,3}|`{1,3})(?=\S)([^*_`]+)(?<=\S)\1(?![\w*_`])")
PART = "\ue000"  # begins a fraction that is written as one sign
REWRITES = [
    (re.compile(pattern), text)
    for pattern, text in [
        (r"\\!|\\+\s*$", ""),  # at the end: what is left of a cut "\ " or "\\"
        (r"(?<!\\)\$\$?([^$]*[^$\\])\$\$?(?! ?\d)", r"\1"),  # formulas, not dollars
        (r"\{,\}", ","),
        (r"\\[,;: ]|\\quad|(?<!~)~(?!~)|^\s*[*•](?=\s)", " "),
        (EMPHASIS.pattern, r"\2"),
        (FRACTION, rf"{PART}\1\2/\3\4"),
        (r"\*\*", "^"),
        (r"\^\s*\{?\s*\\circ\s*\}?|\\degree", "°"),
        (r"\^\s*\{\s*([-+]?\d+)\s*\}", r"^\1"),
        (r"\\(?:text(?:bf|it|rm|normal)?|math(?:rm|bf|it)|mbox|emph|f?boxed|left|right|displaystyle)(?![a-zA-Z])"
         r"|\\[()\[\]]|(?<!\\)[{}]", ""),
        (r"\\times(?![a-zA-Z])|\\cdot(?![a-zA-Z])|[×·]|x(?=\s*10\s*[\^⁰¹²³⁴⁵⁶⁷⁸⁹])", "*"),
        (r"[=-]>|\\(?:approx|implies|Rightarrow|to)(?![a-zA-Z])", "="),
        (r"!=|=/=|[<>≠≤≥≮≯]=?|=<|/=|\\(?:neq?|leq?|geq?|lt|gt|not)(?![a-zA-Z])", "≠"),
        (r":?=+|[≈≅≃→⇒]", "="),
        (r"\\([%$£€])", r"\1"),
        (r"\.\.+|\\[lc]?dots", "…"),
        (r"\s+", " "),
    ]
]  # fmt: skip


def plain(text: str) -> str:
    """Returns a text in one spelling: without markup, with signs of a calculator, "≠" for all comparisons."""
    text = re.sub(r"\d", lambda digit: str(unicodedata.decimal(digit[0])), text.translate(SPELLINGS))
    text = re.sub(f"[{VULGAR}]", lambda sign: PART + unicodedata.normalize("NFKC", sign[0]).replace("⁄", "/"), text)
    for pattern, new in REWRITES:
        text = pattern.sub(new, text)
    power = rf"(?<![^\W\d_])(?<!⁻)⁻?[{SUPERSCRIPTS}]+"
    text = re.sub(power, lambda match: "^" + unicodedata.normalize("NFKC", match[0]).replace("−", "-"), text)
    text = text.strip().removesuffix(".").strip()
    return text if re.search(r"\d", text) else SPELLED.sub(spelled, text)


def plain_value(text: str) -> Fraction:
    """Returns the value of digits with their separators, a decimal mark or an exponent."""
    digits = re.sub(r"[\s'’]", "", text)
    return Fraction(digits.replace(",", "" if re.match(rf"(?:{GROUPED})(?!\d)", text) else "."))


# a number and what is around it

CURRENCY = r"(?:(?:\b(?:US|AU?|CA?|HK|NT|S|R|NZ))?[$£€¥₹₽₩₫₺₱₪¢]|\b(?:USD|EUR|GBP|INR|CNY|JPY|Rs\.?)(?=\s*\d))"
PHRASE = (
    rf"(?P<start>(?:{CURRENCY} ?)?)(?:(?P<sign>[-+]|(?i:minus|negative)\b) ?)?(?:{CURRENCY} ?)?"
    rf"(?:(?:(?P<factor>{PLAIN}) ?\* ?)?10 ?\^ ?(?P<exponent>[-+]?\d{{1,3}})(?![\d.^])"
    rf"|(?:(?P<whole>{PLAIN})(?: ?(?:and )?{PART}| (?:and )?)|{PART})?(?P<above>-?{PLAIN}) ?/ ?(?P<below>{PLAIN})"
    rf"|(?P<number>{PLAIN}))(?P<scales>(?: ?(?:(?i:{SCALES})|{'|'.join(SHORT)})(?!{LETTER}|-))*)"
    r"(?: ?°|(?P<percent> ?(?:%|(?:percent|pct)\b)))?(?!a\b)"
)
DENIED = re.compile(rf"≠|\b(?:{NEGATION})\b", re.IGNORECASE)
ALONE = re.compile(PHRASE)
SENTENCE = re.compile(rf"(?P<before>[^\d{PART}]*?){PHRASE}(?: ?{UNIT_PHRASE})?(?P<after>\D*)")
AROUND = re.compile(
    rf"(?:{LETTER}++(?:['’-]{LETTER}++)*+(?:\(e?s\))?+[²³]*+|/(?= ?{LETTER})|{CURRENCY}"
    r"|[\s\"'“”‘’„«»`,;:.?!)…]|(?<!\w)\(|(?<= )\(|—(?= )|##+(?= ))*+"
)  # all that is understood: words and marks
START, END = rf"(?<!{LETTER})", rf"(?!{LETTER})"
LATIN = r"[A-Za-z\u00c0-\u03ff]"
VARIABLE = rf"(?<![^\W\d_])(?<!\w['’])(?![aI]\b){LATIN}(?![\w'’-])"
CHANGED_BEFORE = re.compile(
    rf"(?i:{START}(?:{ANYWHERE}){END}"
    rf"|{START}(?:{BOTH}|{BESIDE}|{BEFORE}){END}(?:[^,;:.?!)\w]|{START}(?:{FILLER}){END})*$)"
    rf"|(?:{LATIN}|[&)^²³])$|{VARIABLE}(?! ?[,;:.?]| (?i:{FILLER})\b)"
)
CHANGED_AFTER = re.compile(
    rf"^\(|^ ?[!^…]|(?i:^[ -]?(?:{BESIDE}){END}|{START}(?:{ANYWHERE}|{BOTH}){END})|(?![mglLshdNWVJCF]|p\.m){VARIABLE}"
)
OTHER_LETTER = re.compile(r"[^\W\u0000-\u03ff\u1e00-\u1fff]")


def parse_number(text: str, words: bool = False) -> Number | None:
    r"""Returns the number that a text is: "1,000", "-$5.50", "25%", "1 1/2", "\frac{3}{4}", "10^3"; or None.

    With `words` there may be some around it ("about 18 dollars per day"), but nothing that changes it.
    """
    match = find_number(text, words)
    return match and match[0]


@functools.lru_cache(maxsize=4096)
def find_number(text: str, words: bool) -> tuple[Number, str] | None:
    """Returns the number that a text is, as `parse_number` does, and how it is written, with its unit."""
    if len(text) > MAX_NUMBER or text.count("{") != text.count("}"):
        return None
    text = plain(text)
    if words and not DENIED.search(text):
        text = text.rpartition("=")[2].strip()
    match = (SENTENCE if words else ALONE).fullmatch(text)
    value = match and phrase_value(match)
    if value is None or (words and is_changed(match)):
        return None
    written = text[match.start("start") : match.start("after")] if words else text
    return Number(value, bool(match["percent"])), written.replace(PART, " ").strip()


def is_changed(match: re.Match[str]) -> bool:
    """True if something before or after the number that SENTENCE matched changes it, or is not understood."""
    before, after = match["before"], re.sub(rf"^-(?={LETTER})", " ", match["after"])  # 18-day
    after = after.lstrip("!") if match["name"] else after  # 12 cm!
    is_known = AROUND.fullmatch(before) and AROUND.fullmatch(after)
    is_known = is_known and not OTHER_LETTER.search(OTHER_WORDS.sub("", before + after))
    is_million = "$" in match[0] and match["name"] == "m"  # $18m
    return bool(not is_known or is_million or CHANGED_BEFORE.search(before) or CHANGED_AFTER.search(after))


def phrase_value(match: re.Match[str]) -> Fraction | None:
    """Returns the value of the number that PHRASE matched; None if it is none, as in "1 5/2"."""
    given = {name: plain_value(match[name]) for name in ("factor", "whole", "below", "number") if match[name]}
    if given.get("below") == 0:
        return None
    value = given.get("number", Fraction(0))
    if match["exponent"]:
        value = given.get("factor", 1) * Fraction(10) ** int(match["exponent"])
    if above := match["above"]:
        value = plain_value(above.lstrip("-")) / given["below"] * (-1 if above.startswith("-") else 1)
    if whole := given.get("whole"):
        if whole.denominator != 1 or not 0 <= value < 1:
            return None
        value += whole
    for word in match["scales"].split():
        value *= SHORT.get(word) or SCALE[word.lower().removesuffix("s")]
    return -value if (match["sign"] or "").lower() in ("-", "minus", "negative") else value


def same_number(reference: str, answer: str) -> bool:
    """True if an answer is the number of the reference, exactly; units and words around it do not count."""
    expected = parse_number(reference, words=True)
    number = parse_number(answer, words=True)
    return expected is not None and number is not None and expected.equals(number)
