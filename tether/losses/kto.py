"""KTO (Ethayarajh et al. 2024, arXiv:2402.01306, eq. 8): answers marked good or bad, one at a time.

    h = log pi(y|x) - log ref(y|x), summed over the answer
    z0 = max(0, mean of log pi(y'|x) - log ref(y'|x))      y' = the answer to another prompt; a constant
    desirable     w_d (1 - s(beta (h - z0)))
    undesirable   w_u (1 - s(beta (z0 - h)))

z0 is a reference point, not a measurement of KL: it is biased and clamped by design.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tether.masked import full_precision


def kto_baseline(kl_policy_minus_ref: Tensor) -> tuple[Tensor, Tensor]:
    """(z0, raw) from the log-ratios (R,) of all mismatched rows of the whole step. Neither carries a gradient.

    The mean comes first and the clamp after: the mean of clamped values is biased up.

    >>> z0, raw = kto_baseline(torch.tensor([1.0, -3.0]))
    >>> z0.item(), raw.item()
    (0.0, -1.0)
    """
    if kl_policy_minus_ref.numel() == 0:
        raise ValueError("the reference point of KTO needs at least one mismatched row")
    raw = full_precision(kl_policy_minus_ref).detach().mean()
    return raw.clamp(min=0.0), raw


def kto_loss(
    policy: Tensor,
    ref: Tensor,
    labels: Tensor,
    z0: Tensor | float,
    *,
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
    total: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """This micro-batch's share of the step's loss, and its metrics without gradient.

    `policy`, `ref` (B,) are summed log-probabilities, `labels` (B,) is true (1) for good answers, `total` the number of rows of
    the whole step, both classes together. Metrics: `loss/per_row` (B,); `rewards/chosen`, `logps/chosen` over the good rows
    and `rewards/rejected`, `logps/rejected` over the bad ones, left out when the class is absent.
    """
    if not beta > 0:
        raise ValueError(f"beta must be above 0, got {beta}")
    policy, good = full_precision(policy), labels.bool()
    h = policy - full_precision(ref)
    z0 = torch.as_tensor(z0).to(h).detach()
    # 1 - s(x) = s(-x): stable on both sides.
    cost = torch.where(good, desirable_weight * torch.sigmoid(-beta * (h - z0)), undesirable_weight * torch.sigmoid(-beta * (z0 - h)))
    loss = cost.sum() / max(len(cost) if total is None else total, 1)
    metrics = {"loss/per_row": cost.detach()}
    for name, rows in (("chosen", good), ("rejected", ~good)):
        if bool(rows.any()):
            metrics[f"rewards/{name}"] = (beta * h.detach())[rows]
            metrics[f"logps/{name}"] = policy.detach()[rows]
    return loss, metrics


def class_balance(n_desirable: int, n_undesirable: int, desirable_weight: float = 1.0, undesirable_weight: float = 1.0) -> float:
    """w_d n_d / (w_u n_u); the paper keeps it between 1 and 4/3 (section 4.2).

    >>> class_balance(30, 10, undesirable_weight=3.0)
    1.0
    """
    if n_desirable < 1 or n_undesirable < 1:
        raise ValueError(f"the balance of two classes needs rows of both, got {n_desirable} and {n_undesirable}")
    return desirable_weight * n_desirable / (undesirable_weight * n_undesirable)
