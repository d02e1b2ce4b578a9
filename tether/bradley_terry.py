"""Strengths of models from pairwise comparisons (Bradley and Terry 1952), with intervals. Free of torch.

P(i beats j) = 1 / (1 + exp(s_j - s_i)). Ties count half a win for either side. A maximum exists only among models each of which won
and lost, directly or through others, against the rest (Ford 1957); the others have no finite strength, and are told apart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tether import stats

STEPS = 200
CLOSE = 1e-10  # of the largest change of a strength


@dataclass(frozen=True)
class Strength:
    """One model's log-strength against the mean of those that have one, with a 95 % interval; None, and `why`, where there is no finite one."""

    name: str
    comparisons: float
    win_rate: float | None
    value: float | None
    low: float | None
    high: float | None
    why: str = ""


@dataclass(frozen=True)
class BradleyTerry:
    """All models, strongest first, and the covariance of the strengths of `fitted` (names, in the order of the covariance)."""

    strengths: tuple[Strength, ...]
    fitted: tuple[str, ...]
    covariance: np.ndarray

    def difference(self, a: str, b: str, confidence: float = 0.95) -> tuple[float, float, float] | None:
        """Log-odds that a beats b with their interval; None where one of them has no finite strength."""
        if a not in self.fitted or b not in self.fitted:
            return None
        i, j = self.fitted.index(a), self.fitted.index(b)
        by_name = {s.name: s.value or 0.0 for s in self.strengths}
        value, c = by_name[a] - by_name[b], self.covariance
        half = stats.normal_quantile(0.5 + confidence / 2) * math.sqrt(max(0.0, c[i, i] + c[j, j] - 2 * c[i, j]))
        return value, value - half, value + half

    def chance(self, a: str, b: str, confidence: float = 0.95) -> tuple[float, float, float] | None:
        """Chance that a beats b, with its interval."""
        found = self.difference(a, b, confidence)
        return None if found is None else (_sigmoid(found[0]), _sigmoid(found[1]), _sigmoid(found[2]))


def bradley_terry(wins: np.ndarray | Sequence[Sequence[float]], names: Sequence[str] | None = None) -> BradleyTerry:
    """Maximum-likelihood strengths; `wins[i][j]` comparisons that i won against j, half a win each for a tie.

    Intervals come from the Fisher information, so they are those of independent comparisons: average several votes of one item
    before they are counted. Strengths sum to 0.

    >>> found = bradley_terry([[0, 30], [10, 0]], ["a", "b"])
    >>> [round(x, 4) for x in found.difference("a", "b")], round(math.log(3), 4)  # the log-odds, +- 1.96 / sqrt(40 * 3/4 * 1/4)
    ([1.0986, 0.3829, 1.8143], 1.0986)
    """
    w = np.asarray(wins, dtype=float)
    n = len(w)
    labels = [str(i) for i in range(n)] if names is None else list(names)
    if w.shape != (n, n) or len(labels) != n or len(set(labels)) != n:
        raise ValueError(f"wins is a square table with a name for each row, got shape {w.shape} and {len(labels)} names")
    if not np.isfinite(w).all() or w.min(initial=0) < 0 or np.diag(w).any():
        raise ValueError("wins are numbers of 0 or more, 0 against oneself")
    above = _reaches(w)
    together = above & above.T
    # The largest set in which everybody reaches everybody by wins; of equals, the one with more comparisons.
    played = (w + w.T).sum(1)
    kept = max((np.flatnonzero(row) for row in together), key=lambda s: (len(s), played[s].sum()), default=np.array([], dtype=int))
    fits = len(kept) > 1
    values, covariance = _fit(w[np.ix_(kept, kept)]) if fits else (np.zeros(0), np.zeros((0, 0)))
    z = stats.normal_quantile(0.975)
    found = []
    for i in range(n):
        rate = float(w[i].sum() / played[i]) if played[i] else None
        if fits and i in kept:
            at = int(np.flatnonzero(kept == i)[0])
            half = z * math.sqrt(covariance[at, at])
            found.append(Strength(labels[i], float(played[i]), rate, float(values[at]), float(values[at]) - half, float(values[at]) + half))
        else:
            found.append(Strength(labels[i], float(played[i]), rate, None, None, None, _why(i, kept, above, w)))
    order = sorted(range(n), key=lambda i: (-_rank(found[i], i, kept, above), -(found[i].win_rate or 0)))
    return BradleyTerry(tuple(found[i] for i in order), tuple(labels[i] for i in kept) if fits else (), covariance)


def _reaches(w: np.ndarray) -> np.ndarray:
    """(n, n) whether i beat j, or somebody who reaches j."""
    reach = (w > 0) | np.eye(len(w), dtype=bool)
    for middle in range(len(w)):
        reach |= np.outer(reach[:, middle], reach[middle])
    return reach


def _why(i: int, kept: np.ndarray, above: np.ndarray, w: np.ndarray) -> str:
    if not (w[i].any() or w[:, i].any()):
        return "never compared"
    others = [j for j in (kept if i not in kept else range(len(w))) if j != i]
    wins, loses = any(above[i, j] for j in others), any(above[j, i] for j in others)
    if wins and not loses:
        return "never lost to the others, nor to who lost to them: stronger than any number says"
    if loses and not wins:
        return "never won against the others, nor against who won: weaker than any number says"
    return "never compared with the others, not even through third ones"


def _rank(s: Strength, i: int, kept: np.ndarray, above: np.ndarray) -> float:
    if s.value is not None:
        return s.value
    others = [j for j in range(len(above)) if j != i]
    wins, loses = sum(above[i, j] for j in others), sum(above[j, i] for j in others)
    return math.inf if wins > loses else -math.inf


def _fit(w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Strengths that sum to 0 and their covariance, by Newton's method with halved steps: the likelihood is concave."""
    n = len(w)
    games, won, s = w + w.T, w.sum(1), np.zeros(n)

    def likelihood(s: np.ndarray) -> float:
        return float(-(w * np.logaddexp(0, s[None, :] - s[:, None])).sum())

    for _ in range(STEPS):
        p = _chances(s)
        step = _inverse(_information(games, p)) @ (won - (games * p).sum(1))
        size, now = 1.0, likelihood(s)
        while likelihood(s + size * step) < now - 1e-12 * abs(now) and size > 1e-9:
            size /= 2
        s = s + size * step
        if float(np.abs(size * step).max()) < CLOSE:
            break
    return s - s.mean(), _inverse(_information(games, _chances(s)))


def _chances(s: np.ndarray) -> np.ndarray:
    return np.exp(-np.logaddexp(0, s[None, :] - s[:, None]))


def _information(games: np.ndarray, p: np.ndarray) -> np.ndarray:
    each = games * p * p.T
    return np.diag(each.sum(1)) - each


def _inverse(information: np.ndarray) -> np.ndarray:
    """The covariance of strengths that sum to 0. The information is singular along (1, ..., 1): fill that direction, then take it out."""
    n = len(information)
    flat = np.full((n, n), 1 / n)
    scale = max(float(np.trace(information)) / n, 1e-300)
    return np.linalg.inv(information + scale * flat) - flat / scale


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))
