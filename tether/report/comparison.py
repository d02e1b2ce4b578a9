"""A folder whose comparison.json says what came of the runs in it, as one page: models side by side, then each run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tether.errors import UserError
from tether.files import json_lines
from tether.report.charts import Chart, Estimate, Series, interval_chart, line_chart
from tether.report.numbers import measured, seconds
from tether.report.page import Page, Part, run_part, samples_section
from tether.report.view import Finding, RunView, Section, Table
from tether.run import RECIPE

FILE = "comparison.json"


def page(folder: Path) -> Page:
    """The page of a folder whose comparison.json holds a title, measures before and after, findings, and the runs it came from.

    `runs`: {folder: what the page calls it}.
    Each measure: {"name", "unit", "before", "after", "gain"}, the last three as [value, low, high]. `practice`, where it is there: several
    models on the same measures, see `side_by_side`.
    """
    path = folder / FILE
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        samples = folder / "samples.jsonl"
        rows = list(json_lines(samples)) if samples.is_file() else []
        shown = told.get("samples_shown", 3)
        charts, table = measures(told["measures"])
        result = Section("Before and after", told.get("text", []), charts, [table])
        made = [s for s in (result, samples_section(rows, shown)) if s is not None]
        timing = [(f"Time: {name}", seconds(took)) for name, took in told.get("seconds", {}).items()]
        parts = [Part(told.get("part", "The result"), [*[tuple(f) for f in told.get("facts", [])], *timing], said(told), made)]
        if "practice" in told:
            parts.append(side_by_side(told["practice"], rows, shown))
        runs = [(RunView.read(folder / name), title) for name, title in told["runs"].items() if (folder / name / RECIPE).is_file()]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"not a comparison that a report can be made of ({error})", where=str(path)) from error
    return Page(told["title"], told.get("lead", ""), [*parts, *(run_part(view, title) for view, title in runs)])


def said(told: Mapping[str, Any]) -> list[Finding]:
    return [Finding(f["tone"], f["text"], f.get("remedy", "")) for f in told["findings"]]


def measures(rows: Sequence[Mapping[str, Any]]) -> tuple[list[Chart], Table]:
    """A chart of each measure, and all of them as one table."""
    charts, lines = [], []
    for row in rows:
        name, unit = row["name"], row["unit"]
        before, after, gain = row["before"], row["after"], row["gain"]
        change, low, high = (measured(x, sign=True) for x in gain)
        charts.append(
            interval_chart(
                [Estimate("before", before[0], before[1], before[2], 5), Estimate("after", after[0], after[1], after[2], 1)],
                title=name,
                x_label=unit,
                caption=f"Change {change}, 95 % interval {low} to {high}.",
            )
        )
        clear = "rose" if gain[1] > 0 else "fell" if gain[2] < 0 else "no clear change"
        lines.append([name, measured(before[0]), measured(after[0]), change, f"{low} to {high}", clear])
    header = ["measure", "before", "after", "change", "95 % interval of the change", ""]
    return charts, Table(header, lines, numeric=frozenset({1, 2, 3, 4}))


def side_by_side(told: Mapping[str, Any], samples: Sequence[Mapping[str, Any]], most: int) -> Part:
    """Several models on the same measures.

    {"title", "text", "findings", "sides": [name and colour of each], "measures": [{"name", "unit", "mark", "values": {side: [value, low, high]}}],
    "curves": [{"name", "unit", "lines": {side: [[step, value]]}}], "changes": {"header", "rows"}}.
    """
    sides = {s["name"]: s for s in told["sides"]}
    ends = [
        interval_chart(
            [Estimate(side, value[0], value[1], value[2], sides[side]["colour"]) for side, value in m["values"].items()],
            title=m["name"],
            x_label=m["unit"],
            caption=m.get("caption", ""),
        )
        for m in told["measures"]
    ]
    curves = [
        line_chart(
            [
                Series(side, [(x, y) for x, y in line], sides[side]["colour"], dashed=sides[side]["dashed"])
                for side, line in c["lines"].items()
            ],
            title=c["name"],
            x_label="step",
            y_label=c["unit"],
            caption=c.get("caption", ""),
        )
        for c in told["curves"]
    ]
    table = Table(told["changes"]["header"], told["changes"]["rows"], numeric=frozenset(range(1, len(told["changes"]["header"]))))
    sections = [
        Section("Where each model ended", told["text"], ends, [table]),
        Section("On the way there", ["Means over the answers that each step learnt from."], curves),
        samples_section(samples, most, title="Answers", sides=["before", *(s for s in sides if samples and s in samples[0])]),
    ]
    return Part(told["title"], [], said(told), [s for s in sections if s is not None])
