"""Comparisons as numbers: one row of named features for each of the two answers. Free of torch."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tether.errors import UserError
from tether.files import Loaded, Problem, Source
from tether.readers import Row, read_rows


@dataclass(frozen=True)
class FeaturePair:
    """Features of the better and the worse answer, in the order of the recipe's names."""

    chosen: tuple[float, ...]
    rejected: tuple[float, ...]
    margin: float
    prompt: str  # rows of one prompt stay on one side of the split; rows without a prompt go by themselves
    source: Source


def load_feature_pairs(paths: str | list[str], names: Sequence[str]) -> Loaded[FeaturePair]:
    """Pairs out of any row file, in either of two layouts (mixed rows are fine):

        {"chosen": {"safety": 1.0, ...}, "rejected": {"safety": 0.2, ...}}        objects, also named chosen_features, rejected_features
        chosen_safety, rejected_safety, ...                                        one column each, as in a table

    A row that lacks a feature, or holds something that is no finite number there, is a problem with its line.
    """
    if len(set(names)) != len(names):
        raise UserError(f"a name stands twice in {', '.join(names)}", where="features", remedy="Name each column once.")
    read = read_rows(paths)
    rows, problems = [], list(read.problems)
    for row in read.rows:
        made = _pair(row, names)
        if isinstance(made, FeaturePair):
            rows.append(made)
        else:
            problems.append(made)
    return Loaded(rows, problems, f"pairs of {len(names)} features", read.fingerprint, read.files)


def _pair(row: Row, names: Sequence[str]) -> FeaturePair | Problem:
    sides: list[tuple[float, ...]] = []
    for side in ("chosen", "rejected"):
        values = []
        for name in names:
            found = _value(row, side, name)
            if isinstance(found, Problem):
                return found
            values.append(found)
        sides.append(tuple(values))
    if sides[0] == sides[1]:
        return _problem(row, "same_features", None, "both answers have the same features", "It says nothing about a weight.", "drop")
    margin = _number(row.data.get("margin"), row.textual)
    if row.data.get("margin") not in (None, "") and (margin is None or margin < 0):
        return _problem(row, "bad_margin", "margin", f"{row.data['margin']!r} is not a number of at least 0", "Mend it or leave it out.")
    prompt = row.data.get("prompt")
    return FeaturePair(sides[0], sides[1], margin or 0.0, str(prompt) if prompt else f"row {row.source}", row.source)


def _value(row: Row, side: str, name: str) -> float | Problem:
    columns: dict[str, Any] = {}
    for key in (side, f"{side}_features"):
        if isinstance(row.data.get(key), Mapping):
            columns |= {str(k): (f"{key}.{k}", v) for k, v in row.data[key].items()}
    prefix = f"{side}_"
    columns |= {key.removeprefix(prefix): (key, value) for key, value in row.data.items() if key.startswith(prefix)}
    if name not in columns:
        close = difflib.get_close_matches(name, list(columns), n=1)
        hint = f"Did you mean {close[0]}?" if close else f"Give {side}: {{{name}: ...}} or a column {prefix}{name}."
        return _problem(row, "missing_feature", f"{prefix}{name}", "there is no such feature", hint)
    where, raw = columns[name]
    value = _number(raw, row.textual)
    if value is None:
        return _problem(row, "bad_feature", where, f"{raw!r} is not a finite number", "Mend it or leave the row out.")
    return value


def _number(raw: Any, textual: bool) -> float | None:
    if textual and isinstance(raw, str):
        try:
            raw = float(raw)
        except ValueError:
            return None
    if isinstance(raw, bool) or not isinstance(raw, (int, float)) or not math.isfinite(raw):
        return None
    return float(raw)


def _problem(row: Row, kind: str, field: str | None, what: str, remedy: str, action: Any = "reject") -> Problem:
    return Problem(row.source, kind, what, remedy, action, field)
