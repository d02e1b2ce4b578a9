"""`Check`: one line of a verification, with the largest difference that was found."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

Verdict = Literal["holds", "fails", "left out", "reported"]


@dataclass(frozen=True)
class Found:
    """What a comparison gave. It holds when `difference` is at most `limit`; without a limit it is reported and not judged."""

    difference: float
    limit: float | None
    detail: str


class LeftOut(Exception):
    """This line does not apply to the recipe; the message is the reason, in a few words."""


@dataclass(frozen=True)
class Check:
    """A line as it is printed. `difference` and `limit` are None where nothing was compared."""

    name: str
    compared: str
    verdict: Verdict
    difference: float | None
    limit: float | None
    detail: str
    seconds: float = 0.0

    @property
    def holds(self) -> bool:
        return self.verdict != "fails"

    def row(self) -> dict[str, Any]:
        """As plain data for JSON, where infinity is no number."""
        shown = self.difference if self.difference is not None and math.isfinite(self.difference) else None
        return {
            "name": self.name,
            "compared": self.compared,
            "verdict": self.verdict,
            "difference": shown,
            "limit": self.limit,
            "detail": self.detail,
            "seconds": round(self.seconds, 3),
        }


def judged(found: Found) -> Verdict:
    """A difference that is no number is a difference."""
    if found.limit is None:
        return "reported"
    return "holds" if found.difference <= found.limit else "fails"


def largest(one: Tensor, other: Tensor) -> float:
    """The largest difference of two tensors of one shape; infinite where one of them is not finite."""
    if one.shape != other.shape:
        raise ValueError(f"shapes {tuple(one.shape)} and {tuple(other.shape)} cannot be compared")
    if not one.numel():
        return 0.0
    gap = float((one.detach().double().cpu() - other.detach().double().cpu()).abs().max())
    return gap if math.isfinite(gap) else math.inf


def relative(one: Tensor, other: Tensor) -> float:
    """`largest`, as a share of the largest entry: for gradients, whose size means nothing by itself."""
    size = float(torch.maximum(one.detach().double().abs().max(), other.detach().double().abs().max())) if one.numel() else 0.0
    return largest(one, other) / size if size > 0 else largest(one, other)


def flat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([t.detach().reshape(-1).double().cpu() for t in tensors])
