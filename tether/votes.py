"""Majority votes over several answers to one question: how often the answer given most often is right. Free of torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple


class Vote(NamedTuple):
    """`right`: chance that the winner is right. `tied`: chance that several answers share first place. `empty`: that nobody votes."""

    right: float
    tied: float
    empty: float


def majority_at_k(votes: Sequence[int], right: Sequence[bool], k: int, *, silent: int = 0) -> Vote:
    """What a vote among k of the samples gives, averaged over every choice of k of them (self-consistency; Wang et al. 2022).

    `votes[i]` samples gave answer i, `right[i]` says whether it is right; `silent` samples gave no answer, take a place among the k
    and have no vote. Answers that share first place each win with equal chance. A vote without voters is not right.
    Exact: choices are counted in whole numbers, not sampled.

    >>> majority_at_k([2, 1], [True, False], 3)
    Vote(right=1.0, tied=0.0, empty=0.0)
    >>> majority_at_k([2, 1], [True, False], 2).right  # of three pairs one agrees on the right answer and two are split
    0.6666666666666666
    """
    n = sum(votes) + silent
    if len(votes) != len(right) or min([silent, *votes]) < 0:
        raise ValueError(f"every answer has a number of votes and a verdict, got {list(votes)} and {list(right)}")
    if not 1 <= k <= n:
        raise ValueError(f"need 1 <= k <= {n} samples, got {k}")
    counted = [(v, bool(r)) for v, r in zip(votes, right, strict=True) if v]
    score, tied = Fraction(0), 0
    for most in range(1, min(k, max((v for v, _ in counted), default=0)) + 1):
        for (_, winners, right_ones), ways in _choices(counted, k, most, silent).items():
            score += Fraction(ways * right_ones, winners)
            tied += ways if winners > 1 else 0
    total = math.comb(n, k)
    return Vote(float(score / total), float(Fraction(tied, total)), float(Fraction(math.comb(silent, k), total)))


def _choices(counted: Sequence[tuple[int, bool]], k: int, most: int, silent: int) -> dict[tuple[int, int, int], int]:
    """In how many ways k samples can be chosen so that the winning answers have `most` votes, by (k, winners, right winners)."""
    ways: dict[tuple[int, int, int], int] = {(0, 0, 0): 1}
    for votes, is_right in counted:
        grown: dict[tuple[int, int, int], int] = {}
        for (chosen, winners, right_ones), count in ways.items():
            for taken in range(min(votes, most, k - chosen) + 1):
                first = taken == most
                key = (chosen + taken, winners + first, right_ones + (first and is_right))
                grown[key] = grown.get(key, 0) + count * math.comb(votes, taken)
        ways = grown
    out: dict[tuple[int, int, int], int] = {}
    for (chosen, winners, right_ones), count in ways.items():
        if winners and k - chosen <= silent:
            key = (k, winners, right_ones)
            out[key] = out.get(key, 0) + count * math.comb(silent, k - chosen)
    return out
