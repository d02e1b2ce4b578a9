"""Numbers as people read them."""

from __future__ import annotations

import math
from typing import Any


def number(value: Any, digits: int = 3) -> str:
    """Three significant digits, a true minus sign, no needless zeros or exponents.

    >>> number(-0.12345), number(1234567.0), number(0.00001), number(2.0), number(float("nan")), number(None)
    ('−0.123', '1,234,567', '1e−5', '2', 'not a number', '–')
    """
    if value is None:
        return "–"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if math.isnan(value):
        return "not a number"
    if math.isinf(value):
        return "infinite" if value > 0 else "−infinite"
    size = abs(value)
    if size >= 1000:
        text = f"{value:,.0f}"
    elif size and size < 1e-3:
        mantissa, _, exponent = f"{value:.{digits - 1}e}".partition("e")
        if "." in mantissa:
            mantissa = mantissa.rstrip("0").rstrip(".")
        text = f"{mantissa}e{int(exponent)}"
    else:
        text = f"{value:.{digits}g}"
    return text.replace("-", "−")


def signed(value: float, digits: int = 3) -> str:
    """As `number`, with its sign always shown.

    >>> signed(0.5), signed(-2.0), signed(0.0)
    ('+0.5', '−2', '0')
    """
    return f"+{number(value, digits)}" if value > 0 else number(value, digits)


def measured(value: float, sign: bool = False) -> str:
    """A measured mean: two decimals below 10, one from there on; what goes beyond is noise.

    >>> measured(0.07684), measured(-0.129, sign=True), measured(33.4567), measured(26.4, sign=True), measured(0.001, sign=True)
    ('0.08', '−0.13', '33.5', '+26.4', '0.00')
    """
    if not math.isfinite(value):
        return number(value)
    text = f"{value:.{2 if abs(value) < 10 else 1}f}"
    if float(text) == 0:
        return "0.00"
    return ("+" if sign and value > 0 else "") + text.replace("-", "−")


def percent(share: float) -> str:
    """
    >>> percent(0.614), percent(1.0), percent(0.0), percent(0.004)
    ('61 %', '100 %', '0 %', '0.4 %')
    """
    value = 100 * share
    return f"{value:.0f} %" if value == 0 or 1 <= value <= 99 or value == 100 else f"{value:.1f} %"


def seconds(value: float) -> str:
    """
    >>> seconds(7.24), seconds(75), seconds(7300)
    ('7.2 s', '1 min 15 s', '2 h 1 min')
    """
    if value < 60:
        return f"{value:.1f} s"
    whole = round(value)
    return f"{whole // 60} min {whole % 60} s" if whole < 3600 else f"{whole // 3600} h {whole % 3600 // 60} min"


def plural(n: int, noun: str) -> str:
    """
    >>> plural(1, "row"), plural(2, "row")
    ('1 row', '2 rows')
    """
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"
