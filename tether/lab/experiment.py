"""What an experiment is, and what it leaves: tables, pictures, the differences between print and mathematics, two sentences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from tether.report.charts import Chart
from tether.report.view import Section, Table

# "printed": the arithmetic as the seed documents print it; "true": the gradient of the objective they write down.
Variant = Literal["both", "printed", "true"]


@dataclass(frozen=True)
class Difference:
    """One place where the printed arithmetic and the mathematics part, with both numbers."""

    what: str  # "clip firings of 160"
    printed: str  # "68"
    true: str  # "0"
    why: str  # one sentence


@dataclass(frozen=True)
class Result:
    """What one run of an experiment found. Everything in it is computed by the run."""

    see: tuple[str, str]  # two sentences: what to look at, what it means
    tables: Sequence[Table]  # printed on the terminal and shown on the page
    sections: Sequence[Section] = ()  # further parts of the page: pictures with their text
    differences: Sequence[Difference] = field(default=())

    @property
    def charts(self) -> list[Chart]:
        return [chart for section in self.sections for chart in section.charts]


@dataclass(frozen=True)
class Experiment:
    """`run` takes a few seconds at most on one core, draws from its own seeded generator, and trains with Tether's own losses,
    advantages and estimators."""

    name: str
    title: str
    question: str  # one line for the list
    run: Callable[[Variant], Result]
    has_variants: bool = False  # whether print and mathematics differ: `--as-printed` and `--true-gradient` choose
