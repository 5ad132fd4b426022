r"""The answer that a reply gives, on tables; docs/grading.md shows NUMBERS and SHOWN.

    python tests/envs/test_reading.py    # writes these tables into the page
"""

import re
import sys
from pathlib import Path

import pytest

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from envs.data.questions import WRITTEN
from envs.grading.answers import final_answer
from envs.grading.equality import same_math
from envs.grading.numerals import same_number
from tests.helpers import ROOT

PAGE = ROOT / "docs" / "grading.md"

# Spellings; the number that they are ("" and "not 18": they are not 18); how the page says it; why.
NUMBERS = [
    (["18 dollars", "18 m^2", "18 m²", "about 18 km/h", "**18**", "“18”", "US$18", "≈ 18", "x = 18", "18元", "١٨"],
     "18", "18", "units, words, marks and an equation's left side do not count"),
    (["1,000", "1 000", "1'000", "10^3", "1e3", "1 thousand", "1k"], "1000", "1000",
     "separators, powers of ten and English scale words belong to the number"),
    (["1.5 million", "1½ million"], "1500000", "1,500,000", "`18 thousand` is 18,000 and not 18; `18 dozen` is 216"),
    (["½", "0.5", "50%", "1/2", r"\frac{1}{2}"], "1/2", "the fraction", "exact: 0.333 is not 1/3"),
    (["minus 5", "negative 5", "−5", "-$5"], "-5", "-5", "signs, also as words"),
    (["twenty-three", "Twenty three dollars"], "23", "23", "so do words, but not `four hundred and two`"),
    (["25%"], "25", "25 or 1/4", "the question decides which was meant"),
    (["18½", "18²", "18①", "18!", "18_5", "18i", "18 x", "18..."], "", "not 18", "something is attached"),
    (["not 18", "!= 18", "> 18", "at least 18", "18 or more", "±18"], "", "nothing", "negations and comparisons"),
    (["half of 18", "sqrt(18)", "18 squared", "twice 18", "18 hundredths", "18th", "point 18", "one hundred 18"], "",
     "nothing", "functions, parts, ordinals, words beside digits"),
    (["17 or 18", "18 apples and 3 pears", "17, 18", "between 5 and 18"], "", "nothing", "two numbers"),
    (["18万", "18 гривен"], "", "nothing", "words of other scripts that are no known unit"),
]  # fmt: skip

# A reply; references that it is right for, and others that it is wrong for; the page's reason.
SHOWN = [
    ("Paris", ["Paris", "paris"], ["Rome"], "a reply of one short line is its own answer"),
    ("**Yes.**", ["Yes"], ["No"], "marks do not count"),
    ("(B) 42", ["B", "42"], ["A"], "the letter of a choice, or its text"),
    ("Yes\n\nBecause the text says so.", ["Yes"], ["No"], "a line of its own, and others that explain it"),
    ("B\n\nA is wrong, since it is odd.", [], ["A", "B"], "another choice is named"),
    ("Yes\n\nWait, no.", [], ["Yes", "No"], "it is doubted"),
    ("So it takes 5 m.", ["5 m", "5 meters", "5"], ["5 km", "5 s", "5 m^2"], "a number comes with its unit"),
    ("It costs 18.90 euros.", ["18.90", "18.90 EUR"], ["$18.90", "18.90%"], ""),
    ("She earns 18 dollars per day.", ["18", "$18"], ["18 cents"], "what money is paid for does not count"),
    ("It is minus 5 degrees.", ["-5"], ["5"], "and with the words of its sign"),
    ("It is between 5 and 7.", ["between 5 and 7"], ["5", "7", "5, 7"], "several numbers are none"),
    ("The solutions are 5 and 7.", ["5, 7", r"\{5, 7\}"], ["5", "7"], "but a list of them is a list"),
    (r"It turns by $90^\circ$.", ["90", r"90^\circ"], [r"\$90", "90 cm", r"90\%"], "signs around LaTeX are no dollars"),
    ("It makes 3/4 cups.", ["3/4", "0.75 cups"], ["3", "4", "4/3"], "a fraction is one number"),
    ("The answer is (1, 2).", ["(1,2)"], ["2", "1", "(2,1)"], "a formula is compared as a whole"),
    ("Answer: 7\nConfidence: 95%", ["7"], ["95", "95%"], "notes after the answer do not count"),
    ("答案是42元。", ["42", "42元"], ["42 km"], "units and full stops of other scripts"),
]

