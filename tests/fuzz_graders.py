"""Many thousand hostile completions through every grader, in the scoring processes of a run.

    python tests/fuzz_graders.py --number 100000 --data_dir FOLDER

Prints how many replies of each environment timed out or failed, and the memory of the processes. FOLDER holds gsm8k/
and math500/.
"""

import argparse
import os
import random
import signal
import sys
import time
from collections import Counter
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from envs.grading.answers import FORMS, final_answer, parse_arithmetic, same_math
from envs.grading.numerals import same_number
from envs.grading.rewards import quarter_per_tag, think_answer
from envs.scoring.scorer import Scorer
from utils.processes import descendant_pids, tree_memory

PIECES = [*"0123456789+-*/^=_(){}[]|<>$%&#,.;:!?'\"\\ \n\t", "\x00", "\ud800", "\u202e", "١", "½", "×", "−", "🙂",
          "#### ", "Answer: ", "\\lim_{x\\to 0}"]  # fmt: skip
PIECES += r"""
<answer> </answer> <think> </think> \boxed{ } <|im_end|> \frac{ }{ \sqrt{ \sqrt[3]{ \left( \right)
\text{ \pi \infty \cdot \times \binom{ \sum_{k=1}^{ \int_0^{ \begin{pmatrix} \end{pmatrix} \\ & \cup
\in \le \mod \log_{ \sin \pm \% ! ** 9**9**9 10^{ 1e9 99999 x y i and or dollars percent
__import__('os') lambda:0 1,000 3/4 0.5
""".split()
AROUND = ("{}", "<answer>{}</answer>", "\\boxed{{{}}}", "#### {}", "<think>{}</think><answer>1</answer>")


def completions(rng: random.Random, number: int):
    """Random strings of pieces that graders know, most of them where an answer is looked for."""
    for _ in range(number):
        pieces = "".join(rng.choices(PIECES, k=rng.choice((1, 2, 5, 10, 20, 40, 100))))
        body = pieces if rng.random() < 0.6 else formula(rng, rng.choice((1, 2, 3, 4, 6)))
        if rng.random() < 0.05:
            body *= rng.choice((10, 100, 1000))
        yield rng.choice(AROUND).format(body)


def formula(rng: random.Random, depth: int) -> str:
    """Well-formed LaTeX that is not meant to be computed: towers of large numbers, powers of sums, endless products."""
    if depth == 0:
        numbers = ("1", "9", "20", "150", "500", "99999", "1000000007", "0.5", "-3")
        return rng.choice((*numbers, "x", "y", "n", r"\pi", "e", "i", r"\infty"))
    a = formula(rng, depth - 1)
    b = formula(rng, rng.randrange(depth))
    return rng.choice((*arithmetic(a, b), *functions(a, b)))


def arithmetic(a: str, b: str) -> tuple[str, ...]:
    return (
        f"{a}+{b}", f"{a}-{b}", f"({a})({b})", f"({a})!", f"{a}^{{{b}}}", f"({a})^{{{b}}}", f"{a}**{b}",
        f"{a}={b}", f"{a}<{b}", f"({a},{b})", f"[{a},{b}]", rf"\{{{a},{b}\}}", rf"{a} \pm {b}", rf"{a} \mod {b}",
        rf"{a} \cup {b}", rf"|{a}|", rf"\frac{{{a}}}{{{b}}}", rf"\sqrt{{{a}}}", rf"\sqrt[3]{{{a}}}",
        rf"(\sqrt2+\sqrt3+{a})^{{{b}}}", rf"(x+{a})^{{{b}}}",
        rf"\begin{{pmatrix}}{a}&{b}\\{b}&{a}\end{{pmatrix}}",
    )  # fmt: skip


def functions(a: str, b: str) -> tuple[str, ...]:
    return (
        rf"\sin({a})", rf"\tan {a}", rf"\arctan({a})", rf"\log({a})", rf"\log_{{{b}}}({a})",
        rf"\binom{{{a}}}{{{b}}}", rf"\gcd({a},{b})", rf"\max({a},{b})", rf"\lfloor {a} \rfloor",
        rf"\lceil {a} \rceil", rf"\sum_{{k=1}}^{{{b}}} {a}", rf"\prod_{{k=1}}^{{{b}}} {a}",
        rf"\lim_{{x \to {b}}} {a}", rf"\int_0^{{{b}}} {a} dx", rf"\int_0^{{\pi}} \sin^{{{b}}} x dx",
        rf"\frac{{d}}{{dx}} {a}", rf"\frac{{d^{{{b}}}}}{{dx^{{{b}}}}} {a}",
    )  # fmt: skip


def grade(text: str) -> None:
    """Every grader on one text, in this process."""
    for form in FORMS:
        answer = final_answer(text, form)
        same_number("5", answer or "")
        same_math(r"\frac{x}{2}", answer or "")
    parse_arithmetic(text)
    think_answer(text), quarter_per_tag(text)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--number", type=int, default=100_000, help="texts, in all")
    parser.add_argument("--data_dir", default="")
    parser.add_argument("--timeout", type=float, default=10.0)
    args = parser.parse_args()
    names = {
        "countdown": {},
        "gsm8k": {"data_dir": args.data_dir, "form": "any"},
        "math500": {"data_dir": args.data_dir},
        "reasoning_gym": {"datasets": "leg_counting+countdown+simple_equations+decimal_arithmetic"},
    }
    for name, options in names.items():
        start, totals, memory = time.time(), Counter(), []
        with Scorer(name, options, num_workers=2, timeout=args.timeout) as scorer:
            for seed in range(args.number // 2000 // len(names)):
                texts = [*completions(random.Random(seed), 2000)]
                scores, counts = scorer.score_replies([k % 100 for k in range(len(texts))], texts)
                assert len(scores) == len(texts)
                totals.update(counts)
                keepers = [lane.process.pid for lane in scorer.lanes.values()]
                memory.append(sum(map(tree_memory, keepers)) >> 20)
                if seed % 5 == 0:  # a worker dies now and then
                    os.kill(descendant_pids(keepers[-1])[-1], signal.SIGKILL)
        print(f"{name}: {time.time() - start:.0f} s, {dict(totals)}, MiB of the processes {memory}", flush=True)


if __name__ == "__main__":
    main()
