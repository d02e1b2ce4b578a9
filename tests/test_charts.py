"""The arithmetic of the charts: ticks, where a value stands, running means, thinning."""

from __future__ import annotations

import itertools
import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tether.report.bars import Bars, bar_chart
from tether.report.charts import (
    Band,
    Estimate,
    Frame,
    Series,
    calibration_chart,
    interval_chart,
    line_chart,
    running_mean,
    scatter_chart,
    thin_out,
    ticks,
)

numbers = st.floats(-1e6, 1e6, allow_nan=False).filter(lambda x: x == 0 or abs(x) > 1e-6)


@given(numbers, st.floats(1e-6, 1e6))
def test_ticks_lie_inside_and_are_evenly_spaced(low: float, width: float) -> None:
    found = ticks(low, low + width)
    assert 1 <= len(found) <= 7
    slack = 1e-6 * width + 1e-9
    assert all(low - slack <= t <= low + width + slack for t in found)
    gaps = [b - a for a, b in itertools.pairwise(found)]
    assert all(math.isclose(g, gaps[0], rel_tol=1e-6, abs_tol=1e-9) for g in gaps)


def test_a_value_stands_where_its_share_of_the_axis_says() -> None:
    frame = Frame((0, 10), (0, 4), "x", "y", left=60)
    assert frame.x(0) == 60
    assert frame.x(10) == frame.right
    assert frame.x(5) == (60 + frame.right) / 2
    assert frame.y(0) == frame.bottom
    assert frame.y(4) == frame.top
    assert frame.y(1) == frame.bottom - (frame.bottom - frame.top) / 4


def test_line_goes_through_its_points() -> None:
    chart = line_chart([Series("a", [(1, 0.0), (2, 1.0), (3, 0.0)])], title="t", y_label="u", limits=(0.0, 1.0))
    points = re.search(r'<polyline class="s1 line " points="([^"]+)"', chart.svg)
    assert points is not None
    (x1, y1), (x2, y2), (x3, y3) = [tuple(map(float, p.split(","))) for p in points.group(1).split()]
    assert math.isclose(x2 - x1, x3 - x2, abs_tol=0.11)  # written with one decimal
    assert y1 == y3 > y2  # down the page is down the scale


def test_points_that_are_not_joined_have_no_line() -> None:
    points = [(0.0, 1.0), (1.0, 2.0), (2.0, 0.0)]
    joined, alone = (line_chart([Series("a", points, dots=True, joined=j)], title="t", y_label="u").svg for j in (True, False))
    assert joined.count("<circle") == alone.count("<circle") == 3
    assert joined.count("<polyline") == 1
    assert "<polyline" not in alone


def test_constant_lines_and_single_points_are_drawn() -> None:
    for points in ([(1, 0.0)], [(1, 3.0), (2, 3.0)], [(5, -1e-9)], []):
        chart = line_chart([Series("a", points)], title="t", y_label="u")
        assert "nan" not in chart.svg
        assert "inf" not in chart.svg


def test_running_mean_keeps_a_straight_line_inside_and_the_total_level() -> None:
    line = [(float(i), 2.0 * i) for i in range(30)]
    assert running_mean(line, 5)[2:-2] == line[2:-2]
    flat = [(float(i), 7.0) for i in range(30)]
    assert running_mean(flat, 5) == flat


def test_thinning_keeps_the_ends_and_the_level() -> None:
    points = [(float(i), math.sin(i / 300)) for i in range(5000)]
    thin = thin_out(points)
    assert len(thin) <= 400
    assert thin[0] == points[0]
    assert thin[-1] == points[-1]
    assert max(y for _, y in thin) > 0.99


def test_interval_chart_puts_low_value_and_high_in_order() -> None:
    chart = interval_chart([Estimate("a", 0.5, 0.4, 0.7)], title="t", x_label="share", limits=(0.0, 1.0), mark=0.5, mark_label="guessing")
    bar = re.search(r'class="bar" x1="([\d.]+)" y1="\S+" x2="([\d.]+)"', chart.svg)
    dot = re.search(r'class="dot" cx="([\d.]+)"', chart.svg)
    assert bar is not None
    assert dot is not None
    assert float(bar.group(1)) < float(dot.group(1)) < float(bar.group(2))
    assert chart.rows == [["a", "0.5", "0.4", "0.7"]]


