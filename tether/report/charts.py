"""Charts as inline SVG: lines over steps, estimates with intervals, points. Colours come from the page's style sheet by class."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape

from markupsafe import Markup

from tether.report.numbers import number

WIDTH, HEIGHT = 460, 240
CHARACTER = 6.8  # width of a tick label's character at the style sheet's 11.5 px, with room for the larger one on phones
NAME_CHARACTER = 8.4  # width of a character of a row's name at the 15 px of phones
MOST_POINTS = 400  # a longer line is averaged in buckets: more than a screen can show
Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """One line or cloud of points. `colour` 1-5 is an entry of the palette. Points that are not finite are gaps.

    `dots` marks each point on the line; with `joined` off there is no line between them.
    """

    label: str
    points: Sequence[Point]
    colour: int = 1
    dots: bool = False
    dashed: bool = False
    joined: bool = True


@dataclass(frozen=True)
class Estimate:
    """One row of an interval chart."""

    label: str
    value: float
    low: float
    high: float
    colour: int = 1


@dataclass(frozen=True)
class Band:
    """A stretch of the x axis that stands out, with a short word in it."""

    low: float
    high: float
    label: str = ""


@dataclass(frozen=True)
class Chart:
    """A figure of the page: the picture, what its colours mean, and its numbers as a table."""

    title: str
    svg: Markup
    caption: str = ""
    legend: list[tuple[str, int, str]] = field(default_factory=list)  # label, colour, "line" | "dashed" | "dot"
    header: list[str] = field(default_factory=list)
    rows: list[list[str]] = field(default_factory=list)
    wide: bool = False  # takes a row of the page for itself


def line_chart(
    series: Sequence[Series],
    *,
    title: str,
    y_label: str,
    x_label: str = "optimiser step",
    caption: str = "",
    limits: tuple[float | None, float | None] = (None, None),
    mark: float | None = None,
    mark_label: str = "",
    with_zero: bool = False,
    wide: bool = False,
    whole_x: bool = True,
    smooth: bool = True,
    bands: Sequence[Band] = (),
) -> Chart:
    """Lines over steps. Noisy lines show each step thin and a running mean thick (unless not `smooth`); `mark` is a level to compare with.

    `whole_x`: ticks of the x axis at whole numbers only, as steps are. `bands` are shaded behind the lines.
    """
    xs, ys = _finite(series)
    x_low, x_high = (min(xs), max(xs)) if xs else (0.0, 1.0)
    y_low, y_high = _span([*ys, *([] if mark is None else [mark]), *([0.0] if with_zero else [])], limits)
    frame = Frame((x_low, x_high if x_high > x_low else x_low + 1), (y_low, y_high), x_label, y_label, whole_x=whole_x)
    notes: list[str] = []
    body = [frame.band(b) for b in bands]
    if mark is not None:
        body.append(frame.level(mark, mark_label))
    smoothed_over = 1
    for s in series:
        points = [p for p in s.points if math.isfinite(p[1])]
        lost = len(s.points) - len(points)
        if lost:
            notes.append(f"{s.label}: {lost} of {len(s.points)} values are not finite and leave gaps.")
        if s.dots or len(points) == 1:
            body += [frame.dot(p, s.colour, f"{s.label}, {x_label} {number(p[0])}: {number(p[1])}") for p in points]
        if s.dots and (len(points) < 2 or not s.joined):
            continue
        window = _window(len(points)) if smooth else 1
        noisy = window > 1 and not s.dots
        body += [frame.path(run, s.colour, "thin" if noisy else "dashed" if s.dashed else "") for run in _runs(s.points)]
        if noisy:
            smoothed_over = max(smoothed_over, window)
            body.append(frame.path(thin_out(running_mean(points, window)), s.colour, "dashed" if s.dashed else ""))
    if smoothed_over > 1:
        notes.insert(0, f"Thin: every step. Thick: mean of {smoothed_over} steps.")
    legend = [(s.label, s.colour, "dot" if s.dots else "dashed" if s.dashed else "line") for s in series]
    return Chart(
        title,
        frame.svg(body, _spoken(title, series)),
        " ".join([caption, *notes]).strip(),
        legend if len(series) > 1 else [],
        *_series_table(series, x_label),
        wide=wide,
    )


def interval_chart(
    estimates: Sequence[Estimate],
    *,
    title: str,
    x_label: str,
    caption: str = "",
    mark: float | None = None,
    mark_label: str = "",
    limits: tuple[float | None, float | None] = (None, None),
) -> Chart:
    """Estimates as dots with their intervals as bars, one below the other."""
    ends = [x for e in estimates for x in (e.value, e.low, e.high) if math.isfinite(x)]
    low, high = _span([*ends, *([] if mark is None else [mark])], limits)
    label_width = 14 + NAME_CHARACTER * max(len(e.label) for e in estimates)
    top = 18 if mark is not None else 6
    height = top + 34 * len(estimates) + 44
    frame = Frame((low, high), (0, 1), x_label, "", left=label_width, top=top, height=height, y_axis=False)
    body = []
    if mark is not None:
        body.append(frame.upright(mark, mark_label))
    for i, e in enumerate(estimates):
        y = top + 34 * i + 17
        a, b, c = (frame.x(max(low, min(high, v))) for v in (e.low, e.high, e.value))
        spoken = f"{e.label}: {number(e.value)}, interval {number(e.low)} to {number(e.high)}"
        body.append(f'<text class="label" x="{frame.left - 8:.1f}" y="{y + 4:.1f}" text-anchor="end">{escape(e.label)}</text>')
        body.append(
            f'<g class="s{e.colour}"><title>{escape(spoken)}</title><line class="bar" x1="{a:.1f}" y1="{y}" x2="{b:.1f}" y2="{y}"/>'
        )
        body.append(f'<circle class="dot" cx="{c:.1f}" cy="{y}" r="5.5"/></g>')
    spoken = f"{title}. " + "; ".join(f"{e.label} {number(e.value)}, {number(e.low)} to {number(e.high)}" for e in estimates)
    rows = [[e.label, number(e.value), number(e.low), number(e.high)] for e in estimates]
    return Chart(title, frame.svg(body, spoken), caption, [], ["", x_label, "interval from", "to"], rows)


def scatter_chart(
    points: Sequence[Point], *, title: str, x_label: str, y_label: str, caption: str = "", limits_x: tuple[float | None, float | None]
) -> Chart:
    """Points, with the zero line where zero is in view."""
    xs, ys = [p[0] for p in points], [p[1] for p in points]
    frame = Frame(_span(xs, limits_x), _span([*ys, 0.0], (None, None)), x_label, y_label)
    body = [f'<circle class="s1 cloud" cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" r="3.2"/>' for x, y in points]
    rows = [[number(x), number(y)] for x, y in every(points, 12)]
    return Chart(title, frame.svg(body, f"{title}: {len(points)} points"), caption, [], [x_label, y_label], rows)


def calibration_chart(bins: Sequence[dict[str, float]], *, title: str, caption: str = "", low: float = 0.5) -> Chart:
    """Predicted probability against frequency with intervals; on the diagonal they agree. Larger dots hold more pairs."""
    frame = Frame(
        (low, 1.0), (min(0.0 if low == 0 else 0.25, *(b["frequency_low"] for b in bins)), 1.0), "predicted", "how often it came true"
    )
    most = max(b["n"] for b in bins)
    body = [f'<line class="mark" x1="{frame.x(low):.1f}" y1="{frame.y(low):.1f}" x2="{frame.x(1):.1f}" y2="{frame.y(1):.1f}"/>']
    for b in bins:
        x, r = frame.x(b["predicted"]), 3.5 + 5 * math.sqrt(b["n"] / most)
        spoken = f"{int(b['n'])} pairs: predicted {number(b['predicted'])}, came true {number(b['frequency'])}"
        body.append(f'<g class="s1"><title>{escape(spoken)}</title>')
        body.append(
            f'<line class="whisker" x1="{x:.1f}" y1="{frame.y(b["frequency_low"]):.1f}" x2="{x:.1f}" y2="{frame.y(b["frequency_high"]):.1f}"/>'
        )
        body.append(f'<circle class="dot" cx="{x:.1f}" cy="{frame.y(b["frequency"]):.1f}" r="{r:.1f}"/></g>')
    header = ["predicted", "came true", "interval from", "to", "pairs"]
    rows = [[*(number(b[k]) for k in ("predicted", "frequency", "frequency_low", "frequency_high")), str(int(b["n"]))] for b in bins]
    legend = [("pairs of this confidence, 95 % interval", 1, "dot"), ("perfectly calibrated", 0, "dashed")]
    return Chart(title, frame.svg(body, title), caption, legend, header, rows)


class Frame:
    """The axes of one picture: where a value stands, and the ticks, labels and grid around it."""

    def __init__(
        self,
        x_range: Point,
        y_range: Point,
        x_label: str,
        y_label: str,
        *,
        left: float | None = None,
        top: float = 26,
        height: float = HEIGHT,
        whole_x: bool = False,
        y_axis: bool = True,
    ) -> None:
        self.x_range, self.y_range, self.x_label, self.y_label = x_range, y_range, x_label, y_label
        self.height, self.top, self.y_axis = height, top, y_axis
        self.x_ticks = ticks(*x_range, whole=whole_x)
        self.y_ticks = ticks(*y_range) if y_axis else []
        y_names = _names(self.y_ticks)
        self.left = left if left is not None else 12 + CHARACTER * max((len(n) for n in y_names), default=0)
        self.right, self.bottom = WIDTH - 14.0, height - 40.0

    def x(self, value: float) -> float:
        low, high = self.x_range
        return self.left + (value - low) / (high - low) * (self.right - self.left)

    def y(self, value: float) -> float:
        low, high = self.y_range
        return self.bottom - (value - low) / (high - low) * (self.bottom - self.top)

    def path(self, points: Sequence[Point], colour: int, kind: str) -> str:
        steps = " ".join(f"{self.x(a):.1f},{self.y(b):.1f}" for a, b in thin_out(points))
        return f'<polyline class="s{colour} line {kind}" points="{steps}"/>'

    def dot(self, point: Point, colour: int, spoken: str) -> str:
        where = f'cx="{self.x(point[0]):.1f}" cy="{self.y(point[1]):.1f}"'
        return f'<circle class="s{colour} dot" {where} r="3.5"><title>{escape(spoken)}</title></circle>'

    def level(self, value: float, label: str) -> str:
        y = self.y(value)
        text = f'<text class="tick" x="{self.right:.1f}" y="{y - 5:.1f}" text-anchor="end">{escape(label)}</text>' if label else ""
        return f'<line class="mark" x1="{self.left:.1f}" y1="{y:.1f}" x2="{self.right:.1f}" y2="{y:.1f}"/>{text}'

    def upright(self, value: float, label: str) -> str:
        x = self.x(value)
        side = "start" if x < (self.left + self.right) / 2 else "end"
        text = f'<text class="tick" x="{x + (4 if side == "start" else -4):.1f}" y="12" text-anchor="{side}">{escape(label)}</text>'
        return f'<line class="mark" x1="{x:.1f}" y1="3" x2="{x:.1f}" y2="{self.bottom:.1f}"/>{text}'

    def band(self, band: Band) -> str:
        low, high = (self.x(max(self.x_range[0], min(self.x_range[1], v))) for v in (band.low, band.high))
        rect = f'<rect class="band" x="{low:.1f}" y="{self.top:.1f}" width="{high - low:.1f}" height="{self.bottom - self.top:.1f}"/>'
        text = f'<text class="tick" x="{(low + high) / 2:.1f}" y="{self.top + 14:.1f}" text-anchor="middle">{escape(band.label)}</text>'
        return rect + (text if band.label else "")

    def svg(self, body: Sequence[str], spoken: str) -> Markup:
        out = [f'<svg viewBox="0 0 {WIDTH} {self.height:.0f}" role="img" aria-label="{escape(spoken)}">']
        for tick, name in zip(self.y_ticks, _names(self.y_ticks), strict=True):
            y = self.y(tick)
            kind = "zero" if tick == 0 and self.y_range[0] < 0 else "grid"
            out.append(f'<line class="{kind}" x1="{self.left:.1f}" y1="{y:.1f}" x2="{self.right:.1f}" y2="{y:.1f}"/>')
            out.append(f'<text class="tick" x="{self.left - 6:.1f}" y="{y + 4:.1f}" text-anchor="end">{name}</text>')
        for tick, name in zip(self.x_ticks, _names(self.x_ticks), strict=True):
            x = self.x(tick)
            side = "end" if x > self.right - 12 and len(name) > 3 else "middle"
            if not self.y_axis:
                out.append(f'<line class="grid" x1="{x:.1f}" y1="{self.top:.1f}" x2="{x:.1f}" y2="{self.bottom:.1f}"/>')
            out.append(f'<text class="tick" x="{x:.1f}" y="{self.bottom + 16:.1f}" text-anchor="{side}">{name}</text>')
        out.append(f'<line class="axis" x1="{self.left:.1f}" y1="{self.bottom:.1f}" x2="{self.right:.1f}" y2="{self.bottom:.1f}"/>')
        middle = (self.left + self.right) / 2
        out.append(f'<text class="label" x="{middle:.1f}" y="{self.height - 5:.1f}" text-anchor="middle">{escape(self.x_label)}</text>')
        if self.y_label:
            out.append(f'<text class="label" x="2" y="12">{escape(self.y_label)}</text>')
        return Markup("\n".join([*out, *body, "</svg>"]))


# Numbers behind the pictures ------------------------------------------------------------------------------------------------


def ticks(low: float, high: float, *, most: int = 5, whole: bool = False) -> list[float]:
    """Round values inside [low, high], at most `most` + 1 of them.

    >>> ticks(0, 1), ticks(1, 50, whole=True), ticks(-0.3, 0.9)
    ([0.0, 0.2, 0.4, 0.6, 0.8, 1.0], [10.0, 20.0, 30.0, 40.0, 50.0], [-0.25, 0.0, 0.25, 0.5, 0.75])
    """
    rough = (high - low) / most
    scale = 10.0 ** math.floor(math.log10(rough))
    step = next(scale * m for m in (1, 2, 2.5, 5, 10) if scale * m >= rough * 0.999)
    if whole:
        step = max(1.0, float(math.ceil(step)))
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) + 0.0 for i in range(first, math.floor(high / step + 1e-9) + 1)]


def running_mean(points: Sequence[Point], window: int) -> list[Point]:
    """Mean of up to `window` neighbours around each point; fewer at the ends, where there are fewer.

    >>> running_mean([(1, 1.0), (2, 4.0), (3, 1.0)], 3)
    [(1, 2.5), (2, 2.0), (3, 2.5)]
    """
    half, sums = window // 2, [0.0]
    for _, y in points:
        sums.append(sums[-1] + y)
    out = []
    for i, (x, _) in enumerate(points):
        a, b = max(0, i - half), min(len(points), i + half + 1)
        out.append((x, (sums[b] - sums[a]) / (b - a)))
    return out


def thin_out(points: Sequence[Point], most: int = MOST_POINTS) -> list[Point]:
    """Means of equal buckets when there are more points than can be seen; the ends stay."""
    if len(points) <= most:
        return list(points)
    size = math.ceil(len(points) / most)
    buckets = [points[i : i + size] for i in range(0, len(points), size)]
    means = [(sum(p[0] for p in b) / len(b), sum(p[1] for p in b) / len(b)) for b in buckets]
    return [points[0], *means[1:-1], points[-1]]


def every(rows: Sequence[Point], most: int) -> list[Point]:
    """At most `most` rows, evenly spread, the last one among them."""
    if len(rows) <= most:
        return list(rows)
    return [rows[round(i * (len(rows) - 1) / (most - 1))] for i in range(most)]


def _window(n: int) -> int:
    return 1 if n < 25 else 2 * max(2, n // 30) + 1


def _runs(points: Sequence[Point]) -> list[list[Point]]:
    """Stretches without a gap."""
    out: list[list[Point]] = [[]]
    for point in points:
        if math.isfinite(point[1]):
            out[-1].append(point)
        elif out[-1]:
            out.append([])
    return [run for run in out if len(run) > 1]


def _finite(series: Sequence[Series]) -> tuple[list[float], list[float]]:
    points = [p for s in series for p in s.points if math.isfinite(p[1])]
    return [p[0] for p in points], [p[1] for p in points]


def _span(values: Sequence[float], limits: tuple[float | None, float | None]) -> Point:
    """The axis: all values with a little air, or the given limits."""
    low = min(values, default=0.0) if limits[0] is None else limits[0]
    high = max(values, default=1.0) if limits[1] is None else limits[1]
    if high <= low:
        air = abs(low) * 0.1 or 1.0
        low, high = (low - air if limits[0] is None else low), high + air
    air = (high - low) * 0.05
    return (low - air if limits[0] is None else low), (high + air if limits[1] is None else high)


def _names(values: Sequence[float]) -> list[str]:
    """Tick labels, all with the same number of decimals."""
    if not values:
        return []
    largest = max(abs(v) for v in values)
    if largest and (largest < 1e-3 or largest >= 1e6):
        return [number(v) for v in values]
    step = abs(values[1] - values[0]) if len(values) > 1 else largest or 1.0
    decimals = next((d for d in range(8) if math.isclose(round(step, d), step, rel_tol=1e-6)), 8)
    return [f"{v:,.{decimals}f}".replace("-", "−") for v in values]


def _spoken(title: str, series: Sequence[Series]) -> str:
    parts = []
    for s in series:
        finite = [p for p in s.points if math.isfinite(p[1])]
        if finite:
            parts.append(f"{s.label} from {number(finite[0][1])} to {number(finite[-1][1])}")
    return f"{title}: " + "; ".join(parts)


def _series_table(series: Sequence[Series], x_label: str) -> tuple[list[str], list[list[str]]]:
    by_x: dict[float, list[str]] = {}
    for i, s in enumerate(series):
        for x, y in s.points:
            by_x.setdefault(x, ["–"] * len(series))[i] = number(y)
    wanted: Callable[[float], bool] = {x for x, _ in every([(x, 0.0) for x in sorted(by_x)], 14)}.__contains__
    return [x_label, *(s.label for s in series)], [[number(x), *by_x[x]] for x in sorted(by_x) if wanted(x)]
