"""Graders against labels that other people wrote, and against text that wants to hang, break or fool them."""

import json
import random
import re
import time
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import pytest

from envs.grading.answers import FORMS, extract_boxed, final_answer, parse_arithmetic
from envs.grading.equality import is_tame, nesting, parse_math, same_math
from envs.grading.numerals import parse_number, same_number
from envs.grading.rewards import graded_blocks, quarter_per_tag, think_answer
from envs.scoring.scorer import Scorer

FIXTURES = Path(__file__).parents[1] / "fixtures" / "data"
GRADERS = Path(__file__).parents[3] / "shared" / "data" / "graders"
needs_labels = pytest.mark.skipif(not GRADERS.is_dir(), reason="needs the shared grader files beside the repository")

# Rows of answer_equivalence whose label is not ours: their sources follow rules that contradict math-verify's default.
DISAGREEMENTS = {
    "test_complex_math_expressions:7": "equal at 2 decimals only",
    "test_complex_math_expressions:13": "equal at 2 decimals only",
    "test_math_equal:8": "75 for 0.75 without a percent sign",
    "test_order:0": "a list without brackets counts as a set",
    "grade_answer_special_handling:0": "equal at 2 decimals only",
    "grade_answer_special_handling:1": "equal at 2 decimals only",
    "grade_answer_special_handling:3": r"\sqrt{}{3} is no LaTeX for a root of 3",
}


def rows(name: str) -> list[dict]:
    return [json.loads(line) for line in (GRADERS / f"{name}.jsonl").read_text().splitlines()]


@needs_labels
def test_gsm8k_model_solutions():
    for row in rows("gsm8k_model_solutions"):
        answer = row["solution"].rpartition("A:")[2]
        assert same_number(row["gold"], answer) == row["is_correct"], row["id"]
        found = same_number(row["gold"], final_answer(row["solution"], "any") or "")
        assert found == row["is_correct"], row["id"]


@needs_labels
def test_answer_equivalence():
    disagree = [row for row in rows("answer_equivalence") if same_math(row["gold"], row["pred"]) != row["expected"]]
    assert {row["id"].partition(".py:")[2] for row in disagree} == set(DISAGREEMENTS)
    assert not any(row["math_verify_agrees"] for row in disagree)


@needs_labels
def test_math_model_outputs():
    for row in rows("math_model_outputs"):
        answer = final_answer(row["completion"], "boxed")
        assert (answer is not None and same_math(row["gold"], answer)) == row["is_correct"], row["id"]


@needs_labels
def test_extraction():
    for row in rows("tora_gsm8k_boxed"):
        assert same_number(row["extracted"], final_answer(row["completion_tail"], "boxed")), row["id"]
    for row in rows("openmathinstruct2_boxed"):
        assert same_math(row["expected_answer"], final_answer(row["completion"], "boxed")), row["id"]
    for row in rows("extract_answer"):
        expected = row["expected"] if row["id"] != "skythought:3" else "But here's some text 2 and 10"  # two numbers
        assert final_answer(row["text"], "any") == expected, row["id"]
    for row in rows("think_answer_format"):
        assert bool(think_answer(row["completion"])) == row["expected"], row["id"]


@pytest.mark.parametrize(
    ("text", "form", "answer"),
    [
        ("<answer>1</answer><answer> 2 </answer><answer>3", "tags", "2"),
        (r"<answer>\boxed{7}</answer>", "tags", "7"),
        (r"\boxed{1} or \boxed{\frac{1}{2}} or \boxed{3", "boxed", r"\frac{1}{2}"),
        (r"\boxed {\left\{ 1, 2 \right.}", "boxed", r"\left\{ 1, 2 \right."),
        ("so 1\n#### 1,000\nbye", "hash", "1,000"),
        ("<answer>5", "tags", None),
        (r"12 and then \boxed{3} and #### 4", "any", "3"),
        # A heading of Markdown is no answer.
        ("9 * 4 = 36 shells.\n#### 36\n\n#### Explanation\nFour boxes of nine.", "hash", "36"),
        ("#### Step 1\n4 * 9 = 36\n#### Step 2\n36 + 5 = 41\n\nThe answer is 41.", "any", "41"),
        ("#### 1. Add them\nSo 41.\n#### 2) Check\n41 is odd, which fits.", "any", "41"),
        ("#### $x = 5$\n\n#### Verification\n5 = 5", "hash", "$x = 5$"),
        (r"#### \boxed{7}" "\n#### Note 3\nBoxes of 9.", "hash", "7"),
        ("#### Paris\nIt is the capital.", "hash", "Paris"),
        ("#### Step 2", "hash", None),
        # Without a number the end of the text may give the answer in words.
        ("It has 2 rivers. So the answer is Paris.", "any", "Paris"),
        ("**Answer:** (E) forty", "any", "(E) forty"),
        ("It is 41, so the answer is correct.", "any", "41"),
        ("The answer is Paris. No, London.", "any", "Paris. No, London"),
    ],
)
def test_final_answer(text, form, answer):
    assert final_answer(text, form) == answer


