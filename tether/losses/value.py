"""The critic's loss (Schulman et al. 2017, section 5; clipped as in the authors' code).

0.5 mean over active tokens of max((V - ret)^2, (clip(V, V_old - c, V_old + c) - ret)^2)      ret = A + V_old, A unwhitened
"""

from __future__ import annotations

import torch
from torch import Tensor

from tether.masked import masked_mean, reduce, select


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    *,
    value_clip: float | None = 0.2,
    mode: str = "token-mean",
    total_tokens: float | None = None,
    total_rows: float | None = None,
    norm_constant: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """This micro-batch's share of the step's loss. All tensors (B, T); `old_values` and `returns` are constants.

    Metrics are shares too: over the micro-batches of a step they add up. `val/clipfrac` = share of active tokens whose clipped
    error is the larger one, `val/error` = mean squared error without clip.
    """
    if value_clip is not None and not value_clip > 0:
        raise ValueError(f"value_clip must be above 0 or None, got {value_clip}")
    v, old, ret = select(values, mask), select(old_values, mask).detach(), select(returns, mask).detach()
    error = (v - ret) ** 2
    clipped = error if value_clip is None else (torch.minimum(torch.maximum(v, old - value_clip), old + value_clip) - ret) ** 2
    worst = torch.maximum(error, clipped)
    loss = 0.5 * reduce(worst, mask, mode, total_tokens=total_tokens, total_rows=total_rows, norm_constant=norm_constant)
    metrics = {
        "val/clipfrac": masked_mean((clipped > error).to(v.dtype), mask, total=total_tokens),
        "val/error": masked_mean(error, mask, total=total_tokens),
    }
    return loss, {name: x.detach() for name, x in metrics.items()}


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float | None:
    """1 - Var(returns - values)/Var(returns) over active tokens; None when the returns do not vary."""
    active = mask.bool()
    v, ret = select(values, active)[active], select(returns, active)[active]
    spread = ret.var(correction=0) if ret.numel() else torch.tensor(0.0)
    return float(1 - (ret - v).var(correction=0) / spread) if spread > 0 else None
