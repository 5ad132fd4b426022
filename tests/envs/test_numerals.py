r"""The rule for numbers (docs/grading.md) on a table: spellings of a number, and what only looks like one.

NBSP and its like are written as escapes. Every line of RIGHT is its reference, every line of WRONG is not.
"""

import time

from envs.grading.answers import final_answer
from envs.grading.numerals import parse_number, same_number

RIGHT = {
    "18": [
        # the number alone
        "18", " 18\n", "18.", "18.00", "018", "+18", "18,", "(18)", "1.8e1", "36/2", "\uff11\uff18",
        # units and words
        "18 dollars", "18kg", "18 m", "18h", "18 apple(s)", "18-day trip", "18 years old", "18 km/h", "18/day",
        "18 dollars per day", "about 18 km/h", "18 miles per hour", "18 more than Bob", "18 times", "18 quarters",
        "18 minutes and seconds", "She has 18 apples left.", "The answer is 18", "Answer: 18", "x: 18", "x is 18",
        "a total of 18 apples", "There are 18 of them!", "Great! It is 18.", "18 a day", "18 p.m.",
        "so 18 people's hats", "ends with 18 — that is all", "Eighteen dollars.", "The answer is eighteen.",
        # units with powers
        "18 m^2", "18m²", "18 m^{2}", "18 cm³", "18 m/s^2", "18 square meters", "18 cubic feet", "18 meters squared",
        "Area (m²): 18", r"18\text{ m}^2", r"18\,\text{cm}^2", r"18 \mathrm{m}^{2}",
        # spaces, quotation marks, markdown, LaTeX
        "18\u00a0dollars", "18\u200b", "\ufeff18", "18~dollars", "\u200e18", '"18"', "“18”", "«18»", "`18`", "_18_",
        "**18** dollars", "**Answer:** 18", "The answer is **18 dollars**.", "* 18", "#### 18", "$18$", r"\(18\)",
        r"\[ 18 \]", r"\text{18}", r"\boxed{18}", r"18\text{ dollars}", r"18^{\circ}", r"\left(18\right)",
        r"\textbf{18 dollars}", r"18\!", r"18 \quad", "18\\", "18 \\", "18 dollars\\",
        # currencies, degrees, percent
        "$18", r"\$18", "$ 18", "18$", "€18", "18 €", "₹18", "US$18", "R$ 18", "USD 18", "Rs. 18", "18 euros", "18°",
        "18 °C", "18%", r"18\%", "18 percent",
        # other scripts
        "18 元", "18个", "18 рублей", "答案是18。", "一共18个", "答えは18です", "Ответ: 18 км", "정답은 18입니다",
        "الجواب هو ١٨",
        # an equation, an approximation
        "x = 18", "6*3=18", r"\sqrt{324} = 18", "17.6 + 0.4 = 18 dollars", "≈18", "~ 18", r"\approx 18",
        "roughly 18", "exactly 18", "=> 18", "→ 18", "x == 18", "a := 18", "17.6 ≈ 18", r"\frac{54}{3} = 18",
    ],
    "-5": ["-5", "−5", "- 5", "minus 5", "negative 5", "-5 degrees", "-$5", "$-5", "minus $5", "x = -5", "-10/2",
           r"-\frac{10}{2}", "**-5**", "a negative 5"],
    "1000": ["1,000", "1 000", "1\u202f000", "1'000", r"1\,000", r"1{,}000", "10^3", "10^{3}", "10³", "10**3", "1E3",
             "1 thousand", "$1k", "1 * 10^3", "1 x 10^3", r"1 \times 10^3", "1 × 10³", "1·10^3", "10 hundred",
             r"1\text{ thousand}", "0.001 million", "2000/2"],
    "1500000": ["$1.5 million", "1.5M", "1 500 000", "1.5e6", "1.5 × 10⁶", "1½ million",
                "1 1/2 million", "1,5 million", r"1.5 \times 10^{6}"],
    "400": ["four hundred", "Four hundred dollars", "4 hundred"],
    "-23": ["minus twenty-three", "negative twenty three"],
    "1": ["one", "One."],
    "18000000000": ["$18 billion", "18 bn", "18B"],
    "216": ["18 dozen", "eighteen dozen", "18 dozens of eggs"],
    "1/2": ["½", "1/2", ".5", "0,5", r"\frac12", r"\dfrac{1}{2}", "1 / 2", "1⁄2", "½ cup", "50%", "5 × 10⁻¹"],
    "3/2": ["1½", "1 1/2", "1 and 1/2", "1 and ½", r"1\frac{1}{2}", r"1 \frac{1}{2}", "1½ hours", "1 1/2 km"],
}  # fmt: skip
WRONG = {
    "18": [
        # something is attached that belongs to the number
        "18½", "18²", "18⁻¹", "18①", "⑱", "18 1/2", "18^{2}", "18**2", "18!", "18_{20}", "18₅", "18i", "18 x", "18a",
        "18π", r"18\pi", "18e5", "18e", "0x18", "1.18", ".18", "18.01", "18,5", "180", "1 8", "1,8", "18,000",
        "1\u00a08", "18...", r"18\ldots", "18+", "18-", "18*2", "18/3", "1/18", "⅛18", "18°18'", "18:30", "#18", "18‰",
        "±18", r"\pm 18", "1\u03368\u0336", "<s>18</s>", "~~18~~", "-(18)", "|18|", "√18", "∞18", "[18, ∞)",
        r"\sqrt{18}", r"\sqrt[3]{18}", r"\log 18", r"18\frac{1}{2}", r"18^{\text{th}}", r"\overline{18}",
        r"-\text{18}", r"2^{18}", r"\foo 18", r"18 \cdot 2", r"1.\overline{8}", "18㎡²", "18^-1",
        # magnitudes
        "18 thousand", "18k", "18 k", "18万", "$18m", "$18 m", "18 hundred", "18 lakh", "18 万", "18千", "18 млн",
        "thousand 18", "18 (thousand)", "in thousands: 18", r"18\text{ million}", "18 dollars thousand", "18만", "18ⁿ",
        "18{}{}½", "18th-century", "ninety-18", "18-thousand",
        # words of other scripts: they may change the number
        "18 гривен", "18 मीटर", "18元以上", "至少18", "答案不是18", "18半", "18 до 20", "负18", "не 18",
        # signs, negations, comparisons
        "minus 18", "−18", "$-18", "not 18", "!= 18", "=/= 18", r"\neq 18", "isn’t 18", "18 is not the answer",
        "18 is wrong", "never 18", "no 18", "> 18", "<= 18", "≥ 18", "x > 18", r"\le 18", "more than 18", "at least 18",
        "greater than or equal to 18", "over 18", "up to 18", "other than 18", "18 or more", "17 or 18", "17, 18",
        "18 apples and 3 pears", "between 18", "all but 18", "18 feet 3 inches", "18 in 3 years", "--18", "5-18",
        "18 - 5", "a-18", "x18", "18 minus tax", "18 to 20", "18 = x - 2", "6 * 3 = 19", "18 ≈ 17", "18 -> 17",
        "cannot be 18", "the answer is wrong: 18", "not **18**",
        # functions and parts
        "half of 18", "a quarter of 18", "double 18", "twice 18", "18 squared", "the square root of 18", "sqrt(18)",
        "sin 18", "log 18", "f(18)", "log_2(18)", "18 factorial", "the inverse of 18", "18 halves", "18 hundredths",
        "18 and a half", "18 feet and a half", "18 doubled", "18 times 2", "times 18", "18 mod 5", "18 divided by two",
        "multiple of 18", "18 to the power of 2", "18 choose 2", "18th", "the 18th", "18 percent of 50", "out of 18",
        "18 dollars and fifty cents", "point 18", "18 point 5", "one hundred 18", "twenty 18", "18 five", "thirty-18",
        "18 and seven", "no number", "", "1 8 x", "18 18", "18 binary", "18 in base 9", "minus minus 18", "18 or so",
        "a - 18", "18 minus", "18 x 10^3", "18 * 10", "10^18",
    ],
    "5": ["minus 5", "5/0", r"\frac{5}{0}", "5e1", "2*5", "5 5", "V", "½5", "5½", "5.5.5", "5,5,5"],
    "1000": ["10^4", "10^-3", "10^{33}", "1,00", "1.000.000", "1 00 0", "10^3^2", "10^3!", "2 * 10^3 * 2", "1,000,00",
             "-10^3", "10^3 thousand", "100^3", "10^x", "1'00'0", "10³²", "10^3.5"],
    "1500000": ["1.5", "1.5 billion", "1.5 million and 1", "half of 1.5 million", "1.5 million squared"],
    "3/2": ["1 and 2", "11/2", "1 3/2", "1/1/2", "1 and a half of 3", "- 1 1/2", "1 1/2 1/2", "1½½", "1.5½"],
    "4": ["four hundred", "four hundred and two", "four or five", "four fifths", "four and a half", "four quarters"],
    "2": ["four hundred and two", "twenty-two", "one or two", "two thirds", "two and a half"],
    "1": ["one of them", "no one", "one hundred", "one third", "a", "a half"],
    "20": ["twenty eleven", "twenty-five", "twenty-third", "two zero", "twenty-day"],
    "20/3": ["twenty-third", "twenty third"],
    "1/2": ["1/2/1", "½½", "1/-2", "½²", "1:2", "half of 1/2"],
}  # fmt: skip


