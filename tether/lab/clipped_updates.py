"""Listing 162 by the objective's gradient: several updates of one batch, clipped (Schulman et al. 2017, arXiv:1707.06347, eq. 7).

    max E_old[min(rho A, clip(rho, 0.8, 1.2) A)]        rho = p/p_old, A = reward - value of the old policy

No sampling: the expectation is a sum over the four actions. The listing visits each action once, so there are three weightings of the sum. The
loss is `losses.policy_gradient.policy_loss`, by autograd in float64.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tether.lab import as_printed
from tether.lab.bandit import Direction, ascend, expected_penalty, surrogate, vector

REWARDS, START = vector(as_printed.REWARDS), vector(as_printed.PPO_START)
BEST, WORST = 1, 2  # actions
INNER, OUTER, RATE, EPS = 4, 10, 0.1, 0.2
WEIGHTINGS = ("old probability", "1 per action", "1/4 per action")  # the first is the objective


@dataclass(frozen=True)
class Step:
    """One outer step: the policy after it, and its checks of the ratio, one for each action at each inner step.

    `below` and `above` count checks where the clip binds: beyond the band on the side that the advantage wants. The listing counts ratios
    beyond the band whatever the advantage; `Run.idle` says how many of those bind nothing.
    """

    probs: tuple[float, ...]
    smallest_ratio: float
    largest_ratio: float
    below: int
    above: int

    @property
    def clips(self) -> int:
        return self.below + self.above


@dataclass(frozen=True)
class Run:
    """`digits` are the nine of print, of the logits; empty for the others. `idle`: counted clips at which the minimum is not the clipped value."""

    steps: list[Step]
    logits: tuple[float, ...]
    digits: tuple[str, ...] = ()
    idle: int = 0

    @property
    def clips(self) -> int:
        return sum(s.clips for s in self.steps)

    def ends(self, first: int = 1, last: int | None = None) -> tuple[float, float]:
        """Smallest and largest ratio of the outer steps `first` to `last`, counted from 1."""
        steps = self.steps[first - 1 : last]
        return min(s.smallest_ratio for s in steps), max(s.largest_ratio for s in steps)


def listing(*, inner: int = INNER, outer: int = OUTER) -> Run:
    """What the listing prints."""
    run = as_printed.ppo(inner=inner, outer=outer)
    steps = [Step(tuple(float(p) for p in s.probs), float(s.smallest_ratio), float(s.largest_ratio), s.below, s.above) for s in run.steps]
    idle = sum(s.below + s.above - s.binding for s in run.steps)
    return Run(steps, tuple(float(z) for z in run.logits), tuple(f"{z:.9g}" for z in run.logits), idle)


def climb(
    weighting: str = WEIGHTINGS[0],
    *,
    inner: int = INNER,
    outer: int = OUTER,
    rate: float = RATE,
    beta: float = 0.0,
    direction: Direction = "reverse",
) -> Run:
    """`outer` batches, `inner` updates of each, by the gradient of the objective minus beta KL to the first policy."""
    logits, ref_logp, steps = START.clone(), START.log_softmax(0), []
    checks = len(REWARDS) if weighting == WEIGHTINGS[2] else 1  # what the loss divides by, and its metrics with it
    for _ in range(outer):
        old = logits.log_softmax(0)
        advantages = REWARDS - old.exp() @ REWARDS
        ratios: list[float] = []
        below = above = 0
        for _ in range(inner):
            z = logits.requires_grad_()
            logp = z.log_softmax(0)
            value, metrics = clipped(logp, old, advantages, weighting)
            objective = value - beta * expected_penalty(logp, ref_logp, direction) if beta else value
            (gradient,) = torch.autograd.grad(objective, z)
            logits = (z + rate * gradient).detach()

            ratios += (logp - old).exp().tolist()
            below += round(checks * metrics["clip_ratio/low_mean"].item())
            above += round(checks * metrics["clip_ratio/high_mean"].item())
        steps.append(Step(tuple(logits.softmax(0).tolist()), min(ratios), max(ratios), below, above))
    return Run(steps, tuple(logits.tolist()))


def clipped(logp: Tensor, old: Tensor, advantages: Tensor, weighting: str) -> tuple[Tensor, dict[str, Tensor]]:
    settings: dict[str, dict[str, Any]] = {
        "old probability": {"weights": old.exp(), "total_tokens": 1},
        "1 per action": {"total_tokens": 1},
        "1/4 per action": {},  # the mean over rows, which is policy_loss's own
    }
    return surrogate(logp, old, advantages, eps_low=EPS, eps_high=EPS, **settings[weighting])


def rested(beta: float, direction: Direction) -> Run:
    """Where the penalised objective comes to rest: one update a batch, so that the ratio is 1, and a rate that suits the curvature."""
    return climb(inner=1, outer=800, rate=2 / beta, beta=beta, direction=direction)


def pushes(ratio: float) -> tuple[float, float, float]:
    """When the policy has moved until the best action's ratio is `ratio`, the push by that action's own term of the surrogate:

    on its own logit as the listing prints it, on its own logit by the gradient, and on the worst action's logit by the gradient.
    """
    old = START.log_softmax(0)
    p = ratio * float(old[BEST].exp())
    logits = START.clone()
    logits[BEST] += vector([p]).logit()[0] - old[BEST].exp().logit()
    only = torch.zeros(4, dtype=torch.float64)
    only[BEST] = REWARDS[BEST] - old.exp() @ REWARDS
    moved = ascend(logits, lambda logp: clipped(logp, old, only, "1 per action")[0], 1.0) - logits
    return float(min(ratio, 1 + EPS) * only[BEST]) * (1 - p), float(moved[BEST]), float(moved[WORST])
