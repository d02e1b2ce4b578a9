"""Values of trained tokens as rows: one row per answer, aligned with the answer's tokens, padded at the end."""

from __future__ import annotations

import torch
from torch import Tensor

from tether.packing import Packed


def to_rows(packed: Packed, values: Tensor, width: int | None = None) -> Tensor:
    """Values per trained token (M,) -> (A, width) with zeros behind each answer's last one; the gradient flows through.

    >>> from tether.batch import Example
    >>> from tether.packing import pack
    >>> packed = pack([Example([5], [[7, 8], [9]], [[True, True], [True]])])
    >>> to_rows(packed, torch.tensor([1.0, 2.0, 3.0]), 3).tolist()
    [[1.0, 2.0, 0.0], [3.0, 0.0, 0.0]]
    """
    width = width or int(packed.lengths.max())
    first = packed.lengths.cumsum(0) - packed.lengths  # (A,)
    place = torch.arange(len(values), device=values.device) - first[packed.answer]  # (M,)
    flat = values.new_zeros(packed.n_answers * width).scatter(0, packed.answer * width + place, values)
    return flat.view(packed.n_answers, width)
