"""Policy-gradient losses: what is maximised per token, as a table over independent choices.

    surrogate    the per-token objective (`SURROGATES`), rho = exp(policy - old)
    mismatch     weights for samples drawn by another engine than the trainer (`MISMATCH`)
    KL           added in the loss, never multiplied by the mismatch weight
    reduction    how tokens become one number (`masked.MODES`)

A preset such as grpo or dapo is a row of these choices (`sheet.POLICY_PRESETS`). At the first update of a batch rho = 1, so the
clip is inactive and the gradient is that of REINFORCE; the loss value may then be 0 with a gradient that is not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tether.losses.kl import clamp_log_ratio, clamped, k3, kl_penalty
from tether.masked import full_precision, masked_mean, masked_sum, reduce, select


@dataclass(frozen=True)
class Clip:
    """Bounds on the ratio: 1 - low .. 1 + high. `dual` caps what a negative advantage can cost (Ye et al. 2020)."""

    low: float = 0.2
    high: float = 0.2
    dual: float | None = None
    lower: bool = False  # cispo: bound the weight from below as well

    def __post_init__(self) -> None:
        if not (0 <= self.low < 1 and self.high >= 0):
            raise ValueError(f"eps_low must lie in [0, 1) and eps_high must not be negative, got {self.low} and {self.high}")
        if self.dual is not None and not self.dual > 1:
            raise ValueError(f"dual_clip must be above 1, got {self.dual}")


def clipped_objective(ratio: Tensor, advantage: Tensor, clip: Clip) -> Tensor:
    """min(rho A, clip(rho) A); with dual clip, at least c A where A < 0 (Schulman et al. 2017, arXiv:1707.06347, eq. 7).

    >>> clipped_objective(torch.tensor([0.5, 1.5, 0.5, 1.5]), torch.tensor([1.0, 1.0, -1.0, -1.0]), Clip()).tolist()
    [0.5, 1.2000000476837158, -0.800000011920929, -1.5]
    """
    objective = torch.minimum(ratio * advantage, ratio.clamp(1 - clip.low, 1 + clip.high) * advantage)
    if clip.dual is not None:
        objective = torch.where(advantage < 0, torch.maximum(objective, clip.dual * advantage), objective)
    return objective


# --- surrogates: (objective, ratio), both (B, T), from masked-in log-probs, log-ratios, advantages --------------------------

Objective = tuple[Tensor, Tensor]


def reinforce(logp: Tensor, log_ratio: Tensor, mask: Tensor, advantage: Tensor, clip: Clip) -> Objective:
    return advantage * logp, torch.ones_like(logp)


def ppo(logp: Tensor, log_ratio: Tensor, mask: Tensor, advantage: Tensor, clip: Clip) -> Objective:
    ratio = clamp_log_ratio(log_ratio).exp()
    return clipped_objective(ratio, advantage, clip), ratio


def seq_ratio(logp: Tensor, log_ratio: Tensor, mask: Tensor, advantage: Tensor, clip: Clip) -> Objective:
    ratio = clamp_log_ratio(log_ratio.sum(-1, keepdim=True)).exp().expand_as(logp)
    return clipped_objective(ratio, advantage, clip), ratio


def gspo(logp: Tensor, log_ratio: Tensor, mask: Tensor, advantage: Tensor, clip: Clip) -> Objective:
    ratio = clamp_log_ratio(masked_mean(log_ratio, mask, -1)[:, None]).exp().expand_as(logp)
    return clipped_objective(ratio, advantage, clip), ratio


def gspo_token(logp: Tensor, log_ratio: Tensor, mask: Tensor, advantage: Tensor, clip: Clip) -> Objective:
    sequence = clamp_log_ratio(masked_mean(log_ratio, mask, -1)[:, None]).exp().detach()
    ratio = sequence * (logp - logp.detach()).exp()  # the value of gspo, the gradient path of the token
    return clipped_objective(ratio, advantage, clip), ratio


def cispo(logp: Tensor, log_ratio: Tensor, mask: Tensor, advantage: Tensor, clip: Clip) -> Objective:
    ratio = clamp_log_ratio(log_ratio).exp()
    weight = ratio.clamp(min=1 - clip.low if clip.lower else None, max=1 + clip.high).detach()
    return weight * advantage * logp, ratio


SURROGATES: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor, Clip], Objective]] = {
    "reinforce": reinforce,
    "ppo": ppo,
    "seq_ratio": seq_ratio,
    "gspo": gspo,
    "gspo_token": gspo_token,
    "cispo": cispo,
}
# One ratio per row: adding up its tokens would weigh rows by length.
SEQUENCE_LEVEL = frozenset({"seq_ratio", "gspo", "gspo_token"})


# --- weights for samples of another engine: constants from w_t = exp(old - sampler) ----------------------------------------


def _token_truncate(log_w: Tensor, mask: Tensor, low: float, high: float) -> Tensor:
    return clamp_log_ratio(log_w).exp().clamp(low, high)


def _token_mask(log_w: Tensor, mask: Tensor, low: float, high: float) -> Tensor:
    return _inside(clamp_log_ratio(log_w).exp(), low, high)


def _sequence_truncate(log_w: Tensor, mask: Tensor, low: float, high: float) -> Tensor:
    return clamp_log_ratio(log_w.sum(-1, keepdim=True)).exp().clamp(low, high).expand_as(log_w)


def _sequence_mask(log_w: Tensor, mask: Tensor, low: float, high: float) -> Tensor:
    return _inside(clamp_log_ratio(log_w.sum(-1, keepdim=True)).exp(), low, high).expand_as(log_w)


def _geo_mask_token_weight(log_w: Tensor, mask: Tensor, low: float, high: float) -> Tensor:
    mean = masked_mean(log_w, mask, -1)[:, None].exp()
    return torch.where((mean >= low) & (mean <= high), clamp_log_ratio(log_w).exp(), 0.0)


def _inside(w: Tensor, low: float, high: float) -> Tensor:
    return torch.where((w >= low) & (w <= high), w, 0.0)


MISMATCH: dict[str, Callable[[Tensor, Tensor, float, float], Tensor]] = {
    "token_truncate": _token_truncate,
    "token_mask": _token_mask,
    "sequence_truncate": _sequence_truncate,
    "sequence_mask": _sequence_mask,
    "geo_mask_token_weight": _geo_mask_token_weight,
}


def mismatch_weights(
    old_logp: Tensor, sampler_logp: Tensor, mask: Tensor, kind: str = "token_truncate", *, c_min: float = 0.0, c_max: float = 2.0
) -> Tensor:
    """Weights (B, T) that correct for a sampler whose distribution differs from the trainer's `old`; 1 where they agree.

    Rows or tokens that are masked out keep their place in the denominators.
    """
    if kind not in MISMATCH:
        raise ValueError(f"unknown mismatch weight {kind!r}; choose one of {', '.join(MISMATCH)}")
    if not 0 <= c_min <= c_max:
        raise ValueError(f"bounds must satisfy 0 <= c_min <= c_max, got {c_min} and {c_max}")
    log_w = (select(old_logp, mask) - select(sampler_logp, mask)).detach()
    return select(MISMATCH[kind](log_w, mask, c_min, c_max), mask)


# --- the loss ----------------------------------------------------------------------------------------------------------------


def policy_loss(
    logp: Tensor,
    old_logp: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    *,
    surrogate: str = "ppo",
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    dual_clip: float | None = None,
    cispo_lower: bool = False,
    weights: Tensor | None = None,
    ref_logp: Tensor | None = None,
    kl_coef: float = 0.0,
    kl_kind: str = "k3",
    kl_is_weight: bool = False,
    mode: str = "token-mean",
    any_mode: bool = False,
    total_tokens: float | None = None,
    total_rows: float | None = None,
    norm_constant: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """This micro-batch's share of the step's loss, and its metrics without gradient.

    `logp`, `old_logp`, `mask`, `weights` (from `mismatch_weights`), `ref_logp` are (B, T), `advantages` (B,) or (B, T). Everything but
    `logp` is constant. `kl_is_weight` multiplies the KL term by rho, which makes k1 and k3 unbiased (gradient through rho).
    Metrics are shares that add up over the micro-batches of a step: `clip_ratio/*` (active and binding; `out_of_band` counts
    ratios outside the bounds whatever the sign of A), `approx_kl_k1`, `ratio/mean`, `kl` (k3 to the reference) and, as a count,
    `ratio/clamped` (log-ratios beyond +-20).
    """
    if surrogate not in SURROGATES:
        raise ValueError(f"unknown surrogate {surrogate!r}; choose one of {', '.join(SURROGATES)}")
    if surrogate in SEQUENCE_LEVEL and mode != "seq-mean-token-mean" and not any_mode:
        raise ValueError(f"{surrogate} has one ratio per row: {mode} would weigh rows by length; use seq-mean-token-mean or any_mode=True")
    if old_logp is None and surrogate != "reinforce":
        raise ValueError(f"{surrogate} needs old_logp, the trainer's log-probs when the batch was sampled")
    if kl_coef and ref_logp is None:
        raise ValueError("kl_coef is set but there is no ref_logp")
    if kl_coef and kl_kind == "k1" and not kl_is_weight:
        raise ValueError("k1 in the loss has gradient 0 in expectation: use k2 or k3, kl_is_weight=True, or put k1 in the reward")

    # 1. Select before computing: nothing behind the mask is read.
    active = mask.bool()
    lp = select(logp, active)
    old = lp.detach() if old_logp is None else select(old_logp, active).detach()
    log_ratio = lp - old
    a = full_precision(advantages).detach()
    a = select(a if a.dim() == 2 else a[:, None].expand_as(lp), active)
    clip = Clip(eps_low, eps_high, dual_clip, cispo_lower)

    # 2. The objective per token, its weight, and the tie to the reference.
    objective, ratio = SURROGATES[surrogate](lp, log_ratio, active, a, clip)
    per_token = -objective if weights is None else -objective * select(weights, active).detach()
    if kl_coef and ref_logp is not None:
        penalty = kl_penalty(lp, ref_logp, active, kl_kind)
        per_token = per_token + kl_coef * (clamp_log_ratio(log_ratio).exp() * penalty if kl_is_weight else penalty)
    loss = reduce(per_token, active, mode, total_tokens=total_tokens, total_rows=total_rows, norm_constant=norm_constant)

    # 3. What happened. Padding has ratio 1 and KL 0 and would dilute every mean, so all of them use the mask.
    def share(x: Tensor) -> Tensor:
        return masked_mean(x.detach().to(lp.dtype), active, total=total_tokens)

    metrics = {"policy_loss": loss.detach(), "approx_kl_k1": share(-log_ratio)}
    if surrogate != "reinforce":
        below, above = ratio < 1 - clip.low, ratio > 1 + clip.high
        metrics |= {
            "clip_ratio/low_mean": share(below & (a < 0)),
            "clip_ratio/high_mean": share(above & (a > 0)),
            "clip_ratio/out_of_band": share(below | above),
            "ratio/mean": share(ratio),
            "ratio/clamped": masked_sum(clamped(log_ratio.detach()).to(lp.dtype), active),
        }
    if ref_logp is not None:
        metrics["kl"] = share(k3(lp - select(ref_logp, active)))
    return loss, metrics
