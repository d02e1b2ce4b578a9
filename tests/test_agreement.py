"""Agreement coefficients against published tables and slow definitions; undefined cases; habits of one rater."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tether.agreement import (
    Agreement,
    cohen_kappa,
    fleiss_kappa,
    krippendorff_alpha,
    percent,
    position_bias,
    speed_outliers,
)


def raters(*rows: str) -> list[list[Any]]:
    """One string for each rater, "." where a rating is missing -> items."""
    return [[None if v == "." else int(v) if v.isdigit() else v for v in item] for item in zip(*rows, strict=True)]


def table(rows: list[list[int]]) -> list[list[int]]:
    """Counts of each category for each item -> items."""
    return [[category for category, n in enumerate(row) for _ in range(n)] for row in rows]


# Krippendorff (2011), "Computing Krippendorff's Alpha-Reliability": four observers, twelve units, missing ratings.
FOUR_OBSERVERS = raters("123321412...", "1233224125.3", ".3332342251.", "12332441251.")
# Fleiss (1971), table 1: 30 patients, 6 psychiatrists, 5 diagnoses.
DIAGNOSES = """444444 222555 233335 555555 222444 113333 333355 113334 114444 555555 144444 124444 222333 144444 224445
333335 111455 111112 224444 133555 555555 244444 224555 114444 144445 222224 111155 224444 133333 555555"""
# The worked example of 10 items and 14 raters.
TEN_BY_FOURTEEN = table(
    [
        [0, 0, 0, 0, 14],
        [0, 2, 6, 4, 2],
        [0, 0, 3, 5, 6],
        [0, 3, 9, 2, 0],
        [2, 2, 8, 1, 1],
        [7, 7, 0, 0, 0],
        [3, 2, 6, 3, 0],
        [2, 5, 3, 2, 2],
        [6, 5, 2, 1, 0],
        [0, 2, 2, 3, 7],
    ]
)


@pytest.mark.parametrize(
    ("first", "second", "weights", "published"),
    [
        # Artstein and Poesio (2008), tables 1 and 4, and weighted values, as scikit-learn's own tests have them.
        ([0] * 40 + [1] * 60, [0] * 20 + [1] * 20 + [0] * 10 + [1] * 50, None, 0.348),
        ([0] * 46 + [1] * 44 + [2] * 10, [0] * 52 + [1] * 32 + [2] * 16, None, 0.8013),
        ([0] * 46 + [1] * 44 + [2] * 10, [0] * 50 + [1] * 40 + [2] * 10, None, 0.9315),
        ([0] * 46 + [1] * 44 + [2] * 10, [0] * 50 + [1] * 40 + [2] * 10, "linear", 0.9412),
        ([0] * 46 + [1] * 44 + [2] * 10, [0] * 50 + [1] * 40 + [2] * 10, "quadratic", 0.9541),
        # The table of the SAS manual, [[0, 4, 1], [0, 8, 0], [0, 1, 5]].
        ([0] * 5 + [1] * 8 + [2] * 6, [1] * 4 + [2] + [1] * 8 + [1] + [2] * 5, None, 0.4842),
        ([0] * 5 + [1] * 8 + [2] * 6, [1] * 4 + [2] + [1] * 8 + [1] + [2] * 5, "linear", 0.4701),
    ],
)
def test_cohen_kappa_has_the_published_values(first: list[int], second: list[int], weights: Any, published: float) -> None:
    places = len(str(published)) - 2
    assert cohen_kappa(first, second, weights=weights, resamples=0).value == pytest.approx(published, abs=0.5 * 10**-places)
    assert cohen_kappa(second, first, weights=weights, resamples=0).value == pytest.approx(published, abs=0.5 * 10**-places)


def test_weighted_kappa_has_the_values_of_r() -> None:
    """Raters 2 and 3 of the data set "anxiety" of R's package irr: kappa2 unweighted, "equal" and "squared"."""
    second, third = "36462424332333221334", "21443216111233113322"
    got = [cohen_kappa(list(second), list(third), weights=w, resamples=0).value for w in (None, "linear", "quadratic")]  # type: ignore[arg-type]
    assert got == pytest.approx([-0.006289308, 0.1459075, 0.2520325], abs=5e-8)


def test_fleiss_kappa_has_the_published_values() -> None:
    assert fleiss_kappa(TEN_BY_FOURTEEN, resamples=0).value == pytest.approx(0.210, abs=5e-4)
    assert fleiss_kappa([list(item) for item in DIAGNOSES.split()], resamples=0).value == pytest.approx(0.4302445, abs=5e-8)


