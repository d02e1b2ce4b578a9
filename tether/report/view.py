"""What the page is made of: a run as it was read, and the pieces the template knows how to show."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeGuard

from tether.report.charts import Chart, Point
from tether.run import Run

Tone = Literal["good", "plain", "watch", "bad"]


@dataclass(frozen=True)
class Finding:
    """One sentence for the top of the page; `remedy` says what to do about it."""

    tone: Tone
    text: str
    remedy: str = ""


@dataclass(frozen=True)
class Table:
    """`numeric` columns are set to the right. A folded table is opened with a click."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""
    caption: str = ""
    numeric: frozenset[int] = frozenset()
    folded: bool = False


@dataclass(frozen=True)
class Listing:
    """Lines under one heading, such as the notices of one kind; `total` counts those not shown too."""

    title: str
    lines: Sequence[str]
    total: int


@dataclass(frozen=True)
class Section:
    title: str
    text: Sequence[str] = ()
    charts: Sequence[Chart] = ()
    tables: Sequence[Table] = ()
    samples: Sequence[Mapping[str, Any]] = ()
    listings: Sequence[Listing] = ()


@dataclass(frozen=True)
class RunView:
    """A run, read once."""

    folder: Path
    command: str
    settings: dict[str, Any]
    record: dict[str, Any]
    metrics: list[dict[str, Any]]
    notices: list[dict[str, Any]]
    summary: dict[str, Any] | None
    pairs: list[dict[str, Any]] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def read(cls, folder: Path) -> RunView:
        run = Run.open(folder)
        return cls(
            folder,
            run.command,
            run.settings,
            {key: run.recorded(key) for key in RECORDED},
            run.metrics(),
            run.notices(),
            run.summary(),
            run.rows("pairs.jsonl"),
            run.rows("samples.jsonl"),
        )

    def series(self, name: str) -> list[Point]:
        """(step, value) of every row that has this metric as a number."""
        return [(row["step"], float(row[name])) for row in self.metrics if is_number(row.get(name))]

    def late(self, name: str) -> float | None:
        """Mean of the last fifth of the steps (at least 5, or all there are), where finite."""
        values = [v for _, v in self.series(name) if math.isfinite(v)]
        tail = values[-max(5, len(values) // 5) :]
        return sum(tail) / len(tail) if tail else None

    @property
    def n_late(self) -> int:
        """How many steps `late` looks back over."""
        return min(len(self.metrics), max(5, len(self.metrics) // 5))

    @property
    def held_out(self) -> dict[str, Any]:
        """What the run's end says of rows it has not seen, if it says anything."""
        found = (self.summary or {}).get("held_out")
        return found if isinstance(found, dict) else {}


RECORDED = ("version", "commit", "started", "machine", "packages", "precision", "data", "python")


def is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
