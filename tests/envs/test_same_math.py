"""Mathematics (docs/grading.md) on a table: what equals a reference, what does not, what does not parse."""

import time

import pytest

from envs.grading.equality import same_math

RIGHT = {
    "5": [
        "5", "5.0", "$5$", r"\boxed{5}", r"5 \text{ cm}", "x = 5", r"\frac{10}{2}", r"\sqrt{25}", r"5^\circ", r"\$5",
        r"5\%", r"\left(5\right)", r"\text{5}", "5.", "the answer is $5$", "so 2 + 3 = 5", r"\(5\)", r"\mathbf{5}",
        "5 units", r"5\text{ cm}^2", "y = 2+3 = 5", "5!-115", "|-5|", r"\log_2 32", "5 km/h", "5 people", "答案是5",
        "C. 5",
    ],
    "5000": [r"5\text{ thousand}", "5k", "5,000", r"5\times10^3", "5{,}000", r"5\,000"],
    r"\frac{11}{2}": ["5½", "5.5", r"5\frac12", "11/2", "5 1/2"],
    "185\\": ["185", "185\\", "$185$"],
    "100000": ["The answer is **100000**."],
    "1011_2": ["1011_2", "1011_{2}", "1011", r"1011_{\text{2}}"],
    r"10^\circ": ["10", "10°", r"10^{\circ}", r"10\text{ degrees}", r"10\degree"],
    r"3\text{ cm}": ["3 cm", "3", r"3\text{ centimeters}", r"3\,\mathrm{cm}", r"3 \mbox{ cm}", "it is $3$ cm", "3 cm!"],
    r"15\mbox{ cm}^2": [r"15\text{ cm}^2", "15", r"15\text{ square centimeters}", "15 cm²", r"15\text{ sq cm}"],
    r"\$18.90": ["18.9", "$18.90", "18.90 dollars", r"18.90\text{ dollars}"],
    r"25\%": ["25", "25%", "0.25", r"\frac14", r"25\text{ percent}"],
    r"\frac{1}{2}": ["½", ".5", "1/2", r"\dfrac{1}{2}", "2^{-1}", r"50\%"],
    r"\frac{1}{3}": [r"0.\overline{3}", "1/3"],
    "1": [r"\tan 45^\circ", r"\tan(45^\circ)", r"\sin^2 x+\cos^2 x", r"\tan{45^\circ}"],
    "(1,2)": ["(1, 2)", r"\left(1,2\right)", "$(1,2)$", r"(1,2) \text{ units}"],
    r"\text{Evelyn}": ["Evelyn", r"\text{Evelyn}", "evelyn"],
    "C": ["C", r"\text{C}", "(C)", r"\text{(C)}"],
    r"11^{\text{th}}": ["11", r"11\text{th}"],
    "-5": ["minus 5", "−5", "x=-5"],
    r"67.\overline{3}": [r"\frac{202}{3}", r"67\frac13"],
    # decimals that are roundings, to the digits that are written
    r"\frac{2}{3}": ["0.666667"],
    r"\pi": ["3.141593", "3.14159265", "**π**"],
    "14": ["13.999999999999998"],
    r"\frac{1}{3} \times 10^{-8}": ["3.333333e-9", r"3.3333333 \times 10^{-9}"],
    r"x = \frac13": ["x = 0.333333"],
    # as calculators write
    r"\frac{\pi}{3}": ["pi/3", "(1/3)*pi", "**pi/3**"],
    "e^2": ["exp(2)", "e**2"],
    "x^2+1": ["x**2+1", "1+x*x", "Final Answer: **x^2 + 1**", "The answer is x^2+1"],
    r"\frac{\sqrt{3}}{2}": ["sqrt(3)/2", "sin(pi/3)", "3**(1/2)/2"],
    r"\sqrt{2+\sqrt{3}}": ["sqrt(2+sqrt(3))"],
    r"\ln 2 + |x|": ["ln(2) + abs(x)"],
    r"(-\infty, 3)": ["(-oo, 3)", "(-inf, 3)"],
    # choices and words as models write them
    "E": [
        "**E**", "E: forty", "E. forty", "(E) forty", "$E$", r"\textbf{(E)}\ 14", "Option E", "Answer: E",
        "The correct answer is (E).", "**E.** forty", "E is correct", "Final answer: **E. not enough information**",
        "E - forty", "E. Vitamin C",
    ],
    r"\textbf{(D)}\ 14": ["D", "(D)", "D: 14"],
    "41": ["Final Answer: **41**", "**Final Answer:** 41"],
    "yes": ["**Yes**", "Yes.", r"\text{yes}", "The answer is yes."],
    "New York": ["new york", "The answer is: New York."],
}  # fmt: skip
WRONG = {
    "5": [
        "5½", "5²", "5①", "5!", "5i", "5x", r"5\text{ squared}", r"5\text{ million}", "5k", "-5", "minus 5",
        r"x \neq 5", "the answer is not 5", "x > 5", r"\pm 5", r"\sqrt{5}", r"5\pi", r"5^\circ \text{ F squared}",
        r"5\text{ hundredths}", r"5\text{ factorial}", r"5 \text{ and a half}", r"\text{half of }5",
        r"\text{not }5", "4=5", "2+2=5x", r"5\%5", "0.5", "5e5", r"5\frac12", "5_5!", r"\log 5", r"5\ldots",
        "the answer is 4, not $5$", r"5\text{ or }6", "5,6", "(5,6)", r"5+\infty", r"5\cdot 10^3", "50%", "5m^2",
        r"\text{square root of } 5", "twice 5", "5th root", "more than 5", r"5\text{th power}", r"\lfloor 5.5",
        r"5 \text{ times } 2",
    ],
    "1011_2": ["1011_3", "1011_{8}", "1011_{10}!", "1010_2"],
    r"10^\circ": [r"10\text{ radians}", "10 radians", r"11^\circ"],
    r"3\text{ cm}": ["3 m", r"3\text{ km}", r"3\text{ cm}^2", r"3 \text{ inches}", r"3\mbox{ mm}", r"3 \mathrm{m}"],
    r"15\mbox{ cm}^2": [r"15\mbox{ cm}^3", r"15\text{ m}^2", r"15\text{ cm}", r"15 \text{ cubic cm}"],
    r"\$18.90": [r"18.9\%", r"18.90\text{ euros}", r"18.90\text{ cents}", r"18.9^\circ"],
    r"25\%": [r"\$25", r"25^\circ", r"25\text{ cm}"],
    r"\frac{1}{2}": ["½²", "2", "1.2", r"\frac{1}{2}x", r"-\frac12", r"\frac{1}{2}\text{ million}", "0.51"],
    "(1,2)": ["(2,1)", "(1,2,3)", "[1,3]", "(1,2"],
    r"\pi": ["3.14", r"2\pi", "π²"],
    r"\frac{1}{3}": ["0.33", r"0.\overline{4}"],
    "1": [r"\tan 45", r"\sin 45^\circ", "1.0000001", "1-10^{-20}", "1+10^{-20}i", r"2^{0.000001}"],
    # equality is relative: small numbers differ as large ones do
    r"1.6 \times 10^{-19}": [r"9.1 \times 10^{-31}", "1.60001e-19", "0"],
    r"\frac{1}{40!}": [r"\frac{1}{41!}", "0"],
    r"2.4 \times 10^{-17}\text{ m}": [r"7.2 \times 10^{-17}\text{ m}"],
    r"\begin{pmatrix}10^{-20}\\1\end{pmatrix}": [r"\begin{pmatrix}10^{-21}\\1\end{pmatrix}"],
    "0": ["10^{-20}", "0.0000001"],
    "3.14159265": ["3.14159266"],
    "12345.678901": ["12345.679"],
    # calculators
    r"\frac{\pi}{3}": ["pi/4", "p*i/3", "3/pi", "pi3"],
    "e^2": ["exp(3)", "2*exp", "exp2", "exp(2)+1"],
    # choices and words
    "E": [
        "(D)", "D: E", "E or D", "E, D", "D and E", "not E", "E is wrong", "(E), (D)", "E: wrong, the answer is D",
        "E: D", "E?", "ABCDE", "A. B. C. D. E.", "E/D", r"\textbf{(D)}\ E", r"\textbf{(D)} \textbf{(E)}", "E (not D)",
        "E - no, D", "The answer is not E", "5", "forty", "E. or D.",
    ],
    "41": ["Final Answer: **42**", "Final Answer: not **41**", "**4**1"],
    "yes": ["no", "not yes", "Yes or no", "sey"],
    "Paris": ["pairs", "Not Paris", "Paris or London"],
}  # fmt: skip
BROKEN = [  # against 5: the last number of what does not parse is no answer
    r"-\foo 5", "3 + * 5", "1, 2, 3, # 4, 5", "(3, 5", r"\left(3, 5", r"\begin{pmatrix} 3 \\ 5", r"\sum 5",
    "#### ( 7 + ( 3 * 5 ) )", "(3+(7 and 5))", r"3 \& 5", r"\frac{3}{ 5", r"\frac{1}{2} + 5 }", r"\sqrt{25 = 5",
    r"\frac{} 5", r"\binom{10}{ 5", "x = = 5", "3 ^ ^ 5", "2 ** ** 5", "(( 3 + 2 ) = 5", r"\{ 3, 5", r"\int_0 5",
    r"\begin{cases} x = 5", r"\foo{3} 5", r"5 \foo", r"\right) 5", r"3 \div 5 \div", "/ 5", "^{5", "_ 5", "! 5",
    r"\\ & 5", "3 @ 5", "3 ? + 5", "| 3 - 5", r"\log_ 5", "f( 5", r"\text{ 5", "$ 3 + * 5 $", r"\boxed{3 + * 5}",
    r"\( (3, 5 \)", "then $3$ and so $3 + * 5$", r"-\foo \frac{5}{1}", "3 + *\n5", "\\foo\n$5",
]  # fmt: skip
TOO_LARGE = [  # each cost seconds to minutes, or raised
    r"(\sqrt2+\sqrt3+\sqrt5)^{500}", r"\log(\log(\log(\log(\log(\log(\log(\log(\log(\log(\log(2)))))))))))",
    r"\frac{d^{150}}{dx^{150}}\tan x", r"\int_0^{\pi}\sin^{500}x dx", "2**2**2**2**2**2**2**2**2",
    "99^{99^{99^{99^{99^{99^{99^{99^{99}}}}}}}}", "(x+1)^{900}", "(x+y+z+1)^{200}",
    r"\left(1+\sqrt2+\sqrt3+\sqrt5+\sqrt7\right)^{60}", r"x^{400}\cos x", r"\log_{9}(e)+1000000007",
    r"\int_0^{\pi} \sin^{n} x dx", r"\frac{d}{dx}\sin^{300} x",
    r"\sin(\sin(\sin(\sin(\sin(\sin(\sin(\sin(x))))))))^{30}",
]  # fmt: skip


def test_right_mathematics():
    assert not [(a, b) for a, texts in RIGHT.items() for b in texts if not same_math(a, b)]


def test_wrong_mathematics():
    assert not [(a, b) for a, texts in WRONG.items() for b in texts if same_math(a, b)]


def test_broken_latex_has_no_answer():
    assert not [text for text in BROKEN if same_math("5", text)]


@pytest.mark.parametrize("text", TOO_LARGE)
def test_too_large_to_be_compared(text):
    same_math("5", "5 + x")  # loads the grader
    start = time.process_time()
    assert not same_math("5", text)
    assert not same_math(text, "5")
    assert time.process_time() - start < 3
    assert same_math(text, f"${text}$"), "alike, so nothing is to be computed"
