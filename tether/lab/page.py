"""Results as one offline page: a part for each experiment, in the style of `tether report`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tether import atomic
from tether.lab.experiment import Difference, Experiment, Result, Variant
from tether.report.html import render
from tether.report.page import Page, Part
from tether.report.view import Finding, Section, Table

LEAD = "Small worlds in which the methods can be worked out by hand, run with the losses and estimators that train real models."
FOOT = "Made by tether lab; every number on this page was computed while it was made."
# What a page leaves out that was asked for one side alone.
ONLY: dict[Variant, str] = {
    "both": "",
    "printed": " Only as printed: the arithmetic of the documents, without the objective's gradient beside it.",
    "true": " Only the gradient of the objective, without the printed arithmetic beside it.",
}


def write(path: Path, done: Sequence[tuple[Experiment, Result]], variant: Variant = "both") -> None:
    """One page for one experiment or for many; with several, a table of contents."""
    title = done[0][0].title if len(done) == 1 else "The lab"
    lead = done[0][0].question if len(done) == 1 else LEAD
    atomic.write_file(path, render(Page(title, lead + ONLY[variant], [part(e, r) for e, r in done], "Tether lab", FOOT)))


def part(experiment: Experiment, result: Result) -> Part:
    first = Section("In numbers", tables=tables(result))
    return Part(experiment.title, [], [Finding("plain", sentence) for sentence in result.see], [first, *result.sections])


def tables(result: Result) -> list[Table]:
    """All of them, that of the differences last."""
    return [*result.tables, *([difference_table(result.differences)] if result.differences else [])]


def difference_table(differences: Sequence[Difference]) -> Table:
    return Table(
        ["", "as printed", "by the mathematics", "why"],
        [[d.what, d.printed, d.true, d.why] for d in differences],
        "Where print and mathematics part",
        numeric=frozenset({1, 2}),
    )
