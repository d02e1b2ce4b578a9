"""Do two answers say the same? Taken apart by form (list, tuple, set, interval, matrix, equation, unit, ratio), compared by value.

Input is cleaned text (`math_text.clean`). Rules, each also in docs/rewards.md:

- a label is not part of the value: x=7 is 7; a unit, a currency or a degree sign may be left out by one side, never contradicted
- lists without brackets and sets have no order, tuples have; a number is not a list; every member must agree
- intervals and inequalities are the same set of numbers or they are not
- numbers agree exactly unless a tolerance is declared; words agree whatever their case
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from tether.rewards import math_sets
from tether.rewards.math_exact import NotExact, TooBig, exact
from tether.rewards.math_pieces import (
    Bracketed,
    bracketed,
    choice_of,
    items,
    label_of,
    matrix_rows,
    plus_minus,
    relation,
    split_unit,
    squeezed,
    words_of,
)
from tether.rewards.math_symbolic import CannotRead, same_equation, same_expression

MAX_MEMBERS = 64


@dataclass(frozen=True)
class Options:
    """`percent`: "value" makes 45% the number 0.45, "unit" the number 45. `tolerance`: relative, for numbers; None is exact."""

    percent: Literal["value", "unit"] = "value"
    tolerance: float | None = None


def same(a: str, b: str, options: Options | None = None, depth: int = 0) -> bool:
    """Whether two cleaned answers are equal. Empty text equals nothing."""
    options = options or Options()
    a, b = a.strip(), b.strip()
    if not a or not b or depth > 8:
        return False
    if squeezed(a) == squeezed(b):
        return True

    def again(x: str, y: str) -> bool:
        return same(x, y, options, depth + 1)

    if "\\pm" in a or "\\pm" in b or "\\mp" in a or "\\mp" in b:
        left, right = plus_minus(a), plus_minus(b)
        if len(left) > 1 or len(right) > 1:
            return _unordered(left if len(left) > 1 else items(a), right if len(right) > 1 else items(b), again)
    if math_sets.is_set(a) or math_sets.is_set(b):
        verdict = math_sets.same_set(a, b)
        if verdict is not None:
            return verdict
    for compare in (_lists, _matrices, _brackets, _equations):
        verdict = compare(a, b, again)
        if verdict is not None:
            return verdict
    return _single(a, b, options, again)


Again = Callable[[str, str], bool]


def _lists(a: str, b: str, again: Again) -> bool | None:
    left, right = items(a), items(b)
    if len(left) == 1 and len(right) == 1:
        return None
    if len(left) > 1 and len(right) > 1:
        return _unordered(left, right, again)
    many, one = (left, b) if len(left) > 1 else (right, a)
    if len(many) <= MAX_MEMBERS and all(again(m, one) for m in many):  # one value in several notations
        return True
    label = label_of(one)
    inner = bracketed(label[1] if label else one)
    if inner is None or len(inner.members) != len(many):
        return False
    if inner.kind == "set":
        return _unordered(inner.members, many, again)
    return inner.kind == "()" and _ordered(inner.members, many, again)


def _ordered(left: Sequence[str], right: Sequence[str], again: Again) -> bool:
    return len(left) == len(right) and all(again(x, y) for x, y in zip(left, right, strict=True))


def _unordered(left: Sequence[str], right: Sequence[str], again: Again) -> bool:
    """Every member of one has its own partner in the other."""
    if len(left) != len(right) or len(left) > MAX_MEMBERS:
        return False
    free = list(right)
    for x in left:
        partner = next((i for i, y in enumerate(free) if again(x, y)), None)
        if partner is None:
            return False
        free.pop(partner)
    return True


def _brackets(a: str, b: str, again: Again) -> bool | None:
    left, right = bracketed(a), bracketed(b)
    if left is None and right is None:
        return None
    if left is not None and right is not None and (len(left.members) > 1 or len(right.members) > 1 or "set" in (left.kind, right.kind)):
        if left.kind != right.kind:
            return False
        if left.kind == "set":
            return _unordered(_distinct(left, again), _distinct(right, again), again)
        return _ordered(left.members, right.members, again)
    opened = [again(x.members[0], y) for x, y in ((left, b), (right, a)) if x is not None and x.kind == "()" and len(x.members) == 1]
    if opened:  # brackets around one thing are only brackets: (B), (3+1/2)
        return any(opened)
    one, other = (left, b) if left is not None else (right, a)
    assert one is not None
    if label_of(other):
        return None
    return False if len(one.members) > 1 or one.kind == "set" else None


def _distinct(found: Bracketed, again: Again) -> list[str]:
    out: list[str] = []
    for member in found.members[:MAX_MEMBERS]:
        if not any(again(member, other) for other in out):
            out.append(member)
    return out


def _matrices(a: str, b: str, again: Again) -> bool | None:
    left, right = matrix_rows(a), matrix_rows(b)
    if left is None and right is None:
        return None
    if left is None or right is None:
        rows, other = (left, bracketed(b)) if left is not None else (right, bracketed(a))
        assert rows is not None
        if label := label_of(b if left is not None else a):
            return again(a, label[1]) if left is not None else again(label[1], b)
        line = rows[0] if len(rows) == 1 else [r[0] for r in rows] if all(len(r) == 1 for r in rows) else None
        return other is not None and other.kind == "()" and line is not None and _ordered(line, other.members, again)
    return len(left) == len(right) and all(_ordered(x, y, again) for x, y in zip(left, right, strict=True))


def _equations(a: str, b: str, again: Again) -> bool | None:
    left, right = relation(a), relation(b)
    if left is None and right is None:
        return None
    if left is not None and right is not None:
        if [op for _, op in left[:-1]] != ["="] * (len(left) - 1) or [op for _, op in right[:-1]] != ["="] * (len(right) - 1):
            return _inequalities(left, right, again)
        label_a, label_b = label_of(a), label_of(b)
        if label_a and label_b and squeezed(label_a[0]) == squeezed(label_b[0]):
            return again(label_a[1], label_b[1])
        try:
            return same_equation((left[0][0], left[-1][0]), (right[0][0], right[-1][0]))
        except CannotRead:
            return False
    sides, text, other = (left, a, b) if left is not None else (right, b, a)
    assert sides is not None
    label = label_of(text)
    value = label[1] if label else None
    if value is None and all(op == "=" for _, op in sides[:-1]) and _number(sides[0][0], Options()) is not None:
        value = sides[-1][0]  # 3 + 4 = 7
    if value is None:
        return False
    return again(value, other) if left is not None else again(other, value)


def _inequalities(left: list[tuple[str, str]], right: list[tuple[str, str]], again: Again) -> bool:
    """Relations that are no plain set of numbers, such as x + y < 3: the same signs between equal sides."""
    return len(left) == len(right) and all(x[1] == y[1] and again(x[0], y[0]) for x, y in zip(left, right, strict=True))


def _single(a: str, b: str, options: Options, again: Again) -> bool:
    bare_a, unit_a = split_unit(a)
    bare_b, unit_b = split_unit(b)
    if unit_a and unit_b and unit_a != unit_b:
        return False
    if unit_a or unit_b or (bare_a, bare_b) != (a, b):
        return again(bare_a, bare_b)
    choice_a, choice_b = choice_of(a), choice_of(b)
    if choice_a or choice_b:  # "(B) 12 cm" is the letter or what it stands for, whichever the other one is
        return any(again(x, y) for x in choice_a or (a,) for y in choice_b or (b,))
    if ":" in a or ":" in b:
        return _ratios(a, b, options)
    word_a, word_b = words_of(a), words_of(b)
    if word_a and word_b:
        if word_a == word_b:
            return True
        if max(len(word_a), len(word_b)) > 3 or (len(word_a) > 1 and a.isupper()):  # AB and BA are lines, not products
            return False
    elif (word_a and len(word_a) > 3) or (word_b and len(word_b) > 3):
        return False
    try:
        x, y = _number(a, options), _number(b, options)
    except TooBig:
        return False  # they are not written alike, and one has too many digits to work out
    if x is not None and y is not None:
        return x == y or (options.tolerance is not None and abs(x - y) <= Fraction(options.tolerance) * abs(y))
    try:
        if same_expression(a, b):
            return True
    except CannotRead:
        return False
    return False


def _number(text: str, options: Options) -> Fraction | None:
    based = re.fullmatch(r"\(?([0-9A-Fa-f]+)\)?_\{?(\d{1,2})\}?", squeezed(text))
    if based and 2 <= int(based.group(2)) <= 36:
        try:
            return Fraction(int(based.group(1), int(based.group(2))))
        except ValueError:
            return None
    try:
        return exact(text, percent=options.percent == "value")
    except NotExact:
        return None


def _ratios(a: str, b: str, options: Options) -> bool:
    """7:30 is a time, digit for digit; 2:4 is a ratio, in proportion; a ratio of two is also their fraction."""
    left, right = squeezed(a).split(":"), squeezed(b).split(":")
    clock = re.compile(r"\d{1,2}(:\d\d){1,2}")
    if len(left) == len(right):
        if clock.fullmatch(squeezed(a)) and clock.fullmatch(squeezed(b)):
            return [int(x) for x in left] == [int(x) for x in right]
        numbers = [[_quiet(x, options) for x in side] for side in (left, right)]
        xs, ys = ([v for v in side if v is not None] for side in numbers)
        if len(xs) != len(left) or len(ys) != len(right):
            return False
        return all(xs[0] * y == ys[0] * x for x, y in zip(xs, ys, strict=True)) and any(xs) and any(ys)
    parts, other = (left, b) if len(left) == 2 and len(right) == 1 else (right, a) if len(right) == 2 and len(left) == 1 else (None, "")
    if parts is None or clock.fullmatch(":".join(parts)):
        return False
    top, bottom, value = _quiet(parts[0], options), _quiet(parts[1], options), _quiet(other, options)
    return top is not None and bool(bottom) and value is not None and top == value * (bottom or 1)


def _quiet(text: str, options: Options) -> Fraction | None:
    try:
        return _number(text, options)
    except TooBig:
        return None
