"""Bars from zero, lying: a few names, one bar or several for each. Colours as in `charts.py`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from tether.report.charts import NAME_CHARACTER, Chart, Frame
from tether.report.numbers import number

THICK, BETWEEN = 15, 11  # height of a bar, space between two names


@dataclass(frozen=True)
class Bars:
    """One name and its values, one for each of the chart's series. A value that is not finite has no bar and says so."""

    label: str
    values: Sequence[float]


def bar_chart(
    bars: Sequence[Bars],
    series: Sequence[str],
    *,
    title: str,
    x_label: str,
    caption: str = "",
    colours: Sequence[int] = (1, 2, 3, 4, 5),
    mark: float | None = None,
    mark_label: str = "",
    text: Callable[[float], str] = number,
    wide: bool = False,
) -> Chart:
    """Bars from zero to their values, the value written at the end of each. `series` are the names of the colours, `text` writes a value."""
    if any(len(b.values) != len(series) for b in bars):
        raise ValueError(f"each name needs {len(series)} values, one for each of {', '.join(series)}")
    left = 14 + NAME_CHARACTER * max(len(b.label) for b in bars)
    top = 18 if mark is not None else 6
    step = THICK * len(series) + BETWEEN
    frame = Frame(_limits(bars, mark), (0, 1), x_label, "", left=left, top=top, height=top + step * len(bars) + 44, y_axis=False)
    body = [] if mark is None else [frame.upright(mark, mark_label)]
    zero = frame.x(0.0)
    body.append(f'<line class="axis" x1="{zero:.1f}" y1="{top:.1f}" x2="{zero:.1f}" y2="{frame.bottom:.1f}"/>')
    for i, b in enumerate(bars):
        y = top + step * i + BETWEEN / 2
        middle = y + THICK * len(series) / 2 + 4
        body.append(f'<text class="label" x="{left - 8:.1f}" y="{middle:.1f}" text-anchor="end">{escape(b.label)}</text>')
        for k, value in enumerate(b.values):
            spoken = f"{b.label}, {series[k]}: {text(value)}" if len(series) > 1 else f"{b.label}: {text(value)}"
            body.append(_bar(frame, value, y + THICK * k, colours[k % len(colours)], spoken, text(value)))
    spoken = f"{title}. " + "; ".join(f"{b.label} {', '.join(text(v) for v in b.values)}" for b in bars)
    legend = [(name, colours[k % len(colours)], "dot") for k, name in enumerate(series)] if len(series) > 1 else []
    rows = [[b.label, *(text(v) for v in b.values)] for b in bars]
    return Chart(title, frame.svg(body, spoken), caption, legend, ["", *series], rows, wide)


def _bar(frame: Frame, value: float, y: float, colour: int, spoken: str, written: str) -> str:
    zero, end = frame.x(0.0), frame.x(value if math.isfinite(value) else 0.0)
    low, high = min(zero, end), max(zero, end)
    side, x = ("end", low - 4) if end < zero else ("start", high + 4)
    rect = f'<rect class="fill" x="{low:.1f}" y="{y + 1:.1f}" width="{high - low:.1f}" height="{THICK - 2}" rx="2"/>'
    name = f'<text class="tick" x="{x:.1f}" y="{y + THICK - 3.5:.1f}" text-anchor="{side}">{escape(written)}</text>'
    return f'<g class="s{colour}"><title>{escape(spoken)}</title>{rect}{name}</g>'


def _limits(bars: Sequence[Bars], mark: float | None) -> tuple[float, float]:
    """Zero and every value, with room beyond the longest bars for what is written there."""
    values = [v for b in bars for v in b.values if math.isfinite(v)]
    low, high = min([0.0, *values]), max([0.0, *values])
    room = 0.2 * (high - low) or 1.0
    low, high = (low - room if low < 0 else low), (high + room if high > 0 or low == 0 else high)
    return (low, high) if mark is None else (min(low, mark), max(high, mark))
