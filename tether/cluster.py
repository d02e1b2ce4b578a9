"""Where a run is planned to be: so many ranks, each with a device of its own or a share of this machine. Torch-free."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tether.errors import UserError
from tether.link import Link


@dataclass(frozen=True)
class Cluster:
    """What is None is taken from this machine."""

    ranks: int = 1
    device_bytes: float | None = None
    flops: float | None = None  # a second, that one rank keeps up in training
    link: Link | None = None

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise UserError(f"a run has at least one rank, got {self.ranks}", where="--ranks", remedy="Leave it out for one process.")


def parse_rate(text: str, option: str, example: str) -> float:
    """A positive number a second, with or without a unit's prefix.

    >>> parse_rate("4e14", "--flops", ""), parse_rate("400T", "--flops", ""), parse_rate("50 GB", "--bandwidth", "")
    (400000000000000.0, 400000000000000.0, 50000000000.0)
    """
    match = re.fullmatch(r"\s*([0-9.]+(?:[eE][+-]?[0-9]+)?)\s*([kKMGTP]?)(?:B|FLOPS?)?(?:/s)?\s*", text)
    prefix = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
    try:
        number = float(match[1]) * prefix[match[2]] if match else 0.0
    except ValueError:
        number = 0.0
    if number <= 0:
        raise UserError(f"{text!r} is not a number a second", where=option, remedy=f"Write {example}.")
    return number
