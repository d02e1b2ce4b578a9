"""Tether: human comparisons and checkable rewards in, a better language model out, tethered to where it started."""

__version__ = "0.1.0"
