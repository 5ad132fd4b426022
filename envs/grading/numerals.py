r"""Exact numbers in text: "1,000", "-$5.50", "25%", "1 1/2", "1.5 million", "\frac{3}{4}", "18 dollars per day".

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
WRITTEN_DECIMAL = re.compile(r"(\d*)\.(\d+)(?!\s*\\overline)")


def digits_written(*texts: str) -> int:
    """Returns how many significant digits count when numbers of these texts are compared.

    The least precise decimal decides, within FEWEST_DIGITS and MOST_DIGITS; EXACT without a decimal.
    """
    decimals = [match.groups() for text in texts for match in WRITTEN_DECIMAL.finditer(text)]
    if not decimals:
        return EXACT
    return min(max(min(len((a + b).lstrip("0")) for a, b in decimals), FEWEST_DIGITS), MOST_DIGITS)


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


# words

SCALES = """\
12 dozen dozens
100 hundred hundreds
1e3 thousand thousands grand k K
1e5 lakh lakhs
1e6 million millions mn M
1e7 crore crores
1e9 billion billions bn B
1e12 trillion trillions
1e15 quadrillion
"""  # a factor and the words for it on each line
SCALE_OF = {word: int(float(factor)) for factor, *names in map(str.split, SCALES.splitlines()) for word in names}
PARTS = frozenset(
    "half halves third thirds fourth fourths fifth fifths sixth sixths seventh sevenths eighth eighths ninth ninths"
    " tenth tenths hundredth hundredths thousandth thousandths millionth millionths quarter".split()
)
KINDS = {
    # wherever they stand
    "negation": "not no never cannot neither nor wrong incorrect false untrue unequal",
    "never": "zero two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen"
    " seventeen eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety minus negative",
    # before a number, with nothing but fillers between, or anywhere behind it
    "part": " ".join(PARTS) + " least most or plus factorial choose pi binary hex hexadecimal octal",
    # before a number, with nothing but fillers between
    "function": "sqrt cbrt sin cos tan cot sec csc arcsin arccos arctan log ln lg exp abs max min floor ceil ceiling"
    " gcd lcm mod modulo det root square cube reciprocal inverse opposite absolute double triple quadruple twice thrice"
    " power base factor factors multiple multiples divisor divisors than over under above below beyond exceeds exceed"
    " exceeding up without except but between times divided multiplied raised point dot per out subtract add percent",
    # directly behind a number
    "behind": "squared cubed doubled tripled halved th st nd rd",
    "filler": "of to by the a an be is are was were equal equals exactly about around approximately roughly only just"
    " her his its their our my your this that these those I",
}
KIND_OF = {word: kind for kind, names in KINDS.items() for word in names.split()} | dict.fromkeys(SCALE_OF, "scale")
DIRECTLY_BEHIND = KINDS["behind"].split() + "divided multiplied raised point dot mod modulo power factors".split()
# Words that change a number in mathematics too; there, others (or, sin, over) belong to the formula.
CHANGING = PARTS | {*"squared cubed doubled tripled halved factorial twice thrice half th".split()}
CHANGING |= {*KINDS["negation"].split()} | {name.lower() for name in SCALE_OF if len(name) > 1}
UNITS = """cm centimeter centimeters centimetre centimetres 厘米, mm millimeter millimeters millimetre millimetres,
m meter meters metre metres 米 м, km kilometer kilometers kilometre kilometres 公里 千米 км, in inch inches,
ft foot feet, yd yard yards, mi mile miles, g gram grams 克, kg kilogram kilograms 公斤 千克 кг, lb lbs pound pounds,
s sec second seconds 秒, min mins minute minutes 分钟, h hr hrs hour hours 小时 時間, day days 天 日, week weeks,
month months 个月, year years 年, dollar dollars USD 美元, cent cents, euro euros EUR 欧元 евро, yuan CNY RMB 元 块,
yen JPY 円, rouble руб рубль рубля рублей, won 원, rad radian radians, degree degrees, percent"""  # spellings of each
MONEY = {"dollar", "cent", "euro", "yuan", "yen", "rouble", "won"}  # what it is paid for is no part of the unit
UNIT_OF = {name: names[0] for names in map(str.split, UNITS.split(",")) for name in names}
NAMED_UNIT = f"(?:{'|'.join(sorted(UNIT_OF, key=len, reverse=True))})"
UNIT_PHRASE = (
    rf"(?P<wrapper>\\(?:text|mbox|mathrm|textnormal)\s*\{{\s*)?(?:(?P<kind>sq|square|cu|cubic)\.?\s+)?"
    rf"(?P<name>(?!in\s+[a-z]){NAMED_UNIT})(?![^\W\d_²³])\.?\s*(?:\}}\s*)?(?P<power>squared|cubed|\^?\{{?[23²³]\}}?)?"
    rf"(?:(?:\s*/\s*|\s*\bper\s+)(?P<per>{NAMED_UNIT})(?![^\W\d_]))?"
)
UNIT_AFTER = re.compile(rf"\s*{UNIT_PHRASE}")
OTHER_SCRIPT = re.compile(r"[^\u0000-\u03ff\u1e00-\u1fff]")  # letters that are neither Latin nor Greek
OTHER_WORDS = re.compile(
    "(?:答案|结果|所以|因此|最终|一共|总共|共有|等于|约|共|是|为|有|个|人|岁|歳|個|答え|は|です|정답은|입니다|ответ|равен|равна"
    f"|это|итого|الجواب|الإجابة|هو|هي|{'|'.join(name for name in UNIT_OF if not name.isascii())})+",
    re.IGNORECASE,
)  # those that change no number: "the answer is", units
UNIT_LETTERS = {*"mglLshdtNWVJCF"}


def word_kind(word: str) -> str:
    """Returns the kind of a word: of KINDS, scale, letter, other (of another script), or harmless, as units are."""
    lower = word if len(word) == 1 else word.lower()
    parts = [part for part in lower.split("-") if part]
    bare = re.sub(r"[-.'’()⁻¹²³]", "", word)
    if not bare.isalpha() or not unicodedata.is_normalized("NFKC", bare):  # as "ⁿ" is
        return "never"
    if OTHER_SCRIPT.search(bare):  # it may change the number
        return "other" if OTHER_WORDS.fullmatch(bare) else "never"
    if len(parts) > 1:
        kinds = {word_kind(part) for part in parts}
        return "never" if kinds & {"negation", "never", "scale", "part"} else "harmless"
    if lower.endswith(("n't", "n’t")):
        return "negation"
    is_variable = len(bare) == 1 and lower not in KIND_OF and (bare.isascii() or "α" <= lower <= "ω")
    if bare in UNIT_LETTERS:
        return "unit" if bare == word else "harmless"
    return "letter" if is_variable else KIND_OF.get(lower, "harmless")


# one spelling

SUPERSCRIPTS = "⁰¹²³⁴⁵⁶⁷⁸⁹"
VULGAR = "".join(map(chr, [0xBC, 0xBD, 0xBE, *range(0x2150, 0x215F), 0x2189]))  # one half and its like
LETTER = rf"[^\W\d_{SUPERSCRIPTS}{VULGAR}]"
D = "[0-9]"
DECIMAL = rf"(?:{D}+(?:\.{D}+)?|\.{D}+)"
GROUPED = rf"[1-9]{D}{{0,2}}(?:,{D}{{3}}|\s{D}{{3}}|['’]{D}{{3}})+|{D}{{1,2}}(?:,{D}{{2}})+,{D}{{3}}"
PLAIN = rf"(?:(?:{GROUPED})(?:\.{D}+)?|{D}+,{D}+|{DECIMAL})(?:[eE][-+]?{D}{{1,3}})?(?![.,]?\d)"
FRACTION = rf"\\[dtc]?frac\s*(?:\{{\s*(-?{DECIMAL})\s*\}}|({D}))\s*(?:\{{\s*({DECIMAL})\s*\}}|({D})(?!\d))"
REPEATING = rf"({D}*)\.({D}*)\\overline\s*\{{({D}+)\}}"
SPELLINGS = dict.fromkeys(map(ord, "\u200b\u200c\u200d\u2060\ufeff\xad\u200e\u200f"))  # not seen: dropped
SPELLINGS |= {0xFF01 + k: 0x21 + k for k in range(94)}  # of full width
SPELLINGS |= str.maketrans("−–‐‑⁄∕。。।،、º", "----//...,,°")
EMPHASIS = re.compile(r"(?<![\w*_`])(\*{1,3}|_{1,3}|`{1,3})(?=\S)([^*_`]+)(?<=\S)\1(?![\w*_`])")
PART = "\ue000"  # begins a fraction that is written as one sign
CURRENCY = r"(?:(?:\b(?:US|AU?|CA?|HK|NT|S|R|NZ))?[$£€¥₹₽₩₫₺₱₪¢]|\b(?:USD|EUR|GBP|INR|CNY|JPY|Rs\.?)(?=\s*\d))"
REWRITES = [
    (re.compile(pattern, re.IGNORECASE if pattern.startswith("</") else 0), text)
    for pattern, text in [
        (r"</?(?:b|i|em|strong|u|p|br|span|div|code|mark|big|small|center)\s*/?>", ""),
        (r"\\!|\\+\s*$", ""),  # at the end: what is left of a cut "\ " or "\\"
        (r"\{,\}", ","),
        (r"&nbsp;|\\[,;: ]|\\quad|(?<!~)~(?!~)|^\s*[*•](?=\s)", " "),
        (EMPHASIS.pattern, r"\2"),
        (FRACTION, rf"{PART}\1\2/\3\4"),
        (r"\*\*", "^"),
        (r"\^\s*\{?\s*\\circ\s*\}?|\\degree", "°"),
        (r"\^\s*\{\s*([-+]?\d+)\s*\}", r"^\1"),
        (r"\\(?:text(?:bf|it|rm|normal)?|math(?:rm|bf|it)|mbox|emph|f?boxed|left|right|displaystyle|rm|bf)(?![a-zA-Z])"
         r"|\\[()\[\]]|(?<!\\)[{}]", ""),
        (rf"({LETTER})\^-1(?!\d)", r"\1⁻¹"),
        (rf"({LETTER})\^2(?!\d)|\b([kcdm]?m|ft|in)2(?!\w)", r"\1\2²"),
        (rf"({LETTER})\^3(?!\d)|\b([kcdm]?m|ft|in)3(?!\w)", r"\1\2³"),
        (r"\\times(?![a-zA-Z])|\\cdot(?![a-zA-Z])|[×·]|x(?=\s*10\s*[\^⁰¹²³⁴⁵⁶⁷⁸⁹])", "*"),
        (r"[=-]>|\\(?:approx|implies|Rightarrow|to)(?![a-zA-Z])", "="),
        (r"!=|=/=|[<>≠≤≥≮≯]=?|=<|/=|\\(?:neq?|leq?|geq?|lt|gt|not)(?![a-zA-Z])", "≠"),
        (r":?=+|[≈≅≃→⇒]", "="),
        (r"\\([%$£€])", r"\1"),
        (r"\.\.+|\\[lc]?dots", "…"),
        (r"\s+", " "),
    ]
]  # fmt: skip
SUPERSCRIPT = re.compile(rf"(?<![^\W\d_])(?<!⁻)⁻?[{SUPERSCRIPTS}]+")


def plain(text: str) -> str:
    """Returns a text in one spelling: without markup, with signs of a calculator, "≠" for all comparisons."""
    text = re.sub(r"\d", lambda digit: str(unicodedata.decimal(digit[0])), text.translate(SPELLINGS))
    text = re.sub(REPEATING, lambda match: "{0.numerator}/{0.denominator}".format(plain_value(match[0])), text)
    text = re.sub(
        f"[{VULGAR}]", lambda sign: PART + "{0.numerator}/{0.denominator}".format(fraction_value(sign[0])), text
    )
    for pattern, new in REWRITES:
        text = pattern.sub(new, text)
    text = SUPERSCRIPT.sub(lambda match: "^" + unicodedata.normalize("NFKC", match[0]).replace("−", "-"), text)
    return re.sub(r"(?<!\.)\.$", "", text.strip()).strip()


def fraction_value(text: str) -> Fraction:
    """Returns the value of a vulgar fraction."""
    return Fraction(unicodedata.numeric(text)).limit_denominator(10)


def plain_value(text: str) -> Fraction:
    """Returns the value of digits with their separators, a decimal mark, an exponent or a repeating part."""
    if repeating := re.fullmatch(REPEATING, text):
        whole, first, period = repeating.groups()
        ninths = Fraction(int(whole + first + period) - int(whole + first or 0), 10 ** len(period) - 1)
        return ninths / 10 ** len(first)
    digits = re.sub(r"[\s'’]", "", text)
    if re.match(rf"(?:{GROUPED})(?!{D})", text):
        return Fraction(digits.replace(",", ""))
    return Fraction(digits.replace(",", "."))


# a number and what is around it

SCALE = rf"(?:[kKMB]|(?i:{'|'.join(sorted((name for name in SCALE_OF if len(name) > 1), key=len, reverse=True))}))"
SCALE += rf"(?!{LETTER}|-)"
PHRASE = (
    rf"(?:{CURRENCY} ?)?(?:(?P<sign>[-+]|(?i:minus|negative)\b) ?)?(?:{CURRENCY} ?)?"
    rf"(?:(?:(?P<factor>{PLAIN}) ?\* ?)?10 ?\^ ?(?P<power>[-+]?{D}{{1,3}})(?![\d.^])"
    rf"|(?:(?P<whole>{PLAIN})(?: ?(?:and )?{PART}| (?:and )?)|{PART})?(?P<above>-?{PLAIN}) ?/ ?(?P<below>{PLAIN})"
    rf"|(?P<number>{PLAIN}))(?P<scales>(?: ?{SCALE})*)(?P<mark> ?(?:%|°|(?:percent|pct)\b))?"
)
WORD = re.compile(rf"[ap]\.m\b\.?|{LETTER}++(?:['’-]{LETTER}++)*+(?:\(e?s\))?+[⁻¹²³]*+")
MARK = rf"[\s\"'“”‘’„«»`,;:.?!)…]|(?<!\w)\(|(?<= )\(|—(?= )|##+(?= )|/(?= ?{LETTER})"
BEFORE, AFTER = (re.compile(rf"(?:{WORD.pattern}|{marks})*+") for marks in (MARK, f"{MARK}|{CURRENCY}"))
SENTENCE = re.compile(rf"(?P<before>[^\d{PART}]*?)(?P<phrase>{PHRASE})(?P<after>\D*)")
ALONE = re.compile(rf"(?P<phrase>{PHRASE})")
ATTACHED = re.compile(rf"(?:{LETTER}|[&)^²³])$")
CHANGE = {"negation", "never", "scale"}
VALUE_FOLLOWS = re.compile(rf"[,;:.?]| ?(?:{'|'.join(KINDS['filler'].split())})\b", re.IGNORECASE)
CHANGED_DIRECTLY = re.compile(rf"\(| ?[!^…]| ?(?:{'|'.join(DIRECTLY_BEHIND)})(?!{LETTER})", re.IGNORECASE)


def parse_number(text: str, words: bool = False) -> Number | None:
    r"""Returns the number that a text is: "1,000", "-$5.50", "25%", "1 1/2", "\frac{3}{4}", "1.5 million", "10^3".

    With `words` there may be some around it ("x = 18", "about 18 dollars per day"), but no second number and nothing
    that changes it. None for anything else, and for more than MAX_NUMBER characters.
    """
    match = find_number(text, words)
    return match and match[0]


@functools.lru_cache(maxsize=4096)
def find_number(text: str, words: bool) -> tuple[Number, str] | None:
    """Returns the number that a text is, as `parse_number` does, and how it is written, with its unit."""
    if len(text) > MAX_NUMBER or text.count("{") != text.count("}"):
        return None
    text = plain(text)
    if words and "≠" not in text and not any(word_kind(word) == "negation" for word in WORD.findall(text)):
        text = text.rpartition("=")[2].strip()
    match = (SENTENCE if words else ALONE).fullmatch(text)
    if match is None or (words and is_changed(match["before"], match["phrase"], match["after"])):
        return None
    value = phrase_value(match)
    if value is None:
        return None
    unit = UNIT_AFTER.match(text, match.end("phrase"))
    written = match["phrase"] + (unit[0] if unit else "")
    return Number(value, (match["mark"] or "").strip() in ("%", "percent", "pct")), written.replace(PART, " ").strip()


def is_changed(before: str, phrase: str, after: str) -> bool:
    """True if something before or after a number makes it another number, or is not understood."""
    after = re.sub(rf"^-(?={LETTER})", "", after)  # 18-day
    if CHANGED_DIRECTLY.match(after) or not (BEFORE.fullmatch(before) and AFTER.fullmatch(after)):
        return True
    words_before = [(word, word_kind(word[0])) for word in WORD.finditer(before)]
    kinds_before, kinds_after = [kind for _, kind in words_before], [*map(word_kind, WORD.findall(after))]
    if {*kinds_before} & CHANGE | {*kinds_after} & (CHANGE | {"part", "letter"}):
        return True
    is_short_scale = "$" in phrase and re.match(r" ?[mt]\b", after)  # $18m: there a unit's letter means millions
    is_filler_attached = re.match(LETTER, after) and kinds_after[0] == "filler"
    is_attached = ATTACHED.search(before) and kinds_before[-1:] != ["other"]
    if is_short_scale or is_filler_attached or is_attached:
        return True
    for word, kind in words_before:  # a variable, unless the number is its value
        if kind in ("letter", "unit") and not VALUE_FOLLOWS.match(before, word.end()):
            return True
    telling = [pair for pair in words_before if pair[1] not in ("filler", "letter", "unit", "other")]
    word, kind = telling[-1] if telling else (None, "")
    return kind in ("part", "function") and not re.search(r"[,;:.?!)]", before[word.end() :])


def phrase_value(match: re.Match[str]) -> Fraction | None:
    """Returns the value of the number that PHRASE matched; None if it is none, as in "1 5/2"."""
    given = {name: plain_value(match[name]) for name in ("factor", "whole", "below", "number") if match[name]}
    if given.get("below") == 0:
        return None
    value = given.get("number", Fraction(0))
    if match["power"]:
        value = given.get("factor", 1) * Fraction(10) ** int(match["power"])
    if match["above"]:
        above = match["above"]
        value = plain_value(above.lstrip("-")) / given["below"] * (-1 if above.startswith("-") else 1)
    if whole := given.get("whole"):
        if whole.denominator != 1 or not 0 <= value < 1:
            return None
        value += whole
    for word in WORD.findall(match["scales"]):
        value *= SCALE_OF.get(word) or SCALE_OF[word.lower()]
    return -value if (match["sign"] or "").lower() in ("-", "minus", "negative") else value


def same_number(reference: str, answer: str) -> bool:
    """True if an answer is the number of the reference, exactly; units and words around it do not count."""
    expected = parse_number(reference, words=True)
    number = parse_number(answer, words=True)
    return expected is not None and number is not None and expected.equals(number)