def cases(table: dict[str, list[str]]) -> list[tuple[str, str]]:
    """The pairs (reference, spelling) of a table."""
    return [(reference, text) for reference, texts in table.items() for text in texts]


def test_right_numbers():
    assert not [pair for pair in cases(RIGHT) if not same_number(*pair)]
    assert len(cases(RIGHT)) >= 200


def test_wrong_numbers():
    assert not [pair for pair in cases(WRONG) if same_number(*pair)]
    assert len(cases(WRONG)) >= 200


def test_number_among_words():
    """Where the form is free the last number counts, with all that belongs to it."""
    for text, answer in [
        ("It is 18 thousand.", "18 thousand"),
        ("3 cats and 18 dogs, so minus 18", "minus 18"),
        ("It makes 1/2 in all.", "1/2"),
        ("Step 2. That is $1.50 per day", "$1.50"),
        ("It is half of 18", "half of 18"),
        ("The bus leaves at 5:30.", "The bus leaves at 5:30"),
    ]:
        assert final_answer(text, "any") == answer


def test_numbers_of_any_length_take_no_time():
    start = time.process_time()
    pieces = ["1", "1 ", "1,", "(", "a ", "- ", "1/", "**", "^{", "½", "of ", "thousand ", ".", r"\frac{1", "k\u200b"]
    for piece in pieces:
        for text in (piece * (1_000_000 // len(piece)), piece * (200 // len(piece)), piece * (100 // len(piece)) + "1"):
            for words in (False, True):
                parse_number(text, words)
            final_answer(text, "any")
    assert time.process_time() - start < 5
