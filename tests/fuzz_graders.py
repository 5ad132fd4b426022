"""Many thousand hostile completions through every grader, in the scoring processes of a run.

    python tests/fuzz_graders.py --number 100000 --data_dir FOLDER

    python tests/fuzz_graders.py --slow 600

Prints how many replies each environment scored, timed out or failed, and the memory before and after. FOLDER holds
gsm8k/ and math500/. With --slow it prints the random formulas that cost same_math most.
"""

import argparse
import os
import random
import resource
import signal
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from envs.grading.answers import FORMS, final_answer, parse_arithmetic, same_math
from envs.grading.numerals import same_number
from envs.grading.rewards import quarter_per_tag, think_answer
from envs.scoring.scorer import Scorer
from utils.processes import descendant_pids, tree_memory

PIECES = [
    *"0123456789+-*/^=_(){}[]|<>$%&#,.;:!?'\"\\ \n\t",
    "\0",
    "\ud800",
    "\u202e",
    "١",
    "½",
    "×",
    "−",
    "🙂",
    "<answer>",
    "</answer>",
    "<think>",
    "</think>",
    r"\boxed{",
    "}",
    "#### ",
    "Answer: ",
    "<|im_end|>",
    r"\frac{",
    r"}{",
    r"\sqrt{",
    r"\sqrt[3]{",
    r"\left(",
    r"\right)",
    r"\text{",
    r"\pi",
    r"\infty",
    r"\cdot",
    r"\times",
    r"\binom{",
    r"\sum_{k=1}^{",
    r"\int_0^{",
    r"\lim_{x\to 0}",
    r"\begin{pmatrix}",
    r"\end{pmatrix}",
    r"\\",
    "&",
    r"\cup",
    r"\in",
    r"\le",
    r"\mod",
    r"\log_{",
    r"\sin",
    r"\pm",
    r"\%",
    "!",
    "**",
    "9**9**9",
    "10^{",
    "1e9",
    "99999",
    "x",
    "y",
    "i",
    "and",
    "or",
    "dollars",
    "percent",
    "__import__('os')",
    "lambda:0",
    "1,000",
    "3/4",
    "0.5",
]
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
        f"{a}+{b}",
        f"{a}-{b}",
        f"({a})({b})",
        f"({a})!",
        f"{a}^{{{b}}}",
        f"({a})^{{{b}}}",
        f"{a}**{b}",
        f"{a}={b}",
        f"{a}<{b}",
        f"({a},{b})",
        f"[{a},{b}]",
        rf"\{{{a},{b}\}}",
        rf"{a} \pm {b}",
        rf"{a} \mod {b}",
        rf"{a} \cup {b}",
        rf"|{a}|",
        rf"\frac{{{a}}}{{{b}}}",
        rf"\sqrt{{{a}}}",
        rf"\sqrt[3]{{{a}}}",
        rf"(\sqrt2+\sqrt3+{a})^{{{b}}}",
        rf"(x+{a})^{{{b}}}",
        rf"\begin{{pmatrix}}{a}&{b}\\{b}&{a}\end{{pmatrix}}",
    )


def functions(a: str, b: str) -> tuple[str, ...]:
    return (
        rf"\sin({a})",
        rf"\tan {a}",
        rf"\arctan({a})",
        rf"\log({a})",
        rf"\log_{{{b}}}({a})",
        rf"\binom{{{a}}}{{{b}}}",
        rf"\gcd({a},{b})",
        rf"\max({a},{b})",
        rf"\lfloor {a} \rfloor",
        rf"\lceil {a} \rceil",
        rf"\sum_{{k=1}}^{{{b}}} {a}",
        rf"\prod_{{k=1}}^{{{b}}} {a}",
        rf"\lim_{{x \to {b}}} {a}",
        rf"\int_0^{{{b}}} {a} dx",
        rf"\int_0^{{\pi}} \sin^{{{b}}} x dx",
        rf"\frac{{d}}{{dx}} {a}",
        rf"\frac{{d^{{{b}}}}}{{dx^{{{b}}}}} {a}",
    )