MORE = [
    # labels
    *[(reply, [label], [other])
      for label, other in [("positive", "negative"), ("no solution", "none")]
      for reply in (f"{label}.", f"**{label}**", f"The answer is {label}.", f"It's {label}.",
                    f"<think>\n{other}?\n</think>\n\n{label}", f"Final answer: {label}\n\nThat is what the text says.",
                    f"The text says so, as was to be shown.\n\n**{label}**")],
    *[(reply, [], ["Paris", "Rome"])
      for reply in ("Paris or Rome", "Not Paris", "Paris\nRome", "Paris?\n\nI would rather take the other one.",
                    "Paris\n\nActually, Rome is the one.", "Paris\n\nIt could be Rome as well.")],
    ("Yes\n\nThe answer is no.", ["no"], ["Yes"]),
    ("Yes\n\nBecause 7 is prime.", ["Yes"], ["7"]),
    ("Solution\n\nWe add 1 and get 1 + 6 = 7.", ["7"], ["Solution"]),
    ("five", ["five", "5"], ["4"]),
    ("The answer is Route 66.", ["Route 66"], ["Route 6"]),
    *[(reply, ["18"], ["1", "8", "-18"]) for reply in ("So 18.", "Total 18", "about $18", "x is 18")],
    *[(reply.format(answer), [answer], ["3", "1"])
      for answer in ("1/2", r"\frac{3}{4}", r"50\%", "(1,2)", "x=5", "1,000", r"90^\circ")
      for reply in ("So {}.", "Hence, {}.", "We get {}.", "She gets {}", "{} total", "= {}", "* {}", "x = {}")],
    (r"It costs \$5.", ["5"], ["5 euros"]),
    ("I would rather not say.", [], ["yes", "no", "5"]),
    # choices
    *[(reply, ["B"], ["A", "C"]) for reply in ("(B)", "**B.**", "B) an apple", "Option B", "The answer is (B).",
                                               "B\n\nBecause the text says so.", "Answer: B\n\nThe text says so.")],
    *[(reply, [], ["A", "B", "C"]) for reply in (
        "A\nB", "A or B", "Not A, so B or C", "B\n\nOption A is a trap.", "B\n\nC is right, in fact.",
        "B\n\nThis is wrong.", "A/B", "ABC", "B?\nA?")],
    # units, in each form
    *[(form.format(given), [reference], [other]) for form in WRITTEN.values() for given, reference, other in [
        ("3 cm", "3 centimeters", "3 m"), ("5 km/h", "5 km/h", "5 km"), ("4 m^2", "4 square meters", "4 m"),
        ("18 pears", "18 pears", "18 apples"), ("25 percent", "25%", "$25")]],
    ("It is 3 km long.", ["3 km"], ["3 m"]),
    ("It is 5 in.", ["5 inches"], ["5 cm"]),
    ("Its area is 18 m^2.", ["18", "18 m²"], ["18 m", "18 cm^2"]),
    ("We find 18 thousand dollars.", ["$18,000", "18000"], ["18", "18 dollars"]),
    # several numbers
    *[(reply, [], ["5", "7", "30"]) for reply in (
        "5 or 7", "from 5 to 7 days", "5 apples and 7 pears", "5 feet 7 inches", "not 5 but 7", "7 out of 30",
        "between 5 and 30 percent", "at least 7", "The answer is 5 or 7.")],
    ("6 - 1 = 5 and 5 + 2 = 7", ["7"], ["5"]),
    ("She has 5 cats. Ann has 7.", ["7"], ["5"]),
    ("March 5, 2024", ["March 5, 2024"], ["5", "2024"]),
    # formulas and notes
    ("So it is $3\\sqrt{2}$.", [r"3\sqrt2"], [r"\sqrt2", "2", "3"]),
    ("The answer is 7 (confidence: 95%)", ["7"], ["95%"]),
    ("**Answer:** Paris\n**Explanation:** Rome is the capital of Italy.", ["Paris"], ["Rome"]),
    ("Answer: 7\nCorrection: 8", ["8"], ["7"]),
    # other scripts
    *[(reply, ["42"], ["4", "2", "-42"]) for reply in ("答えは42です。", "Ответ: 42.", "정답은 42입니다.")],
    *[(reply, [], ["42"]) for reply in ("答案不是42。", "至少42元。", "42万元", "约42到50元")],
]  # fmt: skip


def tables() -> list[str]:
    """Returns the tables of the page, in its order."""

    def code(texts: list[str]) -> str:
        return ", ".join(f"`{text}`".replace("\n\n", "⏎").replace("\n", "⏎") for text in texts)

    head = "| a reply of `form=any` | is right for | and wrong for | because |"
    replies = [f"| {code([reply])} | {code(right)} | {code(wrong)} | {why} |" for reply, right, wrong, why in SHOWN]
    numbers = [f"| {code(texts)} | {meaning} | {why} |" for texts, _, meaning, why in NUMBERS]
    return [
        "\n".join([head, "|---|---|---|---|", *replies]),
        "\n".join(["| a text | is | because |", "|---|---|---|", *numbers]),
    ]


MARKED = re.compile(r"(?<=<!-- tests/envs/test_reading.py -->\n).+?(?=\n<!-- end -->)", re.DOTALL)


def test_the_page_has_these_tables():
    assert MARKED.findall(PAGE.read_text()) == tables()


@pytest.mark.parametrize(("texts", "number"), [row[:2] for row in NUMBERS])
def test_spellings_of_numbers(texts, number):
    assert [same_number(number or "18", text) for text in texts] == [bool(number)] * len(texts)


def test_replies_are_right_for_their_references_alone():
    pytest.importorskip("math_verify")

    def is_right(reply: str, reference: str) -> bool:
        answer = final_answer(reply, "any")
        return answer is not None and same_math(reference, answer)

    rows = [row[:3] for row in [*SHOWN, *MORE]]
    assert not [(reply, one) for reply, right, _ in rows for one in right if not is_right(reply, one)], "are wrong"
    assert not [(reply, one) for reply, _, wrong in rows for one in wrong if is_right(reply, one)], "are right"


if __name__ == "__main__":
    pieces = iter(tables())
    PAGE.write_text(MARKED.sub(lambda _: next(pieces), PAGE.read_text()))
