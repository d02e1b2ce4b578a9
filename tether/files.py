"""Rows out of files, each with the place it came from; and what is wrong with a row, in words that help."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from tether.errors import UserError

T = TypeVar("T")
Action = Literal["reject", "drop", "warn", "truncate"]


@dataclass(frozen=True, order=True)
class Source:
    """Where a row stands: file and line (1-based; row number for formats without lines)."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class Problem:
    """One thing wrong with one row. `kind` is a short slug to count by; `action` is what was done about it."""

    source: Source
    kind: str
    what: str
    remedy: str
    action: Action
    field: str | None = None

    def __str__(self) -> str:
        place = f"{self.source}: {self.field}" if self.field else str(self.source)
        return f"{place}: {self.what}. {self.remedy}"


def json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Rows of a file that Tether wrote, one at a time: it may be larger than memory.

    Only a newline ends a row, for an answer may hold U+2028. A last line that is still being written is left out.
    """
    with path.open(encoding="utf-8") as file:
        for line in file:
            if line.endswith("\n"):
                yield json.loads(line)


LEAVE_OUT = "Mend them, or pass on_bad_rows=drop to leave them out (they are counted and listed in the run)."


@dataclass
class Loaded(Generic[T]):
    """Good rows, and every problem met on the way. Nothing is lost in silence."""

    rows: list[T]
    problems: list[Problem]
    shape: str
    fingerprint: str
    files: list[str] = field(default_factory=list)

    def counts(self) -> dict[str, int]:
        return dict(Counter(p.kind for p in self.problems))

    def enforce(self, policy: Literal["refuse", "drop"], show: int = 5) -> None:
        """Refuse the file when it has rejected rows, naming the first few; under "drop" they stay counted and named."""
        bad = [p for p in self.problems if p.action == "reject"]
        if bad and policy == "refuse":
            all_of_them = f"tether data {' '.join(self.files)} --show {len(bad)}"
            more = f"  ... and {len(bad) - show} more; all of them: {all_of_them}\n" if len(bad) > show else ""
            listed = "".join(f"  {p}\n" for p in bad[:show])
            raise UserError(f"{len(bad)} row{'s' if len(bad) > 1 else ''} cannot be used:\n{listed}{more}", remedy=LEAVE_OUT)
        if not self.rows:
            raise UserError(
                f"no usable row in {', '.join(self.files) or 'the data'}", remedy="See `tether data FILE` for what was wrong with each."
            )
