"""Estimates from samples of several tasks: pass@k, best_of_k and maj@k, intervals, differences between models.

Letters: N tasks, G samples of each.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import comb

import numpy as np
from jaxtyping import Bool, Float

MAX_VOTERS = 1000  # samples of a task; for more the numbers of subsets leave float64
RESAMPLES = 10_000
RESAMPLES_AT_ONCE = 100  # a divisor; bounds memory, however many tasks
FEW_TASKS = 30  # with fewer, resampled intervals are too narrow
RIGHT = ()  # the candidate of all votes for an answer that was graded correct
Z = 1.96  # 97.5% quantile of the normal distribution
STUDENT = (4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)  # of Student's, by degrees of freedom from 2 on

TaskValues = Float[np.ndarray, "N"]
SampleValues = Float[np.ndarray, "N G"]
Groups = tuple[tuple[int, float], ...]  # for each answer of a task: its votes, and the share of them that is right


def mean_and_ci(name: str, x: TaskValues) -> dict[str, float]:
    """Returns the mean over tasks and its 95% interval, by the name of the score.

    `_ci` is half the width of the interval. A score from 0 to 1 also gets `_low` and `_high`, the ends of Wilson's
    interval, which is not symmetric. Other scores get the normal approximation over tasks. If all tasks are equal, they
    get no interval, since their spread is unknown.
    """
    x = np.asarray(x, np.float64)
    num_tasks = len(x)
    estimate = {name: float(x.mean())}
    is_share = x.min() >= 0 and x.max() <= 1
    if is_share:
        low, high = wilson_interval(estimate[name], effective_samples(x))
        estimate[f"{name}_ci"] = (high - low) / 2
        estimate[f"{name}_low"] = low
        estimate[f"{name}_high"] = high
    elif np.ptp(x) != 0:
        half_width = Z * x.std(ddof=1) / num_tasks**0.5
        estimate[f"{name}_ci"] = float(half_width)
    return estimate


def mean_over_runs(name: str, x: Float[np.ndarray, "R"]) -> dict[str, float]:
    """Returns the mean over runs and half the width of its 95% interval, by the name of the score: see `mean_and_ci`.

    Runs are few, so the interval is Student's. Two have none: theirs is 13 standard errors wide to each side. Nor have
    runs that are all equal.
    """
    estimate = {name: float(x.mean())}
    freedom = len(x) - 1
    if freedom > 1 and np.ptp(x) != 0:
        # For more degrees of freedom an expansion: Abramowitz and Stegun 1964, 26.7.5.
        t = STUDENT[freedom - 2] if freedom <= len(STUDENT) + 1 else Z + 2.372 / freedom + 2.823 / freedom**2
        estimate[f"{name}_ci"] = float(t * x.std(ddof=1) / len(x) ** 0.5)
    return estimate


def wilson_interval(p: float, n: float) -> tuple[float, float]:
    """Returns the ends of the 95% interval of a proportion p of n samples.

    Source: Wilson 1927, Probable Inference, the Law of Succession, and Statistical Inference.
    """
    shrunk = 1 + Z**2 / n
    middle = (p + Z**2 / (2 * n)) / shrunk
    variance = p * (1 - p) / n
    correction = Z**2 / (4 * n**2)
    half_width = Z / shrunk * (variance + correction) ** 0.5
    low = max(0.0, middle - half_width)
    high = min(1.0, middle + half_width)
    return low, high


def effective_samples(x: TaskValues) -> float:
    """Returns how many samples of 0 or 1 would estimate the mean of task means from 0 to 1 as well as these do.

    That is p (1 - p) / (Var(x) / N): exactly N for one sample a task, more for several. Where all tasks are equal, the
    variance between tasks is unknown, and each task counts as one sample.
    Source: Korn and Graubard 1998, Confidence Intervals for Proportions With Small Expected Number of Positive Counts.
    """
    num_tasks = len(x)
    if np.ptp(x) == 0:
        return float(num_tasks)
    p = x.mean()
    variance_of_mean = x.var() / num_tasks
    return float(p * (1 - p) / variance_of_mean)


def task_estimates(
    scores: Mapping[str, SampleValues],
    answers: Sequence[str | None],
) -> dict[str, TaskValues]:
    """Returns estimates of each task: the mean of each score, then pass@k, best_of_k and maj@k.

    k is each number from 2 to 8, then 16, 32, ..., and G.
    `answers` are the votes of all N G samples, in one spelling, None if there is none; without a single one maj@k is
    left out.
    """
    correct = scores["correct_answer"] > 0
    num_samples = correct.shape[1]
    ks = [k for k in range(2, num_samples + 1) if k <= 8 or k.bit_count() == 1 or k == num_samples]
    estimates = {name: x.mean(axis=1) for name, x in scores.items()}
    estimates |= {f"pass@{k}": pass_at_k(correct, k) for k in ks}
    estimates |= {f"best_of_{k}": best_of_k(scores["return"], k) for k in ks}
    has_votes = any(answer is not None for answer in answers)
    if has_votes and num_samples <= MAX_VOTERS:
        votes = [answers[start : start + num_samples] for start in range(0, correct.size, num_samples)]
        shares = np.array([majority_at_k(*sample, tuple(ks)) for sample in zip(votes, correct, strict=True)])
        estimates |= {f"maj@{k}": shares[:, column] for column, k in enumerate(ks)}
    return estimates


def pass_at_k(correct: Bool[np.ndarray, "N G"], k: int) -> TaskValues:
    """Returns the unbiased chance that one of k samples is right, from G >= k samples.

    Source: arXiv 2107.03374, eq. 1.
    """
    num_samples = correct.shape[1]
    num_subsets = comb(num_samples, k)
    failing = [comb(num_samples - num_right, k) for num_right in correct.sum(axis=1).tolist()]  # subsets
    return np.array([1 - num_failing / num_subsets for num_failing in failing])


def best_of_k(returns: SampleValues, k: int) -> TaskValues:
    """Returns the unbiased mean of the best return of k samples, from G >= k samples.

    That is Σ_i C(i - 1, k - 1) / C(G, k) r_i, with r_i the i-th smallest, which is the best of that many subsets. The
    counting is that of pass@k, in its form for returns that are not 0 or 1.
    """
    num_samples = returns.shape[1]
    num_subsets = comb(num_samples, k)
    weights = [comb(num_smaller, k - 1) / num_subsets for num_smaller in range(num_samples)]
    ordered = np.sort(returns, axis=1)
    return ordered @ np.array(weights)


def majority_at_k(
    answers: Sequence[str | None],
    correct: Bool[np.ndarray, "G"],
    ks: tuple[int, ...],
) -> Float[np.ndarray, "K"]:
    """Returns the unbiased chance, for each k, that the answer most frequent among k of a task's G samples is right.

    Answers are one vote if they were graded correct, since the grader found each of them equal to the reference, or
    if they are equal apart from white space at their ends and its amount within. Ties are decided by lot, in
    expectation. Samples without an answer (None) do not vote; if nobody votes, nothing is right. If equal answers
    were graded differently, a win counts by the share of them that are right.

    Source: arXiv 2203.11171 (majority vote); the mean over all subsets of k samples, as in pass@k, is exact.
    """
    keys = [None if answer is None else " ".join(answer.split()) for answer in answers]
    right = {key for key, is_right in zip(keys, correct, strict=True) if is_right}
    votes = Counter()
    right_votes = Counter()
    num_silent = 0
    for key, is_right in zip(keys, correct, strict=True):
        if key is None:
            num_silent += 1
            continue
        candidate = RIGHT if key in right else (key,)
        votes[candidate] += 1
        right_votes[candidate] += bool(is_right)
    groups = [(num_votes, right_votes[candidate] / num_votes) for candidate, num_votes in votes.items()]
    chances = count_majorities(tuple(sorted(groups)), num_silent)
    return chances[list(ks)]


@lru_cache(maxsize=4096)  # most tasks of a set are alike: all wrong, all right, one answer against others
def count_majorities(groups: Groups, num_silent: int) -> Float[np.ndarray, "G_and_1"]:
    """Returns the chance that the majority of k samples is right, for k = 0 ... G.

    `groups` are the votes of each answer and the share of them that is right, `num_silent` samples have no answer.
    For each winning number of votes, subsets are counted whose winners have this number and all others fewer.
    Each of the winners wins the lot with probability 1 / their number.
    """
    sizes = [size for size, _ in groups]
    num_samples = num_silent + sum(sizes)
    wins = np.zeros(num_samples + 1)
    for num_votes in range(1, max(sizes, default=0) + 1):
        right_winners = count_right_winners(groups, num_silent, num_votes)
        num_winners = np.arange(1, len(right_winners))
        wins += (right_winners[1:] / num_winners[:, None]).sum(axis=0)
    return wins / binomials(num_samples, num_samples)


def count_right_winners(
    groups: Groups,
    num_silent: int,
    num_votes: int,
) -> Float[np.ndarray, "W G_and_1"]:
    """Returns the number of right winners in all subsets, by the number of winners and of samples.

    The winners of a subset are the answers with m = `num_votes`; no answer has more. Subsets are counted by a product
    of polynomials: an answer with c votes is a factor Σ_{j<m} C(c, j) x^j + C(c, m) x^m y. The power of x counts
    samples, that of y winners.
    """
    sizes = [size for size, _ in groups]
    num_samples = num_silent + sum(sizes)
    max_winners = sum(size >= num_votes for size in sizes)
    subsets = np.zeros((1 + max_winners, num_samples + 1))
    subsets[0, : num_silent + 1] = binomials(num_silent, num_silent)
    right = np.zeros_like(subsets)  # each subset times how many of its winners are right
    for size, share in groups:
        losing = binomials(size, num_votes - 1)
        winning = float(comb(size, num_votes))  # 0 if the answer has fewer votes
        new_subsets = multiply_rows(subsets, losing)
        new_right = multiply_rows(right, losing)
        one_winner_fewer = subsets[:-1, :-num_votes]
        new_subsets[1:, num_votes:] += winning * one_winner_fewer
        right_of_fewer = right[:-1, :-num_votes] + share * one_winner_fewer
        new_right[1:, num_votes:] += winning * right_of_fewer
        subsets = new_subsets
        right = new_right
    return right


def binomials(size: int, most: int) -> Float[np.ndarray, "J"]:
    """Returns C(size, j) for j = 0 ... most."""
    return np.array([float(comb(size, j)) for j in range(most + 1)])


def multiply_rows(rows: Float[np.ndarray, "W T"], polynomial: Float[np.ndarray, "J"]) -> Float[np.ndarray, "W T"]:
    """Returns each row times a polynomial, up to the power that a row holds."""
    num_powers = rows.shape[1]
    return np.array([np.convolve(row, polynomial)[:num_powers] for row in rows])


def paired_bootstrap(x: TaskValues, y: TaskValues, seed: int = 0) -> dict[str, float | None]:
    """Returns how much larger y is than x on the same tasks: "mean", its 95% interval "low" to "high", and "p".

    Tasks are drawn N times with replacement, both values of a task together. The interval holds the 2.5% to 97.5%
    quantiles of the resampled mean of y - x. It is None if all tasks differ by the same: resampling them shows
    nothing. p is the share of the resamples, the data themselves counted as one, in which the mean is 0 or less. It is
    at least 2^-N, the chance that N signs agree, which no number of resamples can undercut.
    Sources: Koehn 2004, Statistical Significance Tests for Machine Translation Evaluation, section 4; Phipson and Smyth
    2010, Permutation P-values Should Never Be Zero.
    """
    difference = np.asarray(y, np.float64) - x
    rng = np.random.default_rng(seed)
    num_tasks = len(difference)
    chunks = []
    for _ in range(0, RESAMPLES, RESAMPLES_AT_ONCE):
        tasks = rng.integers(num_tasks, size=(RESAMPLES_AT_ONCE, num_tasks))
        chunks.append(difference[tasks].mean(axis=1))
    means = np.concatenate(chunks)
    num_not_above = np.sum(means <= 1e-12)  # a sum that is 0 but for rounding is 0
    share = (1 + num_not_above) / (1 + RESAMPLES)
    p = max(share, 0.5**num_tasks)
    low = None
    high = None
    if np.ptp(difference):
        low, high = np.quantile(means, [0.025, 0.975]).tolist()
    mean = float(difference.mean())
    return {"mean": mean, "low": low, "high": high, "p": float(p)}
