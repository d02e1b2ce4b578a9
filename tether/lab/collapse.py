"""How the chosen answer loses while its loss falls: two answers that share a feature (likelihood displacement).

    log pi(y|x) = phi(x, y) . theta + bias(x, y) - log of the sum        the features are fixed, theta is learned

Both answers of a pair carry a feature that no other answer has, the rejected one more of it. A loss of the gap alone moves theta
along phi(chosen) - phi(rejected), so it lowers the shared weight, and the chosen answer falls with it where

    phi(chosen) . phi(rejected) > |phi(chosen)|^2        (the CHES score of Razin et al. 2024, arXiv:2410.08847)

or nearly so: the rejected answer's fall gives a little of its share back through the softmax, and a second pair that pushes the same shared
weight takes the chosen answer down further. What both lose goes to answers that no pair mentions.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from tether.losses.kto import kto_baseline, kto_loss
from tether.losses.preference import PairLogps, preference_loss
from tether.losses.sheet import loss_settings

# Two prompts, six answers: the chosen and rejected one of each prompt, and two that are nonsense to both.
PROMPTS, ANSWERS = 2, 6
CHOSEN, REJECTED = torch.tensor([0, 2]), torch.tensor([1, 3])  # of prompt 0 and 1
START = torch.tensor([[0.30, 0.30, 0.10, 0.10, 0.10, 0.10], [0.10, 0.10, 0.25, 0.35, 0.10, 0.10]], dtype=torch.float64)
REWARDS = torch.tensor([[1.0, 0.5, 0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 1.0, 0.5, 0.0, 0.0]], dtype=torch.float64)
LENGTH = 4  # tokens of every answer, for the losses that average over them
SHARED = (1.0, 1.5)  # how much of the shared feature the chosen and the rejected answer have
OWN = 0.6  # how much of a feature of its own each answer has
KTO_BETA = 0.1


@dataclass(frozen=True)
class Features:
    """`phi` (prompts, answers, weights): the shared feature first, then one of its own for every prompt and answer."""

    phi: Tensor

    @classmethod
    def made(cls, share: float = 1.0) -> Features:
        """`share` scales the feature that chosen and rejected have in common; 0: they have nothing in common."""
        phi = torch.zeros(PROMPTS, ANSWERS, 1 + PROMPTS * ANSWERS, dtype=torch.float64)
        phi[:, :, 1:] = OWN * torch.eye(PROMPTS * ANSWERS, dtype=torch.float64).view(PROMPTS, ANSWERS, -1)
        for x in range(PROMPTS):
            phi[x, CHOSEN[x], 0], phi[x, REJECTED[x], 0] = share * SHARED[0], share * SHARED[1]
        return cls(phi)

    def score(self, x: int = 0) -> float:
        """phi(chosen) . phi(rejected) - |phi(chosen)|^2 of prompt `x`: above 0, what separates the pair takes the chosen answer down."""
        chosen, rejected = self.phi[x, CHOSEN[x]], self.phi[x, REJECTED[x]]
        return float(chosen @ rejected - chosen @ chosen)

    def logps(self, theta: Tensor) -> Tensor:
        """(prompts, answers); theta 0 is `START`."""
        return (self.phi @ theta + START.log()).log_softmax(-1)


METHODS = {
    "DPO": "dpo",
    "DPO + NLL": "dpo_nll_seq",
    "DPOP": "dpop",
    "IPO": "ipo_avg",
    "KTO": "kto",
    "SimPO": "simpo",
    "ORPO": "orpo",
}


def loss(method: str, logps: Tensor) -> Tensor:
    """The loss of both pairs, with the settings that the method has by default."""
    rows = torch.arange(PROMPTS)
    chosen, rejected, start = logps[rows, CHOSEN], logps[rows, REJECTED], START.log()
    ref = start[rows, CHOSEN], start[rows, REJECTED]
    if method == "kto":
        other = rows.flip(0)  # the pair of the other prompt: answers that do not belong here
        mismatched = torch.cat([(logps - start)[rows, side[other]] for side in (CHOSEN, REJECTED)])
        z0, _ = kto_baseline(mismatched)
        labels = torch.tensor([True] * PROMPTS + [False] * PROMPTS)
        return kto_loss(torch.cat([chosen, rejected]), torch.cat(ref), labels, z0, beta=KTO_BETA)[0]
    tokens = torch.full((PROMPTS,), float(LENGTH), dtype=torch.float64)
    return preference_loss(PairLogps(chosen, rejected, *ref, tokens, tokens), method, **loss_settings(method, {}))[0]


@dataclass
class Path:
    """One training run, a value before each update and after the last: means over the two prompts, log-probabilities in nats."""

    loss: list[float] = field(default_factory=list)
    chosen: list[float] = field(default_factory=list)  # log-probability minus that at the start
    rejected: list[float] = field(default_factory=list)
    others: list[float] = field(default_factory=list)  # probability of all answers that the prompt's pair does not mention
    reward: list[float] = field(default_factory=list)  # expected

    @property
    def gap(self) -> list[float]:
        return [c - r for c, r in zip(self.chosen, self.rejected, strict=True)]

    @property
    def updates(self) -> int:
        return len(self.loss) - 1


FIRST_STEP = 0.04  # length of the first step: methods differ in direction and later in size, not in where they start
MOST_UPDATES = 4000


def train(method: str, *, share: float = 1.0, until_gap: float = 4.0) -> Path:
    """Gradient descent until the gap of the two log-ratios has grown to `until_gap` nats."""
    features = Features.made(share)
    theta = torch.zeros(features.phi.shape[-1], dtype=torch.float64, requires_grad=True)
    rows, path, rate = torch.arange(PROMPTS), Path(), 0.0
    while True:
        logps = features.logps(theta)
        value = loss(METHODS[method], logps)
        moved, p = (logps - START.log()).detach(), logps.detach().exp()
        path.loss.append(value.item())
        path.chosen.append(float(moved[rows, CHOSEN].mean()))
        path.rejected.append(float(moved[rows, REJECTED].mean()))
        path.others.append(float((1 - p[rows, CHOSEN] - p[rows, REJECTED]).mean()))
        path.reward.append(float((p * REWARDS).sum(-1).mean()))
        if path.gap[-1] >= until_gap or path.updates == MOST_UPDATES:
            return path
        (gradient,) = torch.autograd.grad(value, theta)
        rate = rate or FIRST_STEP / float(gradient.norm())
        theta = (theta - rate * gradient).detach().requires_grad_()
