"""Supervised fine-tuning: the mean negative log-probability of the trained tokens.

    L = -(1/D) sum over trained tokens of log pi(token | its past)        D = trained tokens of the whole optimiser step

Dividing each micro-batch by its own D is the common mistake: short rows then weigh too much.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tether.masked import full_precision, reduce_rows


def sft_loss(
    logps: Tensor,
    *,
    total_tokens: float | None = None,
    mode: str = "token-mean",
    row: Tensor | None = None,
    n_rows: int | None = None,
    total_rows: float | None = None,
    norm_constant: float | None = None,
) -> Tensor:
    """Loss of the trained tokens' log-probabilities `logps` (M,), all rows in one stream: this micro-batch's share of the step.

    `total_tokens` is D above; left out, these M tokens are the whole step. The modes other than `token-mean` weigh rows, so they
    need `row` (M,), the row of each token, and `n_rows`, the rows of this micro-batch (empty ones included).

    >>> sft_loss(torch.tensor([-1.0, -2.0, -6.0])).item()
    3.0
    """
    nll = -full_precision(logps)
    if mode == "token-mean":
        sums, counts = nll.sum().reshape(1), torch.tensor([nll.numel()], device=nll.device)
    elif row is None or n_rows is None:
        raise ValueError(f"{mode} weighs rows: pass row (M,) and n_rows")
    else:
        sums = nll.new_zeros(n_rows).index_add(0, row, nll)
        counts = torch.bincount(row, minlength=n_rows)
    return reduce_rows(sums, counts, mode, total_tokens=total_tokens, total_rows=total_rows, norm_constant=norm_constant)
