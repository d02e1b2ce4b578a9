"""The clipped objective, one sampled token at a time: what it is worth, and what it pushes (Schulman et al. 2017, arXiv:1707.06347, eq. 7).

    L(rho) = min(rho A, clip(rho, 1 - eps, 1 + eps) A)        rho = new probability / old probability, A = advantage

Every number comes from `losses.policy_gradient.policy_loss` and its gradient by autograd, at old log-probability 0, so that the
log-probability of the token is log rho.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tether.lab.catalogue import NAMES
from tether.lab.experiment import Difference, Experiment, Result, Variant
from tether.losses.policy_gradient import policy_loss
from tether.report.charts import Band, Chart, Series, line_chart
from tether.report.numbers import number, signed
from tether.report.view import Section, Table

EPS = 0.2
DUAL = 3.0
LECTURE_ROWS = [(a, rho) for a in (1.0, -1.0) for rho in (0.5, 1.0, 1.5)]
# No clip: nothing above, and a lower bound that no probability ratio of this page reaches (eps_low must stay below 1).
NO_CLIP: dict[str, Any] = {"eps_low": 1 - 2.0**-53, "eps_high": math.inf}
# Name on the page, settings of the loss.
RULES: dict[str, dict[str, Any]] = {
    "PPO": {"surrogate": "ppo"},
    "PPO, dual clip 3": {"surrogate": "ppo", "dual_clip": DUAL},
    "CISPO": {"surrogate": "cispo"},
    "REINFORCE": {"surrogate": "reinforce"},
}
COLOURS = {"PPO": 1, "PPO, dual clip 3": 2, "CISPO": 3, "REINFORCE": 5}


@dataclass(frozen=True)
class Push:
    """The objective of one token and its derivatives, by the ratio and by the token's log-probability (d/d log p = rho d/d rho)."""

    value: float
    by_ratio: float
    by_logp: float


def push(ratio: float, advantage: float, **settings: Any) -> Push:
    """`settings` are those of `policy_loss`; the bounds are 1 - 0.2 and 1 + 0.2 unless they say otherwise."""
    logp = torch.tensor([[math.log(ratio)]], dtype=torch.float64, requires_grad=True)
    one = torch.ones(1, 1, dtype=torch.float64)
    value, _ = policy_loss(logp, torch.zeros_like(one), advantage * one, one, **{"eps_low": EPS, "eps_high": EPS, **settings})
    (gradient,) = torch.autograd.grad(-value, logp)
    return Push(-value.item(), gradient.item() / ratio, gradient.item())


@dataclass(frozen=True)
class Row:
    """One row of the lecture's tables. `clipped` is clip(rho) A, whether or not it is the smaller one."""

    advantage: float
    ratio: float
    unclipped: float
    clipped: float
    smaller: float
    gradient: float  # by the ratio


def lecture_rows() -> list[Row]:
    rows = []
    for advantage, ratio in LECTURE_ROWS:
        here = push(ratio, advantage)
        rows.append(Row(advantage, ratio, push(ratio, advantage, **NO_CLIP).value, _clip(ratio) * advantage, here.value, here.by_ratio))
    return rows


def _clip(ratio: float) -> float:
    return min(max(ratio, 1 - EPS), 1 + EPS)


def flat(advantage: float, ratios: list[float], **settings: Any) -> list[float]:
    """Those of `ratios` at which the objective pushes nothing."""
    return [r for r in ratios if push(r, advantage, **settings).by_ratio == 0]


# Without a clip: not REINFORCE, but the gradient where the policy is now -----------------------------------------------------------

OLD = torch.tensor([0.5, 0.3, -0.2, 0.1], dtype=torch.float64)  # four answers, the policy that sampled
REWARDS = torch.tensor([2.0, 5.0, 1.0, 3.0], dtype=torch.float64)


def moved_gradients(step: float) -> dict[str, Tensor]:
    """Gradients (4,) by the logits, expected over answers that `OLD` sampled, when the policy has moved from there by `step`.

    The move is along the gradient itself. "exact" is that of the expected reward at the moved policy.
    """
    start = OLD.clone().requires_grad_()
    (direction,) = torch.autograd.grad(start.softmax(0) @ REWARDS, start)
    logits = (OLD + step * direction).requires_grad_()
    (exact,) = torch.autograd.grad(logits.softmax(0) @ REWARDS, logits)
    old = OLD.log_softmax(0)
    advantages = REWARDS - old.exp() @ REWARDS  # from the value when the answers were sampled

    def expected(**settings: Any) -> Tensor:
        logp = logits.log_softmax(0)[:, None]
        # Each answer once, weighted by the probability that it was sampled: the expectation itself.
        value, _ = policy_loss(logp, old[:, None], advantages, torch.ones(4, 1), weights=old.exp()[:, None], total_tokens=1, **settings)
        (gradient,) = torch.autograd.grad(-value, logits)
        return gradient

    return {
        "exact": exact,
        "no clip": expected(**NO_CLIP),
        "REINFORCE": expected(surrogate="reinforce"),
        "clip 0.2": expected(eps_low=EPS, eps_high=EPS),
    }


# The page --------------------------------------------------------------------------------------------------------------------------


