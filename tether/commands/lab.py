"""`tether lab`: small worlds that show what each method does, exactly."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tether.errors import UserError
from tether.progress import say

if TYPE_CHECKING:
    from rich.console import Console

    from tether.lab.experiment import Experiment, Result, Variant
    from tether.report.view import Table


def lab(
    names: Annotated[list[str] | None, typer.Argument(metavar="[NAME]...", help="Experiments to run, or all; none lists them.")] = None,
    as_printed: Annotated[bool, typer.Option("--as-printed", help="Only the arithmetic as the documents print it.")] = False,
    true_gradient: Annotated[bool, typer.Option("--true-gradient", help="Only the gradient of the objective as written.")] = False,
    out: Annotated[Path, typer.Option(help="The folder that pages are written to.")] = Path("lab"),
) -> None:
    """Run small experiments in seconds: a table, two sentences on what to see, and a page with the pictures."""
    from rich.console import Console

    from tether.lab.catalogue import NAMES, experiments

    console = Console(highlight=False)
    if not names:
        _list(console, NAMES)
        return
    if as_printed and true_gradient:
        raise UserError("--as-printed and --true-gradient exclude each other", remedy="Leave both out to see both.")
    everything = names == ["all"]
    chosen = experiments(() if everything else list(dict.fromkeys(names)))
    variant: Variant = "printed" if as_printed else "true" if true_gradient else "both"
    if variant != "both" and (same := [e.name for e in chosen if not e.has_variants]) and not everything:
        raise UserError(
            f"{', '.join(same)}: print and mathematics do not differ there",
            where="--as-printed" if as_printed else "--true-gradient",
            remedy="Run it without.",
        )
    done = _run(console, chosen, variant)

    from tether.lab import page

    path = out / ("index.html" if len(done) > 1 else f"{chosen[0].name}.html")
    page.write(path, done)
    say(f"the pictures: {path}")


def _run(console: Console, chosen: Sequence[Experiment], variant: Variant) -> list[tuple[Experiment, Result]]:
    import torch

    torch.set_num_threads(1)  # matrices this small are faster so
    done = []
    for i, experiment in enumerate(chosen, 1):
        started = time.perf_counter()
        say(f"{f'{i} of {len(chosen)}: ' if len(chosen) > 1 else ''}{experiment.name}")
        result = experiment.run(variant)
        done.append((experiment, result))
        _print(console, experiment, result)
        say(f"{experiment.name} took {time.perf_counter() - started:.1f} s")
    return done


def _list(console: Console, names: dict[str, str]) -> None:
    from rich.table import Table as RichTable

    table = RichTable(box=None, show_header=False, pad_edge=False)
    for name, question in names.items():
        table.add_row(f"[bold]{name}[/]", question)
    console.print(table)
    console.print("\ntether lab NAME runs one, tether lab all runs all and writes one page.")


def _print(console: Console, experiment: Experiment, result: Result) -> None:
    from tether.lab.page import difference_table

    console.print(f"\n[bold]{experiment.title}[/]\n{experiment.question}\n")
    for table in [*result.tables, *([difference_table(result.differences)] if result.differences else [])]:
        _print_table(console, table)
    for sentence in result.see:
        console.print(sentence)
    console.print()


def _print_table(console: Console, table: Table) -> None:
    from rich.markup import escape
    from rich.table import Table as RichTable

    drawn = RichTable(
        title=escape(table.title) or None, title_justify="left", caption=escape(table.caption) or None, caption_justify="left"
    )
    for i, name in enumerate(table.header):
        drawn.add_column(escape(name), justify="right" if i in table.numeric else "left")
    for row in table.rows:
        drawn.add_row(*(escape(cell) for cell in row))
    console.print(drawn)