@pytest.mark.parametrize(("level", "published"), [("nominal", 0.743), ("ordinal", 0.815), ("interval", 0.849)])
def test_krippendorff_alpha_has_the_published_values(level: Any, published: float) -> None:
    found = krippendorff_alpha(FOUR_OBSERVERS, level, resamples=0)
    assert found.value == pytest.approx(published, abs=5e-4)
    assert (found.items, found.ratings) == (11, 40)  # the unit that one observer rated alone does not count


def test_krippendorff_alpha_of_two_observers() -> None:
    """His two smaller examples: binary, ten units, 0.095; five categories, twelve units, 0.692."""
    assert krippendorff_alpha(raters("0100000010", "1110010000"), resamples=0).value == pytest.approx(0.095, abs=5e-4)
    assert krippendorff_alpha(raters("aabbdcccedda", "babbbccceddd"), resamples=0).value == pytest.approx(0.692, abs=5e-4)


def slow_alpha(items: list[list[int]], level: str) -> float:
    """Over all pairs of values, one by one, as the definition reads."""
    kept = [item for item in items if len(item) > 1]
    pooled = Counter(v for item in kept for v in item)
    n = sum(pooled.values())

    def away(a: int, b: int) -> float:
        if level == "nominal":
            return float(a != b)
        if level == "interval":
            return float(a - b) ** 2
        low, high = min(a, b), max(a, b)
        return (sum(pooled[g] for g in range(low, high + 1)) - (pooled[a] + pooled[b]) / 2) ** 2

    seen = sum(away(a, b) / (len(item) - 1) for item in kept for a, b in itertools.permutations(item, 2)) / n
    values = list(pooled.elements())
    chance = sum(away(a, b) for a, b in itertools.permutations(values, 2)) / (n * (n - 1))
    return 1 - seen / chance


ITEMS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), min_size=2, max_size=12).filter(
    lambda items: len({v for item in items if len(item) > 1 for v in item}) > 1
)


@given(ITEMS)
@settings(max_examples=60, deadline=None)
def test_alpha_is_its_definition(items: list[list[int]]) -> None:
    for level in ("nominal", "ordinal", "interval"):
        assert krippendorff_alpha(items, level, resamples=0).value == pytest.approx(slow_alpha(items, level), abs=1e-12)  # type: ignore[arg-type]


@given(ITEMS, st.randoms(use_true_random=False))
@settings(max_examples=40, deadline=None)
def test_names_of_categories_and_order_of_raters_and_items_do_not_matter(items: list[list[int]], random: Any) -> None:
    named = [["dcab"[v] for v in item] for item in items]
    for item in named:
        random.shuffle(item)
    random.shuffle(named)
    assert krippendorff_alpha(named, resamples=0).value == pytest.approx(krippendorff_alpha(items, resamples=0).value)
    assert percent(named).value == pytest.approx(percent(items).value)


def test_the_order_of_an_ordinal_scale_is_the_one_given() -> None:
    items = raters("awws", "aaws")
    sensible = krippendorff_alpha(items, "ordinal", order=["a", "w", "s"], resamples=0).value
    assert sensible == pytest.approx(krippendorff_alpha(raters("1223", "1123"), "ordinal", resamples=0).value)
    assert sensible != krippendorff_alpha(items, "ordinal", order=["a", "s", "w"], resamples=0).value
    with pytest.raises(ValueError, match="'s' is not in the order"):
        krippendorff_alpha(items, "ordinal", order=["a", "w"])


def test_percent_by_hand() -> None:
    """Items of 3 and 2 ratings: one of three pairs agrees, then one of one: (1/3 + 1) / 2."""
    found = percent([["x", "x", "y"], ["y", None, "y"], ["x"]])
    assert found.value == pytest.approx(2 / 3)
    assert (found.items, found.ratings) == (2, 5)


# -- what is not defined is told -----------------------------------------------------------------------------------------


def coefficients(items: list[list[Any]]) -> list[Agreement]:
    pair = [[item[0] for item in items], [item[-1] for item in items]]
    return [cohen_kappa(*pair), fleiss_kappa(items), krippendorff_alpha(items), krippendorff_alpha(items, "ordinal")]


def test_one_category_alone_has_no_coefficient_but_a_percentage() -> None:
    items = [["x", "x"], ["x", "x"]]
    for found in coefficients(items):
        assert found.value is None
        assert found.low is None
        assert "all ratings are the same" in found.why
    assert percent(items).value == 1.0
    assert percent(items).low is not None
    assert percent(items).low < 0.8  # type: ignore[operator]  # two items prove little


def test_items_rated_once_have_no_agreement() -> None:
    items = [["x"], ["y", None], []]
    for found in (percent(items), fleiss_kappa(items), krippendorff_alpha(items)):
        assert (found.value, found.why) == (None, "no item has two ratings")
    assert cohen_kappa(["x", None], [None, "y"]).why == "no item was rated by both"


