"""Answers by enumeration: elections of a few replies, and all numbers that arithmetic can make."""

from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from itertools import permutations

import numpy as np


def vote(answers: Sequence[str | None], correct: Sequence[bool]) -> float:
    """Returns the chance that the winner of one election is right; ties are decided by lot."""
    votes = Counter(answer for answer in answers if answer is not None)
    winners = [answer for answer, count in votes.items() if count == max(votes.values())]
    shares = []
    for winner in winners:
        grades = [grade for answer, grade in zip(answers, correct, strict=True) if answer == winner]
        shares.append(np.mean(grades))
    return float(np.mean(shares)) if winners else 0.0


def reachable(values: tuple[Fraction, ...]) -> set[Fraction]:
    """Returns every number that + - * / over all values can make."""
    if len(values) == 1:
        return set(values)
    found = set()
    for a, b, *rest in permutations(values):
        quotient = [a / b] if b else []
        for result in (a + b, a - b, a * b, *quotient):
            found |= reachable((result, *rest))
    return found
