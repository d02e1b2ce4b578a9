"""A run directory, or a folder of runs with a comparison, into report.html."""

from __future__ import annotations

from pathlib import Path

from tether import atomic
from tether.report import comparison
from tether.report.numbers import number, signed
from tether.report.page import Page, run_page
from tether.report.view import RunView


def write_report(folder: str | Path) -> Path:
    """Write report.html into the run directory and return its path. It can be made again at any time."""
    path = Path(folder) / "report.html"
    atomic.write_file(path, report_html(folder))
    return path


def report_html(folder: str | Path) -> str:
    """The page of a run directory, or of a folder with a comparison and runs inside. Raises UserError for any other folder."""
    folder = Path(folder)
    compared = (folder / comparison.FILE).is_file()
    return render(comparison.page(folder) if compared else run_page(RunView.read(folder)))


def render(page: Page) -> str:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("tether.report"), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template("page.html").render(page=page, signed=signed, number=number)