def test_values_that_are_no_ratings_are_refused() -> None:
    with pytest.raises(ValueError, match="not finite"):
        krippendorff_alpha([[1.0, math.nan], [1.0, 2.0]], "interval")
    with pytest.raises(ValueError, match="no level 'ratio'"):
        krippendorff_alpha([[1, 2]], "ratio")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="the same items"):
        cohen_kappa([1], [1, 2])


# -- intervals -----------------------------------------------------------------------------------------------------------


def votes(n: int, accuracy: float, rng: np.random.Generator) -> list[list[int]]:
    """Three raters who see the truth (a fair coin) with this chance, else the other side."""
    truth = rng.integers(0, 2, n)
    return [[int(t if rng.random() < accuracy else 1 - t) for _ in range(3)] for t in truth]


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    """Raters who are right with chance 0.9 agree with chance 0.82, which is an alpha of 1 - 0.18 / 0.5 = 0.64."""
    rng, held = np.random.default_rng(1), 0
    for trial in range(100):
        found = krippendorff_alpha(votes(120, 0.9, rng), seed=trial, resamples=200)
        assert found.low is not None
        assert found.high is not None
        held += found.low <= 0.64 <= found.high
    assert 88 <= held <= 100


def test_items_of_one_prompt_do_not_pass_for_many() -> None:
    """Each item five times over: by item the interval is too narrow, by prompt it is that of the single items."""
    items = votes(40, 0.85, np.random.default_rng(2))
    single = krippendorff_alpha(items)
    repeated = krippendorff_alpha(items * 5)
    grouped = krippendorff_alpha(items * 5, groups=list(range(40)) * 5)

    def width(x: Agreement) -> float:
        assert x.low is not None
        assert x.high is not None
        return x.high - x.low

    assert width(repeated) < 0.6 * width(single)
    assert width(grouped) == pytest.approx(width(single), rel=0.05)


def test_an_interval_depends_on_its_seed_alone() -> None:
    items = votes(30, 0.8, np.random.default_rng(3))
    state = np.random.get_state()[1].copy()  # type: ignore[union-attr,index]
    assert fleiss_kappa(items, seed=5) == fleiss_kappa(items, seed=5)
    assert fleiss_kappa(items, seed=5) != fleiss_kappa(items, seed=6)
    assert (np.random.get_state()[1] == state).all()  # type: ignore[index]


def test_full_agreement_has_no_interval_that_is_a_point() -> None:
    found = krippendorff_alpha([["x", "x"], ["y", "y"], ["x", "x"]])
    assert found.value == 1.0
    assert (found.low, found.high) == (None, None)
    assert found.why


# -- habits --------------------------------------------------------------------------------------------------------------


def test_position_bias_by_hand() -> None:
    """8 of 10: P = 2 (1 + 10 + 45) / 1024 = 0.109375; 5 of 10 is no deviation at all; 9 of 9: 2 / 512."""
    assert position_bias(8, 10).p == 0.109375
    assert position_bias(2, 10).p == 0.109375
    assert position_bias(5, 10).p == 1.0
    assert position_bias(9, 9).p == 2 / 512
    found = position_bias(8, 10)
    assert (found.share, found.low, found.high) == pytest.approx((0.8, 0.4902, 0.9433), abs=5e-5)  # Wilson


def test_the_test_of_many_votes_equals_the_exact_sum() -> None:
    for n, k in ((2001, 950), (5000, 2400), (1001, 0)):
        exact = 2 * sum(math.comb(n, i) for i in range(k + 1)) / 2**n
        assert position_bias(k, n).p == pytest.approx(exact, rel=1e-9)


def test_no_votes_have_no_position() -> None:
    found = position_bias(0, 0)
    assert (found.share, found.p) == (None, None)


def test_speed_by_hand() -> None:
    """Ten votes around 20 s, one of 1 s on 100 words (6 s at 16 words a second), one of 2 s on three words, one pause of an hour."""
    seconds = [20, 22, 18, 25, 16, 21, 19, 23, 17, 20, 1, 2, 3600]
    found = speed_outliers(seconds, [100] * 11 + [3, 100])
    assert found.unread == (10,)
    assert found.hasty == (10, 11)
    assert found.slow == (12,)
    assert found.median_s == 20


def test_a_few_times_or_equal_ones_say_nothing() -> None:
    assert "fewer than 8" in speed_outliers([20, 1], [10, 10]).why
    assert "the same" in speed_outliers([20] * 9 + [1], [10] * 10).why
    assert speed_outliers([], []).median_s is None
    assert speed_outliers([0.0, -3.0], [10, 10]).unread == (0, 1)  # a clock that was set back is no reason to fall over
