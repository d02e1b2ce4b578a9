"""`tether report`: a run as one HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory, finished or not, or a folder of runs with a comparison.")],
) -> None:
    """Write report.html into the run directory: one page without network or scripts. It can be made again at any time."""
    from tether.report import write_report

    typer.echo(write_report(run))
