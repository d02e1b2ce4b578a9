"""Intervals against tables and closed forms, correlations against definitions, estimators against enumeration."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tether import stats


@pytest.mark.parametrize(
    "p, df, expected",  # printed tables of Student's t
    [(0.975, 1, 12.7062), (0.975, 2, 4.30265), (0.975, 5, 2.57058), (0.975, 30, 2.04227), (0.95, 10, 1.81246), (0.995, 4, 4.60409)],
)
def test_t_quantiles(p: float, df: int, expected: float) -> None:
    assert stats.t_quantile(p, df) == pytest.approx(expected, rel=1e-5)
    assert stats.t_quantile(1 - p, df) == pytest.approx(-expected, rel=1e-5)


def test_t_tends_to_the_normal() -> None:
    assert stats.t_quantile(0.975, 1e6) == pytest.approx(stats.normal_quantile(0.975), rel=1e-5)
    # one degree of freedom is the Cauchy distribution, two has a closed form
    assert stats.t_quantile(0.9, 1) == pytest.approx(math.tan(math.pi * 0.4), rel=1e-10)
    assert stats.t_quantile(0.9, 2) == pytest.approx(0.8 / math.sqrt(2 * 0.9 * 0.1), rel=1e-10)


def test_mean_interval_by_hand() -> None:
    """1, 2, 3: mean 2, standard error 1/sqrt(3), t(0.975, 2) = 4.30265."""
    value, low, high, n = stats.mean_interval([1, 2, 3])
    assert (value, n) == (2.0, 3)
    assert high - 2 == pytest.approx(4.30265 / math.sqrt(3), rel=1e-5)
    assert 2 - low == pytest.approx(high - 2)
    assert stats.mean_interval([1, 2, 3], kind="normal").high == pytest.approx(2 + 1.959964 / math.sqrt(3), rel=1e-6)


def test_one_value_has_no_finite_interval() -> None:
    assert stats.mean_interval([5.0]) == (5.0, -math.inf, math.inf, 1)


def test_wilson_by_hand() -> None:
    """8 of 10, z = 1.96: centre (0.8 + 0.19207)/1.38415 = 0.71674, half 0.22659 (Wilson 1927)."""
    assert stats.wilson(8, 10) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert stats.wilson(0, 10)[0] == 0.0
    assert stats.wilson(10, 10)[1] == 1.0
    assert stats.wilson(0, 0) == (0.0, 1.0)


@given(n=st.integers(1, 500), share=st.floats(0, 1))
@settings(max_examples=50, deadline=None)
def test_wilson_holds_the_estimate_and_stays_in_bounds(n: int, share: float) -> None:
    k = round(share * n)
    low, high = stats.wilson(k, n)
    assert 0 <= low <= k / n <= high <= 1
    flipped = stats.wilson(n - k, n)
    assert (1 - flipped[1], 1 - flipped[0]) == pytest.approx((low, high))


def test_the_wilson_interval_covers_as_often_as_it_says() -> None:
    """Exact coverage over all outcomes at n = 20: near 95 % for rates away from the ends."""
    for p in (0.3, 0.5, 0.7):
        covered = sum(
            math.comb(20, k) * p**k * (1 - p) ** (20 - k) for k in range(21) if stats.wilson(k, 20)[0] <= p <= stats.wilson(k, 20)[1]
        )
        assert 0.92 < covered < 0.98


def test_bootstrap_is_a_function_of_its_seed_and_leaves_the_global_state_alone() -> None:
    random.seed(3)
    np.random.seed(3)
    x, y = list(range(20)), [v / 2 for v in range(20)]
    before = random.getstate(), np.random.get_state()[1].tolist()
    one, other = stats.paired_difference(x, y, seed=1), stats.paired_difference(x, y, seed=1)
    assert one == other
    assert stats.paired_difference(x, y, seed=2) != one
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before


def test_bootstrap_agrees_with_the_normal_interval_where_both_hold() -> None:
    x = np.random.default_rng(0).normal(size=400)
    boot, normal = stats.bootstrap_mean(x, resamples=4000), stats.mean_interval(x, kind="normal")
    assert boot.low == pytest.approx(normal.low, abs=0.02)
    assert boot.high == pytest.approx(normal.high, abs=0.02)


def test_pairing_removes_what_the_items_share() -> None:
    hard = np.arange(50.0)
    paired = stats.paired_difference(hard + 1 + 0.1 * (hard % 2), hard)
    assert paired.high - paired.low < 0.1
    with pytest.raises(ValueError, match="equal numbers"):
        stats.paired_difference([1, 2], [1])


def test_many_samples_of_one_prompt_are_not_many_prompts() -> None:
    outcomes, prompts = [1, 1, 1, 1, 0, 0, 0, 0], ["a"] * 4 + ["b"] * 4
    together = stats.win_rate(outcomes, prompts=prompts)
    assert (together.value, together.n) == (0.5, 2)
    apart = stats.win_rate(outcomes)
    assert together.high - together.low > apart.high - apart.low
    assert stats.bootstrap_mean(outcomes, prompts=prompts).n == 2


def test_win_rate_counts_ties_as_half() -> None:
    assert stats.win_rate([1, 0.5, 0]).value == 0.5
    assert stats.win_rate([1, 1, 1]).low < 1
    with pytest.raises(ValueError, match="outcomes"):
        stats.win_rate([2, 0])


def test_correlations() -> None:
    assert stats.pearson([1, 2, 3], [2, 4, 6]) == pytest.approx(1)
    assert stats.pearson([1, 2, 3], [1, 0, 1]) == pytest.approx(0, abs=1e-15)
    assert stats.pearson([1, 1, 1], [1, 2, 3]) is None
    assert stats.pearson([1], [2]) is None


def test_calibration_bins_by_hand() -> None:
    bins = stats.calibration_bins([0.55, 0.58, 0.95, 1.0], [True, False, True, True], low=0.5, bins=5)
    assert [(b["n"], b["predicted"], b["frequency"]) for b in bins] == [(2, pytest.approx(0.565), 0.5), (2, pytest.approx(0.975), 1.0)]
    assert stats.calibration_error(bins) == pytest.approx((2 * 0.065 + 2 * 0.025) / 4)
    assert stats.calibration_bins([], []) == []
    assert stats.calibration_error([]) is None
    with pytest.raises(ValueError, match="must lie in"):
        stats.calibration_bins([0.2], [True], low=0.5)


@given(n=st.integers(1, 8), data=st.data())
@settings(max_examples=40, deadline=None)
def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer(n: int, data: st.DataObject) -> None:
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    subsets = list(itertools.combinations([1] * c + [0] * (n - c), k))
    assert stats.pass_at_k(n, c, k) == pytest.approx(sum(any(s) for s in subsets) / len(subsets))


@given(rewards=st.lists(st.floats(-5, 5), min_size=1, max_size=7), data=st.data())
@settings(max_examples=40, deadline=None)
def test_best_of_n_is_the_mean_of_the_best_over_subsets(rewards: list[float], data: st.DataObject) -> None:
    n = data.draw(st.integers(1, len(rewards)))
    subsets = list(itertools.combinations(rewards, n))
    assert stats.best_of_n(rewards, n) == pytest.approx(sum(map(max, subsets)) / len(subsets), abs=1e-12)


def test_what_is_not_a_number_is_named() -> None:
    with pytest.raises(ValueError, match="value 1 is not finite"):
        stats.mean_interval([1.0, math.nan])
    with pytest.raises(ValueError, match="at least 1"):
        stats.mean_interval([])
    with pytest.raises(ValueError, match="k"):
        stats.pass_at_k(3, 1, 4)
