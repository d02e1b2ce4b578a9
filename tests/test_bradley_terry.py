"""Strengths of models: closed forms, simulated truth, and the cases without a finite strength."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tether.bradley_terry import bradley_terry


def test_two_models_have_a_closed_form() -> None:
    """30 of 40: log-odds log 3, standard error 1 / sqrt(40 x 0.75 x 0.25); each strength is half of it, with half the error."""
    found = bradley_terry([[0, 30], [10, 0]], ["a", "b"])
    error = 1 / math.sqrt(40 * 0.75 * 0.25)
    assert found.difference("a", "b") == pytest.approx(
        (math.log(3), math.log(3) - 1.959964 * error, math.log(3) + 1.959964 * error), abs=1e-6
    )
    assert found.chance("a", "b") == pytest.approx((0.75, 0.5945, 0.8599), abs=1e-4)
    first = found.strengths[0]
    assert (first.name, first.value, first.low) == (
        "a",
        pytest.approx(math.log(3) / 2),
        pytest.approx((math.log(3) - 1.959964 * error) / 2),
    )


def test_strengths_solve_the_likelihood_equations() -> None:
    """At the maximum every model's expected wins are its wins (Zermelo 1929)."""
    rng = np.random.default_rng(0)
    w = rng.integers(1, 30, (6, 6)).astype(float)
    np.fill_diagonal(w, 0)
    found = bradley_terry(w)
    s = np.array([next(x.value for x in found.strengths if x.name == str(i)) for i in range(6)])
    expected = ((w + w.T) / (1 + np.exp(s[None, :] - s[:, None]))).sum(1)
    np.testing.assert_allclose(expected, w.sum(1), rtol=1e-9)
    assert s.sum() == pytest.approx(0, abs=1e-12)


def test_intervals_hold_the_simulated_truth() -> None:
    truth = np.array([0.8, 0.2, -0.2, -0.8])
    chance = 1 / (1 + np.exp(truth[None, :] - truth[:, None]))
    rng, held, count = np.random.default_rng(4), 0, 0
    for _ in range(60):
        w = np.zeros((4, 4))
        for i in range(4):
            for j in range(i):
                w[i, j] = rng.binomial(50, chance[i, j])
                w[j, i] = 50 - w[i, j]
        for s in bradley_terry(w).strengths:
            assert s.low is not None
            assert s.high is not None
            held += s.low <= truth[int(s.name)] <= s.high
            count += 1
    assert 0.91 <= held / count <= 0.99


def test_ties_pull_together_and_are_half_a_win_each() -> None:
    assert bradley_terry([[0, 5], [5, 0]]).chance("0", "1") == pytest.approx((0.5, *_around(10)), abs=1e-6)
    with_ties = bradley_terry([[0, 3 + 2], [1 + 2, 0]]).difference("0", "1")  # 3 won, 1 lost, 4 tied
    assert with_ties is not None
    assert with_ties[0] == pytest.approx(math.log(5 / 3))


def _around(n: int) -> tuple[float, float]:
    half = 1.959964 / math.sqrt(n / 4)
    return 1 / (1 + math.exp(half)), 1 / (1 + math.exp(-half))


def test_who_never_lost_has_no_finite_strength_and_is_told() -> None:
    found = bradley_terry([[0, 10], [0, 0]], ["a", "b"])
    assert [(s.name, s.value) for s in found.strengths] == [("a", None), ("b", None)]
    assert "never lost" in found.strengths[0].why
    assert "never won" in found.strengths[1].why
    assert found.strengths[0].win_rate == 1.0
    assert found.difference("a", "b") is None


def test_the_rest_is_fitted_without_who_has_no_finite_strength() -> None:
    """c lost everything, d was never compared: a and b keep the closed form of their own games."""
    w = [[0, 30, 5, 0], [10, 0, 5, 0], [0, 0, 0, 0], [0, 0, 0, 0]]
    found = bradley_terry(w, ["a", "b", "c", "d"])
    assert found.chance("a", "b") == pytest.approx((0.75, 0.5945, 0.8599), abs=1e-4)
    told = {s.name: s.why for s in found.strengths}
    assert "never won" in told["c"]
    assert told["d"] == "never compared"
    assert [s.name for s in found.strengths][:2] == ["a", "b"]


def test_groups_that_never_met_are_told() -> None:
    w = np.zeros((4, 4))
    w[0, 1], w[1, 0], w[2, 3], w[3, 2] = 6, 4, 3, 2
    found = bradley_terry(w)
    assert set(found.fitted) == {"0", "1"}  # the pair that was compared more often
    assert "never compared with the others" in next(s.why for s in found.strengths if s.name == "2")


def test_extreme_but_finite_strengths_are_found() -> None:
    found = bradley_terry([[0, 99_999], [1, 0]]).difference("0", "1")
    assert found is not None
    assert found[0] == pytest.approx(math.log(99_999), rel=1e-9)


def test_what_is_no_table_of_wins_is_refused() -> None:
    for wins in ([[0, -1], [1, 0]], [[1, 2], [1, 0]], [[0, math.nan], [1, 0]], [[0, 1]]):
        with pytest.raises(ValueError, match="wins"):
            bradley_terry(wins)