def test_no_numbers():
    texts = "x 5/0 --5 5-10 2x 18! 5!! 1.2.3 1,000,00 5:30 1/2/3 2^10 1e9999 <18> 0x10 1_000 nan inf 101_2 3i".split()
    assert not [text for text in (*texts, "", "5 3", "9" * 300) if parse_number(text)]
    assert parse_number(r"1\frac12").value == parse_number(r"1\frac12", words=True).value == Fraction(3, 2)
    assert same_number("25%", "0.25") and same_number("25", "25%") and not same_number("25", "0.25")
    assert not same_number("0.3", "0.30000000000000004"), "exact, unlike floats"


def test_format_rewards():
    good = "<think>\nhm\n</think>\n<answer>\n5\n</answer>"
    assert (think_answer(good), quarter_per_tag(good), graded_blocks(good)) == (1.0, 1.0, 1.0)
    table = [("", 0, 0), ("x" + good, 1, 0.6), (good * 2, 1, 1), ("<think></think>", 0.5, 0.1), ("<answer>", 0.25, 0)]
    for text, quarters, blocks in table:
        assert (think_answer(text), quarter_per_tag(text), graded_blocks(text)) == (0.0, quarters, blocks)


def test_graded_blocks_are_those_of_three_regular_expressions():
    rng = random.Random(0)
    parts = ["<think>", "</think>", "<answer>", "</answer>", "\n", "x"]
    in_form = 0
    for _ in range(20_000):
        text = "".join(rng.choices(parts, k=rng.randint(0, 8)))
        think, answer = (re.search(f"<{tag}>.*?</{tag}>", text, re.DOTALL) for tag in ("think", "answer"))
        whole = re.search("^<think>.*?</think>\n<answer>.*?</answer>$", text, re.DOTALL)
        expected = 1.0 if whole else 0.1 * bool(think) + 0.5 * bool(answer)
        assert graded_blocks(text) == expected, text
        in_form += bool(whole)
    assert in_form


# hostile text


def tower(template: str, levels: int) -> str:
    text = "9"
    for _ in range(levels):
        text = template.replace("@", text)
    return text


