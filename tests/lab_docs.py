"""Whether a page of docs/lab shows the numbers that its experiment computes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tether.report.view import Table

PAGES = Path(__file__).parents[1] / "docs/lab"


def rows_missing(name: str, tables: Sequence[Table]) -> list[str]:
    """Rows whose figures stand, in their order, in no table row of docs/lab/NAME.md."""
    lines = [_cells(line) for line in (PAGES / f"{name}.md").read_text().splitlines() if line.startswith("|")]
    missing = []
    for table in tables:
        for row in table.rows:
            figures = [_plain(cell) for i, cell in enumerate(row) if i in table.numeric and cell]
            if not any(_in_order(figures, line) for line in lines):
                missing.append(f"{table.title}: {' | '.join(row)}")
    return missing


def _cells(line: str) -> list[str]:
    return [_plain(cell) for cell in line.strip("|").split("|")]


def _plain(cell: str) -> str:
    return cell.strip().replace("−", "-")


def _in_order(figures: list[str], cells: list[str]) -> bool:
    rest = iter(cells)
    return all(any(figure == cell for cell in rest) for figure in figures)
