"""How a model lies on several ranks (`sharding.py`), in numbers of parameters, without building or starting anything.

Every tensor is cut along its first dimension d into parts of ceil(d / N) rows; the last parts may be short or empty, and what travels
is filled up to full parts. Decoder layers are gathered one at a time; all else, embedding, last norm and head, is one group that stays
whole from the forward to the backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Count:
    """Numbers of parameters: all of them, and those that are trained."""

    all: int = 0
    trained: int = 0

    def __add__(self, other: Count) -> Count:
        return Count(self.all + other.all, self.trained + other.trained)


@dataclass(frozen=True)
class Layout:
    """Whole groups, and of each the fullest rank's part."""

    ranks: int
    layers: int
    tensors: int
    layer: Count  # the largest layer
    inner: Count  # all layers
    outer: Count  # everything else
    own_inner: Count
    own_outer: Count

    @property
    def whole(self) -> Count:
        return self.inner + self.outer

    @property
    def own(self) -> Count:
        """What the fullest rank keeps."""
        return self.own_inner + self.own_outer

    @property
    def groups(self) -> int:
        """Meetings of all ranks in one forward pass."""
        return self.layers + 1

    def gathered(self) -> int:
        """Numbers that lie whole on a rank beside its parts at the worst moment of a backward pass.

        The outer group is whole all along. A layer is there twice while it is gathered, as it arrives and as it is used, and so are its
        gradients while they are summed; the outer group's gradients wait for the end of the pass, and are there twice then.
        """
        if self.ranks == 1:
            return 0
        during = 2 * self.layer.all + 2 * self.layer.trained + self.outer.trained
        return self.outer.all + max(during, 2 * self.outer.trained)

    def gathered_beside(self) -> int:
        """The same of a second model whose backward pass is part of the first one's: layers are still gathered one at a time."""
        return 0 if self.ranks == 1 else self.outer.all + self.outer.trained

    def received(self, what: Count | int) -> int:
        """Numbers that reach one rank when a group is gathered, or its gradients are summed, whose fullest part is `what`."""
        return (self.ranks - 1) * (what.all if isinstance(what, Count) else what)


def layout_of(model: Any, ranks: int, *, without: Iterable[Any] = ()) -> Layout:
    """Of a model that may be on the meta device. `without`: parameters that the run does not have."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    left_out = {id(p) for p in without}
    seen: set[int] = set()
    found = []
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            mine = [p for p in module.parameters() if id(p) not in seen]
            seen |= {id(p) for p in mine}
            found.append(mine)
    rest = [p for p in model.parameters() if id(p) not in seen | left_out]
    every = [p for mine in found for p in mine]
    return Layout(
        ranks,
        len(found),
        len(every) + len(rest),
        max((_count(mine) for mine in found), key=lambda c: c.all, default=Count()),
        _count(every),
        _count(rest),
        _count(every, ranks),
        _count(rest, ranks),
    )


def layout_by_numbers(ranks: int, layers: int, inner: Count, outer: Count) -> Layout:
    """Of a model that is known by its size alone: layers of one size, everything cut evenly."""

    def cut(count: Count, parts: int) -> Count:
        return Count(math.ceil(count.all / parts), math.ceil(count.trained / parts))

    tensors = 9 * layers + 3  # a Llama layer has nine
    return Layout(ranks, layers, tensors, cut(inner, layers), inner, outer, cut(inner, ranks), cut(outer, ranks))


def _count(parameters: Iterable[Any], ranks: int = 1) -> Count:
    """
    >>> import torch
    >>> weight, bias = torch.nn.Parameter(torch.zeros(5, 3)), torch.nn.Parameter(torch.zeros(4), requires_grad=False)
    >>> _count([weight, bias]), _count([weight, bias], 2)
    (Count(all=19, trained=15), Count(all=11, trained=9))
    """
    total = Count()
    for p in parameters:
        own = math.ceil(len(p) / ranks) * (p.numel() // len(p)) if p.dim() and len(p) else p.numel()
        total += Count(own, own if p.requires_grad else 0)
    return total