def grade(text: str) -> None:
    """Every grader on one text, in this process."""
    for form in FORMS:
        answer = final_answer(text, form)
        same_number("5", answer or "")
        same_math(r"\frac{x}{2}", answer or "")
    parse_arithmetic(text)
    think_answer(text), quarter_per_tag(text)


def find_slow(seconds: float, start: int) -> None:
    """Compares random formulas with 5 for so many CPU seconds, and prints the slowest and what raised."""
    rng, slowest = random.Random(start), []
    signal.signal(signal.SIGALRM, stop)
    same_math("x+1", "1+x")
    begin = time.process_time()
    while (clock := time.process_time()) < begin + seconds:
        text = formula(rng, rng.choice((1, 2, 2, 3, 3, 4)))
        signal.alarm(60)
        try:
            same_math("5", text)
        except Stopped:
            print("more than 60 s:", text, flush=True)
        signal.alarm(0)
        slowest.append((time.process_time() - clock, text))
    slowest.sort(reverse=True)
    above = sum(taken > 1 for taken, _ in slowest)
    print(f"{len(slowest):,} formulas in {seconds:.0f} CPU s; {above} of them above 1 s; the slowest:")
    for taken, text in slowest[:20]:
        print(f"{taken:6.2f} s  {text}")


class Stopped(BaseException):
    """Raised by the alarm; no Exception, so that a grader does not catch it."""


def stop(*_: object) -> None:
    raise Stopped


def hypothesis_texts(number: int, start: int) -> list[str]:
    """Texts that hypothesis thinks up: any characters, and pieces."""
    found = []

    @seed(start)
    @settings(
        max_examples=number,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.one_of(st.text(max_size=200), st.lists(st.sampled_from(PIECES), max_size=60).map("".join)))
    def collect(text):
        found.append(f"<answer>{text}</answer>")

    collect()
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--number",
        type=int,
        default=100_000,
        help="texts for each environment, in all",
    )
    parser.add_argument("--data_dir", default="")
    parser.add_argument(
        "--slow",
        type=float,
        default=0.0,
        help="only look for slow formulas, for so many CPU seconds",
    )
    parser.add_argument("--seed", type=int, default=0, help="of --slow")
    parser.add_argument("--timeout", type=float, default=10.0)
    args = parser.parse_args()
    if args.slow:
        return find_slow(args.slow, args.seed)
    names = {
        "countdown": {},
        "poem": {},
        "gsm8k": {"data_dir": args.data_dir, "form": "any"},
        "math500": {"data_dir": args.data_dir},
        "reasoning_gym": {"datasets": "leg_counting+countdown+simple_equations+decimal_arithmetic"},
    }
    for name, options in names.items():
        grade_replies(name, options, args.number // len(names), args.timeout)
    print(f"this process: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10} MiB at most")


def grade_replies(name: str, options: dict[str, str], number: int, timeout: float) -> None:
    """Sends so many replies through the scorer of an environment, and prints what became of them."""
    start = time.time()
    done = 0
    totals = {"reward_timeouts": 0, "reward_errors": 0}
    slowest = 0.0
    with Scorer(name, options, num_workers=2, timeout=timeout) as scorer:
        memory = []
        while done < number:
            texts = hypothesis_texts(500, done) + list(completions(random.Random(done), 1500))
            clock = time.time()
            scores, counts = scorer.score_replies([k % 100 for k in range(len(texts))], texts)
            slowest = max(slowest, time.time() - clock)
            assert len(scores) == len(texts)
            totals = {kind: totals[kind] + counts[kind] for kind in totals}
            done += len(texts)
            keepers = [lane.process.pid for lane in scorer.lanes.values()]
            memory.append(sum(tree_memory(keeper) for keeper in keepers))
            if done % 10_000 < 2000:  # a worker dies now and then
                victim = descendant_pids(keepers[-1])[-1]
                os.kill(victim, signal.SIGKILL)
    print(
        f"{name}: {done:,} texts in {time.time() - start:.0f} s, {totals}, slowest 2,000 in {slowest:.0f} s, "
        f"memory of the processes {memory[1] >> 20} -> {memory[-1] >> 20} MiB",
        flush=True,
    )


if __name__ == "__main__":
    main()
