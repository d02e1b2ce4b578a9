"""Which group prints +1.15 and -0.58, and the table of a group of eight, to four decimals and in closed form."""

from __future__ import annotations

import math

import pytest

from tests.lab_docs import rows_missing
from tether.lab import normalise
from tether.lab.normalise import KINDS, PRINTED, SHOWN, advantages, groups_that_print, pull, right_and_wrong

# Right answers of eight: right and wrong with the population's deviation, then with the sample's.
EIGHT = {
    1: (2.6458, -0.3780, 2.4749, -0.3536),
    2: (1.7321, -0.5774, 1.6202, -0.5401),
    3: (1.2910, -0.7746, 1.2076, -0.7246),
    4: (1.0000, -1.0000, 0.9354, -0.9354),
    5: (0.7746, -1.2910, 0.7246, -1.2076),
    6: (0.5774, -1.7321, 0.5401, -1.6202),
    7: (0.3780, -2.6458, 0.3536, -2.4749),
}


@pytest.mark.parametrize("right", EIGHT)
def test_the_table_for_eight(right: int) -> None:
    found = [v for kind in KINDS for v in right_and_wrong(8, right, kind)]
    assert tuple(round(v, 4) for v in found) == EIGHT[right]


@pytest.mark.parametrize("size", [2, 3, 5, 8, 16, 64])
@pytest.mark.parametrize("share", [0.1, 0.4, 0.7])
def test_values_are_the_closed_forms(size: int, share: float) -> None:
    k = min(max(1, round(share * size)), size - 1)
    population = (math.sqrt((size - k) / k), -math.sqrt(k / (size - k)))
    assert right_and_wrong(size, k, "population") == pytest.approx(population, rel=1e-12)
    scale = math.sqrt((size - 1) / size)
    assert right_and_wrong(size, k, "sample") == pytest.approx((population[0] * scale, population[1] * scale), rel=1e-12)


def test_only_one_right_of_three_prints_the_lectures_pair() -> None:
    found, tried = groups_that_print(PRINTED)
    assert [(m.size, m.right, m.std_kind) for m in found] == [(3, 1, "sample")]
    assert found[0].values == pytest.approx((2 / math.sqrt(3), -1 / math.sqrt(3)), rel=1e-14)
    assert tried == 2 * sum(size - 1 for size in range(2, 65))


def test_no_group_of_eight_prints_it() -> None:
    assert groups_that_print(PRINTED, range(8, 9)) == ([], 14)


def test_the_rows_shown_as_a_group_of_three() -> None:
    assert [round(a, 4) for a in advantages(SHOWN, "sample").tolist()] == [0.5774, -1.1547, 0.5774]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reward", [0.0, 1.0])
def test_a_group_that_agrees_says_nothing(kind: normalise.StdKind, reward: float) -> None:
    assert advantages((reward,) * 8, kind).tolist() == [0.0] * 8


@pytest.mark.parametrize("k", range(1, 8))
def test_the_pull_of_a_group_is_the_closed_form(k: int) -> None:
    assert pull(8, k, divided=False) == pytest.approx(2 * k * (8 - k) / 8, rel=1e-12)
    assert pull(8, k, divided=True) == pytest.approx(2 * math.sqrt(k * (8 - k) * 7 / 8), rel=1e-12)


def test_the_page_and_the_docs_say_what_was_measured() -> None:
    result = normalise.EXPERIMENT.run("both")
    assert rows_missing("normalise", result.tables) == []
    for k, row in EIGHT.items():
        assert list(result.tables[0].rows[k - 1]) == [str(k), *(f"{v:.4f}".replace("-", "−") for v in row)]
    assert result.tables[1].rows == [["1 right of 3", "sample", "+1.1547", "−0.5774"]]
    assert [(d.printed, d.true) for d in result.differences] == [("+1.15, −0.58", "+1.21, −0.72"), ("+1.15, −0.58", "+0.58, −1.15")]
    assert len(result.charts) == 3
