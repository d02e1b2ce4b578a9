"""Reward model from comparisons (Bradley and Terry 1952; Ouyang et al. 2022, arXiv:2203.02155, eq. 1).

    per pair   -log s(r_w - r_l - m) + eta (r_w + r_l)^2

m >= 0 is the margin by which the winner should lead (Llama 2, arXiv:2307.09288, eq. 2); eta centres the scores (Eisenstein et
al. 2023, arXiv:2312.09244), which the first term cannot: it sees differences only, so a constant added to every score of a
prompt changes nothing and a bias has gradient exactly 0.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tether.masked import full_precision


def reward_model_loss(
    chosen: Tensor,
    rejected: Tensor,
    *,
    margin: Tensor | None = None,
    center_coef: float = 0.0,
    soft_labels: Tensor | None = None,
    weights: Tensor | None = None,
    total: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """This micro-batch's share of the step's loss, and its metrics (B,) without gradient.

    `chosen`, `rejected` are scores (B,) or (B, heads): an ensemble's loss is the mean over its heads, each head learning as if
    alone. `margin` (B,). `soft_labels` (B,) is P(chosen is better), 0.5 for a tie: y -log s(d - m) + (1-y) -log s(-d - m), which is
    the same after swapping the two answers. `weights` (B,) weigh pairs: 1/(number of the prompt's pairs) makes each prompt of a
    K-way ranking count once. `total` is the sum of the weights (without weights: the pairs) of the whole step.

    Metrics: `loss/per_pair`, `accuracy` (strict: a tie of scores is wrong; rows labelled as ties are left out), `margin`,
    `mean_reward`, `reward/chosen`, `reward/rejected`, and with several heads `disagreement` (their standard deviation of the gap).

    >>> loss, metrics = reward_model_loss(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 0.0]))
    >>> round(loss.item(), 4), metrics["accuracy"].tolist()
    (0.5032, [1.0, 0.0])
    """
    if chosen.shape != rejected.shape or chosen.dim() not in (1, 2):
        raise ValueError(f"scores are (B,) or (B, heads) on both sides, got {tuple(chosen.shape)} and {tuple(rejected.shape)}")
    if center_coef < 0:
        raise ValueError(f"center_coef must not be negative, got {center_coef}")
    w, l = full_precision(chosen), full_precision(rejected)
    w, l = (w[:, None], l[:, None]) if w.dim() == 1 else (w, l)  # (B, heads)
    gap = w - l
    m = torch.zeros_like(gap[:, :1]) if margin is None else _row("margin", margin, gap)
    cost = -F.logsigmoid(gap - m)
    if soft_labels is not None:
        y = _row("soft_labels", soft_labels, gap)
        cost = y * cost - (1 - y) * F.logsigmoid(-gap - m)
    cost = (cost + center_coef * (w + l) ** 2).mean(1)  # (B,)

    if weights is None:
        loss = cost.sum() / max(len(cost) if total is None else total, 1)
    else:
        per_pair = _row("weights", weights, gap)[:, 0]
        divisor = float(per_pair.sum()) if total is None else total
        loss = (per_pair * cost).sum() / (divisor or 1)

    lead = gap.mean(1)
    metrics = {
        "loss/per_pair": cost,
        "accuracy": (lead > 0).to(lead.dtype),
        "margin": lead,
        "mean_reward": ((w + l) / 2).mean(1),
        "reward/chosen": w.mean(1),
        "reward/rejected": l.mean(1),
    }
    if soft_labels is not None:
        label = soft_labels.to(lead)
        metrics["accuracy"] = torch.where(label > 0.5, lead > 0, lead < 0)[label != 0.5].to(lead.dtype)
    if gap.shape[1] > 1:
        metrics["disagreement"] = gap.std(1) if len(gap) else gap.new_zeros(0)
    return loss, {name: value.detach() for name, value in metrics.items()}


def _row(name: str, values: Tensor, gap: Tensor) -> Tensor:
    if values.shape != gap.shape[:1]:
        raise ValueError(f"{name} is one number per pair, ({gap.shape[0]},), got {tuple(values.shape)}")
    return values.to(gap)[:, None]
