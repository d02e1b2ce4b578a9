"""A run directory as one self-contained HTML page: no network, no script, no torch."""

from tether.report.html import report_html, write_report

__all__ = ["report_html", "write_report"]
