"""Estimates from samples of several tasks: pass@k, best_of_k and maj@n, intervals, differences between models.

Letters: N tasks, G samples of each.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from math import comb

import numpy as np
from jaxtyping import Bool, Float

from utils.metrics.curves import is_share

RESAMPLES = 10_000
RESAMPLES_AT_ONCE = 100  # a divisor; bounds memory, however many tasks
FEW_TASKS = 30  # with fewer, resampled intervals are too narrow
RIGHT = ()  # the candidate of all votes for an answer that was graded correct
Z = 1.96  # 97.5% quantile of the normal distribution

TaskValues = Float[np.ndarray, "N"]
SampleValues = Float[np.ndarray, "N G"]


def mean_and_ci(name: str, x: TaskValues) -> dict[str, float]:
    """Returns the mean over tasks and its 95% interval, by the name of the score.

    `_ci` is half the width of the interval. A share, by its name, also gets `_low` and `_high`, the ends of Wilson's
    interval, which is not symmetric. Other scores get the normal approximation over
    tasks. If all tasks are equal, they get no interval, since their spread is unknown. Tasks that are NaN are left out.
    """
    x = np.asarray(x, np.float64)
    x = x[~np.isnan(x)]
    if not x.size:
        return {}
    estimate = {name: float(x.mean())}
    if is_share(name) and x.min() >= 0 and x.max() <= 1:
        low, high = wilson_interval(estimate[name], effective_samples(x))
        estimate[f"{name}_ci"] = (high - low) / 2
        estimate[f"{name}_low"] = low
        estimate[f"{name}_high"] = high
    elif np.ptp(x) != 0:
        estimate[f"{name}_ci"] = Z * standard_error(x)
    return estimate


def mean_over_runs(name: str, x: Float[np.ndarray, "R"]) -> dict[str, float]:
    """Returns the mean over runs and half the width of its 95% interval, by the name of the score: see `mean_and_ci`.

    Runs are few, so the interval is Student's. Two have none: theirs is 13 standard errors wide to each side. Nor have
    runs that are all equal.
    """
    estimate = {name: float(x.mean())}
    if len(x) > 2 and np.ptp(x) != 0:
        estimate[f"{name}_ci"] = student_half_width(x)
    return estimate


def student_half_width(x: Float[np.ndarray, "R"]) -> float:
    """Returns half the width of Student's 95% interval of the mean of two or more numbers."""
    from scipy.special import stdtrit  # 0.09 s, which no other command should take to start

    return float(stdtrit(len(x) - 1, 0.975) * standard_error(x))


def standard_error(x: Float[np.ndarray, "R"]) -> float:
    """Returns the standard error of the mean of two or more numbers."""
    return float(x.std(ddof=1) / len(x) ** 0.5)


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
    """Returns estimates of each task: the mean of each score, then pass@k, best_of_k and maj@G.

    k is each number from 2 to 8, then 16, 32, ..., and G.
    `answers` are the votes of all N G samples, in one spelling, None if there is none. maj@G is left out if there is
    no vote, or only one sample of each task. Scores that are NaN are left out; a task with fewer than k others is NaN.
    """
    correct = scores.get("correct_answer")
    num_samples = scores["return"].shape[1]
    gradings = [name.removesuffix("correct_answer") for name in scores if name.endswith("correct_answer")]
    ks = [k for k in range(2, num_samples + 1) if k <= 8 or k.bit_count() == 1 or k == num_samples]
    estimates = {name: best_of_k(x, 1) if np.isnan(x).any() else x.mean(axis=1) for name, x in scores.items()}
    for grading in gradings:  # the environment's own, without a prefix, and those of further forms
        estimates |= {f"{grading}pass@{k}": pass_at_k(scores[f"{grading}correct_answer"], k) for k in ks}
        estimates |= {f"{grading}best_of_{k}": best_of_k(scores[f"{grading}return"], k) for k in ks}
    if correct is not None and num_samples > 1 and any(answer is not None for answer in answers):
        known = [None if np.isnan(x) else answer for answer, x in zip(answers, correct.ravel(), strict=True)]
        votes = [known[start : start + num_samples] for start in range(0, correct.size, num_samples)]
        shares = [majority(*samples) for samples in zip(votes, correct > 0, strict=True)]
        estimates[f"maj@{num_samples}"] = np.array(shares)
    return estimates