def run(variant: Variant) -> Result:
    rows = lecture_rows()
    ones = {r: push(r, 1.0, **NO_CLIP).by_logp for r in (0.5, 1.0, 1.5)}
    return Result(
        see=(
            "The minimum is flat, and pushes nothing, only where the ratio has already gone the way the advantage wants: "
            "above 1.2 for a good token, below 0.8 for a bad one.",
            "A bad token that became likelier is pushed down at full strength however far it went: the clip limits gains, never losses.",
        ),
        tables=[_rows_table(rows), _no_clip_table(), _moved_table()],
        sections=[
            Section(
                "What a token is worth",
                [
                    "L(ρ) = min(ρ·A, clip(ρ, 0.8, 1.2)·A). Across: the ratio ρ of the new probability to the old one. "
                    "Upwards: the objective. Shaded: its gradient is 0."
                ],
                [surrogate_chart(1.0), surrogate_chart(-1.0)],
            ),
            Section(
                "What it pushes",
                [
                    "∂L/∂log π: how hard the token's log-probability is pushed up (above 0) or down (below 0). "
                    "PPO pushes with ρ·A or not at all. CISPO, min(ρ, 1.2)·A, never lets a token go. The dual clip lets go of a bad token "
                    "beyond ρ = 3, where PPO pushes harder and harder. At ratio 1 all are the same.",
                ],
                [push_chart(1.0), push_chart(-1.0)],
            ),
        ],
        differences=[
            Difference(
                "ε = ∞, A = +1: push on log π at ρ = 0.5, 1, 1.5",
                "1, 1, 1 (REINFORCE)",
                ", ".join(number(ones[r]) for r in ones),
                "Without a clip the objective is ρ·A. Its gradient is that of REINFORCE only where ρ = 1, at the first update of a batch.",
            )
        ],
    )


def _rows_table(rows: list[Row]) -> Table:
    def one(x: float) -> str:
        return f"{x:.1f}".replace("-", "−")

    return Table(
        ["", "ρ", "ρ·A", "clip(ρ)·A", "minimum", "∂/∂ρ"],
        [
            [f"A = {signed(r.advantage)}", one(r.ratio), one(r.unclipped), one(r.clipped), one(r.smaller), number(r.gradient + 0.0)]
            for r in rows
        ],
        "The lecture's six rows, ε = 0.2",
        "All of the lecture's figures; the gradient beside them by autograd.",
        frozenset(range(1, 6)),
    )


def _no_clip_table() -> Table:
    ratios = (0.5, 0.9, 1.0, 1.1, 1.5, 2.0)
    kinds = {"REINFORCE": RULES["REINFORCE"], "PPO, ε = ∞": NO_CLIP, "PPO, ε = 0.2": RULES["PPO"]}
    return Table(
        ["at ρ =", *(str(r) for r in ratios)],
        [[name, *(number(push(r, 1.0, **settings).by_logp + 0.0) for r in ratios)] for name, settings in kinds.items()],
        "Without a clip",
        "How hard a good token (A = +1) is pushed: ∂L/∂log π.",
        frozenset(range(1, 7)),
    )


def _moved_table() -> Table:
    moved = {step: moved_gradients(step) for step in (0.0, 0.5)}
    kinds = {"no clip": "PPO, ε = ∞", "REINFORCE": "REINFORCE", "clip 0.2": "PPO, ε = 0.2"}

    def distance(found: dict[str, Tensor], kind: str) -> str:
        share = float((found[kind] - found["exact"]).norm() / found["exact"].norm())
        return number(share) if share > 1e-14 else "0"

    return Table(
        ["", "at the policy that sampled", "after a step away from it"],
        [[label, *(distance(found, kind) for found in moved.values())] for kind, label in kinds.items()],
        "How far from the exact gradient",
        "Four answers, each weighted by the probability that it was sampled: |expected gradient − exact gradient| / |exact gradient|. "
        "Once the policy has moved, the ratio makes old samples count as new ones would; REINFORCE has no such correction, "
        "and the clip leaves the exact gradient on purpose.",
        frozenset({1, 2}),
    )


def surrogate_chart(advantage: float) -> Chart:
    ratios = [(2 * i + 1) / 100 for i in range(100)]  # none at the edges of the clip, where the slope jumps
    none = flat(advantage, ratios)
    edge = Band(min(none) - 0.01, max(none) + 0.01, "gradient 0")
    values = [(r, push(r, advantage).value) for r in ratios]
    return line_chart(
        [
            Series("ρ·A", [(r, push(r, advantage, **NO_CLIP).value) for r in ratios], 5, dashed=True),
            Series("clip(ρ)·A", [(r, _clip(r) * advantage) for r in ratios], 2, dashed=True),
            Series("the minimum", values, 1),
        ],
        title="A good token: A = +1" if advantage > 0 else "A bad token: A = −1",
        x_label="ratio ρ",
        y_label="objective",
        whole_x=False,
        smooth=False,
        bands=[edge],
        limits=(0.0, 2.0) if advantage > 0 else (-2.0, 0.0),
    )


def push_chart(advantage: float) -> Chart:
    ratios = [(2 * i + 1) / 80 for i in range(160)]
    return line_chart(
        [
            Series(name, [(r, push(r, advantage, **settings).by_logp) for r in ratios], COLOURS[name], dashed=name != "PPO")
            for name, settings in RULES.items()
            if not (advantage > 0 and "dual" in name)  # the dual clip bounds bad tokens only
        ],
        title="A good token: A = +1" if advantage > 0 else "A bad token: A = −1",
        x_label="ratio ρ",
        y_label="push on log π",
        whole_x=False,
        smooth=False,
        with_zero=True,
    )


EXPERIMENT = Experiment("clipping", "The clipped objective", NAMES["clipping"], run)
