"""The guidelines that annotators read first where a desk has none of its own."""

from __future__ import annotations

from importlib.resources import files


def default_guidelines() -> str:
    """Markdown: what to look for, ties, both bad, being consistent.

    >>> default_guidelines().splitlines()[0]
    '# Which answer is better?'
    """
    return files("tether.collect").joinpath("guidelines.md").read_text(encoding="utf-8")
