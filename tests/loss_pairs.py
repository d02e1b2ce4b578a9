"""Pairs made up for tests of the losses on comparisons."""

from __future__ import annotations

import math
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from tether.losses.preference import PREFERENCE_LOSSES, PairLogps, preference_loss
from tether.losses.sheet import loss_settings

EVERY_LOSS = sorted(PREFERENCE_LOSSES)
LOG2 = math.log(2)

finite = st.floats(-30, 30, allow_nan=False, width=32)


def pairs_of(c: Tensor, r: Tensor, c0: Tensor | None, r0: Tensor | None, n_c: Tensor | None = None, n_r: Tensor | None = None) -> PairLogps:
    return PairLogps(c, r, c0, r0, torch.full_like(c, 4) if n_c is None else n_c, torch.full_like(c, 3) if n_r is None else n_r)


def some_pairs(n: int = 5, seed: int = 0, grad: bool = False) -> PairLogps:
    g = torch.Generator().manual_seed(seed)
    c, r, c0, r0 = (-8 * torch.rand(n, generator=g, dtype=torch.float64) - 1 for _ in range(4))
    if grad:
        c.requires_grad_(), r.requires_grad_()
    lengths = torch.randint(1, 9, (2, n), generator=g)
    return pairs_of(c, r, c0, r0, lengths[0], lengths[1])


def settings_for(name: str) -> dict[str, Any]:
    return loss_settings(name, {})


def loss_of(pairs: PairLogps, name: str, **changes: float) -> Tensor:
    return preference_loss(pairs, name, **{**settings_for(name), **changes})[0]
