"""How many replies a second the scoring processes grade, against the same grader in a bare loop.

    python bench/scoring.py --data_dir FOLDER [--workers 2] [--seconds 5]

FOLDER holds gsm8k/ and math500/ (see docs/tasks.md). Replies are of realistic length, in groups of eight.
"""

import argparse
import multiprocessing
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from envs import make_env
from envs.scoring.scorer import Scorer

THINKING = "<think>\n" + "Let me try: 12 + 30 = 42, and 42 - 7 = 35, which is not what we need. " * 12 + "\n</think>\n"
CASES = (("countdown-test", 512), ("gsm8k-test", 512), ("math500", 500))  # environment, problems
GROUP = 8


def replies(name: str, options: dict, num_problems: int) -> tuple[list[int], list[str]]:
    """Eight replies to each of some problems: right, wrong, and without form."""
    env = make_env(name, **options)
    indices, texts = [], []
    for i in range(num_problems):
        examples = list(env.examples(env.problem(i)).values())
        indices += [i] * GROUP
        texts += [THINKING + examples[k % len(examples)] for k in range(GROUP)]
    return indices, texts


def bare_mathematics(job: tuple[list[tuple[str, str]], float]) -> tuple[int, float]:
    """(pairs compared, seconds) of math-verify itself, as its documentation uses it."""
    from math_verify import parse, verify

    pairs, seconds = job
    verify(parse("$1$"), parse("$1$"))
    start, count = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        reference, answer = pairs[count % len(pairs)]
        verify(parse(f"${reference}$"), parse(answer))
        count += 1
    return count, time.perf_counter() - start


def bare_environment(job: tuple[str, dict, list[int], list[str], float]) -> tuple[int, float]:
    """(replies scored, seconds) of an environment in a bare loop."""
    name, options, indices, texts, seconds = job
    env = make_env(name, **options)
    problems = {i: env.problem(i) for i in set(indices)}
    start, count = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        for i, text in zip(indices, texts, strict=True):
            env.score(problems[i], text)
        count += len(texts)
    return count, time.perf_counter() - start


def rate(function, jobs: list) -> float:
    """Calls a second of a bare loop, one process for each job, added up."""
    with multiprocessing.get_context("spawn").Pool(len(jobs)) as pool:
        return sum(count / seconds for count, seconds in pool.map(function, jobs, chunksize=1))


def scorer_rate(name: str, options: dict, indices: list[int], texts: list[str], workers: int, seconds: float) -> float:
    """Replies a second through the scoring processes, calls of a training step's size."""
    indices, texts = indices * max(1, 16384 // len(texts)), texts * max(1, 16384 // len(texts))
    with Scorer(name, options, num_workers=workers) as scorer:
        scorer.score_replies(indices, texts)
        start, count = time.perf_counter(), 0
        while time.perf_counter() - start < seconds:
            _, failures = scorer.score_replies(indices, texts)
            assert not sum(failures.values()), failures
            count += len(texts)
        return count / (time.perf_counter() - start)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data_dir", required=True)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=5.0)
    args = parser.parse_args()
    print(f"replies a second, {args.workers} processes")
    print(f"{'environment':<16} {'scorer':>10} {'bare loop':>10} {'share':>7}")
    for name, num_problems in CASES:
        options = {} if name.startswith("countdown") else {"data_dir": args.data_dir}
        indices, texts = replies(name, options, num_problems)
        bare = rate(bare_environment, [(name, options, indices, texts, args.seconds)] * args.workers)
        ours = scorer_rate(name, options, indices, texts, args.workers, args.seconds)
        print(f"{name:<16} {ours:10,.0f} {bare:10,.0f} {ours / bare:7.0%}")
    env = make_env("math500", data_dir=args.data_dir, form="boxed")
    problems = [env.problem(i) for i in range(env.num_tasks)]
    pairs = [(p.answer, reply) for p in problems for reply in variants(p.answer)]
    bare = rate(bare_mathematics, [(pairs, args.seconds)] * args.workers)
    indices = [i for i in range(env.num_tasks) for _ in variants("")]
    options = {"data_dir": args.data_dir, "form": "boxed"}
    ours = scorer_rate("math500", options, indices, [reply for _, reply in pairs], args.workers, args.seconds)
    print(f"{'math-verify':<16} {ours:10,.0f} {bare:10,.0f} {ours / bare:7.0%}   replies written unlike the reference")


def variants(reference: str) -> list[str]:
    """Boxed replies that no comparison of texts or numbers settles: equal, and not equal."""
    return [rf"\boxed{{{reference} + 0}}", rf"\boxed{{{reference} + 1}}", rf"\boxed{{2 \cdot {reference} + x}}"]


if __name__ == "__main__":
    main()
