"""Agreement between raters, and habits of one rater: a side that is favoured, votes faster than reading. Free of torch.

An item's ratings are a list, one entry for each rater, None where a rater gave none. Items stand for what is independent: with
`groups` (the prompt of each item, say) items of one group are drawn together in the bootstrap. A coefficient that is not defined has
the value None and says why; it is never NaN and never 0 in its place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from tether import stats

Ratings = Sequence[Sequence[Hashable | None]]
Level = Literal["nominal", "ordinal", "interval"]
RESAMPLES = 1000
CHUNK = 100  # resamples drawn at once: their counts are one matrix of CHUNK x items
WORDS_PER_SECOND = 16.0  # four times the average silent reading rate of 238 words a minute (Brysbaert 2019): nobody reads that fast
FEWEST_TIMES = 8  # below this a median and its deviation say nothing about a person
TO_DEVIATION = 1.4826  # median absolute deviation -> standard deviation of a normal distribution


@dataclass(frozen=True)
class Agreement:
    """A coefficient with its bootstrap interval; `items` and `ratings` count what it rests on. `why` says why something is None."""

    value: float | None
    low: float | None = None
    high: float | None = None
    items: int = 0
    ratings: int = 0
    why: str = ""


# -- coefficients ------------------------------------------------------------------------------------------------------------


def percent(ratings: Ratings, *, groups: Sequence[Hashable] | None = None) -> Agreement:
    """Share of equal pairs of ratings, averaged over items with two ratings or more (the observed agreement of Fleiss 1971).

    The interval is Agresti and Coull's over the groups: no point where everybody agrees.

    >>> percent([["a", "a", "b"], ["a", "a", None], ["b", None, None]]).value
    0.6666666666666666
    """
    kept, groups = _rated_twice(ratings, groups)
    n = sum(map(len, kept))
    if not kept:
        return Agreement(None, why=ALONE)
    values = [_equal_pairs(item) for item in kept]
    found = stats.share_interval(values, prompts=groups)
    return Agreement(float(np.mean(values)), found.low, found.high, len(kept), n)


def cohen_kappa(
    a: Sequence[Hashable | None],
    b: Sequence[Hashable | None],
    *,
    weights: Literal["linear", "quadratic"] | None = None,
    order: Sequence[Hashable] | None = None,
    groups: Sequence[Hashable] | None = None,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> Agreement:
    """Agreement of two raters beyond chance (Cohen 1960); weighted by distance in `order` (default: sorted) after Cohen 1968.

    Items that one of them did not rate are left out.

    >>> round(cohen_kappa([0] * 40 + [1] * 60, [0] * 20 + [1] * 20 + [0] * 10 + [1] * 50).value, 3)
    0.348
    """
    if len(a) != len(b):
        raise ValueError(f"both raters see the same items, got {len(a)} and {len(b)}")
    both = [i for i in range(len(a)) if a[i] is not None and b[i] is not None]
    if not both:
        return Agreement(None, why="no item was rated by both")
    place = _places([x[i] for x in (a, b) for i in both], order, ordered=weights is not None)
    k = len(place)
    away = np.abs(np.subtract.outer(np.arange(k), np.arange(k))).astype(float)
    distance = {None: (away > 0).astype(float), "linear": away, "quadratic": away**2}[weights]
    parts = np.zeros((len(both), k * k))
    for row, i in enumerate(both):
        parts[row, place[a[i]] * k + place[b[i]]] = 1

    def kappa(total: np.ndarray) -> float | None:
        table = total.reshape(k, k)
        expected = float((np.outer(table.sum(1), table.sum(0)) * distance).sum()) / float(table.sum())
        return None if expected == 0 else 1 - float((table * distance).sum()) / expected

    return _estimate(parts, kappa, _chosen(groups, both), 2 * len(both), seed, resamples, ONE_CATEGORY)


def fleiss_kappa(ratings: Ratings, *, groups: Sequence[Hashable] | None = None, seed: int = 0, resamples: int = RESAMPLES) -> Agreement:
    """Agreement of any raters beyond chance, each item rated equally often (Fleiss 1971).

    >>> fleiss_kappa([["a", "a", "b"], ["a", "b"]]).why
    "items have 2 to 3 ratings: Fleiss' kappa needs equally many, Krippendorff's alpha does not"
    """
    kept, groups = _rated_twice(ratings, groups)
    sizes = {len(item) for item in kept}
    if not kept:
        return Agreement(None, why=ALONE)
    if len(sizes) > 1:
        words = f"items have {min(sizes)} to {max(sizes)} ratings: Fleiss' kappa needs equally many, Krippendorff's alpha does not"
        return Agreement(None, items=len(kept), ratings=sum(map(len, kept)), why=words)
    counts = _counts(kept, _places([v for item in kept for v in item], None, ordered=False))
    equal = np.array([_equal_pairs(item) for item in kept])
    parts = np.column_stack([np.ones(len(kept)), equal, counts])

    def kappa(total: np.ndarray) -> float | None:
        shares = total[2:] / total[2:].sum()
        expected = float((shares**2).sum())
        return None if np.count_nonzero(shares) < 2 else (float(total[1] / total[0]) - expected) / (1 - expected)

    return _estimate(parts, kappa, groups, int(counts.sum()), seed, resamples, ONE_CATEGORY)


def krippendorff_alpha(
    ratings: Ratings,
    level: Level = "nominal",
    *,
    order: Sequence[Hashable] | None = None,
    groups: Sequence[Hashable] | None = None,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> Agreement:
    """1 less observed over expected disagreement, for any raters and missing ratings (Krippendorff 2011, "Computing alpha-reliability").

    `order` lists the values of the ordinal level from one end to the other (default: sorted); interval values are numbers.

    >>> round(krippendorff_alpha([[0, 1], [1, 1], [0, 1], [0, 0], [0, 0], [0, 1], [0, 0], [0, 0], [1, 0], [0, 0]]).value, 3)
    0.095
    """
    if level not in ("nominal", "ordinal", "interval"):
        raise ValueError(f"there is no level {level!r}: use nominal, ordinal or interval")
    kept, groups = _rated_twice(ratings, groups)
    if not kept:
        return Agreement(None, why=ALONE)
    place = _places([v for item in kept for v in item], order, ordered=level != "nominal")
    values = np.array([float(v) for v in place], dtype=float) if level == "interval" else None  # the level says they are numbers
    counts, k = _counts(kept, place), len(place)
    # A unit's pairs of values, each pair weighed by 1 / (ratings of the unit - 1).
    pairs = counts[:, :, None] * counts[:, None, :] - counts[:, :, None] * np.eye(k)
    parts = (pairs / (counts.sum(1) - 1)[:, None, None]).reshape(len(kept), k * k)

    def alpha(total: np.ndarray) -> float | None:
        table = total.reshape(k, k)
        each = table.sum(1)
        distance = _distance(level, each, values)
        expected = float(((np.outer(each, each) - np.diag(each)) * distance).sum()) / (float(each.sum()) - 1)
        return None if expected == 0 else 1 - float((table * distance).sum()) / expected

    return _estimate(parts, alpha, groups, int(counts.sum()), seed, resamples, ONE_CATEGORY)


ALONE = "no item has two ratings"
ONE_CATEGORY = "all ratings are the same: agreement by chance is certain, so there is nothing beyond it to measure"
NO_SPREAD = "no resample differs from the rest: there is no interval"


def _distance(level: Level, each: np.ndarray, values: np.ndarray | None) -> np.ndarray:
    """(K, K) squared differences of values; ordinal ones depend on how often the values between were given."""
    if level == "nominal":
        return 1 - np.eye(len(each))
    if values is not None:
        return np.subtract.outer(values, values) ** 2
    middle = np.cumsum(each) - each / 2  # half of either end and all between
    return np.subtract.outer(middle, middle) ** 2


def _estimate(
    parts: np.ndarray,
    of: Callable[[np.ndarray], float | None],
    groups: Sequence[Hashable] | None,
    n_ratings: int,
    seed: int,
    resamples: int,
    undefined: str,
) -> Agreement:
    """`of` the sum of `parts` (items, numbers), with a percentile interval from resampled groups of items (Efron 1979)."""
    n_items, value = len(parts), of(parts.sum(0))
    if value is None:
        return Agreement(None, items=n_items, ratings=n_ratings, why=undefined)
    if groups is not None:
        place: dict[Hashable, int] = {}
        index = np.array([place.setdefault(g, len(place)) for g in groups])
        summed = np.zeros((len(place), parts.shape[1]))
        np.add.at(summed, index, parts)
        parts = summed
    if resamples == 0 or len(parts) < 2:
        return Agreement(value, items=n_items, ratings=n_ratings, why="" if resamples == 0 else "one item alone has no interval")
    rng, drawn = np.random.default_rng(seed), []
    for start in range(0, resamples, CHUNK):
        size = (min(CHUNK, resamples - start),)
        drawn += [of(total) for total in rng.multinomial(len(parts), np.full(len(parts), 1 / len(parts)), size=size) @ parts]
    defined = [v for v in drawn if v is not None]
    if len(defined) < resamples / 2 or max(defined) == min(defined):
        return Agreement(value, items=n_items, ratings=n_ratings, why=NO_SPREAD)
    low, high = np.quantile(defined, [0.025, 0.975])
    return Agreement(value, float(low), float(high), n_items, n_ratings)


def _rated_twice(ratings: Ratings, groups: Sequence[Hashable] | None) -> tuple[list[list[Hashable]], list[Hashable] | None]:
    """Items with two ratings or more, without their gaps, and their groups."""
    if groups is not None and len(groups) != len(ratings):
        raise ValueError(f"every item has a group, got {len(ratings)} items and {len(groups)} groups")
    found = [[v for v in item if v is not None] for item in ratings]
    twice = [i for i, item in enumerate(found) if len(item) > 1]
    return [found[i] for i in twice], _chosen(groups, twice)


def _chosen(groups: Sequence[Hashable] | None, kept: Sequence[int]) -> list[Hashable] | None:
    return None if groups is None else [groups[i] for i in kept]


def _places(values: Sequence[Any], order: Sequence[Hashable] | None, *, ordered: bool) -> dict[Any, int]:
    """Each value's place; where the level has an order, by `order` or sorted."""
    if any(isinstance(v, float) and not math.isfinite(v) for v in values):
        raise ValueError("a rating is not finite; a missing one is None")
    seen = dict.fromkeys(values)
    if order is None:
        return {v: i for i, v in enumerate(sorted(seen) if ordered else seen)}
    if unknown := [v for v in seen if v not in order]:
        raise ValueError(f"the rating {unknown[0]!r} is not in the order {list(order)!r}")
    return {v: i for i, v in enumerate(v for v in order if v in seen)}


