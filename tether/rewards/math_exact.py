"""Numbers as exact fractions: 1/2, 0.5, 50%, 2^10, 10!/8!, 3.2 x 10^-4, read by a small grammar; nothing is evaluated as code.

Input is what `math_text.clean` gives. `NotExact`: this is no rational number that can be worked out here, ask somebody else.
`TooBig`: it is one, but its digits would not fit; two such numbers are equal only if they are written alike.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction

MAX_BITS = 1 << 16  # numbers up to some 20 000 digits
MAX_DEPTH = 80
TOKEN = re.compile(r"\s*(\d+\.?\d*|\.\d+|\\[a-zA-Z]+|[-+*/^!%(){}\[\]])")


class NotExact(Exception):
    pass


class TooBig(Exception):
    pass


def exact(text: str, *, percent: bool = True) -> Fraction:
    """The value of cleaned text. `percent`: 45% is 0.45; otherwise the sign is ignored.

    >>> exact(r"\\frac{10!}{8!}"), exact("45%"), exact(r"3.2\\cdot10^{-4}")
    (Fraction(90, 1), Fraction(9, 20), Fraction(1, 3125))
    """
    tokens, at = [], 0
    stripped = text.strip()
    while at < len(stripped):
        match = TOKEN.match(stripped, at)
        if match is None:
            raise NotExact(text)
        tokens.append(match.group(1))
        at = match.end()
    if not tokens:
        raise NotExact(text)
    reader = _Reader(tokens, percent)
    value = reader.sum(0)
    if reader.at != len(tokens):
        raise NotExact(text)
    return value


class _Reader:
    def __init__(self, tokens: list[str], percent: bool) -> None:
        self.tokens, self.percent, self.at = tokens, percent, 0

    @property
    def next(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def take(self, wanted: str) -> None:
        if self.next != wanted:
            raise NotExact(wanted)
        self.at += 1

    def sum(self, depth: int) -> Fraction:
        if depth > MAX_DEPTH:
            raise NotExact("nested too deeply")
        value = self.product(depth)
        while self.next in ("+", "-"):
            sign = 1 if self.next == "+" else -1
            self.at += 1
            value = _small(value + sign * self.product(depth))
        return value

    def product(self, depth: int) -> Fraction:
        value = self.signed(depth)
        while True:
            if self.next in ("*", "\\cdot"):
                self.at += 1
                value = _small(value * self.signed(depth))
            elif self.next == "/":
                self.at += 1
                value = _divided(value, self.signed(depth))
            elif self.next in ("(", "{", "\\frac", "\\binom", "\\sqrt"):  # two factors side by side
                value = _small(value * self.power(depth))
            else:
                return value

    def signed(self, depth: int) -> Fraction:
        if depth > MAX_DEPTH:
            raise NotExact("nested too deeply")
        if self.next in ("+", "-"):
            sign = 1 if self.next == "+" else -1
            self.at += 1
            return sign * self.signed(depth + 1)
        return self.power(depth)

    def power(self, depth: int) -> Fraction:
        base = self.marked(depth)
        if self.next != "^":
            return base
        self.at += 1
        exponent = self.group(depth) if self.next == "{" else self.marked(depth)
        return _power(base, exponent)

    def marked(self, depth: int) -> Fraction:
        value = self.single(depth)
        while self.next in ("!", "%"):
            if self.next == "!":
                if value.denominator != 1 or value < 0:
                    raise NotExact("factorial")
                if value > 3000:
                    raise TooBig("factorial")
                value = Fraction(math.factorial(int(value)))
            elif self.percent:
                value = value / 100
            self.at += 1
        return value

    def single(self, depth: int) -> Fraction:
        token = self.next
        if re.match(r"[\d.]", token):
            self.at += 1
            if len(token) > MAX_BITS // 4:
                raise TooBig("number")
            return _decimal(token)
        if token in ("(", "["):
            self.at += 1
            value = self.sum(depth + 1)
            self.take(")" if token == "(" else "]")
            return value
        if token == "{":
            return self.group(depth)
        if token == "\\frac":
            self.at += 1
            return _divided(self.group(depth), self.group(depth))
        if token == "\\binom":
            self.at += 1
            n, k = self.group(depth), self.group(depth)
            if n.denominator != 1 or k.denominator != 1 or n < 0 or k < 0:
                raise NotExact("binomial")
            if n > 3000:
                raise TooBig("binomial")
            return Fraction(math.comb(int(n), int(k)))
        if token == "\\sqrt":
            self.at += 1
            if self.next == "[":
                raise NotExact("root")
            return _root(self.group(depth))
        raise NotExact(token)

    def group(self, depth: int) -> Fraction:
        self.take("{")
        value = self.sum(depth + 1)
        self.take("}")
        return value


def _decimal(token: str) -> Fraction:
    whole, _, places = token.partition(".")
    return Fraction(_integer(whole + places), 10 ** len(places))


def _integer(digits: str) -> int:
    """`int` refuses more than 4300 digits; pieces do not."""
    value = 0
    for i in range(0, len(digits), 4000):
        piece = digits[i : i + 4000]
        value = value * 10 ** len(piece) + int(piece)
    return value


def _small(value: Fraction) -> Fraction:
    if value.numerator.bit_length() > MAX_BITS or value.denominator.bit_length() > MAX_BITS:
        raise TooBig("number")
    return value


def _divided(top: Fraction, bottom: Fraction) -> Fraction:
    if bottom == 0:
        raise NotExact("division by 0")
    return _small(top / bottom)


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator == 2 and base >= 0:
        return _power(_root(base), exponent * 2)
    if exponent.denominator != 1 or (base == 0 and exponent <= 0):
        raise NotExact("power")
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if abs(base) != 1 and base != 0 and bits * abs(exponent) > MAX_BITS:
        raise TooBig("power")
    if abs(base) == 1:
        return base if exponent % 2 else Fraction(1)
    return Fraction(base ** int(exponent)) if base != 0 else Fraction(0)


def _root(value: Fraction) -> Fraction:
    if value < 0:
        raise NotExact("root of a negative number")
    top, bottom = math.isqrt(value.numerator), math.isqrt(value.denominator)
    if top * top != value.numerator or bottom * bottom != value.denominator:
        raise NotExact("irrational root")
    return Fraction(top, bottom)
