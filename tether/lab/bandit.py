"""A policy over a handful of actions: softmax of free logits, small enough that every expectation is a sum.

    reverse   max E_p[r] - beta KL(p || ref)      p* = ref exp(r/beta)/Z, value beta log Z      (Korbak et al. 2022, arXiv:2205.11275)
    forward   max E_p[r] - beta KL(ref || p)      p* = beta ref/(lam - r), lam > max r such that it adds up to 1

An action is a row of one token, so everything goes through the losses that train language models. Tensors are float64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from tether.losses.kl import k1, kl_penalty
from tether.losses.policy_gradient import policy_loss

Direction = Literal["reverse", "forward"]
# Which estimator in the loss has which gradient, with samples of the policy: k2 that of KL(p || ref), k3 that of KL(ref || p).
IN_THE_LOSS: dict[Direction, str] = {"reverse": "k2", "forward": "k3"}


def vector(values: Sequence[float]) -> Tensor:
    """(A,), float64."""
    return torch.tensor(values, dtype=torch.float64)


def kl(logp: Tensor, ref_logp: Tensor, direction: Direction = "reverse") -> Tensor:
    """KL(p || ref), or forward KL(ref || p), in nats, from log-probabilities (..., A): the expectation of k1."""
    p, q = (logp, ref_logp) if direction == "reverse" else (ref_logp, logp)
    return torch.where(p > -torch.inf, p.exp() * k1(p - q), 0.0).sum(-1)


@dataclass(frozen=True)
class Optimum:
    """The best policy (A,), its value J*, what it earns and how far it went (in the direction it was asked about)."""

    p: Tensor
    value: float
    reward: float
    kl: float

    @classmethod
    def of(cls, logp: Tensor, rewards: Tensor, ref_logp: Tensor, beta: float, direction: Direction) -> Optimum:
        reward, distance = float(logp.exp() @ rewards), float(kl(logp, ref_logp, direction))
        return cls(logp.exp(), reward - beta * distance, reward, distance)


def optimum(rewards: Tensor, ref_logp: Tensor, beta: float, direction: Direction = "reverse") -> Optimum:
    """The policy that maximises E[r] - beta KL in closed form; `beta` above 0. Its `value` is beta log Z for the reverse direction."""
    if not beta > 0:
        raise ValueError(f"beta must be above 0, got {beta}; without a penalty all mass goes to the best action")
    logp = (ref_logp + rewards / beta).log_softmax(0) if direction == "reverse" else _forward_optimum(rewards, ref_logp, beta)
    return Optimum.of(logp, rewards, ref_logp, beta, direction)


def _forward_optimum(rewards: Tensor, ref_logp: Tensor, beta: float) -> Tensor:
    """log p*: the sum over actions of beta ref/(lam - r) falls in lam, from above 1 to at most 1 over the bracket, so bisection finds lam."""
    best, ref = rewards.max(), ref_logp.exp()
    below = best - rewards  # lam - r = (lam - max r) + below: no cancellation where lam is close to the best reward
    low, high = beta * ref[rewards.argmax()] * 0.5, torch.tensor(beta, dtype=torch.float64)
    for _ in range(200):
        middle = (low + high) / 2
        too_much = bool((beta * ref / (middle + below)).sum() > 1)
        low, high = (middle, high) if too_much else (low, middle)
    return (beta * ref / ((low + high) / 2 + below)).log().log_softmax(0)


# Learning ------------------------------------------------------------------------------------------------------------------------------


def surrogate(
    logp: Tensor, old_logp: Tensor, advantages: Tensor, *, weights: Tensor | None = None, **settings: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    """The objective to climb, `-policy_loss`, of actions (N,) that are rows of one token, and its metrics. `settings` are the loss's."""
    each = None if weights is None else weights[:, None]
    if "ref_logp" in settings:
        settings["ref_logp"] = settings["ref_logp"][:, None]
    loss, metrics = policy_loss(logp[:, None], old_logp[:, None], advantages, torch.ones_like(logp)[:, None], weights=each, **settings)
    return -loss, metrics


def expected_penalty(logp: Tensor, ref_logp: Tensor, direction: Direction) -> Tensor:
    """A number whose gradient is that of the KL: the estimator of that direction on each action, weighted by its probability now."""
    each = kl_penalty(logp[:, None], ref_logp[:, None], torch.ones_like(logp)[:, None], IN_THE_LOSS[direction])
    return logp.detach().exp() @ each[:, 0]


def ascend(logits: Tensor, objective: Callable[[Tensor], Tensor], rate: float) -> Tensor:
    """Logits (A,) after one step up the gradient of `objective`, a function of the log-probabilities (A,)."""
    z = logits.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(objective(z.log_softmax(-1)), z)
    return logits.detach() + rate * gradient