def _counts(items: Sequence[Sequence[Hashable]], place: dict[Any, int]) -> np.ndarray:
    """(items, K) how often each value was given."""
    out = np.zeros((len(items), len(place)))
    for row, item in enumerate(items):
        for value in item:
            out[row, place[value]] += 1
    return out


def _equal_pairs(item: Sequence[Hashable]) -> float:
    counts = [item.count(v) for v in set(item)]
    return sum(c * (c - 1) for c in counts) / (len(item) * (len(item) - 1))


# -- habits of one rater -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Position:
    """How often the side shown first won: its share with a Wilson interval, and the chance of a share as far from half by luck."""

    first: int
    n: int
    share: float | None
    low: float | None
    high: float | None
    p: float | None


def position_bias(first: int, n: int) -> Position:
    """Of `n` decided votes `first` chose the side shown first; sides are shuffled, so half is expected. Exact binomial test, two-sided.

    >>> position_bias(8, 10).p
    0.109375
    """
    if not 0 <= first <= n:
        raise ValueError(f"chosen votes must lie in 0..{n}, got {first}")
    if n == 0:
        return Position(0, 0, None, None, None, None)
    low, high = stats.wilson(first, n)
    return Position(first, n, first / n, low, high, _two_sided(first, n))


def _two_sided(k: int, n: int) -> float:
    """Chance of a count as far from n / 2 as k, of n fair coins."""
    tail = min(k, n - k)
    if 2 * tail == n:
        return 1.0
    if n <= 1000:
        return min(1.0, 2 * sum(math.comb(n, i) for i in range(tail + 1)) / 2**n)
    i = np.arange(1, tail + 1)
    logs = np.concatenate([[0.0], np.cumsum(np.log((n - i + 1) / i))]) - n * math.log(2)
    return min(1.0, 2 * math.exp(float(logs.max())) * float(np.exp(logs - logs.max()).sum()))