MEGA = 10_000_000
HOSTILE = {
    "brackets": lambda: "(" * 100_000 + "1" + ")" * 100_000,
    "few brackets": lambda: "(" * 40 + "1" + ")" * 40,
    "powers": lambda: "9**9**9**9",
    "power chain": lambda: "((9^{999})^{999})^{999}",
    "scientific": lambda: "1e999999999",
    "factorials": lambda: "((9!)!)!",
    "factorial": lambda: "100000000!",
    "factorial of a power": lambda: "8^9!",
    "factorial of a fraction": lambda: r"\frac{4040099}{2010}!",
    "binomial": lambda: r"\binom{1000000000}{500000000}",
    "sum": lambda: r"\sum_{k=1}^{1000000000} k^k",
    "product": lambda: r"\prod_{k=1}^{10^{12}} k",
    "polynomial": lambda: "(x+y+z+1)^{5000}",
    "modulo": lambda: r"7^{1000000000000} \mod 13",
    "gamma": lambda: r"\Gamma(10^{10})",
    "matrix power": lambda: r"\begin{pmatrix}1&2\\3&4\end{pmatrix}^{10000000}",
    "fractions": lambda: tower(r"\frac{1}{1+@}", 30),
    "endless fractions": lambda: tower(r"\frac{@}{2}", 3000),
    "10 MB digits": lambda: "9" * MEGA,
    "10 MB commas": lambda: "1," * (MEGA // 2),
    "10 MB spaces": lambda: "1" + " " * MEGA + "2",
    "10 MB boxes": lambda: r"\boxed{" * (MEGA // 7),
    "10 MB empty boxes": lambda: r"\boxed" * (MEGA // 6),
    "10 MB hashes": lambda: "#" * MEGA,
    "10 MB dollars": lambda: "$" * MEGA,
    "10 MB tags": lambda: "<answer></answer>" * (MEGA // 17),
    "surrogates": lambda: "\x00\ud800\udfff18",
    "import": lambda: "__import__('os').system('true')",
    "regex bomb": lambda: "a" * 5000 + "!" + " " * 5000 + "$" * 200,
    "latex regex bomb": lambda: "$" + "\\" * 1900 + "$",
    "input": lambda: r"\input{/etc/passwd} \def\x{\x\x}\x",
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_text(kind):
    text = HOSTILE[kind]()
    for reply in (text, f"<answer>{text}</answer>", f"\\boxed{{{text}}}", f"#### {text}", f"<answer>{text}"):
        for form in FORMS:
            start = time.process_time()
            answer = final_answer(reply, form)
            assert time.process_time() - start < 1
            for reference in ("5", r"\frac{x}{2}"):
                assert not same_number(reference, answer or ""), "not even here is it right"
                assert not same_math(reference, answer or "")
        think_answer(reply), quarter_per_tag(reply)
        assert time.process_time() - start < 3


def test_guards_leave_what_people_write():
    for text in ("2^{2009}", "10^{2022}", r"\binom{100}{50}", "20!", "x^{2020}", "(x+1)^{10}", r"\sum_{k=0}^{n-1} k^2"):
        assert is_tame(text) and parse_math(text), text
    assert nesting("((1)+{[2]})") == 3
    assert nesting(")))(") == 1


PIECES = [*"0123456789+-*/^=_(){}[]|<>$%&#,.;:!?'\"\\ \n\t", "\x00", "\ud800", "\u202e", "١", "½", "×", "−", "#### "]
PIECES += r"""
<answer> </answer> <think> </think> \boxed{ } <|im_end|> \frac{ }{ \sqrt{ \sqrt[3]{ \left( \right)
\text{ \pi \infty \cdot \times \binom{ \sum_{k=1}^{ \int_0^{ \begin{pmatrix} \end{pmatrix} \\ & \cup
\in \le \mod \log_{ \sin \pm \% ! ** 9**9**9 10^{ 1e9 99999 x y i and or dollars percent Answer: 1,000 3/4 0.5
""".split()
AROUND = ("{}", "<answer>{}</answer>", "\\boxed{{{}}}", "#### {}", "<think>{}</think><answer>1</answer>")


def completions(rng: random.Random, number: int) -> Iterator[str]:
    """Random strings of pieces that graders know, most of them where an answer is looked for."""
    for _ in range(number):
        pieces = "".join(rng.choices(PIECES, k=rng.choice((1, 2, 5, 10, 20, 40, 100))))
        body = pieces if rng.random() < 0.6 else formula(rng, rng.choice((1, 2, 3, 4, 6)))
        if rng.random() < 0.05:
            body *= rng.choice((10, 100, 1000))
        yield rng.choice(AROUND).format(body)


FORMULAS = r"""A+B|A-B|(A)(B)|(A)!|A^{B}|(A)^{B}|A**B|A=B|A<B|(A,B)|[A,B]|\{A,B\}|A \pm B|A \mod B|A \cup B|\frac{A}{B}
\sqrt{A}|\sqrt[3]{A}|(\sqrt2+\sqrt3+A)^{B}|(x+A)^{B}|\begin{pmatrix}A&B\\B&A\end{pmatrix}|\sin(A)|\tan A|\arctan(A)
\log(A)|\log_{B}(A)|\binom{A}{B}|\gcd(A,B)|\max(A,B)|\lfloor A \rfloor|\lceil A \rceil|\sum_{k=1}^{B} A
\prod_{k=1}^{B} A|\lim_{x \to B} A|\int_0^{B} A dx|\int_0^{\pi} \sin^{B} x dx|\frac{d}{dx} A|\frac{d^{B}}{dx^{B}} A"""
ATOMS = r"1 9 20 150 500 99999 1000000007 0.5 -3 x y n \pi e i \infty".split()


def formula(rng: random.Random, depth: int) -> str:
    """Well-formed LaTeX that is not meant to be computed: towers of large numbers, powers of sums, endless products."""
    if depth == 0:
        return rng.choice(ATOMS)
    parts = {"A": formula(rng, depth - 1), "B": formula(rng, rng.randrange(depth))}
    return re.sub("[AB]", lambda letter: parts[letter[0]], rng.choice(re.split(r"[|\n]", FORMULAS)))


def grade(text: str) -> None:
    """Every grader on one text, in this process."""
    for form in FORMS:
        answer = final_answer(text, form)
        same_number("5", answer or "")
        same_math(r"\frac{x}{2}", answer or "")
    parse_arithmetic(text)
    think_answer(text), quarter_per_tag(text)


def test_random_text():
    for text in completions(random.Random(0), 100):
        grade(text)


@pytest.mark.slow
def test_thousands_of_random_texts_are_graded_in_processes():
    texts = [*completions(random.Random(1), 5000)]
    with Scorer("math500", {"data_dir": str(FIXTURES)}, num_workers=2) as scorer:
        scores, counts = scorer.score_replies([0] * len(texts), texts)
    assert sum(score is None for score in scores) == counts["reward_timeouts"] < 10
    assert counts["reward_errors"] == 0


def test_boxes_that_never_close_hide_no_answer():
    assert extract_boxed(r"\boxed{42}" + r"\boxed{" * 50) == "42"
