r"""The rule for numbers (docs/grading.md) on a table: spellings of a number, and what only looks like one.

NBSP and its like are written as escapes. Every line of RIGHT is its reference, every line of WRONG is not.
"""

import time

from envs.grading.answers import final_answer
from envs.grading.numerals import parse_number, same_number

RIGHT = {
    "18": [
        # the number alone
        "18", " 18\n", "18.", "18.0", "18.00", "018", "+18", "+ 18", "18,", "(18)", "1.8e1", "36/2", "\uff11\uff18",
        # units and words
        "18 dollars", "18 kg", "18kg", "18 m", "18 L", "18h", "18 apples", "18 apple(s)", "18-day trip",
        "18 years old", "18 km/h", "18 dollars per day", "18 dollars/day", "18/day", "about 18 km/h",
        "18 miles per hour", "18 more than Bob", "18 times", "18 minutes and seconds",
        "18 quarters", "She has 18 apples left.", "Jane ends up with 18 dollars", "The answer is 18", "Answer: 18",
        "answer:18", "A: 18", "x: 18", "x is 18", "I have 18 apples", "a total of 18 apples", "the difference is 18",
        "The answer: 18 dollars.", "There are 18 of them!", "Great! It is 18.", "18 a day", "18¢", "18 p.m.",
        "so 18 people's hats", "ends with 18 — that is all", "the result — 18",
        "eighteen", "Eighteen dollars.", "The answer is eighteen.",
        # units with powers
        "18 m^2", "18 m²", "18m²", "18 m2", "18 m^{2}", "18 cm^3", "18 cm³", "18 ft^2", "18 m/s^2",
        "18 square meters", "18 cubic feet", "18 meters squared", "Area (m²): 18",
        r"18\text{ m}^2", r"18\,\text{cm}^2", r"18 \mathrm{m}^{2}", r"18\ \text{km}^2",
        # spaces of all kinds
        "18\u00a0dollars", "18\u202fkg", "18\u2009m", "\u00a018\u00a0", "18\u200bdollars", "18\u200b", "\ufeff18",
        "18\u2060", "18~dollars", "18\u3000", "18\tdollars", "\u200e18",
        # quotation marks, markdown, HTML
        '"18"', "'18'", "“18”", "‘18’", "«18»", "„18“", "`18`", "```18```", "**18**", "__18__", "_18_", "*18*",
        "***18***", "**18** dollars", "**Answer:** 18", "The answer is **18 dollars**.", "**Answer: 18**", "* 18",
        "#### 18",
        # LaTeX
        "$18$", "$$18$$", r"\(18\)", r"\[ 18 \]", r"\text{18}", r"\mathbf{18}", r"\boxed{18}", r"18\text{ dollars}",
        r"{18}", r"18^\circ", r"18^{\circ}", r"\left(18\right)", r"\textbf{18 dollars}", r"18\!", r"\displaystyle 18",
        r"18 \quad", "18\\", "18 \\", "18\\\\", "18 dollars\\",
        # currencies, degrees, percent
        "$18", r"\$18", "$ 18", "$18.00", "18$", "18 $", "€18", "18 €", "£18", "¥18", "₹18", "US$18", "A$18", "R$ 18",
        "HK$18", "USD 18", "18 USD", "Rs. 18", "Rs 18", "EUR 18", "18 euros", "18°", "18 °C", "18%", r"18\%",
        "18 percent", "18 pct",
        # other scripts
        "18 元", "18个", "18 рублей", "答案是18", "18円", "答案是18。", "一共18个", "答えは18です", "Ответ: 18 км",
        "정답은 18입니다", "الجواب هو ١٨", "१८",
        # an equation, an approximation
        "x = 18", "x=18", "6 * 3 = 18", "6*3=18", r"\sqrt{324} = 18", "cost = $18", "17.6 + 0.4 = 18 dollars", "≈ 18",
        "≈18", "~18", "~ 18", r"\approx 18", "approximately 18", "roughly 18", "about 18", "exactly 18", "=> 18",
        "⇒ 18", "→ 18", "Total -> 18", "x == 18", "a := 18", "nearly 18", "17.6 ≈ 18", r"\frac{36}{2}",
        r"\frac{54}{3} = 18", "20 - 2 = 18",
    ],
    "-5": [
        "-5", "−5", "–5", "- 5", "minus 5", "negative 5", "Minus 5", "-5 degrees", "-$5", "$-5", "−$5", "minus $5",
        "-5.0", "x = -5", "the answer is minus 5", "-5%", "-10/2", r"-\frac{10}{2}", "**-5**", "-5°C",
        "a negative 5",
    ],
    "1000": [
        "1,000", "1 000", "1\u00a0000", "1\u202f000", "1\u2009000", "1'000", "1’000", r"1\,000", r"1{,}000",
        r"1,\!000", "10^3", "10^{3}", "10³", "10**3", "1e3", "1E3", "1 thousand", "1 k", "1k", "1K", "$1k", "1,000.00",
        "1 * 10^3", "1 x 10^3", r"1 \times 10^3", r"1 \cdot 10^{3}", "1 × 10³", "1·10^3", "10 hundred",
        "1 thousand dollars", "$1 thousand", r"1\text{ thousand}", "0.001 million", "2000/2",
    ],
    "1500000": [
        "1.5 million", "$1.5 million", "1.5 Million dollars", "1.5M", "$1.5M", "1,500,000", "1 500 000",
        "1.5e6", "1.5 × 10⁶", "1500 thousand", "1½ million", "one and a half million", "1,500 thousand",
        "1 1/2 million", "1,5 million", r"1.5 \times 10^{6}",
    ],
    "402": ["four hundred and two", "Four hundred two dollars", "about four hundred and two"],
    "5/2": ["two and a half", "two and one half cups", "five halves"],
    "-23": ["minus twenty-three", "negative twenty three"],
    "3/4": ["three quarters", "three-fourths"],
    "1": ["one", "One."],
    "1002003": ["one million two thousand and three", "a million two thousand three"],
    "18000": ["18 thousand", "18k", "18 thousand dollars", "18,000", "$18k", "18K people", "18 Thousand"],
    "18000000000": ["$18 billion", "18 bn", "18B"],
    "216": ["18 dozen", "eighteen dozen", "18 dozens of eggs"],
    "1/2": [
        "½", "1/2", "0.5", ".5", "0,5", r"\frac{1}{2}", r"\frac12", r"\dfrac{1}{2}", r"\tfrac12", "1 / 2", "1⁄2",
        "$½$", "½ cup", "50%", "5e-1", "5 * 10^{-1}", "5 × 10⁻¹", "x = ½",
    ],
    "3/2": [
        "1½", "1 ½", "1 1/2", "1 and 1/2", "1 and ½", r"1\frac{1}{2}", r"1\frac12", r"1 \frac{1}{2}", "1.5", "3/2",
        "1½ hours", "1 and 1/2 cups", r"\frac{3}{2}", "1 1/2 km",
    ],
    "37/2": ["18½", "18 1/2", "18.5", "18 ½ miles", "18,5"],
    "1/3": ["1/3", "⅓"],
    "70000": ["70,000", "70 000", "$70,000.00", "70,000 dollars", "7 * 10^4", "70k"],
}  # fmt: skip
WRONG = {
    "18": [
        # something is attached that belongs to the number
        "18½", "18¼", "18²", "18³", "18⁻¹", "18①", "①⑧", "⑱", "18⅓", "18 ½", "18 1/2", "18^2", "18^{2}", "18**2",
        "18!", "18 !", "18!!", "18_5", "18_{20}", "18₅", "18i", "18x", "18 x", "18 n", "18a", "18π", "18 pi", r"18\pi",
        "18e5", "18e", "18e-1", "0x18", "0b18", "1.18", ".18", "18.5", "18.01", "18,5", "180", "118", "1 8", "1,8",
        "18,000", "18 000", "1\u00a08", "18...", "18…", "18.18...", r"18\ldots", "18+", "18-", "18*2", "18/", "18/3",
        "1/18", "⅛18", "18°18'", "18:30", "7:18", "18:1", "#18", "18‰", "18 ± 1", "±18", r"\pm 18", "1\u03368\u0336",
        "<s>18</s>", "<del>18</del>", "~~18~~", "<sup>18</sup>", "x<sub>18</sub>", "-(18)", "|18|", "⌊18⌋", "√18",
        "∛18", "∞18", "18∞", "18†", "[18, ∞)", r"\sqrt{18}", r"\sqrt[3]{18}", r"\log 18", r"18^\prime",
        r"\frac{18}{1}\frac{1}{2}", r"18\frac{1}{2}", r"\frac{1}{18}", r"18^{\text{th}}", r"\overline{18}",
        r"-\text{18}", r"2^{18}", r"\foo 18", r"18 \bar", r"18 \cdot 2", r"18\overline{3}", r"1.\overline{8}", "18‱",
        "18㎡²", "18^-1", "18 ^ 2",
        # magnitudes
        "18 thousand", "$18 billion", "18k", "18K", "18 k", "18万", "18 million", "18M", "$18m", "$18 m", "18 bn",
        "18 hundred", "18 dozen", "18 lakh", "18 crore", "18 万", "18亿", "18千",
        "18 тысяч", "18 млн", "thousand 18", "18 (thousand)", "in thousands: 18", "18 hundred thousand", "18 trillion",
        "18百", "18十", r"18\text{ million}", "18 dollars thousand", "18 grand", "18만",
        "18ⁿ", "18{}{}½", "18th-century", "ninety-18", "18 Thousand", "18-thousand",
        # words of other scripts: they may change the number
        "18 гривен", "18 मीटर", "18元以上", "至少18", "答案不是18", "18半", "18万元", "18 до 20",
        # signs, negations, comparisons
        "minus 18", "negative 18", "-18", "− 18", "–18", "–$18", "$-18", "负18", "not 18", "!= 18", "≠ 18",
        "=/= 18", r"\neq 18", r"\ne 18", "isn't 18", "is not 18", "isn’t 18", "18 is not the answer", "18 is wrong",
        "never 18", "no 18", "не 18", "不是18", "> 18", "< 18", ">= 18", "<= 18", "≤18", "≥ 18",
        "18 >", "x > 18", r"\le 18", r"\geq 18", "more than 18", "less than 18", "at least 18", "at most 18",
        "fewer than 18", "greater than or equal to 18", "over 18", "under 18", "above 18", "below 18", "up to 18",
        "other than 18", "18 or more", "18 or 17", "17 or 18", "17 and 18", "17, 18", "18, 17",
        "18 apples and 3 pears", "between 18", "all but 18",
        "18 feet 3 inches", "18 in 3 years", "--18", "- -18", "5-18", "18-5", "18 - 5", "18 + x",
        "a-18", "x-18", "x18", "x + 18", "18 minus tax", "18 plus tax", "18 to 20", "18 = x - 2", "6 * 3 = 19",
        "18 ≈ 17", "18 = 17", "18 -> 17", "neither 18", "cannot be 18", "the answer is wrong: 18", "18 at least one",
        "not “18”", "not **18**",
        # functions and parts
        "half of 18", "half 18", "a third of 18", "a quarter of 18", "double 18", "twice 18", "thrice 18",
        "18 squared", "18 cubed", "square of 18", "the square root of 18", "square root of 18", "cube root of 18",
        "sqrt(18)", "sqrt 18", "sin 18", "cos(18)", "log 18", "ln(18)", "exp(18)", "f(18)", "abs(18)", "log_2(18)",
        "18 factorial", "factorial of 18", "the inverse of 18", "reciprocal of 18", "the opposite of 18", "18 halves",
        "18 thirds", "18 tenths", "18 hundredths", "18 thousandths", "18 and a half", "18 and a quarter",
        "18 feet and a half", "18 doubled", "18 times 2", "2 times 18", "times 18", "18 mod 5", "18 divided by two",
        "divided by 18", "multiple of 18", "18 to the power of 2", "power of 18", "18 choose 2", "18th", "18 th",
        "the 18th", "18st", "1st", "18 percent of 50", "percent of 18", "out of 18", "18 dollars and 50 cents",
        "18 dollars and fifty cents", "point 18", "18 point 5", "dot 18", "one hundred 18", "hundred 18", "twenty 18",
        "18 five", "thirty-18", "18 and seven", "no number", "", "x", "1 8 x", "18 18", "18 binary",
        "18 in hex", "18 in base 9", "18 base 9", "minus minus 18", "18 or so", "a - 18", "10 minus 18", "18 minus",
        "18 x 10^3", "18 × 10²", "18 * 10", "18e1", "10^18", "18^10",
    ],
    "5": [
        "minus 5", "-5", "5/0", r"\frac{5}{0}", "10^5", "5e1", "2*5", "5 5", "V", "0.5", "½5", "5½", "5.5.5",
        "5,5,5",
    ],
    "1000": [
        "10^4", "10^-3", "10^{33}", "1,00", "1.000.000", "1 00 0", "10^3^2", "10^3!", "2 * 10^3 * 2", "1,000,00",
        "-10^3", "10^3 thousand", "1 000 000", "100^3", "10^x", "10^2", "1'00'0", "10³²", "10^3.5",
    ],
    "1500000": [
        "1.5", "1.5 billion", "1,5", "1.5 million and 1", "-1.5 million", "half of 1.5 million", "1.5 million squared",
    ],
    "3/2": [
        "1 and 2", "11/2", "1 3/2", "1/1/2", "1 and a half of 3", "1 / 1 / 2", "- 1 1/2", "1 1/2 1/2", "1½½", "1.5½",
        "12",
    ],
    "402": ["four hundred or two", "up to four hundred and two", "half of four hundred and two", "four hundred second"],
    "2": ["four hundred and two", "twenty-two", "one or two", "two thirds", "between one and two", "two and a half"],
    "1": ["one of them", "this one", "no one", "one hundred", "one third", "a", "a half"],
    "20": ["twenty eleven", "twenty-five", "twenty-third", "nineteen twenty", "two zero", "twenty-day"],
    "20/3": ["twenty-third", "twenty third"],
    "1/2": ["1/2/1", "½½", "1/-2", "2", "½²", "1:2", "half of 1/2"],
}  # fmt: skip


def cases(table: dict[str, list[str]]) -> list[tuple[str, str]]:
    """The pairs (reference, spelling) of a table."""
    return [(reference, text) for reference, texts in table.items() for text in texts]


def test_right_numbers():
    refused = [(reference, text) for reference, text in cases(RIGHT) if not same_number(reference, text)]
    assert not refused
    assert len(cases(RIGHT)) >= 200


def test_wrong_numbers():
    accepted = [(reference, text) for reference, text in cases(WRONG) if same_number(reference, text)]
    assert not accepted
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