def of_graded(estimate: Callable[[SampleValues, int], TaskValues]) -> Callable[[SampleValues, int], TaskValues]:
    """Returns an estimate of k of the samples that are not NaN; that of a task with fewer than k is NaN."""

    def of_tasks(x: SampleValues, k: int) -> TaskValues:
        if not np.isnan(x).any():
            return estimate(x, k)
        rows = [row[~np.isnan(row)] for row in x]
        return np.array([estimate(row[None], k)[0] if len(row) >= k else np.nan for row in rows])

    return of_tasks


@of_graded
def pass_at_k(correct: SampleValues, k: int) -> TaskValues:
    """Returns the unbiased chance that one of k samples is right (above 0), from G >= k samples.

    Source: arXiv 2107.03374, eq. 1.
    """
    num_samples = correct.shape[1]
    num_subsets = comb(num_samples, k)
    failing = [comb(num_samples - num_right, k) for num_right in (correct > 0).sum(axis=1).tolist()]  # subsets
    return np.array([1 - num_failing / num_subsets for num_failing in failing])


@of_graded
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


def majority(answers: Sequence[str | None], correct: Bool[np.ndarray, "G"]) -> float:
    """Returns the chance that the most frequent answer among a task's G samples is right.

    Answers that were graded correct are one vote, since each equals the reference. Other answers are one vote if they
    are equal apart from white space. Ties are decided by lot, in expectation. Samples without an answer (None) do not
    vote; if nobody votes, nothing is right. If equal answers were graded differently, a win counts by the share of them
    that are right.

    Source: arXiv 2203.11171.
    """
    keys = [None if answer is None else " ".join(answer.split()) for answer in answers]
    right = {key for key, is_right in zip(keys, correct, strict=True) if is_right}
    votes = Counter()
    right_votes = Counter()
    for key, is_right in zip(keys, correct, strict=True):
        if key is None:
            continue
        candidate = RIGHT if key in right else (key,)
        votes[candidate] += 1
        right_votes[candidate] += bool(is_right)
    most = max(votes.values(), default=0)
    winners = [right_votes[candidate] / most for candidate, num_votes in votes.items() if num_votes == most]
    return sum(winners) / len(winners) if winners else 0.0


def paired_difference(x: TaskValues, y: TaskValues, seed: int = 0) -> dict[str, float | None]:
    """Returns how much larger y is than x on the same tasks: "mean", its 95% interval "low" to "high", and "p".

    Tasks are sampled N times with replacement, both values of a task together. The interval holds the 2.5% to 97.5%
    quantiles of the resampled mean of y - x, and p is the share of the resamples, the data themselves counted as one,
    in which the mean is 0 or less. Of fewer than FEW_TASKS tasks, for which this is too narrow, both are Student's. If
    all tasks differ by the same, there is no interval. p is at least 2^-N, the chance that N signs agree.
    Sources: Koehn 2004, Statistical Significance Tests for Machine Translation Evaluation, section 4; Phipson and Smyth
    2010, Permutation P-values Should Never Be Zero.
    """
    difference = np.asarray(y, np.float64) - x
    difference = difference[~np.isnan(difference)]
    if not difference.size:
        return {"mean": math.nan, "low": None, "high": None, "p": 1.0}
    num_tasks, mean, low, high = len(difference), float(difference.mean()), None, None
    differs = np.ptp(difference) > 1e-12  # but for rounding
    if differs and num_tasks < FEW_TASKS:
        from scipy.special import stdtr

        half_width = student_half_width(difference)
        low, high = mean - half_width, mean + half_width
        share = stdtr(num_tasks - 1, -mean / standard_error(difference))
    else:
        rng = np.random.default_rng(seed)
        chunks = []
        for _ in range(0, RESAMPLES, RESAMPLES_AT_ONCE):
            tasks = rng.integers(num_tasks, size=(RESAMPLES_AT_ONCE, num_tasks))
            chunks.append(difference[tasks].mean(axis=1))
        means = np.concatenate(chunks)
        num_not_above = np.sum(means <= 1e-12)  # a sum that is 0 but for rounding is 0
        share = (1 + num_not_above) / (1 + RESAMPLES)
        if differs:
            low, high = np.quantile(means, [0.025, 0.975]).tolist()
    return {"mean": mean, "low": low, "high": high, "p": float(max(share, 0.5**num_tasks))}
