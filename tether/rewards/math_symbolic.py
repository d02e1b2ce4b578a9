"""Are two expressions the same function of their variables? Read by Math-Verify's LaTeX grammar, compared by value.

Values are worked out to 50 digits at several points, of both signs; expressions that differ somewhere are different, and ones that
agree at every point are taken as equal (a false agreement needs two different formulas that meet at all of these points to 30
digits). Decimals are made exact fractions first, so 0.333x is not x/3. Runs in a worker with a time limit.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

from tether.rewards.math_exact import MAX_DEPTH

DIGITS = 50
POINTS = ((0.37, 1.31), (1.83, 0.59), (2.71, 1.17), (-0.63, 0.83), (-1.49, -0.71))  # start and spacing of the variables' values
MAX_LENGTH = 600


class CannotRead(Exception):
    pass


def readable(text: str) -> str:
    """Cleaned text as the grammar likes it. CannotRead for what would only waste its time."""
    if len(text) > MAX_LENGTH:
        raise CannotRead("too long")
    depth = deepest = 0
    for c in text:
        depth += (c in "({[") - (c in ")}]")
        deepest = max(deepest, depth)
    if depth != 0 or deepest > MAX_DEPTH:
        raise CannotRead("brackets do not match, or too many")
    text = re.sub(r"(\d+(?:\.\d+)?)\s*\^\\circ", r"(\\frac{\1\\pi}{180})", text)
    text = re.sub(
        r"(?<![\w])(\d*)\.(\d+)(?![\d.])", lambda m: f"\\frac{{{int((m.group(1) or '0') + m.group(2))}}}{{{10 ** len(m.group(2))}}}", text
    )
    return re.sub(r"(?<![a-zA-Z\\])mod(?![a-zA-Z])", r"\\bmod ", text).replace("%", r"\%")


@lru_cache(maxsize=256)
def read(text: str) -> Any:
    """A sympy object. CannotRead when the grammar refuses the text."""
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig, latex2sympy

    try:
        found = latex2sympy(
            readable(text), is_real=False, normalization_config=None, conversion_config=ConversionConfig(lowercase_symbols=False)
        )
    except CannotRead:
        raise
    except (Exception, RecursionError) as error:
        raise CannotRead(f"{type(error).__name__}: {error}") from error
    return _plain(found)


def _plain(found: Any) -> Any:
    """i is the imaginary unit, an unknown function of something is a symbol of its own."""
    import sympy
    from sympy.core.function import AppliedUndef

    if not isinstance(found, sympy.Expr):
        return found
    swaps = {s: sympy.I for s in found.free_symbols if s.name == "i"}
    swaps |= {f: sympy.Symbol(str(f)) for f in found.atoms(AppliedUndef)}
    return found.xreplace(swaps) if swaps else found


def same_expression(a: str, b: str) -> bool:
    """Cleaned texts of two expressions (no relation, no list). CannotRead when one cannot be read."""
    import sympy

    left, right = read(a), read(b)
    if isinstance(left, sympy.Expr) and isinstance(right, sympy.Expr):
        return _same_values(left, right)
    return _verified(right, left)


def same_equation(a: tuple[str, str], b: tuple[str, str]) -> bool:
    """Left and right sides of two equations: one is a constant multiple of the other."""
    import sympy

    sides = [read(side) for side in (*a, *b)]
    if not all(isinstance(side, sympy.Expr) for side in sides):
        return False
    first, second = sides[0] - sides[1], sides[2] - sides[3]
    if first.free_symbols != second.free_symbols or not first.free_symbols:
        return False
    ratios = []
    for x, y in _values(first, second):
        if x is None or y is None:
            continue
        if abs(x) < 1e-30 or abs(y) < 1e-30:
            if not (abs(x) < 1e-30 and abs(y) < 1e-30):
                return False
            continue
        ratios.append(x / y)
    return len(ratios) >= 2 and all(_close(ratios[0], r) for r in ratios)


def _same_values(left: Any, right: Any) -> bool:
    if left == right:
        return True
    compared = 0
    for x, y in _values(left, right):
        if x is None and y is None:
            continue
        if x is None or y is None or not _close(x, y):
            return False
        compared += 1
    return compared >= min(2, len(POINTS) if left.free_symbols | right.free_symbols else 1)


def _values(left: Any, right: Any) -> list[tuple[Any, Any]]:
    """Both values at every point; a constant expression has one. None: no finite value there."""
    import sympy

    symbols = sorted(left.free_symbols | right.free_symbols, key=str)
    points = POINTS if symbols else POINTS[:1]
    out = []
    for start, gap in points:
        at = {s: sympy.Rational(str(round(start + gap * i * (1 + 0.13 * i), 4))) for i, s in enumerate(symbols)}
        out.append((_value(left, at), _value(right, at)))
    return out


def _value(expression: Any, at: dict[Any, Any]) -> Any:
    import sympy

    try:
        value = expression.xreplace(at).doit()
        if value in (sympy.oo, -sympy.oo):
            return None
        number = value.evalf(DIGITS, maxn=400)
        if number.is_number and number.is_finite and not number.atoms(sympy.Function):
            return number
    except (Exception, RecursionError):
        return None
    return None


def _close(x: Any, y: Any) -> bool:
    difference, size = abs(x - y), max(abs(x), abs(y))
    return bool(difference <= size * 1e-30) or bool(size < 1e-45)


def _verified(gold: Any, answer: Any) -> bool:
    """Sets, relations and logic: Math-Verify's own comparison. Its time limit is off: it needs alarm signals, and ours stands."""
    from math_verify import verify

    return bool(verify(gold, answer, timeout_seconds=None))


def number(text: str) -> float | None:
    """The value of a constant expression as a float, for ordering; None when it has none."""
    try:
        value = read(text)
        return float(value.evalf(30)) if value.is_number else None
    except (CannotRead, TypeError, ValueError, AttributeError):
        return None
