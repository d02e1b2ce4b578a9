"""`tether agreement`: how far the votes of a desk can be trusted, and a judge held against them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tether.errors import UserError
from tether.progress import say

if TYPE_CHECKING:
    from rich.console import Console

    from tether.collect.calibration import Calibration
    from tether.collect.quality import Quality
    from tether.report.view import Finding, Table


def agreement(
    desk: Annotated[Path, typer.Argument(metavar="DESK", help="The folder of a desk.")],
    judge: Annotated[
        str | None, typer.Option(help="A judge to hold against the people: a reward model, or whatever `tether compare --judge` takes.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Every figure as JSON.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write it as one HTML page.")] = None,
    worst: Annotated[int, typer.Option(help="How many pairs to list on which judge and people differ most.")] = 10,
    margin: Annotated[float, typer.Option(help="Scores of the judge within this of each other are a tie.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Decides the bootstraps and the sides that the judge sees.")] = 0,
    precision: Annotated[str, typer.Option(help="Of a reward model: auto, bf16 or fp32.")] = "auto",
) -> None:
    """Agreement, self-consistency, favoured sides, hasty votes and model strengths of a desk; with --judge its accuracy and calibration."""
    from tether.collect.desk import Desk
    from tether.collect.quality import assess

    if worst < 0:
        raise UserError(f"must be 0 or more, got {worst}", where="--worst")
    opened = Desk.open(desk)
    items, votes = opened.items(), opened.votes()
    opened.close()
    if not votes:
        raise UserError("nobody has voted yet", where=str(desk), remedy="Collect votes with `tether collect`, or import some.")
    quality = assess(items, votes, seed=seed)
    measured: Calibration | None = None
    if judge is not None:
        from tether.best_of import make_scorer
        from tether.collect.calibration import calibrate, columns

        measured = calibrate(make_scorer(judge, columns(items), margin=margin, precision=precision), items, votes, seed=seed)
    if out is not None:
        from tether import atomic
        from tether.collect.quality_page import quality_page
        from tether.report.html import render

        atomic.write_file(out, render(quality_page(quality, measured, desk=str(desk), worst=worst)))
        say(f"written: {out}")
    if as_json:
        told = quality.as_dict() | ({} if measured is None else {"judge": measured.as_dict(worst)})
        typer.echo(json.dumps(told, indent=2, ensure_ascii=False))
    else:
        from rich.console import Console

        show(quality, measured, Console(soft_wrap=False), worst)
    if measured is not None and not measured.judged:
        raise UserError(f"the judge decided none of {len(measured.cases)} pairs", where=f"judge {judge}", remedy="The reasons are above.")


def show(quality: Quality, measured: Calibration | None, console: Console, worst: int = 10) -> None:
    """Tables and what they mean, for people at a terminal."""
    from tether.collect.quality_findings import findings, judge_findings
    from tether.collect.quality_page import agreement_table, judge_tables, models_table, people_tables

    _tell(findings(quality), console)
    tables = [agreement_table(quality), *people_tables(quality), *([models_table(quality)] if quality.models else [])]
    for table in tables:
        _print(table, console)
    if measured is not None:
        console.rule(f"judge {measured.judge}", align="left")
        _tell(judge_findings(measured), console)
        for table in judge_tables(measured, worst):
            _print(table, console)


MARKS = {"good": "ok", "plain": "note", "watch": "watch", "bad": "fault"}


def _tell(found: list[Finding], console: Console) -> None:
    from rich.text import Text

    for f in found:
        console.print(Text(f"{MARKS[f.tone]}: {f.text}" + (f" {f.remedy}" if f.remedy else "")))
    console.print()


def _print(table: Table, console: Console) -> None:
    from rich.table import Table as RichTable
    from rich.text import Text

    made = RichTable(title=Text(table.title) if table.title else None, title_justify="left", box=None, pad_edge=False)
    for i, name in enumerate(table.header):
        made.add_column(Text(name), justify="right" if i in table.numeric else "left", overflow="fold")
    for row in table.rows:
        made.add_row(*(Text(cell) for cell in row))
    console.print(made)
    if table.caption:
        console.print(Text(table.caption))
    console.print()
