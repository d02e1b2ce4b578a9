"""`tether lab`: small worlds that show what each method does, exactly."""

from __future__ import annotations

import os
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


def lab(
    names: Annotated[list[str] | None, typer.Argument(metavar="[NAME]...", help="Experiments to run, or all; none lists them.")] = None,
    as_printed: Annotated[bool, typer.Option("--as-printed", help="Only the arithmetic as the documents print it.")] = False,
    true_gradient: Annotated[bool, typer.Option("--true-gradient", help="Only the gradient of the objective as written.")] = False,
    out: Annotated[Path, typer.Option(help="The folder that pages are written to.")] = Path("lab"),
) -> None:
    """Run small experiments in seconds: a table, two sentences on what to see, and a page with the pictures."""
    from tether.lab import page, terminal
    from tether.lab.catalogue import NAMES, experiments

    console = terminal.console()
    if as_printed and true_gradient:
        raise UserError("--as-printed and --true-gradient exclude each other", remedy="Leave both out to see both.")
    variant: Variant = "printed" if as_printed else "true" if true_gradient else "both"
    option = {"printed": "--as-printed", "true": "--true-gradient", "both": ""}[variant]
    if not names:
        if option:
            raise UserError("no experiment is named", where=option, remedy=f"Write `tether lab ppo {option}`; `tether lab` lists them.")
        _list(console, NAMES)
        return
    chosen = experiments([name for name in dict.fromkeys(names) if name != "all"])
    if "all" in names:
        chosen = experiments()
    elif option and (same := [e.name for e in chosen if not e.has_variants]):
        raise UserError(
            f"{', '.join(same)}: print and mathematics do not differ there in their arithmetic, so there is one run",
            where=option,
            remedy="Run it without.",
        )
    path = _page_path(out, chosen)
    done = _run(console, chosen, variant)
    try:
        page.write(path, done, variant)
    except OSError as error:
        raise UserError(f"the page cannot be written: {error.strerror or error}", where=str(path), remedy=ELSEWHERE) from error
    say(f"the pictures: {path}")


ELSEWHERE = "Name another folder with --out."


def _page_path(out: Path, chosen: Sequence[Experiment]) -> Path:
    """Where the page goes. A place that cannot take it is refused before anything has run."""
    path = out / ("index.html" if len(chosen) > 1 else f"{chosen[0].name}.html")
    there = next(folder for folder in (out, *out.absolute().parents) if folder.exists())
    if not there.is_dir():
        raise UserError("is a file, not a folder", where=f"--out {there}", remedy=ELSEWHERE)
    if path.is_dir():
        raise UserError("is a folder; the page would have this name", where=str(path), remedy=ELSEWHERE)
    if not os.access(there, os.W_OK):
        raise UserError("nothing can be written into this folder", where=f"--out {there}", remedy=ELSEWHERE)
    return path


def _run(console: Console, chosen: Sequence[Experiment], variant: Variant) -> list[tuple[Experiment, Result]]:
    import torch

    from tether.lab import terminal

    torch.set_num_threads(1)  # matrices this small are faster so
    done = []
    for i, experiment in enumerate(chosen, 1):
        started = time.perf_counter()
        say(f"{f'{i} of {len(chosen)}: ' if len(chosen) > 1 else ''}{experiment.name}")
        result = experiment.run(variant)
        done.append((experiment, result))
        terminal.show(console, experiment, result)
        say(f"{experiment.name} took {time.perf_counter() - started:.1f} s")
    return done


def _list(console: Console, names: dict[str, str]) -> None:
    from rich.table import Table as RichTable
    from rich.text import Text

    table = RichTable(box=None, show_header=False, pad_edge=False)
    for name, question in names.items():
        table.add_row(Text(name, style="bold"), Text(question))
    console.print(table)
    console.print("\ntether lab NAME runs one, tether lab all runs all and writes one page.")
