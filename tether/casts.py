"""Low-precision copies of float32 weights, made once per change of the weights and not once per forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_SAMPLES = 16  # entries of a weight that are compared, besides its version


@dataclass
class _Copy:
    stamps: list[tuple[int, int, int]]
    samples: Tensor
    value: Tensor


class Casts:
    """`casts(weights, dtype)` is the concatenation of `weights` by rows in `dtype`, kept until one of them changes.

    A change is seen by torch's version counter, which every optimiser and `load_state_dict` moves. Writing through `.data`
    (merging an adapter does) leaves the counter alone, so some entries spread over each weight are compared as well.
    """

    def __init__(self, *, keep: bool = True) -> None:
        """Without `keep` every call makes a new copy."""
        self._keep = keep
        self._copies: dict[tuple[int, ...], _Copy] = {}

    @torch.no_grad()
    def __call__(self, weights: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        if len(weights) == 1 and weights[0].dtype == dtype:
            return weights[0].detach()
        if not self._keep:
            return _concatenated(weights, dtype)
        key = tuple(id(w) for w in weights)
        stamps = [(w._version, w.data_ptr(), w.numel()) for w in weights]
        samples = torch.cat([w.reshape(-1)[:: max(1, w.numel() // _SAMPLES)] for w in weights])
        known = self._copies.get(key)
        # A NaN is unequal to itself: such a weight is cast again each time, and rightly not trusted.
        if known is None or known.value.dtype != dtype or known.stamps != stamps or not torch.equal(known.samples, samples):
            known = self._copies[key] = _Copy(stamps, samples, _concatenated(weights, dtype))
        return known.value

    def clear(self) -> None:
        """Give the memory back; the next call makes the copies again."""
        self._copies.clear()


def _concatenated(weights: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    rows = sum(len(w) for w in weights)
    # A new tensor, never the old one overwritten: a graph that still waits for its backward pass may hold the old values.
    value = torch.empty(rows, *weights[0].shape[1:], dtype=dtype, device=weights[0].device)
    start = 0
    for w in weights:
        value[start : start + len(w)].copy_(w)
        start += len(w)
    return value
