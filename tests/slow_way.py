"""Numbers in float64, and what can be worked out from them without the package: derivatives and divergences the slow way."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import settings
from torch import Tensor

quick = settings(max_examples=25, deadline=None)


def t(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def kl_full(logits: Tensor, ref_logits: Tensor) -> Tensor:
    """Exact KL(pi, ref) of each state from logits (..., V) over the vocabulary -> (...)."""
    logp, ref = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    return (logp.exp() * (logp - ref)).sum(-1)


def slow_derivative(f: Any, x: Tensor, h: float = 1e-6) -> Tensor:
    """Central differences, one coordinate at a time."""
    out = torch.zeros_like(x)
    for i in range(x.numel()):
        step = torch.zeros_like(x)
        step.view(-1)[i] = h
        out.view(-1)[i] = (f(x + step) - f(x - step)) / (2 * h)
    return out
