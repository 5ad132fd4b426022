r"""Exact numbers in text: "1,000", "-$5.50", "25%", "1 1/2", "1.5 million", "\frac{3}{4}", "18 dollars per day".

A number that something before or after it changes is not that number; units and harmless words do not count. The rule
is written out in docs/grading.md. Text is split into tokens of one-letter kinds, and only the sequences of kinds
in PHRASE and SENTENCE are a number. Every function takes any text whatever and never raises.
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


class Token(NamedTuple):
    """A piece of a text: a kind of one letter (see TOKENS and KINDS), and the number or factor it stands for."""

    kind: str
    text: str
    value: Fraction = Fraction(0)


# words


def word_set(text: str) -> frozenset[str]:
    """Returns the words of a text as a set."""
    return frozenset(text.split())


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
SPELLED = word_set(
    "zero two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen"
    " eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety"
)
PARTS = word_set(
    "half halves third thirds fourth fourths fifth fifths sixth sixths seventh sevenths eighth eighths ninth ninths"
    " tenth tenths hundredth hundredths thousandth thousandths millionth millionths quarter"
)
FUNCTIONS = word_set(
    "sqrt cbrt sin cos tan cot sec csc arcsin arccos arctan log ln lg exp abs max min floor ceil ceiling gcd lcm mod"
    " modulo det root square cube reciprocal inverse opposite absolute double triple quadruple twice thrice power base"
    " factor factors multiple multiples divisor divisors"
)
COMPARISONS = word_set("than over under above below beyond exceeds exceed exceeding up without except but between")
FILLERS = word_set(
    "of to by the a an be is are was were equal equals exactly about around approximately roughly only just her his its"
    " their our my your this that these those I"
)
KINDS = {
    # kind: its words
    "r": word_set("not no never cannot neither nor wrong incorrect false untrue unequal"),
    "o": SPELLED,
    "m": word_set("minus negative"),
    "h": PARTS | word_set("least most or plus factorial choose pi binary hex hexadecimal octal"),
    "b": FUNCTIONS | COMPARISONS | word_set("times divided multiplied raised point dot per out subtract add"),
    "%": word_set("percent pct"),
    "&": word_set("and"),
    "a": FILLERS,
}
AFTER = word_set("squared cubed doubled tripled halved th st nd rd divided multiplied raised point dot mod modulo power"
              " factors")  # fmt: skip
KIND_OF = {word: kind for kind, names in KINDS.items() for word in names}
# Words that change a number in mathematics too; there, others (or, sin, over) belong to the formula.
CHANGING = KINDS["r"] | PARTS | word_set("squared cubed doubled tripled halved factorial twice thrice half th")
CHANGING |= {name.lower() for name in SCALE_OF if len(name) > 1 and name.isascii()}
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
UNIT_LETTERS = word_set("m g l L s h d t N W V J C F")


def word_kind(word: str, after_number: bool) -> str:
    """Returns the kind of a word: `w` when it is harmless, as units are."""
    lower = word if len(word) == 1 else word.lower()
    parts = lower.split("-")
    bare = re.sub(r"[-.'’()23]", "", word)
    if not bare.isalpha() or not unicodedata.is_normalized("NFKC", word):  # as "ⁿ" is
        return "o"
    if OTHER_SCRIPT.search(bare):  # it may change the number
        return "q" if OTHER_WORDS.fullmatch(bare) else "o"
    if len(parts) > 1:
        kinds = {word_kind(word, after_number) for word in parts}
        return "o" if kinds & set("rosmhe") else "w"
    if lower in SCALE_OF:
        return "s"
    if lower.endswith(("n't", "n’t")):
        return "r"
    if after_number and lower in AFTER:
        return "e"
    if lower in KIND_OF:
        return KIND_OF[lower]
    if word in UNIT_LETTERS:
        return "u"
    if len(word) == 1 and (word.isascii() or "α" <= lower <= "ω"):
        return "l"
    return "w"


# tokens

SUPERSCRIPTS = "⁰¹²³⁴⁵⁶⁷⁸⁹"
VULGAR = "".join(map(chr, [0xBC, 0xBD, 0xBE, *range(0x2150, 0x215F), 0x2189]))  # one half and its like
LETTER = rf"[^\W\d_{SUPERSCRIPTS}{VULGAR}]"
D = "[0-9]"
DECIMAL = rf"(?:{D}+(?:\.{D}+)?|\.{D}+)"
GROUPED = rf"[1-9]{D}{{0,2}}(?:,{D}{{3}}|\s{D}{{3}}|['’]{D}{{3}})+|{D}{{1,2}}(?:,{D}{{2}})+,{D}{{3}}"
PLAIN = rf"(?:(?:{GROUPED})(?:\.{D}+)?|{D}+,{D}+|{DECIMAL})(?:[eE][-+]?{D}{{1,3}})?(?![.,]?\d)"
FRACTION = rf"\\[dtc]?frac\s*(?:\{{\s*(-?{DECIMAL})\s*\}}|({D}))\s*(?:\{{\s*({DECIMAL})\s*\}}|({D})(?!\d))"
REPEATING = rf"({D}*)\.({D}*)\\overline\s*\{{({D}+)\}}"
EXPONENT = rf"\{{\s*[-+]?{D}{{1,3}}\s*\}}|[-+]?{D}{{1,3}}"
TOKENS = {
    # kind: pattern. The first that matches counts; if none does, the character is its own kind.
    "M": r"\\(?:text(?:bf|it|rm|normal)?|math(?:rm|bf|it)|mbox|emph|f?boxed|left|right|displaystyle|rm|bf)(?![a-zA-Z])"
    r"|\\[()\[\]]|[{}]",  # markup, which is dropped
    "_": r"(?:\s|~(?!~)|\\quad)+",
    "d": r"[°º]|\\degree|\^\s*\{?\s*\\circ\s*\}?",
    "v": rf"{FRACTION}|[{VULGAR}]",
    "t": rf"10(?:\s*(?:\^|\*\*)\s*(?:{EXPONENT})|⁻?[{SUPERSCRIPTS}]{{1,3}})(?![\d.{SUPERSCRIPTS}])",
    "n": rf"{REPEATING}|{PLAIN}",
    "^": rf"⁻?[{SUPERSCRIPTS}]+|\^\s*(?:\{{\s*-?{D}\s*\}}|-?{D}(?!\d))",
    "c": r"(?:\b(?:US|AU?|CA?|HK|NT|S|R|NZ))?\\?[$£€¥₹₽₩₫₺₱₪¢]|\b(?:USD|EUR|GBP|INR|CNY|JPY|Rs\.?)(?=\s*\d)",
    "r": r"!=|=/=|[<>≠≤≥≮≯]=?|=<|/=|\\(?:neq?|leq?|geq?|lt|gt|not)(?![a-zA-Z])",
    "%": r"\\?%",
    "=": r"[=-]>|:?=+|[≈≅≃→⇒]|\\(?:approx|implies|Rightarrow|to)(?![a-zA-Z])",
    "x": rf"\\times|\\cdot|\*|[×·]|x(?=\s*10\s*[\^*{SUPERSCRIPTS}])",
    "i": r"\.\.+|…|\\[lc]?dots",
    "q": r"[\"'“”‘’„«»`]",
    "p": r"[,;:.?]|—(?=\s)|\#{2,}(?=\s)",
    "w": rf"(?:[kcdm]?m|ft|in)[23](?!\w)|[ap]\.m\b\.?|{LETTER}+(?:['’-]{LETTER}+)*(?:\(e?s\))?",
    "+": r"[-+/()!]",
    "o": r".",
}
NAMES = {f"k{ord(kind)}": kind for kind in TOKENS}
LEXER = re.compile("|".join(f"(?P<{name}>{TOKENS[kind]})" for name, kind in NAMES.items()), re.DOTALL)
SPELLINGS = dict.fromkeys(map(ord, "\u200b\u200c\u200d\u2060\ufeff\xad\u200e\u200f"))  # not seen: dropped
SPELLINGS |= {0xFF01 + k: 0x21 + k for k in range(94)}  # of full width
SPELLINGS |= str.maketrans("−–‐‑⁄∕。。।،、", "----//...,,")
EMPHASIS = re.compile(r"(?<![\w*_`])(\*{1,3}|_{1,3}|`{1,3})(?=\S)([^*_`]+)(?<=\S)\1(?![\w*_`])")
MARKUP = [
    (re.compile(r"</?(?:b|i|em|strong|u|p|br|span|div|code|mark|big|small|center)\s*/?>", re.IGNORECASE), ""),
    (re.compile(r"\\!|\\+\s*$"), ""),  # at the end: what is left of a cut "\ " or "\\"
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"&nbsp;|\\[,;: ]|^\s*[*•](?=\s)"), " "),
    (EMPHASIS, r"\2"),
]


def tokenize(text: str) -> list[Token]:
    """Splits a text into tokens."""
    text = re.sub(r"\d", lambda digit: str(unicodedata.decimal(digit[0])), text.translate(SPELLINGS))
    for pattern, plain in MARKUP:
        text = pattern.sub(plain, text)
    tokens: list[Token] = []
    after_number = False
    for match in LEXER.finditer(re.sub(r"(?<!\.)\.$", "", text.strip())):
        token = make_token(NAMES[match.lastgroup], match[0], after_number)
        after_number = (after_number or token.kind in "nvt") and token.kind != "="
        is_second_space = token.kind == "_" and tokens and tokens[-1].kind == "_"
        if token.kind != "M" and not is_second_space:
            tokens.append(token)
    return tokens


def make_token(kind: str, text: str, after_number: bool) -> Token:
    """Returns the token of a piece of text that one of the patterns in TOKENS matched."""
    match kind:
        case "+":
            return Token(text, text)
        case "w":
            kind = word_kind(text, after_number)
            return Token(kind, text, Fraction(SCALE_OF.get(text, SCALE_OF.get(text.lower(), 0))))
        case "v" | "t" | "n":
            value = {"v": fraction_value, "t": power_value, "n": plain_value}[kind](text)
            return Token("o", text) if value is None else Token(kind, text, value)
    return Token(kind, text)


def fraction_value(text: str) -> Fraction | None:
    r"""Returns the value of a vulgar fraction or of \frac{a}{b}; None if b is zero."""
    if len(text) == 1:
        return Fraction(unicodedata.numeric(text)).limit_denominator(10)
    above, below = (Fraction(number) for number in re.fullmatch(FRACTION, text).groups() if number)
    return above / below if below else None


def power_value(text: str) -> Fraction:
    """Returns the value of a power of ten."""
    exponent = re.sub(r"[\s^*{}]", "", text.removeprefix("10"))
    return Fraction(10) ** int(unicodedata.normalize("NFKC", exponent).replace("−", "-"))


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


# the grammar, over kinds

SIGNED = r"(?:c_?)?(?P<sign>[-+m])?_?(?:c_?)?"
VALUE = (
    r"(?:(?:(?P<factor>n)_?x_?)?(?P<power>t)"
    r"|(?:(?P<whole>n)_?(?:&_)?)?(?P<part>v)"
    r"|(?:(?P<all>n)_(?:&_)?)?(?P<above>n)_?/_?(?P<below>n)"
    r"|(?P<number>n))"
)
PHRASE = rf"{SIGNED}{VALUE}(?P<scales>(?:_?s)*)_?(?P<mark>[%d])?"
BEFORE = r"(?:[abehilpquw&_)!]|(?<![abehluw])\(|(?<=[uw])[/^])*(?<![abehluw&)^])"
NEXT = r"(?![ai(]|_?[e!^i])(?:-(?=w))?"
REST = r"(?:[abceipquw&_()!]|/(?=_?[auw])|(?<=[uw])\^)*"
ALONE = re.compile(rf"_?(?P<phrase>{PHRASE})_?")
SENTENCE = re.compile(rf"(?P<before>{BEFORE})(?P<phrase>{PHRASE}){NEXT}{REST}")
CHANGED = re.compile(r"[bh][ahlqu&_(]*$|l(?!p|_?a)|u(?![p^]|_?a)")  # before a number: a word for it, a variable


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
    tokens = tokenize(text)
    kinds = "".join(token.kind for token in tokens)
    if words and "r" not in kinds:
        start = kinds.rfind("=") + 1
        tokens, kinds = tokens[start:], kinds[start:]
    match = (SENTENCE if words else ALONE).fullmatch(kinds)
    if match is None or (words and (CHANGED.search(match["before"]) or is_short_scale(tokens, match))):
        return None
    value = phrase_value(tokens, match)
    if value is None:
        return None
    texts = [token.text for token in tokens]
    unit = UNIT_AFTER.match("".join(texts[match.end("phrase") :]))
    written = "".join(texts[match.start("phrase") : match.end("phrase")]) + (unit[0] if unit else "")
    return Number(value, match["mark"] == "%"), written.strip()


def is_short_scale(tokens: list[Token], match: re.Match[str]) -> bool:
    """True for "$18m" and "$18t": there a letter that is a unit elsewhere means millions or trillions."""
    following = [token.text for token in tokens[match.end("scales") :] if token.kind != "_"]
    return "c" in match[0] and following[:1] in (["m"], ["t"])


def phrase_value(tokens: list[Token], match: re.Match[str]) -> Fraction | None:
    """Returns the value of the number that PHRASE matched in these tokens; None if it is none, as in "1 5/2"."""

    def value_of(group: str, default: int = 0) -> Fraction:
        return tokens[match.start(group)].value if match[group] else Fraction(default)

    below = value_of("below", 1)
    if below == 0:
        return None
    value = value_of("factor", 1) * value_of("power")
    value += value_of("part") + value_of("number") + value_of("above") / below
    if match["whole"] or match["all"]:
        whole = value_of("whole") + value_of("all")
        if whole.denominator != 1 or not 0 <= value < 1:
            return None
        value += whole
    for token in tokens[match.start("scales") : match.end("scales")]:
        value *= token.value if token.kind == "s" else 1
    return -value if match["sign"] in ("-", "m") else value


def same_number(reference: str, answer: str) -> bool:
    """True if an answer is the number of the reference, exactly; units and words around it do not count."""
    expected = parse_number(reference, words=True)
    number = parse_number(answer, words=True)
    return expected is not None and number is not None and expected.equals(number)
