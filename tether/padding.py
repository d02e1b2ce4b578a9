"""A packed stream as plain right-padded rows, for models that cannot be packed, and back."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tether.packing import Packed


@dataclass(frozen=True)
class Padded:
    """R rows, each an answer behind its own copy of its prompt."""

    tokens: Tensor  # (R, T) int64, zeros behind the end
    mask: Tensor  # (R, T) int64, 1 where there is a token
    row: Tensor  # (N,) where each token of the stream is
    column: Tensor  # (N,)

    def gather(self, values: Tensor) -> Tensor:
        """(R, T, ...) -> (N, ...) in the order of the stream."""
        return values[self.row, self.column]


def pad(packed: Packed) -> Padded:
    """One row for each segment that is not itself a prompt of another; a shared prompt is read from its first row.

    Padding is on the right: under causal attention and recurrence alike, no token sees it.
    """
    prompts = {segment.prompt_start for segment in packed.segments if segment.prompt_end > segment.prompt_start}
    rows = [segment for segment in packed.segments if segment.start not in prompts]
    width = max(s.end - s.start + s.prompt_end - s.prompt_start for s in rows)
    tokens = packed.tokens.new_zeros(len(rows), width)
    mask = torch.zeros_like(tokens)
    row = torch.full_like(packed.tokens, -1)
    for r, s in enumerate(rows):
        source = torch.cat([packed.tokens[s.prompt_start : s.prompt_end], packed.tokens[s.start : s.end]])
        tokens[r, : len(source)] = source
        mask[r, : len(source)] = 1
        row[s.start : s.end] = r
        if s.prompt_end > s.prompt_start and row[s.prompt_start] < 0:
            row[s.prompt_start : s.prompt_end] = r
    return Padded(tokens=tokens, mask=mask, row=row, column=packed.positions)