@dataclass(frozen=True)
class Speed:
    """Times of one rater. `hasty` and `slow` are indices far from the rater's own median, `unread` those faster than anyone reads."""

    median_s: float | None
    unread: tuple[int, ...]
    hasty: tuple[int, ...]
    slow: tuple[int, ...]
    why: str = ""  # why hasty and slow were not looked for


def speed_outliers(seconds: Sequence[float], words: Sequence[int], *, deviations: float = 3.0) -> Speed:
    """Votes that were too quick to be meant, and pauses.

    Unread: less time than the words shown take at 16 words a second. Hasty and slow: log seconds more than 3 deviations below or
    above the rater's median, the deviation being 1.4826 times the median absolute one, so that the outliers do not hide themselves.

    >>> speed_outliers([20, 25, 22, 0.5, 24, 21, 23, 19, 26], [100] * 9).unread
    (3,)
    """
    if len(seconds) != len(words):
        raise ValueError(f"every time has its words, got {len(seconds)} and {len(words)}")
    if not seconds:
        return Speed(None, (), (), (), "no vote has a time")
    unread = tuple(i for i, (s, w) in enumerate(zip(seconds, words, strict=True)) if s < w / WORDS_PER_SECOND)
    logs = np.log(np.maximum(np.asarray(seconds, dtype=float), 1e-3))  # a clock that was set back gives 0 or less
    middle = float(np.median(logs))
    deviation = TO_DEVIATION * float(np.median(np.abs(logs - middle)))
    median_s = float(np.median(seconds))
    if len(seconds) < FEWEST_TIMES:
        return Speed(median_s, unread, (), (), f"fewer than {FEWEST_TIMES} votes have a time")
    if deviation == 0:
        return Speed(median_s, unread, (), (), "more than half of the times are the same")
    far = (logs - middle) / deviation
    hasty, slow = (tuple(int(i) for i in np.flatnonzero(found)) for found in (far < -deviations, far > deviations))
    return Speed(median_s, unread, hasty, slow)