def test_unbounded_interval_ends_at_the_edge_of_the_chart() -> None:
    chart = interval_chart([Estimate("one value", 1.0, -math.inf, math.inf)], title="t", x_label="u")
    assert "inf" not in re.sub(r"<title>.*?</title>|aria-label=\"[^\"]*\"", "", chart.svg)


def test_a_band_covers_its_stretch_and_ends_with_the_axis() -> None:
    chart = line_chart(
        [Series("a", [(0.0, 0.0), (2.0, 1.0)])], title="t", y_label="u", x_label="x", whole_x=False, bands=[Band(1.0, math.inf, "flat")]
    )
    band = re.search(r'class="band" x="([\d.]+)" y="\S+" width="([\d.]+)"', chart.svg)
    line = re.search(r'points="([\d.]+),\S+ ([\d.]+),', chart.svg)
    assert band is not None
    assert line is not None
    left, right = float(line.group(1)), float(line.group(2))
    assert math.isclose(float(band.group(1)), (left + right) / 2, abs_tol=0.11)
    assert math.isclose(float(band.group(1)) + float(band.group(2)), right, abs_tol=0.11)


def test_bars_start_at_zero_and_are_as_long_as_their_values() -> None:
    chart = bar_chart([Bars("a", [2.0, -1.0]), Bars("b", [4.0, math.inf])], ["now", "then"], title="t", x_label="u")
    bars = [tuple(map(float, b)) for b in re.findall(r'class="fill" x="([\d.]+)" y="[\d.]+" width="([\d.]+)"', chart.svg)]
    (x2, w2), (x1, w1), (x4, w4), (_, none) = bars
    assert math.isclose(w2, 2 * w1, abs_tol=0.2)
    assert math.isclose(w4, 2 * w2, abs_tol=0.2)
    assert x2 == x4
    assert math.isclose(x1 + w1, x2, abs_tol=0.11)  # to the left of zero
    assert none == 0.0
    assert chart.rows == [["a", "2", "−1"], ["b", "4", "infinite"]]
    assert [name for name, _, _ in chart.legend] == ["now", "then"]


def test_every_bar_has_a_series() -> None:
    with pytest.raises(ValueError, match="each name needs 2 values"):
        bar_chart([Bars("a", [1.0])], ["now", "then"], title="t", x_label="u")


@pytest.mark.parametrize("value", [0.0, -3.0, 1e9, math.nan])
def test_any_bar_is_drawn_inside_its_picture(value: float) -> None:
    chart = bar_chart([Bars("a", [value])], ["now"], title="t", x_label="u", mark=1.0, mark_label="one")
    inside = re.sub(r"<title>.*?</title>|aria-label=\"[^\"]*\"|<text.*?</text>", "", chart.svg)
    assert "nan" not in inside
    assert all(0 <= float(x) <= 460 for x in re.findall(r'class="fill" x="([\d.-]+)"', inside))


def test_labels_are_escaped_in_the_picture() -> None:
    evil = '<b>&"'
    charts = [
        line_chart([Series(evil, [(1, 1.0)])], title=evil, y_label=evil, x_label=evil, mark=0.0, mark_label=evil, bands=[Band(0, 1, evil)]),
        bar_chart([Bars(evil, [1.0, 2.0])], [evil, evil], title=evil, x_label=evil, mark=0.5, mark_label=evil),
        interval_chart([Estimate(evil, 1, 0, 2)], title=evil, x_label=evil, mark=0.5, mark_label=evil),
        scatter_chart([(0.0, 1.0), (1.0, 2.0)], title=evil, x_label=evil, y_label=evil, limits_x=(0.0, None)),
        calibration_chart(
            [{"low": 0.5, "high": 1.0, "n": 3, "predicted": 0.7, "frequency": 0.6, "frequency_low": 0.3, "frequency_high": 0.9}], title=evil
        ),
    ]
    assert all("<b>" not in chart.svg for chart in charts)
