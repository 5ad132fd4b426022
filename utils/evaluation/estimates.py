"""Estimates from samples of several tasks: what k of them would reach, and how far two models are apart.

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
FEW_TASKS = 30  # with fewer, resampled intervals are too narrow
Z = 1.96  # 97.5% quantile of the normal distribution


def mean_and_ci(name: str, x: Float[np.ndarray, "N"]) -> dict[str, float]:
    """Returns the mean over tasks and its 95% interval, by the name of the score.

    `_ci` is half the width of the interval. A score from 0 to 1 also gets `_low` and `_high`, the ends of Wilson's
    interval, which is not symmetric; other scores get the normal approximation over tasks, and no interval where all
    tasks are equal, since their spread is then unknown.
    """
    x = np.asarray(x, np.float64)
    mean = float(x.mean())
    if x.min() >= 0 and x.max() <= 1:
        low, high = wilson_interval(mean, effective_samples(x))
        return {name: mean, f"{name}_ci": (high - low) / 2, f"{name}_low": low, f"{name}_high": high}
    if np.ptp(x) == 0:
        return {name: mean}
    return {name: mean, f"{name}_ci": float(Z * x.std(ddof=1) / len(x) ** 0.5)}


def wilson_interval(p: float, n: float) -> tuple[float, float]:
    """Returns the ends of the 95% interval of a proportion p of n samples.

    Source: Wilson 1927, Probable Inference, the Law of Succession, and Statistical Inference.
    """
    shrunk = 1 + Z**2 / n
    middle = (p + Z**2 / (2 * n)) / shrunk
    half = Z / shrunk * (p * (1 - p) / n + Z**2 / (4 * n**2)) ** 0.5
    return max(0.0, middle - half), min(1.0, middle + half)


def effective_samples(x: Float[np.ndarray, "N"]) -> float:
    """Returns how many samples of 0 or 1 would know the mean of task means from 0 to 1 as well as these do.

    That is p (1 - p) / (Var(x) / N): exactly N for one sample a task, more for several. Where all tasks are equal, the
    variance between tasks is unknown, and each task counts as one sample.
    Source: Korn and Graubard 1998, Confidence Intervals for Proportions With Small Expected Number of Positive Counts.
    """
    p, num_tasks = x.mean(), len(x)
    if np.ptp(x) == 0:
        return float(num_tasks)
    return float(p * (1 - p) / (x.var() / num_tasks))


def task_estimates(
    scores: Mapping[str, Float[np.ndarray, "N G"]], answers: Sequence[str | None]
) -> dict[str, Float[np.ndarray, "N"]]:
    """Each task's own estimates: the mean of each score, then pass@k, best_of_k and maj@k for several k.

    k is each number from 2 to 8, then 16, 32, ..., and G.

    `answers` are those of all N G samples, None where there is none; without a single one maj@k is left out.
    """
    found = {name: x.mean(axis=1) for name, x in scores.items()}
    correct, total = scores["correct_answer"] > 0, scores["return"].shape[1]
    ks = sorted({k for k in range(2, total + 1) if k <= 8 or k.bit_count() == 1 or k == total})
    found |= {f"pass@{k}": pass_at_k(correct, k) for k in ks}
    found |= {f"best_of_{k}": best_of_k(scores["return"], k) for k in ks}
    if any(answer is not None for answer in answers) and total <= MAX_VOTERS:
        votes = [answers[i : i + total] for i in range(0, len(answers), total)]
        shares = np.array([majority_at_k(*task, tuple(ks)) for task in zip(votes, correct, strict=True)])
        found |= {f"maj@{k}": shares[:, i] for i, k in enumerate(ks)}
    return found


def pass_at_k(correct: Bool[np.ndarray, "N G"], k: int) -> Float[np.ndarray, "N"]:
    """Unbiased chance that one of k samples is right, from G >= k samples. Source: arXiv 2107.03374, eq. 1."""
    total = correct.shape[1]
    return np.array([1 - comb(total - c, k) / comb(total, k) for c in correct.sum(axis=1).tolist()])


def best_of_k(returns: Float[np.ndarray, "N G"], k: int) -> Float[np.ndarray, "N"]:
    """Unbiased mean of the best return of k samples, from G >= k samples.

    That is Σ_i C(i - 1, k - 1) / C(G, k) r_i, with r_i the i-th smallest: it is the best of so many subsets. The same
    counting as in pass@k, of which this is the form for returns that are not 0 or 1.
    """
    total = returns.shape[1]
    weights = np.array([comb(i, k - 1) / comb(total, k) for i in range(total)])
    return np.sort(returns, axis=1) @ weights


def majority_at_k(
    answers: Sequence[str | None], correct: Bool[np.ndarray, "G"], ks: tuple[int, ...]
) -> Float[np.ndarray, "K"]:
    """Unbiased chance, for each k, that the answer most frequent among k of a task's G samples is right.

    Answers are one where they are equal but for white space at their ends and its amount within. Ties are decided by
    lot, in expectation. Samples without an answer (None) do not vote; where nobody votes, nothing is right. Where equal
    answers were graded differently, a win counts by the share of them that are right.

    Source: arXiv 2203.11171 (majority vote); the mean over all subsets of k samples, as in pass@k, is exact.
    """
    keys = [None if answer is None else " ".join(answer.split()) for answer in answers]
    votes, right = Counter(keys), Counter(key for key, is_right in zip(keys, correct, strict=True) if is_right)
    silent = votes.pop(None, 0)
    groups = tuple(sorted((size, right[key] / size) for key, size in votes.items()))
    return count_majorities(groups, silent)[list(ks)]


@lru_cache(maxsize=4096)  # most tasks of a set are alike: all wrong, all right, one answer against others
def count_majorities(groups: tuple[tuple[int, float], ...], silent: int) -> Float[np.ndarray, "G_and_1"]:
    """Chance that the majority of k samples is right, for k = 0 ... G; `groups`: votes of each answer, share right.

    For each number m of votes that wins, subsets in which the winners have m and all others fewer are counted by a
    product of polynomials: an answer with c votes is a factor Σ_{j<m} C(c, j) x^j + C(c, m) x^m y. The power of x
    counts samples, that of y winners, each of whom wins the lot with probability 1 / their number.
    """
    total = silent + sum(size for size, _ in groups)
    wins = np.zeros(total + 1)
    for m in range(1, max((size for size, _ in groups), default=0) + 1):
        ways = np.zeros((1 + sum(size >= m for size, _ in groups), total + 1))  # [winners, samples] subsets
        ways[0, : silent + 1] = choices(silent, silent)
        right = np.zeros_like(ways)  # the same, each subset times how many of its winners are right
        for size, share in groups:
            losing, winning = choices(size, m - 1), float(comb(size, m))  # 0 ways where it has fewer votes than m
            new_ways, new_right = times(ways, losing), times(right, losing)
            new_ways[1:, m:] += winning * ways[:-1, :-m]
            new_right[1:, m:] += winning * (right[:-1, :-m] + share * ways[:-1, :-m])
            ways, right = new_ways, new_right
        wins += (right[1:] / np.arange(1, len(right))[:, None]).sum(axis=0)
    return wins / choices(total, total)


def choices(size: int, most: int) -> Float[np.ndarray, "J"]:
    """C(size, j) for j = 0 ... most."""
    return np.array([float(comb(size, j)) for j in range(most + 1)])


def times(rows: Float[np.ndarray, "W T"], polynomial: Float[np.ndarray, "J"]) -> Float[np.ndarray, "W T"]:
    """Each row times a polynomial, up to the power that a row holds."""
    return np.array([np.convolve(row, polynomial)[: rows.shape[1]] for row in rows])


def paired_bootstrap(
    x: Float[np.ndarray, "N"], y: Float[np.ndarray, "N"], seed: int = 0, resamples: int = RESAMPLES
) -> dict[str, float | None]:
    """Returns how much larger y is than x on the same tasks: "mean", its 95% interval "low" to "high", and "p".

    Tasks are drawn N times with replacement, both values of a task together; the interval holds the 2.5% to 97.5%
    quantiles of the resampled mean of y - x, and is None where all tasks differ by the same: resampling them says
    nothing. p is the share of the resamples, the data themselves counted as one, in which the mean is 0 or less. It is
    at least 2^-N, the chance that N signs agree, which no number of resamples can undercut.
    Sources: Koehn 2004, Statistical Significance Tests for Machine Translation Evaluation, section 4; Phipson and Smyth
    2010, Permutation P-values Should Never Be Zero.
    """
    difference, rng = np.asarray(y, np.float64) - x, np.random.default_rng(seed)
    size, chunk = len(difference), 100  # resamples at a time: memory, whatever N
    draws = (rng.integers(size, size=(min(chunk, resamples - start), size)) for start in range(0, resamples, chunk))
    means = np.concatenate([difference[tasks].mean(axis=1) for tasks in draws])
    count = np.sum(means <= 1e-12)  # a sum that is 0 but for rounding is 0
    p = max((1 + count) / (1 + resamples), 0.5**size)
    low, high = np.quantile(means, [0.025, 0.975]).tolist() if np.ptp(difference) else (None, None)
    return {"mean": float(difference.mean()), "low": low, "high": high, "p": float(p)}


def explained_variance(
    targets: Float[np.ndarray, "B #T"], values: Float[np.ndarray, "B T"], mask: Bool[np.ndarray, "B T"]
) -> float:
    """1 - Var(target - value) / Var(target): 1 for a perfect critic, 0 for a constant one, or equal targets."""
    targets, values = np.broadcast_to(targets, mask.shape)[mask], values[mask]
    variance = targets.var()
    return float(1 - (targets - values).var() / variance) if variance > 1e-12 else 0.0
