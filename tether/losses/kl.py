"""How far the policy is from its reference: per-token estimators, their place, and the controller of their weight.

With delta = log pi - log ref on a sampled token (Schulman 2020, Approximating KL divergence):

    k1 = delta              unbiased, any sign; in the loss its gradient is 0 in expectation: it belongs in the reward
    k2 = delta^2 / 2        biased value; in the loss its gradient is that of KL(pi, ref)
    k3 = exp(-delta)-1+delta    unbiased, never negative; in the loss its gradient is that of KL(ref, pi), close near ref;
                                in the reward its pull cancels to leading order
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tether.masked import full_precision, masked_sum, select

LARGEST_LOG_RATIO = 20.0  # beyond e^20 a ratio says that something is broken, and overflows what it is multiplied with


def clamp_log_ratio(delta: Tensor) -> Tensor:
    """`delta` within +-20, to be exponentiated. Count what `clamped` says, so that it never happens in silence."""
    return delta.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)


def clamped(delta: Tensor) -> Tensor:
    """Where `clamp_log_ratio` changes something, as booleans."""
    return delta.abs() > LARGEST_LOG_RATIO


def k1(delta: Tensor) -> Tensor:
    return delta


def k2(delta: Tensor) -> Tensor:
    return delta**2 / 2


def k3(delta: Tensor) -> Tensor:
    held = clamp_log_ratio(delta)
    return torch.expm1(-held) + held


KL_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}


def kl_penalty(logp: Tensor, ref_logp: Tensor, mask: Tensor, kind: str = "k3") -> Tensor:
    """Per-token estimate (B, T) of the divergence from the reference; 0, with gradient 0, at masked places.

    >>> kl_penalty(torch.tensor([-1.0]), torch.tensor([-1.5]), torch.tensor([1]), "k3").item()
    0.10653066635131836
    """
    if kind not in KL_ESTIMATORS:
        raise ValueError(f"unknown KL estimator {kind!r}; choose one of {', '.join(KL_ESTIMATORS)}")
    return KL_ESTIMATORS[kind](select(logp, mask) - select(ref_logp, mask).detach())


def penalised_rewards(rewards: Tensor, old_logp: Tensor, ref_logp: Tensor, mask: Tensor, coef: float) -> Tensor:
    """R - coef * sum_t (old - ref): the penalty (k1, unbiased) in the reward of the whole row (B,), before any baseline."""
    return full_precision(rewards) - coef * masked_sum(select(old_logp, mask) - select(ref_logp, mask), mask, -1)


def shaped_rewards(rewards: Tensor, old_logp: Tensor, ref_logp: Tensor, mask: Tensor, *, kl_coef: float, kind: str = "k1") -> Tensor:
    """Per-token rewards (B, T): -kl_coef * k_t everywhere, plus the row's reward (B,) at its last active token.

    Exactly one token receives the score; a row without active tokens receives nothing.
    """
    if not bool(torch.isfinite(rewards).all()):
        raise ValueError("a row without a finite reward cannot be shaped: mask it out and leave it out of the statistics first")
    active = mask.bool()
    shaped = select(-kl_coef * kl_penalty(old_logp.detach(), ref_logp, active, kind), active)
    places = torch.arange(active.shape[-1], device=active.device)
    last = torch.where(active, places, -1).amax(-1, keepdim=True)  # (B, 1); -1 for an empty row
    return shaped + torch.where(places == last, full_precision(rewards)[:, None], 0.0)


@dataclass
class AdaptiveKL:
    """Raises the KL coefficient when KL is above its target and lowers it below (Ziegler et al. 2019, arXiv:1909.08593, section 2.2).

    beta <- beta (1 + clip(KL/target - 1, -0.2, 0.2) n/horizon), n = episodes since the last update, KL in nats per sequence.
    The paper writes 0.1 in place of n/horizon; this is the form of its code. `value` is the state: keep it in checkpoints.

    >>> round(AdaptiveKL(0.2, target=6.0).update(1.0, n=256), 9)
    0.198976
    """

    value: float
    target: float = 6.0
    horizon: float = 10000.0

    def __post_init__(self) -> None:
        if not (self.value > 0 and self.target > 0 and self.horizon > 0):
            raise ValueError(f"coefficient, target and horizon must be above 0, got {self.value}, {self.target}, {self.horizon}")

    def update(self, kl: float, n: int) -> float:
        if n >= 5 * self.horizon:
            raise ValueError(f"{n} episodes per update against a horizon of {self.horizon:g}: the coefficient could reach 0 or below")
        self.value *= 1 + min(max(kl / self.target - 1, -0.2), 0.2) * n / self.horizon
        return self.value
