"""Results at a terminal. No figure is ever cut: a table that is wider than the terminal becomes a block of lines for each row."""

from __future__ import annotations

import io
import os
import sys
import textwrap
from typing import TYPE_CHECKING

from tether.lab.experiment import Experiment, Result
from tether.lab.page import tables

if TYPE_CHECKING:
    from rich.console import Console

    from tether.report.view import Table

UNBOUNDED = 160  # columns of a file or a pipe, where COLUMNS does not say otherwise
SENTENCE = 24  # columns that a sentence needs to be read


def console() -> Console:
    """For standard output. Signs that its encoding lacks become question marks: numbers and words stay."""
    from rich.console import Console

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    bounded = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(highlight=False, markup=False, width=None if bounded else UNBOUNDED)


def show(to: Console, experiment: Experiment, result: Result) -> None:
    to.print(f"\n{experiment.title}", style="bold")
    to.print(f"{experiment.question}\n")
    for table in tables(result):
        to.print(table.title, style="bold")
        if _needs(table) <= to.width:
            _grid(to, table)
        else:
            _blocks(to, table)
        if table.caption:
            to.print(table.caption)
        to.print()
    for sentence in result.see:
        to.print(sentence)
    to.print()


def _cells(table: Table, i: int) -> list[str]:
    return [row[i] for row in table.rows]


def _word(texts: list[str]) -> int:
    """The longest word, at which a column can be broken no further."""
    return max((len(word) for text in texts for word in text.split()), default=0)


def _needs(table: Table) -> int:
    """Columns of the terminal that a table takes at the least: numbers whole, headers and words broken at blanks."""
    width = 1
    for i, name in enumerate(table.header):
        longest = max((len(cell) for cell in _cells(table, i)), default=0)
        whole = longest if i in table.numeric else max(_word(_cells(table, i)), min(SENTENCE, longest // 2))
        width += 3 + max(_word([name]), whole)
    return width


def _grid(to: Console, table: Table) -> None:
    from rich.table import Table as RichTable
    from rich.text import Text

    natural = 1 + sum(3 + max(map(len, [name, *_cells(table, i)])) for i, name in enumerate(table.header))
    made = RichTable()
    for i, name in enumerate(table.header):
        if i in table.numeric:
            narrow = max(_word([name]), *map(len, _cells(table, i)), 1)
            made.add_column(Text(name if natural <= to.width else textwrap.fill(name, narrow)), justify="right", no_wrap=True)
        else:
            made.add_column(Text(name), overflow="fold")
    for row in table.rows:
        made.add_row(*map(Text, row))
    to.print(made)


def _blocks(to: Console, table: Table) -> None:
    """Every row as lines of header and value. An empty first cell stands for the one above it."""
    from rich.table import Table as RichTable
    from rich.text import Text

    first = ""
    for row in table.rows:
        first = row[0] or first
        made = RichTable.grid(padding=(0, 2))
        made.add_column(overflow="fold", max_width=max(8, to.width // 2))
        made.add_column(overflow="fold")
        for name, cell in zip(table.header, [first, *row[1:]], strict=True):
            if cell:
                made.add_row(Text(name), Text(cell))
        to.print(made)
        to.print()
