"""Sets of real numbers: intervals, unions, complements and inequalities, brought to one list of disjoint intervals."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from tether.rewards.math_exact import NotExact, TooBig, exact
from tether.rewards.math_pieces import bracketed, relation, split_top, squeezed
from tether.rewards.math_symbolic import number

INF = Fraction(10) ** 400  # stands for infinity: beyond every number that is read here


@dataclass(frozen=True, order=True)
class Span:
    """From `low` to `high`; `low_open` is 1 when low itself is left out, `high_open` is 0 when high is in (so spans sort rightly)."""

    low: Fraction
    low_open: int
    high: Fraction
    high_open: int

    @property
    def empty(self) -> bool:
        return self.low > self.high or (self.low == self.high and bool(self.low_open or self.high_open))


EVERYTHING = [Span(-INF, 1, INF, 1)]


def is_set(text: str) -> bool:
    """Written so that it can only be a set of numbers: with a union, an inequality, a square bracket, infinity or the reals."""
    parts = relation(text)
    if parts and any(op in ("<", ">", "\\le", "\\ge", "\\ne") for _, op in parts[:-1]):
        return True
    if "\\cup" in text or "\\setminus" in text or "\\mathbb{R}" in text:
        return True
    found = bracketed(text)
    return found is not None and len(found.members) == 2 and (found.kind in ("[]", "[)", "(]") or "\\infty" in text)


def same_set(a: str, b: str) -> bool | None:
    """Whether two sets hold the same numbers; None when one cannot be read as a set, False when they speak of other variables."""
    left, right = _read(a), _read(b)
    if left is None or right is None:
        return None
    names = {name for name in (left[0], right[0]) if name}
    return len(names) < 2 and merged(left[1]) == merged(right[1])


def _read(text: str) -> tuple[str, list[Span]] | None:
    """(variable or "", spans)."""
    text = text.strip()
    member = re.fullmatch(r"(\\?[a-zA-Z]+)\s*\\in(?![a-z])\s*(.+)", text)
    if member:
        found = _read(member.group(2))
        return (member.group(1), found[1]) if found and not found[0] else None
    for separators, join in ((("\\cup", ";or"), _union), (("\\cap", ";and"), _common), (("\\setminus",), _without)):
        marked = re.sub(
            r"\\text\{\s*(or|and)\s*\}|(?<![a-zA-Z\\])(or|and)(?![a-zA-Z])", lambda m: "\\" + (m.group(1) or m.group(2)) + "mark ", text
        )
        marks = tuple("\\ormark" if s == ";or" else "\\andmark" if s == ";and" else s for s in separators)
        parts = split_top(marked, marks)
        if len(parts) > 1:
            back = [re.sub(r"\\(or|and)mark ", r" \1 ", p) for p, _ in parts]
            read = [_read(p) for p in back]
            if any(r is None for r in read):
                return None
            known = [r for r in read if r is not None]
            names = {name for name, _ in known if name}
            if len(names) > 1:
                return None
            spans = known[0][1]
            for _, other in known[1:]:
                spans = join(spans, other)
            return next(iter(names), ""), spans
    return _one(text)


def _one(text: str) -> tuple[str, list[Span]] | None:
    plain = squeezed(text)
    if plain == "\\mathbb{R}":
        return "", EVERYTHING
    if plain == "\\emptyset":
        return "", []
    found = bracketed(text)
    if found is not None and found.kind == "set":
        points = [_value(m) for m in found.members]
        return None if any(p is None for p in points) else ("", [Span(p, 0, p, 0) for p in points if p is not None])
    if found is not None and len(found.members) == 2:
        low, high = map(_value, found.members)
        if low is None or high is None:
            return None
        return "", [Span(low, int(found.kind[0] == "(" or low == -INF), high, int(found.kind[1] == ")" or high == INF))]
    if found is not None and found.kind == "()" and len(found.members) == 1:
        return _read(found.members[0])
    parts = relation(text)
    return _inequality(parts) if parts else None


def _inequality(parts: list[tuple[str, str]]) -> tuple[str, list[Span]] | None:
    at = [i for i, (side, _) in enumerate(parts) if re.fullmatch(r"\\?[a-zA-Z]+(?:_\{?\w+\}?)?", side) and _value(side) is None]
    if len(at) != 1 or len(parts) > 3:
        return None
    name, spans = parts[at[0]][0], EVERYTHING
    for i, (side, op) in enumerate(parts[:-1]):
        right = parts[i + 1][0]
        flipped = {"<": ">", ">": "<", "\\le": "\\ge", "\\ge": "\\le"}
        if i == at[0]:
            bound, sign = _value(right), op
        elif i + 1 == at[0]:
            bound, sign = _value(side), flipped.get(op, op)
        else:
            return None
        limit = None if bound is None else _half_line(sign, bound)
        if limit is None:
            return None
        spans = _common(spans, limit)
    return name, spans


def _half_line(sign: str, bound: Fraction) -> list[Span] | None:
    """Numbers x with x `sign` bound."""
    return {
        "<": [Span(-INF, 1, bound, 1)],
        "\\le": [Span(-INF, 1, bound, 0)],
        ">": [Span(bound, 1, INF, 1)],
        "\\ge": [Span(bound, 0, INF, 1)],
        "=": [Span(bound, 0, bound, 0)],
        "\\ne": [Span(-INF, 1, bound, 1), Span(bound, 1, INF, 1)],
    }.get(sign)


def _value(text: str) -> Fraction | None:
    """An end point: exactly where it is rational, to twelve digits otherwise."""
    plain = squeezed(text)
    if plain in ("\\infty", "+\\infty"):
        return INF
    if plain == "-\\infty":
        return -INF
    try:
        return exact(text)
    except TooBig:
        return None
    except NotExact:
        value = number(text)
        return None if value is None or value != value or abs(value) == float("inf") else Fraction(f"{value:.12g}")


def merged(spans: list[Span]) -> list[Span]:
    """The same numbers as disjoint spans that do not touch, in order."""
    out: list[Span] = []
    for span in sorted(s for s in spans if not s.empty):
        last = out[-1] if out else None
        if last and (span.low < last.high or (span.low == last.high and not (span.low_open and last.high_open))):
            high, high_open = max((last.high, -last.high_open), (span.high, -span.high_open))
            out[-1] = Span(last.low, last.low_open, high, -high_open)
        else:
            out.append(span)
    return out


def _union(a: list[Span], b: list[Span]) -> list[Span]:
    return [*a, *b]


def _common(a: list[Span], b: list[Span]) -> list[Span]:
    out = []
    for x in a:
        for y in b:
            low, low_open = max((x.low, x.low_open), (y.low, y.low_open))
            high, high_open = min((x.high, -x.high_open), (y.high, -y.high_open))
            out.append(Span(low, low_open, high, -high_open))
    return [s for s in out if not s.empty]


def _without(a: list[Span], b: list[Span]) -> list[Span]:
    for y in b:
        a = _common(a, [Span(-INF, 1, y.low, 1 - y.low_open), Span(y.high, 1 - y.high_open, INF, 1)])
    return a
